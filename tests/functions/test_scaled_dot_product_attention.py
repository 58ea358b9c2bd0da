"""Step 3 of the figure against mha.reference: shapes, every option, their pairs, accuracy."""

import itertools

import numpy as np
import pytest
from agreement import OnlyDlpack, as_tuple, assert_accurate, by_token, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from option_cases import SCORES, fit_together, option_cases

import mha
from mha import reference

LENGTHS = (1, 7, 9, 63, 65, 127, 129, 300)
DTYPES = (np.float32, np.float64)


def random_inputs(rng, dtype, batch=(2,), heads=(4,), kv_heads=None, query_len=9, key_len=13,
                  head_dim=8, value_head_dim=None):
    kv_heads = heads if kv_heads is None else kv_heads
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    return [rng.standard_normal(shape).astype(dtype) for shape in (
        (*batch, *heads, query_len, head_dim), (*batch, *kv_heads, key_len, head_dim),
        (*batch, *kv_heads, key_len, value_head_dim))]


def check(arguments, **options):
    options = {"return_weights": True, "return_lse": True, **options}
    return assert_accurate(mha.scaled_dot_product_attention,
                           reference.scaled_dot_product_attention, arguments, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", LENGTHS)
@pytest.mark.parametrize("key_len", LENGTHS)
def test_lengths(dtype, query_len, key_len):
    rng = np.random.default_rng([query_len, key_len])
    for causal in (False, True):
        check(random_inputs(rng, dtype, (1,), (2,), None, query_len, key_len, 16), causal=causal)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 8, 17, 31, 64, 96, 128, 255, 256, 257, 600])
def test_head_dims(dtype, head_dim):
    rng = np.random.default_rng(head_dim)
    for value_head_dim in (1, 6, head_dim):
        check(random_inputs(rng, dtype, query_len=50, key_len=131, head_dim=head_dim,
                            value_head_dim=value_head_dim))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_gate(dtype):
    """In every case at most twice plain NumPy's error, and no larger in the median."""
    ratios = []
    for length, head_dim in itertools.product((65, 129, 1000, 4096), (8, 64, 128)):
        rng = np.random.default_rng([length, head_dim])
        query, key, value = random_inputs(rng, dtype, (), (), (), 64, length, head_dim)
        for options in ({}, {"causal": True}, *SCORES, {"window": (40, 3)}):
            for ours, numpys in check([query, key, value], **options):
                ratios.append(ours / numpys if numpys else 0)
    assert np.median(ratios) <= 1, np.median(ratios)


def all_pairs():
    names = sorted(option_cases(np.random.default_rng(0), (3,), 2, 10, 12))
    return list(filter(fit_together, itertools.combinations_with_replacement(names, 2)))


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64,
                                                            marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("first", "second"), all_pairs())
def test_every_pair_of_options(dtype, first, second):
    rng = np.random.default_rng(7)
    for query_len, key_len in ((10, 12), (30, 140)):
        arguments = random_inputs(rng, dtype, (3,), (2,), None, query_len, key_len, 8, 5)
        cases = option_cases(rng, (3,), 2, query_len, key_len)
        for one, other in itertools.product(cases[first], cases[second]):
            options = {"rng": 11, "query_offset": 1, first: one, second: other}
            check(arguments, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(option_cases(np.random.default_rng(0), (1,), 2, 9, 9)))
def test_options_of_long_sequences(dtype, name):
    """Blocks of queries walk the keys together, over copies where rows lie apart: both have their
    conditions (512 queries and keys, 512 KB and two heads of keys), which short sequences never
    meet."""
    rng = np.random.default_rng(8)
    # NumPy multiplies long doubles slowly, so float64 gets by on the fewest.
    heads, key_len = (4, 1100) if dtype == np.float32 else (2, 530)
    arguments = random_inputs(rng, dtype, (1,), (heads,), (2,), 600, key_len, 64, 65)
    apart = [by_token(array) for array in arguments]
    for option in option_cases(rng, (1,), heads, 600, key_len)[name]:
        options = {"rng": 11, "query_offset": 1, name: option}
        check(arguments, **options)
        found = [mha.scaled_dot_product_attention(*laid, **options) for laid in (arguments, apart)]
        assert np.array_equal(*found)


@pytest.mark.parametrize(("query_shape", "key_shape"), [
    ((5, 8), (7, 8)), ((3, 5, 8), (3, 7, 8)), ((2, 4, 5, 8), (2, 2, 7, 8)),
    ((2, 4, 5, 8), (2, 1, 7, 8)), ((2, 3, 4, 5, 8), (2, 3, 2, 7, 8)),
    ((1, 2, 1, 2, 6, 5, 8), (1, 2, 1, 2, 3, 7, 8))])
def test_layouts_and_grouped_heads(query_shape, key_shape):
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal(shape)
                         for shape in (query_shape, key_shape, key_shape))
    output, weights, lse = mha.scaled_dot_product_attention(query, key, value, causal=True,
                                                            return_weights=True, return_lse=True)
    assert output.shape == query_shape
    assert weights.shape == (*query_shape[:-1], 7)
    assert lse.shape == query_shape[:-1]
    check([query, key, value], causal=True)


def test_grouped_heads_are_consecutive():
    rng = np.random.default_rng(2)
    query, key, value = random_inputs(rng, np.float64, heads=(6,), kv_heads=(2,))
    got = mha.scaled_dot_product_attention(query, key, value)
    for head in range(6):
        alone = mha.scaled_dot_product_attention(query[:, head], key[:, head // 3],
                                                 value[:, head // 3])
        assert np.array_equal(got[:, head], alone)


@pytest.mark.parametrize("axis", ["batch", "heads", "query_len", "key_len", "head_dim",
                                  "value_head_dim"])
@pytest.mark.parametrize("empty_rows", ["zeros", "uniform"])
def test_zero_length_axes(axis, empty_rows):
    sizes = {"batch": (2,), "heads": (4,), "query_len": 3, "key_len": 5, "head_dim": 6,
             "value_head_dim": 7, axis: (0,) if axis in ("batch", "heads") else 0}
    arguments = random_inputs(np.random.default_rng(3), np.float32, **sizes)
    output, weights, lse = mha.scaled_dot_product_attention(
        *arguments, empty_rows=empty_rows, return_weights=True, return_lse=True)
    assert output.shape == (*sizes["batch"], *sizes["heads"], sizes["query_len"],
                            sizes["value_head_dim"])
    if axis == "key_len":
        assert (output == 0).all()
        assert (lse == -np.inf).all()
    if axis == "head_dim":  # all scores 0
        assert np.allclose(weights, 1 / 5)
    check(arguments, empty_rows=empty_rows)


def test_an_output_without_columns_costs_nothing():
    query = np.ones((2**40, 0))
    assert mha.scaled_dot_product_attention(query, query[:1], query[:1]).shape == query.shape


def test_columns_of_no_rows_cost_nothing():
    none = np.ones((0, 2**59))
    output, pullback = mha.scaled_dot_product_attention_vjp(none, none, none)
    assert output.shape == none.shape
    gradients = pullback(none)
    assert gradients.query.shape == gradients.key.shape == gradients.value.shape == none.shape


def strided_copies(array):
    """The same numbers in every layout of memory that a user may hand in."""
    yield np.asfortranarray(array)
    yield np.repeat(array, 2, axis=-2)[..., ::2, :]
    yield np.repeat(array, 2, axis=-1)[..., ::2]
    yield np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]
    yield np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    yield np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -2, 0)), 0, -2)
    yield array.astype(array.dtype.newbyteorder())
    unaligned = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    yield unaligned


def test_strides():
    rng = np.random.default_rng(4)
    arguments = random_inputs(rng, np.float32, query_len=30, key_len=40)
    mask = rng.random((2, 4, 30, 40)) < 0.5
    bias = rng.standard_normal((2, 4, 30, 40)).astype(np.float32)
    plain = mha.scaled_dot_product_attention(*arguments, mask=mask, bias=bias)
    for index in range(3):
        for copy in strided_copies(arguments[index]):
            changed = [*arguments[:index], copy, *arguments[index + 1:]]
            assert np.array_equal(
                mha.scaled_dot_product_attention(*changed, mask=mask, bias=bias), plain)
    for copy in strided_copies(bias):
        assert np.array_equal(
            mha.scaled_dot_product_attention(*arguments, mask=mask, bias=copy), plain)
    for copy in itertools.islice(strided_copies(mask), 6):
        assert np.array_equal(
            mha.scaled_dot_product_attention(*arguments, mask=copy, bias=bias), plain)


def test_broadcast_inputs_with_zero_strides():
    rng = np.random.default_rng(5)
    query, key, value = random_inputs(rng, np.float64)
    one_head = np.broadcast_to(key[:, :1], key.shape)
    one_row = np.broadcast_to(value[..., :1, :], value.shape)
    check([query, one_head, one_row])


def test_types():
    rng = np.random.default_rng(6)
    single = random_inputs(rng, np.float32)
    double = [x.astype(np.float64) for x in single]
    attention = mha.scaled_dot_product_attention
    assert attention(*single).dtype == np.float32
    assert attention(single[0], double[1], single[2]).dtype == np.float64
    assert np.array_equal(attention(single[0], *double[1:]), attention(*double))
    integers = [np.arange(12).reshape(3, 4) % 5] * 3
    assert attention(*integers).dtype == np.float64
    assert np.array_equal(attention(*integers), attention(*(x.astype(float) for x in integers)))
    lists = [x.tolist() for x in double]
    assert np.array_equal(attention(*lists), attention(*double))


def test_a_repeated_bias_of_another_type():
    query, key, value = random_inputs(np.random.default_rng(8), np.float32)
    shape = (*query.shape[:-1], key.shape[-2])
    for axes in ((-1,), (-2,), (-2, -1), (0, 1), (0, -1)):
        once = np.random.default_rng(9).standard_normal(
            [1 if axis in axes or axis - len(shape) in axes else size
             for axis, size in enumerate(shape)]).astype(">f8")
        bias = np.broadcast_to(once, shape)
        output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value, bias=bias)
        same, same_pullback = mha.scaled_dot_product_attention_vjp(
            query, key, value, bias=bias.astype(np.float32))
        assert np.array_equal(output, same)
        assert np.array_equal(pullback(output).bias, same_pullback(output).bias)


def test_dlpack():
    arguments = random_inputs(np.random.default_rng(7), np.float32)
    assert np.array_equal(mha.scaled_dot_product_attention(*map(OnlyDlpack, arguments)),
                          mha.scaled_dot_product_attention(*arguments))


def test_out():
    arguments = random_inputs(np.random.default_rng(8), np.float32)
    plain = mha.scaled_dot_product_attention(*arguments)
    out = np.empty_like(plain)
    assert mha.scaled_dot_product_attention(*arguments, out=out) is out
    assert np.array_equal(out, plain)
    by_token = np.full((2, 9, 4, 8), np.nan, np.float32).swapaxes(1, 2)
    mha.scaled_dot_product_attention(*arguments, out=by_token)
    assert np.array_equal(by_token, plain)
    interleaved = np.zeros((2, 4, 9, 2, 8), np.float32)  # query beside out, no element shared
    interleaved[..., 0, :] = arguments[0]
    mha.scaled_dot_product_attention(interleaved[..., 0, :], *arguments[1:],
                                     out=interleaved[..., 1, :])
    assert np.array_equal(interleaved[..., 1, :], plain)


def test_out_without_elements():
    """NumPy gives a copy of it strides of 0."""
    query, key = np.ones((2, 0, 3)), np.ones((2, 5, 3))
    out = np.array(np.empty((2, 0, 3)), order="C")
    assert mha.scaled_dot_product_attention(query, key, key, out=out) is out


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [5, 200])
def test_nothing_leaks_from_behind_a_mask(poison, length):
    rng = np.random.default_rng(9)
    arguments = random_inputs(rng, np.float64, query_len=length, key_len=length)
    visible = rng.random((2, 4, length, length)) < 0.5
    visible[..., 0] = True
    visible[..., 3] = False  # key 3 is blocked for everyone
    clean = mha.scaled_dot_product_attention(*arguments, mask=visible)
    for index in (1, 2):
        poisoned = [x.copy() for x in arguments]
        poisoned[index][:, :, 3] = poison
        assert np.array_equal(mha.scaled_dot_product_attention(*poisoned, mask=visible), clean)
        bias = np.where(visible, 0.0, -np.inf)
        assert relative_error(mha.scaled_dot_product_attention(*poisoned, bias=bias), clean) < 1e-14
    bias = np.where(visible, 0.0, poison)
    assert relative_error(
        mha.scaled_dot_product_attention(*arguments, mask=visible, bias=bias), clean) < 1e-14


def test_padding_may_hold_anything():
    rng = np.random.default_rng(10)
    query, key, value = random_inputs(rng, np.float32, query_len=40, key_len=300)
    lengths = np.array([130, 7])
    clean = mha.scaled_dot_product_attention(query, key, value, key_lengths=lengths)
    for item, length in enumerate(lengths):
        key[item, :, length:] = np.nan
        value[item, :, length:] = np.inf
    assert np.array_equal(
        mha.scaled_dot_product_attention(query, key, value, key_lengths=lengths), clean)


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
@pytest.mark.parametrize(("query_len", "key_len", "options"), [
    (48, 48, {}), (47, 301, {}), (300, 300, {}), (130, 40, {}), (33, 129, {"query_offset": 0}),
    (100, 260, {"query_offset": 37}), (60, 60, {"query_offset": -9}),
    (150, 150, {"window": (3, 0)}), (200, 200, {"window": (130, 0)})])
def test_keys_behind_the_diagonal_are_left_out(query_len, key_len, options, poison):
    """A mask says the same as causal, but has every key of a block computed for every query."""
    rng = np.random.default_rng(query_len)
    query, key, value = random_inputs(rng, np.float32, query_len=query_len, key_len=key_len)
    offset = options.get("query_offset", key_len - query_len)
    visible = mha.masks.causal(query_len, key_len, offset)
    if "window" in options:
        visible &= mha.masks.sliding_window(query_len, key_len, window=options["window"])
    clean = np.where(visible, rng.standard_normal(visible.shape), 0).astype(np.float32)
    extras = {"return_weights": True, "return_lse": True, "dropout": 0.3, "rng": 5}
    wanted = mha.scaled_dot_product_attention(
        query, key, value, bias=clean, mask=visible, **extras)
    got = mha.scaled_dot_product_attention(
        query, key, value, bias=np.where(visible, clean, np.float32(poison)), causal=True,
        **options, **extras)
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.array_equal(ours, theirs)


def test_what_is_visible_does_reach_the_output():
    rng = np.random.default_rng(11)
    for index, poison in ((0, np.nan), (1, np.nan), (2, np.nan), (2, np.inf)):
        arguments = random_inputs(rng, np.float64, query_len=30, key_len=300)
        arguments[index][0, 1, 3, 2] = poison
        for options in ({}, {"causal": True, "query_offset": 0}, {"mask": np.ones((1, 300), bool)}):
            got = mha.scaled_dot_product_attention(*arguments, **options)
            wanted = reference.scaled_dot_product_attention(*arguments, **options)
            assert not np.isfinite(wanted).all()
            assert np.array_equal(np.isnan(got), np.isnan(wanted))
            assert np.array_equal(np.isinf(got), np.isinf(wanted))


def test_large_scores_do_not_overflow():
    for dtype, large in ((np.float32, 1e30), (np.float64, 1e200)):
        query = np.array([[large, 0]], dtype)
        key = np.array([[1, 0], [-1, 0], [1, 0], [0, 1]], dtype)
        _, weights, lse = mha.scaled_dot_product_attention(query, key, key, scale=1.0,
                                                           return_weights=True, return_lse=True)
        assert weights.tolist() == [[0.5, 0, 0.5, 0]]
        assert lse[0] == pytest.approx(large)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scales_and_values(dtype):
    arguments = random_inputs(np.random.default_rng(15), dtype, (), (), (), 40, 200)
    tiny = np.finfo(dtype).smallest_subnormal / 4 if dtype == np.float64 else 1e-46
    for scale in (tiny, -tiny, 0.0):
        got = mha.scaled_dot_product_attention(*arguments, causal=True, scale=scale)
        assert relative_error(got, mha.scaled_dot_product_attention(
            *arguments, causal=True, scale=0.0)) == 0
    with pytest.raises(ValueError, match="scale: got"):
        mha.scaled_dot_product_attention(*arguments, scale=np.finfo(dtype).max)

    # A visible infinity is the output, not NaN.
    zeros, value = np.zeros((256, 4), dtype), np.zeros((256, 1), dtype)
    value[[0, 64], 0] = np.finfo(dtype).max, np.inf
    assert np.isposinf(mha.scaled_dot_product_attention(zeros[:3], zeros, value)).all()


def test_far_weights_count_in_float64():
    query, key, value = np.ones((1, 1)), np.array([[0.0], [-100.0]]), np.array([[0.0], [1e60]])
    got, weights = mha.scaled_dot_product_attention(query, key, value, return_weights=True)
    assert weights[0, 1] == pytest.approx(np.exp(-100), rel=1e-12)
    assert got[0, 0] == pytest.approx(1e60 * np.exp(-100), rel=1e-12)


def test_rows_whose_scores_are_all_minus_infinity_are_empty():
    query, key, value = np.ones((1, 2)), np.full((3, 2), -np.inf), np.arange(6.0).reshape(3, 2)
    for options, wanted in (({}, [0, 0]), ({"empty_rows": "uniform"}, [2, 3])):
        for attention in (mha, reference):
            got = attention.scaled_dot_product_attention(query, key, value, **options)
            assert got.tolist() == [wanted]


def test_empty_rows():
    query, key, value = random_inputs(np.random.default_rng(12), np.float64, (), ())
    mask = np.ones((9, 13), bool)
    mask[4] = False
    zeros = mha.scaled_dot_product_attention(query, key, value, mask=mask, return_weights=True,
                                             return_lse=True)
    assert (zeros[0][4] == 0).all() and (zeros[1][4] == 0).all() and zeros[2][4] == -np.inf
    uniform = mha.scaled_dot_product_attention(query, key, value, mask=mask, return_weights=True,
                                               return_lse=True, empty_rows="uniform")
    assert np.allclose(uniform[0][4], value.mean(axis=0), atol=1e-15)
    assert (uniform[1][4] == 1 / 13).all() and uniform[2][4] == -np.inf
    others = np.arange(9) != 4
    for one, other in zip(zeros, uniform, strict=True):
        assert np.array_equal(one[others], other[others])


def test_key_lengths_never_move_the_offset():
    query, key, value = random_inputs(np.random.default_rng(13), np.float64, query_len=6, key_len=6)
    got = mha.scaled_dot_product_attention(query, key, value, key_lengths=[4, 6], causal=True,
                                           return_weights=True)[1]
    triangle = np.tril(np.ones((6, 6), bool))
    assert ((got[0] > 0) == (triangle & (np.arange(6) < 4))).all()
    assert ((got[1] > 0) == triangle).all()


def test_extras_change_nothing():
    arguments = random_inputs(np.random.default_rng(14), np.float32, query_len=70, key_len=200)
    plain = mha.scaled_dot_product_attention(*arguments, causal=True)
    for weights, lse in itertools.product((False, True), repeat=2):
        got = as_tuple(mha.scaled_dot_product_attention(
            *arguments, causal=True, return_weights=weights, return_lse=lse))
        assert len(got) == 1 + weights + lse
        assert np.array_equal(got[0], plain)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_calls(data):
    """Shapes, strides and options drawn together."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    batch = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=2)))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (6, 3)]))
    query_len, key_len = draw(st.integers(0, 60)), draw(st.integers(0, 300))
    arguments = random_inputs(rng, dtype, batch, heads[:1], heads[1:], query_len, key_len,
                              draw(st.integers(0, 40)), draw(st.integers(0, 9)))
    options = {"query_offset": draw(st.integers(-70, 300))}
    if draw(st.booleans()):
        options["mask"] = rng.random((query_len, key_len)) < draw(st.floats(0, 1))
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, key_len + 1, batch)
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(st.none() | st.integers(0, 90),
                                           st.none() | st.integers(0, 90)))
    options["causal"] = draw(st.booleans())
    options["empty_rows"] = draw(st.sampled_from(["zeros", "uniform"]))
    check(arguments, **options)
