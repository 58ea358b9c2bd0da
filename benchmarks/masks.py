"""What masks cost: the time of attention with a mask, as a share of that without one, beside the
share of blocks of 128 x 128 pairs that are not hidden. `make bench-masks` writes masks.md.

    python benchmarks/masks.py [--rounds 7] [--length 4096] [--write]

Calls with the mask as a BlockMask, as a dense array and without it take turns in one process.
"""

import argparse
import os
import time

import numpy as np
from page import machine_name, show
from tqdm import tqdm

import mha
from mha import BlockMask

HEADS, HEAD_DIM = 8, 64


def random_blocks(length, share, rng):
    blocks = rng.random((-(-length // 128),) * 2) < share
    pairs = blocks.repeat(128, 0).repeat(128, 1)[:length, :length]
    return BlockMask.from_dense(pairs)


def masks(length):
    """By name: the mask, and the factor of its share that it may take at most."""
    rng, position = np.random.default_rng(0), np.arange(length)
    return {
        "documents of 512": (BlockMask.documents(position // 512), 1.15),
        "documents of 200": (BlockMask.documents(position // 200), 1.15),
        "window of 256": (BlockMask.sliding_window(length, window=(255, 0)), 1.15),
        "prefix of 1,000": (BlockMask.prefix(1000, length), 1.15),
        "causal": (BlockMask.causal(length), 1.15),
        "a tenth of the blocks": (random_blocks(length, 0.1, rng), 1.3),
        "a third of the blocks": (random_blocks(length, 0.33, rng), 1.3),
    }


def share_of_blocks(mask):
    blocks = mask._blocks
    return len(blocks.columns) / (blocks.shape.rows * blocks.shape.columns)


def seconds_of(arrays, mask, grad_output):
    """Of a call; with grad_output of its gradients alone."""
    if grad_output is not None:
        _, pullback = mha.scaled_dot_product_attention_vjp(*arrays, mask=mask)
    begin = time.perf_counter()
    if grad_output is None:
        mha.scaled_dot_product_attention(*arrays, mask=mask)
    else:
        pullback(grad_output)
    return time.perf_counter() - begin


def rows_of_shares(length, rounds):
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((1, HEADS, length, HEAD_DIM), np.float32) for _ in range(3)]
    grad_output = rng.standard_normal(arrays[0].shape, np.float32)
    threads = range(1, min(len(os.sched_getaffinity(0)), 2) + 1)
    works = [(name, mask, factor, count, grad) for name, (mask, factor) in masks(length).items()
             for count in threads for grad in (None, grad_output)]
    for name, mask, factor, count, grad in tqdm(works):
        share = share_of_blocks(mask)
        limit = factor * share + 0.03
        with mha.threads(count):
            given = (None, mask, mask.to_dense())
            times = [[seconds_of(arrays, one, grad) for one in given] for _ in range(rounds)]
        none, block, dense = np.median(times, axis=0)
        yield (f"| {name} | {'forward' if grad is None else 'gradients'} | {count} | {share:.3f}"
               f" | {block / none:.3f} | {limit:.3f}{' **over**' if block / none > limit else ''}"
               f" | {dense / block:.2f} | {none * 1e3:.0f} ms |")


def rows_of_few_queries(rounds):
    rng = np.random.default_rng(2)
    for queries in (1, 4, 8):
        query = rng.standard_normal((1, HEADS, queries, HEAD_DIM), np.float32)
        key, value = (rng.standard_normal((1, HEADS, 4096, HEAD_DIM), np.float32) for _ in "kv")
        dense = np.broadcast_to(np.arange(4096) < 100, (queries, 4096)).copy()
        ways = {"key_lengths": {"key_lengths": [100]}, "BlockMask":
                {"mask": BlockMask.from_dense(dense)}, "dense mask": {"mask": dense},
                "bias of -inf": {"bias": np.where(dense, 0, -np.inf).astype(np.float32)}}
        with mha.threads(1):
            times = []
            for _ in range(20 * rounds):
                times.append([])
                for options in ways.values():
                    begin = time.perf_counter()
                    mha.scaled_dot_product_attention(query, key, value, **options)
                    times[-1].append(time.perf_counter() - begin)
        medians = np.median(times, axis=0)
        shown = " | ".join(f"{one / medians[0]:.2f}" for one in medians[1:])
        yield f"| {queries} | {medians[0] * 1e6:.0f} us | {shown} |"


def report(length, rounds):
    yield f"# What masks cost\n\n{machine_name()}, {mha.instruction_set()}:"
    yield f"{HEADS} heads x {length:,} x {HEAD_DIM}, float32. Times are shares of the unmasked"
    yield f"call's, medians of {rounds}.\n"
    yield "| mask | | threads | blocks | BlockMask | at most | dense / BlockMask | unmasked |"
    yield "|---|---|---|---|---|---|---|---|"
    yield from rows_of_shares(length, rounds)
    yield "\nA few queries that see the first 100 of 4,096 keys, as multiples of key_lengths:\n"
    yield "| queries | key_lengths | BlockMask | dense mask | bias of -inf |"
    yield "|---|---|---|---|---|"
    yield from rows_of_few_queries(rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="masks.md")
    arguments = parser.parse_args()
    show(report(arguments.length, arguments.rounds), "masks.md", arguments.write)


if __name__ == "__main__":
    main()
