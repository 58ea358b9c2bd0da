"""Input made to break things: arguments that change other arguments while they are converted,
random calls of every function of the core, and 10,000 calls of each that must leave nothing
behind."""

import contextlib
import datetime
import gc
import random
import resource
import sys

import bad_input
import numpy as np
import pytest
from bad_input import f
from exchange_table import FUNCTIONS, Lent
from exchange_table import capsule as exchange_capsule
from option_cases import NUMBERS

import mha
from mha import _core
from mha._functions.options import ATTENTION, AttentionOptions
from mha._functions.rotary import as_record

SQUARE = (700, 32)


class Hostile:
    """Changes another array or list in the middle of being converted itself."""

    def __init__(self, change, array=None):
        self.change = change
        self.array = array

    def __array__(self, dtype=None, copy=None):
        self.change()
        return self.array

    def __index__(self):
        self.change()
        return 1

    def __float__(self):
        self.change()
        return 1.0


def resize(x):
    x.resize((1,) * x.ndim, refcheck=False)


def enlarge(x):
    x.resize((2 * len(x), *x.shape[1:]), refcheck=False)


def reshape(x):
    x.shape = (1, x.size)


def retype(x):
    x.dtype = np.int16


CHANGES = {"resize": resize, "enlarge": enlarge, "reshape": reshape, "retype": retype}


def figure(x, **options):
    W = f(32, 32)
    good = {"query": x, "key": x, "value": x, "W_q": W, "W_k": W, "W_v": W, "W_o": W,
            "num_heads": 1}
    return mha.multi_head_attention(**good | options)


VISIBLE = np.ones((700, 700), bool)
LENGTH = np.array(5)
HOSTILE_CALLS = {
    "key": lambda x, h: mha.scaled_dot_product_attention(x, h(f(*SQUARE)), f(*SQUARE)),
    "value": lambda x, h: mha.scaled_dot_product_attention(x, x, h(f(*SQUARE))),
    "mask": lambda x, h: mha.scaled_dot_product_attention(x, x, x, mask=h(VISIBLE)),
    "bias": lambda x, h: mha.scaled_dot_product_attention(x, x, x, bias=h(f(700, 700))),
    "changed bias": lambda x, h: mha.scaled_dot_product_attention(
        f(*SQUARE), f(32, 32), f(32, 32), bias=x, scale=h(None)),
    "alibi": lambda x, h: mha.scaled_dot_product_attention(x, x, x, alibi=h(f(1))),
    "relative_bias": lambda x, h: mha.scaled_dot_product_attention(x, x, x,
                                                                   relative_bias=h(f(1, 701))),
    "changed relative_bias": lambda x, h: mha.scaled_dot_product_attention(
        f(*SQUARE), f(32, 32), f(32, 32), relative_bias=x, scale=h(None)),
    "sinks": lambda x, h: mha.scaled_dot_product_attention(x, x, x, sinks=h(f(1))),
    "key_lengths": lambda x, h: mha.scaled_dot_product_attention(x, x, x, key_lengths=h(LENGTH)),
    "query_offset": lambda x, h: mha.scaled_dot_product_attention(x, x, x, query_offset=h(LENGTH)),
    "window": lambda x, h: mha.scaled_dot_product_attention(x, x, x, window=(h(None), 1)),
    **{name: lambda x, h, name=name: mha.scaled_dot_product_attention(
        x, x, x, **{name: h(None)}, rng=1) for name in NUMBERS},
    "changed out": lambda x, h: mha.scaled_dot_product_attention(
        f(*SQUARE), f(*SQUARE), f(*SQUARE), scale=h(None), out=x),
    "weight": lambda x, h: mha.linear(x, h(f(32, 32))),
    "linear bias": lambda x, h: mha.linear(x, f(32, 32), h(f(32))),
    "changed weight": lambda x, h: mha.linear(f(700, 700), x, h(f(32))),
    "num_heads to split": lambda x, h: mha.split_heads(x, h(None)),
    "additive W_q": lambda x, h: mha.additive_attention(x, x, x, h(f(32, 8)), f(32, 8), f(8)),
    "w_v": lambda x, h: mha.additive_attention(x, x, x, f(32, 8), f(32, 8), h(f(8))),
    "changed W_k": lambda x, h: mha.additive_attention(
        f(9, 32), f(9, 700), f(9, 3), f(32, 32), x, h(f(32))),
    "W_q": lambda x, h: figure(x, W_q=h(f(32, 32))),
    "b_o": lambda x, h: figure(x, b_o=h(f(32))),
    "head_gate": lambda x, h: figure(x, head_gate=h(f(1))),
    "num_heads": lambda x, h: figure(x, num_heads=h(None)),
    "num_kv_heads": lambda x, h: figure(x, num_kv_heads=h(None)),
    "layer mask": lambda x, h: mha.MultiHeadAttention(32, 4)(x, mask=h(VISIBLE)),
    "lses": lambda x, h: mha.merge_attention([x, x], [f(700), h(f(700))]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", HOSTILE_CALLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # setting shape, from NumPy 2.5 on
def test_argument_that_changes_another(call, change):
    x = f(*SQUARE)
    with contextlib.suppress(ValueError, TypeError):  # of the check that comes after the change
        HOSTILE_CALLS[call](x, lambda array: Hostile(lambda: CHANGES[change](x), array))
    assert x.shape != SQUARE or x.dtype != np.float32
    assert bad_input.answer() == bad_input.GOOD_ANSWER


def test_lists_that_empty_themselves():
    outputs, lses, window = [], [], []

    def clear():
        outputs.clear()
        lses.clear()

    outputs += [Hostile(clear, f(3, 4)), f(3, 4), f(3, 4)]
    lses += [f(3), f(3), f(3)]
    output, _ = mha.merge_attention(outputs, lses)
    assert not outputs
    np.testing.assert_allclose(output, 1, rtol=1e-6)

    window += [Hostile(window.clear), 1]
    output = mha.scaled_dot_product_attention(f(3, 4), f(3, 4), f(3, 4), window=window)
    assert not window
    np.testing.assert_allclose(output, 1, rtol=1e-6)


def with_options(function, positional, **keywords):
    """A call that takes the fields of the options and the keywords by position, and good arguments
    for it."""
    def call(*values):
        inputs, rest = values[:len(positional)], values[len(positional):]
        options = AttentionOptions(*rest[:len(ATTENTION)])
        return function(*inputs, options, **dict(zip(keywords, rest[len(ATTENTION):],
                                                     strict=True)))

    return call, [*positional, *AttentionOptions(), *keywords.values()]


def numbers_and_scales():
    """Of a weight in blocks."""
    return [np.ones((64, 5), np.int8), np.ones((2, 5), np.float16)]


def calls_of_the_core():
    """Each function of the core and good arguments for it, by position."""
    a = bad_input.fresh_arrays()
    packed = _core.pack_weight(a.W)
    blocks = numbers_and_scales()
    inputs = [a.query, a.key, a.value]
    weights = [a.W, a.W, a.W, a.W, a.W, a.b, None, a.b, None, a.b, 4, None, None]
    options = AttentionOptions()
    output, saved = _core.scaled_dot_product_attention(*inputs, options, save=True)
    additive, kept_additive = _core.additive_attention(*inputs, a.W_q, a.W_k, a.w_v, options,
                                                       save=True)
    of_layer, kept_layer = _core.multi_head_attention(a.x, a.x, a.x, *weights, options, save=True)
    linear, kept_linear = _core.linear(a.x, a.W, a.b, save=True)
    record, halves = as_record(mha.Rotary(2)), a.x.astype(np.float16)
    turned, kept_turned = _core.rotary(a.query, record, None, save=True)
    to_prepare = [a.x, 4, record, np.arange(a.x.shape[1]), np.ones(3), 1e-6, 0.0]
    prepared, kept_prepared = _core.prepare_heads(*to_prepare, save=True)
    gated, kept_gate = _core.output_gate(a.x, a.x, 4, save=True)
    rows = [np.ones((11, 4, 3), np.float32)] * 3
    starts = [np.array([0, 4, 11]), None]
    ragged, kept_ragged = _core.scaled_dot_product_attention_varlen(*rows, *starts, options,
                                                                    save=True)
    flags, exchange = {"return_weights": False, "save": False}, exchange_capsule()
    return {
        "scaled_dot_product_attention": with_options(
            _core.scaled_dot_product_attention, inputs, **flags, return_lse=False, out=None),
        "scaled_dot_product_attention_backward": (
            _core.scaled_dot_product_attention_backward, [saved, output, None, {"query", "bias"}]),
        "additive_attention": with_options(
            _core.additive_attention, [*inputs, a.W_q, a.W_k, a.w_v], **flags),
        "additive_attention_backward": (
            _core.additive_attention_backward, [kept_additive, additive, None, {"w_v"}]),
        "multi_head_attention": with_options(
            _core.multi_head_attention,
            [a.x, a.x, a.x, a.W, packed, *weights[2:]], **flags, return_lse=False, dtype=None),
        "multi_head_attention-cached": with_options(
            _core.multi_head_attention, [a.x, a.x, a.x, a.W, packed, *weights[2:]],
            return_weights=False, dtype=None, save=False, cached_key=f(2, 4, 9, 3),
            cached_value=f(2, 4, 9, 3), append=lambda key, value: None),
        "multi_head_attention_backward": (
            _core.multi_head_attention_backward, [kept_layer, of_layer, None, {"query", "b_q"}]),
        "output_gate": (_core.output_gate, [a.x, a.x, 4]),
        "output_gate_backward": (_core.output_gate_backward,
                                 [kept_gate, gated, None, {"merged", "logits"}]),
        "linear": (_core.linear, [a.x, packed, a.b]),
        "linear_backward": (_core.linear_backward, [kept_linear, linear, None, {"x", "weight"}]),
        "pack_weight": (_core.pack_weight, [a.W]),
        "unpack_weight": (_core.unpack_weight, [packed]),
        "packed_bytes": (_core.packed_bytes, [packed]),
        "pack_blocks": (_core.pack_blocks, [*blocks, 8]),
        "unpack_blocks": (_core.unpack_blocks, [_core.pack_blocks(*blocks, 4)]),
        "split_heads": (_core.split_heads, [a.x, 4]),
        "merge_heads": (_core.merge_heads, [a.query]),
        "merge_attention": (_core.merge_attention, [[a.out, a.out], [a.lse, a.lse]]),
        "round_numbers": (_core.round_numbers, [a.x, halves]),
        "rotary": (_core.rotary, [a.query, record, np.arange(len(a.query[0, 0]))]),
        "rotary_backward": (_core.rotary_backward, [kept_turned, turned, None, {"x"}]),
        "prepare_heads": (_core.prepare_heads, to_prepare),
        "prepare_heads_backward": (
            _core.prepare_heads_backward, [kept_prepared, prepared, None, {"x", "norm"}]),
        "scaled_dot_product_attention_varlen": with_options(
            _core.scaled_dot_product_attention_varlen, [*rows, *starts], return_lse=False,
            save=False),
        "scaled_dot_product_attention_varlen_backward": (
            _core.scaled_dot_product_attention_varlen_backward,
            [kept_ragged, ragged, None, {"query", "sinks"}]),
        "arrays_of_tensors": (
            _core.arrays_of_tensors, [(Lent,), exchange, FUNCTIONS, (Lent(a.x), None)]),
        "tensor_of_array": (_core.tensor_of_array, [exchange, a.x, True]),
        "as_array": (_core.as_array, [a.x, "x"]),
        "saved_attention": with_options(_core.saved_attention, [*inputs, a.out, a.lse]),
        "dropout_mask": (_core.dropout_mask, [(5, 6), 0.5, 1, (1, 2, 3, 4)]),
        "checked_num_threads": (_core.checked_num_threads, [2]),
    }


def strange_objects():
    a = bad_input.fresh_arrays()
    arrays = [a.query, a.key, a.value, a.out, a.x, a.W, a.b, a.W_q, a.w_v, a.lse, a.readonly,
              f(), f(0), f(0, 0), f(5, 0), f(2, 4, 5, 0), f(2, 4, 0, 8), f(0, 4, 5, 8), f(3, 5, 7),
              f(2, 2, 6, 8)[:, :, ::-1], f(2, 4, 8, 5).swapaxes(2, 3), f(*[1] * 32),
              f(2, 4, 5, 8).astype(">f4"), np.ones((2, 2, 6, 8), np.int8), a.query > 0.5,
              a.query.astype(np.float64), a.query.astype(np.float16), np.ones((5, 6), bool),
              bad_input.number(2, 4, 2**45, 8), bad_input.number(2, 2, 6, 8), np.array([3, 6]),
              np.array([3, -6]), np.array([[9]], np.uint64), np.ma.masked_array(a.query)]
    others = [values[0] for values in (bad_input.WRONG_ARRAYS + bad_input.WRONG_NUMBERS
                                       + bad_input.WRONG_INTS + bad_input.WRONG_FLAGS)]
    plain = [None, True, 0, 1, 2, 3, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, 0.5, -1.0,
             1e-320, float("nan"), float("inf"), "", "zeros", "uniform", (), (0, 0), (1, None),
             (3, 2), [1, 2, 3], [f(3, 4)], {}, {1}, slice(1), ..., int, memoryview(a.query),
             _core.pack_weight(f(12, 12).astype(np.float64)), np.dtype("f4"), np.dtype("f8"),
             _core.pack_blocks(*numbers_and_scales(), 8), *numbers_and_scales(), 8, 4,
             np.random.default_rng(0), datetime.datetime_CAPI]
    return arrays + others + plain


@pytest.mark.parametrize("name", calls_of_the_core())
def test_random_arguments(name):
    """Two thousand calls with one to three arguments replaced, some with one too few or many."""
    generator = random.Random(name)
    function, good = calls_of_the_core()[name]
    strange = [*strange_objects(), *good]
    function(*good)
    raised = 0
    for _ in range(2000):
        arguments = list(good)
        for _ in range(generator.choice((1, 1, 2, 3))):
            arguments[generator.randrange(len(arguments))] = generator.choice(strange)
        if generator.random() < 0.02:
            arguments = generator.choice((arguments[:-1], [*arguments, None]))
        try:
            function(*arguments)
        except (ValueError, TypeError, MemoryError):
            raised += 1
    assert 0 < raised < 2000
    assert bad_input.answer() == bad_input.GOOD_ANSWER


def test_what_stands_twice_is_converted_once():
    """The gradients of self-attention add up: three arrays of three shapes would not."""

    class Shrinking:
        asked = 0

        def __array__(self, dtype=None, copy=None):
            self.asked += 1
            return np.ones((1, 400 if self.asked == 1 else 4, 8), np.float32)

    layer, shrinking = mha.MultiHeadAttention(8, 2, rng=0), Shrinking()
    output, pullback = layer.vjp(shrinking)
    assert shrinking.asked == 1
    assert pullback(output).query.shape == output.shape == (1, 400, 8)
    arrays = [np.ones((1, length, 8), np.float32) for length in (9, 4, 4)]
    for same in ({"key_is_query": True}, {"key_is_query": True, "value_is_key": True}):
        with pytest.raises(ValueError, match="key: got shape"):
            _core.multi_head_attention(*arrays, *layer._state.call, None, AttentionOptions(),
                                       save=True, **same)


def test_a_record_of_another_length_is_refused():
    a = bad_input.fresh_arrays()
    for record in ((), AttentionOptions()[:-1], (*AttentionOptions(), None), None, [None] * 11):
        with pytest.raises(TypeError, match="options: got"):
            _core.scaled_dot_product_attention(a.query, a.key, a.value, record)
    with pytest.raises(TypeError, match="causal: got a keyword that"):
        _core.scaled_dot_product_attention(a.query, a.key, a.value, AttentionOptions(),
                                           causal=True)
    with pytest.raises(TypeError, match="got 2 arguments by position, wanted 4"):
        _core.scaled_dot_product_attention(a.query, a.key)


def calls_that_must_not_leak():
    big = f(64, 64)
    W = f(64, 64)
    mask = np.ones((64, 64), bool)
    out = f(64, 64)
    lse = f(64)
    layer = mha.MultiHeadAttention(64, 4, rng=0)
    frozen = mha.MultiHeadAttention(64, 4, rng=0).freeze()
    attend = mha.scaled_dot_product_attention
    inputs = [big, W, mask, out, lse, layer.W_q, frozen.W_q]
    good = [
        lambda: attend(big, big, big, mask=mask, bias=W, scale=1, return_weights=True,
                       return_lse=True),
        lambda: attend(big, big, W, out=out, window=(3, None), query_offset=2),
        lambda: mha.additive_attention(big, big, big, W, W, lse, mask=mask, return_weights=True),
        lambda: mha.linear(big, W, lse), lambda: mha.split_heads(big, 4),
        lambda: mha.merge_heads(big[None]), lambda: mha.merge_attention([big, W], [lse, lse]),
        lambda: layer(big[:8], mask=mask[:8, :8]), lambda: frozen(big[:8], head_gate=lse[:4]),
        lambda: mha.dropout_mask((64, 64), 0.5, 1), lambda: _core.pack_weight(W)]
    bad = [
        lambda: attend(big, big, big[:9]), lambda: attend(big, big, big, mask=big),
        lambda: attend(big, big, big, mask=mask, bias=big, scale="1"),
        lambda: attend(big, big, W, out=big), lambda: attend(big, big, W, window=(3, -1)),
        lambda: attend(big, big, big, bias=[[1], [1, 2]]), lambda: attend(big, None, W),
        lambda: mha.additive_attention(big, big, big, W, W, W), lambda: mha.linear(big, W, big),
        lambda: mha.split_heads(big, 5), lambda: mha.merge_heads(big),
        lambda: mha.merge_attention([big, W], [lse, W]), lambda: layer(big, mask=big),
        lambda: frozen(big[:, :9]), lambda: mha.dropout_mask((64, 64), 1.5, 1),
        lambda: attend(bad_input.number(64, 2**45), W, W)]
    return inputs, good, bad


def run_all(good, bad, times):
    for _ in range(times):
        for call in good:
            call()
        for call in bad:
            try:
                call()
            except (ValueError, TypeError, MemoryError):
                continue
            raise AssertionError("a bad call passed")


def test_nothing_is_left_behind(request):
    """After many calls of each, good and bad: references, Python's blocks, the process's size."""
    calls = 10_000 if request.config.getoption("--all") else 2000
    inputs, good, bad = calls_that_must_not_leak()
    shared = [np.dtype(np.float32), np.dtype(bool), np.dtype(np.int64)]
    run_all(good, bad, calls // 5)
    gc.collect()
    references = [sys.getrefcount(array) for array in inputs]
    types = [sys.getrefcount(dtype) for dtype in shared]
    blocks = sys.getallocatedblocks()
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_all(good, bad, calls)
    gc.collect()
    assert [sys.getrefcount(array) for array in inputs] == references
    assert all(abs(sys.getrefcount(dtype) - before) < calls // 10
               for dtype, before in zip(shared, types, strict=True))
    assert abs(sys.getallocatedblocks() - blocks) < calls // 10
    unit = 1 if sys.platform == "darwin" else 1024
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) * unit
    assert grown < calls * 3200  # an array takes 16 KiB
