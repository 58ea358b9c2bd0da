"""Attention by length and head_dim against plain NumPy, and against mha's own unfused path, which
writes the weights to memory: no shape may be slower. `make bench-grid` writes grid.md.

    python benchmarks/grid.py [--threads 1] [--rounds 5]
"""

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from bench import reference_of
from process import Process
from tqdm import tqdm
from works import Work

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEAD_DIMS = (8, 16, 32, 64, 128, 256)


def work_of(length, head_dim, weights=False):
    heads = 4 if length <= 2048 else 1
    return Work("grid", "attention", (1, heads, length, length, head_dim), {}, weights=weights)


def measure(processes, length, head_dim, threads, rounds, folder):
    """(NumPy's time / ours, our unfused time / ours), medians over rounds."""
    ratios = []
    fused, unfused, plain = processes
    wanted = reference_of(work_of(length, head_dim), folder)
    for process in processes:
        work = work_of(length, head_dim, weights=process is unfused)
        answer = process.ask(do="prepare", work=asdict(work), threads=threads, wanted=wanted)
        assert answer["variants"], answer["wrong"]
    for _ in range(rounds):
        seconds = [process.ask(do="time", variant="", seconds=0.01)["seconds"]
                   for process in (plain, unfused, fused)]
        ratios.append((seconds[0] / seconds[2], seconds[1] / seconds[2]))
    return np.median(ratios, axis=0)


def table(cells):
    lines = ["| length | " + " | ".join(f"head_dim {head_dim}" for head_dim in HEAD_DIMS) + " |",
             "|" + "---|" * (len(HEAD_DIMS) + 1)]
    for length in LENGTHS:
        row = [f"{cells[length, head_dim]:.2f}" for head_dim in HEAD_DIMS]
        lines.append(f"| {length} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:arguments.threads]
    processes = [Process(peer, cpus, "") for peer in ("mha", "mha", "numpy")]
    shapes = [(length, head_dim) for length in LENGTHS for head_dim in HEAD_DIMS]
    numpys, unfused = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for shape in tqdm(shapes, desc="measuring", unit="shape"):
                numpys[shape], unfused[shape] = measure(processes, *shape, len(cpus),
                                                        arguments.rounds, folder)
        finally:
            for process in processes:
                process.end()
    text = [f"# Attention by length and head_dim, {len(cpus)} thread(s)\n",
            "4 heads (1 from length 4096 on), float32, self-attention. NumPy's time / mha's:\n",
            table(numpys), f"\nThe least is {min(numpys.values()):.2f}.\n",
            "Time with the weights returned, mha's own unfused path / mha's:\n", table(unfused),
            f"\nThe least is {min(unfused.values()):.2f}.\n"]
    (Path(__file__).parent / "grid.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
