"""The whole figure as a function, against mha.reference."""

import itertools

import numpy as np
import pytest
from agreement import as_tuple, assert_accurate
from option_cases import SCORES, by_head, fit_together

import mha
from mha import reference

NAMES = ("query", "key", "value", "W_q", "W_k", "W_v", "W_o")


def random_arguments(rng, dtype=np.float64, batch=(2,), query_len=6, key_len=9, dims=(10, 12, 14),
                     num_heads=4, num_kv_heads=4, head_dim=5, value_head_dim=3, output_dim=7):
    shapes = ((*batch, query_len, dims[0]), (*batch, key_len, dims[1]), (*batch, key_len, dims[2]),
              (dims[0], num_heads * head_dim), (dims[1], num_kv_heads * head_dim),
              (dims[2], num_kv_heads * value_head_dim), (num_heads * value_head_dim, output_dim))
    scales = (1, 1, 1, *(in_out[0] ** -0.5 for in_out in shapes[3:]))  # scores stay of order 1
    return [(rng.standard_normal(shape) * scale).astype(dtype)
            for shape, scale in zip(shapes, scales, strict=True)]


def biases_of(rng, arguments):
    return {"b" + name[1:]: rng.standard_normal(weight.shape[1]).astype(weight.dtype)
            for name, weight in zip(NAMES[3:], arguments[3:], strict=True)}


def check(arguments, **options):
    return assert_accurate(mha.multi_head_attention, reference.multi_head_attention, arguments,
                           {"return_weights": True, "return_lse": True, **options})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (0,)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_shapes(dtype, batch, num_heads, num_kv_heads):
    rng = np.random.default_rng(num_heads)
    for query_len, key_len in ((1, 1), (6, 9), (130, 140), (0, 4), (4, 0)):
        arguments = random_arguments(rng, dtype, batch, query_len, key_len, num_heads=num_heads,
                                     num_kv_heads=num_kv_heads)
        options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        output, weights, lse = mha.multi_head_attention(*arguments, **options, return_weights=True,
                                                        return_lse=True)
        assert output.shape == (*batch, query_len, 7)
        assert weights.shape == (*batch, num_heads, query_len, key_len)
        assert lse.shape == (*batch, num_heads, query_len)
        check(arguments, **options, **biases_of(rng, arguments))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pairs_of_options(dtype):
    rng = np.random.default_rng(1)
    arguments = random_arguments(rng, dtype)
    cases = {
        "mask": rng.random((2, 1, 6, 9)) < 0.6, "bias": rng.standard_normal((1, 4, 6, 9)),
        "key_lengths": rng.integers(0, 10, (2, 6)), "causal": True, "window": (2, 1),
        **{name: value for options in (*SCORES, *by_head(4)) for name, value in options.items()},
        "empty_rows": "uniform", "dropout": 0.3,
        "head_gate": rng.standard_normal(4), "b_q": rng.standard_normal(20),
        "b_o": rng.standard_normal(7)}
    for one, other in filter(fit_together, itertools.combinations(cases, 2)):
        check(arguments, num_heads=4, rng=5, query_offset=2,
              **{one: cases[one], other: cases[other]})


@pytest.mark.parametrize(("dtype", "batch", "lengths", "kv_heads", "head_dim", "value_head_dim"), [
    (np.float32, (2,), (50, 200), 4, 5, 3), (np.float32, (2, 3), (50, 200), 2, 64, 32),
    (np.float32, (1,), (3, 700), 1, 32, 5), (np.float64, (2,), (450, 520), 4, 16, 48)])
def test_it_is_its_steps(dtype, batch, lengths, kv_heads, head_dim, value_head_dim):
    """The function gives what its five steps give one by one, bit for bit: with heads of whole
    panels, which are projected apart, and others."""
    rng = np.random.default_rng(2)
    arguments = random_arguments(rng, dtype, batch, *lengths, num_kv_heads=kv_heads,
                                 head_dim=head_dim, value_head_dim=value_head_dim)
    biases = biases_of(rng, arguments)
    query, key, value, *weights = arguments
    heads = [mha.split_heads(mha.linear(x, weight, biases[name]), num_heads)
             for x, weight, name, num_heads in zip(
                 (query, key, value), weights[:3], ("b_q", "b_k", "b_v"), (4, kv_heads, kv_heads),
                 strict=True)]
    attended = mha.scaled_dot_product_attention(*heads, causal=True)
    wanted = mha.linear(mha.merge_heads(attended), weights[3], biases["b_o"])
    assert np.array_equal(wanted, mha.multi_head_attention(
        *arguments, num_heads=4, num_kv_heads=kv_heads, causal=True, **biases))


def test_head_gate():
    rng = np.random.default_rng(3)
    arguments = random_arguments(rng)
    plain = mha.multi_head_attention(*arguments, num_heads=4)
    open_gates = mha.multi_head_attention(*arguments, num_heads=4, head_gate=np.ones(4))
    assert np.array_equal(open_gates, plain)
    without = [a.copy() for a in arguments]
    without[6][3:6] = 0  # the rows of W_o of head 1
    gated = mha.multi_head_attention(*arguments, num_heads=4, head_gate=[1, 0, 1, 1])
    assert np.allclose(gated, mha.multi_head_attention(*without, num_heads=4), atol=1e-13)


def test_types_and_lists():
    rng = np.random.default_rng(4)
    arguments = random_arguments(rng)
    single = [a.astype(np.float32) for a in arguments]
    assert mha.multi_head_attention(*single, num_heads=4).dtype == np.float32
    assert mha.multi_head_attention(*single[:3], *arguments[3:], num_heads=4).dtype == np.float32
    lists = [a.tolist() for a in arguments]
    assert np.array_equal(mha.multi_head_attention(*lists, num_heads=4),
                          mha.multi_head_attention(*arguments, num_heads=4))


def test_dropout_is_the_public_mask():
    rng = np.random.default_rng(5)
    arguments = random_arguments(rng, batch=(3,), query_len=20, key_len=30)
    got, weights = as_tuple(mha.multi_head_attention(*arguments, num_heads=4, dropout=0.25, rng=99,
                                                     return_weights=True))
    kept = weights * mha.dropout_mask(weights.shape, 0.25, 99) / 0.75
    value = mha.split_heads(mha.linear(arguments[2], arguments[5]), 4)
    wanted = mha.linear(mha.merge_heads(kept @ value), arguments[6])
    assert np.abs(got - wanted).max() < 1e-13 * np.abs(wanted).max()


@pytest.mark.parametrize(("dtype", "width"), [(np.float32, 1024), (np.float64, 512),
                                              (np.float16, 64), (np.float32, 64)])
@pytest.mark.parametrize("lengths", [(9, 10), (16, 64), (96, 97), (97, 300), (384, 400)])
def test_a_query_that_is_the_start_of_key(dtype, width, lengths):
    """Rows copied for the one projection are not taken for those of another that has more."""
    rng = np.random.default_rng(width)
    query_len, key_len = lengths
    x = rng.standard_normal((key_len, width)).astype(dtype)
    query = x[:query_len]
    layer = mha.MultiHeadAttention(width, 4, dtype=dtype, rng=rng)
    wanted = layer(query.copy(), x, x.copy())
    for threads in (1, 2, 3):
        with mha.threads(threads):
            assert np.array_equal(layer(query, x), wanted)
            assert np.array_equal(layer.vjp(query, x)[0], wanted)
    layer.freeze()
    assert np.array_equal(layer(query, x), layer(query.copy(), x, x.copy()))


def test_projections_whose_blocks_of_rows_have_other_sizes():
    """Of 400 rows, W_k is packed as a whole before; W_v, of more than 64 MB, is not."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 1024), np.float32)
    W_q, W_k = (rng.standard_normal((1024, 1024), np.float32) / 32 for _ in range(2))
    W_v = rng.standard_normal((1024, 16640), np.float32) / 32
    W_o = rng.standard_normal((16640, 8), np.float32) / 128
    wanted = mha.multi_head_attention(x, x.copy(), x.copy(), W_q, W_k, W_v, W_o, num_heads=4)
    assert np.array_equal(
        mha.multi_head_attention(x, x, x, W_q, W_k, W_v, W_o, num_heads=4), wanted)
