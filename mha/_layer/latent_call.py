"""Latent attention, step by step (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), and backwards.

    query   x -> W_dq -> norm -> W_uq, or x -> W_q; the rope columns of each head rotate
    latent  x -> W_dkv: kv_rank columns are normed, the other rope_dim rotate, one head for all
    expanded  key = latent W_uk beside the rotated columns, value = latent W_uv, for each head
    absorbed  key = latent beside the rotated columns, value = latent, one head for all: W_uk goes
              into the query, and W_uv comes behind the weighted sum

Each step is one of the core's, whose bits do not depend on the rows beside, so that both ways give
the same bits however a sequence is cut into calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array, as_positions, check_rows
from mha._base.dtypes import as_computed, is_half, returned, rounded, shown
from mha._functions.gradients import Gradient
from mha._functions.options import AttentionOptions, check_score_axes, is_block_mask
from mha._functions.packed_weight import numbers_of
from mha._functions.rotary import as_record, position_axes
from mha._layer.steps import checked_gate, linear_backward

Array = NDArray[Any]
Maybe = ArrayLike | None
OF_SCORES = ("bias", "alibi", "relative_bias", "sinks")


class Rows(NamedTuple):
    """The rows of a call, (batch, len, embed_dim) in the type that the layer computes in."""

    query: Array
    key: Array
    positions: Maybe
    key_positions: Maybe
    is_one: bool  # one sequence, given without the axis of the batch
    given: np.dtype[Any]  # the query's type


class LatentCore:
    """The computation of a layer with these settings and parameters. A call takes what
    `_core.multi_head_attention` takes behind the matrices, cached arrays among it."""

    __slots__ = ("by_head", "matrices", "parameters", "rotary", "settings")

    def __init__(self, settings: Any, parameters: Mapping[str, Any],
                 packed: tuple[object, ...] | None) -> None:
        self.settings = settings
        self.parameters = parameters
        self.matrices = dict(zip(settings.matrices, packed, strict=True)) if packed else parameters
        self.rotary = as_record(settings.rotary)
        # Of a frozen layer the matrices of each head, once a call has absorbed them.
        self.by_head: dict[str, list[object]] | None = {} if packed else None

    def __call__(self, query: ArrayLike, key: ArrayLike, value: ArrayLike, head_gate: Maybe,
                 options: AttentionOptions, *, return_weights: bool = False,
                 return_lse: bool = False, dtype: Any = None, positions: Maybe = None,
                 key_positions: Maybe = None, cached_key: Array | None = None,
                 cached_value: Array | None = None,
                 append: Callable[[Array, Array], None] | None = None) -> Any:
        """The output, and weights and lse where asked for. Of cached arrays the value has no
        columns where they are latents, which the call absorbs."""
        rows = self.rows(query, key, positions, key_positions)
        queries = self.queries(rows)
        latent, rotated = self.latents(rows)
        is_absorbed = cached_value is not None and cached_value.shape[-1] == 0
        if is_absorbed:
            keys, values = as_key(latent, rotated), latent[:, None, :, :0]
        else:
            keys, values = self.expanded(latent, rotated)
        if append is not None and cached_key is not None and cached_value is not None:
            append(keys, values)
            keys, values = cached_key, cached_value
        if is_absorbed:
            queries, values = self.with_keys(queries), keys[..., :self.settings.kv_rank]
        results = _core.scaled_dot_product_attention(
            queries, keys, values, self.settled(options, rows), head_gate=head_gate,
            return_weights=return_weights, return_lse=return_lse)
        attended, *others = results if isinstance(results, tuple) else (results,)
        merged = self.with_values(attended) if is_absorbed else _core.merge_heads(attended)
        output = returned(self.linear(merged, "o"), self.settings.dtype)
        if rows.is_one:
            output, *others = (result[0] for result in (output, *others))
        return (output, *others) if others else output

    def rows(self, query: ArrayLike, key: ArrayLike, positions: Maybe,
             key_positions: Maybe) -> Rows:
        """The arguments, checked."""
        given = as_array(query, "query")
        own_key = given if key is query else as_array(key, "key")
        queries = self._rows(given, "query")
        keys = queries if key is query else self._rows(own_key, "key")
        if given.ndim != own_key.ndim or len(queries) != len(keys):
            raise ValueError(f"key: got shape {own_key.shape}, wanted the batch of query, of shape"
                             f" {given.shape}")
        if key_positions is None and key is query:
            key_positions = positions
        return Rows(queries, keys, self._positions(positions, "positions", queries),
                    self._positions(key_positions, "key_positions", keys), given.ndim == 2,
                    given.dtype)

    def _rows(self, given: Array, name: str) -> Array:
        check_rows(given.shape, name, self.settings.embed_dim)
        rows = as_computed(given, name, self.settings.dtype)
        return rows if rows.ndim == 3 else rows[None]

    def _positions(self, positions: Maybe, name: str, rows: Array) -> Maybe:
        if positions is None:
            return None
        if self.rotary is None:
            raise ValueError(f"{name}: got positions where nothing rotates, wanted rotary= too")
        batch, n, _ = rows.shape
        return as_positions(positions, name, batch, n, position_axes(self.settings.rotary))

    def settled(self, options: AttentionOptions, rows: Rows) -> AttentionOptions:
        """The options with the layer's scale; for one sequence as for a batch of one."""
        for name in ("mask", "bias"):
            scores = getattr(options, name)
            if scores is not None and not is_block_mask(scores):
                array: dict[str, Any] = {name: as_array(scores, name)}
                check_score_axes(array[name].ndim, name)
                options = options._replace(**array)
        if options.scale is None:
            options = options._replace(scale=self.settings.call_scale)
        return options_of_one(options, rows.query.shape[1]) if rows.is_one else options

    def linear(self, x: Array, name: str) -> Array:
        """x times W of this name, and b where there is one."""
        return _core.linear(x, self.matrices["W_" + name], self.parameters.get("b_" + name))

    def normed(self, x: Array, name: str) -> Array:
        """(batch, len, rank), over the last axis."""
        return _core.prepare_heads(x, 1, None, None, self.parameters[name], self.settings.norm_eps,
                                   0.0)

    def rotated(self, x: Array, positions: Maybe) -> Array:
        """(batch, len, rope_dim), or with heads before len."""
        return x if self.rotary is None else _core.rotary(x, self.rotary, positions)

    def queries(self, rows: Rows) -> Array:
        """(batch, heads, len, nope_dim + rope_dim)."""
        settings = self.settings
        if settings.query_rank is None:
            projected = self.linear(rows.query, "q")
        else:
            projected = self.linear(self.normed(self.linear(rows.query, "dq"), "q_norm"), "uq")
        heads = _core.split_heads(projected, settings.num_heads)
        rope = heads[..., settings.nope_dim:]
        rope[...] = self.rotated(rope, rows.positions)
        return heads

    def latents(self, rows: Rows) -> tuple[Array, Array]:
        """The latent, normed, (batch, len, kv_rank), and the rotated columns (batch, len,
        rope_dim)."""
        compressed, rank = self.linear(rows.key, "dkv"), self.settings.kv_rank
        return (self.normed(compressed[..., :rank], "kv_norm"),
                self.rotated(compressed[..., rank:], rows.key_positions))

    def expanded(self, latent: Array, rotated: Array) -> tuple[Array, Array]:
        """Key and value (batch, heads, len, columns)."""
        heads = self.settings.num_heads
        return (keys_of_heads(_core.split_heads(self.linear(latent, "uk"), heads), rotated),
                _core.split_heads(self.linear(latent, "uv"), heads))

    def with_keys(self, queries: Array) -> Array:
        """Queries as they meet latents, (batch, heads, len, kv_rank + rope_dim)."""
        settings, (batch, heads, n, _) = self.settings, queries.shape
        absorbed = np.empty((batch, heads, n, settings.latent_dim), queries.dtype)
        absorbed[..., settings.kv_rank:] = queries[..., settings.nope_dim:]
        for head, matrix in enumerate(self.of_heads("W_uk")):
            absorbed[:, head, :, :settings.kv_rank] = _core.linear(
                queries[:, head, :, :settings.nope_dim], matrix, None)
        return absorbed

    def with_values(self, attended: Array) -> Array:
        """Sums of latents (batch, heads, len, kv_rank) as merged heads (batch, len, heads *
        value_head_dim)."""
        width, (batch, heads, n, _) = self.settings.value_head_dim, attended.shape
        merged = np.empty((batch, n, heads * width), attended.dtype)
        for head, matrix in enumerate(self.of_heads("W_uv")):
            merged[..., head * width:(head + 1) * width] = _core.linear(
                attended[:, head], matrix, None)
        return merged

    def of_heads(self, name: str) -> list[Any]:
        """Each head's part of W_uv (kv_rank, value_head_dim), or of W_uk, transposed: (nope_dim,
        kv_rank). Packed for good where the layer is frozen; of a quantised one in float32."""
        known = None if self.by_head is None else self.by_head.get(name)
        if known is not None:
            return known
        numbers, heads = numbers_of(self.parameters[name]), self.settings.num_heads
        parts = np.hsplit(numbers, heads)
        if name == "W_uk":
            parts = [part.T for part in parts]
        if self.by_head is None:
            return parts
        packed = self.by_head[name] = [_core.pack_weight(part) for part in parts]
        return packed

    def saving(self) -> SavingCore:
        """The same for gradients, with plain arrays."""
        return SavingCore(self.settings, {name: numbers_of(parameter) for name, parameter
                                          in self.parameters.items()}, None)


def options_of_one(options: AttentionOptions, query_len: int) -> AttentionOptions:
    """Those of one sequence without the axis of the batch, for a batch of one."""
    if options.query_offset is not None and not isinstance(options.query_offset, int):
        offset = as_array(options.query_offset, "query_offset")
        if offset.ndim > 0:
            raise ValueError(f"query_offset: got shape {offset.shape}, wanted an int")
        options = options._replace(query_offset=offset)
    if options.key_lengths is not None:
        lengths = as_array(options.key_lengths, "key_lengths")
        if lengths.shape not in {(), (query_len,)}:
            raise ValueError(f"key_lengths: got shape {lengths.shape}, wanted an int or"
                             f" ({query_len},) (a length a query)")
        options = options._replace(key_lengths=lengths[None])
    return options


def as_key(latent: Array, rotated: Array) -> Array:
    """Of one head for all, (batch, 1, len, kv_rank + rope_dim)."""
    return np.concatenate([latent, rotated], axis=-1)[:, None]


def keys_of_heads(nope: Array, rotated: Array) -> Array:
    """(batch, heads, len, nope_dim) and (batch, len, rope_dim), shared by the heads, beside each
    other."""
    shape = (*nope.shape[:3], rotated.shape[-1])
    return np.concatenate([nope, np.broadcast_to(rotated[:, None], shape)], axis=-1)


class SavingCore(LatentCore):
    """The call without a cache, which keeps what its way back takes: by the name of each step."""

    __slots__ = ("saved",)

    def forward(self, query: ArrayLike, key: Maybe, head_gate: Maybe, options: AttentionOptions,
                positions: Maybe, key_positions: Maybe,
                ) -> tuple[Array, Callable[..., dict[str, Gradient]]]:
        """The output, and backward(grad_output, grad_lse, wanted)."""
        self.saved: dict[str, Any] = {}
        rows = self.rows(query, query if key is None else key, positions, key_positions)
        gate = (None if head_gate is None
                else checked_gate(self.settings, head_gate)[:, None, None])
        queries = self.queries(rows)
        keys, values = self.expanded(*self.latents(rows))
        attended, self.saved["attention"] = _core.scaled_dot_product_attention(
            queries, keys, values, self.settled(options, rows), save=True)
        gated = attended if gate is None else attended * gate
        output = returned(self.linear(_core.merge_heads(gated), "o"), self.settings.dtype)

        def backward(grad_output: ArrayLike, grad_lse: Maybe,
                     wanted: set[str]) -> dict[str, Gradient]:
            return _Backward(self, rows, attended, gate, wanted, key is None).gradients(
                grad_output, grad_lse)

        return (output[0] if rows.is_one else output), backward

    def linear(self, x: Array, name: str) -> Array:
        result, self.saved[name] = _core.linear(x, self.matrices["W_" + name],
                                                self.parameters.get("b_" + name), save=True)
        return result

    def normed(self, x: Array, name: str) -> Array:
        result, self.saved[name] = _core.prepare_heads(
            x, 1, None, None, self.parameters[name], self.settings.norm_eps, 0.0, save=True)
        return result

    def rotated(self, x: Array, positions: Maybe) -> Array:
        if self.rotary is None:
            return x
        of = "rotated queries" if x.ndim == 4 else "rotated keys"
        result, self.saved[of] = _core.rotary(x, self.rotary, positions, save=True)
        return result


class _Backward:
    """One way back: from the gradients of the results to those of the arguments."""

    def __init__(self, core: SavingCore, rows: Rows, attended: Array, gate: Array | None,
                 wanted: set[str], key_is_query: bool) -> None:
        self.settings, self.saved = core.settings, core.saved
        self.rows, self.attended, self.gate = rows, attended, gate
        self.wanted, self.key_is_query = wanted, key_is_query
        self.found: dict[str, Gradient] = {}

    def gradients(self, grad_output: ArrayLike, grad_lse: Maybe) -> dict[str, Gradient]:
        settings, n = self.settings, self.rows.query.shape[1]
        grad_output = self._of_results(grad_output, "grad_output", (n, settings.embed_dim))
        grad_lse = None if grad_lse is None else self._of_results(
            grad_lse, "grad_lse", (settings.num_heads, n))
        grad_attended = self._through_gate(_core.split_heads(self._linear(grad_output, "o"),
                                                             self.settings.num_heads))
        wanted = {"query", "key", "value", *self.wanted.intersection(OF_SCORES)}
        by_attention = _core.scaled_dot_product_attention_backward(
            self.saved["attention"], grad_attended, grad_lse, wanted)
        self.found |= {name: by_attention[name] for name in OF_SCORES}
        grad_query = self._of_queries(np.asarray(by_attention["query"]))
        grad_key = self._of_latents(np.asarray(by_attention["key"]),
                                    np.asarray(by_attention["value"]))
        if self.key_is_query:
            self.found["query"] = self._as_given(grad_query + grad_key)
        else:
            self.found |= {"query": self._as_given(grad_query), "key": self._as_given(grad_key)}
        return {name: gradient if name in self.wanted else None
                for name, gradient in self.found.items()}

    def _of_results(self, gradient: ArrayLike, name: str, of_one: tuple[int, int]) -> Array:
        """With the axis of the batch. of_one: the shape for one sequence."""
        array = as_computed(as_array(gradient, name), name, self.settings.dtype)
        if not self.rows.is_one:
            return array
        if array.shape != of_one:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {of_one}")
        return array[None]

    def _through_gate(self, grad_gated: Array) -> Array:
        if self.gate is None:
            return grad_gated
        sums = (grad_gated * self.attended).sum(axis=(0, 2, 3), dtype=np.float64)
        self.found["head_gate"] = sums.astype(grad_gated.dtype)
        return grad_gated * self.gate

    def _of_queries(self, grad_heads: Array) -> Array:
        """The gradient of query's rows from that of its heads, rotated."""
        self._unrotate(grad_heads[..., self.settings.nope_dim:], "rotated queries")
        projected = _core.merge_heads(grad_heads)
        if self.settings.query_rank is None:
            return self._linear(projected, "q")
        return self._linear(self._norm(self._linear(projected, "uq"), "q_norm"), "dq")

    def _of_latents(self, grad_key: Array, grad_value: Array) -> Array:
        """The gradient of key's rows from those of expanded keys and values."""
        nope = self.settings.nope_dim
        grad_rotated = grad_key[..., nope:].sum(axis=1)
        self._unrotate(grad_rotated, "rotated keys")
        grad_latent = (self._linear(_core.merge_heads(grad_key[..., :nope]), "uk")
                       + self._linear(_core.merge_heads(grad_value), "uv"))
        grad_compressed = [self._norm(grad_latent, "kv_norm"), grad_rotated]
        return self._linear(np.concatenate(grad_compressed, axis=-1), "dkv")

    def _linear(self, grad_output: Array, name: str) -> Array:
        """The gradient of the step's rows; those of W and b go to `found`."""
        return np.asarray(linear_backward(self.saved[name], grad_output, name, {"x", *self.wanted},
                                          self.found))

    def _norm(self, grad_output: Array, name: str) -> Array:
        gradients = _core.prepare_heads_backward(self.saved[name], grad_output, None, {"x", "norm"})
        self.found[name] = shown(rounded(np.asarray(gradients["norm"]), self.settings.dtype))
        return np.asarray(gradients["x"])

    def _unrotate(self, gradient: Array, name: str) -> None:
        """In place."""
        if name in self.saved:
            gradient[...] = _core.rotary_backward(self.saved[name], gradient, None, {"x"})["x"]

    def _as_given(self, gradient: Array) -> Array:
        """Shaped as the rows were given, and rounded where they are halves."""
        rows, given = gradient[0] if self.rows.is_one else gradient, self.rows.given
        return shown(rounded(rows, given)) if is_half(given) else rows
