"""Two builds of mha side by side, `make bench-builds OTHER=python`: no work may become slower.

OTHER is the Python of another clone's environment, where `import mha` is the other build. Each
build runs in a process of its own, stopped but while it is timed; rounds are interleaved, and the
ratio is taken within a round.

    python benchmarks/builds.py OTHER [--rounds 11] [--only causal] [--threads 1,2] [--isa avx2]
"""

import argparse
import os
from dataclasses import asdict

import numpy as np
from process import Process
from works import WORKS, Work

# What the overhead of a call shows in; the peers' table has larger works.
SMALL = [
    Work("attention 1x10x4x20", "attention", (1, 10, 4, 6, 20), {}),
    Work("attention 1x1x1x8", "attention", (1, 1, 1, 1, 8), {}),
]


def measure(work, builds, rounds, threads):
    """Seconds of each build, a row a round."""
    for build in builds:
        answer = build.ask(do="prepare", work=asdict(work), threads=threads)
        if answer["wrong"]:
            raise RuntimeError(f"{work.name}: {answer['wrong']}")
    seconds = np.empty((rounds, len(builds)))
    for round_number in range(rounds):
        for index in (range(len(builds)) if round_number % 2 else reversed(range(len(builds)))):
            seconds[round_number, index] = builds[index].ask(
                do="time", variant="", seconds=0.04)["seconds"]
    return seconds


def summary(name, threads, seconds):
    this, other = np.median(seconds, axis=0)
    ratios = seconds[:, 0] / seconds[:, 1]
    middle = np.median(ratios)
    low, high = np.percentile(ratios, [10, 90])
    spread = (high - low) / 2
    verdict = "slower" if middle > 1 + spread else "faster" if middle < 1 - spread else ""
    return (f"| {name} | {threads} | {other * 1e3:.3f} | {this * 1e3:.3f} | {middle:.3f}"
            f" ({low:.2f} to {high:.2f}) | {verdict} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", help="the other build's Python")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="work whose name contains this")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--isa", default="")
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    works = [work for work in (*SMALL, *WORKS) if arguments.only in work.name]
    print("| work | threads | other, ms | this, ms | this / other (10 to 90 % of rounds) | |\n"
          "|---|---|---|---|---|---|")
    for threads in map(int, arguments.threads.split(",")):
        builds = [Process("mha", cpus[:threads], arguments.isa),
                  Process("mha", cpus[:threads], arguments.isa, arguments.other)]
        try:
            for work in works:
                print(summary(work.name, threads, measure(work, builds, arguments.rounds, threads)),
                      flush=True)
        finally:
            for build in builds:
                build.end()


if __name__ == "__main__":
    main()
