"""The output gate of the figure, forwards and backwards."""

import numpy as np
import pytest
from agreement import assert_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from test_multi_head_attention_vjp import check, check_by_complex_step, figure_arguments

import mha
from mha import _core, reference

SMALL = {"batch": (2,), "query_len": 5, "key_len": 7, "head_dim": 4}
WIDE = {"batch": (3,), "query_len": 70, "key_len": 40, "head_dim": 64, "widths": (30, 40, 20)}
HEADS = {"num_heads": 4, "num_kv_heads": 2}


def gated_arguments(rng, dtype, kind, *, bias=True, head_gate=True, **sizes):
    """Arrays of the figure with W_g and b_g; heads 4 and 2."""
    arguments = figure_arguments(rng, dtype, **sizes)
    if not head_gate:
        del arguments["head_gate"]
    gates = {"element": len(arguments["W_o"]), "head": 4}[kind]
    arguments["W_g"] = rng.standard_normal((arguments["query"].shape[-1], gates)).astype(dtype)
    if bias:
        arguments["b_g"] = rng.standard_normal(gates).astype(dtype)
    return arguments


def sigmoid(x):
    """In higher precision, and accurate where it is near 0."""
    x = np.asarray(x, np.longdouble)
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-abs(x)))


@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("kind", ["element", "head"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_forward_against_the_reference(sizes, kind, dtype):
    rng = np.random.default_rng(0)
    for bias, head_gate in ((True, False), (False, True)):
        arguments = gated_arguments(rng, dtype, kind, bias=bias, head_gate=head_gate, **sizes)
        names = list(arguments)
        for options in ({}, {"causal": True, "query_offset": 1}):
            assert_accurate(
                lambda *a, names=names, options=options: mha.multi_head_attention(
                    **dict(zip(names, a, strict=True)), **HEADS, **options),
                lambda *a, names=names, options=options: reference.multi_head_attention(
                    **dict(zip(names, a, strict=True)), **HEADS, **options),
                [*arguments.values()], {})


@pytest.mark.parametrize("kind", ["element", "head"])
def test_the_reference_is_the_formula(kind):
    rng = np.random.default_rng(1)
    arguments = gated_arguments(rng, np.float64, kind, **SMALL)
    W_o, b_o = arguments["W_o"], arguments["b_o"]
    width = len(W_o)
    plain = {name: array for name, array in arguments.items() if name not in ("W_g", "b_g")}
    merged = reference.multi_head_attention(**plain | {"W_o": np.eye(width), "b_o": None}, **HEADS)
    gates = sigmoid(arguments["query"] @ arguments["W_g"] + arguments["b_g"])
    if kind == "head":
        gates = gates[..., np.arange(4).repeat(width // 4)]
    wanted = (merged * gates).astype(np.float64) @ W_o + b_o
    assert np.allclose(reference.multi_head_attention(**arguments, **HEADS), wanted, atol=1e-13)


@pytest.mark.parametrize("kind", ["element", "head"])
@pytest.mark.parametrize("shares", ["nothing", "key is query", "value is key", "all are one"])
def test_gradients_by_complex_step(kind, shares):
    """Of inputs that are one array, too: the gate's part goes to the query."""
    rng = np.random.default_rng(2)
    sizes = SMALL | {"key_len": 5, "widths": (12, 12, 12)}
    arguments = gated_arguments(rng, np.float64, kind, **sizes)
    if shares in ("key is query", "all are one"):
        arguments["key"] = arguments["query"]
    if shares in ("value is key", "all are one"):
        arguments["value"] = arguments["key"]
    check_by_complex_step(rng, arguments, **HEADS, causal=True)


@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("kind", ["element", "head"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_against_the_reference(sizes, kind, dtype):
    rng = np.random.default_rng(3)
    for head_gate in (True, False):
        arguments = gated_arguments(rng, dtype, kind, head_gate=head_gate, **sizes)
        for options in ({}, {"dropout": 0.2, "rng": 3}):
            check(rng, dtype, arguments, **options)


@pytest.mark.parametrize("kind", ["element", "head"])
def test_some_gradients_are_those_of_all(kind):
    rng = np.random.default_rng(4)
    arguments = gated_arguments(rng, np.float32, kind, **SMALL)
    output, pullback = mha.multi_head_attention_vjp(**arguments, **HEADS)
    everything = pullback(output)
    for name in ("query", "W_g", "b_g", "W_v", "head_gate", "b_o"):
        alone = mha.multi_head_attention_vjp(**arguments, **HEADS, wrt=(name,))[1](output)
        assert np.array_equal(getattr(alone, name), getattr(everything, name)), name
        assert sum(gradient is not None for gradient in alone) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoids_are_accurate_at_both_ends(dtype):
    """Also where they are nearly 0, and their slopes where they are nearly 1: as if x was off by
    its own rounding."""
    least = np.log(np.finfo(dtype).tiny)
    x = np.concatenate([np.linspace(least * 0.99, -least * 0.99, 4001), np.linspace(-1, 1, 999),
                        [0, -1e-30, 1e-30]]).astype(dtype)
    ones = np.ones_like(x)
    gates, kept = _core.output_gate(ones, x, len(x), save=True)
    slopes = _core.output_gate_backward(kept, ones, None, {"logits"})["logits"]
    s = sigmoid(x)
    bound = (4 + abs(x)) * np.finfo(dtype).eps
    assert (abs(gates - s) <= bound * s).all()
    assert (abs(slopes - s * sigmoid(-x)) <= 2 * bound * s * sigmoid(-x)).all()
    ends = np.array([-np.inf, 2 * least, -2 * least, np.inf, np.nan], dtype)
    edges = _core.output_gate(np.ones_like(ends), ends, 5)
    assert np.array_equal(edges, np.array([0, 0, 1, 1, np.nan]), equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_as_a_step(data):
    """Rows by heads by columns; the bits do not depend on the number of threads."""
    batch = data.draw(st.lists(st.integers(0, 4), max_size=2))
    heads, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 70))
    rows = data.draw(st.sampled_from([0, 1, 3, 200]))
    by_head = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    merged = rng.standard_normal((*batch, rows, heads * columns)).astype(dtype)
    logits = 3 * rng.standard_normal((*batch, rows, heads if by_head else heads * columns))
    logits = logits.astype(dtype)
    gates = np.repeat(sigmoid(logits), columns if by_head else 1, axis=-1)
    grad = rng.standard_normal(merged.shape).astype(dtype)
    found = []
    for threads in (1, 3):
        with mha.threads(threads):
            gated, kept = _core.output_gate(merged, logits, heads, save=True)
            found.append([gated, *_core.output_gate_backward(
                kept, grad, None, {"merged", "logits"}).values()])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    gated, grad_merged, grad_logits = found[0]
    eps = float(np.finfo(dtype).eps)
    assert (abs(gated - merged * gates) <= 16 * eps * abs(merged * gates)).all()
    assert (abs(grad_merged - grad * gates) <= 16 * eps * abs(grad * gates)).all()
    products = grad.astype(np.longdouble) * merged
    if by_head:
        products = products.reshape(*logits.shape, columns).sum(axis=-1)
    slopes = sigmoid(logits) * sigmoid(-logits)
    assert (abs(grad_logits - products * slopes)
            <= 32 * eps * (abs(products) + columns * by_head) * slopes).all()


@pytest.mark.parametrize("half", [np.float16, "bfloat16"])
def test_halves_are_computed_in_float32(half):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = ml_dtypes.bfloat16 if half == "bfloat16" else half
    arguments = gated_arguments(np.random.default_rng(5), dtype, "element", **SMALL)
    output = mha.multi_head_attention(**arguments, **HEADS)
    floats = {name: array.astype(np.float32) for name, array in arguments.items()}
    assert output.dtype == dtype
    assert np.array_equal(output, mha.multi_head_attention(**floats, **HEADS).astype(dtype))
    gradients = mha.multi_head_attention_vjp(**arguments, **HEADS)[1](output)
    assert gradients.W_g.dtype == gradients.b_g.dtype == dtype


@pytest.mark.parametrize(("change", "message"), [
    ({"W_g": np.ones((12, 5))}, r"W_g: got 5 columns, wanted num_heads \* value_head_dim \(8\), or"
     r" num_heads \(4\)"),
    ({"W_g": np.ones((11, 16))}, "W_g: got shape"),
    ({"b_g": np.ones(5)}, "b_g: got shape"),
    ({"W_g": None}, "b_g: got one without W_g, wanted W_g= too"),
])
def test_what_does_not_fit_is_named(change, message):
    arguments = gated_arguments(np.random.default_rng(6), np.float64, "element", batch=(2,),
                                query_len=5, key_len=7, head_dim=4, widths=(12, 12, 12))
    with pytest.raises(ValueError, match=message):
        mha.multi_head_attention(**arguments | change, **HEADS)
