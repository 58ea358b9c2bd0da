"""A search for shapes where a peer is ahead: attention of random sizes, layouts, masks and types,
with and without gradients. `make bench-cliffs` writes cliffs_<kernels>.md and .png.

    python benchmarks/bench_cliffs.py [--shapes 1000] [--seed 0] [--threads 1] [--isa avx2]

A shape is lost where the best peer takes less than 0.95 of our time, below 20 us less than 0.8, in
each of three repetitions. It is then made simpler, one thing at a time, as long as it stays lost.
Each shape is also measured beside a neighbour of ours that has more to do: where the larger one
takes less time a multiply-add, there is a cliff that no peer is needed to see.

A new seed draws new shapes; the page says which it was. Libraries take turns as in bench.py. All of
them keep the memory of results: pages new from the system would cost more than many a call.
"""

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import random_shapes
from page import machine_name
from process import KEEP_MEMORY, Process
from random_shapes import multiply_adds
from tqdm import tqdm
from works import PEERS, Work

import mha

HERE = Path(__file__).parent
REPETITIONS = 3
SHARE_OF_LOSS = 0.7  # of its logarithm, which a simpler shape keeps
STEEP = 1.25  # of a neighbour's time a multiply-add


@dataclass
class Times:
    """Seconds of a call of ours and of each peer that can do the work."""

    work: Work
    ours: float
    peers: dict

    @property
    def best(self):
        return min(self.peers, key=self.peers.get)

    @property
    def ratio(self):
        """The best peer's time / ours."""
        return self.peers[self.best] / self.ours if self.peers else np.inf

    @property
    def is_lost(self):
        return self.ratio < (0.95 if self.ours > 20e-6 else 0.8)


def peers_of(work):
    """Those that compute it from the same inputs, without a copy of their own."""
    yield "pytorch"
    if work.gradients or work.dtype == "float16":
        return
    if not (work.bias and work.kv_heads):
        yield "numpy"
    if work.dtype == "float32" and not work.kv_heads:
        if work.layout == "positions first" and not (work.bias or work.dense_mask):
            yield "onnxruntime"  # its own layout
        if work.layout == "" and not work.causal:
            yield "openvino"


class Measuring:
    """Processes of ours and of all peers, pinned to the same CPUs."""

    def __init__(self, cpus, isa, seconds):
        self.cpus, self.isa, self.seconds = cpus, isa, seconds
        self.processes = {}
        self.refused = {}  # peer -> works that it cannot do

    def ask(self, name, **command):
        """None where the library fails; its process is then begun anew."""
        if name not in self.processes:
            self.processes[name] = Process(name.rstrip("+"), self.cpus, self.isa)
        try:
            return self.processes[name].ask(**command)
        except (RuntimeError, BrokenPipeError):
            self.processes.pop(name).end()
            return None

    def prepare(self, name, work):
        answer = self.ask(name, do="prepare", work=asdict(work), threads=len(self.cpus))
        return answer["variants"][0] if answer and answer["variants"] else None

    def time(self, names, variants, rounds):
        """name -> median of rounds in turns."""
        times = {name: [] for name in names}
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                answer = self.ask(name, do="time", variant=variants[name], seconds=self.seconds)
                times[name].append(answer["seconds"] if answer else np.inf)
        return {name: float(np.median(found)) for name, found in times.items()}

    def beside_peers(self, work, rounds=3, repetitions=REPETITIONS):
        """The Times of the repetition that is kindest to us; one is enough where nothing is
        lost."""
        variants = {name: self.prepare(name, work) for name in ("mha", *peers_of(work))}
        names = [name for name, variant in variants.items() if variant is not None]
        found = []
        while len(found) < repetitions and all(times.is_lost for times in found):
            times = self.time(names, variants, rounds + 2 * len(found))
            ours = times.pop("mha")
            found.append(Times(work, ours, {name: took for name, took in times.items()
                                            if np.isfinite(took)}))
        return max(found, key=lambda times: times.ratio)

    def beside_larger(self, work, larger):
        """Our time a multiply-add / that of a larger neighbour; the smallest of the repetitions."""
        variants = {"mha": self.prepare("mha", work), "mha+": self.prepare("mha+", larger)}
        steepness = []
        while len(steepness) < REPETITIONS and all(found > STEEP for found in steepness):
            times = self.time(list(variants), variants, 3)
            steepness.append(times["mha"] / times["mha+"]
                             * multiply_adds(larger) / multiply_adds(work))
        return min(steepness)

    def shrink(self, lost):
        """The simplest neighbour of a lost shape that is lost nearly as badly."""
        tried, most = {lost.work.name}, lost.ratio ** SHARE_OF_LOSS
        while True:
            for work in random_shapes.simpler(lost.work):
                if work.name in tried:
                    continue
                tried.add(work.name)
                times = self.beside_peers(work)
                if times.is_lost and times.ratio <= most:
                    lost = times
                    break
            else:
                return lost

    def end(self):
        for process in self.processes.values():
            process.end()


def search(measuring, count, seed):
    """All Times, [(drawn, shrunk) of what is lost], [(steepness, work, larger)] of cliffs."""
    rng = np.random.default_rng(seed)
    everything, lost, cliffs = [], {}, []
    progress = tqdm(range(count), desc="measuring", unit="shape")
    for _ in progress:
        work = random_shapes.draw(rng)
        times = measuring.beside_peers(work)
        everything.append(times)
        if times.is_lost:
            shrunk = measuring.shrink(times)
            lost.setdefault(shrunk.work.name, (times, shrunk))
            progress.write(f"lost: {row_of_lost(times, shrunk)}")
        if (larger := random_shapes.larger(work, rng)) is not None:
            steepness = measuring.beside_larger(work, larger)
            if steepness > STEEP:
                cliffs.append((steepness, work, larger))
                progress.write(f"cliff: {row_of_cliff(steepness, work, larger)}")
        progress.set_postfix_str(f"{len(lost)} lost")
    return everything, list(lost.values()), cliffs


def row_of_lost(drawn, shrunk):
    return (f"| {shrunk.ratio:.2f} | {shrunk.work.name} | {shrunk.ours * 1e6:.1f} us | "
            f"{PEERS[shrunk.best]} | {drawn.ratio:.2f} | {drawn.work.name} |")


def row_of_cliff(steepness, work, larger):
    return f"| {steepness:.2f} | {work.name} | {larger.name} |"


def table_of_ratios(everything):
    """By peer: how many shapes, and the spread of its time / ours."""
    lines = ["| peer | shapes | least | 1 % | 5 % | median | 95 % |", "|" + "---|" * 7]
    for peer, name in PEERS.items():
        ratios = [times.peers[peer] / times.ours for times in everything if peer in times.peers]
        if ratios:
            shown = " | ".join(f"{share:.2f}" for share in np.percentile(ratios, (0, 1, 5, 50, 95)))
            lines.append(f"| {name} | {len(ratios)} | {shown} |")
    return "\n".join(lines)


def page(sections, picture):
    lines = ["# Where is a peer ahead?\n",
             f"Attention of shapes drawn at random on {machine_name()}. Ratios: the peer's time / "
             "mha's. Lost: the best peer takes less than 0.95 of our time, below 20 us less than "
             "0.8, in each of three repetitions. `make bench-cliffs` writes this page.\n",
             f"![the best peer's time / mha's, by mha's time]({picture})\n"]
    for title, everything, lost, cliffs in sections:
        lines += [f"## {title}\n", table_of_ratios(everything), "",
                  f"{len(lost)} of {len(everything)} lost, each as the simplest shape that is:\n",
                  "| ratio | simplest shape | our time | peer | ratio | as drawn |",
                  "|---|---|---|---|---|---|",
                  *(row_of_lost(*pair) for pair in sorted(lost, key=lambda pair: pair[1].ratio)),
                  "", f"{len(cliffs)} take more than {STEEP} times the time a multiply-add of a "
                  "larger neighbour:\n",
                  "| times | shape | larger neighbour |", "|---|---|---|",
                  *(row_of_cliff(*cliff) for cliff in sorted(cliffs, key=lambda one: -one[0])), ""]
    return "\n".join(lines)


def draw_ratios(sections, path):
    """A point a shape: the best peer's time / ours, by our time."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for title, everything, _, _ in sections:
        shown = [times for times in everything if times.peers]
        axes.scatter([times.ours * 1e6 for times in shown], [times.ratio for times in shown],
                     s=9, alpha=0.6, label=title)
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="mha's time (us)",
             ylabel="the best peer's time / mha's")
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=int, default=200, help="for each number of threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=0.01, help="of one process in a round")
    parser.add_argument("--isa", default="", help="limit mha and PyTorch to avx2")
    parser.add_argument("--write", action="store_true", help="write the page and its picture")
    arguments = parser.parse_args()
    os.environ.update(KEEP_MEMORY)  # for the processes that start below
    cpus = sorted(os.sched_getaffinity(0))
    kernels = arguments.isa or mha.instruction_set()
    sections = []
    for threads in map(int, arguments.threads.split(",")):
        if threads > len(cpus):
            continue
        measuring = Measuring(cpus[:threads], arguments.isa, arguments.seconds)
        title = (f"{kernels} kernels, {threads} thread{'s'[:threads - 1]}, {arguments.shapes} "
                 f"shapes of seed {arguments.seed}")
        try:
            sections.append((title, *search(measuring, arguments.shapes, arguments.seed)))
        finally:
            measuring.end()
    name = f"cliffs_{kernels.replace('+', '_')}"
    text = page(sections, f"{name}.png")
    print(text)
    if arguments.write:
        (HERE / f"{name}.md").write_text(text)
        draw_ratios(sections, HERE / f"{name}.png")


if __name__ == "__main__":
    main()
