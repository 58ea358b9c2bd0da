"""The C core: its functions take their arguments by position and by keyword, with no defaults but
for flags; those of mha have the docstrings.

A weight is an array (in, out), or what `pack_weight` made of one. With save=True a function returns
(results, kept) instead of its results; its _backward takes `kept` and returns gradients by name.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._functions.options import AttentionOptions

OPTIONS: tuple[str, ...]
num_threads_variable: ContextVar[int]

def linear(
    x: ArrayLike, weight: object, bias: ArrayLike | None, /, *, save: bool = False
) -> Any: ...
def linear_backward(
    kept: object, grad_output: ArrayLike, grad_lse: None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def check_block_mask(record: object, /) -> None: ...
def pack_weight(weight: ArrayLike, /) -> object: ...
def as_array(object: object, name: str, /) -> NDArray[Any]: ...
def round_numbers(x: NDArray[Any], out: NDArray[Any], /) -> None: ...
def arrays_of_tensors(
    types: tuple[type, ...], exchange: object, functions: tuple[Any, Any, Any],
    tensors: tuple[Any, ...], /
) -> list[NDArray[Any] | None] | None: ...
def tensor_of_array(exchange: object, array: NDArray[Any], by_token: bool, /) -> Any: ...
def split_heads(x: ArrayLike, num_heads: int, /) -> NDArray[Any]: ...
def merge_heads(x: ArrayLike, /) -> NDArray[Any]: ...
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, options: AttentionOptions, /, *,
    return_weights: bool = False, return_lse: bool = False, out: NDArray[Any] | None = None,
    save: bool = False, head_gate: ArrayLike | None = None, exact_lse: bool = False
) -> Any: ...
def scaled_dot_product_attention_backward(
    kept: object, grad_output: ArrayLike, grad_lse: ArrayLike | None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def saved_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike, lse: ArrayLike,
    options: AttentionOptions, /
) -> object: ...
def scaled_dot_product_attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
    key_starts: ArrayLike | None, options: AttentionOptions, /, *, return_lse: bool = False,
    save: bool = False, head_gate: ArrayLike | None = None
) -> Any: ...
def scaled_dot_product_attention_varlen_backward(
    kept: object, grad_output: ArrayLike, grad_lse: ArrayLike | None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def additive_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: object, W_k: object,
    w_v: ArrayLike, options: AttentionOptions, /, *, return_weights: bool = False,
    save: bool = False
) -> Any: ...
def additive_attention_backward(
    kept: object, grad_output: ArrayLike, grad_lse: ArrayLike | None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def multi_head_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: object, W_k: object, W_v: object,
    W_o: object, b_q: ArrayLike | None, b_k: ArrayLike | None, b_v: ArrayLike | None,
    b_o: ArrayLike | None, num_heads: int, num_kv_heads: int | None, head_gate: ArrayLike | None,
    options: AttentionOptions, /, *, return_weights: bool = False, return_lse: bool = False,
    dtype: DTypeLike | None = None, key_is_query: bool = False, value_is_key: bool = False,
    save: bool = False, rotary: tuple[bytes, bool, float] | None = None,
    q_norm: ArrayLike | None = None, k_norm: ArrayLike | None = None,
    norm_eps: float | None = None, norm_offset: float | None = None,
    positions: ArrayLike | None = None, key_positions: ArrayLike | None = None,
    cached_key: NDArray[Any] | None = None, cached_value: NDArray[Any] | None = None,
    append: Callable[[NDArray[Any], NDArray[Any]], None] | None = None
) -> Any: ...
def multi_head_attention_backward(
    kept: object, grad_output: ArrayLike, grad_lse: ArrayLike | None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def merge_attention(
    outputs: Sequence[ArrayLike], lses: Sequence[ArrayLike], /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def prepare_heads(
    x: ArrayLike, num_heads: int, rotary: tuple[bytes, bool, float] | None,
    positions: ArrayLike | None, norm: ArrayLike | None, norm_eps: float, norm_offset: float, /, *,
    save: bool = False
) -> Any: ...
def prepare_heads_backward(
    kept: object, grad_output: ArrayLike, grad_lse: None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def rotary(
    x: ArrayLike, rotary: tuple[bytes, bool, float], positions: ArrayLike | None, /, *,
    save: bool = False
) -> Any: ...
def rotary_backward(
    kept: object, grad_output: ArrayLike, grad_lse: None, wanted: set[str], /
) -> dict[str, NDArray[Any] | None]: ...
def dropout_mask(
    shape: tuple[int, ...], p: float, seed: int, offsets: tuple[int, ...], /
) -> NDArray[np.bool_]: ...
def get_num_threads() -> int: ...
def set_num_threads(num_threads: int, /) -> None: ...
def use_team(team: object, /) -> None: ...
def checked_num_threads(num_threads: int, /) -> int: ...
def instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...
