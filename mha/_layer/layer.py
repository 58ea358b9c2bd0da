"""MultiHeadAttention: the figure as a layer that owns its parameters."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import EllipsisType
from typing import Any, Literal, Never, Self, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha import _core, _layer
from mha._base.arguments import as_ints, as_probability, wanted_names
from mha._base.keywords import checks_keywords, too_many
from mha._functions.dropout import drawn
from mha._functions.gradients import MultiHeadAttentionGradients, Pullback, pullback_of
from mha._functions.multi_head_attention import WEIGHTS, NormOf
from mha._functions.options import LAYER, LayerKeywords, RandomSource, Window, takes_options
from mha._functions.rotary import Layout as RotaryLayout
from mha._functions.rotary import Rotary
from mha._layer import options as layer_options
from mha._layer import state as layer_state
from mha._layer.own_parameters import OwnParameters
from mha._layer.settings import (
    FEWER_HEADS,
    OTHER_OPTION,
    OTHER_SIZES,
    LayerSettings,
    OutputGate,
    Parameter,
    Setting,
    ShownDtype,
    checked_settings,
    spelled,
)

__all__ = ["MultiHeadAttention"]

Array = NDArray[Any]
Maybe = ArrayLike | None
Padding = Literal["right", "left"]


class MultiHeadAttention(OwnParameters):
    """Multi-head attention with its parameters (Vaswani et al. 2017, section 3.2.2).

    Parameters
    ----------
    embed_dim : int
        The width of query and output, unless query_dim and output_dim say otherwise.
    num_heads : int
        Must divide embed_dim, unless head_dim is given.
    use_bias : bool or str
        Whether the four projections have biases (they start as zeros), or which of them, by letters
        of "qkvo": "qkv" (Qwen 2), "qvo" (Whisper).
    dropout : float in [0, 1)
        On the attention weights; acts only in calls with training=True. May be assigned later.
    num_kv_heads : int, by default num_heads
        Key and value heads, each serving num_heads / num_kv_heads query heads.
    head_dim, value_head_dim : int, by default embed_dim / num_heads, and head_dim
    query_dim, key_dim, value_dim, output_dim : int, by default embed_dim, embed_dim, key_dim,
        embed_dim
    scale, softcap, window, alibi : as in `mha.scaled_dot_product_attention`, optional
        The layer's own, for all calls that do not give them. A call switches them off by its own
        window=(None, None), softcap=inf, alibi of zeros.
    sinks : bool
        Whether the layer learns the option sinks: a parameter (num_heads,), zeros at the start.
    relative_bias : int r, optional
        The layer learns the option relative_bias: a parameter (num_heads, 2r + 1), likewise.
    dtype : numpy.float32, numpy.float64, numpy.float16 or "bfloat16" (that of ml_dtypes)
        The layer computes in it and returns it; halves are computed in float32, and the output is
        rounded once. "bfloat16" needs ml_dtypes only where parameters or gradients are looked at:
        where nobody has imported it, outputs are float32 arrays of the same numbers.
    rng : None, int or numpy.random.Generator
        Draws the Xavier-uniform start (Glorot & Bengio 2010) of the weights.
    rotary : mha.Rotary, optional
        Rotates the heads of queries and keys by their positions.
    qk_norm : "head" or "width", optional
        Norms queries and keys before the rotation, each head or all together, by parameters
        q_norm and k_norm: x / sqrt(mean(x^2) + norm_eps) * (norm_offset + q_norm) (Zhang & Sennrich
        2019).
    norm_eps, norm_offset : float
    output_gate : "element" or "head", optional
        The merged heads times sigmoid(query @ W_g + b_g), before W_o: a number for each of their
        columns, or one a head (Qiu et al. 2025). use_bias=True has b_g, too; its letter is "g".

    Attributes
    ----------
    The parameters above but rng, defaults filled in. All but dropout are read-only: `prune_heads`
    removes heads, `astype` gives a copy in another dtype.
    W_q (query_dim, num_heads * head_dim), W_k (key_dim, num_kv_heads * head_dim),
    W_v (value_dim, num_kv_heads * value_head_dim), W_o (num_heads * value_head_dim, output_dim):
    used as x @ W. b_q, b_k, b_v, b_o: their biases, or None; sinks, relative_bias likewise.
    Assigning an array of the layer's type keeps that array itself, not a copy.
    q_norm, k_norm (head_dim,), or for "width" (num_heads * head_dim,) and
    (num_kv_heads * head_dim,), or None. W_g (query_dim, num_heads * value_head_dim), or for "head"
    (query_dim, num_heads), and b_g, or None.

    Calls
    -----
    layer(query, key=None, value=None, ...) gives the output; mask, bias, key_lengths, causal and
    the other options of `mha.scaled_dot_product_attention`, training, rng, head_gate and, for
    decoding, cache are keywords.

    Raises
    ------
    ValueError: a size or probability out of range, sizes that do not divide. TypeError: a size
    that is not an int, another dtype. Both name the argument. AttributeError: an assignment to what
    is read-only. ImportError: parameters or gradients of bfloat16 without ml_dtypes.

    >>> layer = mha.MultiHeadAttention(512, 8, rng=0)
    >>> layer(np.ones((2, 10, 512), np.float32)).shape
    (2, 10, 512)
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    _settings = LayerSettings
    _checked_settings = staticmethod(checked_settings)

    embed_dim = Setting[int](OTHER_SIZES)
    num_heads = Setting[int](FEWER_HEADS)
    num_kv_heads = Setting[int](FEWER_HEADS)
    head_dim = Setting[int](OTHER_SIZES)
    value_head_dim = Setting[int](OTHER_SIZES)
    query_dim = Setting[int](OTHER_SIZES)
    key_dim = Setting[int](OTHER_SIZES)
    value_dim = Setting[int](OTHER_SIZES)
    output_dim = Setting[int](OTHER_SIZES)
    use_bias = Setting["bool | str"]("a new layer with use_bias")
    scale = Setting["float | None"](OTHER_OPTION)
    softcap = Setting["float | None"](OTHER_OPTION)
    window = Setting["Window | None"](OTHER_OPTION)
    alibi = Setting["tuple[float, ...] | None"](OTHER_OPTION)
    rotary = Setting["Rotary | None"]("a new layer with rotary")
    qk_norm = Setting["NormOf | None"]("a new layer with qk_norm")
    norm_eps = Setting[float]("a new layer with norm_eps")
    norm_offset = Setting[float]("a new layer with norm_offset")
    output_gate = Setting["OutputGate | None"]("a new layer with output_gate")
    dtype = ShownDtype("astype(dtype), which gives a copy")

    W_q = Parameter()
    W_k = Parameter()
    W_v = Parameter()
    W_o = Parameter()
    b_q = Parameter()
    b_k = Parameter()
    b_v = Parameter()
    b_o = Parameter()
    W_g = Parameter()
    b_g = Parameter()
    sinks = Parameter()
    relative_bias = Parameter()
    q_norm = Parameter()
    k_norm = Parameter()

    @checks_keywords
    def __init__(self, embed_dim: int, num_heads: int, *more: Never, use_bias: bool | str = True,
                 dropout: float = 0.0, num_kv_heads: int | None = None,
                 head_dim: int | None = None, value_head_dim: int | None = None,
                 query_dim: int | None = None, key_dim: int | None = None,
                 value_dim: int | None = None, output_dim: int | None = None,
                 scale: float | None = None, softcap: float | None = None,
                 window: Window | None = None, alibi: ArrayLike | None = None,
                 sinks: bool = False, relative_bias: int | None = None,
                 rotary: Rotary | None = None, qk_norm: NormOf | None = None,
                 norm_eps: float = 1e-6, norm_offset: float = 0.0,
                 output_gate: OutputGate | None = None, dtype: DTypeLike = np.float32,
                 rng: RandomSource = None) -> None:
        if more:
            raise too_many(MultiHeadAttention.__init__, more)
        settings = checked_settings(
            embed_dim, num_heads, use_bias=use_bias, dropout=dropout, num_kv_heads=num_kv_heads,
            head_dim=head_dim, value_head_dim=value_head_dim, query_dim=query_dim,
            key_dim=key_dim, value_dim=value_dim, output_dim=output_dim, dtype=dtype, scale=scale,
            softcap=softcap, window=window, alibi=alibi, sinks=sinks, relative_bias=relative_bias,
            rotary=rotary, qk_norm=qk_norm, norm_eps=norm_eps, norm_offset=norm_offset,
            output_gate=output_gate)
        self._state = layer_state.new_state(settings, layer_state.xavier_uniform(settings, rng))

    @property
    def dropout(self) -> float:
        """The probability of dropping a weight in calls with training=True; may be assigned.

        Raises
        ------
        ValueError: outside [0, 1). TypeError: no number.

        >>> layer = mha.MultiHeadAttention(512, 8, dropout=0.1)
        >>> layer.dropout = 0.2
        """
        return self._state.settings.dropout

    @dropout.setter
    def dropout(self, dropout: float) -> None:
        probability = as_probability(dropout, "dropout")
        self._change(lambda state: layer_state.with_dropout(state, probability))

    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., value: Maybe = ..., *,
                 training: bool = ..., rng: RandomSource = ..., head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | _layer.PagedLayer | None = ..., append: bool = ...,
                 lengths: Maybe = ..., padding: Padding = ..., return_weights: Literal[False] = ...,
                 return_lse: Literal[False] = ..., starts: Maybe = ...,
                 sequences: Collection[int] | None = ...,
                 **options: Unpack[LayerKeywords]) -> Array: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., value: Maybe = ..., *,
                 training: bool = ..., rng: RandomSource = ..., head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., return_weights: Literal[True], return_lse: Literal[True],
                 **options: Unpack[LayerKeywords]) -> tuple[Array, Array, Array]: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., value: Maybe = ..., *,
                 training: bool = ..., rng: RandomSource = ..., head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., return_weights: Literal[True],
                 return_lse: Literal[False] = ...,
                 **options: Unpack[LayerKeywords]) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., value: Maybe = ..., *,
                 training: bool = ..., rng: RandomSource = ..., head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | _layer.PagedLayer | None = ..., append: bool = ...,
                 lengths: Maybe = ..., padding: Padding = ..., return_weights: Literal[False] = ...,
                 return_lse: Literal[True], starts: Maybe = ...,
                 sequences: Collection[int] | None = ...,
                 **options: Unpack[LayerKeywords]) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., value: Maybe = ..., *,
                 training: bool = ..., rng: RandomSource = ..., head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | _layer.PagedLayer | None = ..., append: bool = ...,
                 lengths: Maybe = ..., padding: Padding = ..., return_weights: bool = ...,
                 return_lse: bool = ..., starts: Maybe = ...,
                 sequences: Collection[int] | None = ...,
                 **options: Unpack[LayerKeywords]) -> Any: ...
    @takes_options(LAYER, before="training")
    def __call__(
            self, query: ArrayLike, key: ArrayLike | None = None, value: ArrayLike | None = None,
            *more: Never, training: bool = False, rng: RandomSource = None,
            head_gate: ArrayLike | None = None,
            positions: ArrayLike | None = None, key_positions: ArrayLike | None = None,
            cache: _layer.KVCache | _layer.PagedLayer | None = None, append: bool = True,
            lengths: ArrayLike | None = None, padding: Padding = "right",
            starts: ArrayLike | None = None, sequences: Collection[int] | None = None,
            return_weights: bool = False, return_lse: bool = False,
            **options: Unpack[LayerKeywords]) -> Any:
        """Attend: query (batch, query_len, query_dim) -> output (batch, query_len, output_dim).

        Parameters
        ----------
        query, key, value : arrays (batch, len, dim), or (len, dim) for one sequence
            key defaults to query, value to key.
        mask, bias : arrays (query_len, key_len) or (batch, heads, query_len, key_len)
            Either of batch and heads may be 1. mask: bool, True = attend.
        training : bool
            Whether the layer's dropout acts.
        rng : None, int or numpy.random.Generator
            Draws the dropout: None is fresh entropy, an int the seed.
        head_gate : array (num_heads,), optional
            Multiplies each head's output: 0 switches a head off.
        positions, key_positions : ints (len,) or (batch, len), by default 0, 1, ...
            Where rows of query and key stand, for the layer's rotary alone. key_positions are
            positions where no key is given. A rotary of n sections takes (n, len) or
            (n, batch, len), too, as in a call of `mha.Rotary`. With a cache, once rows had other
            positions than their place in it, later calls must give them, too.
        cache : mha.KVCache, or a layer of a mha.PagedCache with starts, optional
            Of `new_cache`: the rows of query are the next positions; their keys and values are
            appended, attention is causal and goes over all positions so far. Mask and bias have a
            column for each of them. A cache's window is the default of the call's. Of
            `new_memory`: attention over the memory, not causal.
        append : bool
            False: the rows of query stand at the last positions of the cache, and append nothing;
            W_k and W_v are not used. So a layer attends to another one's keys and values.
        lengths : ints (batch,), optional
            With a cache, how many rows of each sequence are real; the others give zeros and are
            not stored.
        padding : "right" or "left"
            On which side of the real rows the others are.
        starts : ints (sequences + 1,), optional
            A ragged batch: query (total_len, query_dim), of which sequence s is rows starts[s] to
            starts[s + 1], as in `mha.scaled_dot_product_attention_varlen`. With cache=pool[i], a
            layer of a `mha.PagedCache`, they are the next positions of sequences[s], causal.
            positions go with starts where rotary has sections.
        sequences : ids of that pool, optional
            Of the sequences of starts, each once.
        return_weights, return_lse : bool
            Return the weights (before dropout) and the log-sum-exp of the scores too.
        The rest : as in `mha.scaled_dot_product_attention`.

        Returns
        -------
        output; then weights (batch, heads, query_len, key_len) and lse (batch, heads, query_len)
        where asked for, as a tuple in this order.

        Raises
        ------
        ValueError, TypeError: as `mha.scaled_dot_product_attention`; a mask of 3 dimensions too.

        Source: Vaswani et al. 2017, section 3.2.2.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> output, weights = layer(np.ones((2, 10, 512)), causal=True, return_weights=True)
        >>> weights.shape
        (2, 8, 10, 10)
        """
        state = self._state
        core = state.core if positions is None and key_positions is None else layer_state.core_at(
            state, positions, key_positions, key is None)
        call = MultiHeadAttention.__call__
        plain_padding = isinstance(padding, str) and padding == "right"
        try:
            chosen = layer_options.call_options(call, options, more, state.options,
                                                state.settings.dropout, training, rng)
            if starts is not None:
                from mha._layer import ragged_call

                return ragged_call.call(
                    state, query, starts, chosen, head_gate, return_lse, key=key, value=value,
                    cache=cache, append=append, sequences=sequences, training=training,
                    lengths=lengths, padding=None if plain_padding else padding,
                    positions=positions, key_positions=key_positions, return_weights=return_weights)
            if sequences is not None:
                raise ValueError("sequences: got some without starts, wanted starts= too")
            if (cache is not None or append is not True or lengths is not None
                    or not plain_padding):
                from mha._layer import cached_call

                return cached_call.call(
                    state, query, key, value, cache=cache, append=append, lengths=lengths,
                    padding=padding, positions=positions, key_positions=key_positions,
                    training=training, options=chosen, head_gate=head_gate,
                    return_weights=return_weights, return_lse=return_lse)
            keys = query if key is None else key
            values = keys if value is None else value
            # One by one: a call by *state.call takes half a microsecond more.
            W_q, W_k, W_v, W_o, W_g, b_q, b_k, b_v, b_o, b_g, num_heads, num_kv_heads = state.call
            with drawn(chosen) as drawn_options:
                return core(
                    query, keys, values, W_q, W_k, W_v, W_o, W_g, b_q, b_k, b_v, b_o, b_g,
                    num_heads, num_kv_heads, head_gate, drawn_options,
                    return_weights=return_weights, return_lse=return_lse,
                    dtype=state.settings.dtype)
        except (TypeError, ValueError) as error:
            layer_options.explain(call, error, {"key": key, "value": value}, cache)
            raise

    @takes_options(LAYER, before="training")
    def vjp(
            self, query: ArrayLike, key: ArrayLike | None = None, value: ArrayLike | None = None,
            *more: Never, training: bool = False, rng: RandomSource = None,
            head_gate: ArrayLike | None = None,
            positions: ArrayLike | None = None, key_positions: ArrayLike | None = None,
            starts: ArrayLike | None = None, wrt: Collection[str] | None = None,
            **options: Unpack[LayerKeywords],
            ) -> tuple[Array, Pullback[MultiHeadAttentionGradients]]:
        """The output and its gradients; arguments as in a call (rng, head_gate, starts), and wrt.

        wrt names the gradients that are wanted, out of "query", "key", "value", the names of
        `parameters()`, "head_gate", "bias", "alibi", "relative_bias" and "sinks"; by default all of
        them, but for the layer's own alibi, which is not learned. Returns (output, pullback);
        pullback(grad_output, grad_lse=None) returns the gradients by name, None for what was not
        given. Where key or value defaulted to query, or value to key, the gradients are summed into
        the one that was given. Nothing is stored on the layer. The arrays and the parameters are
        kept, not copied: they must not change before the pullback is called.

        Raises
        ------
        ValueError, TypeError: as a call; an unknown name in wrt.

        Source: Vaswani et al. 2017, section 3.2.2; attention backwards as in Dao et al. 2022.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> output, pullback = layer.vjp(np.ones((2, 10, 512)), causal=True)
        >>> pullback(np.ones_like(output)).W_o.shape
        (512, 512)
        """
        wanted = wanted_names(wrt, MultiHeadAttentionGradients._fields)
        state = self._state
        wanted = layer_options.wanted_of_call(
            wanted, wrt, options, layer_state.quantised_names(state))
        core = state.core if positions is None and key_positions is None else layer_state.core_at(
            state, positions, key_positions, key is None)
        call = MultiHeadAttention.vjp
        try:
            chosen = layer_options.call_options(call, options, more, state.options,
                                                state.settings.dropout, training, rng)
            if starts is not None:
                from mha._layer import ragged_call

                return ragged_call.vjp(
                    state, query, starts, chosen, head_gate, wanted, key=key, value=value,
                    positions=positions, key_positions=key_positions)
            keys = query if key is None else key
            values = keys if value is None else value
            with drawn(chosen) as drawn_options:
                output, saved = core(
                    query, keys, values, *layer_state.plain_call(state), head_gate, drawn_options,
                    dtype=state.settings.dtype, key_is_query=key is None,
                    value_is_key=value is None, save=True)
        except (TypeError, ValueError) as error:
            layer_options.explain(call, error, {"key": key, "value": value}, None)
            raise
        return output, pullback_of(_core.multi_head_attention_backward, saved, wanted,
                                   MultiHeadAttentionGradients)

    @checks_keywords
    def new_cache(self, batch: int, capacity: int = 0, *, dtype: DTypeLike | None = None,
                  window: int | None = None, keep_first: int = 0) -> _layer.KVCache:
        """An empty `mha.KVCache` for calls with cache=: key (batch, num_kv_heads, len, head_dim).

        capacity, window and keep_first are the cache's; dtype, by default the layer's, may be
        narrower.

        Raises
        ------
        ValueError, TypeError, MemoryError: as `mha.KVCache`.

        Source: Shazeer 2019, "Fast Transformer Decoding"; Vaswani et al. 2017, section 3.2.2.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> cache = layer.new_cache(batch=2)
        >>> prompt, token = np.ones((2, 10, 512)), np.ones((2, 1, 512))  # (batch, len, embed_dim)
        >>> layer(prompt, cache=cache).shape, layer(token, cache=cache).shape
        ((2, 10, 512), (2, 1, 512))
        """
        from mha._layer import cached_call
        from mha._layer.kv_cache import KVCache

        settings = self._state.settings
        cache = KVCache(batch, settings.num_kv_heads, settings.head_dim,
                        settings.value_head_dim, capacity=capacity, window=window,
                        keep_first=keep_first, dtype=settings.dtype if dtype is None else dtype)
        cached_call.check_cache_dtype(settings, cache._stored, "dtype")
        return cache

    @checks_keywords
    def new_memory(self, key: ArrayLike, value: ArrayLike | None = None,
                   key_lengths: ArrayLike | None = None,
                   key_positions: ArrayLike | None = None) -> _layer.KVCache:
        """An encoder's keys and values, projected once.

        layer(query, cache=memory) then gives the bits of layer(query, key, value,
        key_lengths=key_lengths); of a layer of halves, whose memory is rounded, nearly.

        Parameters
        ----------
        key : array (batch, key_len, key_dim), or (key_len, key_dim) for one sequence
        value : array (batch, key_len, value_dim), by default key
        key_lengths : ints (batch,), optional
            How many of the key_len rows are real, the first ones; the others are not stored.
        key_positions : ints (key_len,) or (batch, key_len), by default 0, 1, ...
            Where the rows stand; moves only what rotates. With sections as in a call.

        Returns
        -------
        A `mha.KVCache` that refuses append. Changes of the parameters do not reach it.

        Raises
        ------
        ValueError, TypeError: as a call.

        Source: Vaswani et al. 2017, section 3.2.3, encoder-decoder attention.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> memory = layer.new_memory(np.ones((2, 30, 512)), key_lengths=[30, 21])
        >>> layer(np.ones((2, 1, 512)), cache=memory).shape
        (2, 1, 512)
        """
        from mha._layer import cached_call

        return cached_call.new_memory(self._state, key, value, key_lengths, key_positions)

    @classmethod
    @checks_keywords
    def from_state(
            cls, state: Mapping[str, Any], layout: str | None = None, *, prefix: str = "",
            config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
            layer_index: int | None = None, num_heads: int | None = None,
            num_kv_heads: int | None = None, head_dim: int | None = None,
            names: Mapping[str, str] | None = None, transposed: bool | None = None,
            rotary_layout: RotaryLayout | None = None, dtype: DTypeLike | None = None,
            dropout: float = 0.0,
            scale: float | EllipsisType | None = ..., softcap: float | EllipsisType | None = ...,
            window: Window | EllipsisType | None = ...,
            alibi: ArrayLike | EllipsisType | None = ...,
            rotary: Rotary | EllipsisType | None = ..., norm_eps: float | EllipsisType = ...,
            norm_offset: float | EllipsisType = ...) -> Any:
        """A layer of the parameters that a framework or a model's file keeps.

        Parameters
        ----------
        state : names with arrays, or tensors on the CPU
            Of `mha.parameters.open`, a state_dict, a tree of Flax, ...
        layout : str, by default that of config's model_type
            How they are named and arranged: one of `mha.parameters.layouts()`, where models are by
            the name that configs have ("mistral").
        prefix : str
            What stands before the layer's own names: "encoder.layer.0.attention.". With {layer} in
            it, for the number of a layer, and without layer_index: all layers.
        config : a mapping, as a model's config.json, or a path of that file or its folder
            Gives heads, head_dim, scale, softcap, window, alibi, rotary and norm_eps. By default
            that of the folder where state is one that `mha.parameters.open` opened.
        layer_index : int, optional
            Which layer it is, where the config's layers differ.
        num_heads, num_kv_heads, head_dim : int
            By default what the config says, or follows from the shapes.
        names : ours with theirs, in place of layout
            Of a program with names of its own, {"q": "W_query", "k": "W_key", "v": "W_value",
            "o": "out_proj"}. A key of one letter names a layer. Its arrays are W_query.weight and
            W_query.bias, or W_query.kernel, or W_query itself; "qkv" is one layer of all three,
            beside each other. Other keys name arrays: "W_q", ..., "b_o", "q_norm", "k_norm" (of
            each head), "sinks". Of a config sizes and norm_eps alone are read; masks that are
            stored are passed over.
        transposed : bool
            With names: whether weights are (out, in), as PyTorch's Linear has them. By default what
            the shapes say; where they fit both ways, it is needed.
        rotary_layout : "half" or "interleaved"
            Which columns the config's rotary embeddings rotate together, by default as the layout's
            models do. Names do not tell: Llama's weights in Meta's own order, under Hugging Face's
            names, are "interleaved".
        dtype : by default that of the arrays; float32 of quantised ones, whose blocks of q8_0 and
            q4_0 are kept where none is given: the layer is then as `quantize` makes it
        The rest : as in `mha.MultiHeadAttention`, in place of what the config says.

        Returns
        -------
        A layer with copies of the arrays, or with {layer} the list of all. Arrays with biases
        decide use_bias. W_q is (query_dim, num_heads * head_dim), whatever the layout's shape.

        Raises
        ------
        ValueError: arrays that are missing, left over under the prefix or of a wrong shape, what
        is needed and given nowhere, what is not supported: all of it in one error, beside what was
        found, and the layout or the prefix that would fit. TypeError: other types.

        Source: Vaswani et al. 2017, section 3.2.2; the layouts are those of each framework.

        >>> layer = mha.MultiHeadAttention(64, 4)
        >>> state = layer.to_state("bert", prefix="encoder.layer.0.attention.")
        >>> mha.MultiHeadAttention.from_state(
        ...     state, "bert", prefix="encoder.layer.{layer}.attention.", num_heads=4)
        [MultiHeadAttention(64, 4, dtype=float32)]
        """
        from mha.parameters._reading import layers_from_state

        return cls._of(layers_from_state(
            state, layout, names, transposed, prefix, config, layer_index,
            {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}, dtype,
            rotary_layout,
            {"dropout": dropout, "scale": scale, "softcap": softcap, "window": window,
             "alibi": alibi, "rotary": rotary, "norm_eps": norm_eps, "norm_offset": norm_offset},
            layer_state.state_of))

    @checks_keywords
    def to_state(self, layout: str, *, prefix: str = "") -> dict[str, Any]:
        """The parameters as a framework keeps them: the other way of `from_state`.

        Returns
        -------
        Copies by name, `prefix` before each; for "flax" a tree. A weight that PyTorch keeps is
        (out, in). Biases that the layout must have and the layer has not are zeros; options (scale,
        rotary, ...) belong to the model's config. Of bfloat16 numpy.savez keeps the bits alone,
        which `mha.parameters.open` reads back.

        Raises
        ------
        ValueError: parameters, sizes or options that the layout has no place for; an unknown
        layout. TypeError: other types.

        Source: Vaswani et al. 2017, section 3.2.2; the layouts are those of each framework.

        >>> mha.MultiHeadAttention(64, 4).to_state("pytorch")["in_proj_weight"].shape
        (192, 64)
        """
        from mha.parameters._writing import state_of_layer

        return state_of_layer(self._state.settings, self.parameters(), layout, prefix)

    @checks_keywords
    def quantize(self, kind: str, *,
                 parameters: Collection[str] = WEIGHTS) -> Self:
        """Freeze the layer with matrices of 8 or 4 bits a number: "q8_0" or "q4_0".

        It computes in float32, and gives the bits of the frozen layer of the dequantised numbers,
        which `parameters()` shows. Its matrices take 0.27 or 0.14 of float32's memory.
        `unfreeze()` and `astype` make float arrays of those numbers again, and `vjp` gives no
        gradients of quantised matrices. Pickles hold the blocks. Returns the layer.

        Parameters
        ----------
        kind : "q8_0" or "q4_0"
            Blocks of 32 numbers along the input axis that share a float16 scale, as llama.cpp has
            them.
        parameters : names of matrices, by default "W_q", "W_k", "W_v", "W_o" and, if any, "W_g"
            Those that are quantised; the others are kept in float32.

        Raises
        ------
        ValueError: another kind or name; a matrix whose input axis is no multiple of 32, whose
        numbers are not finite, or a scale of them beyond float16. TypeError: a float64 layer.
        Nothing has changed then.

        Source: the blocks are those of GGML; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
        Quantization", section 2.

        >>> mha.MultiHeadAttention(512, 8).quantize("q8_0").frozen
        True
        """
        return self._quantize(kind, parameters, WEIGHTS)

    @checks_keywords
    def prune_heads(self, heads: Collection[int]) -> Self:
        """Remove heads for good: their columns of W_q, b_q and rows of W_o, and those of W_k, W_v,
        b_k and b_v that no head needs any more: W_q becomes (query_dim, heads left * head_dim).

        heads are indices, negative ones from the end, repeated ones once. The output is that of
        the layer before with head_gate 0 for these heads, up to rounding; later heads move up. The
        arrays are new ones: those that `parameters()` gave before are no longer the layer's. A call
        that runs meanwhile in another thread gives the old output or the new one. Returns the
        layer.

        Raises
        ------
        ValueError: indices out of range, all heads at once, a frozen layer; where heads share key
        heads, unequal numbers of heads left to those that stay. TypeError: heads that are not a
        collection of ints. Nothing has changed then. A quantised layer stays one; where W_o is
        quantised, value_head_dim must be a multiple of 32, else it is a ValueError.

        Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> layer.prune_heads([0, 5]).W_q.shape
        (512, 384)
        """
        indices = as_ints(heads, "heads")
        self._change(lambda state: layer_state.pruned(state, indices))
        return self

    def __repr__(self) -> str:
        state = self._state
        shown = spelled(state.settings) + ["frozen"] * (state.packed is not None)
        shown += layer_state.kinds_of_blocks(state)
        return f"MultiHeadAttention({', '.join(shown)})"
