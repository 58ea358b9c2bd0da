"""Linen's attention: layers without state, their parameters in trees.

    layer = MultiHeadDotProductAttention(num_heads=8)
    variables = layer.init(0, x)                       # {"params": {"query": {"kernel": ...}, ...}}
    output = layer.apply(variables, x, mask=make_causal_mask(x[..., 0]))
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_size, detached_array
from mha._base.keywords import checks_keywords, other_names
from mha.compat._shared.dtypes import as_float_dtype
from mha.compat._shared.flags import as_flag
from mha.compat._shared.layers import checked_dropout, described
from mha.compat.flax import _attention
from mha.compat.flax._attention import Cache, Initializer
from mha.compat.flax._dot_product import attend_heads

__all__ = ["MultiHeadAttention", "MultiHeadDotProductAttention", "SelfAttention", "combine_masks",
           "dot_product_attention", "make_attention_mask", "make_causal_mask"]

Array = NDArray[Any]
Variables = Mapping[str, Any]

other_names("training", "deterministic", "deterministic=, its opposite")
other_names("dropout dropout_p p", "dropout_rate")
other_names("return_weights return_attention_scores need_weights", "sow_weights",
            "sow_weights=True, and mutable=['intermediates'] of apply")
other_names("embed_dim d_model key_dim", "qkv_features",
            "qkv_features=, the width of all heads together")
other_names("query", "inputs_q")
other_names("key", "inputs_k")
other_names("value", "inputs_v")
other_names("attn_mask attention_mask", "mask", "mask=, True = attend")


class Scope:
    """The variables of one call, and what it makes of them."""

    def __init__(self, variables: Variables | None, rngs: Any,
                 mutable: bool | str | Collection[str]) -> None:
        names = (mutable,) if isinstance(mutable, str) else mutable
        self.variables = variables  # None: to be drawn
        self.rngs = rngs if isinstance(rngs, Mapping) or rngs is None else {"params": rngs}
        self._mutable = names
        self.made: dict[str, Any] = {}

    def may_change(self, collection: str) -> bool:
        """Whether the call may return this collection."""
        return self._mutable if isinstance(self._mutable, bool) else collection in self._mutable

    def sow(self, name: str, array: Any) -> None:
        """Behind those of the calls before, among the intermediates."""
        given = self.variables or {}
        sown: Any = self.made.get("intermediates", given.get("intermediates", {}))
        self.made["intermediates"] = {**sown, name: (*sown.get(name, ()), array)}

    def generator(self, name: str) -> np.random.Generator:
        """For "params" or "dropout": Linen takes the one of params for both, too."""
        keys = self.rngs or {}
        if name not in keys and "params" not in keys:
            raise ValueError(f"rngs: got none for {name}, wanted rngs={{{name!r}: key}}")
        return _attention.generator_of(keys.get(name, keys.get("params")), "rngs")


class MultiHeadDotProductAttention:
    """flax.linen.MultiHeadDotProductAttention.

    Parameters
    ----------
    num_heads : int
        Divides qkv_features.
    dtype : float16, bfloat16, float32 or float64, by default the widest of inputs and parameters
        What is computed in; halves in float32 and rounded once.
    param_dtype : of the parameters that `init` draws
    qkv_features, out_features : int, by default the width of inputs_q
        All heads together, and the output.
    broadcast_dropout : bool
        Whether all heads of all sequences lose the same weights: computed head by head, which
        takes longer.
    dropout_rate : float in [0, 1)
        On the attention weights, in calls that are not deterministic.
    deterministic : bool, optional
        Of calls that do not say it; wanted, here or there, where dropout_rate is not 0.
    precision : ignored
    kernel_init, out_kernel_init, bias_init, out_bias_init : functions, optional
        Of a generator, a shape and a dtype, or those of jax.nn.initializers. By default LeCun's
        truncated normal, and zeros.
    use_bias : bool
    attention_fn : None; the attention is `mha`'s
    decode : bool
        Whether calls go on behind the positions of a cache, one at a time.
    normalize_qk : bool
        LayerNorm without bias on each head of query and key.
    force_fp32_for_softmax : bool
        Softmax always is at least that; with True the weights that calls sow are float32.
    name : str, optional

    Parameter tree
    --------------
    query, key, value: kernel (width, num_heads, head_dim), bias (num_heads, head_dim); query_ln,
    key_ln: scale (head_dim,); out: kernel (num_heads, head_dim, out_features), bias.

    Raises
    ------
    ValueError: sizes that do not divide, dropout_rate outside [0, 1). TypeError: sizes that are no
    ints, another dtype.

    Source: Vaswani et al. 2017, section 3.2.2; the norms: Dehghani et al. 2023, "Scaling Vision
    Transformers to 22 Billion Parameters", section 2.

    >>> layer = MultiHeadDotProductAttention(num_heads=8)
    >>> x = np.ones((2, 10, 512), np.float32)
    >>> layer.apply(layer.init(0, x), x).shape
    (2, 10, 512)
    """

    _scope: Scope | None = None

    @checks_keywords
    def __init__(self, num_heads: int, dtype: DTypeLike | None = None,
                 param_dtype: DTypeLike = np.float32, qkv_features: int | None = None,
                 out_features: int | None = None, broadcast_dropout: bool = True,
                 dropout_rate: float = 0.0, deterministic: bool | None = None,
                 precision: object = None, kernel_init: Initializer | None = None,
                 out_kernel_init: Initializer | None = None,
                 bias_init: Initializer | None = None, out_bias_init: Initializer | None = None,
                 use_bias: bool = True, attention_fn: object = None, decode: bool = False,
                 normalize_qk: bool = False, force_fp32_for_softmax: bool = False, *,
                 name: str | None = None) -> None:
        arguments = {name: value for name, value in locals().items()
                     if name not in ("self", "unknown")}
        if attention_fn is not None:
            raise ValueError(f"attention_fn: got {attention_fn!r}, wanted None: the attention is"
                             " mha's")
        self._arguments = arguments
        self.num_heads = as_size(num_heads, "num_heads")
        self.dtype = None if dtype is None else as_float_dtype(dtype)
        self.param_dtype = as_float_dtype(param_dtype)
        self.qkv_features = None if qkv_features is None else as_size(qkv_features, "qkv_features")
        self.out_features = None if out_features is None else as_size(out_features, "out_features")
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = checked_dropout(dropout_rate, "dropout_rate")
        self.deterministic = deterministic
        self.use_bias = use_bias
        self.decode = decode
        self.normalize_qk = normalize_qk
        self.force_fp32_for_softmax = as_flag(force_fp32_for_softmax, "force_fp32_for_softmax")
        self.name = name
        self._initializers = {
            ("", "kernel"): kernel_init, ("", "bias"): bias_init,
            ("out", "kernel"): out_kernel_init or kernel_init,
            ("out", "bias"): out_bias_init or bias_init}

    def __repr__(self) -> str:
        others = {"qkv_features": None, "out_features": None, "dropout_rate": 0.0,
                  "use_bias": True, "decode": False, "normalize_qk": False}
        return described(self, ("num_heads",), others)

    def clone(self, **arguments: Any) -> Self:
        """A layer made with these arguments, otherwise with this one's.

        >>> MultiHeadDotProductAttention(num_heads=8).clone(decode=True)
        MultiHeadDotProductAttention(num_heads=8, decode=True)
        """
        return type(self)(**{**self._arguments, **arguments})

    def bind(self, variables: Variables, *, rngs: Any = None,
             mutable: bool | str | Collection[str] = False) -> Self:
        """The layer with these variables, to be called as a function."""
        return self._in(Scope(variables, rngs, mutable))

    def _in(self, scope: Scope) -> Self:
        bound = copy.copy(self)
        bound._scope = scope
        return bound

    def init_with_output(self, rngs: Any, *inputs: Any, **options: Any) -> tuple[Array, Variables]:
        """(what a call returns, the variables that rngs draws for it).

        rngs is a key, or {"params": key, "dropout": key}; a key is an int, an array of ints or a
        generator. With decode=True the variables have a cache, empty, as long as inputs_k.
        """
        scope = Scope(None, rngs, True)
        output = self._in(scope)(*inputs, **options)
        return output, {name: scope.made[name] for name in ("params", "cache")
                        if name in scope.made}

    def init(self, rngs: Any, *inputs: Any, **options: Any) -> Variables:
        """The variables that rngs draws for a call with these inputs.

        >>> layer = MultiHeadDotProductAttention(num_heads=8, qkv_features=16)
        >>> layer.init(0, np.ones((2, 3, 5)))["params"]["query"]["kernel"].shape
        (5, 8, 2)
        """
        return self.init_with_output(rngs, *inputs, **options)[1]

    def apply(self, variables: Variables, *inputs: Any, rngs: Any = None,
              mutable: bool | str | Collection[str] = False, **options: Any) -> Any:
        """What a call with these variables returns; inputs and options are those of a call.

        rngs={"dropout": key} draws the dropout. With mutable, the names of collections, (output,
        those that changed): "cache" with decode=True, "intermediates" with sow_weights=True. The
        variables stay as they are.

        Raises
        ------
        ValueError: parameters of other names or shapes, a cache that is missing, full or not
        mutable.
        """
        scope = Scope(variables, rngs, mutable)
        output = self._in(scope)(*inputs, **options)
        if mutable is False:
            return output
        if scope.may_change("params"):
            scope.made["params"] = variables["params"]
        return output, {name: made for name, made in scope.made.items() if scope.may_change(name)}

    @checks_keywords
    def __call__(self, inputs_q: ArrayLike, inputs_k: ArrayLike | None = None,
                 inputs_v: ArrayLike | None = None, *, inputs_kv: ArrayLike | None = None,
                 mask: ArrayLike | None = None, deterministic: bool | None = None,
                 dropout_rng: Any = None, sow_weights: bool = False) -> Array:
        """Attend: of a layer with its variables, as `init`, `apply` and `bind` make it.

        Parameters
        ----------
        inputs_q : array (batch..., query_len, width)
        inputs_k, inputs_v : arrays (batch..., key_len, width)
            inputs_k defaults to inputs_q, inputs_v to inputs_k.
        inputs_kv : array
            For both of them.
        mask : array, True or not 0 = attend, optional
            Broadcast to (batch..., num_heads, query_len, key_len); with a cache, key_len is its
            length.
        deterministic : bool, optional
            Whether dropout is off.
        dropout_rng : a key, optional
            Draws the dropout instead of rngs["dropout"].
        sow_weights : bool
            Whether to put the weights, before dropout, into "intermediates".

        Returns
        -------
        output (batch..., query_len, out_features); a query that sees no key has the mean of all
        values.

        Raises
        ------
        ValueError: shapes that do not fit, no variables, no key for dropout. TypeError: arrays
        that hold no numbers.
        """
        scope = self._scope
        if scope is None:
            raise ValueError(f"{type(self).__name__}: got a call of a layer without parameters,"
                             " wanted layer.apply(layer.init(0, inputs_q), inputs_q)")
        if inputs_kv is not None:
            if inputs_k is not None or inputs_v is not None:
                raise ValueError("inputs_kv: got it together with inputs_k or inputs_v, wanted"
                                 " inputs_k and inputs_v alone")
            warnings.warn("inputs_kv: Flax will take it no longer, wanted inputs_k and inputs_v",
                          DeprecationWarning, stacklevel=2)
            inputs_k = inputs_v = inputs_kv
        sow_weights = as_flag(sow_weights, "sow_weights")
        inputs = _attention.checked_inputs(inputs_q, inputs_k, inputs_v)
        parameters = self._parameters(scope, inputs)
        dropping = bool(self.dropout_rate) and not self._is_deterministic(deterministic)
        generator = None
        if dropping:
            generator = (scope.generator("dropout") if dropout_rng is None
                         else _attention.generator_of(dropout_rng, "dropout_rng"))
        attended = _attention.attend(
            parameters, inputs, dtype=self.dtype, mask=mask,
            dropout=self.dropout_rate if dropping else 0.0,
            shared_dropout=self.broadcast_dropout, generator=generator,
            cache=self._cache(scope, inputs, parameters) if self.decode else None,
            return_weights=sow_weights, rounds_weights=not self.force_fp32_for_softmax)
        if attended.cache is not None:
            scope.made["cache"] = _as_collection(attended.cache)
        if sow_weights:
            scope.sow("attention_weights", attended.weights)
        return attended.output

    def _is_deterministic(self, calls: bool | None) -> bool:
        if self.deterministic is not None and calls is not None:
            raise ValueError("deterministic: got it from the layer and from the call, wanted one"
                             " of them")
        return bool(_attention.merged("deterministic", self.deterministic, calls))

    def _parameters(self, scope: Scope,
                    inputs: tuple[Array, Array, Array]) -> dict[str, dict[str, Array]]:
        """Those of the scope, drawn into it where it has none."""
        query_dim, key_dim, value_dim = (array.shape[-1] for array in inputs)
        qkv_features = self.qkv_features or query_dim
        if qkv_features % self.num_heads:
            raise ValueError(f"qkv_features: got {qkv_features}, wanted a multiple of num_heads"
                             f" ({self.num_heads})")
        shapes = _attention.parameter_shapes(
            (query_dim, key_dim, value_dim), num_heads=self.num_heads,
            num_kv_heads=self.num_heads, head_dim=qkv_features // self.num_heads,
            out_features=self.out_features or query_dim, use_bias=self.use_bias,
            normalize_qk=self.normalize_qk)
        if scope.variables is None:
            scope.made["params"] = drawn = _attention.drawn_parameters(
                shapes, scope.generator("params"), self.param_dtype, self._initializers)
            return drawn
        if "params" not in scope.variables:
            raise ValueError(f"variables: got {sorted(scope.variables)}, wanted 'params' among"
                             " them, as init gives them")
        return _attention.checked_parameters(scope.variables["params"], shapes)

    def _cache(self, scope: Scope, inputs: tuple[Array, Array, Array],
               parameters: dict[str, dict[str, Array]]) -> Cache | None:
        """The cache of the scope; where it has none, an empty one is made for the next calls, and
        this one goes without."""
        found = (scope.variables or {}).get("cache")
        if not scope.may_change("cache"):
            raise ValueError("mutable: got no 'cache' in a call with decode=True, wanted"
                             " mutable=['cache']")
        if found is None:
            dtype = _attention.chosen_dtype(self.dtype, *inputs, *(
                array for part in parameters.values() for array in part.values()))
            shape = (*inputs[1].shape[:-1], *parameters["key"]["kernel"].shape[1:])
            scope.made["cache"] = _as_collection(_attention.empty_cache(shape, dtype))
            return None
        missing = {"cached_key", "cached_value", "cache_index"} - set(found)
        if missing:
            raise ValueError(f"cache: got {sorted(found)}, wanted {sorted(missing)} too")
        return Cache(detached_array(found["cached_key"], "cached_key"),
                     detached_array(found["cached_value"], "cached_value"),
                     int(found["cache_index"]))


class MultiHeadAttention(MultiHeadDotProductAttention):
    """flax.linen.MultiHeadAttention: another name of `MultiHeadDotProductAttention`."""


class SelfAttention(MultiHeadDotProductAttention):
    """flax.linen.SelfAttention: calls take inputs_q, then the mask."""

    @checks_keywords
    def __call__(self, inputs_q: ArrayLike, mask: ArrayLike | None = None,  # type: ignore[override]
                 deterministic: bool | None = None, dropout_rng: Any = None,
                 sow_weights: bool = False) -> Array:
        """Attend: as `MultiHeadDotProductAttention`, to inputs_q itself."""
        return super().__call__(inputs_q, mask=mask, deterministic=deterministic,
                                dropout_rng=dropout_rng, sow_weights=sow_weights)


def _as_collection(cache: Cache) -> dict[str, Array]:
    """By Linen's names."""
    return {"cached_key": cache.key, "cached_value": cache.value,
            "cache_index": np.array(cache.length, np.int32)}


@checks_keywords
def dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
        mask: ArrayLike | None = None, broadcast_dropout: bool = True, dropout_rng: Any = None,
        dropout_rate: float = 0.0, deterministic: bool = False, dtype: DTypeLike | None = None,
        precision: object = None, module: Any = None, force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None, qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None) -> Array:
    """flax.linen.dot_product_attention.

    Parameters
    ----------
    query : array (batch..., query_len, num_heads, head_dim)
    key : array (batch..., key_len, num_heads, head_dim)
    value : array (batch..., key_len, num_heads, value_head_dim)
    bias : float array, added to the scaled scores, optional
    mask : array, True or not 0 = attend, optional
        Both broadcast to (batch..., num_heads, query_len, key_len).
    broadcast_dropout : bool
        Whether all heads of all sequences lose the same weights: computed head by head.
    dropout_rng : a key, wanted where dropout acts
    dropout_rate : float in [0, 1)
        Acts unless deterministic.
    dtype : float16, bfloat16, float32 or float64, by default the widest of the three arrays'
        Of the output; halves are computed in float32 and rounded once.
    precision : ignored
    module : a module of Flax', which sows the weights (batch..., num_heads, query_len, key_len),
        before dropout, as "attention_weights" of its intermediates, optional
    force_fp32_for_softmax : bool
        Softmax always is at least that; with True the weights that are sown are float32.
    einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum : None; the arithmetic is
        `mha`'s

    Returns
    -------
    array (batch..., query_len, num_heads, value_head_dim); a query that sees no key has the mean of
    all values.

    Raises
    ------
    ValueError: shapes that do not fit, dropout without a key, einsums. TypeError: arrays that hold
    no numbers.

    Source: Vaswani et al. 2017, section 3.2.1.

    >>> q = np.ones((2, 4, 8, 64), np.float32)
    >>> dot_product_attention(q, q, q).shape
    (2, 4, 8, 64)
    """
    for name, given in (("einsum_dot_general", einsum_dot_general),
                        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
                        ("attn_weights_value_einsum", attn_weights_value_einsum)):
        if given is not None:
            raise ValueError(f"{name}: got {given!r}, wanted None: the arithmetic is mha's")
    return attend_heads(
        query, key, value, bias=bias, mask=mask, shared_dropout=broadcast_dropout,
        dropout_rng=dropout_rng, dropout_rate=dropout_rate, deterministic=deterministic,
        dtype=dtype, module=module, causal=False, collection="intermediates", grouped=False,
        rounds_weights=not as_flag(force_fp32_for_softmax, "force_fp32_for_softmax"))


def make_attention_mask(query_input: ArrayLike, key_input: ArrayLike,
                        pairwise_fn: Callable[..., Any] = np.multiply, extra_batch_dims: int = 0,
                        dtype: DTypeLike = np.float32) -> Array:
    """pairwise_fn of each pair: (batch..., query_len) and (batch..., key_len) -> (batch..., 1,
    query_len, key_len), with extra_batch_dims axes of size 1 before.

    >>> make_attention_mask(np.array([1, 1, 0]), np.array([1, 0])).tolist()
    [[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]]
    """
    query, key = np.asarray(query_input), np.asarray(key_input)
    mask = np.asarray(pairwise_fn(query[..., None], key[..., None, :]))[..., None, :, :]
    return mask.reshape((1,) * extra_batch_dims + mask.shape).astype(dtype)


def make_causal_mask(x: ArrayLike, extra_batch_dims: int = 0,
                     dtype: DTypeLike = np.float32) -> Array:
    """x (batch..., len) -> (batch..., 1, len, len): 1 at a query's own position and before it.

    >>> make_causal_mask(np.zeros(2)).tolist()
    [[[1.0, 0.0], [1.0, 1.0]]]
    """
    shape = np.shape(x)
    positions = np.broadcast_to(np.arange(shape[-1]), shape)
    return make_attention_mask(positions, positions, np.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: ArrayLike | None, dtype: DTypeLike = np.float32) -> Array | None:
    """1 where all masks that are not None are not 0; None without any. ValueError where they have
    unequal numbers of axes.

    >>> combine_masks(np.array([1, 1]), None, np.array([0, 1])).tolist()
    [0.0, 1.0]
    """
    found = [np.asarray(mask) for mask in masks if mask is not None]
    if not found:
        return None
    if len({mask.ndim for mask in found}) > 1:
        raise ValueError(f"masks: got shapes {[mask.shape for mask in found]}, wanted as many axes"
                         " in each")
    combined = found[0] != 0
    for mask in found[1:]:
        combined = np.logical_and(combined, mask)
    return combined.astype(dtype)
