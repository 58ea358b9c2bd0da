"""NNX' attention: a layer that owns its parameters and its cache.

    layer = MultiHeadAttention(num_heads=8, in_features=512, rngs=0, decode=False)
    update(layer, flax.nnx.to_pure_dict(flax.nnx.state(flax_layer, flax.nnx.Param)))
    output = layer(x)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_size
from mha._base.keywords import checks_keywords
from mha._base.pieces import copied
from mha.compat._shared.dtypes import as_float_dtype
from mha.compat._shared.flags import as_flag
from mha.compat._shared.layers import checked_dropout, described
from mha.compat.flax import _attention
from mha.compat.flax._attention import Cache, Initializer
from mha.compat.flax._dot_product import attend_heads
from mha.compat.flax.linen import combine_masks, make_attention_mask, make_causal_mask

__all__ = ["MultiHeadAttention", "clone", "combine_masks", "dot_product_attention",
           "make_attention_mask", "make_causal_mask", "pop", "state", "update"]

Array = NDArray[Any]


class Part:
    """A linear layer or a norm of a layer: kernel and bias, or scale."""

    def __init__(self, **arrays: Array) -> None:
        vars(self).update(arrays)

    def __getattr__(self, name: str) -> Any:
        if name in ("kernel", "bias", "scale"):  # in Flax, too, what is absent is None
            return None
        raise AttributeError(f"Part has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"Part({', '.join(f'{name}={array.shape}' for name, array in vars(self).items())})"


class MultiHeadAttention:
    """flax.nnx.MultiHeadAttention.

    Parameters
    ----------
    num_heads, in_features : int
        The heads, and the width of inputs_q.
    qkv_features, out_features, in_kv_features : int, by default in_features
        All heads of query together, the output, and the width of inputs_k and inputs_v.
    num_kv_heads : int, by default num_heads
        Key and value heads, each serving several of query's.
    rngs : a key
        An int, an array of ints, a key of JAX, flax.nnx.Rngs or a generator: draws the parameters,
        and the dropout of calls without one of their own.
    keep_rngs : bool
        Whether the layer keeps rngs for its calls, where it has dropout.
    decode : bool, optional
        Whether calls go on behind the positions of the cache that `init_cache` makes; wanted, here
        or in the call.
    The rest : as in `mha.compat.flax.linen.MultiHeadDotProductAttention`

    Attributes
    ----------
    query, key, value, out: each with kernel and bias, shaped as in Linen's tree, key and value
    (in_kv_features, num_kv_heads, head_dim); query_ln, key_ln with scale, or None; cached_key,
    cached_value (batch..., max_length, num_kv_heads, head_dim), cache_index, or None; rngs, the
    generator that calls draw from, or None;
    attention_weights, once a call has sown them: a tuple, the last call's last.

    Raises
    ------
    ValueError: sizes that do not divide, dropout_rate outside [0, 1). TypeError: sizes that are no
    ints, another dtype.

    Source: Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023.

    >>> layer = MultiHeadAttention(8, 512, num_kv_heads=2, rngs=0, decode=False)
    >>> layer(np.ones((2, 10, 512), np.float32)).shape
    (2, 10, 512)
    """

    query_ln: Part | None
    key_ln: Part | None
    attention_weights: tuple[Array, ...]

    @checks_keywords
    def __init__(self, num_heads: int, in_features: int, qkv_features: int | None = None,
                 out_features: int | None = None, num_kv_heads: int | None = None,
                 in_kv_features: int | None = None, *, dtype: DTypeLike | None = None,
                 param_dtype: DTypeLike = np.float32, broadcast_dropout: bool = True,
                 dropout_rate: float = 0.0, deterministic: bool | None = None,
                 precision: object = None, kernel_init: Initializer | None = None,
                 out_kernel_init: Initializer | None = None, bias_init: Initializer | None = None,
                 out_bias_init: Initializer | None = None, use_bias: bool = True,
                 attention_fn: object = None, decode: bool | None = None,
                 normalize_qk: bool = False, rngs: Any, keep_rngs: bool = True) -> None:
        if attention_fn is not None:
            raise ValueError(f"attention_fn: got {attention_fn!r}, wanted None: the attention is"
                             " mha's")
        self.num_heads = as_size(num_heads, "num_heads")
        self.in_features = as_size(in_features, "in_features")
        self.qkv_features = as_size(qkv_features, "qkv_features", self.in_features)
        self.out_features = as_size(out_features, "out_features", self.in_features)
        self.in_kv_features = as_size(in_kv_features, "in_kv_features", self.in_features)
        self.num_kv_heads = as_size(num_kv_heads, "num_kv_heads", self.num_heads)
        for name, size, divisor in (("qkv_features", self.qkv_features, self.num_heads),
                                    ("num_heads", self.num_heads, self.num_kv_heads)):
            if size % divisor:
                raise ValueError(f"{name}: got {size}, wanted a multiple of {divisor} heads")
        self.head_dim = self.qkv_features // self.num_heads
        self.dtype = None if dtype is None else as_float_dtype(dtype)
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = checked_dropout(dropout_rate, "dropout_rate")
        self.deterministic = deterministic
        self.use_bias = use_bias
        self.decode = decode
        self.normalize_qk = normalize_qk
        self.cached_key: Array | None = None
        self.cached_value: Array | None = None
        self.cache_index: Array | None = None
        generator = _attention.generator_of(rngs, "rngs")
        self.rngs = generator if keep_rngs and self.dropout_rate else None
        self.query_ln = self.key_ln = None
        self._place(_attention.drawn_parameters(
            self._shapes(), generator, as_float_dtype(param_dtype), {
                ("", "kernel"): kernel_init, ("", "bias"): bias_init,
                ("out", "kernel"): out_kernel_init or kernel_init,
                ("out", "bias"): out_bias_init or bias_init}))

    def _shapes(self) -> _attention.Shapes:
        return _attention.parameter_shapes(
            (self.in_features, self.in_kv_features, self.in_kv_features),
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            out_features=self.out_features, use_bias=self.use_bias,
            normalize_qk=self.normalize_qk)

    def _place(self, parameters: _attention.Parameters) -> None:
        for name, arrays in parameters.items():
            setattr(self, name, Part(**arrays))

    def _parameters(self) -> dict[str, dict[str, Array]]:
        return {name: vars(getattr(self, name)) for name in self._shapes()}

    def __repr__(self) -> str:
        others = {"qkv_features": self.in_features, "out_features": self.in_features,
                  "num_kv_heads": self.num_heads, "in_kv_features": self.in_features,
                  "dropout_rate": 0.0, "use_bias": True, "decode": None, "normalize_qk": False}
        return described(self, ("num_heads", "in_features"), others)

    @checks_keywords
    def __call__(self, inputs_q: ArrayLike, inputs_k: ArrayLike | None = None,
                 inputs_v: ArrayLike | None = None, *, mask: ArrayLike | None = None,
                 deterministic: bool | None = None, rngs: Any = None, sow_weights: bool = False,
                 decode: bool | None = None, is_causal: bool = False) -> Array:
        """Attend.

        Parameters
        ----------
        inputs_q : array (batch..., query_len, in_features)
        inputs_k, inputs_v : arrays (batch..., key_len, in_kv_features)
            inputs_k defaults to inputs_q, inputs_v to inputs_k.
        mask : array, True or not 0 = attend, optional
            Broadcast to (batch..., num_heads, query_len, key_len); with a cache, key_len is its
            length.
        deterministic, decode : bool, by default the layer's
        rngs : a key, by default the layer's
            Draws the dropout.
        sow_weights : bool
            Whether to put the weights (batch..., num_heads, query_len, key_len), before dropout,
            behind those in `attention_weights`; `pop` takes them out.
        is_causal : bool
            Query i sees keys 0 to i; not for calls with decode.

        Returns
        -------
        output (batch..., query_len, out_features); a query that sees no key has the mean of all
        values.

        Raises
        ------
        ValueError: shapes that do not fit, decode without a cache, or a full one; deterministic or
        decode that nobody says. TypeError: arrays that hold no numbers.
        """
        sow_weights, is_causal = (as_flag(flag, name) for flag, name in (
            (sow_weights, "sow_weights"), (is_causal, "is_causal")))
        inputs = _attention.checked_inputs(inputs_q, inputs_k, inputs_v)
        parameters = _attention.checked_parameters(self._parameters(), self._shapes())
        for array, name, width in zip(inputs, ("inputs_q", "inputs_k", "inputs_v"), (
                self.in_features, self.in_kv_features, self.in_kv_features)):
            if array.shape[-1] != width:
                raise ValueError(f"{name}: got shape {array.shape}, wanted {width} as last axis")
        cache = None
        if _attention.merged("decode", self.decode, decode):
            if self.cached_key is None or self.cached_value is None or self.cache_index is None:
                raise ValueError("decode: got True without a cache, wanted a call of init_cache"
                                 " before")
            if is_causal:
                raise ValueError("is_causal: got True with decode, wanted False: a query sees the"
                                 " positions so far as it is")
            cache = Cache(self.cached_key, self.cached_value, int(self.cache_index))
        dropping = self.dropout_rate > 0 and not _attention.merged(
            "deterministic", self.deterministic, deterministic)
        generator = self.rngs
        if dropping and rngs is not None:
            generator = _attention.generator_of(rngs, "rngs")
        elif dropping and generator is None:
            raise ValueError("rngs: got None for the dropout of a layer made with keep_rngs=False,"
                             " wanted a key")
        attended = _attention.attend(
            parameters, inputs, dtype=self.dtype, mask=mask, causal=is_causal,
            dropout=self.dropout_rate if dropping else 0.0, shared_dropout=self.broadcast_dropout,
            generator=generator, cache=cache, return_weights=sow_weights)
        if attended.cache is not None:
            self._place_cache(attended.cache)
        if attended.weights is not None:
            self.attention_weights = (*getattr(self, "attention_weights", ()), attended.weights)
        return attended.output

    def _place_cache(self, cache: Cache) -> None:
        self.cached_key, self.cached_value = cache.key, cache.value
        self.cache_index = np.array(cache.length, np.int32)

    def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike = np.float32) -> None:
        """An empty cache, for inputs of shape (batch..., max_length, in_features)."""
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self._place_cache(_attention.empty_cache(shape, as_float_dtype(dtype)))


@checks_keywords
def dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
        mask: ArrayLike | None = None, broadcast_dropout: bool = True, dropout_rng: Any = None,
        dropout_rate: float = 0.0, deterministic: bool = False, dtype: DTypeLike | None = None,
        precision: object = None, module: Any = None, promote_dtype: object = None,
        is_causal: bool = False) -> Array:
    """flax.nnx.dot_product_attention.

    Parameters
    ----------
    query : array (batch..., query_len, num_heads, head_dim)
    key : array (batch..., key_len, kv_heads, head_dim)
    value : array (batch..., key_len, kv_heads, value_head_dim)
        kv_heads divides num_heads.
    promote_dtype : None; dtype, or the widest of the three, is what is computed in
    is_causal : bool
        Query i sees keys 0 to i.
    The rest : as in `mha.compat.flax.linen.dot_product_attention`

    Returns
    -------
    array (batch..., query_len, num_heads, value_head_dim)

    Raises
    ------
    ValueError, TypeError: as Linen's; a promote_dtype.

    Source: Vaswani et al. 2017, section 3.2.1; grouped heads: Ainslie et al. 2023.

    >>> q, k = np.ones((2, 4, 8, 64), np.float32), np.ones((2, 6, 2, 64), np.float32)
    >>> dot_product_attention(q, k, k, is_causal=True).shape
    (2, 4, 8, 64)
    """
    if promote_dtype is not None:
        raise ValueError(f"promote_dtype: got {promote_dtype!r}, wanted None: dtype says what is"
                         " computed in")
    return attend_heads(
        query, key, value, bias=bias, mask=mask, shared_dropout=broadcast_dropout,
        dropout_rng=dropout_rng, dropout_rate=dropout_rate, deterministic=deterministic,
        dtype=dtype, module=module, causal=as_flag(is_causal, "is_causal"), collection=None,
        grouped=True)


def state(layer: MultiHeadAttention) -> dict[str, dict[str, Array]]:
    """Copies of a layer's parameters, as flax.nnx.to_pure_dict of its state has them.

    >>> sorted(state(MultiHeadAttention(2, 8, rngs=0)))
    ['key', 'out', 'query', 'value']
    """
    return {name: {key: copied(array, order="C") for key, array in arrays.items()}
            for name, arrays in layer._parameters().items()}


def clone(layer: MultiHeadAttention) -> MultiHeadAttention:
    """A layer with copies of this one's parameters, cache, generator and sown weights, as flax.nnx'
    clone makes it.

    >>> layer = MultiHeadAttention(2, 8, rngs=0, decode=False)
    >>> clone(layer)(np.ones((3, 5, 8), np.float32)).shape
    (3, 5, 8)
    """
    return copy.deepcopy(layer)


def update(layer: MultiHeadAttention, state: Mapping[str, Any]) -> None:
    """Copies parameters in: a tree of names and arrays. ValueError for other names or shapes, and
    nothing changes then.

    >>> update(MultiHeadAttention(2, 8, rngs=0), state(MultiHeadAttention(2, 8, rngs=1)))
    """
    layer._place({name: {key: copied(array, order="C") for key, array in arrays.items()}
                  for name, arrays
                  in _attention.checked_parameters(state, layer._shapes()).items()})


def pop(layer: MultiHeadAttention) -> dict[str, tuple[Array, ...]]:
    """What calls with sow_weights=True have sown, taken out of the layer, as flax.nnx.to_pure_dict
    of nnx.pop(layer, nnx.Intermediate) has it; empty where none has.

    >>> layer, x = MultiHeadAttention(2, 8, rngs=0, decode=False), np.ones((3, 5, 8), np.float32)
    >>> output = layer(x, sow_weights=True)
    >>> [weights.shape for weights in pop(layer)["attention_weights"]], pop(layer)
    ([(3, 2, 5, 5)], {})
    """
    name = "attention_weights"
    sown = vars(layer).pop(name, None)
    return {} if sown is None else {name: sown}
