"""Arrays whose numbers lie at any address, as np.frombuffer and fields of records give them: the
bits of aligned ones, wherever arrays are taken."""

import itertools

import numpy as np
import pytest
from half_types import BFLOAT16

import mha

RNG = np.random.default_rng(0)
HALVES = (np.float16, BFLOAT16)
TYPES = (*HALVES, np.float32, np.float64)


def misaligned(array):
    moved = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert not moved.flags.aligned
    return moved


def same_bits(got, wanted):
    return (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def fit_together(stored, given):
    return (stored, given) not in ((np.float16, BFLOAT16), (BFLOAT16, np.float16))


@pytest.mark.parametrize(("stored", "given"), [
    pair for pair in itertools.product(TYPES, TYPES) if fit_together(*pair)])
def test_caches(stored, given):
    array, found = numbers(2, 3, 5, 8, dtype=given), []
    for rows in (array, misaligned(array)):
        cache = mha.KVCache(2, 3, 8, dtype=stored)
        cache.append(rows, rows)
        found.append((cache.key, cache.value))
    assert same_bits(*[key for key, _ in found]) and same_bits(*[value for _, value in found])


@pytest.mark.parametrize("dtype", TYPES)
def test_layers(dtype):
    x, found = numbers(2, 5, 8, dtype=dtype), []
    for as_given in (np.array, misaligned):
        layer = mha.MultiHeadAttention(8, 2, rng=0, dtype=dtype)
        layer.W_q = as_given(layer.W_q)
        layer.load_parameters({name: as_given(array)
                               for name, array in layer.parameters().items()})
        rows = as_given(x)
        output, pullback = layer.vjp(rows)
        found.append([layer(rows), output, pullback(as_given(output)).W_q,
                      layer(rows, cache=layer.new_cache(2)), layer.freeze()(rows)])
    assert all(same_bits(*results) for results in zip(*found, strict=True))


def calls(dtype):
    q, x = numbers(2, 3, 5, 8, dtype=dtype), numbers(2, 5, 8, dtype=dtype)
    w, positions = numbers(8, 8, dtype=dtype), np.arange(5)
    bias, mask = numbers(5, 5, dtype=dtype), RNG.random((5, 5)) < 0.7
    heads, lse = numbers(3, dtype=dtype), numbers(2, 3, 5)
    starts, lengths = np.array([0, 2, 5]), np.array([3, 5])
    return {
        "attention": (mha.scaled_dot_product_attention, [q, q, q],
                      {"bias": bias, "mask": mask, "key_lengths": lengths, "alibi": heads,
                       "query_offset": np.array([0, 1]), "sinks": heads}),
        "additive": (mha.additive_attention, [x, x, x, w, w, w[0]], {"mask": mask}),
        "ragged": (mha.scaled_dot_product_attention_varlen, [x[0, :, None]] * 3 + [starts], {}),
        "figure": (mha.multi_head_attention, [x, x, x, w, w, w, w],
                   {"num_heads": 2, "b_q": w[0], "q_norm": w[0], "k_norm": w[0],
                    "rotary": mha.Rotary(4), "positions": positions}),
        "linear": (mha.linear, [x, w, w[0]], {}), "split": (mha.split_heads, [x, 2], {}),
        "merge": (mha.merge_heads, [q], {}), "rotary": (mha.Rotary(4), [q], {}),
        "parts": (lambda a, b, c, d: mha.merge_attention([a, b], [c, d])[0], [q, q, lse, lse], {})}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", calls(np.float32))
def test_functions(name, dtype):
    function, arguments, options = calls(dtype)[name]

    def moved(value):
        is_array = isinstance(value, np.ndarray) and value.itemsize > 1
        return misaligned(value) if is_array else value

    assert same_bits(function(*map(moved, arguments),
                              **{name: moved(value) for name, value in options.items()}),
                     function(*arguments, **options))
