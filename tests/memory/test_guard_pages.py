"""Random calls between forbidden pages (guard_pages.py), on each kernel set, and calls of empty
shapes (empty_between_pages.py). LONGER=n makes n times as many random ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "helpers"))
import empty_shapes

from mha import _core

LONGER = int(os.environ.get("LONGER", "1"))
CALLS = 600
BATCHES = 4 * LONGER
PROGRAM = Path(__file__).parent / "guard_pages.py"
EMPTY = Path(__file__).parent / "empty_between_pages.py"


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("instruction_set", _core.instruction_sets())
def test_guard_pages(instruction_set, batch):
    first = batch * CALLS // 4
    command = [sys.executable, "-X", "faulthandler", PROGRAM, str(first), str(CALLS // 4)]
    done = subprocess.run(command, env={**os.environ, "MHA_ISA": instruction_set},
                          capture_output=True, text=True, timeout=280)
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, (instruction_set, done.returncode, last, done.stderr[-3000:])


@pytest.mark.parametrize("side", ["behind", "before"])
@pytest.mark.parametrize("kind", empty_shapes.CALLS)
@pytest.mark.parametrize("instruction_set", _core.instruction_sets())
def test_empty_shapes(instruction_set, kind, side):
    command = [sys.executable, "-X", "faulthandler", EMPTY, kind, side]
    done = subprocess.run(command, env={**os.environ, "MHA_ISA": instruction_set},
                          capture_output=True, text=True, timeout=280)
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, (done.returncode, last, done.stderr[-3000:])
    assert last[0].endswith(" calls"), last
