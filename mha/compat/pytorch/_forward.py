"""torch.nn.functional.multi_head_attention_forward on NumPy arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.dtypes import is_half
from mha._functions.options import RandomSource
from mha.compat._shared.dtypes import array_of_kind, as_float_dtype, as_own
from mha.compat._shared.flags import as_dropout
from mha.compat._shared.layers import checked_heads
from mha.compat.pytorch._attention import Attention


def multi_head_attention_forward(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, embed_dim_to_check: int,
        num_heads: int, in_proj_weight: ArrayLike | None, in_proj_bias: ArrayLike | None,
        bias_k: ArrayLike | None, bias_v: ArrayLike | None, add_zero_attn: bool,
        dropout_p: float, out_proj_weight: ArrayLike, out_proj_bias: ArrayLike | None,
        training: bool = True, key_padding_mask: ArrayLike | None = None,
        need_weights: bool = True, attn_mask: ArrayLike | None = None,
        use_separate_proj_weight: bool = False, q_proj_weight: ArrayLike | None = None,
        k_proj_weight: ArrayLike | None = None, v_proj_weight: ArrayLike | None = None,
        static_k: ArrayLike | None = None, static_v: ArrayLike | None = None,
        average_attn_weights: bool = True, is_causal: bool = False, *,
        rng: RandomSource = None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """torch.nn.functional.multi_head_attention_forward.

    Parameters
    ----------
    query : array (query_len, batch, embed_dim), or (query_len, embed_dim) for one sequence
    key, value : arrays (key_len, batch, kdim) and (key_len, batch, vdim)
    embed_dim_to_check : int
        The width that query must have.
    num_heads : int
    in_proj_weight ... bias_v, out_proj_weight, out_proj_bias : arrays or None
        The parameters of `MultiheadAttention`, by their names and shapes there; bias_k and bias_v
        may be (embed_dim,). Where all arrays are halves of one type, the results are.
    add_zero_attn : bool
    dropout_p : float in [0, 1]
        Acts where training is true.
    use_separate_proj_weight : bool
        Whether q_proj_weight, k_proj_weight and v_proj_weight stand for in_proj_weight.
    static_k, static_v : arrays (batch * num_heads, key_len, head_dim), optional
        Stand for the heads that key, or value, would be projected to; not with bias_k.
    The rest : as in `MultiheadAttention.forward`.
    rng : None, int or numpy.random.Generator
        Draws the dropout; PyTorch has no such argument.

    Returns
    -------
    output (query_len, batch, embed_dim), and the weights or None, as `MultiheadAttention.forward`
    returns them. They are float64 where an input or a parameter is, else float32.

    Raises
    ------
    ValueError: shapes that do not fit, weights that are missing, bias_k or bias_v alone or beside
    static heads, is_causal without attn_mask. TypeError: arrays that hold no numbers.

    Source: Vaswani et al. 2017, section 3.2.2.

    >>> x, W = np.ones((10, 2, 64), np.float32), np.eye(64, dtype=np.float32)
    >>> output, weights = multi_head_attention_forward(
    ...     x, x, x, 64, 8, np.vstack([W, W, W]), None, None, None, False, 0.0, W, None)
    """
    given = _numbers(query=query, key=key, value=value, in_proj_bias=in_proj_bias, bias_k=bias_k,
                     bias_v=bias_v, out_proj_weight=out_proj_weight, out_proj_bias=out_proj_bias,
                     static_k=static_k, static_v=static_v)
    projections = _numbers(q_proj_weight=q_proj_weight, k_proj_weight=k_proj_weight,
                           v_proj_weight=v_proj_weight)
    packed = _numbers(in_proj_weight=in_proj_weight)
    for name, array in (projections if use_separate_proj_weight else packed).items():
        if array is None:
            raise ValueError(f"{name}: got None, wanted an array with"
                             f" use_separate_proj_weight={use_separate_proj_weight}")
    for name, other in (("bias_k", "bias_v"), ("bias_v", "bias_k")):
        if given[name] is not None and given[other] is None:
            raise ValueError(f"{other}: got None beside {name}, wanted both or neither")
        if given[name] is not None and given["static" + name[-2:]] is not None:
            raise ValueError(f"{name}: got an array beside static{name[-2:]}, wanted one of them")
    arrays = {**given, **(projections if use_separate_proj_weight else packed)}
    for name in ("bias_k", "bias_v"):  # PyTorch takes (embed_dim,) and (1, embed_dim), too
        array = arrays[name]
        if array is not None and array.ndim in (1, 2):
            arrays[name] = array.reshape((1,) * (3 - array.ndim) + array.shape)
    dtype = _common_type([array for array in arrays.values() if array is not None])

    num_heads, width = checked_heads(num_heads, embed_dim_to_check, "embed_dim_to_check")
    shapes: dict[str, tuple[int | None, ...]] = {
        "in_proj_weight": (3 * width, width), "q_proj_weight": (width, width),
        "k_proj_weight": (width, None), "v_proj_weight": (width, None),
        "in_proj_bias": (3 * width,), "bias_k": (1, 1, width), "bias_v": (1, 1, width),
        "out_proj_weight": (width, width), "out_proj_bias": (width,)}
    parameters = {name: _fitting(arrays.get(name), name, shape, dtype)
                  for name, shape in shapes.items()}
    out_proj = SimpleNamespace(weight=parameters.pop("out_proj_weight"),
                               bias=parameters.pop("out_proj_bias"))
    kdim, vdim = (width if weight is None else weight.shape[1] for weight in
                  (parameters["k_proj_weight"], parameters["v_proj_weight"]))
    attention = Attention(
        num_heads, width, kdim, vdim, as_dropout(dropout_p, "dropout_p"), add_zero_attn,
        batch_first=False, training=bool(training), dtype=dtype, **parameters, out_proj=out_proj,
        _generator=np.random.default_rng(rng))
    batch = np.shape(query)[1] if np.ndim(query) == 3 else 1
    statics = {}
    for name in ("static_k", "static_v"):
        static = _fitting(given[name], name, (batch * num_heads, None, width // num_heads), dtype)
        statics[name] = (None if static is None else
                         static.reshape(batch, num_heads, *static.shape[1:]))
    return attention._forward(query, key, value, attn_mask, key_padding_mask, need_weights,
                              average_attn_weights, is_causal, **statics)


def _numbers(**arguments: ArrayLike | None) -> dict[str, NDArray[Any] | None]:
    return {name: None if argument is None else array_of_kind(argument, name, "iuf", "numbers")
            for name, argument in arguments.items()}


def _common_type(arrays: list[NDArray[Any]]) -> np.dtype[Any]:
    """The half type of all of them, or float32, or float64 where one has it."""
    types = {array.dtype for array in arrays}
    if len(types) == 1 and is_half(arrays[0].dtype):
        return as_float_dtype(arrays[0].dtype)
    return np.result_type(np.float32, *(of for of in types if of.kind == "f"))


def _fitting(array: NDArray[Any] | None, name: str, shape: tuple[int | None, ...],
             dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The array in the type of the call, after checking its shape; None is any size."""
    if array is None:
        return None
    if array.ndim != len(shape) or any(wanted not in (None, size) for size, wanted
                                       in zip(array.shape, shape, strict=True)):
        text = str(tuple("*" if size is None else size for size in shape)).replace("'", "")
        raise ValueError(f"{name}: got shape {array.shape}, wanted {text}")
    return as_own(array, dtype)
