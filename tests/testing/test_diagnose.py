"""diagnose against a zoo of attentions, some right, some with one deliberate mistake."""

import functools

import numpy as np
import pytest

import mha
from mha.testing import diagnose


def softmax(scores, axis=-1):
    exponentials = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def scores_of(query, key):
    return query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])


# Right ones.


def plain(query, key, value):
    return softmax(scores_of(query, key)) @ value


def one_attends(query, key, value, mask=None):
    scores = scores_of(query, key)
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    weights = softmax(scores)
    return weights @ value, weights


def one_blocks(Q, K, V, mask=None):
    scores = scores_of(Q, K)
    if mask is not None:
        scores = np.where(mask == 0, scores, -1e9)
    weights = softmax(scores)
    return weights @ V, weights


def fills_in_place(q, k, v, attn_mask=None):
    scores = scores_of(q, k)
    if attn_mask is not None:
        scores[attn_mask] = -1e9
    return softmax(scores) @ v


def multiplies_the_mask(q, k, v, mask=None):
    scores = scores_of(q, k)
    if mask is not None:
        scores += (1.0 - mask) * -1e9
    return softmax(scores) @ v


def additive_mask(q, k, v, mask=None):
    scores = scores_of(q, k) + (0 if mask is None else mask)
    return softmax(scores.clip(-1e30)) @ v


def two_dimensional(query, key, value):
    weights = np.zeros((len(query), len(key)))
    for i, row in enumerate(query):
        scores = [float(row @ k) / np.sqrt(len(row)) for k in key]
        weights[i] = softmax(np.array(scores))
    return weights @ value


def batches(q, k, v):
    scores = np.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
    return np.einsum("bqk,bkd->bqd", softmax(scores), v)


def single_precision(q, k, v):
    return plain(*(x.astype(np.float32) for x in (q, k, v)))


def weights_first(q, k, v):
    weights = softmax(scores_of(q, k))
    return weights, weights @ v


def minus_infinity(q, k, v, mask=None):
    scores = scores_of(q, k)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores) @ v


@pytest.mark.parametrize(("function", "note"), [
    (plain, "takes no mask"),
    (one_attends, "mean of all values"),
    (one_blocks, "your mask's 1 means blocked"),
    (fills_in_place, "your mask's 1 means blocked"),
    (multiplies_the_mask, ""),
    (additive_mask, "your mask is added to the scores"),
    (two_dimensional, "takes 2-D input only"),
    (batches, "takes 3-D input only"),
    (single_precision, ""),
    (weights_first, "returns (weights, output)"),
    (minus_infinity, "empty rows give NaN"),
    (mha.scaled_dot_product_attention, ""),
    (mha.reference.scaled_dot_product_attention, ""),
    (functools.partial(mha.scaled_dot_product_attention, return_weights=True), ""),
])
def test_a_right_function_is_correct(function, note):
    found = diagnose(function)
    assert found, found
    assert str(found).splitlines()[0] == "correct"
    assert note in str(found)


def test_a_mask_that_agrees_with_ours_earns_no_remark():
    assert "1 means blocked" not in str(diagnose(one_attends))
    notes, = diagnose(mha.scaled_dot_product_attention).notes
    assert notes.startswith("not tested: alibi, relative_bias, sinks, query_offset, window, ")
    assert notes.endswith(", empty_rows, dropout, dropout_offsets")


# Broken ones.


def unscaled(q, k, v):
    return softmax(q @ np.swapaxes(k, -1, -2)) @ v


def scaled_by_d_k(q, k, v):
    return softmax(q @ np.swapaxes(k, -1, -2) / q.shape[-1]) @ v


def scaled_after_softmax(q, k, v):
    return softmax(q @ np.swapaxes(k, -1, -2)) / np.sqrt(q.shape[-1]) @ v


def softmax_over_queries(q, k, v):
    return softmax(scores_of(q, k), axis=-2) @ v


def softmax_over_axis_one(q, k, v):  # right for 2-D only
    return softmax(scores_of(q, k), axis=1) @ v


def softmax_over_everything(q, k, v):
    return softmax(scores_of(q, k), axis=None) @ v


def no_softmax(q, k, v):
    return scores_of(q, k) @ v


def no_exp(q, k, v):
    scores = scores_of(q, k)
    return scores / scores.sum(-1, keepdims=True) @ v


def keys_not_transposed(q, k, v):
    return softmax(q @ k / np.sqrt(q.shape[-1])) @ v


def naive_softmax(q, k, v):
    exponentials = np.exp(scores_of(q, k))
    return exponentials / exponentials.sum(-1, keepdims=True) @ v


def masked_after_softmax(q, k, v, mask=None):
    weights = softmax(scores_of(q, k))
    if mask is not None:
        weights = weights * mask
    return weights @ v


def added_after_softmax(q, k, v, mask=None):
    weights = softmax(scores_of(q, k))
    if mask is not None:
        weights = weights + np.where(mask == 0, -1e9, 0)
    return weights @ v


def mask_times_scores(q, k, v, mask=None):
    scores = scores_of(q, k)
    return softmax(scores if mask is None else scores * mask) @ v


def weak_fill(q, k, v, mask=None):
    scores = scores_of(q, k)
    if mask is not None:
        scores = np.where(mask == 0, -20.0, scores)
    return softmax(scores) @ v


def ignores_mask(q, k, v, mask=None):
    return plain(q, k, v)


def wrong_sign(q, k, v, mask=None):
    scores = scores_of(q, k)
    return softmax(scores if mask is None else np.where(mask, scores, 1e9)) @ v


def unscaled_and_one_blocks(q, k, v, mask=None):
    scores = q @ np.swapaxes(k, -1, -2)
    return softmax(scores if mask is None else np.where(mask, -1e9, scores)) @ v


def returns_scores(q, k, v):
    scores = scores_of(q, k)
    return softmax(scores) @ v, scores


def changes_its_input(q, k, v):
    q /= np.sqrt(q.shape[-1])
    return softmax(q @ np.swapaxes(k, -1, -2)) @ v


def returns_nothing(q, k, v):
    plain(q, k, v)


def self_attention_only(q, k, v):
    return softmax(scores_of(q, k) + np.zeros((q.shape[-2],) * 2)) @ v


def random_dropout(q, k, v):
    weights = softmax(scores_of(q, k))
    return weights * (np.random.default_rng().random(weights.shape) > 0.5) @ v


def raises(q, k, v):
    raise KeyError("no such thing")


def sums_of_squares(q, k, v):
    scores = scores_of(q, k) ** 2
    return scores / scores.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize(("function", "words"), [
    (unscaled, "forgot to divide by sqrt(d_k)"),
    (scaled_by_d_k, "divided by d_k instead of sqrt(d_k)"),
    (scaled_after_softmax, "after the softmax instead of before"),
    (softmax_over_queries, "softmax over the wrong axis: over the queries"),
    (softmax_over_axis_one, "3-D input: softmax over the wrong axis: over the queries"),
    (softmax_over_axis_one, "4-D input: softmax over the wrong axis: over the heads"),
    (softmax_over_everything, "softmax over the wrong axis: over all scores"),
    (no_softmax, "forgot the softmax"),
    (no_exp, "lacks its exp"),
    (keys_not_transposed, "the keys are not transposed"),
    (naive_softmax, "overflows at large scores"),
    (masked_after_softmax, "the mask is applied after the softmax"),
    (added_after_softmax, "the mask is added after the softmax"),
    (mask_times_scores, "blocked scores become 0"),
    (weak_fill, "blocked keys still get some weight"),
    (ignores_mask, "the mask is ignored"),
    (wrong_sign, "the mask has the wrong sign"),
    (unscaled_and_one_blocks, "forgot to divide by sqrt(d_k)"),
    (unscaled_and_one_blocks, "your mask's 1 means blocked"),
    (returns_scores, "the returned weights are not the weights used"),
    (changes_its_input, "changes its inputs"),
    (returns_nothing, "returns nothing, wanted"),
    (self_attention_only, "works only when queries and keys are equally many"),
    (random_dropout, "switch dropout off"),
    (raises, "raised KeyError: 'no such thing' (called with shapes (5, 8)"),
    (sums_of_squares, "squares instead of exp"),
])
def test_a_broken_function_is_told_its_mistake(function, words):
    found = diagnose(function)
    assert not found
    assert words in str(found)


@pytest.mark.parametrize("function", [unscaled, scaled_by_d_k, no_softmax, softmax_over_queries,
                                      naive_softmax, masked_after_softmax])
def test_one_mistake_is_one_problem(function):
    assert len(diagnose(function).problems) == 1, diagnose(function)


# Layers.


class TutorialLayer:
    """A layer in the manner of the NumPy tutorials; each subclass breaks one step."""

    out_in = False

    def __init__(self, d_model, num_heads, seed=None):
        generator = np.random.default_rng(seed)
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = generator.normal(size=(4, d_model, d_model))

    def split_heads(self, x):
        return x.reshape(*x.shape[:2], self.num_heads, self.d_k).transpose(0, 2, 1, 3)

    def merge_heads(self, x):
        return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    def project(self, x, weight):
        return x @ weight

    def scores(self, query, key):
        return scores_of(query, key)

    def finish(self, merged):
        return self.project(merged, self.W_o)

    def forward(self, Q_in, K_in, V_in, mask=None):
        query = self.split_heads(self.project(Q_in, self.W_q))
        key = self.split_heads(self.project(K_in, self.W_k))
        value = self.split_heads(self.project(V_in, self.W_v))
        scores = self.scores(query, key)
        if mask is not None:
            scores = np.where(mask[:, None] == 0, scores, -1e9)
        weights = softmax(scores)
        return self.finish(self.merge_heads(weights @ value)), weights


@pytest.mark.parametrize("method", ["forward", "__call__"])
def test_a_method_stands_for_its_layer(method):
    class Callable(TutorialLayer):
        __call__ = TutorialLayer.forward

    layer = Callable(16, 4, seed=1)
    assert str(diagnose(getattr(layer, method))) == str(diagnose(layer))


class OutIn(TutorialLayer):
    def project(self, x, weight):
        return x @ weight.T


class SplitWithoutTranspose(TutorialLayer):
    def split_heads(self, x):
        return x.reshape(x.shape[0], self.num_heads, x.shape[1], self.d_k)


class MergeWithoutTranspose(TutorialLayer):
    def merge_heads(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


class InterleavedHeads(TutorialLayer):
    def split_heads(self, x):
        return x.reshape(*x.shape[:2], self.d_k, self.num_heads).transpose(0, 3, 1, 2)


class ScaledByModel(TutorialLayer):
    def scores(self, query, key):
        return query @ np.swapaxes(key, -1, -2) / np.sqrt(self.d_model)


class UnscaledOutIn(OutIn):
    def scores(self, query, key):
        return query @ np.swapaxes(key, -1, -2)


class NoOutputProjection(TutorialLayer):
    def finish(self, merged):
        return merged


class TwoMistakes(SplitWithoutTranspose):
    def scores(self, query, key):
        return query @ np.swapaxes(key, -1, -2)


class WithBias(TutorialLayer):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.b_o = np.zeros(d_model)

    def finish(self, merged):
        return merged @ self.W_o + self.b_o


class ForgetsBias(WithBias):
    def finish(self, merged):
        return merged @ self.W_o


class SelfAttention:
    def __init__(self, embed_dim, n_heads, dropout=0.1):
        self.heads = n_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (np.eye(embed_dim) for _ in range(4))

    def __call__(self, x, mask=None):
        return mha.multi_head_attention(x, x, x, self.Wq, self.Wk, self.Wv, self.Wo,
                                        num_heads=self.heads, mask=mask)


class MatrixPerHead:
    def __init__(self, d_model, num_heads):
        size = (num_heads, d_model, d_model // num_heads)
        self.W_q, self.W_k, self.W_v = np.zeros(size), np.zeros(size), np.zeros(size)
        self.W_o = np.zeros((d_model, d_model))
        self.num_heads = num_heads

    def __call__(self, query, key, value):
        heads = [plain(query @ q, key @ k, value @ v)
                 for q, k, v in zip(self.W_q, self.W_k, self.W_v)]
        return np.concatenate(heads, axis=-1) @ self.W_o


class Linear:
    def __init__(self, inputs, outputs):
        self.weight, self.bias = np.zeros((outputs, inputs), np.float32), np.zeros(outputs)

    def __call__(self, x):
        return x @ self.weight.T + self.bias


class OfLinearLayers(TutorialLayer):
    def __init__(self, d_model, num_heads, dropout):
        super().__init__(d_model, num_heads)
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d_model, d_model) for _ in range(4))

    def project(self, x, weight):
        return weight(x)


def as_a_function(x, W_q, W_k, W_v, W_o, num_heads):
    return mha.reference.multi_head_attention(x, x, x, W_q, W_k, W_v, W_o, num_heads=num_heads)


def as_a_broken_function(x, Wq, Wk, Wv, Wo, n_heads):
    def split(y):
        return y.reshape(y.shape[0], n_heads, y.shape[1], -1)

    return mha.merge_heads(plain(split(x @ Wq), split(x @ Wk), split(x @ Wv))) @ Wo


@pytest.mark.parametrize(("layer", "note"), [
    (TutorialLayer, "your mask's 1 means blocked"),
    (TutorialLayer(16, 4), "your mask's 1 means blocked"),
    (OutIn, "stored (out, in)"),
    (WithBias, ""),
    (SelfAttention, "takes one input: self-attention only"),
    (MatrixPerHead, "takes no mask"),
    (OfLinearLayers, "stored (out, in)"),
    (mha.MultiHeadAttention, ""),
    (mha.MultiHeadAttention(32, 4, dtype=np.float64), ""),
    (as_a_function, "self-attention only"),
])
def test_a_right_layer_is_correct(layer, note):
    found = diagnose(layer)
    assert found, found
    assert note in str(found)


@pytest.mark.parametrize(("layer", "words"), [
    (SplitWithoutTranspose, "heads reshaped without the transpose"),
    (MergeWithoutTranspose, "heads reshaped without the transpose when merging"),
    (InterleavedHeads, "heads interleaved"),
    (ScaledByModel, "divided by sqrt(d_model) instead of sqrt(d_k)"),
    (UnscaledOutIn, "forgot to divide by sqrt(d_k)"),
    (NoOutputProjection, "forgot the output projection W_o"),
    (TwoMistakes, "heads reshaped without the transpose"),
    (TwoMistakes, "forgot to divide by sqrt(d_k)"),
    (ForgetsBias, "the bias b_o is not added"),
    (as_a_broken_function, "heads reshaped without the transpose"),
])
def test_a_broken_layer_is_told_its_mistake(layer, words):
    found = diagnose(layer)
    assert not found
    assert words in str(found)


def test_the_given_instance_is_not_changed():
    layer = TutorialLayer(16, 4, seed=0)
    before = layer.W_q.copy()
    diagnose(layer)
    np.testing.assert_array_equal(layer.W_q, before)


def test_what_cannot_be_tested_is_said_kindly():
    class NoWeights:
        num_heads = 4

        def __call__(self, query, key, value):
            return query

    class Unusual:
        def __init__(self, colour):
            self.colour = colour

    assert "found no attribute W_q, W_k, W_v, W_o" in str(diagnose(NoWeights()))
    assert "what is colour?" in str(diagnose(Unusual))
    lazy = TutorialLayer(16, 4)
    lazy.W_q = lazy.W_k = None
    assert "W_q, W_k hold no numbers yet" in str(diagnose(lazy))
    with pytest.raises(TypeError, match="my_attention: got int"):
        diagnose(3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_own_layers_of_halves(dtype):
    found = mha.testing.diagnose(mha.MultiHeadAttention(32, 4, dtype=dtype, rng=0))
    assert not found.problems
    assert "tested was a copy of the layer in float32" in found.notes
