"""diagnose on what it does not know: several mistakes, no known mistake, code that is unusual."""

import inspect
import sys
import time
import types

import learners_layers
import numpy as np
import pytest

import mha
from mha.testing import diagnose


def softmax(scores, axis=-1):
    exponentials = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def right(q, k, v):
    return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v


def changed(code, *pairs):
    """The class or function of a source with some of its text replaced."""
    for old, new in pairs:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    names = {"np": np, "softmax": softmax}
    exec(code, names)
    return names["Layer"]


LAYER, GPT, LINEARS = learners_layers.LAYER, learners_layers.GPT, learners_layers.LINEARS
UNSCALED = ("/ np.sqrt(self.d_k)", "")


@pytest.mark.thorough
@pytest.mark.parametrize(("layer", "names"), [
    (changed(LAYER, UNSCALED, ("weights = softmax(scores)", "weights = softmax(scores, -2)"),
             ("key @ self.W_k", "key @ self.W_q")),
     ["forgot to divide", "over the queries", "keys are projected with W_q"]),
    (changed(LAYER, UNSCALED, ("key @ self.W_k", "key[:, ::-1] @ self.W_k")),
     ["forgot to divide", "reverse order"]),
    (changed(LAYER, ("np.sqrt(self.d_k)", "self.d_model"),
             (learners_layers.FINISH, "return self.merge_heads(attended)")),
     ["divided by d_model", "forgot the output projection"]),
    (changed(LAYER, (learners_layers.MERGE, "return x.reshape(batch, length, heads * d_k)"),
             ("value @ self.W_v", "value @ self.W_k")),
     ["when merging", "values are projected with W_k"]),
    (changed(GPT, (" * (1.0 / np.sqrt(k.shape[-1]))", ""),
             ("y = y.transpose(0, 2, 1, 3)", "y = y")),
     ["forgot to divide", "when merging"]),
    (changed(GPT, ("== 0, -np.inf, att)", "== 0, -10.0, att)")), ["blocked scores become -10"]),
    (changed(GPT, ("att = np.where(self.bias[:, :, :T, :T] == 0, -np.inf, att)",
                   "att = att * self.bias[:, :, :T, :T]")), ["blocked scores become 0"]),
    (changed(LINEARS, ("/ self.head_dim ** 0.5", "/ 7"),
             ("self.k_proj(key)", "self.k_proj(query)")),
     ["hard-coded scale: the scores are divided by 7", "keys are made from the query"]),
    (changed(LAYER, ("@ self.W_o + self.b_o", "@ self.W_o + self.b_o + self.b_o")),
     ["b_o is added twice"]),
])
def test_several_mistakes_get_all_their_names(layer, names):
    found = diagnose(layer)
    assert len(found.problems) == len(names), found
    assert all(name in str(found) for name in names), found


def gaussian(q, k, v):
    weights = np.exp(-((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1))
    return weights / weights.sum(-1, keepdims=True) @ v


def window(q, k, v):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    near = abs(np.subtract.outer(np.arange(q.shape[-2]), np.arange(k.shape[-2]))) <= 2
    return softmax(np.where(near, scores, -1e9)) @ v


def dropout_with_a_seed(q, k, v):
    weights = softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]))
    return weights * (np.random.default_rng(0).random(weights.shape) > 0.3) / 0.7 @ v


def positions(q, k, v):
    turned = [x * np.cos(np.arange(x.shape[-2]))[:, None] for x in (q, k)]
    return right(*turned, v)


def half_sums(q, k, v):
    exponentials = np.exp(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]))
    return exponentials / (exponentials.sum(-1, keepdims=True) + 0.5) @ v


def mixes_queries(q, k, v):
    return right(q + 0.1 * q.mean(-2, keepdims=True), k, v)


def mixes_items(q, k, v):
    return right(q, k, v) + 0.1 * right(q, k, v).mean(0, keepdims=True) if q.ndim > 2 else right(
        q, k, v)


@pytest.mark.parametrize(("function", "words"), [
    (gaussian, "judged by them the scores are multiplied by"),
    (gaussian, "the weights of a row sum to 1"),
    (window, "query 0 does not depend on key 3"),
    (dropout_with_a_seed, "of them are 0, the others are 1.43 times as large (is dropout on?)"),
    (positions, "the order of the keys matters"),
    (half_sums, "the weights of a row should sum to 1, here they sum to: 0."),
    (mixes_queries, "queries mix"),
    (mixes_items, "3-D input: differs"),
    (lambda q, k, v: 1.7 * right(q, k, v), "the output is 1.7 times what it should be"),
    (lambda q, k, v: right(q, k, v) * 0, "gives 0 everywhere"),
    (lambda q, k, v: right(q, k, v) * np.nan, "gives NaN on ordinary input"),
    (lambda q, k, v: right(q, k, v) * np.inf, "gives infinity on ordinary input"),
    (lambda q, k, v: right(q, k, v)[..., :1], "returns (2, 3, 5, 1), wanted (2, 3, 5, 6)"),
    (lambda q, k, v: q @ np.swapaxes(k, -1, -2), "the output is the scores: softmax and"),
    (lambda q, k, v: q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]), "forgot the softmax"),
    (lambda q, k, v: np.tanh(q @ np.swapaxes(k, -1, -2)).sum(-1, keepdims=True) + v[0, 0, 0] * 0,
     "the values do not reach it"),
])
def test_what_nothing_explains_is_described(function, words):
    found = diagnose(function)
    assert not found
    assert words in str(found)


def products_element_by_element(q, k, v):
    return softmax(q * k / np.sqrt(q.shape[-1])) * v


def over_features(q, k, v):
    return v @ softmax(np.swapaxes(q, -1, -2) @ k / np.sqrt(q.shape[-1]))


# A guess whose output is infinite has a tolerance without bounds: it once explained all of these.
@pytest.mark.parametrize("function", [
    products_element_by_element, over_features, lambda q, k, v: q + k + v,
    lambda q, k, v: q * k * v, lambda x: x + 1, lambda x: 2 * np.tanh(x),
])
def test_no_mistake_is_made_up(function):
    found = diagnose(function)
    assert not found
    takes_x_alone = len(inspect.signature(function).parameters) == 1
    assert ("cannot be seen" if takes_x_alone else "no known mistake explains it"
            ) in found.problems[0]
    assert not any("mask is" in problem or "keepdims" in problem for problem in found.problems)


def exits(q, k, v):
    sys.exit(3)


def recursion(q, k, v):
    return recursion(q, k, v)


def without_words(q, k, v):
    class WithoutWordsError(Exception):
        def __str__(self):
            raise ValueError
    raise WithoutWordsError


def a_generator(q, k, v):
    yield q


class Properties:
    num_heads = 3

    def __init__(self, d_model, num_heads):
        self.W_q, self.W_k, self.W_v, self.W_o = np.zeros((4, d_model, d_model))
        self.me = self

    @property
    def broken(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise KeyError(name)

    def forward(self, x):
        return x


class NoConstruction:
    def __init__(self, d_model, num_heads):
        raise RuntimeError("boom")

    def forward(self, x):
        return x


@pytest.mark.parametrize(("code", "words"), [
    (exits, "raised SystemExit: 3"),
    (recursion, "raised RecursionError"),
    (without_words, "raised WithoutWordsError: (an error without words)"),
    (a_generator, "returns generator, wanted NumPy arrays"),
    (lambda q, k, v: "words", "returns str, wanted NumPy arrays"),
    (lambda q, k, v: [[1, 2], [3]], "returns list, wanted NumPy arrays"),
    (lambda q, k, v: right(q, k, v) + 1j, "wanted NumPy arrays"),
    (lambda q, k, v: 3.0, "returns (), wanted (2, 3, 5, 6)"),
    (lambda q, k, v: (), "is the return statement missing?"),
    (lambda q, k, v: np.zeros(0), "returns (0,), wanted"),
    (lambda: 1, "raised TypeError"),
    (lambda a, b, c, d, e: a, "missing 2 required positional arguments: 'd' and 'e'"),
    (Properties, "the output is the query itself"),
    (NoConstruction, "constructing NoConstruction raised RuntimeError: boom"),
    (len, "wanted"), (dict, "no __call__ or forward"), (np.ndarray, "shape"),
])
def test_unusual_code_is_answered_in_words(code, words, monkeypatch):
    monkeypatch.setenv("MHA_DIAGNOSE_RAISES", "1")
    found = diagnose(code)
    assert not found
    assert words in str(found), found


def by_keyword(*, query, key, value):
    return right(query, key, value)


def in_another_order(V, K, Q):
    return right(Q, K, V)


def starred(*arrays, **options):
    return right(*arrays)


def as_a_dict(q, k, v):
    return {"output": right(q, k, v), "weights": None}


def with_a_required_mask(q, k, v, mask):
    return softmax(np.where(mask == 0, -1e9, q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]))) @ v


def printing(q, k, v):
    print(q.shape)
    return right(q, k, v)


@pytest.mark.parametrize("function", [by_keyword, in_another_order, starred, as_a_dict, printing,
                                      with_a_required_mask])
def test_unusual_signatures_are_called_rightly(function, capsys):
    found = diagnose(function)
    assert found, found
    assert capsys.readouterr().out == ""


def test_options_that_were_not_tested_are_named():
    def attention(q, k, v, causal=False, window=None, dropout_p=0.1, verbose=False):
        scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        return softmax(np.where(np.tri(*scores.shape[-2:]) > causal - 1, scores, -1e9)) @ v

    assert "not tested: window, dropout_p" in str(diagnose(attention))


@pytest.mark.thorough
def test_a_slow_function_is_not_called_often():
    calls = []

    def attention(q, k, v, mask=None):
        calls.append(time.sleep(0.51))
        return right(q, k, v)

    assert "not tested: its options, as a call with 5 queries takes" in str(diagnose(attention))
    assert len(calls) < 20


def test_a_scale_that_fits_this_instance_is_right():
    layer = changed(LAYER, ("np.sqrt(self.d_k)", "8.0"))
    assert diagnose(layer(128, 2))
    assert "hard-coded scale: the scores are divided by 8" in str(diagnose(layer(32, 2)))
    assert "hard-coded scale: the scores are divided by 8 whatever d_k is" in str(diagnose(layer))


def test_a_key_head_that_serves_several_query_heads():
    assert diagnose(mha.MultiHeadAttention(32, 4, num_kv_heads=2))


def test_a_torch_that_is_only_half_there_changes_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # no torch.nn, no Tensor
    assert diagnose(right)
    assert diagnose(changed(LINEARS))


FLAG = ("def __init__(self, d_model, num_heads):",
        "def __init__(self, d_model, num_heads, causal=False):\n        self.causal = causal")
MASKED = ("weights = softmax(scores)", "if self.causal:\n"
          "            visible = np.tri(*scores.shape[-2:], k=0)\n"
          "            scores = np.where(visible, scores, -1e9)\n"
          "        weights = softmax(scores)")


@pytest.mark.parametrize(("old", "new", "words"), [
    ("k=0", "k=1", "causal=True: the causal mask is off by one: a query sees the next key"),
    ("if self.causal", "if None", "causal=True: is ignored"),
    ("-1e9", "0", "causal=True: the causal mask is always on, and wrong: blocked scores become 0"),
])
def test_a_flag_of_the_constructor_is_switched_on(old, new, words):
    assert diagnose(changed(LAYER, FLAG, MASKED))
    assert words in str(diagnose(changed(LAYER, FLAG, (MASKED[0], MASKED[1].replace(old, new)))))


def test_a_mask_that_has_to_be_given_is_given():
    def in_place(q, k, v, mask):
        scores = q @ np.swapaxes(k, -1, -2)
        scores[mask.astype(bool)] = -1e9
        return softmax(scores) @ v

    assert diagnose(in_place).problems == ("forgot to divide by sqrt(d_k)",)


@pytest.mark.parametrize(("old", "new"), [
    ("scores = Q @", "Q, K = Q.astype(np.float16), K.astype(np.float16)\n        scores = Q @"),
    ("softmax(scores)", "softmax(scores.astype(np.float16)).astype(float)"),
])
def test_half_precision_on_the_way_is_found(old, new):
    found = diagnose(changed(LAYER, (old, new)))
    assert len(found.problems) == 1
    assert "computed in float16" in str(found)
