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
    tested = {name.partition("-")[0] for name in all_functions()}
    assert tested == {name for name in dir(_core) if callable(getattr(_core, name))}


@pytest.mark.parametrize("names", [tuple(all_functions())[i::6] for i in range(6)],
                         ids=lambda names: names[0])
def test_junk(names):
    """A process for some functions each; the last lines say where one ended."""
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-3000:])
    refused = {line[1]: int(line[2]) for line in lines if line[0] == "refused"}
    assert set(refused) == set(names)
    assert all(refused[name] > 0 for name in names if all_functions()[name][1])
