"""mha.BlockMask beside PyTorch: its flex_attention under torch.compile, of its best block size, and
its attention with the dense mask. `make bench-flex` writes flex.md.

    python benchmarks/flex.py [--rounds 7] [--isa avx2] [--write]

Each library runs in a process of its own, pinned to the same CPUs; rounds are interleaved.
"""

import argparse
import importlib.metadata
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import peers.numpy as numpy_peer
from page import machine_name, show
from process import Process
from tqdm import tqdm
from works import MASK_MODS, Work

import mha

SHAPE = (1, 8, 4096, 4096, 64)
WANTED = 1.3  # PyTorch's best time / ours


def work_of(name):
    return Work(name, "attention", SHAPE, {}, mask_mod=name)


def result_of(work, folder):
    """The path of a file with the result in float64."""
    arrays = {name: array if array.dtype == bool else array.astype(np.float64)
              for name, array in work.arrays().items()}
    heads = [numpy_peer.attend(*(arrays[name][:, h:h + 1] for name in ("query", "key", "value")),
                               mask=arrays["mask"])[0] for h in range(work.shape[1])]
    path = Path(folder) / "wanted.npy"
    np.save(path, np.concatenate(heads, axis=1))
    return str(path)


def row_of(name, processes, threads, rounds, wanted):
    """Medians of our time, and of the ratios of each variant of PyTorch's to it."""
    entries, wrong = [], {}
    for process in processes:
        answer = process.ask(do="prepare", work=asdict(work_of(name)), threads=threads,
                             wanted=wanted)
        wrong |= answer["wrong"]
        entries += [(process, variant) for variant in answer["variants"]]
    times = []
    for _ in range(rounds):
        times.append([process.ask(do="time", variant=variant, seconds=0.2)["seconds"]
                      for process, variant in entries])
    times = np.array(times)
    ratios = dict(zip([variant for _, variant in entries[1:]],
                      np.median(times[:, 1:] / times[:, :1], axis=0), strict=True))
    dense = ratios.pop("SDPA")
    if not ratios:  # a variant with wrong numbers is not timed
        ours = np.median(times[:, 0]) * 1e3
        return (f"| {name} | {threads} | {ours:.1f} ms | none: {'; '.join(wrong.values())} | |"
                f" {dense:.2f} |")
    best = min(ratios, key=ratios.get)
    short = f" **under {WANTED}**" if ratios[best] < WANTED else ""
    return (f"| {name} | {threads} | {np.median(times[:, 0]) * 1e3:.1f} ms | {ratios[best]:.2f}"
            f"{short} | {best.split()[-1]} | {dense:.2f} |")


def report(rounds, isa):
    yield "# Beside flex_attention\n"
    yield f"{machine_name()},"
    yield (f"{isa or mha.instruction_set()}, mha {importlib.metadata.version('mha')}, torch"
           f" {importlib.metadata.version('torch')}: 1 x 8 heads x 4,096 x 64, float32, forward.")
    yield f"PyTorch's time / ours, medians of {rounds} rounds.\n"
    yield ("| mask | threads | mha | flex_attention compiled, best | its blocks | SDPA, dense mask"
           " |\n|---|---|---|---|---|---|")
    cpus = sorted(os.sched_getaffinity(0))[:2]
    for count in range(1, len(cpus) + 1):
        processes = [Process(peer, cpus[:count], isa) for peer in ("mha", "pytorch")]
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name in tqdm(MASK_MODS, desc=f"{count} threads", unit="mask"):
                    wanted = result_of(work_of(name), folder)
                    yield row_of(name, processes, count, rounds, wanted)
        finally:
            for process in processes:
                process.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default="", help="limit mha and PyTorch to avx2")
    parser.add_argument("--write", action="store_true", help="flex.md")
    arguments = parser.parse_args()
    show(report(arguments.rounds, arguments.isa), "flex.md", arguments.write)


if __name__ == "__main__":
    main()
