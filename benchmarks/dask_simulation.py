"""Many workers, simulated: the graph of causal attention with the measured seconds and bytes of a
task, and a network.

A worker computes one task at a time and meanwhile fetches what its next ones need; its link, in and
out, carries one transfer at a time. Tasks come in the order of their numbers and go to the worker
that can begin first, as distributed's scheduler tries to; handing one out takes the scheduler its
own time. Chunks of query, key and value lie on the workers in turn at the start.

    python benchmarks/dask_simulation.py [--chunks 64]   # of what dask_scaling.json measured
"""

import argparse
import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "no limit": float("inf")}


def causal_graph(chunks, measured, split_every=8):
    """[(name, seconds, bytes of the result, [inputs])], inputs before what reads them."""
    part, size = measured["part_seconds"], measured["chunk_bytes"]
    joining = part / 60  # reads and writes: a small part of a part's time
    tasks = []
    for i in range(chunks):
        leaves = []
        for j in range(i + 1):
            leaves.append(("part", i, j))
            tasks.append((leaves[-1], part / (2 if i == j else 1), size,
                          [("query", i), ("key", j), ("value", j)]))
        level = 0
        while len(leaves) > 1:
            groups = [leaves[k:k + split_every] for k in range(0, len(leaves), split_every)]
            names = [("join", i, level, k) for k in range(len(groups))]
            tasks += [(name, joining * len(group), size, group)
                      for name, group in zip(names, groups)]
            leaves, level = names, level + 1
    return tasks


class Cluster:
    """The state of a simulation: when each worker's CPU and link are free, and what lies where."""

    def __init__(self, workers, bytes_a_second, measured):
        self.cpu, self.link_in, self.link_out = (np.zeros(workers) for _ in range(3))
        self.rate, self.scheduler = bytes_a_second, measured["scheduler_seconds"]
        self.places = {}  # of a result: worker -> when it is there
        self.sizes = {}
        self.moved, self.busy = 0, 0.0

    def put(self, name, worker, size, when=0.0):
        self.places[name], self.sizes[name] = {worker: when}, size

    def begin_on(self, worker, inputs, handed_out):
        """About when a task could begin there."""
        missing = [name for name in inputs if worker not in self.places[name]]
        ready = max((min(self.places[name].values()) for name in missing), default=0.0)
        fetching = sum(self.sizes[name] for name in missing) / self.rate
        return max(self.cpu[worker], handed_out, max(ready, self.link_in[worker]) + fetching)

    def fetch(self, name, worker, handed_out):
        """When an input is there."""
        there = self.places[name]
        if worker not in there:
            source = min(there, key=lambda other: max(self.link_out[other], there[other]))
            begin = max(self.link_out[source], self.link_in[worker], there[source], handed_out)
            end = begin + self.sizes[name] / self.rate
            self.link_out[source] = self.link_in[worker] = there[worker] = end
            self.moved += self.sizes[name]
        return there[worker]

    def run(self, number, name, seconds, size, inputs):
        handed_out = (number + 1) * self.scheduler
        holders = {worker for given in inputs for worker in self.places[given]}
        candidates = holders | {int(np.argmin(self.cpu))}
        worker = min(candidates, key=lambda one: (self.begin_on(one, inputs, handed_out), one))
        ready = max(self.fetch(given, worker, handed_out) for given in inputs)
        end = max(self.cpu[worker], ready, handed_out) + seconds
        self.cpu[worker] = end
        self.busy += seconds
        self.put(name, worker, size, end)


def simulate(chunks, workers, bytes_a_second, measured):
    """(seconds, share of the time that CPUs compute, bytes moved)."""
    cluster = Cluster(workers, bytes_a_second, measured)
    for row in range(chunks):
        for name in ("query", "key", "value"):
            cluster.put((name, row), row * workers // chunks, measured["chunk_bytes"])
    for number, task in enumerate(causal_graph(chunks, measured)):
        cluster.run(number, *task)
    seconds = float(cluster.cpu.max())
    return seconds, cluster.busy / seconds / workers, cluster.moved


def table_of(measured, chunks):
    return {network: {workers: simulate(chunks, workers, rate, measured) for workers in WORKERS}
            for network, rate in NETWORKS.items()}


def report(measured, chunks=64):
    found = table_of(measured, chunks)
    alone = found["no limit"][1][0]
    lines = [f"## 4 to 256 workers, simulated\n\n{chunks} x {chunks} chunks, causal; a part takes"
             f" {measured['part_seconds']:.3f} s, an array's chunk is"
             f" {measured['chunk_bytes'] / 1e6:.1f} MB, a task takes the scheduler"
             f" {1e3 * measured['scheduler_seconds']:.2f} ms.\n",
             "| workers | " + " | ".join(f"{network}: times as fast, CPUs busy, moved"
                                         for network in NETWORKS) + " |",
             "|---|" + "---|" * len(NETWORKS)]
    for workers in WORKERS:
        cells = [f"{alone / seconds:.1f}, {100 * busy:.0f} %, {moved / 1e9:.1f} GB"
                 for seconds, busy, moved in (found[network][workers] for network in NETWORKS)]
        lines.append(f"| {workers} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![workers against speed](dask_scaling.png)"])


def chart(measured, path, chunks=64):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = table_of(measured, chunks)
    alone = found["no limit"][1][0]
    figure, ax = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    ax.plot(WORKERS, WORKERS, color="grey", linestyle=":", label="as many times as workers")
    for network, by_workers in found.items():
        ax.plot(WORKERS, [alone / by_workers[workers][0] for workers in WORKERS], marker="o",
                markersize=4, label=network)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(WORKERS, map(str, WORKERS))
    ax.set_yticks(WORKERS, map(str, WORKERS))
    ax.set(xlabel="workers", ylabel="times as fast as one",
           title=f"causal attention, {chunks} x {chunks} chunks")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, default=64)
    arguments = parser.parse_args()
    print(report(json.loads((HERE / "dask_scaling.json").read_text()), arguments.chunks))


if __name__ == "__main__":
    main()
