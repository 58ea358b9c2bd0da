"""flash_attn.flash_attn_interface: the functions of flash-attention, on arrays and CPU tensors."""

from __future__ import annotations

from typing import Any

from mha._base.arguments import detached_array
from mha._base.keywords import checks_keywords, other_names
from mha.compat._shared.flags import as_flag
from mha.compat._shared.tensors import are_tensors, is_tensor
from mha.compat.flash_attn._attention import (
    DENSE,
    Options,
    attend,
    attend_ragged,
    check_heads,
)
from mha.compat.flash_attn._kvcache import (
    as_cache,
    attend_with_cache,
    check_new,
    check_rotary,
    where_cached,
    where_in_pages,
)
from mha.compat.flash_attn._pages import PAGES

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
           "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]

other_names("scale scaling", "softmax_scale")
other_names("dropout", "dropout_p")
other_names("window", "window_size", "window_size=(left, right), -1 for all")
other_names("is_causal", "causal", "causal=, aligned to the lower right")
other_names("mask attn_mask attention_mask", "softmax_scale",
            "flash_attn_varlen_func with cu_seqlens_q= and cu_seqlens_k=, which bert_padding makes;"
            " or mha.scaled_dot_product_attention, which has mask=")


@checks_keywords
def flash_attn_func(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, *,
        rng: Any = None) -> Any:
    """softmax(q @ k^T * softmax_scale) @ v.

    Parameters
    ----------
    q : array or tensor (batch, seqlen_q, heads, head_dim)
    k : array or tensor (batch, seqlen_k, kv_heads, head_dim)
    v : array or tensor (batch, seqlen_k, kv_heads, value_head_dim)
        kv_heads divides heads. float16, bfloat16, float32 or float64.
    dropout_p : float in [0, 1)
        Always acts: the function knows no evaluation mode.
    softmax_scale : float, by default 1 / sqrt(head_dim)
    causal : bool
        Key j is visible to query i iff j <= i + seqlen_k - seqlen_q.
    window_size : (left, right)
        Query i sees the keys from i + seqlen_k - seqlen_q - left to + right; -1: all on this side.
    softcap : float
        Scores become softcap * tanh(score / softcap); 0 is none.
    alibi_slopes : floats (heads,) or (batch, heads), optional
        Adds -slope * abs(i + seqlen_k - seqlen_q - j) to the score of query i and key j. No
        gradient.
    deterministic : not needed: results always have the same bits
    return_attn_probs : bool
        Return (output, softmax_lse, S_dmask).
    rng : None, int or numpy.random.Generator; beside tensors None, int or torch.Generator
        Draws the dropout; flash-attention has no such argument.

    Returns
    -------
    output (batch, seqlen_q, heads, value_head_dim); softmax_lse (batch, heads, seqlen_q); S_dmask
    (batch, heads, seqlen_q, seqlen_k), the weights before dropout, negative where they are dropped,
    empty without dropout: for tests, since it costs memory. A query that sees no key gets zeros and
    -inf.

    Raises
    ------
    ValueError: shapes that do not fit, dropout_p out of range. TypeError: arrays beside tensors,
    types that are no floats.

    Source: Dao 2023, "FlashAttention-2".

    >>> q = np.ones((2, 300, 8, 64), np.float32)
    >>> flash_attn_func(q, q, q, causal=True, window_size=(127, 0)).shape
    (2, 300, 8, 64)
    """
    return attend(q, k, v, Options(dropout_p, softmax_scale, causal, window_size, softcap,
                                   alibi_slopes, return_attn_probs, rng))


@checks_keywords
def flash_attn_qkvpacked_func(
        qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, *,
        rng: Any = None) -> Any:
    """`flash_attn_func` of q, k and v in one array.

    Parameters
    ----------
    qkv : array or tensor (batch, seqlen, 3, heads, head_dim)
    The rest : as in `flash_attn_func`.

    Raises
    ------
    ValueError, TypeError: as `flash_attn_func`.

    Source: Dao 2023, "FlashAttention-2".

    >>> flash_attn_qkvpacked_func(np.ones((2, 300, 3, 8, 64), np.float32), causal=True).shape
    (2, 300, 8, 64)
    """
    q, k, v = _unpacked(qkv, "qkv", 3, 5)
    return attend(q, k, v, Options(dropout_p, softmax_scale, causal, window_size, softcap,
                                   alibi_slopes, return_attn_probs, rng))


@checks_keywords
def flash_attn_kvpacked_func(
        q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, *,
        rng: Any = None) -> Any:
    """`flash_attn_func` of k and v in one array.

    Parameters
    ----------
    q : array or tensor (batch, seqlen_q, heads, head_dim)
    kv : array or tensor (batch, seqlen_k, 2, kv_heads, head_dim)
    The rest : as in `flash_attn_func`.

    Raises
    ------
    ValueError, TypeError: as `flash_attn_func`.

    Source: Dao 2023, "FlashAttention-2".

    >>> q, kv = np.ones((2, 1, 8, 64)), np.ones((2, 300, 2, 4, 64))
    >>> flash_attn_kvpacked_func(q, kv).shape
    (2, 1, 8, 64)
    """
    k, v = _unpacked(kv, "kv", 2, 5)
    return attend(q, k, v, Options(dropout_p, softmax_scale, causal, window_size, softcap,
                                   alibi_slopes, return_attn_probs, rng))


@checks_keywords
def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
        block_table: Any = None, *, rng: Any = None) -> Any:
    """`flash_attn_func` of sequences of unequal lengths, one behind the other, nothing padded.

    Parameters
    ----------
    q : array or tensor (total_q, heads, head_dim)
    k : array or tensor (total_k, kv_heads, head_dim)
    v : array or tensor (total_k, kv_heads, value_head_dim)
        With block_table both are pools (num_blocks, page_block_size, kv_heads, ...).
    cu_seqlens_q, cu_seqlens_k : ints (sequences + 1,)
        Where each sequence begins, and the total.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence; needed for nothing else.
    block_table : ints (sequences, max_num_blocks_per_seq), optional
        Key p of sequence s is row p % page_block_size of page block_table[s, p // page_block_size].
        cu_seqlens_k adds up how many keys each one has; entries behind them may be anything. Pages
        are read where they lie if k and v have q's type, contiguous columns and pages of a multiple
        of 128. Else, and for dropout and gradients, keys and values are copied first.
    alibi_slopes : floats (heads,) or (sequences, heads), optional
    The rest : as in `flash_attn_func`.

    Returns
    -------
    output (total_q, heads, value_head_dim); softmax_lse (heads, total_q) and S_dmask (sequences,
    heads, most queries, most keys) where asked for.

    Raises
    ------
    ValueError, TypeError: as `flash_attn_func`; starts that do not begin with 0, that fall, or that
    do not end with the total; a sequence over max_seqlen; a block_table that lacks pages.

    Source: Dao 2023, "FlashAttention-2".

    >>> q = np.ones((10, 8, 64), np.float32)
    >>> flash_attn_varlen_func(q, q, q, [0, 3, 10], [0, 3, 10], 7, 7, causal=True).shape
    (10, 8, 64)
    """
    return attend_ragged(
        q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
        Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                return_attn_probs, rng), block_table)


@checks_keywords
def flash_attn_varlen_qkvpacked_func(
        qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, *, rng: Any = None) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one array.

    Parameters
    ----------
    qkv : array or tensor (total_len, 3, heads, head_dim)
    cu_seqlens : ints (sequences + 1,)
    max_seqlen : int
    The rest : as in `flash_attn_varlen_func`.

    Raises
    ------
    ValueError, TypeError: as `flash_attn_varlen_func`.

    Source: Dao 2023, "FlashAttention-2".

    >>> qkv = np.ones((10, 3, 8, 64), np.float32)
    >>> flash_attn_varlen_qkvpacked_func(qkv, [0, 3, 10], 7, causal=True).shape
    (10, 8, 64)
    """
    q, k, v = _unpacked(qkv, "qkv", 3, 4)
    return attend_ragged(
        q, k, v, (cu_seqlens,), (max_seqlen,),
        Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                return_attn_probs, rng))


@checks_keywords
def flash_attn_varlen_kvpacked_func(
        q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, *,
        rng: Any = None) -> Any:
    """`flash_attn_varlen_func` of k and v in one array.

    Parameters
    ----------
    q : array or tensor (total_q, heads, head_dim)
    kv : array or tensor (total_k, 2, kv_heads, head_dim)
    The rest : as in `flash_attn_varlen_func`.

    Raises
    ------
    ValueError, TypeError: as `flash_attn_varlen_func`.

    Source: Dao 2023, "FlashAttention-2".

    >>> q, kv = np.ones((10, 8, 64)), np.ones((12, 2, 8, 64))
    >>> flash_attn_varlen_kvpacked_func(q, kv, [0, 3, 10], [0, 5, 12], 7, 7).shape
    (10, 8, 64)
    """
    k, v = _unpacked(kv, "kv", 2, 4)
    return attend_ragged(
        q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
        Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                return_attn_probs, rng))


@checks_keywords
def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
        cache_leftpad: Any = None, block_table: Any = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
        return_softmax_lse: bool = False) -> Any:
    """Append k and v to caches, in place, and attend to what each sequence holds then.

    Parameters
    ----------
    q : array or tensor (batch, seqlen_q, heads, head_dim)
    k_cache : array or tensor (cache_batch, seqlen_cache, kv_heads, head_dim)
    v_cache : array or tensor (cache_batch, seqlen_cache, kv_heads, value_head_dim)
        They are written where k and v are given. They are not copied where they have q's type.
        With block_table they are pools (num_blocks, page_block_size, kv_heads, ...).
    k, v : arrays or tensors (batch, seqlen_new, kv_heads, ...), both or none
    rotary_cos, rotary_sin : floats (positions, rotary_dim / 2), optional
        Rotate k at cache_seqlens, cache_seqlens + 1, ... before it is stored. With causal or
        window_size q is rotated likewise; with neither, all of q is rotated at cache_seqlens.
    cache_seqlens : int or ints (batch,), by default seqlen_cache, without k
        How many positions the caches hold before k.
    cache_batch_idx : ints (batch,), by default 0, 1, ...
        Which sequence of the caches each one is. With k and v all different.
    cache_leftpad : ints (batch,), by default 0
        Where a sequence begins in its cache.
    block_table : ints (batch, max_num_blocks_per_seq), optional
        Position p of sequence b is row p % page_block_size of page
        block_table[b, p // page_block_size]; entries behind the last position may be anything.
        Sequences may share pages of what they hold; k and v go into rows of their own.
        cache_batch_idx and cache_leftpad do not go with it, as in flash-attention. Pages are read
        where they lie or copied as in `flash_attn_varlen_func`.
    softmax_scale, causal, window_size, softcap, alibi_slopes : as in `flash_attn_func`
        seqlen_k is what a sequence holds then.
    rotary_interleaved : bool
        Whether columns 2c and 2c + 1 rotate together, or c and c + rotary_dim / 2.
    num_splits : not needed: the work is shared out by itself
    return_softmax_lse : bool
        Return (output, softmax_lse).

    Returns
    -------
    output (batch, seqlen_q, heads, value_head_dim); softmax_lse (batch, heads, seqlen_q). There are
    no gradients, as in flash-attention.

    Raises
    ------
    ValueError: shapes that do not fit, k without cache_seqlens or room, indices out of range or
    twice, a cache that is read-only, one array as both caches, tables that are too short, a
    block_table that lacks pages or would have one position written over another. TypeError: as
    `flash_attn_func`. The caches are unchanged then.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".

    >>> cache, new = np.zeros((2, 100, 4, 64), np.float32), np.ones((2, 1, 4, 64), np.float32)
    >>> flash_attn_with_kvcache(new, cache, cache.copy(), new, new, cache_seqlens=[7, 9]).shape
    (2, 1, 4, 64)
    """
    return_softmax_lse = as_flag(return_softmax_lse, "return_softmax_lse")
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    others = (rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, cache_batch_idx,
              cache_leftpad, block_table, options)
    if not are_tensors(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v):
        output, lse = _with_kvcache(q, k_cache, v_cache, k, v, *others)
    else:
        from mha.compat.pytorch._core_calls import without_gradients

        output, lse = without_gradients(
            _with_kvcache, {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v},
            () if k is None else ("k_cache", "v_cache"), *others)
    return (output, lse) if return_softmax_lse else output


def _with_kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cosine: Any, sine: Any,
                  interleaved: Any, cache_seqlens: Any, cache_batch_idx: Any, cache_leftpad: Any,
                  block_table: Any, given: Options) -> tuple[Any, Any]:
    """Of arrays. All is checked before anything is written."""
    interleaved = as_flag(interleaved, "rotary_interleaved")
    k_cache, v_cache = (as_cache(cache, name, is_written=k is not None)
                        for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")))
    q, k, v, cosine, sine, cache_seqlens, cache_batch_idx, cache_leftpad = (
        None if array is None else detached_array(array, name) for array, name in (
            (q, "q"), (k, "k"), (v, "v"), (cosine, "rotary_cos"), (sine, "rotary_sin"),
            (cache_seqlens, "cache_seqlens"), (cache_batch_idx, "cache_batch_idx"),
            (cache_leftpad, "cache_leftpad")))
    check_heads(q, k_cache, v_cache, DENSE, ("q", "k_cache", "v_cache"),
                DENSE if block_table is None else PAGES)
    check_new(q, k_cache, v_cache, k, v)
    new_len = None if k is None else k.shape[1]
    where = q, k_cache, new_len, cache_seqlens, cache_batch_idx, cache_leftpad
    cached = where_cached(*where) if block_table is None else where_in_pages(*where, block_table)
    options, slopes = given.translated(), given.slopes(len(q), q.shape[2])
    rotary = None
    if cosine is not None or sine is not None:
        if cosine is None or sine is None:
            raise ValueError("rotary_cos, rotary_sin: got one of them, wanted both or none")
        rotary = cosine, sine, interleaved
        check_rotary(rotary, q, new_len, cached, options)
    if new_len and k_cache.size and k_cache.ctypes.data == v_cache.ctypes.data:
        raise ValueError("v_cache: got the memory of k_cache, wanted an array of its own: k and v"
                         " are written into both")
    return attend_with_cache(q, k_cache, v_cache, k, v, rotary, cached, options, slopes)


def _unpacked(packed: Any, name: str, count: int, axes: int) -> Any:
    """q, k and v, or k and v: views along the axis behind seqlen."""
    if not are_tensors(**{name: packed}):
        packed = detached_array(packed, name)
    shape = packed.shape
    if len(shape) != axes or shape[-3] != count:
        leading = "batch, seqlen" if axes == 5 else "total_len"
        raise ValueError(f"{name}: got shape {tuple(shape)}, wanted ({leading}, {count}, heads,"
                         " head_dim)")
    if is_tensor(packed):
        return packed.unbind(-3)
    return [packed[..., i, :, :] for i in range(count)]
