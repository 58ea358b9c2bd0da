"""examples/transformers_speed.py with tiny sizes: its processes answer, and it prints its table."""

import subprocess
import sys
from pathlib import Path

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
