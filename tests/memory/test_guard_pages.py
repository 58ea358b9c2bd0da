"""Random calls between forbidden pages (guard_pages.py), on each kernel set. LONGER=n makes n times
as many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mha import _core

LONGER = int(os.environ.get("LONGER", "1"))
CALLS = 600
BATCHES = 4 * LONGER
PROGRAM = Path(__file__).parent / "guard_pages.py"


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("instruction_set", _core.instruction_sets())
def test_guard_pages(instruction_set, batch):
    first = batch * CALLS // 4
    command = [sys.executable, "-X", "faulthandler", PROGRAM, str(first), str(CALLS // 4)]
    done = subprocess.run(command, env={**os.environ, "MHA_ISA": instruction_set},
                          capture_output=True, text=True, timeout=280)
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, (instruction_set, done.returncode, last, done.stderr[-3000:])
