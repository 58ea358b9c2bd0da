"""Attention over dask arrays against one call, for random cuts of every axis and every option."""

import itertools
import pickle
import re
import time

import dask
import dask.array as da
import numpy as np
import pytest
from agreement import FLOOR, relative_error
from option_cases import LEARNED, fit_together, option_cases

import mha
from mha import reference
from mha.dask import scaled_dot_product_attention, scaled_dot_product_attention_vjp

NAMES = ("query", "key", "value")


def random_cut(rng, size, most=4):
    """Chunks of an axis, none of them empty unless the axis is."""
    count = int(rng.integers(0, min(most, max(size, 1))))
    inner = rng.choice(np.arange(1, size), count, replace=False) if size > 1 and count else []
    return tuple(int(part) for part in np.diff([0, *sorted(inner), size]))


def cut(rng, arrays):
    """query, key and value as dask arrays, cut at random where they may be."""
    query, key, _ = arrays
    batch_axes = query.ndim - 3 if query.ndim >= 4 else query.ndim - 2
    batch = tuple(random_cut(rng, size) for size in query.shape[:batch_axes])
    keys = random_cut(rng, key.shape[-2])
    chunks = []
    for array in arrays:
        heads = (random_cut(rng, array.shape[-3]),) if array.ndim >= 4 else ()
        rows = random_cut(rng, array.shape[-2]) if array is query else keys
        chunks.append((*batch, *heads, rows, array.shape[-1:]))
    return [da.from_array(array, chunks=of_array)
            for array, of_array in zip(arrays, chunks, strict=True)]


def with_options(rng, options, key_len, query_len):
    """Some of the arrays as dask arrays, cut anyhow; a seed where there is dropout."""
    given = dict(options)
    if "dropout" in given:
        given["rng"] = 7
    if "key_lengths" in given and query_len != key_len:
        given.setdefault("query_offset", 1)
    as_dask = dict(given)
    for name in ("mask", "bias", "key_lengths", "alibi", "sinks", "relative_bias"):
        if name in given and rng.random() < 0.5:
            array = np.asarray(given[name])
            as_dask[name] = da.from_array(array, chunks=tuple(
                random_cut(rng, size) for size in array.shape))
    return given, as_dask


def cases():
    rng = np.random.default_rng(0)
    options = option_cases(rng, (3,), 6, 70, 200)
    options["dropout"] = [0.3]
    singles = [{}] + [{name: value} for name, values in options.items() for value in values]
    pairs = [{one: options[one][0], other: options[other][-1]}
             for one, other in filter(fit_together, itertools.combinations(options, 2))
             if {"alibi", "query_offset"} != {one, other}]
    return singles + pairs


def check(rng, dtype, options):
    query = rng.standard_normal((3, 6, 70, 8)).astype(dtype)
    key, value = (rng.standard_normal((3, 2, 200, d)).astype(dtype) for d in (8, 5))
    arrays = (query, key, value)
    given, as_dask = with_options(rng, options, 200, 70)
    wide = np.float64 if dtype == np.float32 else np.longdouble
    learned = {name: np.asarray(given.pop(name), dtype) for name in LEARNED if name in given}
    exact_arguments = {name: array.astype(wide) for name, array in (
        dict(zip(NAMES, arrays, strict=True)) | learned).items()}
    plain_arguments = dict(zip(NAMES, arrays, strict=True)) | learned

    got = dask.compute(*scaled_dot_product_attention(
        *cut(rng, arrays), return_weights=True, return_lse=True, **as_dask))
    wanted, plain = (reference.scaled_dot_product_attention(
        **arguments, **given, return_weights=True, return_lse=True)
        for arguments in (exact_arguments, plain_arguments))
    lses = got[2][np.isfinite(got[2])]
    floor = 2 * FLOOR[np.dtype(dtype)] * max(1, float(np.abs(lses).max(initial=0)) / 16)
    for ours, numpys, exact in zip(got, plain, wanted, strict=True):
        assert ours.dtype == dtype
        bound = max(2 * relative_error(numpys, exact), floor)
        assert relative_error(ours, exact) <= bound, (relative_error(ours, exact), bound)

    grads = [rng.standard_normal(got[at].shape).astype(dtype) for at in (0, 2)]
    output, pullback = scaled_dot_product_attention_vjp(*cut(rng, arrays), **as_dask)
    given_grads = [da.from_array(grad, chunks=tuple(random_cut(rng, n) for n in grad.shape))
                   for grad in grads]
    gradients = pullback(*given_grads)
    names = [*NAMES, *learned]
    assert [name for name, gradient in gradients._asdict().items() if gradient is not None] == [
        name for name in gradients._fields if name in names]
    output, *found = dask.compute(output, *(getattr(gradients, name) for name in names))
    assert relative_error(output, wanted[0]) <= max(2 * relative_error(plain[0], wanted[0]), floor)
    exact, plain = (
        reference.scaled_dot_product_attention_vjp(**arguments, **given)[1](
            *(grad.astype(kind) for grad in grads))
        for arguments, kind in ((exact_arguments, wide), (plain_arguments, dtype)))
    for name, ours in zip(names, found, strict=True):
        bound = max(2 * relative_error(plain[name], exact[name]), floor)
        assert relative_error(ours, exact[name]) <= bound, (name, bound)


@pytest.mark.thorough
@pytest.mark.parametrize("case", range(len(cases())))
def test_every_option_and_pairs(case):
    rng = np.random.default_rng(case)
    for dtype in (np.float32,) if case % 4 else (np.float32, np.float64):
        check(rng, dtype, cases()[case])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100))
def test_random_shapes(seed):
    """Of any number of axes, against one call: nearly its bits."""
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(2, 6))
    batch = tuple(int(n) for n in rng.integers(1, 4, max(ndim - 3, int(ndim == 3))))
    kv_heads, group = (int(n) for n in rng.integers(1, 4, 2))
    query_len, key_len, head_dim, value_head_dim = (int(n) for n in rng.integers(1, 60, 4))
    heads = ((kv_heads * group,), (kv_heads,)) if ndim >= 4 else ((), ())
    query = rng.standard_normal((*batch, *heads[0], query_len, head_dim))
    key, value = (rng.standard_normal((*batch, *heads[1], key_len, d))
                  for d in (head_dim, value_head_dim))
    options = {}
    for name, value_of in {
            "causal": True, "window": (5, 9), "dropout": 0.4, "softcap": 3.0,
            "empty_rows": "uniform", "key_lengths": rng.integers(0, key_len + 1, batch),
            "mask": rng.random((query_len, key_len)) < 0.8}.items():
        if rng.random() < 0.3:
            options[name] = value_of
    options["query_offset"] = int(rng.integers(-5, key_len))
    if "dropout" in options:
        options["rng"] = seed
    got = dask.compute(*scaled_dot_product_attention(
        *cut(rng, (query, key, value)), return_weights=True, return_lse=True, **options))
    wanted = mha.scaled_dot_product_attention(query, key, value, return_weights=True,
                                              return_lse=True, **options)
    for ours, whole in zip(got, wanted, strict=True):
        assert relative_error(ours, whole) < 1e-13
    grad = rng.standard_normal(wanted[0].shape)
    _, pullback = scaled_dot_product_attention_vjp(*cut(rng, (query, key, value)), **options)
    found = dask.compute(*pullback(grad)[:3])
    whole = mha.scaled_dot_product_attention_vjp(query, key, value, **options)[1](grad)
    for ours, one in zip(found, whole[:3], strict=True):
        assert relative_error(ours, one) < 1e-12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_rounded_once(dtype):
    """The output is that of float32 arrays, rounded: not the mean of rounded ones."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    halves = [rng.standard_normal((2, 3, 100, 8)).astype(dtype) for _ in NAMES]
    wide = [half.astype(np.float32) for half in halves]
    cuts = ((1, 1), (3,), (30, 70), (8,))
    of_halves, of_floats = ([da.from_array(array, chunks=cuts) for array in arrays]
                            for arrays in (halves, wide))
    got, lse = dask.compute(*scaled_dot_product_attention(*of_halves, return_lse=True))
    wanted = scaled_dot_product_attention(*of_floats).compute()
    assert got.dtype == dtype
    assert lse.dtype == np.float32
    assert np.array_equal(got, wanted.astype(dtype))
    grad = rng.standard_normal(got.shape).astype(dtype)
    for one, other in zip(
            dask.compute(*scaled_dot_product_attention_vjp(*of_halves)[1](grad)[:3]),
            dask.compute(*scaled_dot_product_attention_vjp(*of_floats)[1](
                grad.astype(np.float32))[:3]), strict=True):
        assert one.dtype == dtype
        assert np.array_equal(one, other.astype(dtype))


def test_the_same_bits_whatever_runs_it():
    rng = np.random.default_rng(0)
    x = da.from_array(rng.standard_normal((2, 4, 300, 16)).astype(np.float32),
                      chunks=(1, 2, 50, 16))
    output, pullback = scaled_dot_product_attention_vjp(x, x, x, causal=True, dropout=0.2, rng=1,
                                                        split_every=3)
    wanted = (output, *pullback(x)[:3])
    bits = dask.compute(*wanted, scheduler="sync")
    for num_workers in (1, 2, 7):
        for ours, others in zip(dask.compute(*wanted, scheduler="threads", num_workers=num_workers),
                                bits, strict=True):
            assert np.array_equal(ours, others)


def number_of_parts(array):
    return sum(str(key[0]).startswith("mha-part") for key in array.__dask_graph__()
               if isinstance(key, tuple))


def test_pairs_that_nobody_sees_have_no_task():
    x = da.zeros((64 * 8, 4), chunks=(8, 4))
    causal = scaled_dot_product_attention(x, x, x, causal=True)
    # The first block of queries sees one chunk alone, whose task is the block's.
    assert number_of_parts(causal) + 1 == 64 * 65 // 2 <= 0.55 * 64 * 64
    window = scaled_dot_product_attention(x, x, x, window=(8, 0))
    assert number_of_parts(window) + 1 == 63 * 3 - 62
    lengths = scaled_dot_product_attention(x[None], x[None], x[None], key_lengths=[20])
    assert number_of_parts(lengths) == 64 * 3
    nowhere = scaled_dot_product_attention(x, x, x, causal=True, query_offset=-10**30)
    assert number_of_parts(nowhere) == 0
    assert not nowhere.compute().any()


@pytest.mark.thorough
def test_a_hundred_thousand_tasks_are_written_in_seconds():
    x = da.zeros((1, 1, 317 * 8, 4), chunks=(1, 1, 8, 4))
    output = scaled_dot_product_attention(x, x, x)
    assert not any(layer.is_materialized() for name, layer in output.dask.layers.items()
                   if name.startswith("mha"))
    assert len(pickle.dumps(output.dask)) < 20_000  # what goes to a scheduler
    begin = time.process_time()
    assert len(dict(output.__dask_graph__())) > 100_000
    assert time.process_time() - begin < 30  # 3 s; the figure is benchmarks/dask_tasks.py's


X = da.zeros((2, 3, 40, 8), chunks=(1, 3, 10, 8))


@pytest.mark.parametrize(("changed", "message"), [
    ({"query": X.rechunk({-1: 4})}, r"query: got 2 chunks along head_dim.*query.rechunk\({-1: -1}"),
    ({"key": X[X[:, 0, 0, 0] == 0]}, "key: got chunks of unknown sizes.*compute_chunk_sizes"),
    ({"key": X.rechunk({0: 2})}, r"key: .* along batch axis 0, .* key.rechunk\({0: query.chunks"),
    ({"value": X.rechunk({2: 20})}, r"value: .* along the keys, .* value.rechunk\({-2: key"),
    ({"value": X[:, :, :30]}, "value: got 30 rows, wanted 40 as key has"),
    ({"key": X[:, :2]}, "value: got 3 heads, wanted 2 as key has"),
    ({"key": X[:, :2], "value": X[:, :2]}, "query: got 3 heads, wanted a multiple of 2"),
    ({"key": X[0]}, "key: got 3 axes, wanted 4, as query has"),
    ({"key": X[..., :4]}, "key: got head_dim 4, wanted 8"),
    ({"key": X[:1]}, r"key: got the batch axes \(1,\), wanted \(2,\)"),
    ({"query": da.zeros(3)}, "query: got 1 axes"),
    ({"query": X.astype(complex)}, "query: .*complex"),
    ({"query": None}, "query: "),
    ({"mask": np.ones((3, 1))}, "mask: got an array of float64, wanted bool"),
    ({"mask": np.ones((5, 1), bool)}, r"mask: got shape \(5, 1\), wanted one that broadcasts"),
    ({"bias": np.ones((1, 1, 1, 1, 40))}, r"bias: got shape"),
    ({"alibi": np.ones(2)}, r"alibi: got shape \(2,\), wanted \(3,\)"),
    ({"relative_bias": np.ones((3, 4))}, "relative_bias: got shape"),
    ({"key_lengths": [1, 2, 3]}, r"key_lengths: got shape \(3,\), wanted \(2,\)"),
    ({"key_lengths": [1, 41]}, r"key_lengths: got 41, wanted lengths in \[0, 40\]"),
    ({"key_lengths": [0.5, 1]}, "key_lengths: got an array of float64, wanted ints"),
    ({"query_offset": [1, 2, 3]}, r"query_offset: got shape \(3,\), wanted an int or \(2,\)"),
    ({"query_offset": 0.5}, "query_offset: got float64"),
    ({"softcap": -1}, "softcap: got -1"), ({"window": 3}, "window: got int"),
    ({"dropout": 1.5}, "dropout: got 1.5"), ({"dropout": 0.5, "rng": "seed"}, "rng"),
    ({"empty_rows": "none"}, "empty_rows: got 'none'"), ({"causal": 1}, "causal: got int"),
    ({"empty_rows": "uniform", "sinks": np.zeros(3)}, 'empty_rows: got "uniform" with sinks'),
    ({"split_every": 1}, "split_every: got 1, wanted at least 2"),
    ({"is_causal": True}, "is_causal: .*causal="),
])
@pytest.mark.parametrize("function", [scaled_dot_product_attention,
                                      scaled_dot_product_attention_vjp])
def test_what_is_wrong_is_said_before_anything_runs(function, changed, message):
    arguments = dict.fromkeys(NAMES, X)
    with pytest.raises((TypeError, ValueError), match=message):
        function(**arguments | changed)


def test_errors_of_the_pullback():
    _, pullback = scaled_dot_product_attention_vjp(X, X, X)
    with pytest.raises(ValueError, match=r"grad_output: got shape \(2, 3\), wanted \(2, 3, 40, "):
        pullback(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"grad_lse: got shape \(2, 3, 40, 8\), wanted"):
        pullback(X, X)
    with pytest.raises(ValueError, match="wrt: got"):
        scaled_dot_product_attention_vjp(X, X, X, wrt=["W_q"])


def test_a_chunk_of_another_type_is_named():
    liar = X.map_blocks(lambda chunk: chunk.astype(np.float32), dtype=float)
    with pytest.raises(TypeError, match="value: got a chunk of float32, wanted float64") as error:
        scaled_dot_product_attention(X, X, liar).compute(scheduler="sync")
    (note,) = error.value.__notes__
    assert re.fullmatch("mha.dask: attention: batch [01], head 0, queries [0-3]*0 to [1-4]0, keys"
                        " [0-3]*0 to [1-4]0", note)


def test_lengths_that_are_known_late():
    lengths = da.from_array(np.array([1, 41]), chunks=1)
    with pytest.raises(ValueError, match=r"key_lengths: got 41, wanted lengths in \[0, 40\]"):
        scaled_dot_product_attention(X, X, X, key_lengths=lengths).compute(scheduler="sync")


def test_numpy_arrays_are_taken():
    x = np.random.default_rng(0).standard_normal((2, 3, 40, 8))
    wanted = mha.scaled_dot_product_attention(x, x, x)
    for arrays in ((x, X * 0 + x, X * 0 + x), (X * 0 + x, x, x), (x, x, x)):
        got = scaled_dot_product_attention(*arrays).compute()
        assert relative_error(got, wanted) < 1e-14
