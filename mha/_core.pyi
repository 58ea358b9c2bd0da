"""The C core: its functions take their arguments by position; those of mha have the keywords.

A weight is an array (in, out), or what `pack_weight` made of one.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

num_threads_variable: ContextVar[int]

def linear(
    x: ArrayLike, weight: object, bias: ArrayLike | None, /
) -> NDArray[Any]: ...
def pack_weight(weight: ArrayLike, /) -> object: ...
def split_heads(x: ArrayLike, num_heads: int, /) -> NDArray[Any]: ...
def merge_heads(x: ArrayLike, /) -> NDArray[Any]: ...
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: ArrayLike | None,
    bias: ArrayLike | None, key_lengths: ArrayLike | None, causal: bool,
    query_offset: ArrayLike | None, window: tuple[int | None, int | None] | None,
    scale: float | None, softcap: float | None, empty_rows: str, dropout: float, seed: int,
    return_weights: bool, return_lse: bool, out: NDArray[Any] | None, return_statistics: bool, /
) -> Any: ...
def scaled_dot_product_attention_backward(
    grad_output: ArrayLike, grad_lse: ArrayLike | None, output: NDArray[Any],
    statistics: NDArray[Any], wrt: int, additive_w: ArrayLike | None, query: ArrayLike,
    key: ArrayLike, value: ArrayLike, mask: ArrayLike | None, bias: ArrayLike | None,
    key_lengths: ArrayLike | None, causal: bool, query_offset: ArrayLike | None,
    window: tuple[int | None, int | None] | None, scale: float | None, softcap: float | None,
    empty_rows: str, dropout: float, seed: int, /
) -> tuple[NDArray[Any] | None, ...]: ...
def additive_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: object, W_k: object,
    w_v: ArrayLike, mask: ArrayLike | None, bias: ArrayLike | None,
    key_lengths: ArrayLike | None, causal: bool, query_offset: ArrayLike | None,
    window: tuple[int | None, int | None] | None, scale: float | None, softcap: float | None,
    empty_rows: str, dropout: float, seed: int, return_weights: bool, keep_steps: bool, /
) -> Any: ...
def multi_head_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: object, W_k: object, W_v: object,
    W_o: object, b_q: ArrayLike | None, b_k: ArrayLike | None, b_v: ArrayLike | None,
    b_o: ArrayLike | None, num_heads: int, num_kv_heads: int | None, head_gate: ArrayLike | None,
    mask: ArrayLike | None, bias: ArrayLike | None, key_lengths: ArrayLike | None, causal: bool,
    query_offset: ArrayLike | None, window: tuple[int | None, int | None] | None,
    scale: float | None, softcap: float | None, empty_rows: str, dropout: float, seed: int,
    return_weights: bool, return_lse: bool, dtype: DTypeLike | None, keep_steps: bool, /
) -> Any: ...
def merge_attention(
    outputs: Sequence[ArrayLike], lses: Sequence[ArrayLike], /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def dropout_mask(shape: tuple[int, ...], p: float, seed: int, /) -> NDArray[np.bool_]: ...
def get_num_threads() -> int: ...
def set_num_threads(num_threads: int, /) -> None: ...
def checked_num_threads(num_threads: int, /) -> int: ...
def instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...
