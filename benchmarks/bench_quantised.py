"""Quantised weights and caches beside float32's, and many sequences decoded together, each figure
beside its limit. `make bench-quantised` writes quantised.md.

    python benchmarks/bench_quantised.py [--rounds 7] [--only row,rows,cache,sequences,memory]

Each instruction set runs in a process of its own for 1 and for 2 threads, pinned to as many CPUs
and stopped but while it is timed. Rounds are interleaved, ratios are taken within a round. What
shall lie beyond the last cache is several times as large, by its stored bytes.
"""

import argparse
import itertools
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import machine
import numpy as np
from page import machine_name, show
from peers.quantised import CACHED_DEPTH
from process import Process
from report import rounded_down
from tqdm import tqdm
from works import Work

import mha

BYTES = {"float32": 4, "bfloat16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a number
LEAST_OF_BOUND = {"float32": 0.9, "bfloat16": 0.9, "q8_0": 0.85, "q4_0": 0.75}
LEAST_OF_ROWS, LEAST_OF_CACHE, LEAST_OF_SEQUENCES, MOST_MEMORY = 0.9, 2.5, 3, 0.28
PARTS = ("row", "rows", "cache", "sequences", "memory")
BEYOND = 4  # times the last cache
DEPTH = 4096
STREAMS = (1, 2, 3, 4)
SETS = list(dict.fromkeys([
    mha.instruction_set(),
    *(name for name in mha.show_config(mode="dicts")["instruction_sets"] if name == "avx2")]))


def cache_sizes():
    """Bytes of the second and of the last cache, as Linux tells."""
    sizes = {}
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*"):
        if (cache / "type").read_text().strip() != "Instruction":
            level, size = ((cache / name).read_text().strip() for name in ("level", "size"))
            sizes[int(level)] = 1024 * int(size.removesuffix("K"))
    return sizes.get(2, 1 << 20), max(sizes.values(), default=32 << 20)


SECOND_CACHE, LAST_CACHE = cache_sizes()


def columns_of(dtype, depth, size):
    """Of a weight of so many bytes, in whole groups of panels."""
    return max(1, int(size / depth / BYTES[dtype]) // 128) * 128


def works(part):
    beyond = BEYOND * LAST_CACHE
    if part == "row":
        # Half of the second cache: the rest is for x, the sums and what else the core keeps there.
        return [Work(dtype, part, (DEPTH, columns_of(dtype, DEPTH, beyond),
                                   columns_of(dtype, CACHED_DEPTH, SECOND_CACHE / 2)), {},
                     dtype=dtype) for dtype in BYTES]
    if part == "rows":
        return [Work("256 rows", part, (256, DEPTH, DEPTH), {})]
    if part == "cache":
        sizes = ((32, head_dim) for head_dim in (64, 128))
        return [Work(f"{heads} heads of {width}", part,
                     (heads, width, int(beyond / (2 * heads * width * BYTES["q8_0"])) + 1), {})
                for heads, width in sizes]
    if part == "sequences":
        width = 2048
        layers = -(-beyond // (4 * 4 * width * width))
        return [Work("32 sequences", part, (32, 20, 256, width, layers), {})]
    return []


class Measured:
    """Seconds of each round by (set, variant), rates of reading, and what could not be measured."""

    def __init__(self, work, cpus, rounds, seconds=0.1):
        self.work, self.threads, self.wrong = work, len(cpus), ""
        self.seconds, self.rates = defaultdict(list), []
        processes = {isa: Process("quantised", cpus, isa) for isa in SETS}
        try:
            entries = []
            for isa, process in processes.items():
                answer = process.ask(do="prepare", work=asdict(work), threads=len(cpus))
                entries += [(isa, variant) for variant in answer["variants"]]
                self.wrong = self.wrong or answer["wrong"].get("", "")
            for number in range(0 if self.wrong else rounds):
                if work.kind == "row":
                    size = BYTES[work.dtype] * work.shape[0] * work.shape[1]
                    self.rates.append([machine.stream_rate(cpus, size, streams, seconds)
                                       for streams in STREAMS])
                turned = number % len(entries)
                for isa, variant in entries[turned:] + entries[:turned]:
                    answer = processes[isa].ask(do="time", variant=variant, seconds=seconds)
                    self.seconds[isa, variant].append(answer["seconds"])
        finally:
            for process in processes.values():
                process.end()

    def times(self, isa, variant):
        return np.array(self.seconds[isa, variant])

    def ratio(self, isa, variant, other):
        """Time of the other variant / that of this one."""
        return np.median(self.times(isa, other) / self.times(isa, variant))


def against(got, least):
    return f"{rounded_down(got)} | {least:g}{' **under**' if got < least else ''} |"


def lines_of_row(m):
    depth, columns, cached_columns = m.work.shape
    number = BYTES[m.work.dtype]
    rates = np.array(m.rates)
    best = int(np.argmax(np.median(rates, axis=0)))
    for isa in SETS:
        speed = number * depth * columns / m.times(isa, "")
        products = m.times(isa, "cached") - np.median(m.times(isa, "call"))
        widening = m.threads * number * CACHED_DEPTH * cached_columns / products
        fraction = np.median(speed / np.minimum(rates[:, best], widening))
        shown = (f"{np.median(rate) * 1e-9:.1f}" for rate in (speed, rates[:, best], widening))
        yield (f"| {m.work.dtype} | {isa} | {m.threads} | {' | '.join(shown)} | {STREAMS[best]} | "
               + against(fraction, LEAST_OF_BOUND[m.work.dtype]))


def lines_of_rows(m):
    operations = 2 * np.prod(m.work.shape)
    for isa in SETS:
        for dtype in ("q8_0", "q4_0"):
            speeds = (operations / np.median(m.times(isa, name)) * 1e-9
                      for name in (dtype, "float32"))
            shown = " | ".join(f"{speed:.0f}" for speed in speeds)
            yield (f"| {dtype} | {isa} | {m.threads} | {shown} | "
                   + against(m.ratio(isa, dtype, "float32"), LEAST_OF_ROWS))


def lines_of_cache(m):
    heads, _, positions = m.work.shape
    for isa in SETS:
        speeds = (heads * positions / np.median(m.times(isa, name)) * 1e-6
                  for name in ("q8_0", "float32"))
        yield (f"| {m.work.name}, {positions:,} positions | {isa} | {m.threads} | "
               + " | ".join(f"{speed:.0f}" for speed in speeds) + " | "
               + against(m.ratio(isa, "q8_0", "float32"), LEAST_OF_CACHE))


def lines_of_sequences(m):
    count, least, most, *_ = m.work.shape
    for isa in SETS:
        speeds = (count / np.median(m.times(isa, name)) for name in ("together", "alone"))
        ratio = m.ratio(isa, "together", "alone")
        yield (f"| {count} sequences of {least} to {most} | {isa} | {m.threads} | "
               + " | ".join(f"{speed:.0f}" for speed in speeds) + " | "
               + (against(ratio, LEAST_OF_SEQUENCES) if m.threads == 2 else f"{ratio:.2f} | |"))


def lines_of_memory():
    """Bytes of matrices and of a cache; nothing is timed."""
    layers = [mha.MultiHeadAttention(512, 8, rng=0) for _ in range(2)]
    layers[0].quantize("q8_0")
    matrices = [sum(layer._state.parameters[name].nbytes for name in ("W_q", "W_k", "W_v", "W_o"))
                for layer in layers]
    of_cache = [layers[1].new_cache(1, 1024, dtype=dtype).nbytes for dtype in ("q8_0", "float32")]
    for name, (ours, float32) in (("matrices of a layer, 512 columns", matrices),
                                  ("cache, 8 heads of 64, 1,024 positions", of_cache)):
        over = " **over**" if ours / float32 > MOST_MEMORY else ""
        yield (f"| {name} | {ours:,} | {float32:,} | {ours / float32:.3f} | {MOST_MEMORY}{over} |")


# part -> its heading, what it shows, heads of its table, its lines of what was measured
SECTIONS = {
    "row": ("One row times a packed weight",
            f"The weight is {BEYOND} times the last cache, {DEPTH:,} deep; speeds are stored GB a "
            "second. Reading: the best of 1 to 4 streams side by side on each CPU. Widening: the "
            "same product by a weight in half of the second cache, one thread's speed times the "
            "threads, without what a call takes beside it.",
            "weight | set | threads | stored GB/s | reading | widening | streams | of the smaller",
            lines_of_row),
    "rows": ("256 rows times a packed weight",
             f"The weight is {DEPTH:,} x {DEPTH:,}; Gflop/s, and the speed as a fraction of packed "
             "float32's.",
             "weight | set | threads | Gflop/s | float32's | fraction", lines_of_rows),
    "cache": ("Decoding from a q8_0 cache",
              f"One token, a query head a key head; the q8_0 cache is {BEYOND} times the last "
              "cache. Million keys a second, and how many times a float32 cache's.",
              "cache | set | threads | q8_0 | float32 | times", lines_of_cache),
    "sequences": ("Many sequences together",
                  f"A token of each through layers whose weights are {BEYOND} times the last "
                  "cache, with one PagedCache and one by one with a KVCache each; the same bits. "
                  "Tokens a second.",
                  "sequences | set | threads | together | one by one | times", lines_of_sequences),
    "memory": ("Memory", "Bytes of q8_0 and of float32.", "what | q8_0 | float32 | fraction", None),
}


def report(parts, rounds):
    cpus = sorted(os.sched_getaffinity(0))
    counts = range(1, min(len(cpus), 2) + 1)
    total = sum(len(works(part)) for part in parts) * len(counts)
    yield "# Quantised weights and caches\n"
    yield f"{machine_name()}, NumPy {np.__version__}; second cache {SECOND_CACHE >> 10:,} kB, last"
    yield f"{LAST_CACHE >> 10:,} kB. Medians of {rounds} rounds in turns, a process for each set."
    with tqdm(total=total, desc="measuring", unit="work") as progress:
        for part in parts:
            title, text, heads, lines_of = SECTIONS[part]
            limit = "at most" if part == "memory" else "at least"
            table = f"| {heads} | {limit} |\n" + "|---" * (heads.count("|") + 2) + "|"
            yield f"\n## {title}\n\n{text}\n\n{table}"
            if part == "memory":
                yield from lines_of_memory()
            not_measured = {}
            for work, threads in itertools.product(works(part), counts):
                progress.set_postfix_str(f"{part}, {work.name}, {threads} threads")
                measured = Measured(work, cpus[:threads], rounds)
                progress.update()
                if measured.wrong:
                    not_measured[work.name] = measured.wrong.removeprefix("NotImplementedError: ")
                else:
                    yield from lines_of(measured)
            for name, why in not_measured.items():
                yield f"\nNot measured, {name}: {why}."


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS), help="some of the parts")
    parser.add_argument("--write", action="store_true", help="write quantised.md")
    arguments = parser.parse_args()
    parts = [part for part in PARTS if part in arguments.only.split(",")]
    show(report(parts, arguments.rounds), "quantised.md", arguments.write)


if __name__ == "__main__":
    main()
