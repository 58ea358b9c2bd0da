"""The well-known mistakes of scaled dot-product attention, a table for each step of it.

A table says what the step does, by the name of the mistake, which is what the user is told.
"" is the right way. Where two mistakes give the same numbers the first of a table is named.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs

Number: TypeAlias = float | Array


def swapped(array: Array) -> Array:
    """The last two axes swapped: what `key.T` should be."""
    return np.swapaxes(array, -1, -2)


def softmax(scores: Array, axis: int | tuple[int, ...] | None = -1) -> Array:
    exponentials = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def as_it_is(array: Array, *_: object) -> Array:
    return array


def _over_sum(numbers: Array) -> Array:
    return numbers / numbers.sum(axis=-1, keepdims=True)


def _unit(array: Array) -> Array:
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def _first(array: Array, axis: int) -> Array:
    """The first item along an axis, in the place of all of them."""
    return np.broadcast_to(np.take(array, [0], axis), array.shape)


def _rolled(array: Array, step: int, axis: int = -2) -> Array:
    return np.roll(array, step, axis)


INPUTS = {  # which of query, key and value comes in as query, as key and as value
    "": (0, 1, 2),
    "the keys are made from the query": (0, 0, 2),
    "the values are made from the query": (0, 1, 0),
    "the values are made from the key": (0, 1, 1),
    "the keys are made from the value": (0, 2, 2),
    "keys and values are made from the query": (0, 0, 0),
    "the queries are made from the key": (1, 1, 2),
    "the queries are made from the value": (2, 1, 2),
    "key and value are swapped": (0, 2, 1),
    "query and key are swapped": (1, 0, 2),
    "query and value are swapped": (2, 1, 0),
    "query, key and value are taken in the order key, value, query": (1, 2, 0),
    "query, key and value are taken in the order value, query, key": (2, 0, 1),
}
SCORES: dict[str, Callable[[Array, Array], Array]] = {  # from query and key
    "": lambda q, k: q @ swapped(k),
    "the keys are not transposed": lambda q, k: q @ k,
    "the keys are reshaped instead of transposed": lambda q, k:
        q @ np.ascontiguousarray(k).reshape(*k.shape[:-2], k.shape[-1], k.shape[-2]),
    "query and key are swapped: the scores are key @ query^T": lambda q, k: k @ swapped(q),
    "the scores compare the queries with themselves": lambda q, k: q @ swapped(q),
    "the scores compare the keys with themselves": lambda q, k: k @ swapped(k),
    "the scores have the wrong sign: the most alike get the least": lambda q, k: -q @ swapped(k),
    "the scores are made positive: abs": lambda q, k: np.abs(q @ swapped(k)),
    "the scores are squared": lambda q, k: (q @ swapped(k)) ** 2,
    "the scores go through a ReLU": lambda q, k: np.maximum(q @ swapped(k), 0),
    "the scores go through a tanh": lambda q, k:
        np.tanh(q @ swapped(k) / math.sqrt(q.shape[-1])) * math.sqrt(q.shape[-1]),
    "the scores are cosines: query and key are scaled to length 1": lambda q, k:
        _unit(q) @ swapped(_unit(k)),
    "the scores are distances between query and key": lambda q, k:
        np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1),
    "the scores are minus distances between query and key, not dot products": lambda q, k:
        -np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1),
    "the scores lack the last feature of each head: a slice is one short": lambda q, k:
        q[..., :-1] @ swapped(k[..., :-1]),
    "the scores lack the first feature of each head": lambda q, k:
        q[..., 1:] @ swapped(k[..., 1:]),
    "every head has the scores, and so the weights, of the first head": lambda q, k:
        _first(q @ swapped(k), -3),
    "every head has the keys of the first head": lambda q, k: q @ swapped(_first(k, -3)),
    "every head has the queries of the first head": lambda q, k: _first(q, -3) @ swapped(k),
    "the scores are averaged over the heads": lambda q, k:
        np.broadcast_to((q @ swapped(k)).mean(-3, keepdims=True), (*q.shape[:-1], k.shape[-2])),
    "the scores are summed over the heads, as if they were never split into heads": lambda q, k:
        np.broadcast_to((q @ swapped(k)).sum(-3, keepdims=True), (*q.shape[:-1], k.shape[-2])),
    "every batch item has the keys of the first item": lambda q, k: q @ swapped(_first(k, 0)),
    "every batch item has the queries of the first item": lambda q, k: _first(q, 0) @ swapped(k),
    "every batch item has the scores of the first item": lambda q, k: _first(q @ swapped(k), 0),
    "the keys belong to another batch item": lambda q, k: q @ swapped(k[::-1]),
    "the keys belong to another head, in reverse order": lambda q, k:
        q @ swapped(k[..., ::-1, :, :]),
    "the keys are in reverse order, unlike the values": lambda q, k: q @ swapped(k[..., ::-1, :]),
    "the keys are shifted by one position, unlike the values": lambda q, k:
        q @ swapped(_rolled(k, 1)),
    "the keys are shifted by one position to the left, unlike the values": lambda q, k:
        q @ swapped(_rolled(k, -1)),
    "the scores are added over features instead of multiplied: query + key": lambda q, k:
        q.sum(-1, keepdims=True) + swapped(k.sum(-1, keepdims=True)),
    "the scores miss the query: every query gets the same weights": lambda q, k:
        np.broadcast_to(swapped(k.sum(-1, keepdims=True)), (*q.shape[:-1], k.shape[-2])),
}
# What the scores and the weights are divided by; heads is the number of heads.
SCALE: dict[str, Callable[[Array, Array, Array, int], tuple[Number, Number]]] = {
    "": lambda q, k, v, heads: (math.sqrt(q.shape[-1]), 1),
    "forgot to divide by sqrt(d_k)": lambda q, k, v, heads: (1, 1),
    "divided by d_k instead of sqrt(d_k) (or twice by sqrt(d_k), which is the same)":
        lambda q, k, v, heads: (q.shape[-1], 1),
    "multiplied by sqrt(d_k) instead of dividing": lambda q, k, v, heads: (q.shape[-1] ** -0.5, 1),
    "multiplied by d_k instead of dividing by sqrt(d_k)":
        lambda q, k, v, heads: (1 / q.shape[-1], 1),
    "divided by sqrt(d_k) after the softmax instead of before":
        lambda q, k, v, heads: (1, math.sqrt(q.shape[-1])),
    "divided by sqrt(d_k) before the softmax and again after it":
        lambda q, k, v, heads: (math.sqrt(q.shape[-1]), math.sqrt(q.shape[-1])),
    "multiplied by sqrt(d_k) again after the softmax":
        lambda q, k, v, heads: (math.sqrt(q.shape[-1]), q.shape[-1] ** -0.5),
    "divided by d_k after the softmax instead of by sqrt(d_k) before":
        lambda q, k, v, heads: (1, q.shape[-1]),
    "divided by sqrt(d_model) instead of sqrt(d_k), the size of one head":
        lambda q, k, v, heads: (math.sqrt(q.shape[-1] * heads), 1),
    "divided by d_model instead of sqrt(d_k)": lambda q, k, v, heads: (q.shape[-1] * heads, 1),
    "divided by sqrt(num_heads) instead of sqrt(d_k)": lambda q, k, v, heads:
        (math.sqrt(heads), 1),
    "divided by the number of heads instead of sqrt(d_k)": lambda q, k, v, heads: (heads, 1),
    "divided by the fourth root of d_k: both query and key need it, or the scores sqrt(d_k)":
        lambda q, k, v, heads: (q.shape[-1] ** 0.25, 1),
    "divided three times by sqrt(d_k)": lambda q, k, v, heads: (q.shape[-1] ** 1.5, 1),
    "divided by d_k squared instead of sqrt(d_k)": lambda q, k, v, heads: (q.shape[-1] ** 2, 1),
    "divided by d_k / 2 instead of sqrt(d_k)": lambda q, k, v, heads: (q.shape[-1] / 2, 1),
    "divided by 2 * sqrt(d_k) instead of sqrt(d_k)": lambda q, k, v, heads:
        (2 * math.sqrt(q.shape[-1]), 1),
    "divided by the cube root of d_k instead of sqrt(d_k)": lambda q, k, v, heads:
        (q.shape[-1] ** (1 / 3), 1),
    "divided by log(d_k) instead of sqrt(d_k)": lambda q, k, v, heads: (math.log(q.shape[-1]), 1),
    "divided by sqrt(d_k + 1) instead of sqrt(d_k)": lambda q, k, v, heads:
        (math.sqrt(q.shape[-1] + 1), 1),
    "divided by sqrt(d_k - 1) instead of sqrt(d_k)": lambda q, k, v, heads:
        (math.sqrt(max(q.shape[-1] - 1, 1)), 1),
    "divided by 1 + sqrt(d_k) instead of sqrt(d_k)": lambda q, k, v, heads:
        (1 + math.sqrt(q.shape[-1]), 1),
    "divided by the integer part of sqrt(d_k)": lambda q, k, v, heads:
        (math.isqrt(q.shape[-1]), 1),
    "divided by the square root of the number of keys instead of sqrt(d_k)":
        lambda q, k, v, heads: (math.sqrt(k.shape[-2]), 1),
    "divided by the number of keys instead of sqrt(d_k)":
        lambda q, k, v, heads: (k.shape[-2], 1),
    "divided by the square root of the number of queries instead of sqrt(d_k)":
        lambda q, k, v, heads: (math.sqrt(q.shape[-2]), 1),
    "divided by the number of queries instead of sqrt(d_k)":
        lambda q, k, v, heads: (q.shape[-2], 1),
    "divided by sqrt(d_v) instead of sqrt(d_k)": lambda q, k, v, heads:
        (math.sqrt(v.shape[-1]), 1),
    "divided by the square root of the batch size instead of sqrt(d_k)":
        lambda q, k, v, heads: (math.sqrt(q.shape[0]), 1),
    "divided by the standard deviation of all scores instead of sqrt(d_k)":
        lambda q, k, v, heads: ((q @ swapped(k)).std(), 1),
    "divided by the largest of all scores instead of sqrt(d_k)":
        lambda q, k, v, heads: ((q @ swapped(k)).max(), 1),
    "divided by the largest score instead of sqrt(d_k)":
        lambda q, k, v, heads: ((q @ swapped(k)).max(axis=-1, keepdims=True), 1),
}


def _hardest(scores: Array) -> Array:
    return (scores == scores.max(axis=-1, keepdims=True)).astype(float)


ALL_EQUAL = "all weights are equal: the scores are not used"
SOFTMAX: dict[str, Callable[[Array], Array]] = {
    "": softmax,
    "softmax over the wrong axis: over the queries instead of the keys":
        lambda scores: softmax(scores, -2),
    "softmax over the wrong axis: over the heads instead of the keys": lambda scores:
        softmax(scores, {4: 1}[scores.ndim]),
    "softmax over the wrong axis: over the first axis (the batch)":
        lambda scores: softmax(scores, 0),
    "softmax over the wrong axis: over queries and keys together":
        lambda scores: softmax(scores, (-1, -2)),
    "softmax over the wrong axis: over heads and keys together":
        lambda scores: softmax(scores, (-1, -3)),
    "softmax over the wrong axis: over all scores at once": lambda scores: softmax(scores, None),
    "softmax normalises over the wrong axis: exp is divided by the sum over the queries":
        lambda scores: np.exp(scores - scores.max(axis=-1, keepdims=True))
        / np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-2, keepdims=True),
    "a keepdims=True is missing: each column is divided by the sum of a row":
        lambda scores: np.exp(scores) / np.exp(scores).sum(axis=-1)[..., None, :],
    "keepdims=True is missing: the maxima and sums of rows meet the columns": lambda scores:
        np.exp(scores - scores.max(axis=-1)[..., None, :])
        / np.exp(scores - scores.max(axis=-1)[..., None, :]).sum(axis=-1)[..., None, :],
    "keepdims=True is missing after sum: each column is divided by the sum of a row": lambda scores:
        np.exp(scores - scores.max(axis=-1, keepdims=True))
        / np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1)[..., None, :],
    "softmax normalises over everything: exp is divided by the sum of all, keep axis=-1":
        lambda scores: np.exp(scores - scores.max(axis=-1, keepdims=True))
        / np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(),
    "forgot the softmax": as_it_is,
    "the softmax lacks its exp: scores are divided by their sum": _over_sum,
    "the softmax is not normalised: divide by the sum of the row": np.exp,
    "the softmax is not normalised: exp(scores - maximum) must be divided by the sum of the row":
        lambda scores: np.exp(scores - scores.max(axis=-1, keepdims=True)),
    "the softmax is applied twice": lambda scores: softmax(softmax(scores)),
    "log_softmax instead of softmax": lambda scores: np.log(softmax(scores)),
    "sigmoid instead of softmax": lambda scores: 1 / (1 + np.exp(-scores)),
    "sigmoid instead of softmax, divided by its sum":
        lambda scores: _over_sum(1 / (1 + np.exp(-scores))),
    "tanh instead of softmax": np.tanh,
    "ReLU instead of softmax": lambda scores: np.maximum(scores, 0),
    "ReLU instead of exp in the softmax":
        lambda scores: _over_sum(np.maximum(scores, 0) + 1e-30),
    "absolute values instead of exp in the softmax": lambda scores: _over_sum(np.abs(scores)),
    "squares instead of exp in the softmax": lambda scores: _over_sum(scores ** 2),
    "softplus instead of exp in the softmax": lambda scores: _over_sum(np.logaddexp(0, scores)),
    "2 ** x instead of exp in the softmax": lambda scores: _over_sum(2.0 ** scores),
    "10 ** x instead of exp in the softmax": lambda scores: _over_sum(10.0 ** scores),
    "the softmax divides by the number of keys instead of the sum":
        lambda scores: np.exp(scores) / scores.shape[-1],
    "the softmax divides by the root of the sum of squares (L2 norm) instead of the sum":
        lambda scores: _unit(np.exp(scores - scores.max(axis=-1, keepdims=True))),
    "the softmax divides by 1 + the sum":
        lambda scores: np.exp(scores) / (1 + np.exp(scores).sum(axis=-1, keepdims=True)),
    "the softmax subtracts the maximum in the denominator only":
        lambda scores: np.exp(scores)
        / np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True),
    "the softmax subtracts the maximum in the numerator only":
        lambda scores: np.exp(scores - scores.max(axis=-1, keepdims=True))
        / np.exp(scores).sum(axis=-1, keepdims=True),
    "the softmax subtracts the maximum after exp": lambda scores:
        _over_sum(np.exp(scores) - np.exp(scores).max(axis=-1, keepdims=True)),
    "the softmax takes the best key only: argmax": _hardest,
    "the scores are scaled to 0 ... 1 instead of softmax": lambda scores:
        (scores - scores.min(axis=-1, keepdims=True))
        / (scores.max(axis=-1, keepdims=True) - scores.min(axis=-1, keepdims=True)),
    "the scores are standardised (mean 0, deviation 1) before the softmax": lambda scores: softmax(
        (scores - scores.mean(axis=-1, keepdims=True)) / scores.std(axis=-1, keepdims=True)),
    ALL_EQUAL: lambda scores:
        np.full(scores.shape, 1 / scores.shape[-1]),
    "the weights are 1 - softmax": lambda scores: 1 - softmax(scores),
    "the weights are added up along the keys (cumsum)": lambda scores: softmax(scores).cumsum(-1),
}
# From weights, query, key and value (as heads) to what is attended.
VALUES: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "": lambda w, q, k, v: w @ v,
    "the weights are transposed before they meet the values": lambda w, q, k, v: swapped(w) @ v,
    "the weights are summed over the keys' values of the key: weights @ key": lambda w, q, k, v:
        w @ k,
    "the weights meet the queries instead of the values": lambda w, q, k, v: w @ q,
    "the weights are not used: the output is the value": lambda w, q, k, v: v,
    "the output is the weights: they never meet the values": lambda w, q, k, v: w,
    "every head has the values of the first head": lambda w, q, k, v: w @ _first(v, -3),
    "every head has the weights of the last head": lambda w, q, k, v:
        np.broadcast_to(w[..., -1:, :, :], w.shape) @ v,
    "the weights are averaged over the heads before they meet the values": lambda w, q, k, v:
        np.broadcast_to(w.mean(-3, keepdims=True), w.shape) @ v,
    "the weights are summed over the heads before they meet the values": lambda w, q, k, v:
        np.broadcast_to(w.sum(-3, keepdims=True), w.shape) @ v,
    "every batch item has the values of the first item": lambda w, q, k, v: w @ _first(v, 0),
    "the weights are averaged over the batch": lambda w, q, k, v:
        np.broadcast_to(w.mean(0, keepdims=True), w.shape) @ v,
    "the values belong to another batch item": lambda w, q, k, v: w @ v[::-1],
    "the values are in reverse order, unlike the keys": lambda w, q, k, v: w @ v[..., ::-1, :],
    "the values belong to another head, in reverse order": lambda w, q, k, v:
        w @ v[..., ::-1, :, :],
    "the weights are squared": lambda w, q, k, v: w ** 2 @ v,
    "the output is divided by the number of keys: the weighted sum is averaged again":
        lambda w, q, k, v: w @ v / k.shape[-2],
    "the output is multiplied by the number of keys": lambda w, q, k, v: w @ v * k.shape[-2],
    "the output is divided by the number of queries": lambda w, q, k, v: w @ v / q.shape[-2],
    "the weights of the last key are missing: a slice or range is one short": lambda w, q, k, v:
        w[..., :-1] @ v[..., :-1, :],
    "the weights of the first key are missing": lambda w, q, k, v: w[..., 1:] @ v[..., 1:, :],
    "only the last key counts: its term replaces the sum (= instead of +=)": lambda w, q, k, v:
        w[..., -1:] * v[..., -1:, :],
    "the values are multiplied by their key's own weight only (no sum over the keys)":
        lambda w, q, k, v: np.einsum("...ii,...id->...id", w, v),
}
# From the output and the inputs to what is returned.
AFTERWARDS: dict[str, Callable[[Array, Inputs], Array]] = {
    "": lambda output, inputs: output,
    "the query is added to the output: a residual connection is no part of attention":
        lambda output, inputs: output + inputs[0],
    "the value is added to the output: a residual connection is no part of attention":
        lambda output, inputs: output + inputs[2],
    "the key is added to the output": lambda output, inputs: output + inputs[1],
    "the query is added to the output, and layer normalisation applied: neither is a part of"
    " attention": lambda output, inputs: _normalised(output + inputs[0]),
    "layer normalisation is applied to the output": lambda output, inputs: _normalised(output),
    "the output is multiplied by the query": lambda output, inputs: output * inputs[0],
    "the output is the query itself": lambda output, inputs: inputs[0],
    "the output goes through a ReLU": lambda output, inputs: np.maximum(output, 0),
    "the output goes through a tanh": lambda output, inputs: np.tanh(output),
    "the output goes through a sigmoid": lambda output, inputs: 1 / (1 + np.exp(-output)),
    "the output goes through another softmax": lambda output, inputs: softmax(output),
    "the output has the wrong sign": lambda output, inputs: -output,
    "the output is scaled to length 1": lambda output, inputs: _unit(output),
    "the output is averaged over the queries": lambda output, inputs: output.mean(-2),
    "the output is summed over the queries": lambda output, inputs: output.sum(-2),
    "the output is that of the first query only": lambda output, inputs: output[..., 0, :],
    "the output is that of the last query only": lambda output, inputs: output[..., -1, :],
    "the output is transposed: (dim, query_len) instead of (query_len, dim)":
        lambda output, inputs: swapped(output),
    "the output is divided by sqrt(d_k)": lambda output, inputs:
        output / math.sqrt(inputs[0].shape[-1]),
    "the output has its first two axes swapped": lambda output, inputs:
        np.swapaxes(output, 0, 1),
    "the output lacks its batch: only the first item is returned": lambda output, inputs:
        output[0],
    "the output is summed over the batch": lambda output, inputs: output.sum(0),
    "the output of the batch items is in reverse order": lambda output, inputs: output[::-1],
    "the output is flattened": lambda output, inputs: output.reshape(-1),
    "the output has an axis too many at the front": lambda output, inputs: output[None],
    "the output has no axis for the queries: they stand side by side": lambda output, inputs:
        output.reshape(*output.shape[:-2], -1),
    "the output is rounded to integers: an array of integers cannot hold it":
        lambda output, inputs: np.trunc(output),
}


def _normalised(output: Array) -> Array:
    mean, deviation = output.mean(-1, keepdims=True), output.std(-1, keepdims=True)
    return (output - mean) / (deviation + 1e-6)
