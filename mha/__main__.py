"""python -m mha: the configuration, and a race of about two seconds against NumPy;
python -m mha view weights.npz: a page that shows attention weights (mha/view/_command.py).

NumPy computes in float32 with all its threads, by its fastest program for the figure. Both run in
one process and for two seconds only, so the numbers are a first impression.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.random import default_rng  # here, since an import may swallow Ctrl-C
from numpy.typing import NDArray

import mha
from mha import reference
from mha.view import _command as command

SECONDS = 1.8        # of the rounds; warming up comes before
TURN_SECONDS = 0.02  # a side calls again until its turn has lasted this long
# NumPy's threads keep spinning for a while after a product, and would slow down whoever is next.
REST_SECONDS = 0.1
BUSY = 1.5  # programs a CPU: then NumPy's threads wait for each other, up to ten times as long


class Case(NamedTuple):
    """One thing computed twice, and the seconds that every call took."""

    name: str
    by_mha: Callable[[], NDArray[Any]]
    by_numpy: Callable[[], NDArray[Any]]
    mha_seconds: list[float]
    numpy_seconds: list[float]


def main() -> None:
    """Ends without a word where its reader does, as in `python -m mha | head -1`, and at Ctrl-C."""
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        # By the signal itself, so that a loop of a shell ends, too.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def run() -> None:
    parser = argparse.ArgumentParser("python -m mha", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON, and no more")
    parser.add_argument("--version", action="version", version=f"mha {mha.__version__}")
    commands = parser.add_subparsers(metavar="view")
    command.add_to(commands)
    options = parser.parse_args()
    if "run" in options:
        options.run(options)
    else:
        show_and_race(options.json)


def show_and_race(wants_json: bool) -> None:
    if not wants_json:
        mha.show_config()
        print(f"\nRacing NumPy {np.__version__} in float32 for about two seconds ...", flush=True)
    load = load_of_machine()
    is_busy = load > BUSY * (os.cpu_count() or 1)
    if is_busy and not wants_json:
        print(f"Others are at work here (a load of {load:.1f}): the times mean little, and how they"
              " compare nothing.\nTry again when they are done.")
    cases = make_cases()
    difference = max(largest_difference(case) for case in cases)
    race(cases)
    if wants_json:
        print(json.dumps(as_json(cases, difference, load), indent=2))
        return
    print(f"\n{'median of each call':<36}{'mha':>11}{'NumPy':>11}")
    for case in cases:
        print(row(case, compares=not is_busy))
    print(f"\nThe results differ by at most {difference:.0e} of the largest value.")
    if not is_busy and any(is_unsteady(case.mha_seconds) or is_unsteady(case.numpy_seconds)
                           for case in cases):
        print("The times varied much: is something else running here? Then they mean little.")


def load_of_machine() -> float:
    """How many programs ran or wanted to in the last minute, on average; 0 where nobody counts."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def make_cases() -> list[Case]:
    """A layer, attention over a long sequence, and one new token with a cache of keys."""
    generator = default_rng(0)

    def normal(*shape: int) -> NDArray[Any]:
        return generator.standard_normal(shape, dtype=np.float32)

    layer = mha.MultiHeadAttention(768, 12, rng=0)
    x = normal(8, 128, 768)  # (batch, len, embed_dim)
    query, key, value = (normal(1, 12, 512, 64) for _ in range(3))  # (batch, heads, len, head_dim)
    token, keys, values = normal(1, 12, 1, 64), normal(1, 12, 4096, 64), normal(1, 12, 4096, 64)

    return [
        Case("BERT-base layer, 8 x 128 tokens", lambda: layer(x),
             lambda: numpy_layer(layer, x), [], []),
        Case("attention, 12 heads, 512 tokens",
             lambda: mha.scaled_dot_product_attention(query, key, value),
             lambda: reference.unmasked_attention(query, key, value), [], []),
        Case("attention, 1 token to 4,096 keys",
             lambda: mha.scaled_dot_product_attention(token, keys, values),
             lambda: reference.unmasked_attention(token, keys, values), [], []),
    ]


def numpy_layer(layer: mha.MultiHeadAttention, x: NDArray[Any]) -> NDArray[Any]:
    """x (batch, len, embed_dim) -> (batch, len, embed_dim)."""
    tokens = x.reshape(-1, x.shape[-1])  # one large product is faster than one for each sequence
    query, key, value = (
        reference.split_heads(reference.linear(tokens, weight, bias).reshape(x.shape),
                              layer.num_heads)
        for weight, bias in ((layer.W_q, layer.b_q), (layer.W_k, layer.b_k),
                             (layer.W_v, layer.b_v)))
    merged = reference.merge_heads(reference.unmasked_attention(query, key, value))
    return reference.linear(merged.reshape(tokens.shape), layer.W_o, layer.b_o).reshape(x.shape)


def largest_difference(case: Case) -> float:
    """Between the two results, relative to the largest value; the calls also warm up both."""
    ours, theirs = case.by_mha(), case.by_numpy()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def race(cases: list[Case]) -> None:
    """Rounds in which every case is computed by both, until the time is over; at least one."""
    start = time.perf_counter()
    while not cases[0].mha_seconds or time.perf_counter() - start < SECONDS:
        for case in cases:
            time.sleep(REST_SECONDS)
            take_turn(case.by_mha, case.mha_seconds)
            take_turn(case.by_numpy, case.numpy_seconds)


def take_turn(compute: Callable[[], NDArray[Any]], seconds: list[float]) -> None:
    """Call at least once, and note how long every call takes."""
    turn = time.perf_counter()
    while True:
        start = time.perf_counter()
        compute()
        end = time.perf_counter()
        seconds.append(end - start)
        if end - turn >= TURN_SECONDS:
            break


def is_unsteady(seconds: list[float]) -> bool:
    """Whether the middle call took half as long again as the quickest."""
    return statistics.median(seconds) > 1.5 * min(seconds)


def as_json(cases: list[Case], difference: float, load: float) -> dict[str, Any]:
    """What is printed else; the times are medians in seconds."""
    medians = [(case, statistics.median(case.mha_seconds), statistics.median(case.numpy_seconds))
               for case in cases]
    return {"config": mha.show_config(mode="dicts"),
            "race": [{"name": case.name, "mha_seconds": ours, "numpy_seconds": theirs,
                      "times_as_fast": theirs / ours,
                      "steady": not (is_unsteady(case.mha_seconds)
                                     or is_unsteady(case.numpy_seconds))}
                     for case, ours, theirs in medians],
            "largest_difference": difference, "load": load}


def row(case: Case, compares: bool) -> str:
    """One line of the table: a ratio below 1 is a loss, and says so."""
    ours, theirs = statistics.median(case.mha_seconds), statistics.median(case.numpy_seconds)
    ratio = round(theirs / ours, 2)
    verdict = f"{ratio:.2f} times as fast as NumPy" + (" (slower)" if ratio < 1 else "")
    times = f"{case.name:<36}{1e3 * ours:>8.2f} ms{1e3 * theirs:>8.2f} ms"
    return f"{times}   {verdict}" if compares else times


if __name__ == "__main__":
    main()
