"""Layers whose matrices have 8 or 4 bits a number: the bits of the float32 layer of the numbers
that are left."""
import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import mha

KINDS = ("q8_0", "q4_0")
LAYERS = {
    "plain": {}, "without biases": {"use_bias": False},
    "wide values": {"value_head_dim": 64, "query_dim": 64, "key_dim": 96, "output_dim": 20},
    "grouped, normed and rotated": {"num_kv_heads": 2, "qk_norm": "head", "rotary": mha.Rotary(32),
                                    "window": (6, 0), "sinks": True}}


def new_layer(name="plain", **more):
    return mha.MultiHeadAttention(128, 4, head_dim=32, rng=0, **LAYERS[name], **more)


def dequantised(layer):
    """The float32 layer of its numbers, frozen."""
    other = copy.deepcopy(layer).unfreeze()
    other.load_parameters(layer.parameters())
    return other.freeze()


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_float32_layer(kind, name, threads):
    layer = new_layer(name).quantize(kind)
    plain = dequantised(layer)
    same = name != "wide values"
    with mha.threads(threads):
        for batch, length in ((1, 1), (1, 4), (2, 5), (3, 40), (9, 64), (1, 300)):
            x = rows(batch, length, layer.query_dim)
            given = (x,) if same else (x, rows(batch, length, 96))
            np.testing.assert_array_equal(layer(*given, causal=True), plain(*given, causal=True))
            halves = [array.astype(np.float16) for array in given]
            np.testing.assert_array_equal(layer(*halves), plain(*halves))


@pytest.mark.parametrize("kind", KINDS)
def test_its_numbers_are_those_of_packed_weights(kind):
    layer, W_q = new_layer(), new_layer().W_q
    assert layer.quantize(kind) is layer and layer.frozen
    assert layer.W_q.tobytes() == mha.pack(W_q, dtype=kind).unpack().tobytes()
    assert layer.parameters()["W_q"].tobytes() == layer.W_q.tobytes()
    assert repr(layer).endswith(f"dtype=float32, frozen, {kind})")
    assert layer.num_parameters == new_layer().num_parameters


def test_cached_and_ragged_calls():
    layer = new_layer("grouped, normed and rotated").quantize("q8_0")
    plain = dequantised(layer)
    caches = layer.new_cache(2), plain.new_cache(2)
    x = rows(2, 14, 128)
    for part in (slice(0, 11), slice(11, 12), slice(12, 14)):
        np.testing.assert_array_equal(layer(x[:, part], cache=caches[0]),
                                      plain(x[:, part], cache=caches[1]))
    ragged, starts = x.reshape(28, 128), [0, 3, 3, 28]
    np.testing.assert_array_equal(layer(ragged, starts=starts), plain(ragged, starts=starts))
    layer = new_layer().quantize("q8_0")
    np.testing.assert_array_equal(layer(x, cache=layer.new_memory(x[:, :9])),
                                  dequantised(layer)(x, x[:, :9]))


@pytest.mark.parametrize("starts", [None, [0, 5, 14]])
def test_gradients_of_inputs_alone(starts):
    layer = new_layer().quantize("q8_0", parameters=("W_q", "W_o"))
    plain = dequantised(layer)
    x = rows(14, 128)
    output, pullback = layer.vjp(x, starts=starts)
    wanted_output, wanted_pullback = plain.vjp(x, starts=starts)
    np.testing.assert_array_equal(output, wanted_output)
    got, wanted = pullback(output), wanted_pullback(output)
    assert got.W_q is None and got.W_o is None
    for name in ("query", "W_k", "W_v", "b_q", "b_o"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
    with pytest.raises(ValueError, match=r"wrt: got \['W_o'\], which are quantised"):
        layer.vjp(x, starts=starts, wrt=("query", "W_o"))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_hold_the_blocks(kind):
    layer, x = new_layer().quantize(kind), rows(2, 5, 128)
    wanted = layer(x)
    pickled = pickle.dumps(layer)
    assert len(pickled) < 0.3 * 4 * layer.num_parameters
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickled)):
        assert other.frozen and repr(other) == repr(layer)
        np.testing.assert_array_equal(other(x), wanted)


def test_what_a_pickle_claims_is_checked():
    layer = new_layer().quantize("q8_0")
    for change in ({"dtype": np.dtype(np.float64)}, {"head_dim": 64},
                   {"_parameters": {**layer.__getstate__()["_parameters"],
                                    "b_q": mha.pack(rows(32, 128), dtype="q8_0")}},
                   {"_parameters": {**layer.__getstate__()["_parameters"],
                                    "W_q": mha.pack(rows(128, 128))}}):
        with pytest.raises(ValueError, match="wanted what pickling a layer gives"):
            copy.copy(layer).__setstate__({**layer.__getstate__(), **change})
    thawed = copy.copy(layer)
    thawed.__setstate__({**layer.__getstate__(), "_packed": False})
    assert thawed.frozen


def test_back_to_floats():
    layer = new_layer().quantize("q4_0")
    W_q, x = layer.W_q, rows(2, 5, 128)
    thawed = copy.copy(layer).unfreeze()
    assert not thawed.frozen and "q4_0" not in repr(thawed)
    np.testing.assert_array_equal(thawed(x), layer(x))
    thawed.W_q[0] = 0
    assert layer.astype(np.float64).W_q.tobytes() == W_q.astype(np.float64).tobytes()
    with pytest.raises(ValueError, match="W_q: got a change to a frozen layer"):
        layer.W_q = W_q


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_layers_of_halves_become_float32(dtype):
    halves = new_layer(dtype=dtype)
    wanted = mha.pack(halves.W_v, dtype="q8_0").unpack()
    layer = copy.copy(halves).quantize("q8_0", parameters=["W_v"])
    assert layer.dtype == np.float32
    np.testing.assert_array_equal(layer.W_v, wanted)
    np.testing.assert_array_equal(layer.W_q, halves.W_q.astype(np.float32))
    again = layer.quantize("q4_0")  # of the numbers of 8 bits, for W_v
    np.testing.assert_array_equal(again.W_v, mha.pack(wanted, dtype="q4_0").unpack())


@pytest.mark.parametrize("name", ["plain", "wide values"])
def test_pruned_heads_are_those_of_the_float32_layer(name):
    layer = new_layer(name).quantize("q8_0")
    plain = dequantised(layer).unfreeze().prune_heads([0, 2])
    layer.prune_heads([0, 2])
    assert layer.frozen and layer.num_heads == 2
    for key, array in plain.parameters().items():
        np.testing.assert_array_equal(layer.parameters()[key], array)
    narrow = mha.MultiHeadAttention(96, 4, rng=0).quantize("q8_0")
    with pytest.raises(ValueError, match=r"heads: got \[1\] of a quantised layer"):
        narrow.prune_heads([1])


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda layer: layer.quantize("q5_0"), ValueError, "kind: got 'q5_0', wanted one of"),
    (lambda layer: layer.quantize(8), TypeError, "kind: got 8, wanted one of"),
    (lambda layer: layer.quantize("q8_0", parameters=("W_x",)), ValueError,
     "parameters: got 'W_x'"),
    (lambda layer: layer.quantize("q8_0", parameters="W_q"), TypeError, "parameters: got 'W_q'"),
    (lambda layer: layer.astype(np.float64).quantize("q8_0"), TypeError,
     "quantize: got a float64"),
    (lambda layer: mha.MultiHeadAttention(48, 3).quantize("q8_0"), ValueError,
     "W_q: got 48 rows, wanted a multiple of 32"),
    (lambda layer: layer.W_v.__setitem__((3, 4), np.nan) or layer.quantize("q8_0"), ValueError,
     "W_v: got numbers that are not finite"),
    (lambda layer: layer.W_k.__setitem__((3, 4), 1e8) or layer.quantize("q4_0"), ValueError,
     "W_k: got numbers whose scale is beyond float16"),
])
def test_what_is_refused_changes_nothing(change, error, message):
    layer = new_layer()
    with pytest.raises(error, match=message):
        change(layer)
    assert not layer.frozen and "q8_0" not in repr(layer)


@pytest.mark.parametrize(("kind", "share"), [("q8_0", 0.27), ("q4_0", 0.15)])
def test_memory(kind, share):
    """Its matrices are held once."""
    layer = mha.MultiHeadAttention(1024, 16, use_bias=False).quantize(kind)
    held = layer._state.parameters.values()
    assert sum(packed.nbytes for packed in held) < share * 4 * layer.num_parameters
    assert [packed._core_weight for packed in held] == [*layer._state.packed[:4]]


def test_what_it_shows_is_read_only():
    """Writing into a copy of the dequantised numbers would change nothing."""
    layer = new_layer().quantize("q8_0")
    for shown in (layer.W_q, *layer.parameters().values()):
        with pytest.raises(ValueError, match="read-only"):
            shown[0] = 9
    assert layer.unfreeze().W_q.flags.writeable
