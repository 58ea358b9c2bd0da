"""MultiHeadLatentAttention: a layer whose keys and values are projections of one small latent."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import EllipsisType
from typing import Any, Literal, Never, Self, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha import _layer
from mha._base.arguments import as_bool, as_ints, wanted_names
from mha._base.dtypes import stored_dtype
from mha._base.keywords import checks_keywords, too_many
from mha._functions.gradients import MultiHeadLatentAttentionGradients, Pullback
from mha._functions.options import LAYER, LayerKeywords, RandomSource, takes_options
from mha._functions.rotary import Rotary
from mha._layer import options as layer_options
from mha._layer import state as layer_state
from mha._layer.latent_settings import (
    MATRICES,
    LatentSettings,
    checked_latent_settings,
    spelled,
)
from mha._layer.own_parameters import OwnParameters
from mha._layer.settings import (
    FEWER_HEADS,
    OTHER_OPTION,
    OTHER_SIZES,
    Parameter,
    Setting,
    ShownDtype,
)

__all__ = ["MultiHeadLatentAttention"]

Array = NDArray[Any]
Maybe = ArrayLike | None
Padding = Literal["right", "left"]


def _checked_state(settings: dict[str, Any], parameters: dict[str, Any]) -> layer_state.LayerState:
    return layer_state.state_of(settings, parameters, checked_latent_settings)


def _pruned(state: layer_state.LayerState, heads: list[int]) -> layer_state.LayerState:
    """Without these heads, in new arrays."""
    in_blocks_now = layer_state.prunable(state, heads)
    settings: Any = state.settings
    kept = layer_state.heads_that_stay(heads, settings.num_heads)
    widths = {"W_q": settings.head_dim, "W_uq": settings.head_dim, "W_uk": settings.nope_dim,
              "W_uv": settings.value_head_dim, "W_o": settings.value_head_dim}
    parameters: dict[str, Any] = {
        name: layer_state.of_heads(parameter, kept, widths[name], 0 if name == "W_o" else 1)
        if name in widths else layer_state.own_copy(parameter)
        for name, parameter in state.parameters.items()}
    make = layer_state.with_packed if in_blocks_now else layer_state.new_state
    return make(settings._replace(num_heads=len(kept)), parameters)


class MultiHeadLatentAttention(OwnParameters):
    """Multi-head latent attention with its parameters.

    Keys and values of all heads are projections of one latent of kv_rank numbers a position.

    Parameters
    ----------
    embed_dim : int
        The width of query and output.
    num_heads : int
    query_rank : int, optional
        The width of the query's own latent, which is normed. None: queries are query @ W_q.
    kv_rank : int
        The width of the latent of keys and values.
    nope_dim, rope_dim : int
        Columns of a head's queries and keys, first those that do not rotate, then those that do.
        The rope_dim columns of keys are shared by all heads.
    value_head_dim : int
    rotary : mha.Rotary, optional
        Rotates the rope_dim columns of queries and keys by their positions.
    norm_eps : float
        The norms of latents are x / sqrt(mean(x^2) + norm_eps) * weight (Zhang & Sennrich 2019).
    scale : float, by default 1 / sqrt(nope_dim + rope_dim)
    use_bias : bool
        Whether W_dq, W_dkv and W_o have biases (they start as zeros).
    dtype : numpy.float32, numpy.float64, numpy.float16 or "bfloat16" (that of ml_dtypes)
    rng : None, int or numpy.random.Generator
        As in `mha.MultiHeadAttention`.

    Attributes
    ----------
    The parameters above but rng, read-only: `prune_heads` removes heads, `astype` gives a copy in
    another dtype.
    W_dq (embed_dim, query_rank), q_norm (query_rank,), W_uq (query_rank, num_heads * (nope_dim +
    rope_dim)), or W_q (embed_dim, num_heads * (nope_dim + rope_dim)) where query_rank is None;
    W_dkv (embed_dim, kv_rank + rope_dim), kv_norm (kv_rank,), W_uk (kv_rank, num_heads * nope_dim),
    W_uv (kv_rank, num_heads * value_head_dim), W_o (num_heads * value_head_dim, embed_dim): used as
    x @ W. b_dq, b_dkv, b_o: biases, or None. Those that the layer has not are None.

    Calls
    -----
    layer(query, key=None, ...) gives the output; mask, bias, key_lengths, causal and the other
    options of `mha.scaled_dot_product_attention`, head_gate and, for decoding, cache are keywords.

    Raises
    ------
    ValueError: a size out of range. TypeError: a size that is not an int, another dtype. Both name
    the argument. AttributeError: an assignment to what is read-only.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.

    >>> layer = mha.MultiHeadLatentAttention(
    ...     512, 8, kv_rank=128, nope_dim=32, rope_dim=16, value_head_dim=32, rng=0)
    >>> layer(np.ones((2, 10, 512), np.float32)).shape
    (2, 10, 512)
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    _settings = LatentSettings
    _checked_settings = staticmethod(checked_latent_settings)

    embed_dim = Setting[int](OTHER_SIZES)
    num_heads = Setting[int](FEWER_HEADS)
    query_rank = Setting["int | None"](OTHER_SIZES)
    kv_rank = Setting[int](OTHER_SIZES)
    nope_dim = Setting[int](OTHER_SIZES)
    rope_dim = Setting[int](OTHER_SIZES)
    value_head_dim = Setting[int](OTHER_SIZES)
    rotary = Setting["Rotary | None"]("a new layer with rotary")
    norm_eps = Setting[float]("a new layer with norm_eps")
    scale = Setting["float | None"](OTHER_OPTION)
    use_bias = Setting[bool]("a new layer with use_bias")
    dtype = ShownDtype("astype(dtype), which gives a copy")

    W_dq = Parameter()
    q_norm = Parameter()
    W_uq = Parameter()
    W_q = Parameter()
    W_dkv = Parameter()
    kv_norm = Parameter()
    W_uk = Parameter()
    W_uv = Parameter()
    W_o = Parameter()
    b_dq = Parameter()
    b_dkv = Parameter()
    b_o = Parameter()

    @checks_keywords
    def __init__(self, embed_dim: int, num_heads: int, *more: Never, query_rank: int | None = None,
                 kv_rank: int, nope_dim: int, rope_dim: int, value_head_dim: int,
                 rotary: Rotary | None = None, norm_eps: float = 1e-6, scale: float | None = None,
                 use_bias: bool = False, dtype: DTypeLike = np.float32,
                 rng: RandomSource = None) -> None:
        if more:
            raise too_many(MultiHeadLatentAttention.__init__, more)
        settings: Any = checked_latent_settings(
            embed_dim, num_heads, query_rank=query_rank, kv_rank=kv_rank, nope_dim=nope_dim,
            rope_dim=rope_dim, value_head_dim=value_head_dim, rotary=rotary, norm_eps=norm_eps,
            scale=scale, use_bias=use_bias, dtype=dtype)
        self._state = layer_state.new_state(settings, layer_state.xavier_uniform(settings, rng))

    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., *, head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., starts: None = ..., sequences: None = ...,
                 return_weights: Literal[False] = ..., return_lse: Literal[False] = ...,
                 **options: Unpack[LayerKeywords]) -> Array: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., *, head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., starts: None = ..., sequences: None = ...,
                 return_weights: Literal[True], return_lse: Literal[True],
                 **options: Unpack[LayerKeywords]) -> tuple[Array, Array, Array]: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., *, head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., starts: None = ..., sequences: None = ...,
                 return_weights: Literal[True], return_lse: Literal[False] = ...,
                 **options: Unpack[LayerKeywords]) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., *, head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., starts: None = ..., sequences: None = ...,
                 return_weights: Literal[False] = ..., return_lse: Literal[True],
                 **options: Unpack[LayerKeywords]) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, query: ArrayLike, key: Maybe = ..., *, head_gate: Maybe = ...,
                 positions: Maybe = ..., key_positions: Maybe = ...,
                 cache: _layer.KVCache | None = ..., append: bool = ..., lengths: Maybe = ...,
                 padding: Padding = ..., starts: None = ..., sequences: None = ...,
                 return_weights: bool = ..., return_lse: bool = ...,
                 **options: Unpack[LayerKeywords]) -> Any: ...
    @takes_options(LAYER, before="head_gate")
    def __call__(
            self, query: ArrayLike, key: ArrayLike | None = None, *more: Never,
            head_gate: ArrayLike | None = None, positions: ArrayLike | None = None,
            key_positions: ArrayLike | None = None, cache: _layer.KVCache | None = None,
            append: bool = True, lengths: ArrayLike | None = None, padding: Padding = "right",
            starts: None = None, sequences: None = None,
            return_weights: bool = False, return_lse: bool = False,
            **options: Unpack[LayerKeywords]) -> Any:
        """Attend: query (batch, query_len, embed_dim) -> output (batch, query_len, embed_dim).

        Parameters
        ----------
        query, key : arrays (batch, len, embed_dim), or (len, embed_dim) for one sequence
            key defaults to query. Keys and values are of its rows.
        cache : mha.KVCache, optional
            Of `new_cache`: the rows of query are the next positions, attention is causal and goes
            over all positions so far. With latents (absorbed=True) W_uk is multiplied into the
            query and W_uv behind the weighted sum of latents.
        starts, sequences
            Not here: a ragged batch goes as one padded batch with key_lengths or lengths.
        The rest : as in a call of `mha.MultiHeadAttention`.

        Returns
        -------
        output; then weights (batch, heads, query_len, key_len) and lse (batch, heads, query_len)
        where asked for, as a tuple in this order.

        Raises
        ------
        ValueError, TypeError: as `mha.scaled_dot_product_attention`; a mask of 3 dimensions; starts
        or sequences.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.

        >>> layer = mha.MultiHeadLatentAttention(
        ...     512, 8, kv_rank=128, nope_dim=32, rope_dim=16, value_head_dim=32)
        >>> output, weights = layer(np.ones((2, 10, 512)), causal=True, return_weights=True)
        >>> weights.shape
        (2, 8, 10, 10)
        """
        state = self._state
        plain_padding = isinstance(padding, str) and padding == "right"
        for name, given in (("starts", starts), ("sequences", sequences)):
            if given is not None:
                raise ValueError(f"{name}: got some for latent attention, wanted one padded batch"
                                 " with key_lengths=, or lengths= beside a cache")
        chosen = layer_options.call_options(MultiHeadLatentAttention.__call__, options, more,
                                            state.options, 0.0, False, None)
        if cache is not None or append is not True or lengths is not None or not plain_padding:
            from mha._layer import cached_call

            return cached_call.call(
                state, query, key, None, cache=cache, append=append, lengths=lengths,
                padding=padding, positions=positions, key_positions=key_positions, training=False,
                options=chosen, head_gate=head_gate, return_weights=return_weights,
                return_lse=return_lse)
        keys = query if key is None else key
        return state.core(query, keys, keys, head_gate, chosen, positions=positions,
                          key_positions=key_positions, return_weights=return_weights,
                          return_lse=return_lse)

    @takes_options(LAYER, before="head_gate")
    def vjp(
            self, query: ArrayLike, key: ArrayLike | None = None, *more: Never,
            head_gate: ArrayLike | None = None, positions: ArrayLike | None = None,
            key_positions: ArrayLike | None = None, wrt: Collection[str] | None = None,
            **options: Unpack[LayerKeywords],
            ) -> tuple[Array, Pullback[MultiHeadLatentAttentionGradients]]:
        """The output and its gradients; arguments as in a call (head_gate, positions), and wrt.

        wrt names the gradients that are wanted, out of "query", "key", the names of `parameters()`,
        "head_gate", "bias", "alibi", "relative_bias" and "sinks"; by default all of them. Returns
        (output, pullback); pullback(grad_output, grad_lse=None) takes the gradient of a loss by the
        output (batch, query_len, embed_dim) and returns those by name, None for what was not given.
        Where key defaulted to query, its gradient is summed into that of query. The arrays and the
        parameters are kept, not copied: they must not change before the pullback is called.

        Raises
        ------
        ValueError, TypeError: as a call; an unknown name in wrt.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1; attention backwards as in Dao et al.
        2022.

        >>> layer = mha.MultiHeadLatentAttention(
        ...     512, 8, kv_rank=128, nope_dim=32, rope_dim=16, value_head_dim=32)
        >>> output, pullback = layer.vjp(np.ones((2, 10, 512)), causal=True)
        >>> pullback(np.ones_like(output)).W_uk.shape
        (128, 256)
        """
        names = MultiHeadLatentAttentionGradients._fields
        wanted = wanted_names(wrt, names)
        state = self._state
        wanted = layer_options.wanted_of_call(
            wanted, wrt, options, layer_state.quantised_names(state))
        layer_state.known_dtype(state.settings.dtype, has_gradients=True)
        chosen = layer_options.call_options(MultiHeadLatentAttention.vjp, options, more,
                                            state.options, 0.0, False, None)
        core: Any = state.core
        output, backward = core.saving().forward(
            query, key, head_gate, chosen, positions, key_positions)

        def pullback(grad_output: ArrayLike,
                     grad_lse: Maybe = None) -> MultiHeadLatentAttentionGradients:
            """The gradients of a loss by name, from those by the output and by lse (or None)."""
            found = backward(grad_output, grad_lse, wanted)
            return MultiHeadLatentAttentionGradients(**{name: found.get(name) for name in names})

        pullback.__qualname__ = "pullback"  # errors have it
        return output, pullback

    @checks_keywords
    def new_cache(self, batch: int, capacity: int = 0, *, absorbed: bool = True,
                  dtype: DTypeLike | None = None) -> _layer.KVCache:
        """An empty cache for calls with cache=.

        Parameters
        ----------
        batch, capacity : int
            As in `mha.KVCache`.
        absorbed : bool
            True: the cache holds the normed latent and the rotated columns of each position, as
            keys (batch, 1, len, kv_rank + rope_dim) whose first kv_rank columns are the values.
            False: keys and values of each head (batch, num_heads, len, nope_dim + rope_dim) and
            (batch, num_heads, len, value_head_dim), which takes more memory and, for many rows at
            once, less arithmetic. With latents a call makes batch * num_heads * len rows of
            2 * kv_rank + rope_dim numbers: a long prompt is best cut into calls.
        dtype : by default the layer's; may be narrower, but not "q8_0"

        Returns
        -------
        A `mha.KVCache`. Either kind gives the same bits however a sequence is cut into calls, the
        expanded one those of a call without a cache, where its dtype is float32 or float64 and the
        layer's.

        Raises
        ------
        ValueError, TypeError, MemoryError: as `mha.KVCache`.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2 and appendix C.

        >>> layer = mha.MultiHeadLatentAttention(
        ...     512, 8, kv_rank=128, nope_dim=32, rope_dim=16, value_head_dim=32)
        >>> cache = layer.new_cache(batch=2)
        >>> layer(np.ones((2, 10, 512)), cache=cache).shape, cache.key.shape
        ((2, 10, 512), (2, 1, 10, 144))
        """
        from mha._layer import cached_call
        from mha._layer.kv_cache import KVCache
        from mha._layer.latent_cache import LatentCache

        settings: Any = self._state.settings
        known = settings.dtype if dtype is None else dtype
        # Before the sizes, which blocks of q8_0 would refuse, too.
        cached_call.check_cache_dtype(settings, stored_dtype(known), "dtype")
        return (
            LatentCache(batch, settings.kv_rank, settings.rope_dim, capacity=capacity, dtype=known)
            if as_bool(absorbed, "absorbed") else
            KVCache(batch, settings.num_heads, settings.head_dim, settings.value_head_dim,
                    capacity=capacity, dtype=known))

    @classmethod
    @checks_keywords
    def from_state(
            cls, state: Mapping[str, Any], layout: str | None = None, *, prefix: str = "",
            config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
            layer_index: int | None = None, num_heads: int | None = None,
            dtype: DTypeLike | None = None, rotary: Rotary | EllipsisType | None = ...,
            norm_eps: float | EllipsisType = ...,
            scale: float | EllipsisType | None = ...) -> Any:
        """A layer of the parameters that a model's file keeps.

        Parameters
        ----------
        state, prefix, layer_index, num_heads, dtype : as in `mha.MultiHeadAttention.from_state`
        layout : "deepseek_v2" or "deepseek_v3", by default that of config's model_type
        config : a mapping, as a model's config.json, or a path of that file or its folder
            Gives the sizes, rotary and scale: YaRN's mscale_all_dim squared is in it. By default
            that of the folder where state is one that `mha.parameters.open` opened.
        rotary, scale : in place of what the config says
        norm_eps : by default 1e-6, as these models have it whatever their rms_norm_eps is

        Returns
        -------
        A layer with copies of the arrays, or with {layer} in prefix the list of all. Stored weights
        are (out, in); W_uk is (kv_rank, num_heads * nope_dim).

        Raises
        ------
        ValueError, TypeError: as `mha.MultiHeadAttention.from_state`.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1; the layouts are those of transformers.

        >>> layer = mha.MultiHeadLatentAttention(
        ...     64, 4, kv_rank=32, nope_dim=16, rope_dim=8, value_head_dim=16)
        >>> state = layer.to_state("deepseek_v3", prefix="model.layers.0.self_attn.")
        >>> mha.MultiHeadLatentAttention.from_state(
        ...     state, "deepseek_v3", prefix="model.layers.0.self_attn.", num_heads=4, rotary=None,
        ...     ).W_uk.shape
        (32, 64)
        """
        from mha.parameters._reading import layers_from_state

        return cls._of(layers_from_state(
            state, layout, None, None, prefix, config, layer_index, {"num_heads": num_heads}, dtype,
            None, {"rotary": rotary, "norm_eps": norm_eps, "scale": scale}, _checked_state,
            latent=True))

    @checks_keywords
    def to_state(self, layout: str, *, prefix: str = "") -> dict[str, Array]:
        """The parameters as a model's file keeps them: the other way of `from_state`.

        Returns
        -------
        Copies by name, `prefix` before each; a weight (in, out) is stored (out, in). Rotary
        embeddings, scale and norm_eps belong to the model's config.

        Raises
        ------
        ValueError: a rotary whose layout is not "interleaved", norm_eps that is not 1e-6; another
        layout. TypeError: other types.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1; the layouts are those of transformers.

        >>> mha.MultiHeadLatentAttention(
        ...     64, 4, kv_rank=32, nope_dim=16, rope_dim=8, value_head_dim=16,
        ... ).to_state("deepseek_v3")["kv_b_proj.weight"].shape
        (128, 32)
        """
        from mha.parameters._writing import state_of_layer

        return state_of_layer(self._state.settings, self.parameters(), layout, prefix)

    @checks_keywords
    def quantize(self, kind: str, *, parameters: Collection[str] = MATRICES) -> Self:
        """Freeze the layer with matrices of 8 or 4 bits a number: "q8_0" or "q4_0".

        As `mha.MultiHeadAttention.quantize`. Calls with absorbed latents read float32 copies of
        each head's part of W_uk and W_uv, which the first of them makes. Returns the layer.

        Parameters
        ----------
        kind : "q8_0" or "q4_0"
        parameters : names of matrices, by default all that the layer has
            Those that are quantised; the others are kept in float32.

        Raises
        ------
        ValueError: another kind or name; a matrix (in, out) whose input axis is no multiple of 32,
        whose numbers are not finite, or a scale of them beyond float16. TypeError: a float64 layer.
        Nothing has changed then.

        Source: the blocks are those of GGML; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
        Quantization", section 2.

        >>> mha.MultiHeadLatentAttention(512, 8, kv_rank=128, nope_dim=32, rope_dim=16,
        ...                              value_head_dim=32).quantize("q8_0").frozen
        True
        """
        return self._quantize(kind, parameters, MATRICES)

    @checks_keywords
    def prune_heads(self, heads: Collection[int]) -> Self:
        """Remove heads for good: their columns of W_uq or W_q, W_uk and W_uv, and rows of W_o:
        W_uk becomes (kv_rank, heads left * nope_dim).

        As `mha.MultiHeadAttention.prune_heads`. Returns the layer.

        Raises
        ------
        ValueError: indices out of range, all heads at once, a frozen layer. TypeError: heads that
        are not a collection of ints. Nothing has changed then. A quantised layer stays one; where
        W_o is quantised, value_head_dim must be a multiple of 32, else it is a ValueError.

        Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.

        >>> layer = mha.MultiHeadLatentAttention(
        ...     512, 8, kv_rank=128, nope_dim=32, rope_dim=16, value_head_dim=32)
        >>> layer.prune_heads([0, 5]).W_uk.shape
        (128, 192)
        """
        indices = as_ints(heads, "heads")
        self._change(lambda state: _pruned(state, indices))
        return self

    def __repr__(self) -> str:
        settings: Any = self._state.settings
        shown = spelled(settings) + ["frozen"] * self.frozen
        shown += layer_state.kinds_of_blocks(self._state)
        return f"MultiHeadLatentAttention({', '.join(shown)})"
