"""examples/long_document.py, with a short document."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mha

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parents[2] / "examples" / "long_document.py"


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, str(PROGRAM), "--folder", str(folder), *arguments], text=True,
        capture_output=True, encoding="utf-8", env={**os.environ, "COLUMNS": "80"})


def test_from_file_to_file(tmp_path):
    options = "--tokens", "20000", "--window", "500", "--chunk", "3000", "--memory", "400MB"
    printed = run(tmp_path, *options)
    assert printed.returncode == 0, printed.stderr
    assert "dashboard: http://" in printed.stdout
    assert "100% Completed" in printed.stdout
    assert "20,000 tokens in" in printed.stdout
    difference = float(printed.stdout.splitlines()[-1].split()[0])
    assert difference < 1e-6
    rows, attended = (np.load(tmp_path / name) for name in ("tokens.npy", "attended.npy"))
    wanted = mha.MultiHeadAttention(256, 4, rng=0)(rows[:4000], causal=True, window=(499, 0))
    assert np.abs(attended[:4000] - wanted).max() < 1e-6
    before = (tmp_path / "tokens.npy").stat().st_mtime_ns
    assert run(tmp_path, *options).returncode == 0
    assert (tmp_path / "tokens.npy").stat().st_mtime_ns == before  # what is there is taken


def test_a_file_of_ones_own_is_never_written_over(tmp_path):
    np.save(tmp_path / "tokens.npy", np.full((50, 256), 7, np.float32))
    printed = run(tmp_path, "--tokens", "60")
    assert printed.returncode == 1
    assert "got an array (50, 256) of float32, wanted (60, 256)" in printed.stderr
    assert run(tmp_path, "--workers", "1").returncode == 0
    assert (np.load(tmp_path / "tokens.npy") == 7).all()
    assert np.load(tmp_path / "attended.npy").shape == (50, 256)


@pytest.mark.parametrize("wrong", [("--tokens", "0"), ("--window", "-1"), ("--chunk", "x")])
def test_wrong_arguments(tmp_path, wrong):
    printed = run(tmp_path, *wrong)
    assert printed.returncode == 2
    assert wrong[0] in printed.stderr
