"""Files that are wrong in random ways, read by a child that has little memory: hostile_files.py."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers/hostile_files.py"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_take_little_memory_and_give_value_errors(seed, tmp_path):
    done = subprocess.run([sys.executable, PROGRAM, str(seed), "300", tmp_path], text=True,
                          capture_output=True, timeout=600)
    assert done.stdout == "300 read\n", done.stderr
