"""No call mixes float16 with bfloat16, or bfloat16 with integers: TypeErrors that name the
argument, whichever of a call's arrays they are."""

import numpy as np
import pytest
from half_types import BFLOAT16

import mha
from mha import _core

HALF = np.dtype(np.float16)
FORBIDDEN = [(HALF, BFLOAT16), (BFLOAT16, HALF), (BFLOAT16, np.dtype(np.int32)),
             (BFLOAT16, np.dtype(np.uint16)), (BFLOAT16, np.dtype(bool))]
ALLOWED = [(BFLOAT16, np.dtype(np.float32)), (BFLOAT16, np.dtype(np.float64)),
           (HALF, np.dtype(np.float32)), (np.dtype(np.float32), BFLOAT16)]

LAYER_SHAPES = {
    "query": (2, 3, 8), "key": (2, 3, 8), "value": (2, 3, 8), "W_q": (8, 8), "W_k": (8, 8),
    "W_v": (8, 8), "W_o": (8, 8), "b_q": (8,), "b_k": (8,), "b_v": (8,), "b_o": (8,),
    "head_gate": (2,), "bias": (3, 3), "alibi": (2,), "relative_bias": (2, 3), "sinks": (2,),
    "q_norm": (4,), "k_norm": (4,)}
OPTIONS = {name: LAYER_SHAPES[name] for name in ("bias", "alibi", "relative_bias", "sinks")}
HEADS = {"query": (1, 2, 3, 4), "key": (1, 2, 3, 4), "value": (1, 2, 3, 4)}
ROWS = {"query": (3, 2, 4), "key": (3, 2, 4), "value": (3, 2, 4), "sinks": (2,), "alibi": (2,)}
ADDITIVE = {"query": (3, 8), "key": (3, 8), "value": (3, 8), "W_q": (8, 4), "W_k": (8, 4),
            "w_v": (4,)}
LINEAR = {"x": (3, 8), "weight": (8, 4), "bias": (4,)}

# A function of arrays by name, and their shapes.
FUNCTIONS = {
    "linear": (mha.linear, LINEAR),
    "linear_vjp": (mha.linear_vjp, LINEAR),
    "attention": (mha.scaled_dot_product_attention, HEADS | OPTIONS),
    "attention_vjp": (mha.scaled_dot_product_attention_vjp, HEADS | OPTIONS),
    "additive": (mha.additive_attention, ADDITIVE),
    "additive_vjp": (mha.additive_attention_vjp, ADDITIVE),
    "varlen": (lambda **arrays: mha.scaled_dot_product_attention_varlen(
        **arrays, query_starts=[0, 3]), ROWS),
    "varlen_vjp": (lambda **arrays: mha.scaled_dot_product_attention_varlen_vjp(
        **arrays, query_starts=[0, 3]), ROWS),
    "figure": (lambda **arrays: mha.multi_head_attention(**arrays, num_heads=2), LAYER_SHAPES),
    "figure_vjp": (lambda **arrays: mha.multi_head_attention_vjp(**arrays, num_heads=2),
                   LAYER_SHAPES),
}
CASES = [(function, name) for function, (_, shapes) in FUNCTIONS.items() for name in shapes]


@pytest.mark.parametrize(("function", "odd"), CASES, ids=str)
def test_functions(function, odd):
    call, shapes = FUNCTIONS[function]
    for dtype, other in FORBIDDEN + ALLOWED:
        arrays = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
        arrays[odd] = arrays[odd].astype(other)
        if (dtype, other) in ALLOWED:
            call(**arrays)
            continue
        with pytest.raises(TypeError, match=r"got an array of \w+, wanted .*bfloat16") as error:
            call(**arrays)
        assert str(error.value).split(":")[0] in shapes


@pytest.mark.parametrize(("dtype", "other"), FORBIDDEN, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_layers(dtype, other, frozen):
    """The layer's parameters are arrays of the call too, packed or not."""
    layer = mha.MultiHeadAttention(8, 2, dtype=dtype)
    layer = layer.freeze() if frozen else layer
    wrong, x = np.ones((2, 3, 8), other), np.ones((2, 3, 8), dtype)
    calls = [lambda: layer(wrong), lambda: layer(x, wrong), lambda: layer.vjp(wrong),
             lambda: layer(wrong, cache=layer.new_cache(2)), lambda: layer.new_memory(wrong),
             lambda: layer(x, head_gate=np.ones(2, other)),
             lambda: layer(x, bias=np.ones((3, 3), other))]
    for call in calls:
        with pytest.raises(TypeError, match=r": got (an array|a packed weight) of .*float16"):
            call()
    cache = layer.new_cache(2)
    with pytest.raises(TypeError, match="key: got"):
        cache.append(np.ones((2, 2, 3, 4), other), np.ones((2, 2, 3, 4), np.float32))


def test_packed_weights():
    for dtype, other in ((HALF, BFLOAT16), (BFLOAT16, HALF)):
        with pytest.raises(TypeError, match=r"weight: got a packed weight of float16|x: got"):
            _core.linear(np.ones((3, 8), dtype), _core.pack_weight(np.ones((8, 4), other)), None)


def test_caches():
    """key and value of one append, to a cache that would take either."""
    cache = mha.KVCache(1, 1, 4)
    ones = np.ones((1, 1, 2, 4), BFLOAT16)
    for other in (np.float16, np.int32):
        for pair in ((ones, ones.astype(other)), (ones.astype(other), ones)):
            with pytest.raises(TypeError, match=r"got an array of .*, wanted bfloat16, float32"):
                cache.append(*pair)
    assert cache.lengths == 0
    cache.append(ones, ones)
    cache.append(ones, ones.astype(np.float64))
    assert cache.lengths == 4


def test_merged_parts():
    outputs, lses = [np.ones((3, 4), BFLOAT16)] * 2, [np.ones(3, np.float32)] * 2
    for other in (np.float16, np.int32):
        with pytest.raises(TypeError, match="bfloat16"):
            mha.merge_attention([outputs[0], outputs[1].astype(other)], lses)


def test_gradients_of_outputs():
    """What comes back has no other halves than what went out."""
    x = np.ones((2, 3, 8), np.float32)
    layer = mha.MultiHeadAttention(8, 2)
    for dtype, other in FORBIDDEN:
        half = layer.astype(dtype)
        for output, pullback in (
                mha.linear_vjp(x.astype(dtype), half.W_q), half.vjp(x.astype(dtype)),
                mha.scaled_dot_product_attention_vjp(*[x.astype(dtype)] * 3),
                mha.scaled_dot_product_attention_varlen_vjp(*[x.astype(dtype)] * 3, [0, 2])):
            with pytest.raises(TypeError, match="grad_output: got an array of"):
                pullback(np.ones(output.shape, other))
            pullback(np.ones(output.shape, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_the_error_of_an_additive_mask_says_so(dtype):
    x = np.ones((3, 4), np.float32)
    for numbers, hint in (([0, -np.inf, 0], "give it as bias="), ([0, -1e4, 0], "give it as bias="),
                          ([0, 1, 1], "write mask != 0"), ([-0.0, 1, 0], "write mask != 0")):
        mask = np.array(numbers, np.float32).astype(dtype)
        with pytest.raises(TypeError, match=hint):
            mha.scaled_dot_product_attention(x, x, x, mask=mask)
