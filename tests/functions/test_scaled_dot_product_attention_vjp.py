"""Gradients of step 3: the reference against complex steps, the C core against the reference."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from agreement import FLOOR, by_token, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from option_cases import LEARNED, SCORES, by_head, fit_together, option_cases
from test_scaled_dot_product_attention import random_inputs

import mha
from mha import reference

STEP = 1e-200


def gradients_by_complex_steps(arguments, grad_output, grad_lse, options):
    """d sum(output * grad_output + lse * grad_lse) / d each argument, exact to rounding: a step of
    1e-200 along the imaginary axis (Squire & Trapp 1998)."""
    def loss(changed):
        arguments_by_name = dict(changed)
        inputs = [arguments_by_name.pop(name) for name in ("query", "key", "value")]
        output, lse = reference.scaled_dot_product_attention(
            *inputs, return_lse=True, **arguments_by_name, **options)
        finite = np.where(np.isfinite(lse.real), lse, 0)
        return (output * grad_output).sum() + (finite * grad_lse).sum()

    gradients = {}
    for name, array in arguments.items():
        gradient = np.empty(array.shape)
        for index in np.ndindex(array.shape):
            stepped = array.astype(complex)
            stepped[index] += 1j * STEP
            gradient[index] = loss({**arguments, name: stepped}).imag / STEP
        gradients[name] = gradient
    return gradients


def small_options():
    """Every option of the contract, and every pair of two."""
    rng = np.random.default_rng(4)
    cases = option_cases(rng, (2,), 2, 3, 5)
    cases["dropout"] = [0.3]
    singles = [{name: value} for name, values in cases.items() for value in values]
    pairs = [{first: cases[first][0], second: cases[second][-1]}
             for first, second in filter(fit_together, itertools.combinations(cases, 2))]
    return singles + pairs


def split_learned(options):
    """Some are arguments with a gradient; dropout needs its seed, positions their offset."""
    options = dict(options)
    learned = {name: options.pop(name) for name in LEARNED if name in options}
    if "dropout" in options:
        options["rng"] = 11
    if "key_lengths" in options and {"causal", "window", "alibi", "relative_bias"} & {
            *options, *learned}:
        options.setdefault("query_offset", 1)
    return learned, options


@pytest.mark.parametrize("index", range(len(small_options())))
def test_reference_against_complex_steps(index):
    learned, options = split_learned(small_options()[index])
    rng = np.random.default_rng(index)
    query, key, value = random_inputs(rng, np.float64, (2,), (2,), (1,), 3, 5, 4, 3)
    arguments = {"query": query, "key": key, "value": value, **learned}
    output, pullback = reference.scaled_dot_product_attention_vjp(**arguments, **options)
    grad_output = rng.standard_normal(output.shape)
    grad_lse = rng.standard_normal(output.shape[:-1])
    got = pullback(grad_output, grad_lse)
    exact = gradients_by_complex_steps(arguments, grad_output, grad_lse, options)
    ours, our_pullback = mha.scaled_dot_product_attention_vjp(**arguments, **options)
    assert relative_error(ours, output) < 1e-13
    of_core = our_pullback(grad_output, grad_lse)
    for name, wanted in exact.items():
        assert relative_error(got[name], wanted) < 1e-10, name
        assert relative_error(getattr(of_core, name), wanted) < 1e-10, name


def check(rng, dtype, inputs, **options):
    """The core's gradients against those of the wider reference, by the gate of the design."""
    learned, options = split_learned(options)
    learned = {name: array.astype(dtype) for name, array in learned.items()}
    arguments = dict(zip(("query", "key", "value"), inputs, strict=True)) | learned
    output, pullback = mha.scaled_dot_product_attention_vjp(**arguments, **options)
    grad_output = rng.standard_normal(output.shape).astype(dtype)
    grad_lse = rng.standard_normal(output.shape[:-1]).astype(dtype)
    got = pullback(grad_output, grad_lse)
    wide = np.float64 if dtype == np.float32 else np.longdouble
    errors = []
    widened = {name: array.astype(wide) for name, array in arguments.items()}
    exact_pullback = reference.scaled_dot_product_attention_vjp(**widened, **options)[1]
    exact = exact_pullback(grad_output.astype(wide), grad_lse.astype(wide))
    plain = reference.scaled_dot_product_attention_vjp(**arguments, **options)[1](
        grad_output, grad_lse)
    for name in arguments:
        ours, numpys = (relative_error(gradients, exact[name])
                        for gradients in (getattr(got, name), plain[name]))
        assert getattr(got, name).dtype == dtype
        floor = 2 * FLOOR[np.dtype(dtype)]
        if name == "value" and ours > max(2 * numpys, floor):
            # Terms of both signs left next to nothing: rounding is measured by the terms.
            terms = exact_pullback(np.abs(grad_output.astype(wide)))["value"]
            floor *= max(1, 0.1 * terms.max() / (np.abs(exact["value"]).max() or 1))
        assert ours <= max(2 * numpys, floor), (name, ours, numpys, options)
        errors.append((ours, numpys))
    return errors


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("query_len", [1, 7, 23, 48, 49, 130])
@pytest.mark.parametrize("key_len", [1, 9, 64, 65, 129, 300])
def test_lengths(dtype, query_len, key_len):
    rng = np.random.default_rng([query_len, key_len])
    for causal in (False, True):
        check(rng, dtype, random_inputs(rng, dtype, (1,), (2,), None, query_len, key_len, 16),
              causal=causal)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 8, 17, 31, 64, 96, 128, 257])
def test_head_dims(dtype, head_dim):
    rng = np.random.default_rng(head_dim)
    for value_head_dim in (1, 6, head_dim):
        check(rng, dtype, random_inputs(rng, dtype, query_len=50, key_len=131, head_dim=head_dim,
                                        value_head_dim=value_head_dim))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_option_and_pairs(dtype):
    rng = np.random.default_rng(0)
    heads = 4 if dtype == np.float32 else 2  # NumPy multiplies long doubles slowly
    cases = option_cases(rng, (2,), heads, 60, 150)
    cases["dropout"] = [0.1, 0.7]
    for first, second in filter(fit_together, itertools.combinations(cases, 2)):
        for one, other in itertools.product(cases[first], cases[second]):
            inputs = random_inputs(rng, dtype, (2,), (heads,), (heads // 2,), 60, 150, 9, 11)
            check(rng, dtype, inputs, **{first: one, second: other})


CHUNKED = [{}, {"window": (300, 20)}, *SCORES, *by_head(2, np.float32), {"key_lengths": [400]},
           {"mask": 0.4}, {"mask": 0.001, "empty_rows": "uniform"},
           {"causal": False, "key_lengths": [0], "empty_rows": "uniform"},
           {"empty_rows": "uniform", "query_offset": -2000, "dropout": 0.6},
           *({"bias": shape} for shape in ((1,), (2, 1, 1), (900,), (5000, 1)))]


@pytest.mark.thorough
@pytest.mark.parametrize("options", CHUNKED, ids=str)
def test_keys_in_chunks(options):
    """Long sequences are cut along the keys, and chunks add to the queries' gradients in turn."""
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, np.float32, (1,), (2,), (1,), 5000, 900, 5, 4)
    options = {"causal": True, "dropout": 0.3} | options
    if "key_lengths" in options and options["causal"]:
        options["query_offset"] = 0
    if "mask" in options:
        options["mask"] = rng.random((5000, 900)) < options["mask"]
    if "bias" in options:
        options["bias"] = rng.standard_normal(options["bias"]).astype(np.float32)
    check(rng, np.float32, inputs, **options)
    output, pullback = mha.scaled_dot_product_attention_vjp(*inputs, **options, rng=1)
    by_two = pullback(output)
    for num_threads in (1, 5):
        with mha.threads(num_threads):
            for one, other in zip(pullback(output), by_two, strict=True):
                assert one is other is None or np.array_equal(one, other)


@pytest.mark.thorough
def test_accuracy_gate():
    """No larger errors than plain NumPy's in the median, also with 300 added to all logits."""
    ratios = []
    for length, head_dim in itertools.product((65, 129, 1000), (8, 64, 128)):
        rng = np.random.default_rng([length, head_dim])
        inputs = random_inputs(rng, np.float32, (), (), (), length, length, head_dim)
        shifted = [array.copy() for array in inputs]
        shifted[0][:, 0], shifted[1][:, 0] = 300 * head_dim**0.5, 1
        for options in ({}, {"causal": True}, *SCORES, *by_head(1), {"dropout": 0.1}):
            # One number a head is no measure at large scores: test_numbers.py has many heads.
            is_plain = options.keys() & {"scale", "alibi", "relative_bias", "sinks"}
            for arguments in (inputs, shifted)[:1 if is_plain else 2]:
                errors = check(rng, np.float32, arguments, **options)
                ratios += [ours / numpys for ours, numpys in errors if numpys]
    assert np.median(ratios) <= 1, np.median(ratios)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_and_strides(data):
    draw = data.draw
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    inputs = random_inputs(rng, dtype, (draw(st.integers(0, 2)),), (group * kv_heads,), (kv_heads,),
                           draw(st.integers(0, 60)), draw(st.integers(0, 70)),
                           draw(st.integers(0, 20)), draw(st.integers(0, 20)))
    strided = [draw(st.sampled_from([
        lambda x: x, lambda x: x[:, ::-1], lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        by_token]))(array) for array in inputs]
    options = draw(st.sampled_from([{}, {"causal": True}, {"window": (3, 4)},
                                    {"empty_rows": "uniform", "causal": True}]))
    check(rng, dtype, strided, **options)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_stands_behind_a_mask_never_counts(poison):
    rng = np.random.default_rng(0)
    query, key, value = random_inputs(rng, np.float32, (2,), (3,), (3,), 60, 150, 33, 20)
    mask = rng.random((60, 150)) < 0.5
    mask[:, 40], mask[:, 149], mask[7], mask[59] = False, False, False, False
    grad_output = rng.standard_normal((2, 3, 60, 20)).astype(np.float32)
    clean = mha.scaled_dot_product_attention_vjp(query, key, value, mask=mask)[1](grad_output)
    key[:, :, [40, 149]], value[:, :, [40, 149]] = poison, poison
    query[:, :, [7, 59]], grad_output[:, :, [7, 59]] = poison, poison
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value, mask=mask)
    assert np.isfinite(output).all()
    for one, other in zip(pullback(grad_output), clean, strict=True):
        assert one is other is None or np.array_equal(one, other)


def test_the_child_of_a_signal_handler_that_forks_has_the_gradients():
    """All tasks run again in the child; what they add to must begin at zero again."""
    code = """
import os, signal, numpy as np, mha
rng = np.random.default_rng(0)
query = rng.standard_normal((2, 8, 700, 64)).astype("f4")
me, children = os.getpid(), []
for shape in ((2, 8, 700, 700), (700, 700)):
    bias = rng.standard_normal(shape).astype("f4")
    output, pullback = mha.scaled_dot_product_attention_vjp(query, query, query, bias=bias)
    expected = pullback(output)
    def fork(*_):
        if os.getpid() == me and not children:
            children.append(os.fork())
    signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    got = pullback(output)
    same = all(np.array_equal(one, other) for one, other in zip(got, expected))
    if os.getpid() != me:
        os._exit(not same)
    assert children and same and os.waitpid(children.pop(), 0)[1] == 0, shape
"""
    subprocess.run([sys.executable, "-c", code], check=True,
                   env={**os.environ, "MHA_NUM_THREADS": "2"})


@pytest.mark.parametrize("shape", [(1, 1, 3, 0), (1, 1, 3, 1), (3, 0), (1,), (2, 1, 0)])
@pytest.mark.parametrize("query_len", [3, 0])
def test_a_bias_without_scores(shape, query_len):
    """NumPy gives empty arrays strides of 0, as broadcast axes have; nothing may be written."""
    if len(shape) > 1 and shape[-2] == 3:
        shape = (*shape[:-2], query_len, shape[-1])
    query, key = np.ones((1, 2, query_len, 4)), np.ones((1, 2, 0, 4))
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, key, bias=np.ones(shape))
    gradients = pullback(output)
    assert gradients.bias.shape == shape
    assert not gradients.bias.any()
    assert not gradients.query.any()


def test_a_visible_nan_reaches_the_gradients():
    query = np.ones((3, 4), np.float32)
    value = query.copy()
    value[1] = np.nan
    gradients = mha.scaled_dot_product_attention_vjp(query, query, value)[1](query)
    assert np.isnan(gradients.query).all() and np.isfinite(gradients.value).all()


@pytest.mark.parametrize("length", [3, 48, 200])
def test_every_visible_pair_of_a_row_of_nan_has_a_gradient_of_nan(length):
    """Beside a score of infinity all other exponentials are 0, as those of hidden pairs are."""
    query = np.full((1, 1, 2, 1), [[1e20], [1]], np.float32)
    key, value = np.random.default_rng(0).standard_normal((2, 1, 1, length, 1), np.float32)
    key[0, 0, 1] = 1e20  # finite, but not its product with the first query
    mask = np.arange(length) != 2
    output, pullback = mha.scaled_dot_product_attention_vjp(
        query, key, value, mask=mask[None], bias=np.zeros((2, length), np.float32))
    gradients = pullback(np.ones_like(output))
    assert np.isnan(output[0, 0, 0]) and np.isfinite(output[0, 0, 1])
    assert np.array_equal(np.isnan(gradients.bias), [mask, 0 * mask])
    for gradient in (gradients.key, gradients.value):
        assert np.array_equal(np.isnan(gradient[0, 0, :, 0]), mask)


@pytest.mark.parametrize("length", [7, 48, 200])
def test_hidden_pairs_of_a_row_of_nan_have_no_gradient(length):
    """Whether a kernel set's block of queries takes such a pair along or not."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 1, length, 8))
    query[0, 0, 2, 0] = np.nan
    pullback = mha.scaled_dot_product_attention_vjp(query, key, value, causal=True,
                                                    bias=np.zeros((length, length)),
                                                    relative_bias=np.zeros((1, 9)))[1]
    gradients = pullback(np.ones_like(value))
    expected = np.zeros((length, length), bool)
    expected[2, :3] = True
    assert np.array_equal(np.isnan(gradients.bias), expected)
    assert np.isnan(gradients.relative_bias[0]).nonzero()[0].tolist() == [2, 3, 4]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("where", ["grad_output", "value"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_an_infinite_gradient_of_a_sink_stays_infinite(count, where, dtype):
    """grad sink = weight of the sink * -(grad output . output)."""
    query, key, value = np.random.default_rng(count).random((3, count, 5)).astype(dtype)
    grad_output = np.ones_like(value)
    (grad_output if where == "grad_output" else value)[0, 2] = np.inf
    pullback = mha.scaled_dot_product_attention_vjp(
        query[None], key[None], value[None], sinks=np.zeros(1, dtype))[1]
    assert pullback(grad_output[None]).sinks.tolist() == [-np.inf]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_ends_of_a_table_that_no_pair_uses(bad):
    query, value = np.ones((1, 1, 1, 17)), np.zeros((1, 1, 1, 96))
    value[..., 3] = bad
    pullback = mha.scaled_dot_product_attention_vjp(query, query, value,
                                                    relative_bias=np.zeros((1, 9)))[1]
    gradient = pullback(np.ones_like(value)).relative_bias[0]
    assert np.isnan(gradient[4]) and not np.delete(gradient, 4).any()


def test_wrt_names_the_gradients_that_are_computed():
    x = np.random.default_rng(0).standard_normal((2, 3, 50, 8))
    learned = {"bias": np.zeros((50, 50)), "alibi": np.ones(3), "relative_bias": np.ones((3, 7)),
               "sinks": np.zeros(3)}
    everything = mha.scaled_dot_product_attention_vjp(x, x, x, **learned)[1](x)
    for count in range(8):
        for wrt in itertools.combinations(("query", "key", "value", *LEARNED), count):
            got = mha.scaled_dot_product_attention_vjp(x, x, x, **learned, wrt=wrt)[1](x)
            for name, gradient in got._asdict().items():
                if name in wrt:
                    assert np.array_equal(gradient, getattr(everything, name))
                else:
                    assert gradient is None
    plain = mha.scaled_dot_product_attention_vjp(x, x, x)[1](x)
    assert all(getattr(plain, name) is None for name in LEARNED)


def test_the_pullback_may_be_called_again_and_does_not_look_at_the_output():
    x = np.random.default_rng(0).standard_normal((2, 3, 50, 8)).astype(np.float32)
    output, pullback = mha.scaled_dot_product_attention_vjp(x, x, x, dropout=0.5)
    first = pullback(x)
    output[:] = 7
    for one, other in zip(pullback(2 * x), first, strict=True):
        assert one is other is None or np.array_equal(one, 2 * other)


def test_types_and_layouts_of_gradients():
    integers = np.arange(24).reshape(2, 3, 4) % 5
    output, pullback = mha.scaled_dot_product_attention_vjp(integers, integers, integers)
    ones = np.broadcast_to(np.float32(1), output.shape)
    assert all(gradient.dtype == np.float64 for gradient in pullback(ones)[:3])
    assert all(gradient.shape == (2, 3, 4) for gradient in pullback(ones.tolist())[:3])


@pytest.mark.parametrize(("arguments", "message"), [
    ((np.ones((2, 4)),), r"grad_output: got shape \(2, 4\), wanted \(3, 4\)"),
    ((np.ones((3, 4)), np.ones(4)), r"grad_lse: got shape \(4,\), wanted \(3,\)"),
    ((np.ones((3, 4), complex),), "grad_output: .*complex"),
    ((None,), "grad_output"),
])
def test_errors_of_the_pullback(arguments, message):
    x = np.ones((3, 4))
    with pytest.raises((TypeError, ValueError), match=message):
        mha.scaled_dot_product_attention_vjp(x, x, x)[1](*arguments)


@pytest.mark.parametrize(("wrt", "error"), [
    ("query", TypeError), (3, TypeError), (np.array("query"), TypeError),
    ((["query"],), ValueError), (["W_q"], ValueError)])
def test_errors_of_wrt(wrt, error):
    x = np.ones((3, 4))
    with pytest.raises(error, match="wrt: got"):
        mha.scaled_dot_product_attention_vjp(x, x, x, wrt=wrt)


def test_key_lengths_are_those_of_the_call():
    query, lengths = np.random.default_rng(0).standard_normal((2, 3, 5, 4)), np.array([2, 5])
    wanted = mha.scaled_dot_product_attention_vjp(query, query, query, key_lengths=[2, 5])[1](query)
    _, pullback = mha.scaled_dot_product_attention_vjp(query, query, query, key_lengths=lengths)
    lengths[:] = 10**9
    for ours, theirs in zip(pullback(query), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
