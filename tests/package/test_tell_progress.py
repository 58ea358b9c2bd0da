"""What `make run` and `make test` show while they work: tests/tools/tell_progress.py."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tests/tools"


def told(program, silence=15.0):
    """(what is printed while a program of the shell runs, its status)."""
    start = (f"import sys; sys.path.insert(0, {str(TOOLS)!r}); import tell_progress\n"
             f"tell_progress.SILENCE = {silence}\n"
             f"sys.exit(tell_progress.run('building', 'sh', '-c', {program!r}))")
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    return done.stdout, done.returncode


@pytest.mark.skipif(sys.platform == "win32", reason="a program of the shell")
def test_a_silent_command_is_said_to_go_on():
    printed, status = told("printf ..; sleep 1; echo end; exit 3", silence=0.2)
    assert re.fullmatch(r"make: building\n\.\.\n(make: goes on, \d+ s so far\n)+end\n", printed)
    assert status == 3


@pytest.mark.skipif(sys.platform == "win32", reason="a program of the shell")
def test_all_else_is_as_without():
    assert told("echo a; echo b") == ("make: building\na\nb\n", 0)
    assert told("kill -TERM $$")[1] == 128 + 15


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_nothing_that_takes_long_is_silent():
    """Every step of `make run` and `make test` that installs, compiles or tests."""
    steps = subprocess.run(["make", "--dry-run", "--always-make", "run", "test-python",
                            "test-baseline"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.replace("\\\n", "").splitlines()
    slow = [step for step in steps if re.search(r"-m (venv|pip|pytest) ", step)]
    assert len(slow) >= 6
    for step in slow:
        assert re.match(r'\S+ tests/tools/tell_progress\.py "[^"]+ \(usually [^"]+\)"', step), step
