"""MultiHeadAttention: the figure as a layer that owns its parameters."""

import copy
import math
from collections.abc import Collection, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha import _core
from mha.arguments import (
    as_array,
    as_bool,
    as_int,
    as_probability,
    as_real_dtype,
    no_memory,
    wanted_names,
)
from mha.attention import figure_vjp
from mha.dropout import check_rng, drawn_seed
from mha.gradients import MultiHeadAttentionGradients, MultiHeadPullback

__all__ = ["MultiHeadAttention"]

WEIGHTS = ("W_q", "W_k", "W_v", "W_o")
BIASES = ("b_q", "b_k", "b_v", "b_o")


class Parameter:
    """A parameter of the layer as an attribute; assigning checks its shape and type."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: "MultiHeadAttention | None", owner: type | None = None) -> Any:
        return self if layer is None else layer._parameters.get(self.name)

    def __set__(self, layer: "MultiHeadAttention", array: ArrayLike) -> None:
        layer._set_parameter(self.name, array)


class MultiHeadAttention:
    """Multi-head attention with its parameters (Vaswani et al. 2017, section 3.2.2).

    Parameters
    ----------
    embed_dim : int
        The width of query and output, unless query_dim and output_dim say otherwise.
    num_heads : int
        Must divide embed_dim, unless head_dim is given.
    use_bias : bool
        Whether the four projections have biases (they start as zeros).
    dropout : float in [0, 1)
        On the attention weights; acts only in calls with training=True.
    num_kv_heads : int, by default num_heads
        Key and value heads, each serving num_heads / num_kv_heads query heads.
    head_dim, value_head_dim : int, by default embed_dim / num_heads, and head_dim
    query_dim, key_dim, value_dim, output_dim : int, by default embed_dim, embed_dim, key_dim,
        embed_dim
    dtype : numpy.float32 or numpy.float64
        The layer computes in it and returns it.
    rng : None, int or numpy.random.Generator
        Draws the Xavier-uniform start (Glorot & Bengio 2010) of the weights.

    Attributes
    ----------
    W_q (query_dim, num_heads * head_dim), W_k (key_dim, num_kv_heads * head_dim),
    W_v (value_dim, num_kv_heads * value_head_dim), W_o (num_heads * value_head_dim, output_dim):
    used as x @ W. b_q, b_k, b_v, b_o: their biases, or None.

    Raises
    ------
    ValueError: a size or probability out of range, sizes that do not divide. TypeError: a size
    that is not an int, another dtype. Both name the argument.

    >>> layer = mha.MultiHeadAttention(512, 8, rng=0)
    >>> layer(np.ones((2, 10, 512), np.float32)).shape
    (2, 10, 512)
    """

    W_q = Parameter()
    W_k = Parameter()
    W_v = Parameter()
    W_o = Parameter()
    b_q = Parameter()
    b_k = Parameter()
    b_v = Parameter()
    b_o = Parameter()

    def __init__(self, embed_dim: int, num_heads: int, *, use_bias: bool = True,
                 dropout: float = 0.0, num_kv_heads: int | None = None,
                 head_dim: int | None = None, value_head_dim: int | None = None,
                 query_dim: int | None = None, key_dim: int | None = None,
                 value_dim: int | None = None, output_dim: int | None = None,
                 dtype: DTypeLike = np.float32,
                 rng: "int | np.random.Generator | None" = None) -> None:
        self.embed_dim = _size(embed_dim, "embed_dim")
        self.num_heads = _size(num_heads, "num_heads")
        self.num_kv_heads = _size(num_kv_heads, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {self.num_kv_heads}, wanted a divisor of"
                             f" num_heads ({self.num_heads})")
        if head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim: got {self.embed_dim}, wanted a multiple of num_heads"
                             f" ({self.num_heads}); or give head_dim")
        self.head_dim = _size(head_dim, "head_dim", self.embed_dim // self.num_heads)
        self.value_head_dim = _size(value_head_dim, "value_head_dim", self.head_dim)
        self.query_dim = _size(query_dim, "query_dim", self.embed_dim)
        self.key_dim = _size(key_dim, "key_dim", self.embed_dim)
        self.value_dim = _size(value_dim, "value_dim", self.key_dim)
        self.output_dim = _size(output_dim, "output_dim", self.embed_dim)
        self.dropout = as_probability(dropout, "dropout")
        self.use_bias = as_bool(use_bias, "use_bias")
        self.dtype = as_real_dtype(dtype)
        self._packed: dict[str, object] | None = None
        self._parameters: dict[str, NDArray[Any]] = self._xavier_uniform(rng)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its name."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        values = self.num_kv_heads * self.value_head_dim
        merged = self.num_heads * self.value_head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "W_q": (self.query_dim, queries), "W_k": (self.key_dim, keys),
            "W_v": (self.value_dim, values), "W_o": (merged, self.output_dim)}
        if self.use_bias:
            shapes |= {"b" + name[1:]: shape[1:] for name, shape in shapes.items()}
        return shapes

    def _xavier_uniform(self, rng: "int | np.random.Generator | None") -> dict[str, NDArray[Any]]:
        """Weights uniform in +-sqrt(6 / (in + out)), biases zero."""
        check_rng(rng)
        generator = np.random.default_rng(rng)
        start = {}
        for name, shape in self._shapes().items():
            try:
                start[name] = np.empty(shape, self.dtype)
            except (ValueError, OverflowError, MemoryError):
                raise no_memory(name, shape) from None
            if name in BIASES:
                start[name].fill(0)
            else:
                generator.random(out=start[name], dtype=self.dtype)
                start[name] -= self.dtype.type(0.5)
                start[name] *= self.dtype.type(2 * math.sqrt(6 / sum(shape)))
        return start

    def __call__(self, query: ArrayLike, key: ArrayLike | None = None,
                 value: ArrayLike | None = None, *, mask: ArrayLike | None = None,
                 bias: ArrayLike | None = None, key_lengths: ArrayLike | None = None,
                 causal: bool = False, query_offset: ArrayLike | None = None,
                 window: tuple[int | None, int | None] | None = None,
                 scale: float | None = None, softcap: float | None = None,
                 empty_rows: str = "zeros", training: bool = False,
                 rng: "int | np.random.Generator | None" = None,
                 head_gate: ArrayLike | None = None, return_weights: bool = False,
                 return_lse: bool = False) -> Any:
        """Attend: query (batch, query_len, query_dim) -> output (batch, query_len, output_dim).

        key defaults to query, value to key; 2-D input is one sequence. The options are those of
        `mha.scaled_dot_product_attention`; mask and bias have 2 dimensions (query_len, key_len)
        or 4 (batch, heads, query_len, key_len), either of batch and heads may be 1. Dropout acts
        only with training=True. Returns the output, then the weights
        (batch, heads, query_len, key_len) and lse (batch, heads, query_len) where asked for.

        Raises
        ------
        ValueError, TypeError: as `mha.scaled_dot_product_attention`; a mask of 3 dimensions too.

        Source: Vaswani et al. 2017, section 3.2.2.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> output, weights = layer(np.ones((2, 10, 512)), causal=True, return_weights=True)
        >>> weights.shape
        (2, 8, 10, 10)
        """
        key = query if key is None else key
        value = key if value is None else value
        mask = _with_two_or_four_axes(mask, "mask", query)
        bias = _with_two_or_four_axes(bias, "bias", query)
        dropout = self.dropout if as_bool(training, "training") else 0.0
        weights: Mapping[str, object] = self._packed or self._parameters
        parameters = self._parameters
        with drawn_seed(dropout, rng) as seed:
            return _core.multi_head_attention(
                query, key, value, weights["W_q"], weights["W_k"], weights["W_v"], weights["W_o"],
                parameters.get("b_q"), parameters.get("b_k"), parameters.get("b_v"),
                parameters.get("b_o"), self.num_heads, self.num_kv_heads, head_gate, mask, bias,
                key_lengths, causal, query_offset, window, scale, softcap, empty_rows, dropout,
                seed, return_weights, return_lse, self.dtype, False)

    def vjp(self, query: ArrayLike, key: ArrayLike | None = None,
            value: ArrayLike | None = None, *, mask: ArrayLike | None = None,
            bias: ArrayLike | None = None, key_lengths: ArrayLike | None = None,
            causal: bool = False, query_offset: ArrayLike | None = None,
            window: tuple[int | None, int | None] | None = None, scale: float | None = None,
            softcap: float | None = None, empty_rows: str = "zeros", training: bool = False,
            rng: "int | np.random.Generator | None" = None, head_gate: ArrayLike | None = None,
            wrt: Collection[str] | None = None) -> tuple[NDArray[Any], MultiHeadPullback]:
        """The output and its gradients; arguments as in a call, and wrt.

        wrt names the gradients that are wanted, out of "query", "key", "value", the names of
        `parameters()`, "head_gate" and "bias"; by default all of them. Returns (output, pullback);
        pullback(grad_output, grad_lse=None) returns the gradients by name, None for what was not
        given. Where key or value defaulted to query, or value to key, the gradients are summed into
        the one that was given. Nothing is stored on the layer.

        Raises
        ------
        ValueError, TypeError: as a call; an unknown name in wrt.

        Source: Vaswani et al. 2017, section 3.2.2; attention backwards as in Dao et al. 2022.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> output, pullback = layer.vjp(np.ones((2, 10, 512)), causal=True)
        >>> pullback(np.ones_like(output)).W_o.shape
        (512, 512)
        """
        asked = wanted_names(wrt, MultiHeadAttentionGradients._fields)
        sources = {"key": "query" if key is None else "key"}
        sources["value"] = sources["key"] if value is None else "value"
        needed = asked - {"key", "value"}
        needed |= {name for name, source in sources.items() if source in asked}
        key = query if key is None else key
        value = key if value is None else value
        dropout = self.dropout if as_bool(training, "training") else 0.0
        parameters = self._parameters
        bias = None if bias is None else as_array(bias, "bias")
        bias_shape = () if bias is None else bias.shape
        with drawn_seed(dropout, rng) as seed:
            options = (_with_two_or_four_axes(mask, "mask", query),
                       _with_two_or_four_axes(bias, "bias", query), key_lengths, causal,
                       query_offset, window, scale, softcap, empty_rows, dropout, seed)
            output, whole_pullback = figure_vjp(
                (query, key, value), tuple(parameters[name] for name in WEIGHTS),
                tuple(parameters.get(name) for name in BIASES), self.num_heads, self.num_kv_heads,
                head_gate, options, needed, self.dtype)

        def pullback(grad_output: ArrayLike,
                     grad_lse: ArrayLike | None = None) -> MultiHeadAttentionGradients:
            gradients = whole_pullback(grad_output, grad_lse)._asdict()
            for name, source in (("value", sources["value"]), ("key", sources["key"])):
                if source != name:
                    if source in asked:
                        gradients[source] = gradients[source] + gradients[name]
                    gradients[name] = None
            if gradients["bias"] is not None:
                gradients["bias"] = gradients["bias"].reshape(bias_shape)
            return MultiHeadAttentionGradients(**gradients)

        return output, pullback

    def parameters(self) -> dict[str, NDArray[Any]]:
        """The live arrays by name: changing one in place changes the layer.

        >>> layer = mha.MultiHeadAttention(512, 8, use_bias=False)
        >>> list(layer.parameters())
        ['W_q', 'W_k', 'W_v', 'W_o']
        """
        return dict(self._parameters)

    def load_parameters(self, mapping: Mapping[str, ArrayLike]) -> None:
        """Copy the arrays of a mapping with the names of `parameters()` into the layer.

        They are written into the arrays that `parameters()` gave before; where two of these share
        memory, or one is read-only, new arrays take their place.

        Raises
        ------
        ValueError: missing or unknown names, wrong shapes, a frozen layer. TypeError: arrays that
        are not numbers. Nothing has changed then.

        >>> layer, other = mha.MultiHeadAttention(512, 8), mha.MultiHeadAttention(512, 8)
        >>> layer.load_parameters(other.parameters())
        """
        self._check_not_frozen("mapping")
        if not isinstance(mapping, Mapping):
            raise TypeError(f"mapping: got {type(mapping).__name__}, wanted names with arrays")
        missing = sorted(self._parameters.keys() - mapping.keys())
        unknown = sorted(mapping.keys() - self._parameters.keys(), key=str)
        if missing or unknown:
            got = " and ".join([f"unknown names {unknown}"] * bool(unknown)
                               + [f"none for {missing}"] * bool(missing))
            raise ValueError(f"mapping: got {got}, wanted exactly {sorted(self._parameters)}")
        loaded = {name: self._checked(name, mapping[name]).copy() for name in self._parameters}
        old = self._parameters
        alone = {name: _is_alone(old[name], [old[other] for other in old if other != name])
                 for name in old}
        for name, parameter in loaded.items():
            if alone[name]:
                self._parameters[name][...] = parameter
            else:
                self._parameters[name] = parameter

    @property
    def num_parameters(self) -> int:
        """How many numbers the layer learns: 4 * embed_dim**2 without biases in the plain case.

        >>> mha.MultiHeadAttention(512, 8, use_bias=False).num_parameters
        1048576
        """
        return sum(parameter.size for parameter in self._parameters.values())

    def astype(self, dtype: DTypeLike) -> Self:
        """A copy of the layer that computes in dtype.

        Raises
        ------
        TypeError: a dtype other than float32 and float64.

        >>> mha.MultiHeadAttention(512, 8).astype(np.float64).W_q.dtype
        dtype('float64')
        """
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__, dtype=as_real_dtype(dtype), _packed=None)
        other._parameters = {name: parameter.astype(other.dtype)
                             for name, parameter in self._parameters.items()}
        return other

    def freeze(self) -> Self:
        """Copy and pack the parameters for inference: faster, and read-only until `unfreeze()`.

        The result's bits stay the same. Returns the layer.

        >>> mha.MultiHeadAttention(512, 8).freeze().frozen
        True
        """
        if self._packed is None:
            copies = {name: parameter.copy() for name, parameter in self._parameters.items()}
            self._packed = {name: _core.pack_weight(copies[name]) for name in WEIGHTS}
            for parameter in copies.values():
                parameter.flags.writeable = False
            self._parameters = copies
        return self

    def unfreeze(self) -> Self:
        """Make the parameters writable again. Returns the layer.

        >>> mha.MultiHeadAttention(512, 8).freeze().unfreeze().frozen
        False
        """
        if self._packed is not None:
            self._packed = None
            self._parameters = {name: parameter.copy()
                                for name, parameter in self._parameters.items()}
        return self

    @property
    def frozen(self) -> bool:
        """Whether `freeze()` is in force."""
        return self._packed is not None

    def prune_heads(self, heads: Collection[int]) -> Self:
        """Remove heads for good: their columns of W_q, b_q and rows of W_o, and those of W_k, W_v,
        b_k and b_v that no head needs any more: W_q becomes (query_dim, heads left * head_dim).

        heads are indices, negative ones from the end, repeated ones once. The output is that of
        the layer before with head_gate 0 for these heads, up to rounding; later heads move up. The
        arrays are new ones: those that `parameters()` gave before are no longer the layer's.
        Returns the layer.

        Raises
        ------
        ValueError: indices out of range, all heads at once, a frozen layer; where heads share key
        heads, unequal numbers of heads left to those that stay. TypeError: heads that are not a
        collection of ints. Nothing has changed then.

        Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> layer.prune_heads([0, 5]).W_q.shape
        (512, 384)
        """
        pruned_heads = _as_ints(heads)
        self._check_not_frozen("heads")
        kept = np.array(_heads_that_stay(pruned_heads, self.num_heads))
        key_heads, heads_left = np.unique(kept // (self.num_heads // self.num_kv_heads),
                                          return_counts=True)
        if heads_left.min() != heads_left.max():
            raise ValueError(f"heads: got {pruned_heads}, which leaves {heads_left.tolist()} heads"
                             " to the key heads, wanted equally many for each that stays")
        chosen = {"q": (kept, self.head_dim), "k": (key_heads, self.head_dim),
                  "v": (key_heads, self.value_head_dim), "o": (kept, self.value_head_dim)}
        pruned = {}
        for name, array in self._parameters.items():
            of_heads, width = chosen[name[-1]]
            columns = (of_heads[:, None] * width + np.arange(width)).ravel()
            pruned[name] = array.copy() if name == "b_o" else np.take(
                array, columns, axis=0 if name == "W_o" else -1)
        vars(self).update(_parameters=pruned, num_heads=len(kept), num_kv_heads=len(key_heads))
        return self

    def _check_not_frozen(self, name: str) -> None:
        if self._packed is not None:
            raise ValueError(f"{name}: got a change to a frozen layer, wanted unfreeze() before it")

    def _checked(self, name: str, array: ArrayLike) -> NDArray[Any]:
        array = as_array(array, name)
        wanted = self._shapes()[name]
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{name}: got an array of {array.dtype}, wanted {self.dtype}")
        if array.shape != wanted:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted}")
        return array.astype(self.dtype, copy=False)

    def _set_parameter(self, name: str, array: ArrayLike) -> None:
        self._check_not_frozen(name)
        if name in BIASES and not self.use_bias:
            raise ValueError(f"{name}: got a bias for a layer without, wanted use_bias=True")
        self._parameters[name] = self._checked(name, array)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": self._packed is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _packed=None)
        if state["_packed"]:
            self.freeze()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with({name: copy.deepcopy(value, memo) for name, value in vars(self).items()
                           if name != "_packed"})

    def __copy__(self) -> Self:
        return self._with({**vars(self), "_parameters": dict(self._parameters)})

    def _with(self, attributes: dict[str, Any]) -> Self:
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(attributes, _packed=None)
        return other.freeze() if self.frozen else other

    def __repr__(self) -> str:
        shown = [str(self.embed_dim), str(self.num_heads)]
        plain = {"use_bias": True, "dropout": 0.0, "num_kv_heads": self.num_heads,
                 "head_dim": self.embed_dim / self.num_heads, "value_head_dim": self.head_dim,
                 "query_dim": self.embed_dim, "key_dim": self.embed_dim,
                 "value_dim": self.key_dim, "output_dim": self.embed_dim}
        shown += [f"{name}={getattr(self, name)}" for name, default in plain.items()
                  if getattr(self, name) != default]
        shown += [f"dtype={self.dtype}"] + ["frozen"] * self.frozen
        return f"MultiHeadAttention({', '.join(shown)})"


def _size(value: Any, name: str, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    size = as_int(value, name)
    if size < 1:
        raise ValueError(f"{name}: got {size}, wanted at least 1")
    return size


def _is_alone(array: NDArray[Any], others: Collection[NDArray[Any]]) -> bool:
    """Whether each element may be written without changing another one."""
    repeats = any(stride == 0 and size > 1
                  for stride, size in zip(array.strides, array.shape, strict=True))
    return array.flags.writeable and not repeats and not any(
        np.may_share_memory(array, other) for other in others)


def _as_ints(heads: Any) -> list[int]:
    is_number = isinstance(heads, np.ndarray) and heads.ndim == 0
    if isinstance(heads, (str, bytes)) or not isinstance(heads, Collection) or is_number:
        raise TypeError(f"heads: got {type(heads).__name__}, wanted a list of ints")
    return [as_int(head, "heads") for head in heads]


def _heads_that_stay(heads: list[int], num_heads: int) -> list[int]:
    for head in heads:
        if not -num_heads <= head < num_heads:
            raise ValueError(f"heads: got {head}, wanted indices into {num_heads} heads")
    stay = sorted(set(range(num_heads)) - {head % num_heads for head in heads})
    if not stay:
        raise ValueError(f"heads: got all {num_heads}, wanted one to stay")
    return stay


def _with_two_or_four_axes(array: ArrayLike | None, name: str,
                           query: ArrayLike) -> NDArray[Any] | None:
    """The mask or bias as the core takes it: a single sequence has no batch axis."""
    if array is None:
        return None
    array = as_array(array, name)
    if array.ndim not in (2, 4):
        raise ValueError(
            f"{name}: got {array.ndim} dimensions, wanted 2 (query_len, key_len) or 4"
            f" (batch, heads, query_len, key_len); for one per batch item write {name}[:, None]")
    if array.ndim == 4 and len(array) == 1 and as_array(query, "query").ndim == 2:
        return array[0]
    return array
