"""All five steps of the figure as one function, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, Never, Required, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import wanted_names
from mha._functions.dropout import drawn
from mha._functions.gradients import MultiHeadAttentionGradients, Pullback, pullback_of
from mha._functions.options import ATTENTION, AttentionKeywords, attention_options, takes_options
from mha._functions.rotary import Rotary, as_record

Array = NDArray[Any]
# The parameters, as layers and files name them.
WEIGHTS = ("W_q", "W_k", "W_v", "W_o", "W_g")  # W_g where there is an output gate
BIASES = ("b_q", "b_k", "b_v", "b_o", "b_g")
NORMS = ("q_norm", "k_norm")
NormOf = Literal["head", "width"]

__all__ = ["multi_head_attention", "multi_head_attention_vjp"]


class FigureKeywords(AttentionKeywords, total=False):
    """What the whole figure takes by name but what it returns, for type checkers."""

    b_q: ArrayLike | None
    b_k: ArrayLike | None
    b_v: ArrayLike | None
    b_o: ArrayLike | None
    W_g: ArrayLike | None
    b_g: ArrayLike | None
    num_heads: Required[int]
    num_kv_heads: int | None
    head_gate: ArrayLike | None
    rotary: Rotary | None
    q_norm: ArrayLike | None
    k_norm: ArrayLike | None
    norm_eps: float
    norm_offset: float
    positions: ArrayLike | None
    key_positions: ArrayLike | None


@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, return_weights: Literal[False] = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[FigureKeywords]) -> Array: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, return_weights: Literal[True],
        return_lse: Literal[True],
        **options: Unpack[FigureKeywords]) -> tuple[Array, Array, Array]: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, return_weights: Literal[True],
        return_lse: Literal[False] = ...,
        **options: Unpack[FigureKeywords]) -> tuple[Array, Array]: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, return_weights: Literal[False] = ...,
        return_lse: Literal[True],
        **options: Unpack[FigureKeywords]) -> tuple[Array, Array]: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, return_weights: bool = ...,
        return_lse: bool = ...,
        **options: Unpack[FigureKeywords]) -> Any: ...
@takes_options(ATTENTION, before="return_weights")
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *more: Never, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        W_g: ArrayLike | None = None, b_g: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        rotary: Rotary | None = None,
        q_norm: ArrayLike | None = None, k_norm: ArrayLike | None = None, norm_eps: float = 1e-6,
        norm_offset: float = 0.0, positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        return_weights: bool = False, return_lse: bool = False,
        **options: Unpack[AttentionKeywords]) -> Any:
    """The whole figure: project, split heads, attend, merge heads, project.

    Parameters
    ----------
    query : array (batch, query_len, query_dim), or (query_len, query_dim) for one sequence
    key : array (batch, key_len, key_dim)
    value : array (batch, key_len, value_dim)
    W_q : array (query_dim, num_heads * head_dim), used as query @ W_q
    W_k : array (key_dim, num_kv_heads * head_dim)
    W_v : array (value_dim, num_kv_heads * value_head_dim)
    W_o : array (num_heads * value_head_dim, output_dim)
    b_q, b_k, b_v, b_o : arrays, one number for each column of their W; optional
    W_g : array (query_dim, num_heads * value_head_dim) or (query_dim, num_heads), optional
        The output gate: merged heads times sigmoid(query @ W_g + b_g), before W_o and after
        head_gate; with a column a head, all of a head's columns times one number (Qiu et al. 2025).
    b_g : array, one number for each column of W_g; optional
    num_heads : int
    num_kv_heads : int, by default num_heads
    head_gate : array (num_heads,), optional
        Multiplies each head's output.
    rotary : mha.Rotary, optional
        Rotates the heads of queries and keys by their positions (Su et al. 2021).
    q_norm, k_norm : arrays (head_dim,), or (num_heads * head_dim,) and (num_kv_heads * head_dim,)
        Weights of the norm of each head, or of all together, before that; optional:
        x / sqrt(mean(x^2) + norm_eps) * (norm_offset + q_norm) (Zhang & Sennrich 2019).
    norm_eps, norm_offset : float
    positions, key_positions : ints (len,) or (batch, len), by default 0, 1, ...
        Where rows of query and key stand, for rotary alone; with its sections also (n, len) or
        (n, batch, len), as in a call of `mha.Rotary`. key_positions are positions where key is
        query itself.
    mask, bias : arrays (query_len, key_len) or (batch, num_heads, query_len, key_len), optional
        Either of batch and num_heads may be 1; for one mask per batch item write mask[:, None].
    The rest : as in `scaled_dot_product_attention`; the scores are
        (batch, num_heads, query_len, key_len), without batch for 2-D input.

    Returns
    -------
    output (batch, query_len, output_dim); then weights (batch, num_heads, query_len, key_len) and
    lse (batch, num_heads, query_len) where asked for.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`; a mask or bias of 3 dimensions too.

    Source: Vaswani et al. 2017, section 3.2.2; shared key heads as in Ainslie et al. 2023; the
    output gate: Qiu et al. 2025, "Gated Attention for Large Language Models", section 2.

    >>> x, W = np.ones((2, 4, 512)), np.eye(512)
    >>> mha.multi_head_attention(x, x, x, W, W, W, W, num_heads=8).shape
    (2, 4, 512)
    """
    chosen = attention_options(multi_head_attention, options, more)
    core = prepared_core(
        rotary, q_norm, k_norm, norm_eps, norm_offset, positions=positions,
        key_positions=key_positions, key_is_query=key is query)
    with drawn(chosen) as drawn_options:
        return core(
            query, key, value, W_q, W_k, W_v, W_o, W_g, b_q, b_k, b_v, b_o, b_g, num_heads,
            num_kv_heads, head_gate, drawn_options, return_weights=return_weights,
            return_lse=return_lse)


@takes_options(ATTENTION, before="wrt")
def multi_head_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *more: Never, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        W_g: ArrayLike | None = None, b_g: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        rotary: Rotary | None = None,
        q_norm: ArrayLike | None = None, k_norm: ArrayLike | None = None, norm_eps: float = 1e-6,
        norm_offset: float = 0.0, positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        wrt: Collection[str] | None = None, **options: Unpack[AttentionKeywords],
        ) -> tuple[Array, Pullback[MultiHeadAttentionGradients]]:
    """`multi_head_attention` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "W_q", ..., "b_o", "W_g", "b_g", "q_norm", "k_norm",
        "head_gate", "bias", "alibi", "relative_bias", "sinks", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `multi_head_attention`. The arrays are kept, not copied: they must not change
        before the pullback is called.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) takes the gradients of a loss with
    respect to the output (batch, query_len, output_dim) and, if it depends on it, the log-sum-exp
    (batch, num_heads, query_len); it returns those with respect to the arguments by name, each
    shaped as the argument. It may be called again.

    Raises
    ------
    ValueError, TypeError: as `multi_head_attention`; an unknown name in wrt.

    Source: Vaswani et al. 2017, section 3.2.2; attention backwards as in Dao et al. 2022.

    >>> x, W = np.ones((2, 4, 512)), np.eye(512)
    >>> output, pullback = mha.multi_head_attention_vjp(x, x, x, W, W, W, W, num_heads=8)
    >>> pullback(np.ones_like(output)).W_q.shape
    (512, 512)
    """
    wanted = wanted_names(wrt, MultiHeadAttentionGradients._fields)
    chosen = attention_options(multi_head_attention_vjp, options, more)
    core = prepared_core(
        rotary, q_norm, k_norm, norm_eps, norm_offset, positions=positions,
        key_positions=key_positions, key_is_query=key is query)
    with drawn(chosen) as drawn_options:
        output, saved = core(
            query, key, value, W_q, W_k, W_v, W_o, W_g, b_q, b_k, b_v, b_o, b_g, num_heads,
            num_kv_heads, head_gate, drawn_options, save=True)
    return output, pullback_of(_core.multi_head_attention_backward, saved, wanted,
                               MultiHeadAttentionGradients)


def prepared_core(rotary: Rotary | None, q_norm: ArrayLike | None, k_norm: ArrayLike | None,
                  norm_eps: float, norm_offset: float, *, positions: ArrayLike | None = None,
                  key_positions: ArrayLike | None = None,
                  key_is_query: bool = False) -> Callable[..., Any]:
    """`_core.multi_head_attention` with what prepares heads, if anything does."""
    if (rotary is None and q_norm is None and k_norm is None and positions is None
            and key_positions is None):
        return _core.multi_head_attention
    key_positions = known_key_positions(rotary, positions, key_positions, key_is_query)
    return functools.partial(_core.multi_head_attention, rotary=as_record(rotary),
                             positions=positions, key_positions=key_positions, q_norm=q_norm,
                             k_norm=k_norm, norm_eps=norm_eps, norm_offset=norm_offset)


def known_key_positions(rotary: Rotary | None, positions: ArrayLike | None,
                        key_positions: ArrayLike | None, key_is_query: bool) -> ArrayLike | None:
    """key_positions, by default those of a query that is the key, too; a ValueError where positions
    are given and nothing rotates."""
    for name, given in (("positions", positions), ("key_positions", key_positions)):
        if rotary is None and given is not None:
            raise ValueError(f"{name}: got positions where nothing rotates, wanted rotary= too")
    return positions if key_positions is None and key_is_query else key_positions
