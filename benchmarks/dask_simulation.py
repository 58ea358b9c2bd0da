"""Many workers, simulated: the graph of causal attention with the measured seconds and bytes of a
task, and a network.

A worker computes one task at a time and meanwhile fetches what its next one needs; its link, in and
out, carries one transfer at a time. A task is handed out when its inputs exist, the one with the
lowest number first, to the worker with a free place that can begin first, as distributed's
scheduler tries to; handing one out takes the scheduler its own time. Chunks of query, key and value
lie on the workers in runs at the start.

    python benchmarks/dask_simulation.py [--chunks 64]   # of what dask_scaling.json measured
"""

import argparse
import heapq
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
    """The state of a simulation: when each worker's CPU and links are free, and what lies where."""

    def __init__(self, workers, bytes_a_second, measured):
        self.cpu, self.link_in, self.link_out = (np.zeros(workers) for _ in range(3))
        self.rate, self.scheduler = bytes_a_second, measured["scheduler_seconds"]
        self.places = {}  # of a result: worker -> when it is there
        self.sizes = {}
        self.moved, self.busy, self.next_turn = 0, 0.0, 0.0

    def put(self, name, worker, size, when=0.0):
        self.places[name], self.sizes[name] = {worker: when}, size

    def begin_on(self, worker, inputs, now):
        """About when a task could begin there."""
        missing = sum(self.sizes[name] for name in inputs if worker not in self.places[name])
        fetched = max(self.link_in[worker], now) + missing / self.rate if missing else now
        return max(self.cpu[worker], fetched)

    def fetch(self, name, worker, now):
        """When an input is there."""
        there = self.places[name]
        if worker not in there:
            source = min(there, key=lambda other: max(self.link_out[other], there[other]))
            begin = max(self.link_out[source], self.link_in[worker], there[source], now)
            end = begin + self.sizes[name] / self.rate
            self.link_out[source] = self.link_in[worker] = there[worker] = end
            self.moved += self.sizes[name]
        return there[worker]

    def run(self, worker, now, name, seconds, size, inputs):
        """When the task, which the scheduler hands out now, is done."""
        self.next_turn = now = max(now, self.next_turn) + self.scheduler
        ready = max(self.fetch(given, worker, now) for given in inputs)
        end = self.cpu[worker] = max(self.cpu[worker], ready, now) + seconds
        self.busy += seconds
        self.put(name, worker, size, end)
        return end


PLACES = 2  # tasks that a worker has at a time: one computes, one fetches


def simulate(chunks, workers, bytes_a_second, measured):
    """(seconds, share of the time that CPUs compute, bytes moved)."""
    cluster = Cluster(workers, bytes_a_second, measured)
    for row in range(chunks):
        for name in ("query", "key", "value"):
            cluster.put((name, row), row * workers // chunks, measured["chunk_bytes"])
    tasks = causal_graph(chunks, measured)
    waits_for = {number: {name for name in task[3] if name not in cluster.places}
                 for number, task in enumerate(tasks)}
    readers = {}
    for number, names in waits_for.items():
        for name in names:
            readers.setdefault(name, []).append(number)
    ready = [number for number, names in waits_for.items() if not names]  # sorted: a heap
    free, ends, now = dict.fromkeys(range(workers), PLACES), [], 0.0
    while ready or ends:
        while ready and free:
            task = tasks[heapq.heappop(ready)]
            worker = min(free, key=lambda one: (cluster.begin_on(one, task[3], now), one))
            heapq.heappush(ends, (cluster.run(worker, now, *task), worker, task[0]))
            free[worker] -= 1
            if free[worker] == 0:
                del free[worker]
        now, worker, name = heapq.heappop(ends)
        free[worker] = free.get(worker, 0) + 1
        for number in readers.get(name, ()):
            waits_for[number].discard(name)
            if not waits_for[number]:
                heapq.heappush(ready, number)
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
