"""Calls whose memory runs out, at each allocation that the extension reaches: run by
test_out_of_memory.py with failing_memory.c loaded, `python out_of_memory.py CASE [ROUNDS]`.

Every attempt runs in a new thread, which has no workspace yet, and raises MemoryError or returns
the right result; the call after it is right to the bit; nothing of it is left behind."""

import ctypes
import gc
import os
import re
import sys
import threading

import numpy as np

import mha
from mha import _core

ONE, ALL_FROM, AT_RANDOM = range(3)
shim = ctypes.CDLL(None)
for _name in ("disarm", "failed", "living"):
    getattr(shim, "failing_memory_" + _name).restype = ctypes.c_int64
shim.failing_memory_of.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
shim.failing_memory_arm.argtypes = [ctypes.c_int, ctypes.c_int64]

rng = np.random.default_rng(0)


def f(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


class OnlyDLPack:
    """An array of another library, which NumPy takes by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


attend, attend_vjp = mha.scaled_dot_product_attention, mha.scaled_dot_product_attention_vjp
q, k, v = f(2, 4, 9, 8), f(2, 2, 70, 8), f(2, 2, 70, 6)
out = np.empty((2, 4, 9, 6), np.float32)
grad, grad_lse = f(2, 4, 9, 6), f(2, 4, 9)
visible = rng.random((2, 1, 9, 70)) < 0.7
block_mask = mha.BlockMask.from_dense(visible)
long_key = f(1, 2, 3000, 32)
half_bias = f(4, 9, 70).astype(np.float16)
apart = f(1, 600, 2, 16).swapaxes(1, 2)
large = f(1, 4, 700, 64)
rows, starts = f(60, 4, 8), [0, 25, 25, 26, 60]
varlen, varlen_vjp = (mha.scaled_dot_product_attention_varlen,
                      mha.scaled_dot_product_attention_varlen_vjp)
x, sequence = f(2, 9, 12), f(500, 12)
W, b = [f(12, 12) for _ in range(4)], [f(12) for _ in range(4)]
wide = f(700, 40).T
additive = [f(2, 5, 8), f(2, 70, 6), f(2, 70, 4), f(8, 7), f(6, 7), f(7)]
layer = mha.MultiHeadAttention(12, 4, num_kv_heads=2, dropout=0.1, rng=0)
rotating = mha.MultiHeadAttention(12, 3, rng=0, rotary=mha.Rotary(4), qk_norm="width")
frozen = mha.MultiHeadAttention(12, 4, rng=0).freeze()
of_halves = mha.MultiHeadAttention(12, 3, rng=0, dtype=np.float16, rotary=mha.Rotary(4), sinks=True)
halves = [array.astype(np.float16) for array in (q, k, v, x)]
big_layer = mha.MultiHeadAttention(256, 4, rng=0).freeze()
big_x = f(8, 300, 256)
parts = [attend(q, k[:, :, part], v[:, :, part], return_lse=True)
         for part in (slice(0, 20), slice(20, 41), slice(41, None))]


def both(pair, *cotangents):
    output, pullback = pair
    return output, pullback(*[output if c is None else c for c in cotangents])


def fresh_pool(call):
    """In a child of a fork the pool has no threads yet; its result comes back as bytes."""
    def run():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(call().tobytes())
                os._exit(0)
            except MemoryError:
                os._exit(1)
            except BaseException:
                os._exit(2)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            result = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 1:
            raise MemoryError
        assert code == 0, f"a child ended with {code}"
        return np.frombuffer(result, np.uint8)
    return run


def on_threads(call, number=5):
    def run():
        with mha.threads(number):
            return call()
    return run


def packed_product():
    return mha.linear(x, _core.pack_weight(W[0]), b[0])


def thawed():
    fresh = mha.MultiHeadAttention(12, 4, rng=0)
    return fresh.freeze()(x)


def decoded():
    """A prompt, then a token: a call that fails leaves the cache as it was."""
    cache, results = frozen.new_cache(2, window=4), []
    for rows, lengths in ((x[:, :8], [8, 5]), (x[:, 8:], None)):
        before = cache.key.tobytes(), cache.value.tobytes(), repr(cache)
        try:
            results.append(frozen(rows, cache=cache, lengths=lengths, head_gate=b[0][:4]))
        except MemoryError:
            assert (cache.key.tobytes(), cache.value.tobytes(), repr(cache)) == before
            raise
    return tuple(results)


CASES = {
    "cache": decoded,
    "memory of an encoder": lambda: layer(x, cache=layer.new_memory(x, key_lengths=[9, 4])),
    "attention": lambda: attend(q, k, v),
    "weights and lse": lambda: attend(q, k, v, causal=True, query_offset=61, return_weights=True,
                                      return_lse=True),
    "mask": lambda: attend(q, k, v, mask=visible),
    "block mask": lambda: attend(q, k, v, mask=block_mask),
    "making a block mask": lambda: [(mha.BlockMask.documents([0, 0, 1]) & mha.BlockMask.causal(
        3)).density],
    "mask of uint8": lambda: attend(q, k, v, mask=visible.astype(np.uint8) * 3 > 0),
    "mask of lists": lambda: attend(q, k, v, mask=visible[0, 0].tolist()),
    "bias of float16": lambda: attend(q, k, v, bias=half_bias),
    "repeated bias of ints": lambda: attend(q, k, v, bias=np.broadcast_to(np.arange(70), (9, 70))),
    "lengths of lists": lambda: attend(q, k, v, key_lengths=[30, 70], query_offset=[1, 2]),
    "window and scale": lambda: attend(q, k, v, window=[3, 4], scale=np.float32(0.3)),
    "uniform empty rows": lambda: attend(q, k, v, key_lengths=[0, 70], empty_rows="uniform"),
    "dropout": lambda: attend(q, k, v, dropout=0.3, rng=1),
    "few queries": lambda: attend(q[:1, :, :1], k[:1], v[:1]),
    "few queries, many keys": lambda: attend(long_key[:, :, :4], long_key, long_key,
                                             return_weights=True, return_lse=True),
    "out": lambda: attend(q, k, v, out=out).copy(),
    "ints": lambda: attend(np.arange(12).reshape(3, 4), np.arange(8).reshape(2, 4),
                           [[1, 2], [3, 4]]),
    "other types": lambda: attend(q.astype(np.float64), k.astype(np.float16), v),
    "columns apart": lambda: attend(q[..., ::-1], k[..., ::2].repeat(2, -1)[..., ::-1], v),
    "rows apart": lambda: attend(apart, apart, apart),
    "dlpack": lambda: attend(OnlyDLPack(q), OnlyDLPack(k), OnlyDLPack(v)),
    "large results": lambda: attend(large, large, large, return_weights=True),
    "gradients": lambda: both(attend_vjp(q, k, v, mask=visible), grad, grad_lse),
    "gradients, rows apart": lambda: both(attend_vjp(apart, apart, apart, causal=True), None),
    "gradient of a shared bias": lambda: both(attend_vjp(q, k, v, bias=f0, dropout=0.1, rng=2),
                                              grad),
    "ragged batch": lambda: varlen(rows, rows, rows, starts, causal=True, return_lse=True),
    "ragged batch, other starts": lambda: varlen(
        rows, rows[:50, :2], rows[:50, :2].tolist(), np.int32(starts), [0, 40, 40, 50, 50],
        query_offset=[1, 2, 3, 4], alibi=f1, dropout=0.1, rng=3),
    "ragged batch's gradients": lambda: both(varlen_vjp(
        rows, rows, rows, starts, alibi=f1, sinks=f1, relative_bias=f2[0, :1, 0, :7]), None),
    "layer over a ragged batch": lambda: both(layer.vjp(
        sequence[:60], starts=starts, head_gate=[1, 2, 3, 4]), None),
    "additive attention": lambda: mha.additive_attention(*additive, mask=visible[:, 0, :5],
                                                         return_weights=True),
    "additive attention's gradients": lambda: both(mha.additive_attention_vjp(
        *additive, key_lengths=[9, 70], dropout=0.1, rng=3), None),
    "the figure": lambda: mha.multi_head_attention(
        x, x, x, *W, b_q=b[0], b_o=b[1].tolist(), num_heads=4, causal=True, head_gate=f1,
        return_weights=True, return_lse=True),
    "the figure's gradients": lambda: both(mha.multi_head_attention_vjp(
        x, x, x, *W, b_q=b[0], b_k=b[1], b_v=b[2], b_o=b[3], num_heads=4, bias=f2, head_gate=f1),
        None),
    "the figure with an output gate": lambda: mha.multi_head_attention(
        x, x, x, *W, W_g=W[0], b_g=b[0], num_heads=4),
    "an output gate's gradients": lambda: both(mha.multi_head_attention_vjp(
        x, x, x, *W, W_g=W[0], b_g=b[0], num_heads=4, head_gate=f1), None),
    "layer": lambda: layer(x, causal=True, return_lse=True),
    "layer in training": lambda: layer(x, key_lengths=[3, 9], training=True, rng=4,
                                       return_weights=True),
    "layer of float64 lists": lambda: layer(x.tolist()),
    "layer's gradients": lambda: both(layer.vjp(x, training=True, rng=5), None),
    "gradients of many rows": lambda: both(layer.vjp(sequence), None),
    "frozen": lambda: frozen(x, mask=visible[0, 0, :, :9], head_gate=[1, 0, 1, 2]),
    "rotating layer": lambda: rotating(x, positions=range(x.shape[1])),
    "rotating layer's gradients": lambda: both(rotating.vjp(x), None),
    "rotating layer over a ragged batch": lambda: both(rotating.vjp(
        sequence[:60], starts=starts), None),
    "layer of halves": lambda: of_halves(halves[3], causal=True, return_lse=True),
    "layer of halves' gradients": lambda: both(of_halves.vjp(halves[3]), None),
    "layer of halves over a ragged batch": lambda: both(of_halves.vjp(
        sequence[:60].astype(np.float16), starts=starts, head_gate=[1, 2, 3]), None),
    "attention of halves": lambda: both(attend_vjp(*halves[:3], causal=True), grad),
    "additive attention of halves": lambda: both(mha.additive_attention_vjp(
        *(array.astype(np.float16) for array in additive)), None),
    "rotary of halves": lambda: mha.Rotary(8).vjp(halves[0])[1](halves[0]).x,
    "freezing": thawed,
    "large workspace": lambda: big_layer(big_x),
    "linear": lambda: mha.linear(x, W[0].T, b[0]),
    "linear of many rows": lambda: mha.linear(wide.T, wide[:, :33]),
    "packing": packed_product,
    "split and merge": lambda: mha.merge_heads(mha.split_heads(x, 4)),
    "merge of parts": lambda: mha.merge_attention(*zip(*parts, strict=True)),
    "rotary": lambda: mha.Rotary(8)(q[..., :8], range(q.shape[-2])),
    "rotary of sections": lambda: mha.Rotary(8, sections=(1, 3))(
        q[0, 0, :, :8], [range(q.shape[-2])] * 2),
    "rotary's gradient": lambda: mha.Rotary(8).vjp(q)[1](q).x,
    "dropout mask": lambda: mha.dropout_mask((5, 6, 7), 0.4, 8),
    "instruction sets": lambda: (_core.instruction_sets(), mha.get_num_threads()),
    "new threads": lambda: fresh_pool(on_threads(in_child(lambda: attend(large, large, large)))),
    "new threads, gradients": lambda: fresh_pool(on_threads(in_child(
        lambda: both(attend_vjp(large, large, large), None)[1].key))),
    "wrong shapes": lambda: refused(lambda: attend(q, k, v[:, :, 1:])),
    "wrong type": lambda: refused(lambda: attend(q, k, v, mask=f2)),
    "no array": lambda: refused(lambda: attend(q, [[1], [1, 2]], v)),
}
f0, f1, f2 = f(4, 1, 70), f(4), f(4, 9, 9)[None]
IN_CHILDREN = {"new threads", "new threads, gradients"}
armed_in_child = []


def in_child(call):
    """Arms again: a child's counters are its own."""
    def run():
        if armed_in_child:
            shim.failing_memory_arm(*armed_in_child[0])
        try:
            return call()
        finally:
            shim.failing_memory_disarm()
    return run


def refused(call):
    """The error of a wrong call, as text."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("a wrong call passed")


def bits(result):
    if isinstance(result, np.ndarray):
        return result.shape, result.dtype.str, result.tobytes()
    if isinstance(result, (tuple, list)):
        return tuple(bits(part) for part in result)
    return result


def inputs():
    named = [value for value in globals().values() if isinstance(value, np.ndarray)]
    listed = [*W, *b, *additive, *(array for part in parts for array in part)]
    owned = [array for each in (layer, frozen, big_layer) for array in each.parameters().values()]
    return named + listed + owned


def clean_up():
    """Empties what Python keeps for later: its cache of attributes holds their names."""
    gc.collect()
    sys._clear_type_cache()


def references():
    return [sys.getrefcount(array) for array in inputs()]


def is_out_of_memory(error):
    """A MemoryError, or CPython's own words where there is no memory for the frame of a function
    written in Python, or within it, or within a method or ufunc of NumPy's, called while a cache is
    written; of those of ours, written in C, it says "<built-in function"."""
    if not isinstance(error, SystemError):
        return isinstance(error, MemoryError)
    text = str(error)
    others = re.match(r"<function |<ufunc |<built-in method \w+ of numpy\.ndarray object ", text)
    return text == "error return without exception set" or (
        others is not None and "returned NULL without setting an exception" in text)


def attempt(call, how, first):
    """(allocations reached, those that failed, its bits or None for a MemoryError)."""
    found = []

    def run():
        shim.failing_memory_arm(how, first)
        try:
            result = call()
            reached = shim.failing_memory_disarm()
        except BaseException as error:
            reached = shim.failing_memory_disarm()
            result = None
            if not is_out_of_memory(error):
                found.append(error)
                return
        found.append((reached, shim.failing_memory_failed(), None if result is None
                      else bits(result)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise AssertionError(f"mode {how}, allocation {first}: {found[0]!r}") from found[0]
    return found[0]


def check(call, wanted, how, first):
    """Whether some allocation failed."""
    _, failed, got = attempt(call, how, first)
    assert got is None or got == wanted, (
        f"mode {how}, allocation {first}: another result: {got!r:.200}")
    assert got is not None or failed > 0, f"mode {how}, allocation {first}: out of memory, but how?"
    del got
    again = bits(call())
    assert again == wanted, f"mode {how}, allocation {first}: the next call has another result"
    return failed > 0


def sweep(call, wanted, rounds):
    """Every allocation once, then all from it on, then `rounds` times some at random."""
    most = 0
    for how in (ONE, ALL_FROM):
        first = 0
        while check(call, wanted, how, first):
            first += 1
        most = max(most, first)
    for first in range(rounds):
        check(call, wanted, AT_RANDOM, first)
    return most


def sweep_of_children(name, rounds):
    """As sweep, for calls that arm themselves in a child, where no counter is seen from here."""
    call = CASES[name]()
    armed_in_child.clear()
    wanted = bits(call())
    for how, count in ((ONE, 60), (ALL_FROM, 60), (AT_RANDOM, rounds)):
        failures = 0
        for first in range(count):
            armed_in_child[:] = [(how, first)]
            try:
                assert bits(call()) == wanted, (how, first)
            except MemoryError:
                failures += 1
        assert failures > 0
    armed_in_child.clear()
    assert bits(call()) == wanted
    return failures


def locate_extension():
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if _core.__file__ in line]
    assert ranges, _core.__file__
    shim.failing_memory_of(int(ranges[0][0], 16), int(ranges[-1][1], 16))


def main(name, rounds=20):
    locate_extension()
    mha.set_num_threads(1 if name in IN_CHILDREN else 2)
    if name in IN_CHILDREN:
        print(f"{name}: {sweep_of_children(name, rounds)} failures")
        return
    call = CASES[name]
    wanted = bits(call())
    sweep(call, wanted, rounds)
    clean_up()
    before = references()
    living = shim.failing_memory_living()
    most = sweep(call, wanted, rounds)
    assert most > 0, "no allocation was reached"
    clean_up()
    after = references()
    assert after == before, [(a.shape, m - n) for a, n, m in
                             zip(inputs(), before, after, strict=True) if n != m]
    left = shim.failing_memory_living() - living
    assert left <= 2, f"{left} blocks of memory are left behind"
    print(f"{name}: {most} allocations, {left} blocks more than before")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
