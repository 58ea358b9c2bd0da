"""What the pullbacks return, by the names of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import ArrayLike, NDArray

# Of an argument that may not have been given.
Gradient = NDArray[Any] | None
# Of one that a call always has. It is None only where wrt= leaves it out, or for a layer's key and
# value where they are the query: type checkers do not ask for a test of that.
Wanted = NDArray[Any] | Any

GradientsType = TypeVar("GradientsType", covariant=True)


def _prints_shapes(gradients: type[GradientsType]) -> type[GradientsType]:
    """Decorates a class whose repr is shapes and types: all its numbers would fill the screen."""

    def __repr__(self: Any) -> str:  # noqa: N807
        shown = [f"{name}={None if array is None else f'<{array.dtype} {array.shape}>'}"
                 for name, array in self._asdict().items()]
        return f"{type(self).__name__}({', '.join(shown)})"

    gradients.__repr__ = __repr__  # type: ignore[method-assign]
    return gradients


@_prints_shapes
class LinearGradients(NamedTuple):
    """What the pullback of `mha.linear_vjp` returns; None where not wanted or not given."""

    x: Wanted
    weight: Wanted
    bias: Gradient


@_prints_shapes
class RelativeBiasGradients(NamedTuple):
    """What the pullback of `mha.t5_relative_bias_vjp` returns."""

    table: Wanted


@_prints_shapes
class RotaryGradients(NamedTuple):
    """What the pullback of `mha.Rotary.vjp` returns."""

    x: Wanted


@_prints_shapes
class ScaledDotProductAttentionGradients(NamedTuple):
    """What the pullback of `mha.scaled_dot_product_attention_vjp` returns; None where not wanted
    or not given."""

    query: Wanted
    key: Wanted
    value: Wanted
    bias: Gradient
    alibi: Gradient
    relative_bias: Gradient
    sinks: Gradient


@_prints_shapes
class VarlenGradients(NamedTuple):
    """What the pullback of `mha.scaled_dot_product_attention_varlen_vjp` returns; None where not
    wanted or not given."""

    query: Wanted
    key: Wanted
    value: Wanted
    alibi: Gradient
    relative_bias: Gradient
    sinks: Gradient


@_prints_shapes
class AdditiveAttentionGradients(NamedTuple):
    """What the pullback of `mha.additive_attention_vjp` returns; None where not wanted."""

    query: Wanted
    key: Wanted
    value: Wanted
    W_q: Wanted
    W_k: Wanted
    w_v: Wanted


@_prints_shapes
class MultiHeadAttentionGradients(NamedTuple):
    """What the pullbacks of `mha.multi_head_attention_vjp` and of a layer's `vjp` return; None
    where not wanted or not given."""

    query: Wanted
    key: Wanted
    value: Wanted
    W_q: Wanted
    W_k: Wanted
    W_v: Wanted
    W_o: Wanted
    b_q: Gradient
    b_k: Gradient
    b_v: Gradient
    b_o: Gradient
    W_g: Gradient
    b_g: Gradient
    q_norm: Gradient
    k_norm: Gradient
    head_gate: Gradient
    bias: Gradient
    alibi: Gradient
    relative_bias: Gradient
    sinks: Gradient


@_prints_shapes
class MultiHeadLatentAttentionGradients(NamedTuple):
    """What the pullback of `MultiHeadLatentAttention.vjp` returns; None where not wanted or not
    given, and for a parameter that the layer has not."""

    query: Wanted
    key: Gradient
    W_dq: Gradient
    q_norm: Gradient
    W_uq: Gradient
    W_q: Gradient
    W_dkv: Wanted
    kv_norm: Wanted
    W_uk: Wanted
    W_uv: Wanted
    W_o: Wanted
    b_dq: Gradient
    b_dkv: Gradient
    b_o: Gradient
    head_gate: Gradient
    bias: Gradient
    alibi: Gradient
    relative_bias: Gradient
    sinks: Gradient


class Pullback(Protocol[GradientsType]):
    """From the gradients of a loss with respect to a call's results to those with respect to its
    arguments."""

    def __call__(self, grad_output: ArrayLike,
                 grad_lse: ArrayLike | None = None) -> GradientsType: ...


def pullback_of(backward: Callable[..., dict[str, Gradient]], saved: object, wanted: set[str],
                gradients: Callable[..., GradientsType]) -> Pullback[GradientsType]:
    """The pullback of a call whose forward pass left `saved`, by the core's backward pass."""

    def pullback(grad_output: ArrayLike, grad_lse: ArrayLike | None = None) -> GradientsType:
        """The gradients of a loss by name, from those by the output and by lse (or None: zeros).

        They are shaped as the results are; None stands for what is not wanted or was not given."""
        return gradients(**backward(saved, grad_output, grad_lse, wanted))

    pullback.__qualname__ = "pullback"  # errors have it
    return pullback
