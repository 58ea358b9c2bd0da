"""How much each attention head matters, to decide which to prune.

Three scores look at the attention weights alone, two ask a loss:

    variance, confidence, entropy    of the weights of each head
    ablation                         how much the loss grows without each head
    gradient                         how fast the loss changes with each head's gate

Heads of small scores (of large entropy) go first; `MultiHeadAttention.prune_heads` removes them.
On the sentence encoder of examples/prune_heads.py only the gradient score does better than chance:
how sharply a head looks says little about what the network needs.
`rollout` follows attention through several layers. `mha.plot.importance` draws scores.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_bool, as_int, check_kind, no_memory
from mha._base.dtypes import widened
from mha._base.keywords import checks_keywords
from mha._base.progress import progress

__all__ = ["ablation", "confidence", "entropy", "gradient", "rollout", "variance"]


def __dir__() -> list[str]:
    return sorted(__all__)


@checks_keywords
def variance(weights: ArrayLike, *, lengths: ArrayLike | None = None) -> NDArray[np.float64]:
    """The variance of each head's attention weights over the keys, averaged over the queries.

    Parameters
    ----------
    weights : array (batch, heads, query_len, key_len) or (heads, query_len, key_len)
        As attention returns them with return_weights=True; each row sums to 1.
    lengths : ints (batch,), optional
        How many queries and keys of each batch item are real; padding does not count. By default
        all are. Keys that a causal mask blocks count as weights of 0.

    Returns
    -------
    (heads,): 0 for a head that looks at all keys alike, (n - 1) / n**2 for one that looks at a
    single one of n.

    Raises
    ------
    ValueError: another shape, lengths out of range. TypeError: weights that are not floats.

    Source: Dive into Deep Learning's chapter on multi-head attention, its second exercise.

    >>> mha.importance.variance([[[0.5, 0.5], [1.0, 0.0]]]).tolist()
    [0.125]
    """
    return _mean_of_rows(weights, lengths, lambda rows: rows.var(axis=-1))


@checks_keywords
def confidence(weights: ArrayLike, *, lengths: ArrayLike | None = None) -> NDArray[np.float64]:
    """The largest weight of each row, averaged over the queries: how sharply each head attends.

    Parameters
    ----------
    weights, lengths : as in `variance`

    Returns
    -------
    (heads,), from 1 / key_len to 1.

    Raises
    ------
    ValueError, TypeError: as `variance`.

    Source: Voita et al. 2019, "Analyzing Multi-Head Self-Attention", who leave out the last token
    of a sentence; here all count.

    >>> mha.importance.confidence([[[0.5, 0.5], [1.0, 0.0]]]).tolist()
    [0.75]
    """
    return _mean_of_rows(weights, lengths, lambda rows: rows.max(axis=-1))


@checks_keywords
def entropy(weights: ArrayLike, *, lengths: ArrayLike | None = None) -> NDArray[np.float64]:
    """The entropy of each row, -sum of weight * log(weight) in nats, averaged over the queries.

    Parameters
    ----------
    weights, lengths : as in `variance`

    Returns
    -------
    (heads,), from 0 for heads that look at one key to log(key_len) for those that look at all
    alike: small where `confidence` is large.

    Raises
    ------
    ValueError, TypeError: as `variance`.

    Source: Clark et al. 2019, "What Does BERT Look At?", on focused and broad attention.

    >>> mha.importance.entropy([[[0.5, 0.5], [1.0, 0.0]]]).round(4).tolist()
    [0.3466]
    """
    return _mean_of_rows(weights, lengths, lambda rows: -(
        rows * np.log(np.where(rows > 0, rows, 1))).sum(axis=-1))


@checks_keywords
def ablation(loss: Callable[[NDArray[np.float64]], float],
             shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """How much a loss grows when each head is switched off, one after the other.

    Parameters
    ----------
    loss : function of gates -> float
        Computes the loss with these gates, float64 of the given shape, handed to attention as
        head_gate: 1 leaves a head as it is, 0 switches it off. It is called once with all heads,
        and once for each head.
    shape : int or tuple
        Of the gates: the number of heads of one layer, or (layers, heads).

    Returns
    -------
    array of that shape: the loss without the head minus the loss with all.

    Raises
    ------
    ValueError: a shape without heads, a loss that is not one finite number. TypeError: a shape
    that is not ints, a loss that is no function or gives no number. What the loss itself raises.

    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 3.2.

    >>> mha.importance.ablation(lambda gates: 3 - gates @ [0.5, 2.0], 2).tolist()
    [0.5, 2.0]
    """
    if not callable(loss):
        raise TypeError(f"loss: got {type(loss).__name__}, wanted a function of the gates")
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    sizes = tuple(as_int(size, "shape") for size in sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"shape: got {shape!r}, wanted a number of heads, or (layers, heads)")

    def measured(gates: NDArray[np.float64]) -> float:
        result = as_array(loss(gates), "loss")
        if result.dtype.kind not in "iuf":
            raise TypeError(f"loss: got {result!r}, wanted one finite number")
        if result.size != 1 or not math.isfinite(result.item()):
            raise ValueError(f"loss: got {result!r}, wanted one finite number")
        return float(result.item())

    try:
        scores, open_gates = np.empty(sizes), np.ones(sizes)
    except (ValueError, OverflowError, MemoryError):
        raise no_memory("shape", sizes) from None
    whole = measured(open_gates)
    for head in progress(np.ndindex(sizes), "ablation", "head", scores.size):
        gates = np.ones(sizes)
        gates[head] = 0
        scores[head] = measured(gates) - whole
    return scores


@checks_keywords
def gradient(gate_gradients: Iterable[ArrayLike], *, normalise: bool = True) -> NDArray[np.float64]:
    """The mean over examples of |d loss / d gate|: I_h of Michel et al.

    Parameters
    ----------
    gate_gradients : iterable of arrays (heads,) or (layers, heads), one for each example
        The gradients of that example's loss with respect to head_gate at 1, as `layer.vjp` and
        `mha.multi_head_attention_vjp` give them. One for a batch of several examples would let
        those of unlike signs cancel.
    normalise : bool
        Divide each layer's scores by their l2 norm, as the paper does, since the gradients of
        different layers are of different sizes.

    Returns
    -------
    array of the shape of one example's gradients.

    Raises
    ------
    ValueError: no examples, unequal shapes, NaN or infinity. TypeError: arrays that are not floats.

    Source: Michel et al. 2019, section 4.1; the norm from Molchanov et al. 2017.

    >>> mha.importance.gradient([[3.0, -1.0], [-3.0, 7.0]]).tolist()
    [0.6, 0.8]
    """
    normalise = as_bool(normalise, "normalise")
    _check_iterable(gate_gradients, "gate_gradients")
    total: NDArray[np.float64] | None = None
    count = 0
    for one in progress(gate_gradients, "gradients", "example"):
        magnitudes = np.abs(_floats(one, "gate_gradients"))
        if total is None:
            total = np.zeros(magnitudes.shape)
        if (magnitudes.ndim not in (1, 2) or magnitudes.shape != total.shape
                or 0 in magnitudes.shape):
            raise ValueError(f"gate_gradients: got shape {magnitudes.shape}, wanted"
                             f" {total.shape if count else '(heads,) or (layers, heads)'}")
        if not np.isfinite(magnitudes).all():
            raise ValueError(f"gate_gradients: got NaN or infinity in example {count}, wanted"
                             " finite numbers")
        total += magnitudes
        count += 1
    if total is None:
        raise ValueError("gate_gradients: got none, wanted those of one example or more")
    scores = total / count
    if normalise:
        largest = scores.max(axis=-1, keepdims=True)
        scores /= np.where(largest > 0, largest, 1)  # else squares of tiny numbers would vanish
        norms = np.sqrt((scores**2).sum(axis=-1, keepdims=True))
        scores /= np.where(norms > 0, norms, 1)
    return scores


@checks_keywords
def rollout(weights: Sequence[ArrayLike], *, residual: float = 0.5) -> NDArray[np.float64]:
    """Attention followed through all layers, heads averaged: which input each output comes from.

    An entry says how much a token of the last layer holds of a token of the input, as if values
    were only mixed.

    Parameters
    ----------
    weights : sequence of arrays (batch, heads, len, len) or (heads, len, len), first layer first
    residual : float in [0, 1]
        The share of each token that goes past attention by the residual connection.

    Returns
    -------
    (batch, len, len) or (len, len); rows sum to 1 where those of the weights do.

    Raises
    ------
    ValueError: no layers, unequal or other shapes, residual out of range. TypeError: weights that
    are not floats, a residual that is no number.

    Source: Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3.

    >>> swap = np.array([[[0.0, 1.0], [1.0, 0.0]]])
    >>> mha.importance.rollout([swap, swap], residual=0.0).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    _check_iterable(weights, "weights")
    if not isinstance(residual, numbers.Real):
        raise TypeError(f"residual: got {type(residual).__name__}, wanted a share in [0, 1]")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual: got {residual!r}, wanted a share in [0, 1]")
    residual = float(residual)
    mixed: NDArray[np.float64] | None = None
    for one in weights:
        layer = _floats(one, "weights")
        if layer.ndim not in (3, 4) or layer.shape[-1] != layer.shape[-2] or not layer.shape[-3]:
            raise ValueError(f"weights: got shape {layer.shape}, wanted (batch, heads, len, len) or"
                             " (heads, len, len) in every layer")
        step = (1 - residual) * layer.mean(axis=-3) + residual * np.eye(layer.shape[-1])
        if mixed is not None and mixed.shape != step.shape:
            raise ValueError(f"weights: got shape {layer.shape} after layers of another one,"
                             " wanted the same batch and length in every layer")
        mixed = step if mixed is None else step @ mixed
    if mixed is None:
        raise ValueError("weights: got none, wanted those of one layer or more")
    return mixed


def _check_iterable(arrays: Any, name: str) -> None:
    if (not isinstance(arrays, Iterable) or isinstance(arrays, (str, bytes))
            or getattr(arrays, "ndim", 1) == 0):
        raise TypeError(f"{name}: got {type(arrays).__name__}, wanted a sequence of arrays")


def _floats(array: ArrayLike, name: str) -> NDArray[np.float64]:
    given = widened(as_array(array, name))
    check_kind(given, name, "iuf", "floats")
    return given.astype(np.float64)


def _mean_of_rows(weights: ArrayLike, lengths: ArrayLike | None,
                  of_rows: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float64]:
    """A number a row (..., query_len, key_len), averaged over the real queries of each head."""
    array = _floats(weights, "weights")
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise ValueError(f"weights: got shape {array.shape}, wanted (batch, heads, query_len,"
                         " key_len) or (heads, query_len, key_len), none of size 0")
    array = array.reshape(-1, *array.shape[-3:])
    if lengths is None:
        return of_rows(array).mean(axis=(0, 2))
    real = as_array(lengths, "lengths")
    check_kind(real, "lengths", "iu", "ints")
    if real.shape != (len(array),):
        raise ValueError(f"lengths: got shape {real.shape}, wanted ({len(array)},)")
    if real.min() < 1 or real.max() > min(array.shape[2:]):
        raise ValueError(f"lengths: got {real.min()} to {real.max()}, wanted 1 to"
                         f" {min(array.shape[2:])}")
    totals = sum(of_rows(item[:, :length, :length]).sum(axis=-1)
                 for item, length in zip(array, real.tolist(), strict=True))
    return np.asarray(totals / real.sum())
