"""Random calls whose arrays lie against pages that nobody may touch: whoever reads or writes one
byte too far ends with a segmentation fault. Run by test_guard_pages.py, as `python guard_pages.py
FIRST_SEED COUNT`; each seed is one call, written to standard output before it is made.

An array's first element stands behind a forbidden page, or its last one before it; between its
rows, where strides leave room, lie NaNs (and numbers that must stay in what is written), so that
what is read there is seen as well: results have the bits of the same call on plain copies."""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "helpers"))
from option_cases import SCORES

import mha

PAGE = mmap.PAGESIZE
READ_AND_WRITE, FORBIDDEN = 3, 0
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NO_MEMORY = ctypes.c_void_p(-1).value
WRITEABLE = ("dense", "order", "room", "backwards")  # out's last axis is contiguous
KINDS_OF_STRIDES = (*WRITEABLE, "repeated", "columns")


class Pages:
    """`size` bytes between two forbidden pages, at the begin or the end of what lies between."""

    def __init__(self, size, at_end):
        self.whole = (size + PAGE - 1) // PAGE * PAGE + 2 * PAGE
        private, anonymous = 0x02, mmap.MAP_ANONYMOUS
        self.base = libc.mmap(None, self.whole, FORBIDDEN, private | anonymous, -1, 0)
        assert self.base != NO_MEMORY, os.strerror(ctypes.get_errno())
        inner = self.whole - 2 * PAGE
        if inner > 0:
            assert libc.mprotect(self.base + PAGE, inner, READ_AND_WRITE) == 0
        first = self.base + PAGE + (inner - size if at_end else 0)
        self.bytes = np.frombuffer((ctypes.c_char * size).from_address(first), np.uint8)

    def release(self):
        assert libc.munmap(self.base, self.whole) == 0


class Case:
    """One seed: random numbers, and the arrays and pages that they made."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.pages = []
        self.placed = []  # array, its buffer and what was in it

    def choose(self, *options):
        return options[self.rng.integers(len(options))]

    def length(self):
        return int(self.choose(0, 1, 2, 3, 5, 8, 13, 17, 31, 48, 49, 64, 65, 100, 130))

    def strides(self, shape, item, kinds):
        """Random byte strides: dense, axes in another order, room between rows, backwards,
        repeated axes."""
        kind = self.choose("dense", *kinds)
        order = list(range(len(shape)))
        if kind == "order" and len(shape) > 2:
            order[:-1] = self.rng.permutation(len(shape) - 1).tolist()
        if kind == "columns":
            order = self.rng.permutation(len(shape)).tolist()
        strides, step = [0] * len(shape), item
        for axis in reversed(order):
            strides[axis] = step
            room = int(self.rng.integers(1, 4)) if kind == "room" and axis > 0 else 0
            step = step * max(shape[axis], 1) + room * item
        if kind == "backwards":
            last = strides[-1:] if "columns" not in kinds else []
            strides = [-s if self.rng.random() < 0.4 else s for s in strides]
            strides[-1:] = last or strides[-1:]
        if kind == "repeated":
            strides = [0 if self.rng.random() < 0.4 else s for s in strides[:-1]] + strides[-1:]
        return strides

    def place(self, array, writeable=False):
        """The numbers of `array` between forbidden pages, strided at random."""
        array = np.asarray(array)
        item = array.itemsize
        strides = self.strides(array.shape, item, WRITEABLE if writeable else KINDS_OF_STRIDES)
        low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, strides, strict=True)) + item
        size = 0 if array.size == 0 else high - low
        pages = Pages(size, self.rng.random() < 0.5)
        self.pages.append(pages)
        pages.bytes[:] = 0xff  # NaN, or True, or -1
        memory = pages.bytes if size else np.empty(0, np.uint8)
        placed = np.ndarray(array.shape, array.dtype, memory.data, -low if size else 0, strides)
        placed[...] = array
        if not writeable:
            placed.flags.writeable = False
        self.placed.append((placed, pages, pages.bytes.copy(), writeable))
        return placed

    def check_untouched(self):
        """Inputs are as they were, and what is written leaves the room between its rows alone."""
        for placed, pages, before, writeable in self.placed:
            if writeable and placed.size:
                inside = np.zeros(len(before), bool)
                offset = placed.ctypes.data - pages.bytes.ctypes.data
                at = np.full(placed.shape, offset)
                for axis, (n, s) in enumerate(zip(placed.shape, placed.strides, strict=True)):
                    at = at + (np.arange(n) * s).reshape([-1 if a == axis else 1
                                                          for a in range(placed.ndim)])
                for byte in range(placed.itemsize):
                    inside[at.ravel() + byte] = True
                assert np.array_equal(pages.bytes[~inside], before[~inside]), "wrote between rows"
            else:
                assert np.array_equal(pages.bytes, before), "an input was written to"

    def release(self):
        """Arrays of the pages must not be used any more."""
        for pages in self.pages:
            pages.release()

    def numbers(self, *shape):
        array = self.rng.standard_normal(shape)
        return array.astype(self.dtype)


def attention_sizes(case):
    case.dtype = case.choose(np.float32, np.float32, np.float64)
    axes = int(case.choose(2, 3, 4, 4, 5))
    batch = [int(case.choose(1, 2, 3)) for _ in range({2: 0, 3: 1, 4: 1, 5: 2}[axes])]
    kv_heads, group = int(case.choose(1, 2)), int(case.choose(1, 2, 3))
    heads = [] if axes < 4 else [kv_heads * group]
    few = case.rng.random() < 0.4
    query_len = int(case.choose(1, 2, 4)) if few else case.length()
    key_len = int(case.choose(33, 64, 150, 700, 1100)) if few else case.length()
    if case.rng.random() < 0.03:
        query_len = key_len = 520  # heads are copied
    widths = (1, 2, 3, 5, 8, 16, 17, 31, 33, 64)
    return batch, heads, [kv_heads] if heads else [], query_len, key_len, \
        int(case.choose(*widths)), int(case.choose(*widths))


def attention_options(case, batch, heads, query_len, key_len, is_vjp, is_additive=False):
    options = {}

    def sometimes(chance=0.3):
        return case.rng.random() < chance

    def of_scores():
        leading = [1 if sometimes() else n for n in (*batch, *heads)]
        return [*leading, query_len, key_len]

    if sometimes():
        pairs = visible_pairs(case, of_scores())
        is_block_mask = sometimes() and pairs.shape[:len(batch)] == (1,) * len(batch)
        options["mask"] = mha.BlockMask.from_dense(
            pairs.reshape(1, *(pairs.shape[-3:-2] if heads else [1]), query_len, key_len)
            ) if is_block_mask else case.place(pairs)
    if sometimes() and not is_additive:
        bias = case.numbers(*of_scores())
        if sometimes():
            bias[~visible_pairs(case, bias.shape)] = -np.inf
        options["bias"] = case.place(bias)
    if not is_additive:
        options |= by_head(case, *heads)
    if sometimes():
        shape = (*batch, query_len) if sometimes() else batch
        options["key_lengths"] = case.place(case.rng.integers(0, key_len + 1, shape))
    if sometimes():
        options["causal"] = True
    if sometimes() or ("key_lengths" in options
                       and options.keys() & {"causal", "alibi", "relative_bias"}):
        options["query_offset"] = case.place(case.rng.integers(-3, 9, batch))
    if not is_additive:
        if sometimes():
            options["window"] = case.choose((3, None), (None, 2), (70, 5), (0, 0))
        if sometimes(0.4):
            options |= case.choose(*SCORES)
    if sometimes(0.2) and "sinks" not in options:
        options["empty_rows"] = "uniform"
    if sometimes(0.2):
        options |= {"dropout": 0.3, "rng": 7}
    if not is_vjp and sometimes():
        options["return_weights"] = True
    if not is_vjp and not is_additive and sometimes():
        options["return_lse"] = True
    return options


def visible_pairs(case, shape):
    """Pairs here and there, or blocks, of which some are left out."""
    if case.rng.random() < 0.5:
        return case.rng.random(shape) < 0.8
    size = int(case.choose(48, 64, 128))
    *leading, query_len, key_len = shape
    blocks = case.rng.random((*leading, -(-query_len // size), -(-key_len // size))) < 0.5
    return blocks.repeat(size, -1).repeat(size, -2)[..., :query_len, :key_len]


def by_head(case, heads=1):
    """Options with a number or a row for each head."""
    rows = heads if case.rng.random() < 0.5 else 1
    shapes = {"alibi": (heads,), "relative_bias": (rows, int(case.choose(1, 7, 201))),
              "sinks": (heads,)}
    return {name: case.place(case.numbers(*shape)) for name, shape in shapes.items()
            if case.rng.random() < 0.2}


def scaled_dot_product_attention(case):
    batch, heads, kv_heads, query_len, key_len, head_dim, value_head_dim = attention_sizes(case)
    is_vjp = case.rng.random() < 0.4
    arrays = [case.place(case.numbers(*batch, *heads, query_len, head_dim)),
              case.place(case.numbers(*batch, *kv_heads, key_len, head_dim)),
              case.place(case.numbers(*batch, *kv_heads, key_len, value_head_dim))]
    options = attention_options(case, batch, heads, query_len, key_len, is_vjp)
    shape = (*batch, *heads, query_len, value_head_dim)
    if is_vjp:
        grad = case.place(case.numbers(*shape))
        grad_lse = case.place(case.numbers(*shape[:-1])) if case.rng.random() < 0.3 else None
        return pull(mha.scaled_dot_product_attention_vjp), (*arrays, options, grad, grad_lse)
    if case.rng.random() < 0.5:
        options["out"] = case.place(np.zeros(shape, case.dtype), writeable=True)

    def call(query, key, value, options):
        return mha.scaled_dot_product_attention(query, key, value, **options)

    return call, (*arrays, options)


def ragged_batch(case):
    case.dtype = case.choose(np.float32, np.float64)
    kv_heads, group = int(case.choose(1, 2, 3)), int(case.choose(1, 2, 4))
    heads, sequences = kv_heads * group, int(case.choose(0, 1, 3, 6))
    query_starts, key_starts = (np.cumsum([0] + [case.length() for _ in range(sequences)])
                                for _ in range(2))
    head_dim, value_head_dim = (int(case.choose(1, 4, 8, 17, 33)) for _ in range(2))
    shapes = [(query_starts[-1], heads, head_dim), (key_starts[-1], kv_heads, head_dim),
              (key_starts[-1], kv_heads, value_head_dim)]
    arrays = [case.place(case.numbers(*shape)) for shape in shapes]
    arrays += [case.place(query_starts), case.place(key_starts.astype(np.int32))]
    chosen = {"causal": True, "window": (9, 4), "softcap": 3.0, "dropout": 0.3,
              "alibi": case.place(case.numbers(heads)), "sinks": case.place(case.numbers(heads)),
              "relative_bias": case.place(case.numbers(heads, 7)),
              "query_offset": case.place(case.rng.integers(-5, 40, sequences))}
    options = {name: value for name, value in chosen.items() if case.rng.random() < 0.3}
    options["rng"] = 2
    if case.rng.random() < 0.5:
        grad = case.place(case.numbers(query_starts[-1], heads, value_head_dim))
        grad_lse = case.place(case.numbers(heads, query_starts[-1]))
        return pull(mha.scaled_dot_product_attention_varlen_vjp), (*arrays, options, grad, grad_lse)

    def call(*arguments):
        return mha.scaled_dot_product_attention_varlen(*arguments[:-1], return_lse=True,
                                                       **arguments[-1])

    return call, (*arrays, options)


def pull(function):
    def call(*arguments):
        *arrays, options, grad, grad_lse = arguments
        output, pullback = function(*arrays, **options)
        return output, pullback(grad, grad_lse)
    return call


def additive_attention(case):
    batch, heads, kv_heads, query_len, key_len, query_dim, value_dim = attention_sizes(case)
    key_len, hidden, key_dim = min(key_len, 150), int(case.choose(1, 7, 16, 33)), case.length() or 1
    is_vjp = case.rng.random() < 0.4
    arrays = [case.place(case.numbers(*shape)) for shape in (
        (*batch, *heads, query_len, query_dim), (*batch, *kv_heads, key_len, key_dim),
        (*batch, *kv_heads, key_len, value_dim), (query_dim, hidden), (key_dim, hidden),
        (hidden,))]
    options = attention_options(case, batch, heads, query_len, key_len, is_vjp, True)
    if is_vjp:
        grad = case.place(case.numbers(*batch, *heads, query_len, value_dim))
        return pull(mha.additive_attention_vjp), (*arrays, options, grad, None)

    def call(*arguments):
        return mha.additive_attention(*arguments[:-1], **arguments[-1])

    return call, (*arrays, options)


def figure_sizes(case):
    case.dtype = case.choose(np.float32, np.float32, np.float64)
    kv_heads, group = int(case.choose(1, 2)), int(case.choose(1, 2))
    head_dim, value_head_dim = (int(case.choose(1, 4, 8, 17, 32)) for _ in range(2))
    dims = [int(case.choose(1, 6, 16, 33, 40)) for _ in range(4)]
    lengths = case.length(), case.length()
    if case.rng.random() < 0.1:
        lengths = 1, 200
    return kv_heads * group, kv_heads, head_dim, value_head_dim, dims, lengths


def multi_head_attention(case):
    heads, kv_heads, head_dim, value_head_dim, dims, lengths = figure_sizes(case)
    batch = [int(case.choose(1, 2, 5))] if case.rng.random() < 0.7 else []
    is_vjp = case.rng.random() < 0.4
    query_dim, key_dim, value_dim, output_dim = dims
    shapes = [(*batch, lengths[0], query_dim), (*batch, lengths[1], key_dim),
              (*batch, lengths[1], value_dim), (query_dim, heads * head_dim),
              (key_dim, kv_heads * head_dim), (value_dim, kv_heads * value_head_dim),
              (heads * value_head_dim, output_dim)]
    arrays = [case.place(case.numbers(*shape)) for shape in shapes]
    options = attention_options(case, batch, [heads], *lengths, is_vjp)
    options |= {"num_heads": heads, "num_kv_heads": kv_heads}
    for name, array in zip(("b_q", "b_k", "b_v", "b_o"), arrays[3:], strict=True):
        if case.rng.random() < 0.6:
            options[name] = case.place(case.numbers(array.shape[1]))
    if case.rng.random() < 0.3:
        options["head_gate"] = case.place(case.numbers(heads))
    if case.rng.random() < 0.3:
        gates = int(case.choose(heads, heads * value_head_dim))
        options["W_g"] = case.place(case.numbers(query_dim, gates))
        options["b_g"] = case.place(case.numbers(gates))
    head_dim = arrays[3].shape[1] // heads
    if head_dim > 1 and case.rng.random() < 0.4:
        pairs = head_dim // 2
        sections = (1, pairs - 1) if pairs > 1 and case.rng.random() < 0.5 else None
        options["rotary"] = mha.Rotary(2 * pairs, sections=sections, layout=str(case.choose(
            "half", "interleaved")))
        axes = () if sections is None else (2,)
        options["positions"] = case.place(case.rng.integers(-99, 99, (*axes, *batch, lengths[0])))
    if case.rng.random() < 0.4:
        options["q_norm"] = case.place(case.numbers(int(case.choose(head_dim, heads * head_dim))))
        options["k_norm"] = case.place(case.numbers(kv_heads * head_dim))
    if is_vjp:
        grad = case.place(case.numbers(*batch, lengths[0], output_dim))
        return pull(mha.multi_head_attention_vjp), (*arrays, options, grad, None)

    def call(*arguments):
        return mha.multi_head_attention(*arguments[:-1], **arguments[-1])

    return call, (*arrays, options)


def layer(case):
    heads, kv_heads, head_dim, value_head_dim, dims, lengths = figure_sizes(case)
    query_dim, key_dim, value_dim, output_dim = dims
    rotary = mha.Rotary(2) if head_dim > 1 and case.rng.random() < 0.5 else None
    norm = {0: "head", 1: "width"}.get(int(case.rng.integers(4)))
    made = mha.MultiHeadAttention(
        8, heads, rotary=rotary, qk_norm=norm, num_kv_heads=kv_heads, head_dim=head_dim,
        value_head_dim=value_head_dim,
        query_dim=query_dim, key_dim=key_dim, value_dim=value_dim, output_dim=output_dim,
        dtype=case.dtype, rng=1)
    guarded = {name: case.place(case.numbers(*array.shape))
               for name, array in made.parameters().items()}
    batch = int(case.choose(1, 2, 9))
    arrays = [case.place(case.numbers(batch, *shape)) for shape in (
        (lengths[0], query_dim), (lengths[1], key_dim), (lengths[1], value_dim))]
    options = attention_options(case, [batch], [heads], *lengths, False)
    for name in ("dropout", "rng"):
        options.pop(name, None)
    for name in ("mask", "bias"):
        if name in options and getattr(options[name], "ndim", 4) == 3:
            del options[name]
    is_frozen = case.rng.random() < 0.5

    def call(parameters, query, key, value, options):
        for name, array in parameters.items():
            setattr(made, name, array)
        attending = made.copy().freeze() if is_frozen and hasattr(made, "copy") else made
        return attending(query, key, value, **options)

    return call, (guarded, *arrays, options)


def steps(case):
    case.dtype = case.choose(np.float32, np.float64)
    rows, width, out = case.length(), int(case.choose(1, 7, 32, 65, 129)), case.length()
    rows = 800 if case.rng.random() < 0.05 else rows
    x, weight, b = (case.place(case.numbers(*shape)) for shape in (
        (2, rows, width), (width, out), (out,)))
    heads = case.place(case.numbers(2, 3, rows, width))
    split = case.place(case.numbers(2, rows, 4 * width))
    parts = int(case.choose(1, 2, 5))
    outputs = [case.place(case.numbers(2, rows, width)) for _ in range(parts)]
    lses = [case.place(case.numbers(2, rows)) for _ in range(parts)]
    grad = case.place(case.numbers(2, rows, out))
    rotary = mha.Rotary(2 * case.rng.integers(1, 3), layout=str(case.choose("half", "interleaved")))
    wide_heads = case.place(case.numbers(2, 3, rows, width + 3))
    # One row that is transposed, and one of a number that is repeated.
    row = case.place(case.numbers(width, 3))[:, 1:2].T
    same = case.place(case.numbers(1))
    same = np.lib.stride_tricks.as_strided(same, (1, width), (same.itemsize, 0), writeable=False)

    def call(x, weight, b, heads, split, outputs, lses, grad, wide_heads, row, same):
        output, pullback = mha.linear_vjp(x, weight, b)
        packed = mha._core.pack_weight(weight)
        return (output, pullback(grad), mha.linear(x, weight), mha.merge_heads(heads),
                mha.split_heads(split, 4), mha.merge_attention(outputs, lses), rotary(wide_heads),
                mha.linear(x, packed), [mha.linear(one, w) for one in (row, same)
                                        for w in (weight, packed)])

    return call, (x, weight, b, heads, split, outputs, lses, grad, wide_heads, row, same)


KINDS = (scaled_dot_product_attention, scaled_dot_product_attention, additive_attention,
         multi_head_attention, layer, steps, ragged_batch)


def plain(argument):
    """The same numbers without guards."""
    if isinstance(argument, np.ndarray):
        return np.array(argument, order="C")
    if isinstance(argument, dict):
        return {name: plain(each) for name, each in argument.items()}
    return [plain(each) for each in argument] if isinstance(argument, list) else argument


def flat(result):
    if isinstance(result, (tuple, list)):
        return [array for part in result for array in flat(part)]
    return [] if result is None else [np.array(result)]


def run(seed):
    case = Case(seed)
    kind = KINDS[seed % len(KINDS)]
    call, arguments = kind(case)
    if case.rng.random() < 0.5:
        threads = int(case.choose(2, 3))
    else:
        threads = 1
    os.write(1, f"seed {seed}: {kind.__name__} {describe(arguments)}\n".encode())
    with mha.threads(threads):
        try:
            results = flat(call(*arguments))
        except ValueError as error:
            # What a random call asks for may be refused, in guarded arrays as in others.
            results = str(error)
        case.check_untouched()
        try:
            wanted = flat(call(*plain(list(arguments))))
        except ValueError as error:
            wanted = str(error)
    if isinstance(results, str) or isinstance(wanted, str):
        assert results == wanted, (results, wanted)
        refused = True
    else:
        refused = False
        for number, (got, right) in enumerate(zip(results, wanted, strict=True)):
            assert got.shape == right.shape and got.tobytes() == right.tobytes(), (
                f"result {number} of shape {got.shape} has other bits than on plain arrays")
    del call, arguments
    case.placed.clear()
    case.release()
    return refused


def describe(argument):
    if isinstance(argument, np.ndarray):
        return f"{argument.dtype.str[1:]}{argument.shape}/{argument.strides}"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{name}: {describe(each)}" for name, each in argument.items()) + "}"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(map(describe, argument)) + "]"
    return repr(argument)


def main(first, count):
    refused = sum(run(seed) for seed in range(first, first + count))
    assert refused <= count // 10, f"{refused} of {count} calls were refused"
    os.write(1, f"{count} calls, {refused} refused\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
