"""flash-attention's arguments in mha's words, and attention in its layouts: (batch, len, heads,
head_dim), or ragged (total_len, heads, head_dim)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import (
    as_exact_int_array,
    as_finite,
    as_int,
    as_probability,
    check_kind,
    detached_array,
    detached_arrays,
)
from mha._base.dtypes import is_bfloat16
from mha._functions.dropout import dropout_mask, seed_from
from mha._functions.options import AttentionOptions, Window
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.flags import as_flag
from mha.compat._shared.tensors import are_tensors, is_tensor, outside_compilers
from mha.compat.flash_attn._calls import RaggedCall, by_token, slopes_of
from mha.compat.flash_attn._pages import PAGES, PagedCall, as_table, check_pages, gathered

Array = NDArray[Any]

DENSE = "(batch, seqlen, heads, head_dim)"
RAGGED = "(total_len, heads, head_dim)"


class Options(NamedTuple):
    """What the functions share, as they take it."""

    dropout_p: Any = 0.0
    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = (-1, -1)
    softcap: Any = 0.0
    alibi_slopes: Any = None
    return_attn_probs: Any = False
    rng: Any = None

    def translated(self) -> AttentionOptions:
        """In mha's words, without ALiBi and dropout."""
        scale = self.softmax_scale
        return AttentionOptions(
            causal=as_flag(self.causal, "causal"), window=_window(self.window_size),
            scale=None if scale is None else as_finite(_plain(scale), "softmax_scale"),
            softcap=as_finite(_plain(self.softcap), "softcap", least=0) or None)

    def slopes(self, sequences: int, heads: int) -> Array | None:
        """(heads,); or (sequences, heads) where they differ between sequences."""
        if self.alibi_slopes is None:
            return None
        slopes = detached_array(self.alibi_slopes, "alibi_slopes")
        check_floats(slopes, "alibi_slopes")
        if slopes.shape not in ((heads,), (sequences, heads)):
            raise self.wrong_slopes(slopes, sequences, heads)
        if slopes.ndim == 2 and sequences and (slopes == slopes[0]).all():
            slopes = slopes[0]
        return slopes.copy()  # gradients are those of the slopes that there were

    @staticmethod
    def wrong_slopes(slopes: Any, sequences: int, heads: int) -> ValueError:
        return ValueError(f"alibi_slopes: got shape {tuple(slopes.shape)}, wanted ({heads},) or"
                          f" ({sequences}, {heads})")


def attend(q: Any, k: Any, v: Any, given: Options) -> Any:
    """Of (batch, seqlen, heads, head_dim): the output, and (output, lse, probabilities) where
    asked for."""
    if isinstance(given.alibi_slopes, (list, tuple)):
        given = given._replace(alibi_slopes=np.asarray(given.alibi_slopes))
    of_tensors = are_tensors(q=q, k=k, v=v)
    if not of_tensors:
        q, k, v = detached_arrays(q=q, k=k, v=v)
    check_heads(q, k, v, DENSE)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: got a batch of {k.shape[0]}, wanted {q.shape[0]} as of q")
    given, seed = _with_dropout(given, of_tensors=of_tensors)
    if getattr(given.alibi_slopes, "ndim", 0) == 2:
        output, lse = _with_slopes_of_items(q, k, v, given, seed)
    elif of_tensors:
        output, lse = _of_tensors(q, k, v, given, seed)
    else:
        slopes = given.slopes(len(q), q.shape[2])
        output, lse = by_token(q, k, v, given.translated()._replace(
            alibi=slopes, dropout=given.dropout_p, rng=seed))
    if not as_flag(given.return_attn_probs, "return_attn_probs"):
        return output
    query_starts, key_starts = _equal_starts(q, k)
    return output, lse, _probabilities(q, k, query_starts, key_starts, given, seed)


def _of_tensors(q: Any, k: Any, v: Any, given: Options, seed: Any) -> Any:
    """Slopes are a tensor of the call: transforms and compilers see it."""
    from mha.compat.pytorch._tensors import attention

    options, slopes = given.translated(), given.alibi_slopes
    if is_tensor(slopes) and tuple(slopes.shape) != (q.shape[2],):
        raise given.wrong_slopes(slopes, q.shape[0], q.shape[2])
    if slopes is not None and not is_tensor(slopes):
        slopes = _as_tensor(given.slopes(q.shape[0], q.shape[2]))
    output, lse = attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), alibi=slopes,
        causal=options.causal, window=options.window, scale=options.scale,
        softcap=options.softcap, dropout=given.dropout_p, rng=seed, by_token=True,
        extras=(False, True))
    return output.contiguous(), lse


def _with_slopes_of_items(q: Any, k: Any, v: Any, given: Options, seed: Any) -> tuple[Any, Any]:
    """As a ragged batch of items of equal lengths."""
    q_rows, k_rows, v_rows = map(_rows_of, (q, k, v))
    query_starts, key_starts = _equal_starts(q, k)
    output, lse = outside_compilers(_of_rows, q_rows, k_rows, v_rows, query_starts, key_starts,
                                    given, seed)
    return (output.reshape(*q.shape[:3], v.shape[3]),
            lse.reshape(q.shape[2], *q.shape[:2]).swapaxes(0, 1))


def _rows_of(array: Any) -> Any:
    """(batch, len, heads, dim) -> (batch * len, heads, dim)."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _equal_starts(q: Any, k: Any) -> tuple[Array, Array]:
    """Where the items begin in their rows."""
    items = np.arange(int(q.shape[0]) + 1)
    return items * int(q.shape[1]), items * int(k.shape[1])


def attend_ragged(q: Any, k: Any, v: Any, cu_seqlens: tuple[Any, ...],
                  max_seqlen: tuple[Any, ...], given: Options, block_table: Any = None) -> Any:
    """The same of (total_len, heads, head_dim); lse is (heads, total_q). Starts and longest lengths
    of queries and of keys, or one for both. With a block_table k and v are pools of pages."""
    return outside_compilers(_attend_ragged, q, k, v, cu_seqlens, max_seqlen, given, block_table)


def _attend_ragged(q: Any, k: Any, v: Any, cu_seqlens: tuple[Any, ...],
                   max_seqlen: tuple[Any, ...], given: Options, block_table: Any) -> Any:
    of_tensors, paged = are_tensors(q=q, k=k, v=v), block_table is not None
    if not of_tensors:
        q, k, v = detached_arrays(q=q, k=k, v=v)
    check_heads(q, k, v, RAGGED, of_keys=PAGES if paged else RAGGED)
    sides = ("_q", "_k")[:len(cu_seqlens)] if len(cu_seqlens) > 1 else ("",)
    totals = len(q), None if paged else len(k)
    starts = [_starts(given_starts, side, total, longest)
              for given_starts, side, total, longest in zip(cu_seqlens, sides, totals, max_seqlen,
                                                            strict=False)]
    query_starts, key_starts = starts[0], starts[-1]
    if len(query_starts) != len(key_starts):
        raise ValueError(f"cu_seqlens_k: got {len(key_starts) - 1} sequences, wanted"
                         f" {len(query_starts) - 1} as of cu_seqlens_q")
    given, seed = _with_dropout(given, of_tensors=of_tensors)
    table = None
    if paged:
        table = as_table(block_table, len(query_starts) - 1)
        check_pages(table, np.diff(key_starts), k)
        # Only what neither drops weights nor has gradients is read from pages.
        if given.dropout_p or any(getattr(part, "requires_grad", False) for part in (q, k, v)):
            (k, v), table = gathered((k, v), table, key_starts), None
    output, lse = _of_rows(q, k, v, query_starts, key_starts, given, seed, table)
    if not as_flag(given.return_attn_probs, "return_attn_probs"):
        return output
    return output, lse, _probabilities(q, k, query_starts, key_starts, given, seed)


def _of_rows(q: Any, k: Any, v: Any, query_starts: Array, key_starts: Array, given: Options,
             seed: Any, table: Array | None = None) -> tuple[Any, Any]:
    """Output (total_q, heads, head_dim) and lse (heads, total_q) of arrays or tensors. With a
    table k and v are pools of pages."""
    of_tensors = are_tensors(q=q)
    if of_tensors and given.dropout_p:
        from mha.compat.pytorch._tensors import drawn_seed

        seed = drawn_seed(seed)
    arguments = (query_starts, key_starts, given.slopes(len(query_starts) - 1, q.shape[1]),
                 given.translated()._replace(dropout=given.dropout_p, rng=seed))
    call = RaggedCall(*arguments) if table is None else PagedCall(*arguments, table=table)
    if of_tensors:
        from mha.compat.pytorch._core_calls import attend_outside_compilers

        return attend_outside_compilers("flash_attn", q, k, v, call)
    return call.forward(q, k, v)


def _probabilities(q: Any, k: Any, query_starts: Array, key_starts: Array, given: Options,
                   seed: Any) -> Any:
    """The weights (sequences, heads, most queries, most keys), negative where they are dropped; an
    empty array without dropout."""
    if not given.dropout_p:
        return q.new_zeros(0) if is_tensor(q) else np.zeros(0, np.float32)
    query, key = (array if array.ndim == 3 else _rows_of(array)
                  for array in detached_arrays(q=q, k=k))
    slopes = given.slopes(len(query_starts) - 1, query.shape[1])
    most = (int(np.diff(starts).max(initial=0)) for starts in (query_starts, key_starts))
    shape = len(query_starts) - 1, query.shape[1], *most
    found = np.zeros(shape, np.float64 if query.dtype == np.float64 else np.float32)
    call = RaggedCall(query_starts, key_starts, slopes, given.translated())
    for s, (rows, columns) in enumerate(call.rows()):
        heads = (query[rows].swapaxes(0, 1), *[key[columns].swapaxes(0, 1)] * 2)
        weights = scaled_dot_product_attention(
            *(array[None] for array in heads), return_weights=True,
            **call.options._replace(alibi=slopes_of(slopes, s))._asdict())[1]
        found[s, :, :weights.shape[2], :weights.shape[3]] = weights[0]
    found = np.where(dropout_mask(shape, given.dropout_p, seed), found, -found)
    return _as_tensor(found) if is_tensor(q) else found


def _with_dropout(given: Options, *, of_tensors: bool) -> tuple[Options, Any]:
    """With a checked probability; and the seed, of tensors what draws it where nothing else asks
    for it."""
    dropout = as_probability(_plain(given.dropout_p), "dropout_p")
    given = given._replace(dropout_p=dropout)
    if not dropout:
        return given, None
    if not of_tensors:
        return given, seed_from(given.rng)
    if isinstance(given.rng, np.integer):
        given = given._replace(rng=int(given.rng))
    if not as_flag(given.return_attn_probs, "return_attn_probs"):
        return given, given.rng
    from mha.compat.pytorch._tensors import drawn_seed

    return given, drawn_seed(given.rng)


def check_floats(array: Array, name: str) -> None:
    if not is_bfloat16(array.dtype):
        check_kind(array, name, "f", "floats")


def check_heads(q: Any, k: Any, v: Any, layout: str,
                names: tuple[str, str, str] = ("q", "k", "v"), of_keys: str | None = None) -> None:
    """Shapes in this layout that go together, whatever their lengths; keys and values may have
    one of their own."""
    layouts = layout, of_keys or layout, of_keys or layout
    for array, name, wanted in zip((q, k, v), names, layouts, strict=True):
        if len(array.shape) != wanted.count(",") + 1:
            raise ValueError(f"{name}: got shape {tuple(array.shape)}, wanted {wanted}")
        if not is_tensor(array):
            check_floats(array, name)
        elif not array.is_floating_point():
            raise TypeError(f"{name}: got a tensor of {array.dtype}, wanted floats")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{names[1]}: got a head_dim of {k.shape[-1]}, wanted {q.shape[-1]} as of"
                         " q")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{names[2]}: got shape {tuple(v.shape)}, wanted {tuple(k.shape[:-1])} as"
                         f" of {names[1]}, and a head_dim")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{names[1]}: got {k.shape[-2]} heads, wanted a divisor of q's"
                         f" {q.shape[-2]}")


def _starts(cu_seqlens: Any, side: str, total: int | None, longest: Any) -> Array:
    """Where each sequence begins, and the total; checked, since slices are cut by them. Rows of
    pages have no total."""
    name, most = f"cu_seqlens{side}", as_int(longest, f"max_seqlen{side}")
    starts = as_exact_int_array(detached_array(cu_seqlens, name), name)
    if starts.ndim != 1 or not len(starts):
        raise ValueError(f"{name}: got shape {starts.shape}, wanted (sequences + 1,)")
    falls = np.flatnonzero(starts[1:] < starts[:-1])  # differences could overflow
    is_other = total is not None and starts[-1] != total
    if starts[0] != 0 or is_other or len(falls):
        fall = f", and falls behind number {falls[0]}" if len(falls) else ""
        rows = "" if total is None else f" to {total}, the rows there are"
        cure = ": [0, *np.cumsum(lengths)]" if starts[0] != 0 else ""
        raise ValueError(f"{name}: got {starts[0]} to {starts[-1]}{fall}, wanted numbers that never"
                         f" fall, from 0{rows}{cure}")
    longest_of_all = np.diff(starts).max(initial=0)
    if longest_of_all > most:
        raise ValueError(f"max_seqlen{side}: got {most}, wanted at least {longest_of_all}, the"
                         " longest sequence")
    return starts


def _window(window_size: Any) -> Window | None:
    if not (isinstance(window_size, (tuple, list)) or hasattr(window_size, "shape")) or len(
            window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, wanted (left, right), -1 for all")
    left, right = window_size
    left, right = (as_int(size, "window_size") for size in (left, right))
    return None if left < 0 and right < 0 else (left if left >= 0 else None,
                                                right if right >= 0 else None)


def _plain(number: Any) -> Any:
    """A number of Python for a tensor or an array of no axes."""
    if isinstance(number, (int, float)):  # compilers, whose numbers change, look no further
        return number
    return number.item() if getattr(number, "shape", None) == () else number


def _as_tensor(array: Array | None) -> Any:
    if array is None:
        return None
    from mha.compat.pytorch._memory import tensor_of

    return tensor_of(np.ascontiguousarray(array))
