"""jax.nn.dot_product_attention by its own names, on NumPy arrays, without importing jax.

Arguments, layout, mask meanings and what rows that see no key get are those of JAX 0.10; the
attention is `mha`'s. Arrays of JAX on the CPU are accepted wherever NumPy's are.

Where this differs from JAX on purpose: float64 is computed in float64, softmax too, and halves in
float32, rounded once; lengths may be ints of any type; a bias of -inf hides a key as a mask does,
also where nothing else is left to see; errors are ValueError and TypeError.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_int_array, detached_array
from mha._base.keywords import checks_keywords, other_names
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.flags import as_flag
from mha.compat._shared.projections import over_scores

__all__ = ["dot_product_attention"]

LocalWindow = int | tuple[int, int]
Implementation = Literal["xla"]

# The log-sum-exp that JAX returns for a row that sees no key.
EMPTY_RESIDUAL = np.float32(-0.7) * np.finfo(np.float32).max

other_names("key_lengths valid_lens", "key_value_seq_lengths")
other_names("window window_size sliding_window", "local_window_size")
other_names("attn_mask attention_mask", "mask", "mask=, bool with True = attend")
other_names("return_lse return_softmax_lse", "return_residual")


@overload
def dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = ...,
        mask: ArrayLike | None = ..., *, scale: float | None = ..., is_causal: bool = ...,
        query_seq_lengths: ArrayLike | None = ..., key_value_seq_lengths: ArrayLike | None = ...,
        local_window_size: LocalWindow | None = ..., implementation: Implementation | None = ...,
        return_residual: Literal[False] = ...) -> NDArray[Any]: ...
@overload
def dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = ...,
        mask: ArrayLike | None = ..., *, scale: float | None = ..., is_causal: bool = ...,
        query_seq_lengths: ArrayLike | None = ..., key_value_seq_lengths: ArrayLike | None = ...,
        local_window_size: LocalWindow | None = ..., implementation: Implementation | None = ...,
        return_residual: Literal[True]) -> tuple[NDArray[Any], NDArray[Any]]: ...
@checks_keywords
def dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
        mask: ArrayLike | None = None, *, scale: float | None = None, is_causal: bool = False,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        local_window_size: LocalWindow | None = None,
        implementation: Implementation | None = None,
        return_residual: bool = False) -> Any:
    """jax.nn.dot_product_attention.

    Parameters
    ----------
    query : array (batch, query_len, heads, head_dim), or (query_len, heads, head_dim)
    key, value : arrays (batch, key_len, kv_heads, head_dim), or (key_len, kv_heads, head_dim)
        kv_heads divides heads. Beside a batch of 1, arrays may have 3 or 4 axes each.
    bias : float array, added to the scaled scores, optional
    mask : bool array, True = attend, optional
        Both broadcast to (batch, heads, query_len, key_len); their heads are 1 or all.
    scale : float, by default 1 / sqrt(head_dim)
    is_causal : bool
        The upper-left triangle: query i sees keys 0 to i.
    query_seq_lengths : ints (batch,), optional
        Outputs of queries from there on are zeros.
    key_value_seq_lengths : ints (batch,), optional
        Keys from there on are hidden.
    local_window_size : int or (left, right), optional
        Query i sees the keys from i - left to i + right.
    implementation : None or "xla", which are the same here
    return_residual : bool
        Whether to return the log-sum-exp of the scores too.

    Returns
    -------
    array shaped as query; then the residual (batch, query_len, heads), without batch as query.
    A query that sees no key gets the mean of all values, and -0.7 times the largest float32 as its
    residual.

    Raises
    ------
    ValueError: shapes that do not fit, another implementation. TypeError: a mask that is not bool.

    Source: Vaswani et al. 2017, section 3.2.1; grouped heads as in Ainslie et al. 2023.

    >>> q = np.ones((2, 4, 8, 64), np.float32)
    >>> dot_product_attention(q, q, q, is_causal=True).shape
    (2, 4, 8, 64)
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation: got {implementation!r}, wanted None or 'xla': this"
                         " computes on the CPU")
    is_causal = as_flag(is_causal, "is_causal")
    return_residual = as_flag(return_residual, "return_residual")
    query = detached_array(query, "query")
    shape = query.shape
    query, key, value = (_in_four_axes(detached_array(array, name), name) for array, name in (
        (query, "query"), (key, "key"), (value, "value")))
    batch, query_len, heads, _ = query.shape
    key_len = key.shape[1]
    if value.shape != key.shape:
        raise ValueError(f"value: got shape {value.shape}, wanted key's {key.shape}")
    scores = (batch,), (heads,), (query_len,), (key_len,)
    mask, bias = (None if array is None else over_scores(detached_array(array, name), name, scores)
                  for array, name in ((mask, "mask"), (bias, "bias")))
    window = local_window_size
    if isinstance(window, (int, np.integer)):
        window = (int(window), int(window))
    output, lse = scaled_dot_product_attention(
        *(array.swapaxes(1, 2) for array in (query, key, value)), mask=mask, bias=bias,
        scale=scale, causal=is_causal, window=window, query_offset=0,
        key_lengths=_lengths(key_value_seq_lengths, "key_value_seq_lengths", batch, key_len),
        empty_rows="uniform", return_lse=True)
    output = output.swapaxes(1, 2)
    lengths = _lengths(query_seq_lengths, "query_seq_lengths", batch, query_len)
    if lengths is not None:
        padding = np.arange(query_len) >= lengths[:, None]
        output[padding] = 0
    if not return_residual:
        return output.reshape(shape)
    lse = lse.swapaxes(1, 2)
    if lengths is not None:
        lse[padding] = -np.inf
    with np.errstate(over="ignore"):  # in float16 it is infinite, as in JAX
        empty = EMPTY_RESIDUAL if key_len else -np.inf
        residual = np.where(lse == -np.inf, empty, lse).astype(output.dtype)
    return output.reshape(shape), residual.reshape(shape[:-1])


def _in_four_axes(array: NDArray[Any], name: str) -> NDArray[Any]:
    """(batch, len, heads, head_dim), a batch of 1 where there was none."""
    if array.ndim not in (3, 4):
        raise ValueError(f"{name}: got shape {array.shape}, wanted (batch, len, heads, head_dim) or"
                         " (len, heads, head_dim)")
    return array if array.ndim == 4 else array[None]


def _lengths(lengths: ArrayLike | None, name: str, batch: int, most: int) -> NDArray[Any] | None:
    """(batch,) ints in [0, most]: beyond either end there is nothing more to hide or to show."""
    if lengths is None:
        return None
    array = as_int_array(lengths, name)
    if array.shape != (batch,):
        raise ValueError(f"{name}: got shape {array.shape}, wanted ({batch},)")
    return array.clip(0, most)
