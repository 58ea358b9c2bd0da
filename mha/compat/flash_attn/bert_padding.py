"""flash_attn.bert_padding: batches without their padding, and back, of arrays and tensors.

Gradients of tensors go through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_exact_int_array, as_size, check_kind, detached_array
from mha._base.keywords import checks_keywords
from mha.compat._shared.tensors import is_tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


@checks_keywords
def unpad_input(hidden_states: Any, attention_mask: Any,
                unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """The rows that attention_mask marks, one behind the other, and where they stood.

    Parameters
    ----------
    hidden_states : array or tensor (batch, seqlen, ...)
    attention_mask : bools or ints (batch, seqlen), 1 or True = a real token, 0 or False = padding
    unused_mask : bools or ints (batch, seqlen), optional
        Tokens whose rows are kept, but are not counted in seqused.

    Returns
    -------
    (rows (total_len, ...), indices (total_len,) into batch * seqlen, cu_seqlens (batch + 1,) int32,
    the longest length, seqused (batch,) int32): tensors where hidden_states is one.

    Raises
    ------
    ValueError: a mask of another shape, or of ints other than 0 and 1. TypeError: a mask that is
    not of bools or ints.

    Source: Dao 2023, "FlashAttention-2", whose package names it so.

    >>> rows, indices, starts, longest, _ = unpad_input(np.ones((2, 3, 8)), [[1, 1, 0], [1, 0, 0]])
    >>> rows.shape, indices.tolist(), starts.tolist(), longest
    ((3, 8), [0, 1, 3], [0, 2, 3], 2)
    """
    hidden = _rows(hidden_states, "hidden_states")
    used = _mask(attention_mask, "attention_mask", hidden.shape)
    kept = used if unused_mask is None else used | _mask(unused_mask, "unused_mask", hidden.shape)
    indices, lengths = np.flatnonzero(kept), kept.sum(axis=1)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    found = (indices, starts, used.sum(axis=1).astype(np.int32))
    if is_tensor(hidden):
        import torch

        found = tuple(torch.from_numpy(array) for array in found)
    rows = index_first_axis(hidden.reshape(kept.size, *hidden.shape[2:]), found[0])
    return rows, found[0], found[1], int(lengths.max(initial=0)), found[2]


@checks_keywords
def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """The rows back where they stood, (batch, seqlen, ...), zeros elsewhere.

    Parameters
    ----------
    hidden_states : array or tensor (total_len, ...)
    indices : ints (total_len,) into batch * seqlen
    batch, seqlen : int

    Raises
    ------
    ValueError: another number of indices than of rows, indices out of range.

    Source: Dao 2023, "FlashAttention-2", whose package names it so.

    >>> pad_input(np.ones((3, 8)), [0, 1, 3], batch=2, seqlen=3)[:, :, 0]
    array([[1., 1., 0.],
           [1., 0., 0.]])
    """
    sizes = as_size(batch, "batch", least=0), as_size(seqlen, "seqlen", least=0)
    rows = index_put_first_axis(hidden_states, indices, sizes[0] * sizes[1])
    return rows.reshape(*sizes, *rows.shape[1:])


@checks_keywords
def index_first_axis(input: Any, indices: Any) -> Any:
    """input[indices]: rows of axis 0 by their indices (total_len,).

    Raises
    ------
    ValueError: indices out of range or not (total_len,). TypeError: indices that are no ints.

    Source: Dao 2023, "FlashAttention-2", whose package names it so.

    >>> index_first_axis(np.arange(6).reshape(3, 2), [2, 0]).tolist()
    [[4, 5], [0, 1]]
    """
    rows = _rows(input, "input")
    return rows[_indices(indices, len(rows), like=rows)]


@checks_keywords
def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """An array of first_axis_dim rows, zeros but for values (total_len, ...) at the indices.

    Raises
    ------
    ValueError: indices out of range or of another length. TypeError: indices that are no ints.

    Source: Dao 2023, "FlashAttention-2", whose package names it so.

    >>> index_put_first_axis(np.ones((2, 1)), [2, 0], 3).tolist()
    [[1.0], [0.0], [1.0]]
    """
    values = _rows(values, "values")
    size = as_size(first_axis_dim, "first_axis_dim", least=0)
    places = _indices(indices, size, like=values)
    if len(places) != len(values):
        raise ValueError(f"indices: got {len(places)}, wanted {len(values)}, one a row")
    shape = size, *values.shape[1:]
    if is_tensor(values):
        return values.new_zeros(shape).index_put((places,), values)
    output = np.zeros(shape, values.dtype)
    output[places] = values
    return output


def _rows(array: Any, name: str) -> Any:
    rows = array if is_tensor(array) else detached_array(array, name)
    if len(rows.shape) == 0:
        raise ValueError(f"{name}: got no axes, wanted rows")
    return rows


def _mask(mask: Any, name: str, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    found = detached_array(mask, name)
    check_kind(found, name, "biu", "bools or ints, 1 = a real token")
    if len(shape) < 2 or found.shape != tuple(shape[:2]):
        raise ValueError(f"{name}: got shape {found.shape}, wanted (batch, seqlen) as of"
                         f" hidden_states {tuple(shape)}")
    if found.size and not 0 <= found.min() <= found.max() <= 1:
        raise ValueError(f"{name}: got {found.min()} to {found.max()}, wanted 0 and 1, which marks"
                         " a real token")
    return found != 0


def _indices(indices: Any, size: int, *, like: Any) -> Any:
    """Checked, (total_len,): as a tensor beside tensors."""
    found = as_exact_int_array(detached_array(indices, "indices"), "indices")
    if found.ndim != 1:
        raise ValueError(f"indices: got shape {found.shape}, wanted (total_len,)")
    if len(found) and not 0 <= found.min() <= found.max() < size:
        raise ValueError(f"indices: got {found.min()} to {found.max()}, wanted 0 to {size - 1}")
    if not is_tensor(like):
        return found
    import torch

    return torch.from_numpy(found)
