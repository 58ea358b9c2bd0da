"""torch.nn.MultiheadAttention on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_size
from mha._base.pieces import copied
from mha._functions.options import RandomSource
from mha.compat._shared.dtypes import array_of_kind, as_float_dtype, own_copy
from mha.compat._shared.flags import as_dropout
from mha.compat._shared.layers import Trained, checked_heads, uniform
from mha.compat.pytorch._attention import Attention

_PARAMETERS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
               "bias_k", "bias_v", "out_proj.weight", "out_proj.bias")


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict(..., strict=False)` found: names without data, data without name."""

    missing_keys: list[str]
    unexpected_keys: list[str]


IncompatibleKeys.__module__ = "mha.compat.pytorch"  # where users import it from, and so do pickles


class MultiheadAttention(Trained, Attention):
    """torch.nn.MultiheadAttention, its parameters laid out as PyTorch saves them.

    Parameters
    ----------
    embed_dim, num_heads : int
        The width of query and output; num_heads divides it.
    dropout : float in [0, 1]
        On the attention weights, in training mode only (the mode a new layer is in). 1 leaves
        out_proj.bias alone of the output.
    bias : bool
        Whether the four projections have biases.
    add_bias_kv : bool
        Append one learned key and value (bias_k, bias_v) to every sequence.
    add_zero_attn : bool
        Append a key and value of zeros to every sequence.
    kdim, vdim : int, by default embed_dim
        The widths of key and value.
    batch_first : bool
        (batch, len, dim) instead of (len, batch, dim).
    device : ignored, as everything is on the CPU
    dtype : float16, bfloat16, float32 (by default) or float64, NumPy's or PyTorch's
        Of parameters and results; inputs and loaded parameters are cast to it. Halves are computed
        in float32 and rounded once; bfloat16 wants the package ml_dtypes.
    rng : None, int or numpy.random.Generator
        Draws the initial parameters and the dropout; PyTorch has no such argument.

    Attributes
    ----------
    in_proj_weight (3 * embed_dim, embed_dim): the weights of query, key and value below each
    other; None where kdim or vdim is not embed_dim, and then there are q_proj_weight
    (embed_dim, embed_dim), k_proj_weight (embed_dim, kdim) and v_proj_weight (embed_dim, vdim)
    instead. in_proj_bias (3 * embed_dim,); bias_k, bias_v (1, 1, embed_dim); out_proj.weight
    (embed_dim, embed_dim), out_proj.bias (embed_dim,). Weights are used as x @ weight.T.

    Raises
    ------
    ValueError: sizes below 1, embed_dim not a multiple of num_heads, dropout outside [0, 1].
    TypeError: sizes that are no ints, another dtype.

    Source: Vaswani et al. 2017, section 3.2.2.

    >>> layer = MultiheadAttention(512, 8, batch_first=True)
    >>> output, weights = layer(x, x, x)  # (2, 10, 512) -> (2, 10, 512) and (2, 10, 10)
    """

    __module__ = "mha.compat.pytorch"  # where users import it from, and so do pickles

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
                 add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
                 vdim: int | None = None, batch_first: bool = False, device: object = None,
                 dtype: DTypeLike | Any = None, *, rng: RandomSource = None) -> None:
        self.num_heads, self.embed_dim = checked_heads(num_heads, embed_dim, "embed_dim")
        self.kdim = as_size(kdim, "kdim", self.embed_dim)
        self.vdim = as_size(vdim, "vdim", self.embed_dim)
        self.dropout = as_dropout(dropout)
        self.head_dim = self.embed_dim // self.num_heads
        self.add_zero_attn = add_zero_attn
        self.batch_first = batch_first
        self.dtype = as_float_dtype(np.float32 if dtype is None else dtype)
        self._generator = np.random.default_rng(rng)
        self._reset_parameters(bias, add_bias_kv)

    def _reset_parameters(self, bias: bool, add_bias_kv: bool) -> None:
        """PyTorch's start: Xavier (Glorot & Bengio 2010), but out_proj uniform in 1/sqrt(width)."""
        width = self.embed_dim
        self.in_proj_weight = None
        self.q_proj_weight = None
        self.k_proj_weight = None
        self.v_proj_weight = None
        if self.kdim == self.vdim == width:
            self.in_proj_weight = self._xavier_uniform(3 * width, width)
        else:
            self.q_proj_weight = self._xavier_uniform(width, width)
            self.k_proj_weight = self._xavier_uniform(width, self.kdim)
            self.v_proj_weight = self._xavier_uniform(width, self.vdim)
        self.in_proj_bias = np.zeros(3 * width, self.dtype) if bias else None
        self.out_proj = SimpleNamespace(
            weight=self._uniform((width, width), 1 / math.sqrt(width)),
            bias=np.zeros(width, self.dtype) if bias else None)
        self.bias_k = None
        self.bias_v = None
        if add_bias_kv:
            normal = self._generator.normal(0, 1 / math.sqrt(width), (2, 1, 1, width))
            self.bias_k, self.bias_v = own_copy(normal, self.dtype)

    def _xavier_uniform(self, rows: int, columns: int) -> NDArray[Any]:
        return self._uniform((rows, columns), math.sqrt(6 / (rows + columns)))

    def _uniform(self, shape: tuple[int, int], bound: float) -> NDArray[Any]:
        return self._own(uniform(self._generator, bound, shape, self.dtype))

    def _own(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy in the layer's type. Column order makes weight.T, which `mha` takes, free."""
        return own_copy(array, self.dtype, "F")

    def __repr__(self) -> str:
        others = {"dropout": (self.dropout, 0.0), "bias": (self.in_proj_bias is not None, True),
                  "add_bias_kv": (self.bias_k is not None, False),
                  "add_zero_attn": (self.add_zero_attn, False), "kdim": (self.kdim, self.embed_dim),
                  "vdim": (self.vdim, self.embed_dim), "batch_first": (self.batch_first, False)}
        shown = [f"{name}={value}" for name, (value, default) in others.items() if value != default]
        return f"MultiheadAttention({', '.join([f'{self.embed_dim}, {self.num_heads}', *shown])})"

    def double(self) -> MultiheadAttention:
        """Make parameters and results float64. Returns the layer."""
        return self.to(np.float64)

    def float(self) -> MultiheadAttention:
        """Make parameters and results float32. Returns the layer."""
        return self.to(np.float32)

    def half(self) -> MultiheadAttention:
        """Make parameters and results float16. Returns the layer."""
        return self.to(np.float16)

    def bfloat16(self) -> MultiheadAttention:
        """Make parameters and results bfloat16. Returns the layer."""
        return self.to(dtype="bfloat16")

    def to(self, device: object = None, dtype: DTypeLike | Any = None) -> MultiheadAttention:
        """Make parameters and results of a dtype, NumPy's or PyTorch's; a device is ignored, as
        everything is on the CPU. Returns the layer."""
        if dtype is None and not isinstance(device, str) and type(device).__name__ != "device":
            dtype = device
        if dtype is not None:
            self.dtype = as_float_dtype(dtype)
            for name, parameter in self.named_parameters():
                self._set_parameter(name, self._own(parameter))
        return self

    def named_parameters(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """(name, array) of each parameter, in PyTorch's order: the arrays that the layer computes
        with.

        >>> dict(layer.named_parameters())["out_proj.bias"][:] = 0
        """
        for name in _PARAMETERS:
            owner = self.out_proj if name.startswith("out_proj.") else self
            parameter = getattr(owner, name.removeprefix("out_proj."))
            if parameter is not None:
                yield name, parameter

    def parameters(self) -> Iterator[NDArray[Any]]:
        """The arrays of `named_parameters`.

        >>> sum(parameter.size for parameter in MultiheadAttention(64, 4).parameters())
        16640
        """
        return (parameter for _, parameter in self.named_parameters())

    def _set_parameter(self, name: str, parameter: NDArray[Any]) -> None:
        owner = self.out_proj if name.startswith("out_proj.") else self
        setattr(owner, name.removeprefix("out_proj."), parameter)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of the parameters by the names and in the layouts that PyTorch saves.

        >>> sorted(MultiheadAttention(64, 4).state_dict())
        ['in_proj_bias', 'in_proj_weight', 'out_proj.bias', 'out_proj.weight']
        """
        return {name: copied(parameter, order="C")
                for name, parameter in self.named_parameters()}

    def load_state_dict(self, state_dict: Mapping[str, Any],
                        strict: bool = True) -> IncompatibleKeys:
        """Copy parameters in, from a mapping of arrays or tensors as PyTorch saves them.

        Raises ValueError for wrong shapes and, unless strict=False, for missing or unexpected
        names; TypeError for arrays that hold no numbers. Nothing changes then.

        >>> layer.load_state_dict(torch_layer.state_dict())
        IncompatibleKeys(missing_keys=[], unexpected_keys=[])
        """
        wanted = self.state_dict()
        missing = [name for name in wanted if name not in state_dict]
        unexpected = [name for name in state_dict if name not in wanted]
        if strict and (missing or unexpected):
            raise ValueError(f"state_dict: missing keys {missing}, unexpected keys {unexpected};"
                             f" wanted exactly {list(wanted)}")
        loaded = {}
        for name in wanted.keys() - missing:
            array = array_of_kind(state_dict[name], name, "iuf", self.dtype)
            if array.shape != wanted[name].shape:
                raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted[name].shape}")
            loaded[name] = self._own(array)
        for name, array in loaded.items():
            self._set_parameter(name, array)
        return IncompatibleKeys(missing, unexpected)

    def __call__(self, *args: Any, **options: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """The same as `forward`."""
        return self.forward(*args, **options)

    def forward(self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
                key_padding_mask: ArrayLike | None = None, need_weights: bool = True,
                attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Attend.

        Parameters
        ----------
        query : array (query_len, batch, embed_dim), or (batch, query_len, embed_dim) with
            batch_first, or (query_len, embed_dim) for one sequence
        key : array (key_len, batch, kdim)
        value : array (key_len, batch, vdim)
        key_padding_mask : (batch, key_len), or (key_len,) for one sequence
        attn_mask : (query_len, key_len) or (batch * num_heads, query_len, key_len)
            Either mask is bool, True = blocked, or float, added to the scores.
        need_weights, average_attn_weights : bool
            Whether to return the weights, and whether as the mean over the heads.
        is_causal : bool
            A hint that attn_mask is the causal mask, which must be given. Without weights and
            key_padding_mask it replaces attn_mask, and it hides appended keys too.

        Returns
        -------
        output, shaped as query, and the weights (batch, query_len, key_len), per head
        (batch, num_heads, query_len, key_len), or None. Appended keys add their columns. In
        training mode they are the weights after dropout.

        A query whose every key is blocked gives NaN in output and weights where the weights are
        asked for; else its heads attend to nothing (zeros before the output projection), except
        on what PyTorch calls its inference fast path, where the output is NaN too. Calls in eval
        mode take it under PyTorch's conditions, as within torch.no_grad(): self-attention with
        query, key and value one object, a batch first, an even number of heads, biases, nothing
        appended and no float mask.

        Raises
        ------
        ValueError: shapes that do not fit, is_causal without attn_mask. TypeError: masks of a
        type other than bool and float.
        """
        return self._forward(query, key, value, attn_mask, key_padding_mask, need_weights,
                             average_attn_weights, is_causal)
