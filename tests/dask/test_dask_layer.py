"""A layer over dask arrays against its own call."""

import dask
import dask.array as da
import numpy as np
import pytest
from agreement import relative_error
from test_dask_attention import random_cut

import mha
import mha.dask

LAYERS = {
    "plain": {}, "grouped": {"num_kv_heads": 2}, "no bias": {"use_bias": False},
    "rotary": {"rotary": mha.Rotary(8)}, "normed": {"qk_norm": "head", "rotary": mha.Rotary(8)},
    "width normed": {"qk_norm": "width"}, "sinks": {"sinks": True}, "window": {"window": (30, 0)},
    "alibi": {"alibi": mha.alibi_slopes(4)}, "relative": {"relative_bias": 5},
    "softcap": {"softcap": 3.0, "scale": 0.4}, "double": {"dtype": np.float64},
    "half": {"dtype": np.float16}, "dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer(kind):
    rng = np.random.default_rng(0)
    layer = mha.MultiHeadAttention(32, 4, rng=1, **LAYERS[kind])
    over_dask = mha.dask.MultiHeadAttention(layer)
    x = rng.standard_normal((3, 100, 32)).astype(layer.dtype)
    options = {"causal": True, "training": "dropout" in LAYERS[kind], "rng": 5}
    for _ in range(4):
        cut = da.from_array(x, chunks=(*(random_cut(rng, n) for n in x.shape[:2]), 32))
        got = dask.compute(*over_dask(cut, return_weights=True, return_lse=True, **options))
        wanted = layer(x, return_weights=True, return_lse=True, **options)
        bound = {2: 2e-3, 4: 4e-6, 8: 1e-13}[np.dtype(layer.dtype).itemsize]
        for ours, whole in zip(got, wanted, strict=True):
            assert ours.dtype == whole.dtype
            assert relative_error(ours.astype(float), whole.astype(float)) < bound


def test_cross_attention_masks_and_positions():
    rng = np.random.default_rng(0)
    layer = mha.MultiHeadAttention(32, 4, key_dim=20, value_dim=12, rotary=mha.Rotary(8), rng=1,
                                   dtype=np.float64)
    query, key, value = (rng.standard_normal((2, n, d)) for n, d in ((30, 32), (50, 20), (50, 12)))
    options = {"mask": rng.random((30, 50)) < 0.5, "positions": np.arange(100, 130),
               "key_positions": rng.integers(0, 99, (2, 50)), "key_lengths": [50, 20],
               "query_offset": 3}
    arrays = [da.from_array(array, chunks=(1, rows, -1))
              for array, rows in ((query, 7), (key, 20), (value, 20))]
    got = mha.dask.MultiHeadAttention(layer)(*arrays, **options).compute()
    assert relative_error(got, layer(query, key, value, **options)) < 1e-13


@pytest.mark.parametrize("batch", [2, 3])
def test_positions_along_several_axes(batch):
    rng = np.random.default_rng(0)
    layer = mha.MultiHeadAttention(32, 4, rotary=mha.Rotary(8, sections=(2, 1, 1)), rng=1,
                                   dtype=np.float64)
    over_dask = mha.dask.MultiHeadAttention(layer)
    x = rng.standard_normal((batch, 30, 32))
    query = da.from_array(x, chunks=(1, 7, -1))
    every = rng.integers(0, 99, (3, batch, 30))
    for positions in (every, every[0, 0], None):
        got = over_dask(query, positions=positions, causal=True).compute()
        assert relative_error(got, layer(x, positions=positions, causal=True)) < 1e-13
    got = over_dask(query[0], positions=every[:, 0]).compute()
    assert relative_error(got, layer(x[0], positions=every[:, 0])) < 1e-13
    with pytest.raises(ValueError, match=r"^positions: got shape \(2, 30\), wanted \(30,\) or"
                       if batch == 3 else r"^positions: got shape \(4, 30\)"):
        over_dask(query, positions=every[0, :2] if batch == 3 else np.zeros((4, 30), int))
    if batch == 3:
        with pytest.raises(ValueError, match=r"^positions: got shape \(3, 30\), which may be"):
            over_dask(query, positions=every[0])


def test_one_sequence_and_numpy_arrays():
    layer = mha.MultiHeadAttention(16, 2, rng=0)
    x = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    over_dask = mha.dask.MultiHeadAttention(layer)
    for given in (x, da.from_array(x, chunks=(13, 16))):
        output, lse = over_dask(given, causal=True, return_lse=True)
        assert lse.shape == (2, 40)
        assert relative_error(output.compute(), layer(x, causal=True)) < 1e-6


def test_the_layer_is_one_node_and_its_parameters_a_copy():
    layer = mha.MultiHeadAttention(16, 2, rng=0)
    over_dask = mha.dask.MultiHeadAttention(layer)
    assert not layer.frozen
    assert repr(over_dask).startswith("mha.dask.MultiHeadAttention(16, 2")
    x = da.ones((1, 40, 16), chunks=(1, 5, 16), dtype=np.float32)
    before = over_dask(x).compute()
    layer.W_q[:] = 7
    assert np.array_equal(over_dask(x).compute(), before)
    graph = dict(over_dask(over_dask(x)).__dask_graph__())
    assert [key for key in graph if str(key).startswith("mha-layer")] == [over_dask._name]


@pytest.mark.parametrize(("arguments", "options", "message"), [
    ((da.ones((2, 10, 15)),), {}, "query: got shape .* wanted a last axis of 16"),
    ((da.ones((2, 10, 16), chunks=(2, 5, 8)),), {}, "query: got 2 chunks along its last axis"),
    ((da.ones(16),), {}, "query: got shape"),
    ((da.ones((2, 10, 16)).astype(complex),), {}, "query"),
    ((da.ones((2, 10, 16)),), {"positions": [1, 2]}, "positions: got some, .* no rotary"),
    ((da.ones((2, 10, 16)),), {"mask": np.ones((2, 10, 10), bool)}, r"mask: .* mask\[:, None\]"),
    ((da.ones((2, 10, 16)), da.ones((10, 16))), {}, "key: got shape .* as many axes as query"),
    ((da.ones((2, 10, 16)),), {"cache": None}, "cache: "),
    ((da.ones((2, 10, 16)),), {"training": 1}, "training: "),
    ((da.ones((2, 10, 16)), da.ones((3, 10, 16))), {}, "key: got the batch axes"),
])
def test_errors(arguments, options, message):
    layer = mha.dask.MultiHeadAttention(mha.MultiHeadAttention(16, 2))
    with pytest.raises((TypeError, ValueError), match=message):
        layer(*arguments, **options)


def test_positions_that_do_not_fit():
    layer = mha.dask.MultiHeadAttention(mha.MultiHeadAttention(16, 2, rotary=mha.Rotary(8)))
    with pytest.raises(ValueError, match=r"positions: got shape \(2,\), wanted \(10,\)"):
        layer(da.ones((2, 10, 16)), positions=[1, 2])


def test_numpy_arrays_are_cut_as_the_others():
    rng = np.random.default_rng(0)
    layer = mha.MultiHeadAttention(16, 2, rng=0, dtype=np.float64)
    query, key = rng.standard_normal((4, 30, 16)), rng.standard_normal((4, 20, 16))
    for arrays in ((da.from_array(query, chunks=(1, 7, 16)), key),
                   (query, da.from_array(key, chunks=((3, 1), 6, 16)))):
        got = mha.dask.MultiHeadAttention(layer)(*arrays).compute()
        assert relative_error(got, layer(query, key)) < 1e-13


@pytest.mark.parametrize("lengths", [13, np.arange(40), da.from_array(np.arange(40), chunks=9)])
def test_lengths_of_one_sequence(lengths):
    layer = mha.MultiHeadAttention(16, 2, rng=0, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((40, 16))
    got = mha.dask.MultiHeadAttention(layer)(da.from_array(x, chunks=(9, 16)), key_lengths=lengths)
    assert relative_error(got.compute(), layer(x, key_lengths=np.asarray(lengths))) < 1e-13


class Own(mha.MultiHeadAttention):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_layer_whose_call_is_its_own():
    with pytest.raises(TypeError, match="layer: got Own, whose call is its own"):
        mha.dask.MultiHeadAttention(Own(16, 2))


def test_what_is_no_layer():
    with pytest.raises(TypeError, match=r"layer: got int, wanted a mha\.MultiHeadAttention"):
        mha.dask.MultiHeadAttention(3)
