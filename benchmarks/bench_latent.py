"""Latent attention: attention of one token to absorbed latents beside PyTorch's, and the bytes that
a cache takes. `make bench-latent` writes latent.md.

    python benchmarks/bench_latent.py [--rounds 15] [--isa avx2] [--write]

Each library runs in a process of its own, pinned to the same CPUs and stopped but while it is
timed; rounds are interleaved, ratios are taken within a round. PyTorch's best counts.
"""

import argparse
import importlib.metadata
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from page import machine_name, show
from peers.latent_arrays import arrays_of, scale_of
from process import Process
from report import rounded_down
from works import Work

import mha
from mha import reference

SHAPE = (16, 2048, 512, 64)  # heads, positions, kv_rank, rope_dim
WORK = Work("a token", "latent", SHAPE, {"pytorch": 1.3})
MOST_BYTES = 1.01  # of (kv_rank + rope_dim) numbers


def result_of(folder):
    """The path of a file with the result in float64."""
    query, key = (array.astype(np.float64) for array in arrays_of(SHAPE))
    path = Path(folder) / "wanted.npy"
    np.save(path, reference.scaled_dot_product_attention(query, key, key[..., :SHAPE[2]],
                                                         scale=scale_of(SHAPE)))
    return str(path)


def lines_of(threads, processes, rounds, wanted):
    """Medians of our time, and of the ratios of each variant of PyTorch's to it."""
    entries = []
    for process in processes:
        answer = process.ask(do="prepare", work=asdict(WORK), threads=threads, wanted=wanted)
        yield from (f"\nNot measured: {variant}: {why}\n"
                    for variant, why in answer["wrong"].items())
        entries += [(process, variant) for variant in answer["variants"]]
    times = np.array([[process.ask(do="time", variant=variant, seconds=0.1)["seconds"]
                       for process, variant in entries] for _ in range(rounds)])
    ratios = {variant: float(np.median(times[:, at] / times[:, 0]))
              for at, (_, variant) in enumerate(entries) if at}
    best = min(ratios, key=ratios.get)
    least = WORK.wanted["pytorch"]
    yield (f"| {threads} | {np.median(times[:, 0]) * 1e6:.0f} | {rounded_down(ratios[best])}"
           f"{' **under**' if ratios[best] < least else ''} | {least} | {best} | "
           + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()) + " |")


def line_of_cache():
    """Bytes of a position; nothing is timed."""
    heads, positions, kv_rank, rope_dim = SHAPE
    layer = mha.MultiHeadLatentAttention(64, heads, kv_rank=kv_rank, nope_dim=128,
                                         rope_dim=rope_dim, value_head_dim=128, rng=0)
    ours, expanded = (layer.new_cache(1, positions, absorbed=absorbed).nbytes / positions
                      for absorbed in (True, False))
    least = 4 * (kv_rank + rope_dim)
    over = " **over**" if ours / least > MOST_BYTES else ""
    return (f"| {ours:,.0f} | {least:,} | {ours / least:.3f}{over} | {MOST_BYTES}"
            f" | {expanded:,.0f} |")


def report(rounds, isa):
    heads, positions, kv_rank, rope_dim = SHAPE
    yield "# Latent attention\n"
    yield f"{machine_name()},"
    yield (f"{isa or mha.instruction_set()}, mha {importlib.metadata.version('mha')}, torch"
           f" {importlib.metadata.version('torch')}: one token, {positions:,} positions, {heads}"
           f" heads, kv_rank {kv_rank}, rope_dim {rope_dim}, float32.\n")
    yield "Attention alone, without projections: microseconds, and PyTorch's time / ours, medians"
    yield f"of {rounds} rounds.\n"
    yield "| threads | mha | PyTorch's best | at least | which | all |\n|---|---|---|---|---|---|"
    cpus = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as folder:
        wanted = result_of(folder)
        for count in range(1, len(cpus) + 1):
            processes = [Process(peer, cpus[:count], isa) for peer in ("latent", "pytorch_latent")]
            try:
                yield from lines_of(count, processes, rounds, wanted)
            finally:
                for process in processes:
                    process.end()
    yield "\nBytes of a position in a cache of float32 that a layer makes.\n"
    yield "| absorbed | its numbers | fraction | at most | expanded, 128 columns each |"
    yield f"|---|---|---|---|---|\n{line_of_cache()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", default="", help="limit mha and PyTorch to avx2")
    parser.add_argument("--write", action="store_true", help="latent.md")
    arguments = parser.parse_args()
    show(report(arguments.rounds, arguments.isa), "latent.md", arguments.write)


if __name__ == "__main__":
    main()
