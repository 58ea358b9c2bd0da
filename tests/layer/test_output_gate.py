"""Layers with an output gate: the function's bits in every kind of call; pruning, quantising."""

import copy
import pickle

import numpy as np
import pytest
from agreement import FLOOR, relative_error

import mha
from mha import reference

KINDS = ("element", "head")
LAYERS = {"plain": {}, "grouped": {"num_kv_heads": 2, "value_head_dim": 5, "rotary": mha.Rotary(8)},
          "normed": {"qk_norm": "head", "window": (5, 0), "use_bias": "qg"}}


def new_layer(kind, name="plain", dtype=np.float32, **more):
    layer = mha.MultiHeadAttention(40, 4, head_dim=8, output_gate=kind, dtype=dtype, rng=0,
                                   **{**LAYERS[name], **more})
    rng = np.random.default_rng(1)
    for parameter, array in layer.parameters().items():
        if parameter[0] == "b":
            array[...] = rng.standard_normal(array.shape)
    return layer


def rows(*shape, dtype=np.float32):
    return np.random.default_rng(2).standard_normal(shape).astype(dtype)


def as_function(layer):
    names = ("num_heads", "num_kv_heads", "rotary")
    return {**layer.parameters(), **{name: getattr(layer, name) for name in names}}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_those_of_the_function(kind, name, dtype):
    layer, x = new_layer(kind, name, dtype), rows(2, 30, 40, dtype=dtype)
    options = {"causal": True, "window": layer.window, "head_gate": [1, 0.5, 0, -1]}
    wanted = mha.multi_head_attention(x, x, x, **as_function(layer), **options)
    assert np.array_equal(layer(x, **options), wanted)
    output, pullback = layer.vjp(x, **options)
    assert np.array_equal(output, wanted)
    frozen = copy.copy(layer).freeze()
    assert np.array_equal(frozen(x, **options), wanted)
    one, other = pullback(output), frozen.vjp(x, **options)[1](output)
    assert np.array_equal(one.W_g, other.W_g) and np.array_equal(one.query, other.query)
    assert one.W_g.shape == layer.W_g.shape == (40, {"element": layer.value_head_dim * 4,
                                                     "head": 4}[kind])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_into_calls_has_the_bits_of_one(kind, name, threads):
    """By a cache, a ragged batch, a pool of pages, and sequence by sequence."""
    layer, x = new_layer(kind, name).freeze(), rows(9, 23, 40)
    with mha.threads(threads):
        whole = layer(x, causal=True)
        cache = layer.new_cache(9)
        parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 9), (9, 10), (10, 10), (10, 23))]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)
        assert np.array_equal(np.stack([layer(one, causal=True) for one in x]), whole)
        starts = np.arange(10) * 23
        assert np.array_equal(layer(x.reshape(-1, 40), starts=starts, causal=True),
                              whole.reshape(-1, 40))
        pool = mha.PagedCache(9, layer.num_kv_heads, 8, layer.value_head_dim)
        ids = [pool.new() for _ in x]
        paged = layer(x.reshape(-1, 40), starts=starts, cache=pool[0], sequences=ids)
        assert np.array_equal(paged, whole.reshape(-1, 40))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_ragged_batch_are_those_of_its_sequences(kind, dtype):
    layer, x = new_layer(kind, "grouped", dtype), rows(21, 40, dtype=dtype)
    starts, gate = [0, 4, 4, 21], [1, 0.5, 2, -1]
    output, pullback = layer.vjp(x, starts=starts, head_gate=gate)
    grad = rows(*output.shape, dtype=dtype)[::-1]
    got = pullback(grad)
    alone = [layer.vjp(x[a:b], head_gate=gate)[1](grad[a:b]) for a, b in ((0, 4), (4, 21))]
    for name in (*layer.parameters(), "head_gate"):
        wanted = sum(getattr(one, name) for one in alone)
        scale = abs(wanted if name != "b_k" else alone[0].W_k).max()
        assert np.allclose(getattr(got, name), wanted, atol=50 * np.finfo(dtype).eps * scale), name
    wanted = np.concatenate([one.query for one in alone])
    assert np.allclose(got.query, wanted, atol=50 * np.finfo(dtype).eps * abs(wanted).max())
    for name in ("query", "W_g", "b_g", "W_q", "W_o"):
        some = layer.vjp(x, starts=starts, head_gate=gate, wrt=(name,))[1](grad)
        assert np.array_equal(getattr(some, name), getattr(got, name))
        assert sum(gradient is not None for gradient in some) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_in_tasks_of_dask(kind):
    da = pytest.importorskip("dask.array")
    from mha.dask import MultiHeadAttention

    layer, x = new_layer(kind, "grouped"), rows(3, 30, 40)
    lazily = MultiHeadAttention(layer)(da.from_array(x, chunks=(2, 7, 40)), causal=True)
    wanted = layer(x, causal=True)
    assert np.allclose(lazily.compute(), wanted, atol=1e-6 * abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_heads_take_their_gates_along(kind):
    layer, x = new_layer(kind, "normed"), rows(2, 9, 40)
    wanted = layer(x, head_gate=[0, 1, 0, 1])
    pruned = copy.copy(layer).prune_heads([0, 2])
    assert pruned.W_g.shape == (40, {"element": 16, "head": 2}[kind])
    assert len(pruned.b_g) == pruned.W_g.shape[1]
    assert np.allclose(pruned(x), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", ["q8_0", "q4_0"])
def test_quantised_as_the_other_matrices(kind, bits):
    layer = mha.MultiHeadAttention(64, 2, output_gate=kind, rng=0).quantize(bits)
    plain = copy.deepcopy(layer).unfreeze()
    x = rows(3, 50, 64)
    assert np.array_equal(layer(x), plain(x))
    assert layer.W_g.tobytes() == mha.pack(
        mha.MultiHeadAttention(64, 2, output_gate=kind, rng=0).W_g, dtype=bits).unpack().tobytes()
    again = pickle.loads(pickle.dumps(layer))
    assert np.array_equal(again(x), layer(x)) and repr(again) == repr(layer)
    assert np.array_equal(layer.prune_heads([1])(x), plain.prune_heads([1])(x))
    others = mha.MultiHeadAttention(64, 2, output_gate=kind, rng=0)
    kept = others.W_g.copy()
    assert np.array_equal(others.quantize(bits, parameters=("W_q",)).W_g, kept)
    with pytest.raises(ValueError, match="W_g: got a parameter for a layer without"):
        mha.MultiHeadAttention(64, 2).quantize(bits, parameters=("W_g",))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind):
    layer, x = new_layer(kind, "normed"), rows(2, 9, 40)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)),
                  pickle.loads(pickle.dumps(layer.freeze()))):
        assert other.output_gate == kind and np.array_equal(other(x), layer(x))
        assert f"output_gate={kind!r}" in repr(other)
    wide = layer.astype(np.float64)
    wanted = reference.multi_head_attention(
        *[x.astype(np.float64)] * 3, **as_function(wide), window=(5, 0))
    assert relative_error(wide(x.astype(np.float64)), wanted) < FLOOR[np.dtype(np.float64)]


def test_a_half_layer_rounds_once():
    layer, x = new_layer("element", "grouped", np.float16), rows(2, 9, 40, dtype=np.float16)
    wide = layer.astype(np.float32)
    assert np.array_equal(layer(x), wide(x.astype(np.float32)).astype(np.float16))


def test_steps_show_it(capsys):
    layer, x = new_layer("head"), rows(2, 9, 40)
    found = reference.steps(layer, x)
    assert [*found][-4:] == ["merged", "gate_logits", "gated", "output"]
    assert found["gate_logits"].shape == (2, 9, 4) and found["gated"].shape == (2, 9, 32)
    assert np.allclose(found["output"], layer(x), atol=1e-5)
    assert "csrc/core/heads/output_gate.c" in capsys.readouterr().out


def test_biases_by_letters():
    names = {True: "qkvog", False: "", "qkvo": "qkvo", "g": "g", "gqkov": "qkvog"}
    for use_bias, letters in names.items():
        layer = mha.MultiHeadAttention(8, 2, output_gate="head", use_bias=use_bias)
        assert [name for name in layer.parameters() if name[0] == "b"] == [
            f"b_{letter}" for letter in letters]
        again = eval(repr(layer), {"MultiHeadAttention": mha.MultiHeadAttention,
                                   "float32": np.float32})
        assert [*again.parameters()] == [*layer.parameters()]
    assert mha.MultiHeadAttention(8, 2, output_gate="head", use_bias="qkvog").use_bias is True
    assert mha.MultiHeadAttention(8, 2, use_bias="qkvo").use_bias is True


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"output_gate": "elements"}, ValueError,
     "output_gate: got 'elements', wanted \"element\", \"head\" or None"),
    ({"output_gate": True}, TypeError, "output_gate: got True, wanted"),
    ({"use_bias": "g"}, ValueError, "use_bias: got 'g', wanted True, False, or letters of 'qkvo'"),
])
def test_what_the_constructor_refuses(options, error, message):
    with pytest.raises(error, match=message):
        mha.MultiHeadAttention(8, 2, **options)


def test_a_layer_without_a_gate_refuses_its_parameters():
    layer = mha.MultiHeadAttention(8, 2)
    assert layer.W_g is layer.b_g is layer.output_gate is None
    for name in ("W_g", "b_g"):
        with pytest.raises(ValueError, match=f"{name}: got a parameter for a layer without, wanted"
                                             " one made with output_gate="):
            setattr(layer, name, np.ones((8, 8)))
    gated = mha.MultiHeadAttention(8, 2, output_gate="element", use_bias=False)
    with pytest.raises(ValueError, match="b_g: got a bias for a layer without"):
        gated.b_g = np.ones(8)
    with pytest.raises(ValueError, match=r"W_g: got shape \(8, 2\), wanted \(8, 8\)"):
        gated.W_g = np.ones((8, 2))
