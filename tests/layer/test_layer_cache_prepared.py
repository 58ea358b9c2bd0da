"""Layers as today's models have them, with norms, rotation, a window, sinks and relative biases of
their own: decoding with a cache gives the bits of one causal call."""

import numpy as np
import pytest

import mha

# (embed_dim, num_heads, num_kv_heads, head_dim, dims that rotate)
SIZES = [(256, 4, 2, 64, 64), (48, 3, 3, 16, 16), (160, 2, 1, 80, 32)]
PIECES = [(1,) * 150, (7,) * 21 + (3,), (100, 50)]


def layer_of(size, dtype, **settings):
    embed_dim, num_heads, num_kv_heads, head_dim, _ = size
    rng = np.random.default_rng(0)
    layer = mha.MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads,
                                   head_dim=head_dim, dtype=dtype, rng=1, **settings)
    for parameter in layer.parameters().values():
        parameter += 0.1 * rng.standard_normal(parameter.shape).astype(dtype)
    return layer


def rows_in_pieces(layer, x, pieces, **arguments):
    cache, at, outputs = layer.new_cache(len(x)), 0, []
    for count in pieces:
        outputs.append(layer(x[:, at:at + count], cache=cache, **arguments))
        at += count
    return np.concatenate(outputs, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("qk_norm", [None, "head", "width"])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_have_the_bits_of_one_call(size, qk_norm, layout, dtype):
    layer = layer_of(size, dtype, rotary=mha.Rotary(size[-1], layout=layout), qk_norm=qk_norm,
                     norm_offset=1.0, window=(40, 0), sinks=True, relative_bias=5, scale=0.2)
    x = np.random.default_rng(2).standard_normal((2, 150, size[0])).astype(dtype)
    whole = layer(x, causal=True)
    for pieces in PIECES:
        assert np.array_equal(rows_in_pieces(layer, x, pieces), whole)
    assert np.array_equal(rows_in_pieces(layer.freeze(), x, PIECES[1]), whole)


@pytest.mark.parametrize("head_dim", [32, 96, 160, 192, 224])
def test_one_row_takes_the_panels_of_a_head_in_one_go(head_dim):
    """Of two heads that rotate, each of 1 to 7 panels."""
    layer = layer_of((2 * head_dim, 2, 2, head_dim, head_dim), np.float32,
                     rotary=mha.Rotary(head_dim)).freeze()
    x = np.random.default_rng(4).standard_normal((1, 7, 2 * head_dim)).astype(np.float32)
    assert np.array_equal(rows_in_pieces(layer, x, (1,) * 7), layer(x, causal=True))


def test_positions_of_a_call_with_a_cache():
    layer = layer_of(SIZES[0], np.float32, rotary=mha.Rotary(64))
    x = np.random.default_rng(3).standard_normal((2, 9, 256)).astype(np.float32)
    positions = np.array([[5, 6, 7, 8, 9, 10, 11, 12, 13], [0, 2, 4, 6, 8, 10, 12, 14, 16]])
    whole = layer(x, causal=True, positions=positions)
    cache = layer.new_cache(2)
    parts = [layer(x[:, at:at + 3], cache=cache, positions=positions[:, at:at + 3])
             for at in (0, 3, 6)]
    assert np.array_equal(np.concatenate(parts, 1), whole)
    with pytest.raises(ValueError, match=r"positions: got shape \(2,\), wanted \(1,\) or \(2, 1\)"):
        layer(x[:, :1], cache=cache, positions=[1, 2])
    with pytest.raises(ValueError, match=r"positions: got 18446744073709551615, wanted at most 92"):
        layer(x[:, :1], cache=cache, positions=np.array([2**64 - 1], np.uint64))
    with pytest.raises(ValueError, match="key_positions: got some with a cache, wanted none"):
        layer(x[:, :1], cache=cache, key_positions=[1])


@pytest.mark.parametrize("qk_norm", ["head", "width"])
def test_a_memory_turns_its_keys_by_their_positions(qk_norm):
    layer = layer_of(SIZES[0], np.float32, rotary=mha.Rotary(64), qk_norm=qk_norm)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 5, 256)).astype(np.float32)
    key = rng.standard_normal((2, 11, 256)).astype(np.float32)
    memory = layer.new_memory(key, key_positions=np.arange(11) + 3)
    whole = layer(x, key, positions=np.arange(5), key_positions=np.arange(11) + 3)
    assert np.array_equal(layer(x, cache=memory), whole)


def test_a_layers_alibi_counts_on_with_its_cache():
    layer = layer_of(SIZES[0], np.float32, alibi=mha.alibi_slopes(4))
    x = np.random.default_rng(5).standard_normal((1, 150, 256)).astype(np.float32)
    assert np.array_equal(rows_in_pieces(layer, x, PIECES[0]), layer(x, causal=True))
    memory = layer.new_memory(x)
    with pytest.raises(ValueError, match="alibi: got one with a memory"):
        layer(x[:, :1], cache=memory)
