"""mha.reference.steps: every intermediate against its own formula, and what it prints."""

from pathlib import Path

import numpy as np
import pytest

import mha
from mha import reference

NAMES = ["query", "key", "value", "projected_query", "projected_key", "projected_value",
         "query_heads", "key_heads", "value_heads", "scores", "weights", "attended", "merged",
         "output"]
ROOT = Path(__file__).parents[2]

generator = np.random.default_rng(5)
QUERY = generator.normal(size=(2, 5, 12))
KEY = generator.normal(size=(2, 7, 10))
VALUE = generator.normal(size=(2, 7, 9))
BIAS = generator.normal(size=(1, 4, 5, 7))
MASK = generator.random((2, 1, 5, 7)) < 0.6
LENGTHS = np.array([3, 7])
GATE = np.array([0.5, 2.0, -1.0, 0.0])


def make_layer(dtype=np.float64):
    """4 query heads of 3, 2 key heads, values of 5, biases that are not zero."""
    layer = mha.MultiHeadAttention(12, 4, num_kv_heads=2, value_head_dim=5, key_dim=10,
                                   value_dim=9, output_dim=6, dtype=dtype, rng=0)
    for name in ("b_q", "b_k", "b_v", "b_o"):
        setattr(layer, name, generator.normal(size=getattr(layer, name).shape))
    return layer


def independent(layer, query, key, value, *, visible, bias=None, scale=3 ** -0.5, softcap=None,
                head_gate=None):
    """The same by einsum and loops, over query heads h with key head h // 2."""
    found = {"query": query, "key": key, "value": value}
    for name in ("query", "key", "value"):
        weight, offset = getattr(layer, "W_" + name[0]), getattr(layer, "b_" + name[0])
        found["projected_" + name] = np.einsum("bld,de->ble", found[name], weight) + offset
        width = 5 if name == "value" else 3
        found[name + "_heads"] = np.stack(
            [found["projected_" + name][..., first:first + width]
             for first in range(0, weight.shape[1], width)], axis=1)
    scores = np.stack([np.einsum("bqd,bkd->bqk", found["query_heads"][:, head],
                                 found["key_heads"][:, head // 2]) for head in range(4)], axis=1)
    scores = scores * scale
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    found["scores"] = np.where(visible, scores, -np.inf)
    exponentials = np.exp(found["scores"])
    total = exponentials.sum(axis=-1, keepdims=True)
    found["weights"] = np.divide(exponentials, total, out=np.zeros_like(scores), where=total > 0)
    attended = np.stack([
        np.einsum("bqk,bkd->bqd", found["weights"][:, head], found["value_heads"][:, head // 2])
        for head in range(4)], axis=1)
    found["attended"] = attended if head_gate is None else attended * head_gate[:, None, None]
    found["merged"] = np.concatenate([found["attended"][:, head] for head in range(4)], axis=-1)
    found["output"] = np.einsum("bld,de->ble", found["merged"], layer.W_o) + layer.b_o
    return found


query_index, key_index = np.arange(5)[:, None], np.arange(7)
CASES = {
    "plain": ({}, True, {}),
    "mask": ({"mask": MASK}, MASK, {}),
    "causal": ({"causal": True}, key_index <= query_index + 2, {}),
    "query_offset": ({"causal": True, "query_offset": 0}, key_index <= query_index, {}),
    "window": ({"window": (1, None), "query_offset": 1}, key_index >= query_index, {}),
    "key_lengths": ({"key_lengths": LENGTHS}, key_index < LENGTHS[:, None, None, None], {}),
    "bias": ({"bias": BIAS}, True, {"bias": BIAS}),
    "scale": ({"scale": 0.25}, True, {"scale": 0.25}),
    "softcap": ({"softcap": 0.5}, True, {"softcap": 0.5}),
    "head_gate": ({"head_gate": GATE}, True, {"head_gate": GATE}),
    "nothing": ({"mask": np.zeros((5, 7), bool)}, False, {}),
    "together": ({"mask": MASK, "causal": True, "bias": BIAS, "scale": 2.0, "softcap": 3.0,
                  "head_gate": GATE, "key_lengths": LENGTHS, "query_offset": 1},
                 MASK & (key_index <= query_index + 1) & (key_index < LENGTHS[:, None, None, None]),
                 {"bias": BIAS, "scale": 2.0, "softcap": 3.0, "head_gate": GATE}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_intermediate_is_what_its_formula_says(case):
    options, visible, formula = CASES[case]
    layer = make_layer()
    found = reference.steps(layer, QUERY, KEY, VALUE, **options)
    wanted = independent(layer, QUERY, KEY, VALUE, visible=visible, **formula)
    assert list(found) == NAMES
    for name in NAMES:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12, atol=1e-12, err_msg=name)
    output, weights = layer(QUERY, KEY, VALUE, return_weights=True, **options)
    np.testing.assert_allclose(found["output"], output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["weights"], weights, rtol=1e-12, atol=1e-12)


def test_empty_rows_uniform_as_the_layer():
    layer = make_layer()
    options = {"mask": np.zeros((5, 7), bool), "empty_rows": "uniform"}
    found = reference.steps(layer, QUERY, KEY, VALUE, **options)
    assert (found["weights"] == 1 / 7).all()
    np.testing.assert_allclose(found["output"], layer(QUERY, KEY, VALUE, **options), rtol=1e-12)


def test_a_layer_without_biases_in_float32_and_frozen():
    layer = mha.MultiHeadAttention(16, 4, use_bias=False, rng=1).freeze()
    x = generator.normal(size=(2, 6, 16))
    found = reference.steps(layer, x, causal=True)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    for name in ("query", "key", "value"):
        assert np.array_equal(found[name], x.astype(np.float32))
    np.testing.assert_allclose(found["output"], layer(x, causal=True), atol=1e-6)


def test_value_defaults_to_key():
    layer = mha.MultiHeadAttention(8, 2, rng=1, dtype=np.float64)
    x, key = generator.normal(size=(2, 3, 8)), generator.normal(size=(2, 4, 8))
    found = reference.steps(layer, x, key)
    assert np.array_equal(found["value"], key)
    np.testing.assert_allclose(found["output"], layer(x, key), rtol=1e-12)


def test_one_sequence_has_no_batch_axis():
    layer = make_layer()
    options = {"key_lengths": [1, 2, 3, 4, 5], "bias": BIAS[0]}
    with pytest.raises(ValueError, match="bias: got 3 dimensions"):
        reference.steps(layer, QUERY[0], KEY[0], VALUE[0], **options)
    options["bias"] = BIAS[0, 1]
    found = reference.steps(layer, QUERY[0], KEY[0], VALUE[0], **options)
    assert {name: array.shape for name, array in found.items()} == {
        "query": (5, 12), "key": (7, 10), "value": (7, 9), "projected_query": (5, 12),
        "projected_key": (7, 6), "projected_value": (7, 10), "query_heads": (4, 5, 3),
        "key_heads": (2, 7, 3), "value_heads": (2, 7, 5), "scores": (4, 5, 7),
        "weights": (4, 5, 7), "attended": (4, 5, 5), "merged": (5, 20), "output": (5, 6)}
    np.testing.assert_allclose(
        found["output"], layer(QUERY[0], KEY[0], VALUE[0], **options), rtol=1e-12)


def test_one_line_a_step_with_shape_function_and_file(capsys):
    layer = mha.MultiHeadAttention(512, 8, rng=0)
    found = reference.steps(layer, np.ones((2, 10, 512), np.float32))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "shape", "in", "mha.reference", "in", "C"]
    assert [line.split()[0] for line in lines[1:]] == NAMES
    for line, array in zip(lines[1:], found.values()):
        assert f" {array.shape} " in line
    assert lines[4].split() == ["projected_query", "(2,", "10,", "512)", "linear",
                                "csrc/core/projection/linear_projection.c"]
    assert lines[7].split()[-2:] == ["split_heads", "csrc/core/heads/split_heads.c"]
    assert lines[11].split()[-2:] == ["softmax", "csrc/kernels/attention/softmax.inc"]
    assert lines[12].split()[-2:] == ["scaled_dot_product_attention",
                                      "csrc/core/attention/scaled_dot_product_attention.c"]
    assert lines[13].split()[-2:] == ["merge_heads", "csrc/core/heads/merge_heads.c"]


@pytest.mark.parametrize("name", NAMES[3:])
def test_the_named_functions_and_files_exist(name):
    functions, files = reference.STEPS[name]
    for function in functions.split(", "):
        assert callable(getattr(reference, function))
    folder = Path(files.split(", ")[0]).parent
    for file in files.split(", "):
        assert (ROOT / folder / Path(file).name).is_file()


def test_wrong_arguments_are_refused_as_by_the_layer(capsys):
    layer, x = mha.MultiHeadAttention(8, 2), np.ones((2, 3, 8))
    with pytest.raises(TypeError, match="layer: got function"):
        reference.steps(reference.linear, x)
    with pytest.raises(TypeError, match="mask: "):
        reference.steps(layer, x, mask=np.ones((3, 3)))
    with pytest.raises(ValueError, match="mask: got 3 dimensions"):
        reference.steps(layer, x, mask=np.ones((2, 3, 3), bool))
    with pytest.raises(ValueError, match="query: got a last axis"):
        reference.steps(layer, np.ones((2, 3, 7)))
    assert capsys.readouterr().out == ""


def test_a_layer_of_halves_rounds_nothing_before():
    layer = mha.MultiHeadAttention(12, 4, dtype=np.float16, rng=0)
    x = 3 * generator.normal(size=(2, 20, 12)).astype(np.float32)
    steps = reference.steps(layer, x)
    assert steps["query"].dtype == np.float32
    exact = layer.astype(np.float64)(x)
    assert abs(steps["output"] - exact).max() < 1e-5 * abs(exact).max()
