"""Where the time of a training step goes, `make bench-training`: how much of it is mha's, and which
lines of NumPy take the rest.

Steps of examples/train_language_model.py, whose functions are replaced by ones that watch the
clock: what a function takes is its own time and that of its pullback, without that of the functions
that it calls.

    python benchmarks/training_shares.py [--steps 40] [--write]

--write: training_shares.md.
"""

import argparse
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import numpy as np
from peers.language_model import training_of  # which lets examples/ be imported from
from tqdm import tqdm
from works import WORKS

import mha

import train_language_model as program  # isort: skip

HERE = Path(__file__).parent
OF_MHA = ("attention layers", "products of feed-forward and logits")
REST = "residual sums, copies of gradients, the batch"


class Clock:
    """Seconds by name; of functions that call each other, the inner one's count."""

    def __init__(self):
        self.seconds = defaultdict(float)
        self.names = []
        self.since = 0.0

    def switch(self):
        now = time.perf_counter()
        if self.names:
            self.seconds[self.names[-1]] += now - self.since
        self.since = now

    @contextmanager
    def runs(self, name):
        self.switch()
        self.names.append(name)
        try:
            yield
        finally:
            self.switch()
            self.names.pop()

    def watched(self, name, function):
        """The function, and the pullback that it may return, timed."""
        @wraps(function)
        def timed(*args, **kwargs):
            with self.runs(name):
                result = function(*args, **kwargs)
            if isinstance(result, tuple) and callable(result[-1]):
                return *result[:-1], self.watched(name, result[-1])
            return result

        return timed


@contextmanager
def replaced(clock):
    """The functions of the program, and mha's that it calls, watched."""
    watched = [(mha.MultiHeadAttention, "vjp", OF_MHA[0]), (mha, "linear_vjp", OF_MHA[1]),
               (mha, "linear", OF_MHA[1]), (program, "layer_norm_vjp", "layer norms"),
               (program, "feed_forward_vjp", "max(0, x) of the feed-forward"),
               (program, "dropout_vjp", "dropout of the residuals"),
               (program, "cross_entropy_vjp", "softmax of the loss"),
               (program, "embedding_vjp", "embedding"),
               (program.Adam, "update", "optimiser (Adam)"),
               (program.Training, "step", REST)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
    for owner, name, part in watched:
        setattr(owner, name, clock.watched(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def measure(work, threads, steps):
    """Name -> milliseconds of each step."""
    mha.set_num_threads(threads)
    training, clock = training_of(work), Clock()
    for _ in range(5):
        training.step()
    taken = defaultdict(list)
    with replaced(clock):
        for _ in range(steps):
            clock.seconds.clear()
            training.step()
            for name, seconds in clock.seconds.items():
                taken[name].append(1e3 * seconds)
    return taken


def table(measured):
    """Rows by the first column's share, mha's before NumPy's."""
    medians = {of: {name: np.median(times) for name, times in taken.items()}
               for of, taken in measured.items()}
    names = sorted({name for taken in medians.values() for name in taken},
                   key=lambda name: (name not in OF_MHA, name == REST,
                                     -sum(taken.get(name, 0) for taken in medians.values())))
    lines = ["| part | by | " + " | ".join(medians) + " |", "|---|---|" + "---|" * len(medians)]
    for name in names:
        cells = []
        for taken in medians.values():
            share = taken.get(name, 0) / sum(taken.values())
            cells.append(f"{taken[name]:.1f} ms ({share:.0%})" if name in taken else "")
        lines.append(f"| {name} | {'mha' if name in OF_MHA else 'NumPy'} | {' | '.join(cells)} |")
    sums = [f"{sum(taken.values()):.1f} ms, mha's"
            f" {sum(taken[name] for name in OF_MHA) / sum(taken.values()):.0%}"
            for taken in medians.values()]
    return "\n".join([*lines, f"| together | | {' | '.join(sums)} |"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="write training_shares.md")
    arguments = parser.parse_args()
    works = [work for work in WORKS if work.kind == "model"]
    measured = {}
    for work in tqdm(works, unit="model"):
        for threads in (1, 2):
            of = f"{threads} thread{'s' * (threads > 1)}{', dropout' * (work.dropout > 0)}"
            measured[of] = measure(work, threads, arguments.steps)
    batch, length, width, heads, blocks = works[0].shape
    text = (f"# Where the time of a training step goes\n\n{mha.instruction_set()}, NumPy"
            f" {np.__version__}; a batch of {batch} x {length}, {blocks} blocks of {width} with"
            f" {heads} heads; medians of {arguments.steps} steps. What NumPy computes, it computes"
            f" by one thread, a pass over the memory for each operation.\n\n{table(measured)}\n")
    print(text)
    if arguments.write:
        (HERE / "training_shares.md").write_text(text)


if __name__ == "__main__":
    main()
