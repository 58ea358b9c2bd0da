"""The mistakes of functions are named in a layer, too, wherever they can occur in one: a layer of
three inputs, a layer of one, and a decoder, whose causal mask fills with -inf."""

import learners_attention
import learners_layers
import numpy as np
import pytest
from test_diagnose_learners import made

from mha.testing import diagnose

LAYER = '''
class Layer:
    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.randn(4, d_model, d_model)
        self.b_o = np.zeros(d_model)

    def forward(self, INPUTS):
        b, n, d = query.shape
        q, k, v = ((x @ w).reshape(b, -1, self.num_heads, d // self.num_heads).swapaxes(1, 2)
                   for x, w in ((query, self.W_q), (key, self.W_k), (value, self.W_v)))
        out, *weights = attended if isinstance(attended := attention(q, k, v), tuple) else (
            attended,)
        return (out.swapaxes(1, 2).reshape(b, n, -1) @ self.W_o + self.b_o, *weights)
'''
THREE = LAYER.replace("INPUTS", "query, key, value")
ONE = LAYER.replace("INPUTS):", "x):\n        query = key = value = x")
LOOP_OVER_HEADS = '''
one_head = attention
def attention(q, k, v):
    return np.stack([[one_head(*head) for head in zip(*item)] for item in zip(q, k, v)])
'''
SCALE = learners_attention.SCALE
TRIANGLE = SCALE + "    scores = np.where(np.tri(*scores.shape[-2:]), scores, -np.inf)\n"

# Where no layer can have the mistake, or none that can be told from a right one.
NOT_IN_A_LAYER = {
    "sqrt(d_v) instead of sqrt(d_k)",  # as wide
    "averaged over the queries", "is the return statement missing?",  # errors
    "changes its inputs",  # the projections are the layer's own
}
# The same numbers under another name: {mistake: what it is in these layers}.
THE_SAME = {
    "3-D input: softmax over the wrong axis": "over the heads instead of the keys",
    "keys are made from the query": "compare the queries with themselves",
    "values are made from the key": "weights @ key",
    "values are made from the query": "meet the queries instead of the values"}
THE_SAME_OF_ONE_INPUT = {
    **THE_SAME,
    "square root of the number of queries": "square root of the number of keys",
    "divided by the number of queries": "divided by the number of keys",
    "keys are made from the query": "keys are projected with W_q",
    "values are made from the key": "values are projected with W_k",
    "values are made from the query": "values are projected with W_q",
    "the causal mask is always on": "note: always causal"}
THE_SAME_IN_A_DECODER = {
    **THE_SAME_OF_ONE_INPUT,
    "reverse order, unlike the values": "values are in reverse order, unlike the keys",
    "own key: the diagonal is blocked": "does not see its own key"}
NOT_IN_A_DECODER = {
    "epsilon",  # counts as a mistake of its own in the first row, whose sum is 1
    "the scores have the wrong sign"}  # before the softmax it is; in it blocked keys get it all

MISTAKES = [mistake for mistake in learners_attention.MISTAKES
            if mistake.name not in NOT_IN_A_LAYER]
OF_A_DECODER = [mistake for mistake in MISTAKES if mistake.code is learners_attention.ATTENTION
                and SCALE in mistake.source(mistake.wrong) and mistake.name not in NOT_IN_A_DECODER]


def function(mistake, line):
    loops = mistake.code is learners_attention.LOOPS
    return mistake.source(line) + (LOOP_OVER_HEADS if loops else "")


def assert_named(source, name):
    found = diagnose(made(source))
    assert name in str(found), found
    assert not found or name.startswith("note: ")


@pytest.fixture(autouse=True)
def _failures_are_not_passed_over(monkeypatch):
    monkeypatch.setenv("MHA_DIAGNOSE_RAISES", "1")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_named_in_a_layer(mistake):
    assert_named(function(mistake, mistake.wrong) + THREE, THE_SAME.get(mistake.name, mistake.name))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_named_in_a_layer_of_one_input(mistake):
    assert_named(function(mistake, mistake.wrong) + ONE,
                 THE_SAME_OF_ONE_INPUT.get(mistake.name, mistake.name))


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", OF_A_DECODER, ids=lambda mistake: mistake.name)
def test_a_mistake_is_named_in_a_decoder(mistake):
    assert_named(function(mistake, mistake.wrong).replace(SCALE, TRIANGLE) + ONE,
                 THE_SAME_IN_A_DECODER.get(mistake.name, mistake.name))


@pytest.mark.parametrize("layer", [THREE, ONE])
@pytest.mark.parametrize("scale", [SCALE, TRIANGLE], ids=["plain", "a decoder"])
def test_the_right_layer_is_not_blamed(layer, scale):
    source = learners_attention.ATTENTION.replace(SCALE, scale) + layer
    found = diagnose(made(source))
    assert found.problems == (("the causal mask is always on, and counts from the first key",)
                              if (layer, scale) == (THREE, TRIANGLE) else ()), found


@pytest.mark.parametrize(("axis", "name"), [
    (0, "over the first axis (the batch)"), (1, "over the heads instead of the keys"),
    (2, "over the queries instead of the keys")])
@pytest.mark.parametrize(("code", "old"), [
    (learners_layers.LAYER, "softmax(scores)"), (learners_layers.GPT, "softmax(att)"),
    (learners_layers.LINEARS, "softmax(q @ k.swapaxes(-1, -2) / self.head_dim ** 0.5)"),
    (learners_layers.GROUPED, "softmax(q @ k.swapaxes(-1, -2) / np.sqrt(self.head_dim))")])
def test_a_softmax_over_another_axis_is_named_in_every_layer(code, old, axis, name):
    assert old in code
    source = code.replace(old, f"{old[:-1]}, axis={axis})")
    assert diagnose(made(source)).problems[:1] == (f"softmax over the wrong axis: {name}",)


def test_a_batch_is_tested_where_one_sequence_is_right():
    source = learners_layers.PER_HEAD.replace("softmax(q @ k.swapaxes(-1, -2)",
                                              "softmax(axis=1, scores=q @ k.swapaxes(-1, -2)")
    assert diagnose(made(source)).problems == (
        "with a batch of sequences: softmax over the wrong axis: over the queries instead of the"
        " keys",)


def test_what_spoils_a_row_is_named_in_a_function():
    def attention(query, key, value):
        scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
        visible = np.tri(*scores.shape[-2:], k=scores.shape[-1] - scores.shape[-2])
        return np.where(visible, scores, -np.inf) @ value

    assert "forgot the softmax" in diagnose(attention).problems
