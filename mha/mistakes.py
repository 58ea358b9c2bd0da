"""Attention with the well-known mistakes put in: what `mha.testing.diagnose` compares with.

Each table is one step of the computation: what the step does, by the name of the mistake, which is
what the user is told. "" is the right way.
"""

import math

import numpy as np

from mha import reference

HEADS = 3  # of the layers and inputs that are tested


def attention(query, key, value, mistakes, visible):
    """Output and weights of scaled dot-product attention, with {step: mistake} put in.

    query (..., query_len, head_dim), key (..., key_len, head_dim), value (..., key_len,
    value_head_dim); visible: bool, broadcast to (..., query_len, key_len), or None.
    """
    if not any(mistakes.values()):
        return reference.scaled_dot_product_attention(
            query, key, value, mask=visible, empty_rows="uniform", return_weights=True)
    before, after = SCALE[mistakes.get("scale", "")](query, key, value)
    scores = SCORES[mistakes.get("scores", "")](query, key) / before
    mask_scores, mask_weights = MASK[mistakes.get("mask", "")]
    if visible is not None:
        scores = mask_scores(scores, visible)
    weights = SOFTMAX[mistakes.get("softmax", "")](scores) / after
    if visible is not None:
        weights = mask_weights(weights, visible)
    return VALUES[mistakes.get("values", "")](weights) @ value, weights


def _swapped(array):
    return np.swapaxes(array, -1, -2)


def _softmax(scores, axis):
    exponentials = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def _as_it_is(array, *_):
    return array


SCORES = {
    "": lambda query, key: query @ _swapped(key),
    "the keys are not transposed": lambda query, key: query @ key,
    "query and key are swapped": lambda query, key: key @ _swapped(query),
}
SCALE = {  # what the scores and the weights are divided by
    "": lambda q, k, v: (math.sqrt(q.shape[-1]), 1),
    "forgot to divide by sqrt(d_k)": lambda q, k, v: (1, 1),
    "divided by d_k instead of sqrt(d_k)": lambda q, k, v: (q.shape[-1], 1),
    "multiplied by sqrt(d_k) instead of dividing": lambda q, k, v: (q.shape[-1] ** -0.5, 1),
    "divided by sqrt(d_k) after the softmax instead of before":
        lambda q, k, v: (1, math.sqrt(q.shape[-1])),
    "divided by sqrt(d_model) instead of sqrt(d_k), the size of one head":
        lambda q, k, v: (math.sqrt(q.shape[-1] * HEADS), 1),
    "divided by the square root of the number of keys instead of sqrt(d_k)":
        lambda q, k, v: (math.sqrt(k.shape[-2]), 1),
    "divided by the square root of the number of queries instead of sqrt(d_k)":
        lambda q, k, v: (math.sqrt(q.shape[-2]), 1),
    "divided by sqrt(d_v) instead of sqrt(d_k)": lambda q, k, v: (math.sqrt(v.shape[-1]), 1),
}
SOFTMAX = {
    "": lambda scores: _softmax(scores, -1),
    "softmax over the wrong axis: over the queries instead of the keys":
        lambda scores: _softmax(scores, -2),
    "softmax over the wrong axis: over the third axis from the end (heads or batch)":
        lambda scores: _softmax(scores, -3),
    "softmax over the wrong axis: over the first axis (the batch)":
        lambda scores: _softmax(scores, 0),
    "softmax over the wrong axis: over queries and keys together":
        lambda scores: _softmax(scores, (-1, -2)),
    "softmax over the wrong axis: over all scores at once": lambda scores: _softmax(scores, None),
    "forgot the softmax": _as_it_is,
    "the softmax lacks its exp: scores are divided by their sum":
        lambda scores: scores / scores.sum(axis=-1, keepdims=True),
    "the softmax is not normalised: divide by the sum of the row": np.exp,
    "the softmax is applied twice": lambda scores: _softmax(_softmax(scores, -1), -1),
}
VALUES = {"": _as_it_is, "the weights are transposed before they meet the values": _swapped}
MASK = {  # what it does to the scores, and to the weights
    "": (lambda s, visible: np.where(visible, s, -1e9), _as_it_is),
    "the mask is ignored": (_as_it_is, _as_it_is),
    "the mask is applied after the softmax: rows no longer sum to 1":
        (_as_it_is, lambda w, visible: np.where(visible, w, 0)),
    "the mask is added after the softmax: add it to the scores":
        (_as_it_is, lambda w, visible: np.where(visible, w, w - 1e9)),
    "blocked scores become 0, which still gets weight: fill with -inf":
        (lambda s, visible: np.where(visible, s, 0), _as_it_is),
    "the mask has the wrong sign: blocked keys get all the weight":
        (lambda s, visible: np.where(visible, s, 1e9), _as_it_is),
}
# Of a layer: which weight each of query, key and value is projected with.
PROJECT = {
    "": ("W_q", "W_k", "W_v"),
    "the values are not projected with W_v": ("W_q", "W_k", None),
    "the values are projected with W_k": ("W_q", "W_k", "W_k"),
    "the keys are projected with W_q": ("W_q", "W_q", "W_v"),
}
SPLIT = {
    "": reference.split_heads,
    "heads reshaped without the transpose: reshape to (batch, len, heads, d), then swap the middle"
    " axes": lambda x, heads: x.reshape(x.shape[0], heads, x.shape[1], -1),
    "heads interleaved: a head takes every num_heads-th column instead of neighbouring ones":
        lambda x, heads: x.reshape(*x.shape[:2], -1, heads).transpose(0, 3, 1, 2),
    "never split into heads": lambda x, heads: x[:, None],
}
MERGE = {
    "": reference.merge_heads,
    "heads reshaped without the transpose when merging: swap the middle axes, then reshape":
        lambda x: x.reshape(x.shape[0], x.shape[2], -1),
    "heads interleaved when merging": lambda x: x.transpose(0, 2, 3, 1).reshape(
        x.shape[0], x.shape[2], -1),
}
OUTPUT = {"": True, "forgot the output projection W_o": False}
FUNCTION_TABLES = {"scores": SCORES, "scale": SCALE, "softmax": SOFTMAX, "values": VALUES}
LAYER_TABLES = {"project": PROJECT, "split": SPLIT, **FUNCTION_TABLES, "merge": MERGE,
                "output": OUTPUT}
