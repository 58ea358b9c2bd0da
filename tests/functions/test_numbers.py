"""Numbers that stay right where rounding and overflow gather: large scores, scores that rise over
many keys, thousands of merged parts, values near the largest float. Errors are root mean squares
over many rows, since the largest of a few is luck."""

import functools

import numpy as np
import pytest
from agreement import ROUNDINGS, WIDER
from option_cases import SCORES

import mha
from mha import reference

DTYPES = [np.float32, np.float64]


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention_and_gradients(query, key, value, grad_output):
    """Plain NumPy in the arrays' own type: output and the gradients of query, key and value."""
    scale = query.dtype.type(query.shape[-1] ** -0.5)
    weights = softmax(query @ np.swapaxes(key, -1, -2) * scale)
    grad_weights = grad_output @ np.swapaxes(value, -1, -2)
    means = (grad_weights * weights).sum(axis=-1, keepdims=True)
    grad_scores = weights * (grad_weights - means)
    return (weights @ value, grad_scores @ key * scale,
            np.swapaxes(grad_scores, -1, -2) @ query * scale,
            np.swapaxes(weights, -1, -2) @ grad_output)


def error_of(got, exact):
    """The root mean square of the errors, relative to the largest number."""
    return float(np.sqrt(np.mean((got - exact) ** 2)) / np.abs(exact).max())


def assert_as_good_as_numpy(ours, plain, exact, floor, names=("output", "query", "key", "value")):
    for name, got, numpys, wanted in zip(names, ours, plain, exact, strict=True):
        if np.abs(wanted).max() > floor:  # else the exact one is next to nothing
            error = error_of(got, wanted)
            assert error <= max(2 * ROUNDINGS * error_of(numpys, wanted), floor), name


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("query_len", [5, 9, 16])
def test_outputs_of_some_queries_at_large_scores(dtype, head_dim, query_len):
    """Where NumPy is at its best: products of few rows."""
    rng = np.random.default_rng([query_len, head_dim])
    batch = 200 if dtype == np.float32 else 50  # products of long double are slow
    query, key, value = (rng.standard_normal((batch, length, head_dim)).astype(dtype)
                         for length in (query_len, 128, 128))
    query *= 10

    def attended(query, key, value):
        scale = query.dtype.type(head_dim) ** query.dtype.type(-0.5)
        return softmax(query @ np.swapaxes(key, -1, -2) * scale) @ value

    exact = attended(*(x.astype(WIDER[np.dtype(dtype)]) for x in (query, key, value)))
    ours = mha.scaled_dot_product_attention(query, key, value)
    floor = np.finfo(dtype).eps
    assert error_of(ours, exact) <= max(2 * error_of(attended(query, key, value), exact), floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 55, 137, 1e4, 1e6])
@pytest.mark.parametrize(("query_len", "key_len", "head_dim"),
                         [(1, 40, 64), (4, 40, 96), (8, 1100, 64), (20, 70, 24)])
def test_gradients_of_large_scores(dtype, size, query_len, key_len, head_dim):
    rng = np.random.default_rng([query_len, head_dim, int(size)])
    batch = 60 if key_len < 100 else 6
    query, key, value, grad_output = (
        rng.standard_normal((batch, length, head_dim)).astype(dtype)
        for length in (query_len, key_len, key_len, query_len))
    query *= dtype(size / 3)
    arguments = query, key, value, grad_output
    exact = attention_and_gradients(*(x.astype(WIDER[np.dtype(dtype)]) for x in arguments))
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value)
    floor = 1e-6 if dtype == np.float32 else 2e-15
    weights = softmax(arguments[0] @ np.swapaxes(key, -1, -2) / head_dim**0.5)
    if np.count_nonzero(weights.max(axis=-1) < 1 - 1e-9) < 20:
        # Hardly a row has more than one key: what counts is how the scores themselves are rounded.
        floor = 4 * np.finfo(dtype).eps * max(size, 1)
    assert_as_good_as_numpy((output, *pullback(grad_output)[:3]),
                            attention_and_gradients(*arguments), exact, floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [1, 60])
def test_gradients_of_values_with_much_in_common(dtype, query_len):
    rng = np.random.default_rng(7)
    query, key, value, grad_output = (
        rng.standard_normal((200 if query_len == 1 else 20, length, 64)).astype(dtype)
        for length in (query_len, 128, 128, query_len))
    value += dtype(1000)
    arguments = query, key, value, grad_output
    exact = attention_and_gradients(*(x.astype(WIDER[np.dtype(dtype)]) for x in arguments))
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value)
    ours, plain = (output, *pullback(grad_output)[:3]), attention_and_gradients(*arguments)
    for got, numpys, wanted in zip(ours, plain, exact, strict=True):
        assert error_of(got, wanted) <= 2 * ROUNDINGS * error_of(numpys, wanted)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.25])
def test_a_key_that_has_all_the_weight_gives_no_gradient(dropout):
    """To the bit, since its value is the output: what is left over is large beside 0."""
    rng = np.random.default_rng(3)
    for query_len, key_len, head_dim in ((1, 40, 96), (30, 200, 40)):
        query, key, value = (rng.standard_normal((length, head_dim)).astype(np.float32)
                             for length in (query_len, key_len, key_len))
        grad_output = rng.standard_normal((query_len, head_dim)).astype(np.float32)
        bias = np.full((query_len, key_len), -1e4, np.float32)
        bias[:, 7] = 0
        pullback = mha.scaled_dot_product_attention_vjp(query, key, value, bias=bias,
                                                        dropout=dropout, rng=5)[1]
        gradients = pullback(grad_output)
        assert not gradients.query.any()
        assert not gradients.key.any()


@pytest.mark.parametrize("query_len", [1, 3, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_far_above_the_others_gives_no_gradient(query_len, dtype):
    """The same without a bias, which few queries take another way."""
    rng = np.random.default_rng(6)
    query, grad_output = (rng.standard_normal((query_len, 64)).astype(dtype) for _ in range(2))
    key, value = (rng.standard_normal((100, 64)).astype(dtype) for _ in range(2))
    query += 1
    key[70] = 1000
    gradients = mha.scaled_dot_product_attention_vjp(query, key, value)[1](grad_output)
    assert not gradients.query.any()
    assert not gradients.key.any()


@pytest.mark.parametrize("query_len", [3, 9])
def test_grad_lse_where_a_key_has_all_the_weight(query_len):
    """All the gradient is that of lse, however large the values: it is not lost beside them."""
    rng = np.random.default_rng(4)
    query, key, grad_output = (rng.standard_normal(shape).astype(np.float32)
                               for shape in ((query_len, 64), (1, 64), (query_len, 64)))
    grad_lse = rng.standard_normal(query_len).astype(np.float32)
    pullback = mha.scaled_dot_product_attention_vjp(query, key, key + np.float32(1e4))[1]
    exact = grad_lse.astype(float)[:, None] * key / 8
    assert error_of(pullback(grad_output, grad_lse).query, exact) < 1e-7


@pytest.mark.parametrize(("heads", "query_len"), [(32, 8192), (1, 400_000)])
def test_gradients_that_many_queries_share(heads, query_len):
    """Thousands of blocks of queries add to the same keys and values."""
    rng = np.random.default_rng(heads)
    query, grad_output = rng.standard_normal((2, 1, heads, query_len, 4), dtype=np.float32)
    key, value = rng.standard_normal((2, 1, 1, 32, 4), dtype=np.float32)
    gradients = mha.scaled_dot_product_attention_vjp(query, key, value)[1](grad_output)
    arguments = query[0], key[0], value[0], grad_output[0]
    exact = attention_and_gradients(*(x.astype(float) for x in arguments))
    plain = attention_and_gradients(*arguments)
    for got, numpys, wanted in zip(gradients[1:3], plain[2:], exact[2:], strict=True):
        wanted, numpys = wanted.sum(axis=0), numpys.sum(axis=0)
        assert error_of(got[0, 0], wanted) <= 2 * ROUNDINGS * error_of(numpys, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rise", [0.5, 4.0, 20.0, 1000.0])
@pytest.mark.parametrize("query_len", [1, 10])
def test_scores_that_rise_over_many_keys(dtype, rise, query_len):
    rng = np.random.default_rng(int(rise))
    query = np.ones((query_len, 1), dtype)
    key = np.linspace(0, rise, 60_000, dtype=dtype)[:, None]
    value = rng.standard_normal((len(key), 16)).astype(dtype)
    exact = softmax(key[:, 0].astype(np.longdouble)) @ value.astype(np.longdouble)
    plain = softmax(key[:, 0]) @ value
    got = mha.scaled_dot_product_attention(query, key, value)
    assert error_of(got, exact) <= 2 * ROUNDINGS * error_of(plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thousands_of_merged_parts(dtype):
    rng = np.random.default_rng(5)
    query, key, value = (rng.standard_normal((length, 32)).astype(dtype)
                         for length in (16, 24_000, 24_000))
    scores = query.astype(np.longdouble) @ key.T.astype(np.longdouble) / np.sqrt(np.longdouble(32))
    exact = softmax(scores) @ value.astype(np.longdouble)
    errors = {}
    for parts in (3, 3000):
        outputs, lses = zip(*(
            mha.scaled_dot_product_attention(query, keys, values, return_lse=True)
            for keys, values in zip(np.array_split(key, parts), np.array_split(value, parts),
                                    strict=True)), strict=True)
        errors[parts] = error_of(mha.merge_attention(outputs, lses)[0], exact)
    assert errors[3000] <= 1.5 * errors[3]


VALUES = {
    "equal": lambda rng: np.full((8, 5), 0.3),
    "largest": lambda rng: np.full((300, 5), 1.0),
    "mixed": lambda rng: rng.choice([-0.97, 0.97], (512, 17)),
    "many": lambda rng: rng.uniform(0.5, 1, (5000, 3)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("query_len", [1, 30])
def test_values_near_the_largest_float(dtype, values, query_len):
    """Their weighted sums pass it, their means do not; nor do gradients, nor merged halves."""
    rng = np.random.default_rng(6)
    largest = np.finfo(dtype).max
    value = (VALUES[values](rng) * largest).astype(dtype)
    key_len = len(value)
    query, key = (rng.standard_normal((length, 32)).astype(dtype)
                  for length in (query_len, key_len))
    weights = softmax(query.astype(np.longdouble) @ key.T.astype(np.longdouble)
                      / np.sqrt(np.longdouble(32)))
    exact = weights @ (value.astype(np.longdouble) / largest)
    bound = 20 * np.finfo(dtype).eps

    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value)
    assert np.abs(output.astype(np.longdouble) / largest - exact).max() < bound
    assert np.array_equal(output, mha.scaled_dot_product_attention(query, key, value))
    grad_output = np.full(output.shape, 1 / key_len, dtype)
    gradients = pullback(grad_output)
    of_query = attention_and_gradients(
        *(x.astype(np.longdouble) for x in (query, key)), value.astype(np.longdouble) / largest,
        grad_output.astype(np.longdouble))[1]
    assert np.abs(gradients.query.astype(np.longdouble) / largest - of_query).max() < bound
    assert np.isfinite(gradients.key).all()

    hidden = mha.scaled_dot_product_attention(
        query, key, value, mask=np.zeros((query_len, key_len), bool), empty_rows="uniform")
    mean = (value.astype(np.longdouble) / largest).mean(axis=0)
    assert np.abs(hidden.astype(np.longdouble) / largest - mean).max() < bound

    half = key_len // 2
    outputs, lses = zip(*(mha.scaled_dot_product_attention(query, key[part], value[part],
                                                           return_lse=True)
                          for part in (slice(0, half), slice(half, None))), strict=True)
    merged = mha.merge_attention(outputs, lses)[0]
    assert np.abs(merged.astype(np.longdouble) / largest - exact).max() < bound


def test_an_output_that_overflows_changes_no_other():
    rng = np.random.default_rng(8)
    query, key, value = (rng.standard_normal((length, 24)).astype(np.float32)
                         for length in (40, 90, 90))
    usual = mha.scaled_dot_product_attention(query, key, value)
    value[:, 3] = np.finfo(np.float32).max
    got = mha.scaled_dot_product_attention(query, key, value)
    others = np.arange(24) != 3
    assert np.array_equal(got[:, others], usual[:, others])
    assert np.allclose(got[:, 3], np.finfo(np.float32).max, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 96])
@pytest.mark.parametrize("query_len", [1, 3, 40])
@pytest.mark.parametrize("options", [{}, *SCORES, {"scale": 0.0},
                                     {"causal": True, "query_offset": 250}])
def test_a_bias_of_zeros_changes_no_bit_and_minus_infinity_is_a_mask(head_dim, query_len, options):
    rng = np.random.default_rng([head_dim, query_len])
    query, key, value = (rng.standard_normal((length, head_dim)).astype(np.float32)
                         for length in (query_len, 300, 300))
    grad_output = rng.standard_normal((query_len, head_dim)).astype(np.float32)
    mask = rng.random((query_len, 300)) < 0.7
    zeros = np.zeros((query_len, 300), np.float32)
    blocked = np.where(mask, np.float32(0), np.float32(-np.inf))
    for plain, biased in (({}, {"bias": zeros}), ({"mask": mask}, {"bias": blocked})):
        wanted, got = (
            [*mha.scaled_dot_product_attention(query, key, value, return_weights=True,
                                               return_lse=True, **options, **either),
             *mha.scaled_dot_product_attention_vjp(query, key, value, wrt=("query", "key", "value"),
                                                   **options, **either)[1](grad_output)[:3]]
            for either in (plain, biased))
        for one, other in zip(wanted, got, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("query_len", [1, 3, 40])
@pytest.mark.parametrize("options", [{}, *SCORES, {"causal": True, "query_offset": 250}])
def test_what_a_head_adds_to_no_score_changes_no_bit(head_dim, query_len, options):
    rng = np.random.default_rng([head_dim, query_len])
    query, key, value = (rng.standard_normal((1, 2, length, head_dim)).astype(np.float32)
                         for length in (query_len, 300, 300))
    grad_output = rng.standard_normal((1, 2, query_len, head_dim)).astype(np.float32)
    nothing = [{"alibi": np.zeros(2)}, {"relative_bias": np.zeros((1, 9))},
               {"sinks": np.full(2, -np.inf)}, {"sinks": np.full(2, -200)}]
    wanted, *found = (
        [*mha.scaled_dot_product_attention(query, key, value, return_weights=True, return_lse=True,
                                           **options, **added),
         *mha.scaled_dot_product_attention_vjp(query, key, value, wrt=("query", "key", "value"),
                                               **options, **added)[1](grad_output)[:3]]
        for added in ({}, *nothing))
    for got in found:
        for one, other in zip(wanted, got, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("query_len", [1, 3, 40])
def test_minus_infinity_in_relative_bias_is_a_window(query_len):
    rng = np.random.default_rng(query_len)
    query, key, value = (rng.standard_normal((length, 40)).astype(np.float32)
                         for length in (query_len, 300, 300))
    value[299] = np.nan  # behind the window of every query
    table = np.where(abs(np.arange(-9, 10)) <= 8, 0, -np.inf)[None]
    wanted, got = (mha.scaled_dot_product_attention(query, key, value, query_offset=250,
                                                    return_weights=True, return_lse=True, **either)
                   for either in ({"window": (8, 8)}, {"relative_bias": table}))
    for one, other in zip(wanted, got, strict=True):
        assert np.array_equal(one, other)


def test_alibi_at_positions_beyond_what_a_float_counts():
    """Distances are whole numbers until they are multiplied."""
    query, key = np.ones((1, 32), np.float32), np.ones((40, 32), np.float32)
    value = np.eye(40, dtype=np.float32)
    for rows in (1, 20):
        for offset in (10**6, 2**24 + 20, 10**15):
            options = {"alibi": [2.0**-20], "query_offset": offset}
            got = mha.scaled_dot_product_attention(query.repeat(rows, 0), key, value, **options)
            exact = reference.scaled_dot_product_attention(
                query.repeat(rows, 0).astype(float), key.astype(float), value.astype(float),
                **options)
            assert np.abs(got - exact).max() < 2e-7 * max(1, offset * 2.0**-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [30.0, 80.0, 200.0, 2000.0, -60.0])
@pytest.mark.parametrize("query_len", [1, 40])
def test_a_large_sink_makes_no_weight_wrong(dtype, sink, query_len):
    """Beside it weights are small, not wrong; where the type ends they are 0, and lse the sink."""
    rng = np.random.default_rng(int(abs(sink)))
    query, key, value = (rng.standard_normal((50, length, 64)).astype(dtype)
                         for length in (query_len, 300, 300))
    options = {"sinks": np.array([sink], dtype), "return_weights": True, "return_lse": True}
    wide = WIDER[np.dtype(dtype)]
    got = mha.scaled_dot_product_attention(query, key, value, **options)
    exact, plain = (reference.scaled_dot_product_attention(
        *(x.astype(kind) for x in (query, key, value)), **options) for kind in (wide, dtype))
    if sink > -np.log(np.finfo(dtype).tiny) + 10:
        assert not got[0].any() and not got[1].any()
        assert (got[2] == dtype(sink)).all()
        return
    for ours, numpys, wanted in zip(got, plain, exact, strict=True):
        floor = 2 * np.finfo(dtype).eps
        assert error_of(ours, wanted) <= max(2 * ROUNDINGS * error_of(numpys, wanted), floor)


def test_rows_that_see_no_key_have_their_sink():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 3, 50, 32))
    sinks = np.array([0.5, -2, -np.inf])
    for query_len, key_len in ((1, 40), (50, 40), (5, 0)):
        key, mask = rng.standard_normal((2, 3, key_len, 32)), np.ones((query_len, key_len), bool)
        mask[-1] = False
        output, weights, lse = mha.scaled_dot_product_attention(
            query[:, :, :query_len], key, key, mask=mask, sinks=sinks, return_weights=True,
            return_lse=True)
        assert not output[..., -1, :].any() and not weights[..., -1, :].any()
        assert np.array_equal(lse[..., -1], np.tile(sinks, (2, 1)))
        grad_lse = np.zeros(lse.shape)
        grad_lse[..., -1] = [[1, 2, 4], [3, 5, 6]]
        gradients = mha.scaled_dot_product_attention_vjp(
            query[:, :, :query_len], key, key, mask=mask, sinks=sinks)[1](
                np.zeros(output.shape), grad_lse)
        assert np.array_equal(gradients.sinks, [4, 7, 0])
        assert not gradients.query.any()


def test_parts_of_which_one_has_the_sinks():
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((2, 4, length, 24)) for length in (30, 100, 100))
    sinks = rng.standard_normal(4)
    wanted = mha.scaled_dot_product_attention(query, key, value, sinks=sinks, return_lse=True)
    parts = [mha.scaled_dot_product_attention(query, key[:, :, part], value[:, :, part],
                                              return_lse=True, **options)
             for part, options in ((slice(0, 70), {"sinks": sinks}), (slice(70, 100), {}))]
    for one, other in zip(mha.merge_attention(*zip(*parts, strict=True)), wanted, strict=True):
        assert np.allclose(one, other, rtol=1e-14, atol=1e-15)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [0, 300])
@pytest.mark.parametrize(("query_len", "key_len"), [(4, 40), (100, 300), (700, 1500)])
def test_gradients_of_many_heads(query_len, key_len, size):
    """What each key's roundings have in common does not grow by distances, with 300 added to all
    scores either; nor at the table's ends."""
    rng = np.random.default_rng([query_len, size])
    heads = 60 if key_len < 1000 else 16
    query, key, value = (rng.standard_normal((1, heads, length, 32)).astype(np.float32)
                         for length in (query_len, key_len, key_len))
    query[..., 0], key[..., 0] = size * 32**0.5, 1
    arguments = {"query": query, "key": key, "value": value,
                 "alibi": rng.uniform(0, 0.1, heads).astype(np.float32),
                 "relative_bias": rng.standard_normal((heads, 5)).astype(np.float32),
                 "sinks": rng.uniform(size, size + 5, heads).astype(np.float32)}
    output, pullback = mha.scaled_dot_product_attention_vjp(**arguments)
    grad_output = rng.standard_normal(output.shape).astype(np.float32)
    grad_lse = rng.standard_normal(output.shape[:-1]).astype(np.float32)
    got = pullback(grad_output, grad_lse)
    exact, plain = (reference.scaled_dot_product_attention_vjp(
        **{name: array.astype(dtype) for name, array in arguments.items()})[1](
            grad_output.astype(dtype), grad_lse.astype(dtype)) for dtype in (float, np.float32))
    for name in ("alibi", "relative_bias", "sinks"):
        error = error_of(getattr(got, name), exact[name])
        assert error <= max(2 * ROUNDINGS * error_of(plain[name], exact[name]), 1e-7), name


def test_large_biases_do_not_overflow():
    """In whatever unit scores are kept: the larger of two huge biases has all the weight."""
    query, key, value = np.ones((1, 24)), np.ones((3, 24)), np.eye(3)
    for dtype in DTYPES:
        largest = np.finfo(dtype).max
        for query_len in (1, 12):
            arguments = [array.astype(dtype) for array in (query, key, value)]
            arguments[0] = arguments[0].repeat(query_len, axis=0)
            bias = np.array([-0.9 * largest, -0.3 * largest, -0.6 * largest], dtype)
            got = mha.scaled_dot_product_attention(*arguments, bias=bias[None, :], scale=1e-3)
            assert np.array_equal(got, np.tile([0, 1, 0], (query_len, 1)))


@pytest.mark.parametrize("query_len", [1, 30])
def test_a_visible_infinity_stays_infinity_at_the_smallest_weights(query_len):
    value, bias = np.ones((128, 1), np.float32), np.zeros((1, 128), np.float32)
    value[5], bias[0, 5] = np.inf, -85
    zeros = np.zeros((128, 8), np.float32)
    assert np.isposinf(mha.scaled_dot_product_attention(zeros[:query_len], zeros, value,
                                                        bias=bias)).all()


def test_gradients_have_no_negative_zeros_where_nothing_is_seen():
    """Queries 0 to 42 of 48 see no key: which of them share a block depends on the kernel set."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((length, 8)) for length in (48, 5, 5))
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value, scale=-1.0,
                                                            causal=True)
    assert not np.signbit(pullback(np.ones_like(output)).query[:43]).any()


@pytest.mark.parametrize("query_axis", [1, 4])
def test_a_bias_that_keys_share_has_a_gradient_of_many_terms(query_axis):
    """It adds up to grad lse, whatever the values: the weights of a row add up to 1."""
    rng = np.random.default_rng(0)
    query, bias = (rng.standard_normal((1, 2, length, width)).astype(np.float32)
                   for length, width in ((4, 16), (query_axis, 1)))
    key, value = rng.standard_normal((2, 1, 2, 50_000, 16)).astype(np.float32)
    grad_output = rng.standard_normal((1, 2, 4, 16)).astype(np.float32)
    grad_lse = rng.standard_normal((1, 2, 4)).astype(np.float32)
    pullback = mha.scaled_dot_product_attention_vjp(query, key, value, bias=bias)[1]
    wanted = grad_lse.astype(float)
    if query_axis == 1:
        wanted = wanted.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(pullback(grad_output, grad_lse).bias[..., 0], wanted, rtol=0,
                               atol=3e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [20, 100, 300])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (5, 3)}, {"key_lengths": [7]},
                                     {"mask": True}, {"causal": True, "sinks": True}], ids=str)
def test_the_weights_of_a_row_of_nan_are_nan(dtype, length, options):
    """All of them, as in NumPy, whichever queries stand beside it; other rows keep their bits."""
    rng = np.random.default_rng(length)
    query, key, value = rng.standard_normal((3, 1, 2, length, 8)).astype(dtype)
    arrays = {"mask": rng.random((length, length)) < 0.5, "sinks": np.ones(2)}
    options = {name: arrays.get(name, option) for name, option in options.items()}
    attend = functools.partial(mha.scaled_dot_product_attention, key=key, value=value,
                               return_weights=True, **options)
    wanted = attend(query)[1]
    query[0, 0, 13, 2] = np.nan
    query[0, 1, 19] = np.inf
    wanted[0, 0, 13] = wanted[0, 1, 19] = np.nan
    assert np.array_equal(attend(query)[1], wanted, equal_nan=True)
    if "mask" not in options and "window" not in options:
        alone = attend(query[:, :, 13:14], query_offset=13)[1]
        assert np.array_equal(alone, wanted[:, :, 13:14], equal_nan=True)
