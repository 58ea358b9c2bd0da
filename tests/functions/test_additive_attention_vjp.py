"""Gradients of additive attention: the reference against complex steps, the core against it."""

import itertools

import numpy as np
import pytest
from agreement import FLOOR, relative_error
from test_additive_attention import random_arguments

import mha
from mha import reference

NAMES = ("query", "key", "value", "W_q", "W_k", "w_v")
STEP = 1e-200


def option_pairs(query_len, key_len):
    rng = np.random.default_rng(5)
    cases = {"mask": rng.random((query_len, key_len)) < 0.5, "key_lengths": [0, key_len - 1],
             "causal": True, "empty_rows": "uniform", "dropout": 0.3, "query_offset": -1}
    singles = [{name: value} for name, value in cases.items()]
    pairs = [dict(pair) for pair in itertools.combinations(cases.items(), 2)]
    return [{"rng": 3, "query_offset": 1, **options} for options in singles + pairs]


@pytest.mark.parametrize("options", option_pairs(3, 5))
def test_reference_and_core_against_complex_steps(options):
    rng = np.random.default_rng(2)
    arguments = random_arguments(rng, np.float64, heads=(2,), kv_heads=(1,), query_len=3,
                                 key_len=5, hidden=4)
    output, pullback = reference.additive_attention_vjp(*arguments, **options)
    grad_output = rng.standard_normal(output.shape)
    of_reference = pullback(grad_output)
    of_core = mha.additive_attention_vjp(*arguments, **options)[1](grad_output)
    for position, name in enumerate(NAMES):
        exact = np.empty(arguments[position].shape)
        for index in np.ndindex(exact.shape):
            stepped = [array.astype(complex) for array in arguments]
            stepped[position][index] += 1j * STEP
            changed = reference.additive_attention(*stepped, **options)
            exact[index] = (changed * grad_output).sum().imag / STEP
        assert relative_error(of_reference[name], exact) < 1e-10, name
        assert relative_error(getattr(of_core, name), exact) < 1e-10, name


def check(draw, arguments, **options):
    """The core's gradients against those of the wider reference, by the gate of the design."""
    dtype = arguments[0].dtype
    output, pullback = mha.additive_attention_vjp(*arguments, **options)
    grad_output = draw.standard_normal(output.shape).astype(dtype)
    grad_lse = draw.standard_normal(output.shape[:-1]).astype(dtype)
    wide = np.float64 if dtype == np.float32 else np.longdouble
    exact = reference.additive_attention_vjp(
        *(array.astype(wide) for array in arguments), **options)[1](
            grad_output.astype(wide), grad_lse.astype(wide))
    plain = reference.additive_attention_vjp(*arguments, **options)[1](grad_output, grad_lse)
    for name, gradient in pullback(grad_output, grad_lse)._asdict().items():
        ours, numpys = (relative_error(got, exact[name]) for got in (gradient, plain[name]))
        assert gradient.dtype == dtype
        assert ours <= max(2 * numpys, 2 * FLOOR[dtype]), (name, ours, numpys, options)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("hidden", [0, 1, 9, 130])
def test_shapes(dtype, hidden):
    rng = np.random.default_rng(hidden)
    for batch, heads, kv_heads in (((), (), ()), ((2,), (), ()), ((2,), (4,), (2,))):
        for query_len, key_len in ((1, 1), (0, 3), (3, 0), (25, 65), (49, 130)):
            check(rng, random_arguments(rng, dtype, batch, heads, kv_heads, query_len, key_len,
                                        hidden))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_options(dtype):
    rng = np.random.default_rng(0)
    for options in option_pairs(50, 70):
        check(rng, random_arguments(rng, dtype, heads=(2,), kv_heads=(1,), query_len=50,
                                    key_len=70), **options)


@pytest.mark.thorough
def test_keys_in_chunks():
    """Chunks of keys add to the queries' gradients and to that of w_v in turn."""
    rng = np.random.default_rng(0)
    arguments = random_arguments(rng, np.float32, (1,), (2,), (1,), 5000, 600, 3)
    check(rng, arguments, causal=True)
    output, pullback = mha.additive_attention_vjp(*arguments, causal=True)
    by_two = pullback(output)
    for num_threads in (1, 5):
        with mha.threads(num_threads):
            for one, other in zip(pullback(output), by_two, strict=True):
                assert np.array_equal(one, other)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_stands_behind_a_mask_never_counts(poison):
    rng = np.random.default_rng(0)
    query, key, value, *weights = random_arguments(rng, np.float32, query_len=60, key_len=150)
    mask = rng.random((60, 150)) < 0.5
    mask[:, 40], mask[:, 149], mask[7] = False, False, False
    grad_output = rng.standard_normal((2, 60, 4)).astype(np.float32)
    def gradients():
        pullback = mha.additive_attention_vjp(query, key, value, *weights, mask=mask)[1]
        return pullback(grad_output)._asdict()

    clean = gradients()
    value[:, [40, 149]], grad_output[:, 7] = poison, poison
    for name, gradient in gradients().items():
        assert np.array_equal(gradient, clean[name]), name
    key[:, [40, 149]] = poison
    for name, gradient in gradients().items():
        np.testing.assert_allclose(gradient, clean[name], rtol=2e-6, atol=1e-7, err_msg=name)


def test_wrt_names_the_gradients_that_are_computed():
    arguments = random_arguments(np.random.default_rng(0), np.float32)
    output, pullback = mha.additive_attention_vjp(*arguments)
    everything = pullback(output)
    for count in range(len(NAMES)):
        for wrt in itertools.combinations(NAMES, count):
            got = mha.additive_attention_vjp(*arguments, wrt=wrt)[1](output)
            for name, gradient in got._asdict().items():
                if name in wrt:
                    assert np.array_equal(gradient, getattr(everything, name))
                else:
                    assert gradient is None


def test_the_forward_pass_has_the_same_bits_and_may_be_changed():
    arguments = random_arguments(np.random.default_rng(0), np.float32, query_len=70)
    output, pullback = mha.additive_attention_vjp(*arguments, dropout=0.2, rng=1)
    assert np.array_equal(output, mha.additive_attention(*arguments, dropout=0.2, rng=1))
    first = pullback(np.ones_like(output))
    output[:] = 7
    for one, other in zip(pullback(np.ones_like(output)), first, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(("changed", "message"), [
    ({"w_v": np.ones(3)}, "w_v: got shape"), ({"W_k": np.ones((3, 9))}, "W_k: got 9 columns"),
    ({"wrt": ["bias"]}, "wrt: got 'bias'"), ({"grad_output": np.ones(3)}, "grad_output: got shape"),
    ({"grad_lse": np.ones(3)}, "grad_lse: got shape")])
def test_errors_name_the_argument(changed, message):
    arguments = dict(zip(NAMES, random_arguments(np.random.default_rng(0), np.float32),
                         strict=True))
    arguments |= changed
    grads = [arguments.pop("grad_output", np.ones((2, 5, 4))), arguments.pop("grad_lse", None)]
    with pytest.raises(ValueError, match=message):
        mha.additive_attention_vjp(**arguments)[1](*grads)
