"""Between projection and attention: norms of query and key heads, rotary embeddings, in the figure
and in the layer, forwards and backwards."""

import copy
import pickle

import numpy as np
import pytest
from agreement import FLOOR, assert_accurate, relative_error
from option_cases import SCORES
from test_multi_head_attention_vjp import check, check_by_complex_step, figure_arguments

import mha
from mha import reference

NORMS = {"none": lambda heads, head_dim: None, "head": lambda heads, head_dim: head_dim,
         "width": lambda heads, head_dim: heads * head_dim}
SMALL = {"batch": (2,), "query_len": 5, "key_len": 7, "head_dim": 4}
# head_dim of whole panels (32 float32, 16 float64), where the projecting tasks do it; and not.
WHOLE = {"batch": (3,), "query_len": 110, "key_len": 130, "head_dim": 64, "widths": (30, 40, 20)}
ODD = {"batch": (1,), "query_len": 70, "key_len": 9, "head_dim": 33, "widths": (30, 40, 20)}


def arguments_of(rng, dtype, norm, *, query_norm=True, **sizes):
    """Arrays of the figure with q_norm and k_norm; heads 4 and 2."""
    arguments = figure_arguments(rng, dtype, **sizes)
    head_dim = arguments["b_q"].size // 4
    for name, heads in (("q_norm", 4), ("k_norm", 2)):
        size = NORMS[norm](heads, head_dim)
        if size and (query_norm or name == "k_norm"):
            arguments[name] = (0.5 + rng.random(size)).astype(dtype)
    return arguments


def forward(arguments, **options):
    names = list(arguments)
    return [arguments[name] for name in names], {
        "ours": lambda *a: mha.multi_head_attention(**dict(zip(names, a, strict=True)), **options),
        "theirs": lambda *a: reference.multi_head_attention(
            **dict(zip(names, a, strict=True)), **options)}


@pytest.mark.parametrize("sizes", [SMALL, WHOLE, ODD], ids=["small", "whole panels", "odd"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_figure_against_the_reference(sizes, norm, rotates, dtype):
    rng = np.random.default_rng(0)
    arguments = arguments_of(rng, dtype, norm, **sizes)
    rotary = mha.Rotary(sizes["head_dim"] // 2 * 2, magnitude=1.1) if rotates else None
    where = {} if rotary is None else {
        "positions": rng.integers(-9, 1000, arguments["query"].shape[:2]),
        "key_positions": np.arange(arguments["key"].shape[1]) - 3}
    for options in ({"rotary": rotary, "norm_offset": 0.5, "norm_eps": 0.1, **where},
                    {"rotary": rotary, "causal": True, "query_offset": 1, "softcap": 3.0}):
        arrays, functions = forward(arguments, num_heads=4, num_kv_heads=2, **options)
        assert_accurate(functions["ours"], functions["theirs"], arrays, {})


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradients_by_complex_step(norm, layout):
    rng = np.random.default_rng(1)
    arguments = arguments_of(rng, np.float64, norm, **SMALL)
    options = {"num_heads": 4, "num_kv_heads": 2, "rotary": mha.Rotary(2, layout=layout),
               "norm_offset": -0.3, "norm_eps": 0.01, "causal": True, "query_offset": 2,
               "positions": rng.integers(-50, 50, 5),
               "key_positions": rng.integers(-50, 50, (2, 7))}
    check_by_complex_step(rng, arguments, **options)


@pytest.mark.parametrize("sizes", [SMALL, WHOLE, ODD], ids=["small", "whole panels", "odd"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_against_the_reference(sizes, norm, dtype):
    rng = np.random.default_rng(2)
    arguments = arguments_of(rng, dtype, norm, **sizes)
    rotary = mha.Rotary(sizes["head_dim"] // 2 * 2, layout="interleaved")
    for options in ({"rotary": rotary}, {"rotary": rotary, "causal": True, "query_offset": 0,
                                         "dropout": 0.1, "rng": 3}, *SCORES):
        check(rng, dtype, arguments, **options)


def test_one_norm_alone_and_wrt():
    rng = np.random.default_rng(3)
    arguments = arguments_of(rng, np.float64, "head", query_norm=False, **SMALL)
    check(rng, np.float64, arguments)
    options = {"num_heads": 4, "num_kv_heads": 2, "rotary": mha.Rotary(4)}
    output, pullback = mha.multi_head_attention_vjp(**arguments, **options)
    everything = pullback(output)
    assert everything.q_norm is None
    for name in ("k_norm", "W_k", "query"):
        alone = mha.multi_head_attention_vjp(**arguments, **options, wrt=(name,))[1](output)
        assert np.array_equal(getattr(alone, name), getattr(everything, name))
        assert sum(gradient is not None for gradient in alone) == 1


def layer_of(dtype=np.float64, embed_dim=64, rng=0, **options):
    layer = mha.MultiHeadAttention(embed_dim, 4, num_kv_heads=2, dtype=dtype, rng=rng, **options)
    generator = np.random.default_rng(rng)
    for name, array in layer.parameters().items():
        if name[0] != "W":
            array[...] = 0.1 * generator.standard_normal(array.shape) + array
    return layer


def as_function(layer):
    names = ("num_heads", "num_kv_heads", "rotary", "norm_eps", "norm_offset")
    return {**layer.parameters(), **{name: getattr(layer, name) for name in names}}


@pytest.mark.parametrize("norm", [None, "head", "width"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("embed_dim", [64, 128, 40])
def test_layer_is_the_function_frozen_or_not(norm, dtype, embed_dim):
    layer = layer_of(dtype, embed_dim, rotary=mha.Rotary(8), qk_norm=norm, norm_offset=1.0)
    x = np.random.default_rng(1).standard_normal((2, 50, embed_dim)).astype(dtype)
    wanted = mha.multi_head_attention(x, x, x, **as_function(layer), causal=True)
    assert np.array_equal(layer(x, causal=True), wanted)
    output, pullback = layer.vjp(x, causal=True)
    assert np.array_equal(output, wanted)
    gradients = pullback(output)
    frozen = copy.deepcopy(layer).freeze()
    assert np.array_equal(frozen(x, causal=True), wanted)
    for one, other in zip(gradients, frozen.vjp(x, causal=True)[1](output), strict=True):
        assert one is other is None or np.array_equal(one, other)
    for name in layer.parameters():
        assert getattr(gradients, name).shape == getattr(layer, name).shape
    # A row alone at its position, as when decoding.
    row = layer(x[:, 49:], x, positions=[49], query_offset=49, causal=True)
    assert relative_error(row, wanted[:, 49:]) < FLOOR[np.dtype(dtype)]


def test_positions_of_self_attention_are_those_of_keys():
    layer = layer_of(rotary=mha.Rotary(16))
    x = np.random.default_rng(1).standard_normal((2, 9, 64))
    positions = np.array([np.arange(9) + 1000, np.arange(9) * 3])
    wanted = layer(x, positions=positions, key_positions=positions)
    assert np.array_equal(layer(x, positions=positions), wanted)
    assert np.array_equal(layer.vjp(x, positions=positions)[0], wanted)
    assert np.array_equal(mha.multi_head_attention(x, x, x, positions=positions,
                                                   **as_function(layer)), wanted)
    # All at once moved: the distances, and so the output, stay.
    assert relative_error(layer(x, positions=positions[0]), layer(x)) < 1e-13
    other = layer(x, x.copy(), positions=positions[0])
    assert np.array_equal(other, layer(x, x.copy(), positions=positions[0],
                                       key_positions=np.arange(9)))
    assert relative_error(other, layer(x)) > 1e-3
    one = layer(x[0], positions=positions[0])
    assert np.array_equal(one, layer(x, positions=positions[0])[0])
    # A view of the same memory that is shorter.
    assert np.array_equal(layer(x[:, :4], x, positions=positions[0, :4],
                                key_positions=positions[0])[1],
                          layer(x[1, :4], x[1], positions=positions[0, :4].copy(),
                                key_positions=positions[0].tolist()))


def test_a_call_without_is_as_ever():
    rng = np.random.default_rng(0)
    plain = mha.MultiHeadAttention(64, 4, rng=0)
    prepared = mha.MultiHeadAttention(64, 4, rng=0, rotary=mha.Rotary(16), qk_norm="head")
    for name in plain.parameters():
        assert np.array_equal(getattr(plain, name), getattr(prepared, name))
    x = rng.standard_normal((2, 5, 64)).astype(np.float32)
    assert np.array_equal(plain(x), mha.multi_head_attention(x, x, x, num_heads=4,
                                                             **plain.parameters()))
    assert not np.array_equal(plain(x), prepared(x))


@pytest.mark.parametrize("norm", ["head", "width"])
def test_norms_are_parameters(norm):
    layer = layer_of(qk_norm=norm, norm_offset=1.0, norm_eps=1e-5, rotary=mha.Rotary(4))
    sizes = {"head": (16, 16), "width": (64, 32)}[norm]
    assert list(layer.parameters())[-2:] == ["q_norm", "k_norm"]
    assert (layer.q_norm.shape, layer.k_norm.shape) == ((sizes[0],), (sizes[1],))
    fresh = mha.MultiHeadAttention(64, 4, qk_norm=norm, norm_offset=1.0)
    assert not fresh.q_norm.any()
    assert (mha.MultiHeadAttention(64, 4, qk_norm=norm).k_norm == 1).all()
    x = np.random.default_rng(1).standard_normal((2, 5, 64))
    output = layer(x)
    for other in (pickle.loads(pickle.dumps(layer)), copy.copy(layer), copy.deepcopy(layer),
                  layer.astype(np.float64), copy.deepcopy(layer).freeze().unfreeze(),
                  pickle.loads(pickle.dumps(copy.deepcopy(layer).freeze()))):
        assert np.array_equal(other(x), output)
        assert (other.qk_norm, other.norm_offset, other.norm_eps, other.rotary) == (
            norm, 1.0, 1e-5, mha.Rotary(4))
    assert layer.astype(np.float32).q_norm.dtype == np.float32
    other = layer_of(qk_norm=norm, norm_offset=1.0, norm_eps=1e-5, rotary=mha.Rotary(4), rng=5)
    other.load_parameters(layer.parameters())
    assert np.array_equal(other(x), output)
    other.q_norm = 2 * layer.q_norm
    assert not np.array_equal(other(x), output)
    assert layer.num_parameters == sum(array.size for array in layer.parameters().values())
    assert (f"rotary=Rotary(4, base=10000, layout='half'), qk_norm='{norm}', norm_eps=1e-05, "
            "norm_offset=1.0") in repr(layer)
    with pytest.raises(AttributeError, match="qk_norm: got an assignment"):
        layer.qk_norm = None


def test_pruning():
    layer = layer_of(qk_norm="head", rotary=mha.Rotary(4))
    x = np.random.default_rng(1).standard_normal((2, 5, 64))
    gated = layer(x, head_gate=[1, 0, 0, 1])
    q_norm = layer.q_norm.copy()
    assert relative_error(layer.prune_heads([1, 2])(x), gated) < 1e-14
    assert np.array_equal(layer.q_norm, q_norm)
    with pytest.raises(ValueError, match=r"heads: got .* norm goes over all heads together"):
        layer_of(qk_norm="width").prune_heads([1, 2])


def test_layers_that_were_pickled_before_have_neither():
    layer = mha.MultiHeadAttention(8, 2, rng=0)
    state = layer.__getstate__()
    assert not {"rotary", "qk_norm", "norm_eps", "norm_offset", "q_norm"} & state.keys()
    old = mha.MultiHeadAttention.__new__(mha.MultiHeadAttention)
    old.__setstate__(state)
    assert old.rotary is None and old.qk_norm is None and old.norm_eps == 1e-6
    assert np.array_equal(old(np.ones((3, 8))), layer(np.ones((3, 8))))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e19, 1e30])
@pytest.mark.parametrize("norm", ["head", "width"])
def test_norms_of_numbers_of_any_size(dtype, size, norm):
    """Where eps does not count, the size of the projections does not either."""
    if dtype == np.float64:
        size = size**8
    layer = layer_of(dtype, qk_norm=norm, norm_eps=0.0, use_bias=False)
    x = np.random.default_rng(1).standard_normal((2, 9, 64)).astype(dtype)
    wanted = layer(x)
    layer.W_q, layer.W_k = layer.W_q * dtype(size), layer.W_k * dtype(size)
    tolerance = 1e-3 if size == 1e-38 and dtype == np.float32 else 1e-5  # denormal numbers
    assert relative_error(layer(x), wanted) < tolerance


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("norm", [None, "head", "width"])
def test_padding_may_hold_anything(poison, norm):
    layer = layer_of(rotary=mha.Rotary(4), qk_norm=norm)
    rng = np.random.default_rng(0)
    query, memory = rng.standard_normal((2, 5, 64)), rng.standard_normal((2, 7, 64))
    grad_output, lengths = rng.standard_normal((2, 5, 64)), [4, 7]
    memory[0, 4:] = 0
    clean = layer.vjp(query, memory, key_lengths=lengths)[1](grad_output)
    memory[0, 4:] = poison
    got = layer.vjp(query, memory, key_lengths=lengths)[1](grad_output)
    for name, gradient in got._asdict().items():
        if gradient is not None:
            np.testing.assert_allclose(gradient, getattr(clean, name), atol=1e-13, err_msg=name)


@pytest.mark.parametrize("shape", [(0, 5, 64), (2, 0, 64), (0, 64)])
def test_empty(shape):
    for norm in (None, "head", "width"):
        layer = layer_of(rotary=mha.Rotary(4), qk_norm=norm)
        output, pullback = layer.vjp(np.ones(shape))
        assert output.shape == layer(np.ones(shape)).shape == shape
        gradients = pullback(output)
        assert norm is None or not (gradients.q_norm.any() or gradients.k_norm.any())


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 64), (2, 0, 64), (0, 64), (2, 0, 5, 64), (0, 0, 64)])
def test_positions_of_nothing(shape, freezes):
    layer = layer_of(rotary=mha.Rotary(4))
    layer = layer.freeze() if freezes else layer
    x = np.ones(shape)
    for positions in (np.arange(shape[-2]), np.zeros(shape[:-1], int)):
        where = {"positions": positions, "key_positions": positions}
        output, pullback = layer.vjp(x, x, **where)
        assert layer(x, positions=positions).shape == layer(x, x, **where).shape == shape
        assert not any(gradient.any() for gradient in pullback(output) if gradient is not None)


@pytest.mark.parametrize("names", [("q_norm",), ("k_norm",), ("q_norm", "k_norm")])
def test_heads_without_columns(names):
    x, none = np.ones((2, 5, 4)), np.ones((4, 0))
    arrays = (x, x, x, none, none, np.arange(24.0).reshape(4, 6), np.ones((6, 3)))
    output = mha.multi_head_attention(*arrays, num_heads=2,
                                      **dict.fromkeys(names, np.ones(0)))
    np.testing.assert_array_equal(output, mha.multi_head_attention(*arrays, num_heads=2))


X = np.ones((2, 3, 8))
W = np.ones((8, 8))


def attend(**options):
    return mha.multi_head_attention(X, X, X, W, W, W, W, num_heads=2, **options)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: attend(q_norm=np.ones(3)), r"q_norm: got shape \(3,\), wanted \(4,\), that is head_d"),
    (lambda: attend(k_norm=np.ones((2, 4))), r"k_norm: got shape \(2, 4\)"),
    (lambda: attend(q_norm="x"), "q_norm: got an array of"),
    (lambda: attend(q_norm=np.ones(4), norm_eps=-1), "norm_eps: got -1, wanted a finite number of"),
    (lambda: attend(q_norm=np.ones(4), norm_eps=np.nan), "norm_eps: got nan"),
    (lambda: attend(q_norm=np.ones(4), norm_eps="1"), "norm_eps: got str, wanted a number"),
    (lambda: attend(q_norm=np.ones(4), norm_offset=np.inf), "norm_offset: got inf"),
    (lambda: attend(rotary=3), "rotary: got int, wanted an mha.Rotary"),
    (lambda: attend(rotary=mha.Rotary(6)), r"rotary: got 6 dims, wanted at most head_dim \(4\)"),
    (lambda: attend(rotary=mha.Rotary(4), positions=[0, 1]),
     r"positions: got shape \(2,\), wanted \(3,\) or \(2, 3\)"),
    (lambda: attend(rotary=mha.Rotary(4), key_positions=np.ones((3, 3), int)),
     r"key_positions: got shape \(3, 3\), wanted"),
    (lambda: attend(rotary=mha.Rotary(4), positions=[0.5, 1, 2]), "positions: got an array of fl"),
    (lambda: attend(positions=[0, 1, 2]), "positions: got positions where nothing rotates"),
    (lambda: attend(key_positions=[0, 1, 2]), "key_positions: got positions where nothing"),
    (lambda: mha.MultiHeadAttention(8, 2)(X, positions=[0, 1, 2]), "positions: got positions wh"),
    (lambda: mha.MultiHeadAttention(8, 2, rotary="half"), "rotary: got str, wanted an mha.Rotary"),
    (lambda: mha.MultiHeadAttention(8, 2, rotary=mha.Rotary(6)), "rotary: got 6 dims, wanted at"),
    (lambda: mha.MultiHeadAttention(8, 2, qk_norm="heads"), "qk_norm: got 'heads', wanted"),
    (lambda: mha.MultiHeadAttention(8, 2, qk_norm=True), "qk_norm: got True"),
    (lambda: mha.MultiHeadAttention(8, 2, norm_eps=-1.0), "norm_eps: got -1.0, wanted a finite"),
    (lambda: mha.MultiHeadAttention(8, 2, norm_offset="1"), "norm_offset: got str, wanted a fin"),
    (lambda: setattr(mha.MultiHeadAttention(8, 2), "q_norm", np.ones(4)),
     "q_norm: got a parameter for a layer without, wanted one made with qk_norm="),
    (lambda: setattr(mha.MultiHeadAttention(8, 2, qk_norm="head"), "q_norm", np.ones(8)),
     r"q_norm: got shape \(8,\), wanted \(4,\)"),
])
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("norm", [None, "head", "width"])
def test_steps_show_the_prepared_heads(norm, capsys):
    layer = layer_of(rotary=mha.Rotary(8), qk_norm=norm)
    x, positions = np.random.default_rng(1).standard_normal((2, 9, 64)), np.arange(9) * 5
    for rows in (x, x[0]):
        found = reference.steps(layer, rows, positions=positions, causal=True)
        output = layer(rows, positions=positions, causal=True)
        assert relative_error(output, found["output"]) < 1e-13
        assert found["prepared_query"].shape == found["query_heads"].shape
    assert "prepare_heads.c" in capsys.readouterr().out
