"""Attention of shapes drawn at random, and simpler neighbours of a shape: what bench_cliffs.py
measures."""

import math
from dataclasses import replace

from works import Work

MOST_MULTIPLY_ADDS = 1 << 28  # of a forward pass: some milliseconds
MOST_BYTES = 1 << 27  # of the inputs, and of NumPy's scores
USUAL_HEAD_DIMS = (16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 192, 256)


def up_to(rng, most):
    """A size of 1 to `most`; each power of two is as likely as the next."""
    return min(int(2 ** rng.uniform(0, math.log2(most) + 0.1)), most)


def length(rng, most):
    """Half of them round, as programs often have them."""
    drawn = up_to(rng, most)
    return drawn if rng.random() < 0.5 else 1 << round(math.log2(drawn))


def draw(rng):
    """A Work that fits the limits above."""
    while True:
        work = draw_any(rng)
        batch, heads, query_len, key_len, head_dim = work.shape
        scores = batch * heads * query_len * key_len
        kv_numbers = batch * (work.kv_heads or heads) * key_len * (head_dim + work.of_values)
        if (scores * head_dim <= MOST_MULTIPLY_ADDS and 8 * scores <= MOST_BYTES
                and 4 * kv_numbers <= MOST_BYTES):
            return work


def draw_any(rng):
    heads = int(rng.choice([1, 2, 3, 4, 8, 8, 12, 16, 32]))
    divisors = [count for count in range(1, heads) if heads % count == 0]
    query_len = int(rng.choice([1, length(rng, 16), length(rng, 4096)], p=[0.3, 0.2, 0.5]))
    key_len = query_len if query_len > 1 and rng.random() < 0.3 else length(rng, 16384)
    head_dim = int(rng.choice(USUAL_HEAD_DIMS)) if rng.random() < 0.7 else up_to(rng, 1024)
    score_option = rng.choice(["", "causal", "padding", "bias", "dense_mask"],
                              p=[0.5, 0.2, 0.1, 0.1, 0.1])
    if score_option == "causal":
        query_len = key_len = min(key_len, 4096)  # libraries differ in where others' diagonal ends
    gradients = bool(rng.random() < 0.25)
    return named(Work(
        "", "attention", (up_to(rng, 256), heads, query_len, key_len, head_dim), {},
        dtype=str(rng.choice(["float32", "float64", "float16"], p=[0.8, 0.1, 0.1])),
        kv_heads=int(rng.choice(divisors)) if divisors and rng.random() < 0.25 else 0,
        value_dim=up_to(rng, 256) if rng.random() < 0.1 else 0,
        layout=str(rng.choice(["", "positions first", "columns first"], p=[0.5, 0.35, 0.15])),
        gradients=gradients, **({str(score_option): True} if score_option else {})))


def named(work):
    """The Work with a name that says all about it."""
    sizes = "x".join(str(size) for size in work.shape)
    options = [sizes, "" if work.dtype == "float32" else work.dtype,
               f"{work.kv_heads} key heads" * bool(work.kv_heads),
               f"value_dim {work.value_dim}" * bool(work.value_dim), work.layout,
               *(name.replace("_", " ") for name in
                 ("causal", "padding", "bias", "dense_mask", "gradients") if getattr(work, name))]
    return replace(work, name=", ".join(option for option in options if option))


def simpler(work):
    """Neighbours of a Work, each simpler in one thing, the largest steps first."""
    for option, plain in {"gradients": False, "dense_mask": False, "bias": False, "padding": False,
                          "causal": False, "layout": "", "value_dim": 0, "kv_heads": 0,
                          "dtype": "float32"}.items():
        if getattr(work, option) != plain:
            yield named(replace(work, **{option: plain}))
    for axis, size in enumerate(work.shape):
        together = (2, 3) if work.causal and axis in (2, 3) else (axis,)
        powers = {1, 1 << (size.bit_length() - 1), size // 2} - {0, size}
        for smaller in sorted(powers):
            if axis == 1 and work.kv_heads and smaller % work.kv_heads:
                continue
            shape = tuple(smaller if other in together else kept
                          for other, kept in enumerate(work.shape))
            yield named(replace(work, shape=shape))


def larger(work, rng):
    """The Work with one dimension up to a half larger, and rounder: it should not take less
    time. None where that dimension has no such size."""
    axis = int(rng.integers(1 if work.kv_heads else 0, 5))
    axis = 0 if axis == 1 else axis  # heads and batch alike
    size = work.shape[axis]
    step = 1 << max(size.bit_length() - 2, 0)
    rounder = -(-(size + 1) // step) * step
    if rounder > 1.5 * size or (axis == 4 and work.kv_heads and rounder > 1024):
        return None
    together = (2, 3) if work.causal and axis in (2, 3) else (axis,)
    shape = tuple(rounder if other in together else kept for other, kept in enumerate(work.shape))
    return named(replace(work, shape=shape))


def multiply_adds(work):
    return work.operations / 2
