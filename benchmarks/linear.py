"""`mha.linear` beside NumPy's `x @ weight`, and the gradients of both: one projection from few rows
to many, with the weight as the figure writes it and as PyTorch stores it. `make bench-linear`
writes linear.md.

    python benchmarks/linear.py [--rounds 5] [--seconds 0.02] [--quick] [--itself]

Memory of results is kept by both: new pages from the system would take longer than many a product,
and some times twice as long as others.

A shape is lost where mha takes more than 1.05 times NumPy's time and a microsecond more, in each of
three repetitions: on a machine with other work one of them says little. `--itself` tells what is
lost by noise all the same: NumPy beside NumPy.
"""

import argparse
import itertools
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
from page import machine_name
from process import KEEP_MEMORY, Process
from tqdm import tqdm
from works import Work

import mha

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
SHAPES = ((64, 64), (768, 768), (768, 2048), (2048, 768), (4096, 4096), (64, 32000), (32000, 64),
          (768, 32000))
QUICK_ROWS, QUICK_SHAPES = (1, 4, 16, 64, 256), ((64, 64), (768, 2048), (4096, 4096))
MOST_OPERATIONS = 1024 * 4096 * 4096
REPETITIONS = 3  # of what is lost


def measure(processes, work, threads, rounds, seconds):
    """(our time, NumPy's), medians of rounds in turns. What is lost is measured again."""
    for process in processes:
        answer = process.ask(do="prepare", work=asdict(work), threads=threads)
        assert answer["variants"], answer["wrong"]
    repetitions = []
    while len(repetitions) < REPETITIONS and all(is_lost(*times) for times in repetitions):
        times = [[process.ask(do="time", variant="", seconds=seconds)["seconds"]
                  for process in processes] for _ in range(rounds)]
        repetitions.append(np.median(times, axis=0))
    return min(repetitions, key=lambda times: times[0] / times[1])


def is_lost(ours, numpys):
    return ours > 1.05 * numpys + 1e-6


def table(cells, rows, shapes):
    lines = ["| in x out | " + " | ".join(f"{count} rows" for count in rows) + " |",
             "|" + "---|" * (len(rows) + 1)]
    for shape in shapes:
        row = []
        for count in rows:
            if (times := cells.get((count, *shape))) is None:
                row.append("")
                continue
            ratio = f"{times[0] / times[1]:.2f}"
            row.append(f"**{ratio}**" if is_lost(*times) else ratio)
        lines.append(f"| {shape[0]} x {shape[1]} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="of one process in a round")
    parser.add_argument("--quick", action="store_true", help="some shapes only")
    parser.add_argument("--itself", action="store_true", help="NumPy beside NumPy: the noise")
    parser.add_argument("--write", action="store_true", help="write linear.md")
    arguments = parser.parse_args()
    if arguments.itself and arguments.write:
        parser.error("--write is for mha's times, not for those of --itself")
    peers = ("numpy" if arguments.itself else "mha"), "numpy"
    rows, shapes = (QUICK_ROWS, QUICK_SHAPES) if arguments.quick else (ROWS, SHAPES)
    cpus = sorted(os.sched_getaffinity(0))
    os.environ.update(KEEP_MEMORY)  # for the processes that start below
    kinds = list(itertools.product((1, 2)[:len(cpus)], ("float32", "float64"), (False, True),
                                   (False, True)))
    sections, lost, count = [], 0, 0
    progress = tqdm(total=len(kinds) * len(rows) * len(shapes), desc="measuring", unit="shape")
    for threads, dtype, gradients, transposed in kinds:
        processes = [Process(peer, cpus[:threads], "") for peer in peers]
        cells = {}
        try:
            for shape, number in itertools.product(shapes, rows):
                progress.update()
                if number * shape[0] * shape[1] > MOST_OPERATIONS // (1 + gradients):
                    continue
                work = Work("linear", "linear", (number, *shape), {}, dtype=dtype,
                            gradients=gradients, transposed=transposed)
                cells[number, *shape] = measure(processes, work, threads, arguments.rounds,
                                                arguments.seconds)
        finally:
            for process in processes:
                process.end()
        lost += sum(is_lost(*times) for times in cells.values())
        count += len(cells)
        what = "gradients of x and weight" if gradients else "output"
        layout = "weight (out, in), transposed" if transposed else "weight (in, out)"
        sections.append(f"## {what}, {layout}, {dtype}, {threads} thread{'s'[:threads - 1]}\n\n"
                        + table(cells, rows, shapes))
        progress.write(sections[-1] + "\n")  # not lost where the run is cut short
    progress.close()
    text = "\n\n".join(["# `mha.linear` beside NumPy\n\nmha's time / NumPy's, medians of "
                        f"{arguments.rounds} rounds in turns, a process each, on {machine_name()}, "
                        f"{mha.instruction_set()} kernels. In "
                        f"bold: more than 1.05 times and 1 us in each of three repetitions, "
                        f"{lost} of {count}.",
                        *sections]) + "\n"
    print(f"lost: {lost} of {count}")
    if arguments.write:
        (Path(__file__).parent / "linear.md").write_text(text)


if __name__ == "__main__":
    main()
