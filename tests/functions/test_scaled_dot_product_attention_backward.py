"""Gradients of step 3 from its output and log-sum-exp, part by part, against the whole."""

import itertools

import numpy as np
import pytest
from agreement import FLOOR, relative_error
from attention_parts import part_of_options
from hypothesis import given, settings
from hypothesis import strategies as st
from option_cases import LEARNED, fit_together, option_cases
from test_scaled_dot_product_attention import random_inputs
from test_scaled_dot_product_attention_vjp import split_learned

import mha
from mha import reference


def gradients_by_parts(backward, arguments, results, grads, options, cuts):
    """Sums over all pairs of a part of the queries and one of the keys."""
    query, key, value, *_ = arguments.values()
    learned = {name: arguments[name] for name in LEARNED if name in arguments}
    output, lse = results
    shape = (*query.shape[:-1], key.shape[-2])
    sums = {name: np.zeros(array.shape, query.dtype) for name, array in arguments.items()}
    empty = (lse == -np.inf)[..., None] & (options.get("empty_rows") == "uniform")
    for queries, keys in itertools.product(*map(itertools.pairwise, cuts)):
        rows, columns = slice(*queries), slice(*keys)
        # The mean of all values has this part of it here.
        share = (keys[1] - keys[0]) / shape[-1] if shape[-1] else 1
        grad_output = np.where(empty, grads[0] * query.dtype.type(share), grads[0])
        got = backward(query[..., rows, :], key[..., columns, :], value[..., columns, :],
                       output[..., rows, :], lse[..., rows], grad_output[..., rows, :],
                       grad_lse=grads[1][..., rows],
                       **part_of_options(learned | options, shape, queries, keys))
        got = got if isinstance(got, dict) else got._asdict()
        sums["query"][..., rows, :] += got["query"]
        sums["key"][..., columns, :] += got["key"]
        sums["value"][..., columns, :] += got["value"]
        for name in learned:
            if name == "bias":
                whole = sums["bias"]
                at = tuple(slice(None) if whole.shape[axis] == 1 else part
                           for axis, part in ((-2, rows), (-1, columns)) if whole.ndim >= -axis)
                whole[(..., *at)] += got["bias"].sum(
                    axis=tuple(axis for axis in (-2, -1)
                               if whole.ndim >= -axis and whole.shape[axis] == 1), keepdims=True)
            elif got.get(name) is not None:
                sums[name] += got[name]
    return sums


def check(rng, dtype, inputs, cuts, **options):
    """By parts, with output and lse of one call, as near to the exact gradients of the whole as
    plain NumPy gets by the same parts, or as lse's rounding allows, which weights have as a
    factor."""
    learned, options = split_learned(options)
    learned = {name: array.astype(dtype) for name, array in learned.items()}
    arguments = dict(zip(("query", "key", "value"), inputs, strict=True)) | learned
    results = mha.scaled_dot_product_attention(**arguments, **options, return_lse=True)
    grads = [rng.standard_normal(result.shape).astype(dtype) for result in results]
    farthest_lse = np.abs(results[1], where=np.isfinite(results[1]),
                          out=np.zeros_like(results[1])).max(initial=0)
    got, plain = (gradients_by_parts(backward, arguments, results, grads, options, cuts)
                  for backward in (mha.scaled_dot_product_attention_backward,
                                   reference.scaled_dot_product_attention_backward))
    wide = np.float64 if dtype == np.float32 else np.longdouble
    exact_pullback = reference.scaled_dot_product_attention_vjp(
        **{name: array.astype(wide) for name, array in arguments.items()}, **options)[1]
    exact = exact_pullback(*(grad.astype(wide) for grad in grads))
    for name in arguments:
        ours, numpys = (relative_error(gradients[name], exact[name])
                        for gradients in (got, plain))
        floor = 2 * FLOOR[np.dtype(dtype)] * max(1, float(farthest_lse) / 16)
        if name == "value" and ours > max(2 * numpys, floor):
            terms = exact_pullback(np.abs(grads[0].astype(wide)))["value"]
            floor *= max(1, 0.1 * terms.max() / (np.abs(exact["value"]).max() or 1))
        assert ours <= max(2 * numpys, floor), (name, ours, numpys, options)


@pytest.mark.thorough
def test_every_option_and_pairs():
    rng = np.random.default_rng(0)
    cases = option_cases(rng, (2,), 4, 60, 150)
    cases["dropout"] = [0.1, 0.7]
    cuts = ((0, 60), (0, 150)), ((0, 7, 60), (0, 61, 64, 150))
    for first, second in filter(fit_together, itertools.combinations(cases, 2)):
        for one, other in itertools.product(cases[first], cases[second]):
            if (first, second) == ("alibi", "query_offset") and np.max(np.abs(other)) > 2**24:
                continue  # no float32 tells such distances apart, nor does an lse of 1e17
            inputs = random_inputs(rng, np.float32, (2,), (4,), (2,), 60, 150, 9, 11)
            check(rng, np.float32, inputs, cuts[rng.integers(2)], **{first: one, second: other})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", range(len(option_cases(np.random.default_rng(0), (2,), 2, 9, 9))))
def test_single_options(dtype, case):
    rng = np.random.default_rng(case)
    name, values = list(option_cases(rng, (2,), 2, 30, 100).items())[case]
    cuts = (0, 11, 30), (0, 5, 77, 100)
    for value in values:
        inputs = random_inputs(rng, dtype, (2,), (2,), (1,), 30, 100, 5, 4)
        dropout = {"dropout": 0.4} if name == "dropout_offsets" else {}
        check(rng, dtype, inputs, cuts, **{name: value}, **dropout)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_and_cuts(data):
    draw = data.draw
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    query_len, key_len = draw(st.integers(1, 130)), draw(st.integers(1, 200))
    inputs = random_inputs(rng, dtype, (draw(st.integers(1, 2)),), (group * kv_heads,), (kv_heads,),
                           query_len, key_len, draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
            for length in (query_len, key_len)]
    check(rng, dtype, inputs, cuts, **draw(st.sampled_from(
        [{}, {"causal": True}, {"window": (3, 40)}, {"dropout": 0.3, "causal": True},
         {"softcap": 3.0, "scale": 0.7}, {"empty_rows": "uniform", "causal": True}])))


def test_joined_parts_are_enough():
    """Nobody has seen all keys: output and lse are those of merge_attention."""
    rng = np.random.default_rng(0)
    query, key, value, grad = rng.standard_normal((4, 2, 3, 70, 16))
    halves = [(key[..., :31, :], value[..., :31, :]), (key[..., 31:, :], value[..., 31:, :])]
    output, lse = mha.merge_attention(*zip(*(
        mha.scaled_dot_product_attention(query, *half, return_lse=True) for half in halves),
        strict=True))
    parts = [mha.scaled_dot_product_attention_backward(query, *half, output, lse, grad)
             for half in halves]
    whole = mha.scaled_dot_product_attention_vjp(query, key, value)[1](grad)
    assert relative_error(parts[0].query + parts[1].query, whole.query) < 1e-13
    assert relative_error(np.concatenate([part.key for part in parts], -2), whole.key) < 1e-13
    assert relative_error(np.concatenate([part.value for part in parts], -2), whole.value) < 1e-13


def test_halves_are_computed_in_float32_and_rounded_once():
    rng = np.random.default_rng(0)
    query, key, grad = rng.standard_normal((3, 2, 40, 16)).astype(np.float16)
    wide = [array.astype(np.float32) for array in (query, key, grad)]
    output, lse = mha.scaled_dot_product_attention(wide[0], wide[1], wide[1], return_lse=True)
    got = mha.scaled_dot_product_attention_backward(query, key, key, output, lse, grad)
    wanted = mha.scaled_dot_product_attention_backward(wide[0], wide[1], wide[1], output, lse,
                                                       wide[2])
    for name in ("query", "key", "value"):
        assert np.array_equal(getattr(got, name), getattr(wanted, name).astype(np.float16))


def test_an_lse_of_float64_is_taken_as_it_is():
    """Scores of some thousands, all exact: their lse in float32 is wrong by parts of 10,000."""
    rng = np.random.default_rng(0)
    value, grad = rng.standard_normal((2, 50, 16)).astype(np.float32)
    key = rng.integers(-2, 3, (50, 16)).astype(np.float32)
    query = rng.integers(-2, 3, (50, 16)).astype(np.float32) + 1000 * np.eye(50, 16, dtype="f4")
    exact = [array.astype(float) for array in (query, key, value)]
    lse = reference.scaled_dot_product_attention(*exact, return_lse=True)[1]
    output = mha.scaled_dot_product_attention(query, key, value)
    got = mha.scaled_dot_product_attention_backward(query, key, value, output, lse, grad)
    wanted = reference.scaled_dot_product_attention_vjp(*exact)[1](grad.astype(float))
    assert relative_error(got.value, wanted["value"]) < 1e-6
    rounded = mha.scaled_dot_product_attention_backward(
        query, key, value, output, lse.astype(np.float32), grad)
    assert 1e-6 < relative_error(rounded.value, wanted["value"]) < 2e-4


def test_rows_without_keys_and_lses_that_are_no_numbers():
    query, key = np.ones((3, 4)), np.ones((5, 4))
    output, lse = mha.scaled_dot_product_attention(query, key, key, return_lse=True)
    lse[0], lse[1] = -np.inf, np.nan
    got = mha.scaled_dot_product_attention_backward(query, key, key, output, lse, query)
    assert not got.query[0].any()
    assert np.isnan(got.query[1]).all()
    for shape in ((0, 4), (3, 4)):
        none = mha.scaled_dot_product_attention_backward(
            np.ones(shape), key[:0], key[:0], np.zeros(shape), np.full(shape[:1], -np.inf),
            np.ones(shape))
        assert none.key.shape == (0, 4)
        assert not none.query.any()


@pytest.mark.parametrize("which", ["grad_output", "grad_lse"])
def test_a_gradient_whose_own_code_frees_another_array(which):
    query, key = np.ones((256, 64), np.float32), np.ones((2560, 64), np.float32)
    value = key.copy()
    output, lse = mha.scaled_dot_product_attention(query, key, value, return_lse=True)
    grads = {"grad_output": np.ones_like(output), "grad_lse": np.ones_like(lse)}

    class Freeing:
        def __array__(self, *_, **__):
            key.resize((0,), refcheck=False)
            return grads[which]

    with pytest.raises(ValueError, match="key: got"):
        mha.scaled_dot_product_attention_backward(query, key, value, output, lse,
                                                  **grads | {which: Freeing()})


def test_wrt_names_what_is_computed():
    x = np.random.default_rng(0).standard_normal((2, 3, 50, 8))
    output, lse = mha.scaled_dot_product_attention(x, x, x, sinks=np.zeros(3), return_lse=True)
    got = mha.scaled_dot_product_attention_backward(x, x, x, output, lse, x, wrt=["key", "sinks"],
                                                    sinks=np.zeros(3))
    assert [name for name, gradient in got._asdict().items() if gradient is not None] == [
        "key", "sinks"]


@pytest.mark.parametrize(("changed", "message"), [
    ({"output": np.ones((4, 3))}, r"output: got shape \(4, 3\), wanted \(3, 4\)"),
    ({"lse": np.ones((3, 1))}, r"lse: got shape \(3, 1\), wanted \(3,\)"),
    ({"grad_output": np.ones((3, 5))}, r"grad_output: got shape \(3, 5\), wanted \(3, 4\)"),
    ({"grad_lse": np.ones(4)}, r"grad_lse: got shape \(4,\), wanted \(3,\)"),
    ({"lse": np.ones(3, complex)}, "lse: .*complex"),
    ({"output": None}, "output: "),
    ({"rng": np.random.default_rng(0), "dropout": 0.5}, "rng: got Generator, wanted an int"),
    ({"dropout": 0.5}, "rng: got None"),
    ({"dropout_offsets": (1, 2, 3)}, "dropout_offsets: got 3 entries, wanted four"),
    ({"dropout_offsets": (1, 2, 3, -1)}, "dropout_offsets: got -1, wanted at least 0"),
    ({"dropout_offsets": 3}, "dropout_offsets: got int, wanted four ints"),
    ({"dropout_offsets": (1, 2, 3, "4")}, "dropout_offsets: got str"),
    ({"wrt": ["W_q"]}, "wrt: got"), ({"casual": True}, "casual: .*causal"),
])
def test_errors(changed, message):
    x = np.ones((3, 4))
    arguments = dict.fromkeys(("query", "key", "value", "output", "grad_output"), x)
    with pytest.raises((TypeError, ValueError), match=message):
        mha.scaled_dot_product_attention_backward(**arguments | {"lse": np.ones(3)} | changed)
