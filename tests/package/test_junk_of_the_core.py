"""The private module with junk and forged capsules as arguments: never a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from junk_of_the_core import all_functions

from mha import _core

PROGRAM = Path(__file__).parents[1] / "helpers/junk_of_the_core.py"


def test_no_function_is_left_out():
    assert set(all_functions()) == {name for name in dir(_core) if callable(getattr(_core, name))}


@pytest.mark.parametrize("name", all_functions())
def test_junk(name):
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", PROGRAM, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, (done.returncode, last, done.stderr[-3000:])
    if all_functions()[name][1]:
        assert int(last[0].removeprefix("refused ")) > 0, last
