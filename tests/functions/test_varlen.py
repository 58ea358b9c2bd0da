"""Attention of ragged batches: the bits of the sequences one by one, forward and backward."""

import itertools

import numpy as np
import pytest
from agreement import FLOOR, assert_accurate, relative_error, widened
from half_types import HALVES
from hypothesis import given, settings
from hypothesis import strategies as st
from option_cases import fit_together
from ragged_batches import (
    LENGTHS,
    OF_ALL,
    dtype_of_lse,
    gradients_one_by_one,
    one_by_one,
    option_values,
    ragged,
    starts_of,
)

import mha
from mha import reference

DTYPES = [np.dtype(np.float32), np.dtype(np.float64), *HALVES]
attend, attend_vjp = (mha.scaled_dot_product_attention_varlen,
                      mha.scaled_dot_product_attention_varlen_vjp)


def singles_and_pairs(heads, sequences):
    """No option, each value of each, and every pair of two."""
    values = option_values(np.random.default_rng(3), heads, sequences)
    cases = [{}] + [{name: value} for name, known in values.items() for value in known]
    cases += [{first: values[first][0], second: values[second][-1]}
              for first, second in filter(fit_together, itertools.combinations(values, 2))]
    return [case | {"rng": 11} if "dropout" in case else case for case in cases]


def assert_bits_of_one_by_one(batch, options, threads=(1, 2, 5)):
    rng = np.random.default_rng(1)
    query, _, value = batch[:3]
    wanted = one_by_one(*batch, **options)
    grad_output = rng.standard_normal((*query.shape[:2], value.shape[2])).astype(query.dtype)
    grad_lse = rng.standard_normal(query.shape[1::-1]).astype(dtype_of_lse(query))
    wanted_gradients = gradients_one_by_one(*batch, grad_output, grad_lse, **options)
    of_all = None
    for number in threads:
        with mha.threads(number):
            got = attend(*batch, return_lse=True, **options)
            output, pullback = attend_vjp(*batch, **options)
            gradients = pullback(grad_output, grad_lse)
        assert np.array_equal(output, wanted[0])
        for ours, theirs in zip((*got, *gradients[:3]), (*wanted, *wanted_gradients), strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs), (options, number)
        sums = [getattr(gradients, name) for name in OF_ALL if options.get(name) is not None]
        of_all = sums if of_all is None else of_all
        assert all(map(np.array_equal, sums, of_all)), (options, number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_and_pair_gives_the_bits_of_one_by_one(dtype):
    rng = np.random.default_rng(0)
    query_lengths, key_lengths = [7, 0, 63, 1, 9, 4, 0, 65], [9, 7, 65, 129, 0, 300, 0, 63]
    batch = ragged(rng, query_lengths, key_lengths, dtype=dtype)
    for options in singles_and_pairs(4, len(query_lengths)):
        assert_bits_of_one_by_one(batch, options, threads=(1, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_random_lengths_give_the_bits_of_one_by_one(seed, dtype):
    rng = np.random.default_rng(seed)
    query_lengths = rng.permutation(LENGTHS)
    key_lengths = query_lengths if seed % 2 else rng.permutation(LENGTHS)
    heads, kv_heads = ((2, 2), (6, 2), (3, 1), (1, 1))[seed]
    batch = ragged(rng, query_lengths, key_lengths, heads, kv_heads, (16, 33, 64, 5)[seed],
                   (16, 7, 64, 40)[seed], dtype)
    for options in ({}, {"causal": True}, {"window": (100, 3), "alibi": np.ones(heads)}):
        assert_bits_of_one_by_one(batch, options)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LENGTHS[:7]), st.sampled_from(LENGTHS[:7])), max_size=6),
       st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 33), st.integers(0, 9),
       st.booleans(), st.sampled_from(DTYPES), st.sampled_from([1, 2, 5]))
def test_any_batch_gives_the_bits_of_one_by_one(lengths, heads, head_dim, value_head_dim, causal,
                                               dtype, threads):
    rng = np.random.default_rng(0)
    batch = ragged(rng, [one for one, _ in lengths], [other for _, other in lengths], *heads,
                   head_dim, value_head_dim, dtype)
    assert_bits_of_one_by_one(batch, {"causal": causal, "sinks": np.ones(heads[0])}, [threads])


def test_heads_that_are_copied_side_by_side():
    """Rows of one head lie apart here: from 512 on their keys are copied, a sequence at a time."""
    rng = np.random.default_rng(0)
    batch = ragged(rng, [600, 30, 513, 700], [700, 600, 512, 1030], 4, 2, 16, 16, np.float32)
    assert_bits_of_one_by_one(batch, {})


def test_more_blocks_of_queries_than_are_added_up_at_once():
    rng = np.random.default_rng(0)
    batch = ragged(rng, [1700, 3, 90], [40, 50, 60], 2, 1, 8, 8, np.float32)
    assert_bits_of_one_by_one(batch, {"relative_bias": rng.standard_normal((2, 7))})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gate_of_accuracy(dtype):
    rng = np.random.default_rng(2)
    batch = ragged(rng, [7, 0, 33, 1, 9], [9, 7, 35, 70, 0], dtype=dtype)
    starts = dict(zip(("query_starts", "key_starts"), batch[3:], strict=True))
    for options in singles_and_pairs(4, 5):
        options = {name: np.asarray(value, dtype) if name in OF_ALL else value
                   for name, value in options.items()} | starts
        assert_accurate(attend, reference.scaled_dot_product_attention_varlen, batch[:3],
                        options | {"return_lse": True})
        arguments = dict(zip(("query", "key", "value"), batch[:3], strict=True))
        arguments |= {name: options.pop(name) for name in OF_ALL if name in options}
        check_gradients(rng, arguments, options, dtype)


def check_gradients(rng, arguments, options, dtype):
    output, pullback = attend_vjp(**arguments, **options)
    cotangents = [rng.standard_normal(shape).astype(dtype)
                  for shape in (output.shape, output.shape[1::-1])]
    got = pullback(*cotangents)
    of_reference = reference.scaled_dot_product_attention_varlen_vjp
    exact = of_reference(**dict(zip(arguments, widened(arguments.values(), dtype), strict=True)),
                         **options)[1](*widened(cotangents, dtype))
    plain = of_reference(**arguments, **options)[1](*cotangents)
    for name in got._fields:
        assert (getattr(got, name) is None) == (name not in arguments)
    for name in arguments:
        assert getattr(got, name).dtype == dtype
        ours, numpys = (relative_error(found, exact[name])
                        for found in (getattr(got, name), plain[name]))
        assert ours <= max(2 * numpys, 2 * FLOOR[np.dtype(dtype)]), (name, ours, numpys, options)


def test_gradients_of_the_reference_by_complex_steps():
    rng = np.random.default_rng(5)
    *arrays, query_starts, key_starts = ragged(rng, [2, 0, 3], [3, 1, 2], 2, 1, 3, 2)
    shared = {"alibi": rng.uniform(0, 1, 2), "relative_bias": rng.standard_normal((2, 3)),
              "sinks": rng.standard_normal(2)}
    for options in ({}, {"causal": True}, {"softcap": 1.5, "dropout": 0.3, "rng": 2}):
        arguments = dict(zip(("query", "key", "value"), arrays, strict=True)) | shared
        fixed = {"query_starts": query_starts, "key_starts": key_starts, **options}
        output, pullback = attend_vjp(**arguments, **fixed)
        grad_output = rng.standard_normal(output.shape)
        grad_lse = rng.standard_normal(output.shape[1::-1])
        gradients = pullback(grad_output, grad_lse)
        for name, array in arguments.items():
            exact = np.empty(array.shape)
            for index in np.ndindex(array.shape):
                stepped = array.astype(complex)
                stepped[index] += 1e-200j
                changed, lse = reference.scaled_dot_product_attention_varlen(
                    **{**arguments, name: stepped}, return_lse=True, **fixed)
                loss = (changed * grad_output).sum() + (lse * grad_lse).sum()
                exact[index] = loss.imag / 1e-200
            assert relative_error(getattr(gradients, name), exact) < 1e-10, (name, options)


def test_sequences_of_equal_length_are_a_batch():
    """Also in what is summed over them."""
    rng = np.random.default_rng(0)
    query, key, value, starts, key_starts = ragged(rng, [40] * 3, [300] * 3, dtype=np.float32)
    options = {"alibi": rng.uniform(0, 1, 4), "relative_bias": rng.standard_normal((1, 21)),
               "sinks": rng.standard_normal(4), "dropout": 0.2, "rng": 3}

    def batched(array):
        return np.swapaxes(array.reshape(3, -1, *array.shape[1:]), 1, 2)

    output, pullback = attend_vjp(query, key, value, starts, key_starts, **options)
    wanted, of_batch = mha.scaled_dot_product_attention_vjp(*map(batched, (query, key, value)),
                                                            **options)
    assert np.array_equal(batched(output), wanted)
    grad = rng.standard_normal(output.shape).astype(np.float32)
    gradients, wanted_gradients = pullback(grad), of_batch(batched(grad))
    for name in gradients._fields:
        got = getattr(gradients, name)
        got = batched(got) if name in ("query", "key", "value") else got
        assert np.array_equal(got, getattr(wanted_gradients, name)), name


def test_what_is_empty():
    none = np.zeros((0, 2, 4), np.float32)
    sinks = np.array([1.0, -np.inf], np.float32)
    for starts in ([0], [0, 0, 0]):
        output, lse = attend(none, none, none, starts, return_lse=True)
        assert output.shape == (0, 2, 4)
        assert lse.shape == (2, 0)
    query = np.ones((3, 2, 4), np.float32)
    output, pullback = attend_vjp(query, none, none, [0, 1, 3], [0, 0, 0], sinks=sinks)
    _, lse = attend(query, none, none, [0, 1, 3], [0, 0, 0], sinks=sinks, return_lse=True)
    assert not output.any()
    assert np.array_equal(lse, np.broadcast_to(sinks[:, None], (2, 3)))
    gradients = pullback(output, np.ones((2, 3), np.float32))
    assert not gradients.query.any()
    assert np.array_equal(gradients.sinks, [3, 0])
    output, pullback = attend_vjp(none, query, query, [0, 0], [0, 3], sinks=sinks,
                                  relative_bias=np.ones((2, 3)))
    for name in ("key", "value", "sinks", "relative_bias"):
        assert not getattr(pullback(output), name).any()
    output, pullback = attend_vjp(query, query, query, [0, 3, 3], [0, 0, 3], alibi=[1, 1])
    assert not any(gradient.any() for gradient in pullback(np.ones_like(output))
                   if gradient is not None)


def test_kinds_of_starts():
    rng = np.random.default_rng(0)
    query, key, value, starts, _ = ragged(rng, [3, 0, 6])
    wanted = attend(query, key, value, starts)
    for kind in (list, tuple, np.int32, np.uint64, np.int8):
        given = kind(starts) if kind in (list, tuple) else starts.astype(kind)
        assert np.array_equal(attend(query, key, value, given, given), wanted)
    backwards = starts[::-1].copy()[::-1]
    assert np.array_equal(attend(query, key, value, backwards), wanted)


def test_strides_of_inputs():
    """Rows of query, key and value side by side, as one projection leaves them."""
    rng = np.random.default_rng(0)
    joined = rng.standard_normal((50, 3, 4, 8)).astype(np.float32)
    parts = [joined[:, i] for i in range(3)]
    starts = [0, 20, 50]
    assert np.array_equal(attend(*parts, starts),
                          attend(*map(np.ascontiguousarray, parts), starts))
    flipped = [part[::-1, ::-1] for part in parts]
    assert np.array_equal(attend(*flipped, starts),
                          attend(*map(np.ascontiguousarray, flipped), starts))


def test_starts_that_change_while_others_are_converted():
    query = np.ones((6, 2, 4))
    starts = np.array([0, 2, 6])

    class Changing:
        """Turns into an array, and spoils the starts."""

        def __array__(self, dtype=None, copy=None):
            starts[:] = 10**15
            return np.ones(2)

    with pytest.raises(ValueError, match=r"query_starts: got 1000000000000000 at first, wanted 0"):
        attend(query, query, query, starts, alibi=Changing())


def test_the_starts_of_a_pullback_are_its_own():
    rng = np.random.default_rng(0)
    query, key, value, starts, _ = ragged(rng, [3, 4])
    output, pullback = attend_vjp(query, key, value, starts)
    wanted = pullback(output)
    starts[:] = 10**15
    assert np.array_equal(pullback(output).query, wanted.query)


def test_a_generator_gives_one_number_a_call():
    rng = np.random.default_rng(0)
    batch = ragged(rng, [30, 40])
    one, other = np.random.default_rng(7), np.random.default_rng(7)
    seed = int(other.integers(2**64, dtype=np.uint64))
    assert np.array_equal(attend(*batch, dropout=0.5, rng=one),
                          attend(*batch, dropout=0.5, rng=seed))
    assert one.bit_generator.state == other.bit_generator.state


BAD = [
    (lambda q: attend(q, q, q, [1, 6]), ValueError, "query_starts: got 1 at first, wanted 0"),
    (lambda q: attend(q, q, q, [0, 4, 3, 6]), ValueError,
     "query_starts: got 3 after 4, wanted starts that never fall"),
    (lambda q: attend(q, q, q, [0, 5]), ValueError,
     "query_starts: got 5 at last, wanted 6, the number of rows of query (total_len, heads, head"),
    (lambda q: attend(q, q, q, np.array([0, 2**64 - 1], np.uint64)), ValueError,
     "query_starts: got 9223372036854775807 at last, wanted 6"),
    (lambda q: attend(q, q, q, [0, -(2**63), 6]), ValueError,
     "query_starts: got -9223372036854775808 after 0, wanted"),
    (lambda q: attend(q, q, q, []), ValueError,
     "query_starts: got shape (0,), wanted (sequences + 1,)"),
    (lambda q: attend(q, q, q, [[0, 6]]), ValueError, "query_starts: got shape (1, 2), wanted"),
    (lambda q: attend(q, q, q, 6), ValueError, "query_starts: got shape (), wanted"),
    (lambda q: attend(q, q, q, None), TypeError, "query_starts: got None, wanted an array"),
    (lambda q: attend(q, q, q, [0.0, 6.0]), TypeError,
     "query_starts: got an array of float64, wanted integers"),
    (lambda q: attend(q, q, q, "06"), TypeError, "query_starts: got an array of"),
    (lambda q: attend(q, q, q, [0, 6], [0, 3, 6]), ValueError,
     "key_starts: got shape (3,), wanted (2,) as query_starts has"),
    (lambda q: attend(q, q, q, [0, 6], [0, 5]), ValueError,
     "key_starts: got 5 at last, wanted 6, the number of rows of key"),
    (lambda q: attend(q, q[:4], q[:4], [0, 6]), ValueError,
     "key_starts: got None, wanted where the sequences begin among key's 4 rows"),
    (lambda q: attend(q[0], q, q, [0, 6]), ValueError,
     "query: got shape (4, 8), wanted (total_len, heads, dim)"),
    (lambda q: attend(q, q[None], q, [0, 6]), ValueError, "key: got shape (1, 6, 4, 8), wanted"),
    (lambda q: attend(q, q[:, :3], q[:, :3], [0, 6]), ValueError,
     "key: got 3 heads, wanted a divisor of query's 4"),
    (lambda q: attend(q, q, q[:, :2], [0, 6]), ValueError, "value: got 2 heads, wanted 4"),
    (lambda q: attend(q, q[..., :3], q, [0, 6]), ValueError, "key: got head_dim 3, wanted 8"),
    (lambda q: attend(q, q, q[:5], [0, 6]), ValueError, "value: got 5 rows, wanted 6 as key has"),
    (lambda q: attend(q > 0, q > 0, q > 0, [0, 6]), TypeError, "query: got an array of bool"),
    (lambda q: attend(q, q, q, [0, 6], query_offset=[1, 2]), ValueError,
     "query_offset: got shape (2,), wanted an int or (1,)"),
    (lambda q: attend(q, q, q, [0, 6], alibi=[1.0]), ValueError,
     "alibi: got shape (1,), wanted (4,)"),
    (lambda q: attend(q, q, q, [0, 6], sinks=np.ones(4), empty_rows="uniform"), ValueError,
     "empty_rows: got"),
    (lambda q: attend(q, q, q, [0, 6], mask=np.ones((6, 6), bool)), TypeError,
     "mask: got a keyword that scaled_dot_product_attention_varlen does not have, wanted causal=,"),
    (lambda q: attend(q, q, q, [0, 6], bias=np.ones((6, 6))), TypeError,
     "bias: got a keyword that scaled_dot_product_attention_varlen does not have, wanted causal=,"),
    (lambda q: attend(q, q, q, [0, 6], key_lengths=[6]), TypeError,
     "key_lengths: got a keyword that scaled_dot_product_attention_varlen does not have, wanted"
     " query_starts= and key_starts="),
    (lambda q: attend(q, q, q, [0, 6], return_weights=True), TypeError, "return_weights: got"),
    (lambda q: attend(q, q, q, cu_seqlens_q=[0, 6]), TypeError, ""),
    (lambda q: attend(q, q, q, [0, 6], return_lse=1), TypeError, "return_lse: got int, wanted"),
    (lambda q: attend_vjp(q, q, q, [0, 6], wrt=["bias"]), ValueError, "wrt: got 'bias', wanted"),
    (lambda q: attend_vjp(q, q, q, [0, 6])[1](np.ones((4, 6, 8))), ValueError,
     "grad_output: got shape (4, 6, 8), wanted (6, 4, 8)"),
    (lambda q: attend_vjp(q, q, q, [0, 6])[1](q, np.ones((6, 4))), ValueError,
     "grad_lse: got shape (6, 4), wanted (4, 6)"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index):
    call, error, message = BAD[index]
    with pytest.raises(error) as raised:
        call(np.ones((6, 4, 8), np.float32))
    assert str(raised.value).startswith(message), raised.value


def test_names_of_wrt():
    query = np.ones((6, 4, 8))
    _, pullback = attend_vjp(query, query, query, starts_of([2, 4]), wrt=["key"], sinks=np.ones(4))
    gradients = pullback(query)
    assert [name for name in gradients._fields if getattr(gradients, name) is not None] == ["key"]
