"""Attention over dask arrays where it is easy to go wrong: options as a part has them, empty
chunks, arguments that change, graphs under persist()."""

import os
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from agreement import relative_error

import mha
from mha import reference
from mha.dask import scaled_dot_product_attention, scaled_dot_product_attention_vjp

X = da.zeros((2, 3, 40, 8), chunks=(1, 3, 10, 8))


def random_inputs(*shapes, dtype=np.float64):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int8, np.int16])
@pytest.mark.parametrize("is_late", [False, True])
def test_lengths_of_narrow_and_unsigned_types(dtype, is_late):
    (x,) = random_inputs((2, 1, 600, 4))
    lengths = np.array([100, 120], dtype)
    cut = da.from_array(x, chunks=(2, 1, 90, 4))
    given = da.from_array(lengths, chunks=1) if is_late else lengths
    got = scaled_dot_product_attention(cut, cut, cut, key_lengths=given).compute()
    wanted = mha.scaled_dot_product_attention(x, x, x, key_lengths=lengths)
    assert relative_error(got, wanted) < 1e-13


@pytest.mark.parametrize("batch", [(2, 0), (0, 2), (1, 0, 1)])
def test_empty_chunks_of_the_batch(batch):
    (x,) = random_inputs((2, 1, 30, 4))
    cut = da.concatenate([da.from_array(x[:sum(batch[:i + 1])][sum(batch[:i]):], chunks=-1)
                          for i in range(len(batch))]).rechunk((batch, 1, 7, 4))
    got = scaled_dot_product_attention(cut, cut, cut, dropout=0.5, rng=3).compute()
    wanted = mha.scaled_dot_product_attention(x, x, x, dropout=0.5, rng=3)
    assert relative_error(got, wanted) < 1e-13


@pytest.mark.parametrize("shapes", [
    ((1, 0, 4, 8), (1, 2, 4, 8)), ((1, 0, 4, 8), (1, 0, 4, 8)), ((0, 2, 4, 8), (0, 2, 4, 8)),
    ((0, 4, 2, 4, 8), (0, 4, 2, 4, 8)), ((2, 2, 0, 8), (2, 2, 5, 8)), ((2, 2, 5, 8), (2, 2, 0, 8))])
@pytest.mark.parametrize("empty_rows", ["zeros", "uniform"])
def test_sizes_of_0(shapes, empty_rows):
    query, key = map(np.ones, shapes)
    options = {"empty_rows": empty_rows, "dropout": 0.5, "rng": 1}
    wanted, pullback = mha.scaled_dot_product_attention_vjp(query, key, key, **options)
    output, of_dask = scaled_dot_product_attention_vjp(
        *(da.from_array(array, chunks=tuple(max(n // 2, 1) for n in array.shape[:-1])
                        + array.shape[-1:]) for array in (query, key, key)), **options)
    assert np.array_equal(output.compute(), wanted)
    for ours, one in zip(dask.compute(*of_dask(np.ones(wanted.shape))[:3]),
                         pullback(np.ones(wanted.shape))[:3], strict=True):
        assert ours.shape == one.shape
        assert np.allclose(ours, one)


def test_arguments_that_change_before_compute():
    (x,) = random_inputs((1, 20, 4))
    cut = da.from_array(x, chunks=(1, 6, 4))
    window, lengths, offsets = [3, 1], np.array([15]), [0, 0, 2, 5]
    options = {"window": window, "key_lengths": lengths, "dropout_offsets": offsets}
    wanted = mha.scaled_dot_product_attention(x, x, x, **options, dropout=0.5, rng=1)
    late = scaled_dot_product_attention(cut, cut, cut, **options, dropout=0.5, rng=1)
    window[0], lengths[0], offsets[3] = 0, 1, 0
    assert relative_error(late.compute(), wanted) < 1e-13
    other = scaled_dot_product_attention(cut, cut, cut, **options, dropout=0.5, rng=1)
    assert other.name != late.name


def test_ints_of_numpy():
    (x,) = random_inputs((1, 600, 4))
    cut = da.from_array(x, chunks=(1, 200, 4))
    for options in ({"window": (np.int8(8), np.uint8(3))}, {"query_offset": np.int8(-3)},
                    {"dropout": 0.5, "rng": 1, "dropout_offsets": (0, 0, 0, np.uint8(255))}):
        got = scaled_dot_product_attention(cut, cut, cut, **options).compute()
        wanted = mha.scaled_dot_product_attention(x, x, x, **options)
        assert relative_error(got, wanted) < 1e-13


def test_generators():
    """None draws without dropout, one draw with it, none where the call fails."""
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    _, pullback = scaled_dot_product_attention_vjp(X, X, X, rng=generator)
    dask.compute(*pullback(X)[:3])
    with pytest.raises(ValueError, match="softcap"):
        scaled_dot_product_attention(X, X, X, dropout=0.5, rng=generator, softcap=-1)
    with pytest.raises(ValueError, match="mask"):
        scaled_dot_product_attention(X, X, X, dropout=0.5, rng=generator,
                                     mask=np.ones((7, 7), bool))
    assert generator.bit_generator.state == before
    scaled_dot_product_attention(X, X, X, dropout=0.5, rng=generator)
    assert generator.bit_generator.state != before


@pytest.mark.parametrize("kind", [complex, object, "U1", "M8[s]"])
def test_gradients_of_a_type_that_is_none(kind):
    _, pullback = scaled_dot_product_attention_vjp(X, X, X)
    with pytest.raises(TypeError, match="grad_output: got an array of"):
        pullback(da.from_array(np.zeros(X.shape, kind), chunks=X.shape))
    with pytest.raises(TypeError, match="grad_lse: got an array of"):
        pullback(X, da.from_array(np.zeros(X.shape[:-1], kind), chunks=X.shape[:-1]))
    with pytest.raises(TypeError, match="grad_output: got None"):
        pullback(None)


def test_lengths_with_positions_ask_for_an_offset():
    with pytest.raises(ValueError, match="query_offset: got None, wanted the position of query 0"):
        scaled_dot_product_attention(X[:, :, :30], X, X, causal=True, key_lengths=[3, 40])


@pytest.mark.parametrize("blocking", ["scores", "alibi"])
def test_rows_that_are_empty_by_their_scores(blocking):
    key = np.full((4, 1), -1e30 if blocking == "scores" else 1, np.float32)
    value = np.arange(4, dtype=np.float32)[:, None]
    query = np.full((1, 1), 1e30 if blocking == "scores" else 1, np.float32)
    options = {"causal": True, "query_offset": 0, "empty_rows": "uniform"}
    if blocking == "alibi":
        options |= {"alibi": [np.inf], "query_offset": 3}
    got = scaled_dot_product_attention(da.from_array(query), da.from_array(key, chunks=(2, 1)),
                                       da.from_array(value, chunks=(2, 1)), **options).compute()
    assert np.array_equal(got, mha.scaled_dot_product_attention(query, key, value, **options),
                          equal_nan=True)


def test_means_of_large_values():
    value = da.full((40, 2), 3e38, chunks=(10, 2), dtype=np.float32)
    got = scaled_dot_product_attention(value[:3], value, value, mask=np.zeros((1, 1), bool),
                                       empty_rows="uniform").compute()
    assert np.allclose(got, 3e38)


def test_types_of_gradients_are_those_of_one_call():
    x = np.ones((1, 2, 20, 4), np.float16)
    learned = {"bias": np.zeros((20, 20), np.float16), "alibi": np.ones(2, np.float16),
               "relative_bias": np.zeros((1, 3), np.float16), "sinks": np.zeros(2, np.float16)}
    for dtype in (np.float16, np.float32, ">f2"):
        inputs = [x.astype(dtype)] * 3
        wanted = mha.scaled_dot_product_attention_vjp(*inputs, **learned)[1](x)
        cut = [da.from_array(array, chunks=(1, 1, 7, 4)) for array in inputs]
        lazy = scaled_dot_product_attention_vjp(*cut, **learned)[1](x)
        for ours, declared, one in zip(dask.compute(*lazy), lazy, wanted, strict=True):
            assert ours.dtype == declared.dtype == one.dtype


def test_large_scores_lose_nothing_by_joins():
    """All scores are exact; lse in float32 would be wrong by 6e-5, and the weights with it."""
    rng = np.random.default_rng(0)
    query, key = rng.integers(-1, 2, (2, 1, 1000, 16)).astype(np.float32)
    query[..., 0], key[..., 0] = 1024, 1
    value, grad = rng.standard_normal((2, 1, 1000, 16)).astype(np.float32)
    inputs = [da.from_array(array, chunks=(1, 10, 16)) for array in (key, value)]
    options = {"scale": 1.0}
    query_cut = da.from_array(query, chunks=(1, 500, 16))
    output, weights = scaled_dot_product_attention(query_cut, *inputs, return_weights=True,
                                                   **options)
    _, pullback = scaled_dot_product_attention_vjp(query_cut, *inputs, **options)
    got = dask.compute(output, weights, *pullback(grad)[:3])
    exact = [array.astype(float) for array in (query, key, value)]
    wanted = reference.scaled_dot_product_attention(*exact, return_weights=True, **options)
    gradients = reference.scaled_dot_product_attention_vjp(*exact, **options)[1](grad.astype(float))
    for ours, one in zip(got, (*wanted, *(gradients[name] for name in ("query", "key", "value"))),
                         strict=True):
        assert relative_error(ours, one) < 2e-6


def test_a_chunk_of_another_shape_is_an_error():
    short = X.map_blocks(lambda chunk: chunk[:, :, :5], dtype=X.dtype)
    for arrays in ((short, X, X), (X, short, X), (X, short, short)):
        with pytest.raises(ValueError, match="got a chunk of 5 rows, wanted 10"):
            scaled_dot_product_attention(*arrays).compute(scheduler="sync")


@pytest.mark.thorough
@pytest.mark.parametrize("hash_seed", [0, 5, 8])
def test_gradients_of_a_persisted_output(hash_seed):
    """A set of layers comes in the order of this process's hashes."""
    code = """
import dask.array as da, mha.dask
q = da.random.default_rng(0).standard_normal((1, 2, 80, 8), chunks=(1, 2, 20, 8))
output, pullback = mha.dask.scaled_dot_product_attention_vjp(q, q, q, causal=True)
output = output.persist()
gradient = pullback(2 * (output - 1)).query
gradient.dask.validate()
assert gradient.compute().shape == (1, 2, 80, 8)
"""
    subprocess.run([sys.executable, "-c", code], check=True,
                   env={**os.environ, "PYTHONHASHSEED": str(hash_seed)})


def test_what_holds_a_dask_array_is_that_array():
    class Labelled:
        """As xarray's DataArray."""

        def __init__(self, data):
            self.data = data

        def __array__(self, *_, **__):
            raise AssertionError("nothing runs before compute()")

    output = scaled_dot_product_attention(Labelled(X), Labelled(X), X,
                                          mask=Labelled(da.ones((40, 40), dtype=bool)))
    assert output.chunks == X.chunks
    with pytest.raises(TypeError, match="query_offset: got a dask array"):
        scaled_dot_product_attention(X, X, X, query_offset=da.zeros(2, dtype=int))


def test_without_dask_the_rest_is_as_it_was():
    code = """
import sys, importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "dask" else find(name, *rest)
sys.modules["dask"] = sys.modules["dask.array"] = None
import inspect, mha
assert "dask" not in dir(mha) and not hasattr(mha, "dask")
inspect.getmembers(mha)
try:
    import mha.dask
except ImportError as error:
    assert "pip install" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
