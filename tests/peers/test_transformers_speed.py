"""examples/transformers_speed.py with tiny sizes: its processes answer, and it prints its table."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "transformers_speed.py"


def test_it_prints_a_line_a_task():
    sizes = {"layers": 1, "heads": 2, "width": 16, "length": 16, "new": 4, "rounds": 1,
             "threads": 1}
    done = subprocess.run(
        [sys.executable, EXAMPLE, *(f"--{name}={size}" for name, size in sizes.items())],
        capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["1", task] for task in (
        "prefill", "training", "generation")]
    for _, _, *milliseconds, share, ratio, promised, measured in rows:
        assert all(float(time) > 0 for time in milliseconds)
        assert 0 < float(share.rstrip("%")) < 100
        assert min(float(ratio), float(promised), float(measured)) > 0


@pytest.mark.parametrize(("arguments", "said"), [
    (["--layers=0"], "--layers: got 0, wanted at least 1"),
    (["--threads", "0"], "--threads: got 0, wanted at least 1"),
    (["--length=64"], "--new: got 64, wanted fewer than the 64 of --length"),
    (["--width=100"], "--width: got 100, wanted a multiple of the 12 --heads")])
def test_sizes_that_do_not_fit(arguments, said):
    done = subprocess.run([sys.executable, EXAMPLE, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr
