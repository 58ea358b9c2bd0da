"""flex_attention of torch.nn.attention.flex_attention by its own names, without importing PyTorch.

Arguments, layout and returned values are those of PyTorch 2.13; the attention is `mha`'s, and the
block masks are `mha.BlockMask`. It takes NumPy arrays, and tensors on the CPU, whose gradients go
through autograd. A mask_mod sees arrays that broadcast against each other (tensors where PyTorch is
imported), never single numbers; what it says of hidden blocks is not computed again for each head.

Where this differs from PyTorch on purpose: score_mod is refused, by the names of the options that
replace it; masks come as they are defined, without an approximation of blocks by their BLOCK_SIZE;
create_mask gives a NumPy array unless a device asks for a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mha import _core
from mha._base.arguments import as_int, as_size, detached_array, detached_arrays
from mha._base.keywords import checks_keywords, other_names
from mha._functions.block_mask import BlockMask
from mha._functions.options import AttentionOptions
from mha.compat._shared.dtypes import array_of_kind
from mha.compat._shared.flags import as_flag
from mha.compat._shared.tensors import are_tensors, outside_compilers

__all__ = ["AuxOutput", "AuxRequest", "and_masks", "create_block_mask", "create_mask",
           "flex_attention", "noop_mask", "or_masks"]

MaskMod = Callable[[Any, Any, Any, Any], Any]

other_names("attn_mask mask attention_mask", "block_mask",
            "block_mask=, by create_block_mask or mha.BlockMask")
other_names("is_causal causal", "block_mask", "block_mask=mha.BlockMask.causal(Q_LEN, KV_LEN)")


class AuxRequest(NamedTuple):
    """What return_aux takes: whether lse is wanted; max_scores is not supported."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What return_aux asks for: lse (B, Hq, L), and no maximum of the scores."""

    lse: Any = None
    max_scores: None = None


@checks_keywords
def create_block_mask(mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
                      device: object = None, BLOCK_SIZE: int | tuple[int, int] = 128,
                      _compile: bool = False) -> BlockMask:
    """The pairs for which mask_mod(b, h, q_idx, kv_idx) is True: (B or 1, H or 1, Q_LEN, KV_LEN).

    device and _compile are not needed; blocks are 128 x 128 whatever BLOCK_SIZE says, and no pair
    depends on it.

    Raises
    ------
    ValueError: B or H below 1, a negative length, a result that does not broadcast to its
    arguments. TypeError: a mask_mod that is not callable or returns other than bool.

    Source: Dong et al. 2024, "Flex Attention", section 3.2.

    >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 300)
    >>> mask == mha.BlockMask.causal(300)
    True
    """
    return outside_compilers(_new_block_mask, mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE)


def _new_block_mask(mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
                    BLOCK_SIZE: int | tuple[int, int] = 128) -> BlockMask:
    for size in BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE,):
        as_size(size, "BLOCK_SIZE")
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: got {type(mask_mod).__name__}, wanted a callable (b, h, q_idx,"
                        " kv_idx)")
    return BlockMask.from_function(
        _on_arrays(mask_mod), as_int(Q_LEN, "Q_LEN"), as_int(KV_LEN, "KV_LEN"),
        batch=as_size(B, "B", 1), heads=as_size(H, "H", 1))


@checks_keywords
def create_mask(mod_fn: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
                device: object = None) -> Any:
    """The same as a dense bool array (B or 1, H or 1, Q_LEN, KV_LEN).

    A NumPy array; with device="cpu" a tensor, as PyTorch's functions want it.

    Raises
    ------
    ValueError, TypeError: as `create_block_mask`; a device other than the CPU.

    Source: Dong et al. 2024, "Flex Attention", section 3.2.

    >>> create_mask(lambda b, h, q, kv: q >= kv, 1, 1, 2, 2).astype(int).tolist()
    [[[[1, 0], [1, 1]]]]
    """
    return outside_compilers(_new_mask, mod_fn, B, H, Q_LEN, KV_LEN, device)


def _new_mask(mod_fn: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
              device: object) -> Any:
    dense = _new_block_mask(mod_fn, B, H, Q_LEN, KV_LEN).to_dense()
    if device is None:
        return dense
    if str(device).split(":")[0] != "cpu":
        raise ValueError(f"device: got {device}, wanted cpu: mha has no other")
    import torch

    return torch.from_numpy(dense)


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """A mask_mod that is True for all pairs.

    Raises
    ------
    TypeError: other than four arguments.

    Source: Dong et al. 2024, "Flex Attention", section 3.2.

    >>> create_mask(noop_mask, 1, 1, 1, 2).tolist()
    [[[[True, True]]]]
    """
    return (token_q >= 0) & (token_kv >= 0)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that is True where all of these are.

    Raises
    ------
    TypeError: one that is not callable.

    Source: Dong et al. 2024, "Flex Attention", section 3.3: masks as bools (B, H, Q_LEN, KV_LEN).

    >>> near = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < 2)
    >>> create_mask(near, 1, 1, 3, 3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    _check_callable(mask_mods)

    def all_of_them(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = q_idx >= 0
        for mask_mod in mask_mods:
            result = result & mask_mod(b, h, q_idx, kv_idx)
        return result

    return all_of_them


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that is True where one of these is.

    Raises
    ------
    TypeError: one that is not callable.

    Source: Dong et al. 2024, "Flex Attention", section 3.3: masks as bools (B, H, Q_LEN, KV_LEN).

    >>> prefix = or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 2)
    >>> create_mask(prefix, 1, 1, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    _check_callable(mask_mods)

    def one_of_them(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = q_idx < 0
        for mask_mod in mask_mods:
            result = result | mask_mod(b, h, q_idx, kv_idx)
        return result

    return one_of_them


@checks_keywords
def flex_attention(query: Any, key: Any, value: Any, score_mod: object = None,
                   block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
                   return_lse: bool = False, kernel_options: object = None, *,
                   return_aux: Any = None) -> Any:
    """softmax(query @ key^T * scale) @ value over the pairs of a block mask.

    Parameters
    ----------
    query : array or tensor (B, Hq, L, E)
    key : array or tensor (B, Hkv, S, E)
    value : array or tensor (B, Hkv, S, Ev)
        B of key and value may be 1.
    score_mod : None
        `mha.scaled_dot_product_attention` has what they are written for, as options.
    block_mask : BlockMask, optional
        By `create_block_mask`, any `mha.BlockMask`, or one of PyTorch's own, whose mask_mod is then
        asked. Of L queries and S keys.
    scale : float, by default 1 / sqrt(E)
    enable_gqa : bool
        Whether Hq may be a multiple of Hkv.
    return_lse : bool
        Return the log-sum-exp (B, Hq, L) too.
    kernel_options : ignored
    return_aux : an object with lse and max_scores, as PyTorch's AuxRequest, optional
        With lse the result is (output, AuxOutput); max_scores is refused.

    Returns
    -------
    output (B, Hq, L, Ev), of tensors a tensor, which autograd differentiates; or (output, lse).
    A query that sees no key gets zeros and -inf.

    Raises
    ------
    ValueError: shapes that do not fit, unlike numbers of heads without enable_gqa. TypeError: a
    score_mod, a block_mask of another type.

    Source: Dong et al. 2024, "Flex Attention", section 3.

    >>> q = np.ones((1, 2, 300, 8), np.float32)
    >>> flex_attention(q, q, q, block_mask=mha.BlockMask.causal(300)).shape
    (1, 2, 300, 8)
    """
    arguments = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
                 return_aux)
    return outside_compilers(_attend, *arguments)


def _attend(query: Any, key: Any, value: Any, score_mod: object, block_mask: Any,
            scale: float | None, enable_gqa: Any, return_lse: Any, return_aux: Any) -> Any:
    if isinstance(score_mod, BlockMask):
        raise TypeError("score_mod: got a BlockMask, wanted it as block_mask=")
    if score_mod is not None:
        raise TypeError(
            f"score_mod: got {type(score_mod).__name__}, wanted None: biases by distance are alibi="
            " and relative_bias= of mha.scaled_dot_product_attention, soft capping is softcap=,"
            " any other number a pair bias=, and a score of -inf a mask_mod")
    wants_aux = return_aux is not None
    if wants_aux and getattr(return_aux, "max_scores", False):
        raise ValueError("return_aux: got max_scores=True, wanted lse alone")
    _check_shapes(query, key, value, as_flag(enable_gqa, "enable_gqa"))
    mask = _as_block_mask(block_mask, query.shape[2], key.shape[2])
    return_lse = as_flag(return_lse, "return_lse") or bool(getattr(return_aux, "lse", False))
    options = AttentionOptions(mask=mask, scale=scale)
    if are_tensors(query=query, key=key, value=value):
        from mha.compat.pytorch._core_calls import DenseCall, attend_outside_compilers

        key, value = (array.expand(query.shape[0], *array.shape[1:]) for array in (key, value))
        output, lse = attend_outside_compilers("flex_attention", query, key, value,
                                               DenseCall(options))
    else:
        query, key, value = detached_arrays(query=query, key=key, value=value)
        key, value = (np.broadcast_to(array, (len(query), *array.shape[1:]))
                      for array in (key, value))
        output, lse = _core.scaled_dot_product_attention(query, key, value, options,
                                                         return_lse=True)
    if wants_aux:
        return output, AuxOutput(lse)
    return (output, lse) if return_lse else output


def _check_callable(mask_mods: tuple[object, ...]) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise TypeError(f"mask_mods: got {type(mask_mod).__name__}, wanted callables (b, h,"
                            " q_idx, kv_idx)")


def _on_arrays(mask_mod: MaskMod) -> MaskMod:
    """The mask_mod on arrays, also one that is written for tensors."""
    torch: Any = sys.modules.get("torch")

    def on_arrays(*indices: Any) -> Any:
        return array_of_kind(mask_mod(*indices), "mask_mod", "b", "bools, True = attend")

    def on_tensors(*indices: Any) -> Any:
        try:
            return on_arrays(*map(torch.from_numpy, indices))
        except Exception as first:  # one that has arrays of NumPy's, which tensors do not join
            try:
                return on_arrays(*indices)
            except Exception:
                raise first from None

    return on_arrays if torch is None else on_tensors


def _as_block_mask(mask: Any, query_len: int, key_len: int) -> BlockMask | None:
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        _check_lengths((mask.query_len, mask.key_len), query_len, key_len)
        return mask
    if not all(hasattr(mask, name) for name in ("mask_mod", "seq_lengths", "kv_num_blocks")):
        raise TypeError(f"block_mask: got {type(mask).__name__}, wanted one of create_block_mask or"
                        " a mha.BlockMask")
    batch, heads = mask.kv_num_blocks.shape[:2]
    _check_lengths(tuple(mask.seq_lengths), query_len, key_len)
    blocks = detached_array(mask.to_dense(), "block_mask") != 0
    rows, columns = mask.BLOCK_SIZE
    shown = BlockMask.from_function(
        lambda b, h, q, k: blocks[b, h, q // rows, k // columns], query_len, key_len, batch=batch,
        heads=heads)
    return BlockMask.from_function(_on_arrays(mask.mask_mod), query_len, key_len, batch=batch,
                                   heads=heads, within=shown)


def _check_lengths(got: tuple[int, ...], query_len: int, key_len: int) -> None:
    if got != (query_len, key_len):
        raise ValueError(f"block_mask: got one of lengths {got}, wanted {(query_len, key_len)}")


def _check_shapes(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    for array, name in ((query, "query"), (key, "key"), (value, "value")):
        shape = getattr(array, "shape", None)
        if shape is None or len(shape) != 4:
            raise ValueError(f"{name}: got shape {None if shape is None else tuple(shape)}, wanted"
                             " (batch, heads, len, dim)")
        if array is not query and array.shape[0] not in (1, query.shape[0]):
            raise ValueError(f"{name}: got a batch of {array.shape[0]}, wanted {query.shape[0]} as"
                             " of query, or 1")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"query: got {query.shape[1]} heads, wanted {key.shape[1]} as of key, or"
                         " enable_gqa=True")
