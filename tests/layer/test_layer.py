"""MultiHeadAttention: the figure as a layer."""

import copy
import pickle

import numpy as np
import pytest
from agreement import OnlyDlpack, assert_accurate
from option_cases import SCORES, by_head

import mha
from mha import reference

NAMES = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")


def random_layer(rng=0, **options):
    layer = mha.MultiHeadAttention(**{"embed_dim": 24, "num_heads": 4, "rng": rng, **options})
    generator = np.random.default_rng(rng)
    for name, parameter in layer.parameters().items():
        if name.startswith("b"):
            parameter[...] = generator.standard_normal(parameter.shape)
    return layer


def through_reference(layer, query, key=None, value=None, **options):
    """The same call through mha.reference in float64."""
    key = query if key is None else key
    value = key if value is None else value
    wide = {name: parameter.astype(float) for name, parameter in layer.parameters().items()}
    return reference.multi_head_attention(
        *(np.asarray(x, float) for x in (query, key, value)),
        **wide, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, **options)


@pytest.mark.parametrize("options", [
    {}, {"use_bias": False}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"head_dim": 5},
    {"head_dim": 3, "value_head_dim": 7}, {"query_dim": 10, "key_dim": 11, "value_dim": 12},
    {"output_dim": 9}, {"embed_dim": 25, "head_dim": 4}, {"dtype": np.float64}, {"num_heads": 24}])
def test_every_constructor_option(options):
    layer = random_layer(**options)
    rng = np.random.default_rng(1)
    query = rng.standard_normal((2, 5, layer.query_dim))
    key = rng.standard_normal((2, 7, layer.key_dim))
    value = rng.standard_normal((2, 7, layer.value_dim))
    output, weights, lse = layer(query, key, value, return_weights=True, return_lse=True)
    assert output.shape == (2, 5, layer.output_dim)
    assert weights.shape == (2, layer.num_heads, 5, 7)
    assert lse.shape == (2, layer.num_heads, 5)
    assert output.dtype == layer.dtype
    narrow = [x.astype(layer.dtype) for x in (query, key, value)]
    wanted = through_reference(layer, *narrow)
    assert np.abs(output - wanted).max() < 3e-6 * np.abs(wanted).max()


def test_defaults_of_key_and_value():
    layer = random_layer()
    x, y = np.random.default_rng(2).standard_normal((2, 3, 6, 24))
    assert np.array_equal(layer(x), layer(x, x, x))
    assert np.array_equal(layer(x, y), layer(x, y, y))


def test_one_sequence():
    layer = random_layer()
    x = np.random.default_rng(3).standard_normal((6, 24))
    output, weights, lse = layer(x, causal=True, return_weights=True, return_lse=True)
    batched = layer(x[None], causal=True, return_weights=True, return_lse=True)
    for one, many in zip((output, weights, lse), batched, strict=True):
        assert np.array_equal(one, many[0])
    mask = np.random.default_rng(4).random((1, 4, 6, 6)) < 0.5
    assert np.array_equal(layer(x, mask=mask), layer(x[None], mask=mask)[0])
    assert np.array_equal(layer(x, key_lengths=3), layer(x[None], key_lengths=[3])[0])


def test_options_against_the_reference():
    layer = random_layer(dtype=np.float64)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 7, 24))
    for options in ({"mask": rng.random((7, 7)) < 0.5}, {"mask": rng.random((2, 1, 7, 7)) < 0.5},
                    {"bias": rng.standard_normal((1, 4, 7, 7))}, {"key_lengths": [3, 0]},
                    {"causal": True, "window": (2, None)}, *SCORES, *by_head(4),
                    {"head_gate": rng.standard_normal(4)},
                    {"key_lengths": [0, 7], "empty_rows": "uniform"}):
        got = layer(x, return_weights=True, return_lse=True, **options)
        wanted = through_reference(layer, x, return_weights=True, return_lse=True, **options)
        for one, other in zip(got, wanted, strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e-13 * max(np.abs(wanted[0]).max(), 1))


def test_three_dimensional_masks_are_refused():
    layer, x = random_layer(), np.ones((2, 5, 24))
    for name in ("mask", "bias"):
        with pytest.raises(ValueError, match=rf"{name}: got 3 dimensions.*{name}\[:, None\]"):
            layer(x, **{name: np.ones((2, 5, 5), bool if name == "mask" else float)})


def test_dropout_acts_only_in_training():
    layer = random_layer(dropout=0.5)
    x = np.random.default_rng(6).standard_normal((2, 9, 24))
    assert np.array_equal(layer(x), layer(x, rng=1))
    assert not np.array_equal(layer(x, training=True, rng=1), layer(x))
    assert np.array_equal(layer(x, training=True, rng=1), layer(x, training=True, rng=1))
    assert not np.array_equal(layer(x, training=True), layer(x, training=True))


def test_start_is_xavier_uniform():
    layer = mha.MultiHeadAttention(256, 8, num_kv_heads=2, rng=0)
    for name in NAMES[:4]:
        weight = layer.parameters()[name]
        limit = np.sqrt(6 / sum(weight.shape))
        assert np.abs(weight).max() <= limit
        assert np.abs(weight).max() > 0.99 * limit
        assert abs(weight.mean()) < 5 * limit / np.sqrt(3 * weight.size)
        assert weight.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)
    assert all((layer.parameters()[name] == 0).all() for name in NAMES[4:])
    again = mha.MultiHeadAttention(256, 8, num_kv_heads=2, rng=0)
    assert np.array_equal(layer.W_o, again.W_o)
    assert not np.array_equal(layer.W_q, layer.W_q.T)


def test_parameters_are_live():
    layer = random_layer()
    assert list(layer.parameters()) == list(NAMES)
    x = np.ones((1, 3, 24))
    before = layer(x)
    layer.parameters()["b_o"] += 1
    assert np.allclose(layer(x), before + 1, atol=1e-5)
    layer.W_o = np.zeros((24, 24))
    assert np.allclose(layer(x), layer.b_o)
    assert layer.W_o.dtype == np.float32
    assert random_layer(use_bias=False).b_q is None


def test_num_parameters():
    assert mha.MultiHeadAttention(512, 8, use_bias=False).num_parameters == 1_048_576
    assert mha.MultiHeadAttention(512, 8).num_parameters == 1_050_624


def test_load_parameters():
    one, other = random_layer(0), random_layer(1)
    x = np.random.default_rng(7).standard_normal((2, 4, 24))
    other.load_parameters(one.parameters())
    assert np.array_equal(one(x), other(x))
    assert not np.shares_memory(one.W_q, other.W_q)
    before = {name: parameter.copy() for name, parameter in one.parameters().items()}
    good = one.parameters()
    for bad, message in (({**good, "W_z": good["W_q"]}, "unknown.*W_z"),
                         ({"W_q": good["W_q"]}, "none for.*W_k"),
                         ({**good, "W_v": np.zeros((24, 23))}, r"W_v: got shape \(24, 23\)")):
        with pytest.raises(ValueError, match=message):
            one.load_parameters(bad)
    assert all(np.array_equal(before[name], one.parameters()[name]) for name in before)


@pytest.mark.parametrize("rows", [(1, 1), (1, 8), (2, 9), (3, 140)])
def test_frozen_gives_the_same_bits(rows):
    for options in ({}, {"num_kv_heads": 2}, {"dtype": np.float64}, {"use_bias": False}):
        layer = random_layer(**options)
        x = np.random.default_rng(8).standard_normal((*rows, 24))
        plain = layer(x, return_weights=True)
        assert layer.freeze() is layer
        assert layer.frozen
        for one, other in zip(plain, layer(x, return_weights=True), strict=True):
            assert np.array_equal(one, other)
        assert np.array_equal(layer.unfreeze()(x), plain[0])


def test_loaded_parameters_stay_live():
    layer, other = random_layer(0), random_layer(1)
    held = layer.parameters()
    layer.load_parameters(other.parameters())
    assert held["W_q"] is layer.W_q
    layer.load_parameters({**held, "W_q": held["W_k"], "W_k": held["W_q"]})  # swapped
    assert np.array_equal(layer.W_q, other.W_k)
    assert np.array_equal(layer.W_k, other.W_q)


def test_loading_into_parameters_that_share_memory():
    source = mha.MultiHeadAttention(8, 2, rng=5)
    both, wide = np.eye(8, dtype=np.float32), np.zeros((8, 12), np.float32)
    layer = mha.MultiHeadAttention(8, 2)
    layer.W_q = layer.W_k = both
    layer.W_v, layer.W_o = wide[:, :8], wide[:, 4:]
    layer.b_q = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (8,), (0,))
    source.b_q[:] = range(8)
    layer.load_parameters(source.parameters())
    for name, array in source.parameters().items():
        assert np.array_equal(getattr(layer, name), array), name
    assert np.array_equal(both, np.eye(8))


def test_dlpack():
    layer = mha.MultiHeadAttention(8, 2, rng=0)
    x = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    mask, bias = x[None, 0, :, :4] > 0, x[None, 1, :, :4]
    options = {"mask": mask[0], "bias": bias[0], "key_lengths": np.array([3, 4])}
    theirs = {name: OnlyDlpack(array) for name, array in options.items()}
    output, pullback = layer.vjp(x, **options)
    other_output, other_pullback = layer.vjp(OnlyDlpack(x), **theirs)
    assert np.array_equal(layer(OnlyDlpack(x), **theirs), output)
    assert np.array_equal(other_output, output)
    for one, other in zip(pullback(x), other_pullback(OnlyDlpack(x)), strict=True):
        assert one is other is None or np.array_equal(one, other)
    assert layer(OnlyDlpack(x[0]), mask=mask[None, 0:1]).shape == (4, 8)
    layer.W_q = OnlyDlpack(layer.W_k)
    assert np.array_equal(layer.W_q, layer.W_k)
    assert mha.masks.from_lengths(OnlyDlpack(np.array([1, 2])), 3).shape == (2, 1, 1, 3)


def test_frozen_is_frozen():
    layer = random_layer()
    mine = layer.W_q
    layer.freeze()
    x = np.random.default_rng(13).standard_normal((1, 3, 24))
    before = layer(x)
    mine += 1  # the layer has copies of its own
    assert np.array_equal(layer(x), before)
    for change in (lambda: setattr(layer, "W_q", mine), lambda: layer.load_parameters({}),
                   lambda: layer.parameters()["W_k"].__setitem__(0, 1.0)):
        with pytest.raises(ValueError, match=r"frozen|read-only"):
            change()
    layer.unfreeze().W_q = mine * 2
    assert not np.array_equal(layer(x), before)


def test_astype():
    layer = random_layer()
    wide = layer.astype(np.float64)
    x = np.random.default_rng(9).standard_normal((2, 4, 24))
    assert wide.dtype == np.float64 and layer.dtype == np.float32
    assert wide(x).dtype == np.float64
    assert np.abs(wide(x) - layer(x)).max() < 1e-5
    assert not np.shares_memory(wide.W_q, layer.W_q)


def test_input_is_cast_to_the_layer():
    layer = random_layer()
    x = np.random.default_rng(10).standard_normal((2, 4, 24))
    assert layer(x).dtype == np.float32
    assert np.array_equal(layer(x), layer(x.astype(np.float32)))


@pytest.mark.parametrize("frozen", [False, True])
def test_copies(frozen):
    layer = random_layer(dropout=0.1, num_kv_heads=2)
    if frozen:
        layer.freeze()
    x = np.random.default_rng(11).standard_normal((2, 4, 24))
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.frozen == frozen
        assert np.array_equal(other(x), layer(x))
        assert repr(other) == repr(layer)
    deep = copy.deepcopy(layer).unfreeze()
    deep.W_q[...] = 0
    assert not np.array_equal(deep(x), layer(x))


def test_deep_copies_share_nothing():
    class Logged(mha.MultiHeadAttention):
        log: list[int]

    first, second = Logged(8, 2), mha.MultiHeadAttention(8, 2)
    first.log, second.W_q = [], first.W_q
    copied, other = copy.deepcopy([first, second])
    copied.log.append(1)
    copied.W_q[:] = 0
    assert first.log == [] and first.W_q.any()
    assert not other.W_q.any()  # these two shared it


def test_repr():
    assert repr(mha.MultiHeadAttention(512, 8)) == "MultiHeadAttention(512, 8, dtype=float32)"
    layer = random_layer(num_kv_heads=2, use_bias=False, dropout=0.1, dtype=np.float64).freeze()
    assert repr(layer) == ("MultiHeadAttention(24, 4, use_bias=False, dropout=0.1, num_kv_heads=2,"
                           " dtype=float64, frozen)")
    wide = mha.MultiHeadAttention(10**400, 1, head_dim=1, query_dim=1, key_dim=1, output_dim=1)
    assert repr(wide).endswith("000, 1, head_dim=1, query_dim=1, key_dim=1, output_dim=1,"
                               " dtype=float32)")


@pytest.mark.parametrize("width", [256, 1024])
def test_widths_whose_rows_share_cache_sets(width):
    layer = mha.MultiHeadAttention(width, 8, rng=0)
    weights = list(layer.parameters().values())
    x = np.random.default_rng(12).standard_normal((2, 20, width), np.float32)

    def ours(x, *parameters):
        return mha.multi_head_attention(x, x, x, *parameters[:4], num_heads=8)

    def numpys(x, *parameters):
        return reference.multi_head_attention(x, x, x, *parameters[:4], num_heads=8)

    assert_accurate(ours, numpys, [x, *weights[:4]], {})
