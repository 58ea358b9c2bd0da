"""Gradients of the whole figure and of a projection: the reference against complex steps, the C
core against the reference."""

import itertools

import numpy as np
import pytest
from agreement import FLOOR, relative_error
from option_cases import LEARNED, SCORES, by_head

import mha
from mha import reference

STEP = 1e-200
WIDER = {np.float32: np.float64, np.float64: np.longdouble}


def figure_arguments(rng, dtype, batch=(2,), query_len=5, key_len=7, heads=4, kv_heads=2,
                     head_dim=3, value_head_dim=2, widths=(6, 5, 4), output_dim=7):
    """All arrays of multi_head_attention, biases and gates among them."""
    shapes = {"query": (*batch, query_len, widths[0]), "key": (*batch, key_len, widths[1]),
              "value": (*batch, key_len, widths[2]), "W_q": (widths[0], heads * head_dim),
              "W_k": (widths[1], kv_heads * head_dim),
              "W_v": (widths[2], kv_heads * value_head_dim),
              "W_o": (heads * value_head_dim, output_dim), "b_q": (heads * head_dim,),
              "b_k": (kv_heads * head_dim,), "b_v": (kv_heads * value_head_dim,),
              "b_o": (output_dim,), "head_gate": (heads,)}
    # Small biases: what all values have in common cancels in the gradient of the scores, and its
    # rounding errors, which plain NumPy averages out over the keys, do not.
    size = {"W": lambda shape: shape[0] ** -0.5, "b": lambda _: 0.1}
    return {name: (rng.standard_normal(shape) * size.get(name[0], lambda _: 1)(shape)).astype(dtype)
            for name, shape in shapes.items()}


OPTIONS = [
    {}, {"causal": True}, {"mask": np.tri(5, 7, 2, bool)}, {"key_lengths": [3, 0]},
    {"key_lengths": [4, 0], "empty_rows": "uniform"}, {"window": (2, 1)}, *SCORES,
    *by_head(4), by_head(4)[0] | by_head(4)[3] | {"causal": True, "query_offset": 1},
    {"dropout": 0.4, "rng": 3}, {"bias": np.linspace(-1, 1, 140).reshape(4, 5, 7)},
    {"bias": np.linspace(-1, 1, 7), "causal": True, "dropout": 0.2, "rng": 1}]
OPTIONS[-2]["bias"] = OPTIONS[-2]["bias"][None]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_against_complex_steps(options):
    rng = np.random.default_rng(0)
    arguments = figure_arguments(rng, np.float64)
    options = dict(options)
    arguments |= {name: options.pop(name) for name in LEARNED if name in options}
    output, pullback = reference.multi_head_attention_vjp(
        **arguments, num_heads=4, num_kv_heads=2, **options)
    grad_output = rng.standard_normal(output.shape)
    got = pullback(grad_output)
    for name, array in arguments.items():
        direction = rng.standard_normal(array.shape)
        stepped = reference.multi_head_attention(
            **{**arguments, name: array + 1j * STEP * direction}, num_heads=4, num_kv_heads=2,
            **options)
        wanted = (stepped.imag / STEP * grad_output).sum()
        assert np.isclose((got[name] * direction).sum(), wanted, rtol=1e-10, atol=1e-12), name


def check_by_complex_step(generator, arguments, **options):
    """The gradients, ours and the reference's, by all of the arguments."""
    output, pullback = mha.multi_head_attention_vjp(**arguments, **options)
    grad_output = generator.standard_normal(output.shape)
    got = pullback(grad_output)
    by_reference = reference.multi_head_attention_vjp(**arguments, **options)[1](grad_output)
    for name, array in arguments.items():
        direction = generator.standard_normal(array.shape)
        stepped = reference.multi_head_attention(
            **{**arguments, name: array + 1j * STEP * direction}, **options)
        wanted = (stepped.imag / STEP * grad_output).sum()
        for gradient in (getattr(got, name), by_reference[name]):
            assert np.isclose((gradient * direction).sum(), wanted, rtol=1e-10, atol=1e-12), name


def scale_of(exact, name):
    """b_k moves all scores of a query alike, which softmax does not see: its gradient is what
    rounding leaves of 0, and measured by that of W_k."""
    if name != "b_k":
        return 1
    return float(np.abs(exact["b_k"]).max() / np.abs(exact["W_k"]).max())


def check(generator, dtype, arguments, **options):
    options = {"num_heads": 4, "num_kv_heads": 2, **options}
    output, pullback = mha.multi_head_attention_vjp(**arguments, **options)
    plain_forward = mha.multi_head_attention(**arguments, **options)
    assert relative_error(output, plain_forward) < 20 * np.finfo(dtype).eps
    grad_output = generator.standard_normal(output.shape).astype(dtype)
    got = pullback(grad_output)
    results = []
    for wide in (WIDER[dtype], dtype):
        changed = {name: array.astype(wide) for name, array in arguments.items()}
        results.append(reference.multi_head_attention_vjp(**changed, **options)[1](
            grad_output.astype(wide)))
    exact, plain = results
    for name in arguments:
        assert getattr(got, name).dtype == dtype
        ours, numpys = (relative_error(found, exact[name]) * scale_of(exact, name)
                        for found in (getattr(got, name), plain[name]))
        assert ours <= max(2 * numpys, 2 * FLOOR[np.dtype(dtype)]), (name, ours, numpys)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", OPTIONS)
def test_figure_against_the_reference(dtype, options):
    rng = np.random.default_rng(1)
    options = dict(options)
    arguments = figure_arguments(rng, dtype)
    arguments |= {name: options.pop(name).astype(dtype) for name in LEARNED if name in options}
    check(rng, dtype, arguments, **options)
    check(rng, dtype, {name: array for name, array in arguments.items()
                       if name[0] not in "bh" or name in LEARNED}, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_figure_against_the_reference(dtype):
    rng = np.random.default_rng(2)
    arguments = figure_arguments(rng, dtype, (2,), 150, 200, 4, 2, 33, 20, (70, 65, 130), 90)
    check(rng, dtype, arguments, causal=True, dropout=0.1, rng=9)


def test_one_sequence_is_a_batch_of_one():
    rng = np.random.default_rng(3)
    arguments = figure_arguments(rng, np.float64, ())
    options = {"num_heads": 4, "num_kv_heads": 2, "key_lengths": 5,
               "mask": rng.random((1, 4, 5, 7)) < 0.8,
               "bias": rng.standard_normal((1, 4, 5, 7))}
    output, pullback = mha.multi_head_attention_vjp(**arguments, **options)
    batched = {name: array[None] if name in ("query", "key", "value") else array
               for name, array in arguments.items()}
    whole, whole_pullback = mha.multi_head_attention_vjp(**batched, **{**options,
                                                                      "key_lengths": [5]})
    assert np.array_equal(output, whole[0])
    grad_lse = rng.standard_normal((4, 5))
    got, wanted = pullback(output, grad_lse), whole_pullback(whole, grad_lse[None])
    exact_output, exact_pullback = reference.multi_head_attention_vjp(**arguments, **options)
    exact = exact_pullback(output, grad_lse)
    assert relative_error(output, exact_output) < FLOOR[output.dtype]
    assert all(getattr(got, name) is None for name in ("alibi", "relative_bias", "sinks"))
    for name in arguments:
        gradient, other = getattr(got, name), getattr(wanted, name)
        assert relative_error(gradient, exact[name]) < FLOOR[output.dtype], name
        assert np.array_equal(gradient, other[0] if name in ("query", "key", "value") else other)


def layer_and_input(dtype=np.float64, **options):
    layer = mha.MultiHeadAttention(12, 4, dtype=dtype, rng=0, **options)
    rng = np.random.default_rng(1)
    for name in ("b_q", "b_k", "b_v", "b_o"):
        setattr(layer, name, rng.standard_normal(getattr(layer, name).shape))
    return layer, rng.standard_normal((2, 9, 12)).astype(dtype)


def as_function(layer):
    return {**layer.parameters(), "num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads}


@pytest.mark.parametrize(("key", "value"), list(itertools.product([False, True], repeat=2)))
def test_layer_sums_the_gradients_of_what_defaulted(key, value):
    layer, x = layer_and_input(num_kv_heads=2)
    rng = np.random.default_rng(2)
    key_array, value_array = (rng.standard_normal(x.shape) if is_given else None
                              for is_given in (key, value))
    output, pullback = layer.vjp(x, key_array, value_array, causal=True)
    assert np.array_equal(output, layer(x, key_array, value_array, causal=True))
    got = pullback(output)
    k = x if key_array is None else key_array
    v = k if value_array is None else value_array
    apart = mha.multi_head_attention_vjp(x, k, v, causal=True, **as_function(layer))[1](output)
    wanted = {"query": apart.query, "key": apart.key, "value": apart.value}
    if value_array is None:
        wanted["key" if key else "query"] = wanted["key" if key else "query"] + wanted["value"]
    if key_array is None:
        wanted["query"] = wanted["query"] + wanted["key"]
    assert (got.key is None) == (key_array is None) and (got.value is None) == (value_array is None)
    for name, array in wanted.items():
        if getattr(got, name) is not None:
            assert relative_error(getattr(got, name), array) < 1e-14
    for name in layer.parameters():
        assert np.array_equal(getattr(got, name), getattr(apart, name))


def test_layer_drops_in_training_only_and_frozen_gives_the_same():
    layer, x = layer_and_input(dropout=0.5)
    assert np.array_equal(layer.vjp(x)[0], layer(x))
    output, pullback = layer.vjp(x, training=True, rng=4)
    assert np.array_equal(output, layer(x, training=True, rng=4))
    first = pullback(output)
    frozen = layer.freeze().vjp(x, training=True, rng=4)[1](output)
    for one, other in zip(first, frozen, strict=True):
        assert one is other is None or np.array_equal(one, other)


@pytest.mark.parametrize("wrt", [("query",), ("W_o",), ("b_o", "W_v"), ("b_k",), ("head_gate",),
                                 ("bias",), (), ("key", "value")])
def test_wrt(wrt):
    rng = np.random.default_rng(0)
    arguments = figure_arguments(rng, np.float64) | {"bias": rng.standard_normal((5, 7))}
    options = {"num_heads": 4, "num_kv_heads": 2}
    output, pullback = mha.multi_head_attention_vjp(**arguments, **options)
    everything = pullback(output)
    got = mha.multi_head_attention_vjp(**arguments, **options, wrt=wrt)[1](output)
    for name, gradient in got._asdict().items():
        if name in wrt:
            assert np.array_equal(gradient, getattr(everything, name))
        else:
            assert gradient is None, name


@pytest.mark.parametrize("gated", [0.0, 1.0])
def test_a_closed_gate_has_a_gradient(gated):
    """Michel et al. 2019 score heads by it; at 0 the head's output alone tells it no more."""
    rng = np.random.default_rng(0)
    arguments = figure_arguments(rng, np.float64)
    arguments["head_gate"] = np.array([gated, 1, gated, 0.5])
    output, pullback = mha.multi_head_attention_vjp(**arguments, num_heads=4, num_kv_heads=2)
    gradient = pullback(output).head_gate
    for head in range(4):
        gate = arguments["head_gate"].astype(complex)
        gate[head] += 1j * STEP
        stepped = reference.multi_head_attention(**{**arguments, "head_gate": gate}, num_heads=4,
                                                 num_kv_heads=2)
        assert np.isclose(gradient[head], (stepped.imag / STEP * output).sum(), rtol=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5), (3, 0), (300, 130)])
def test_linear_against_the_reference(dtype, shape):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape).astype(dtype), rng.standard_normal((shape[-1], 7))
    weight, bias = weight.astype(dtype), rng.standard_normal(7).astype(dtype)
    output, pullback = mha.linear_vjp(x, weight, bias)
    got = pullback(output)
    wide = [array.astype(WIDER[dtype]) for array in (x, weight, bias)]
    wanted = reference.linear_vjp(*wide)[1](output.astype(WIDER[dtype]))
    for name, gradient in got._asdict().items():
        assert gradient.dtype == dtype
        assert relative_error(gradient, wanted[name]) < 4 * FLOOR[np.dtype(dtype)]
    assert mha.linear_vjp(x, weight)[1](output).bias is None
    assert mha.linear_vjp(x, weight, wrt=("x",))[1](output)[1:] == (None, None)


@pytest.mark.parametrize(("gradients", "message"), [
    ((np.ones((2, 5)),), r"grad_output: got shape \(2, 5\), wanted \(2, 5, 7\)"),
    ((np.ones((2, 5, 7)), np.ones(3)), r"grad_lse: got shape \(3,\), wanted \(2, 4, 5\)"),
    ((np.ones((2, 5, 7), complex),), "grad_output: got an array of complex128")])
def test_errors_of_the_pullback(gradients, message):
    arguments = figure_arguments(np.random.default_rng(0), np.float64)
    _, pullback = mha.multi_head_attention_vjp(**arguments, num_heads=4, num_kv_heads=2)
    with pytest.raises((TypeError, ValueError), match=message):
        pullback(*gradients)


def test_names_stay_in_the_errors_of_the_forward_pass():
    arguments = figure_arguments(np.random.default_rng(0), np.float64)
    with pytest.raises(ValueError, match="W_k: got"):
        mha.multi_head_attention_vjp(**{**arguments, "W_k": np.ones((3, 6))}, num_heads=4,
                                     num_kv_heads=2)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_may_hold_anything(poison):
    """Not even the gradients of the weights that projected it see it."""
    layer = mha.MultiHeadAttention(16, 4, dtype=np.float64, rng=0)
    rng = np.random.default_rng(0)
    query, memory = rng.standard_normal((2, 5, 16)), rng.standard_normal((2, 7, 16))
    grad_output, lengths = rng.standard_normal((2, 5, 16)), [4, 7]
    memory[0, 4:] = 0
    clean = layer.vjp(query, memory, key_lengths=lengths)[1](grad_output)
    memory[0, 4:] = poison
    got = layer.vjp(query, memory, key_lengths=lengths)[1](grad_output)
    for name, gradient in got._asdict().items():
        if gradient is not None:
            np.testing.assert_allclose(gradient, getattr(clean, name), atol=1e-14, err_msg=name)
