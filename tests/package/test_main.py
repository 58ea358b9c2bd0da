"""python -m mha prints the configuration and the race; what the race computes is right."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import mha
from mha import __main__ as race


@pytest.fixture(scope="module")
def lines():
    done = subprocess.run([sys.executable, "-m", "mha"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_help_is_help():
    done = subprocess.run([sys.executable, "-m", "mha", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "race" in done.stdout and "median" not in done.stdout


def test_version_is_the_version():
    done = subprocess.run([sys.executable, "-m", "mha", "--version"], capture_output=True,
                          text=True)
    assert done.stdout == f"mha {mha.__version__}\n"


def test_json_is_all_that_is_printed():
    done = subprocess.run([sys.executable, "-m", "mha", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert printed["config"] == mha.show_config(mode="dicts")
    assert [one["name"] for one in printed["race"]] == [case.name for case in race.make_cases()]
    for one in printed["race"]:
        assert np.isclose(one["times_as_fast"], one["numpy_seconds"] / one["mha_seconds"])
        assert one["steady"] in (True, False)
    assert 0 <= printed["largest_difference"] < 1e-5


def test_it_ends_without_a_word_where_its_reader_does():
    """As in python -m mha | head -1."""
    with subprocess.Popen([sys.executable, "-m", "mha"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == f"mha {mha.__version__}\n"
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait() == 1


@pytest.mark.skipif(sys.platform == "win32", reason="its Ctrl-C goes to a group of processes")
@pytest.mark.parametrize("delay", [0, 0.001, 0.002, 0.01, 0.3])
def test_it_ends_without_a_word_at_ctrl_c(delay):
    with subprocess.Popen([sys.executable, "-m", "mha"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as program:
        while not program.stdout.readline().startswith("Racing"):
            pass
        time.sleep(delay)
        program.send_signal(signal.SIGINT)
        assert program.stderr.read() == ""
        assert program.wait() == -signal.SIGINT


def test_the_configuration_comes_first(lines):
    assert lines[0] == f"mha {mha.__version__}"
    assert lines[1].startswith(f"  instruction set: {mha.instruction_set()} (of ")
    assert lines[2].split() == ["threads:", str(mha.get_num_threads())]
    assert any(line.startswith(f"Racing NumPy {np.__version__} in float32") for line in lines)


@pytest.mark.parametrize("load", [0.0, 99.0])
def test_a_busy_machine_compares_nothing(load, monkeypatch, capsys):
    monkeypatch.setattr(race, "load_of_machine", lambda: load)
    monkeypatch.setattr(race, "SECONDS", 0)
    race.show_and_race(wants_json=False)
    printed = capsys.readouterr().out
    assert ("times as fast as NumPy" in printed) == (load == 0)
    assert ("Others are at work here (a load of 99.0)" in printed) == (load == 99)


def test_the_table_has_both_times_and_a_ratio_that_fits_them(monkeypatch, capsys):
    monkeypatch.setattr(race, "load_of_machine", lambda: 0.0)
    race.show_and_race(wants_json=False)
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("median of each call"))
    table = lines[start + 1:lines.index("", start)]
    assert [line[:35].strip() for line in table] == [case.name for case in race.make_cases()]
    for line in table:
        ours, theirs, ratio = map(float, re.fullmatch(
            r".{36} *([\d.]+) ms *([\d.]+) ms   ([\d.]+) times as fast as NumPy(?: \(slower\))?",
            line).groups())
        least, most = (theirs - 0.005) / (ours + 0.005), (theirs + 0.005) / (ours - 0.005)
        assert least - 0.006 < ratio < most + 0.006  # the times are rounded, and the ratio is
        assert (ratio < 1) == line.endswith("(slower)")


@pytest.mark.parametrize(("ours", "theirs", "verdict"), [
    (0.002, 0.003, "    2.00 ms    3.00 ms   1.50 times as fast as NumPy"),
    (0.002, 0.001, "    2.00 ms    1.00 ms   0.50 times as fast as NumPy (slower)"),
    (0.001, 0.001, "    1.00 ms    1.00 ms   1.00 times as fast as NumPy"),
])
def test_a_row_shows_a_loss_as_a_loss(ours, theirs, verdict):
    case = race.Case("name", None, None, [9.0, ours, 0.0], [theirs, 0.0, 9.0])
    assert race.row(case, compares=True) == f"{'name':<36}" + verdict
    times = verdict.split(" ms")[:2]
    assert race.row(case, compares=False) == f"{'name':<36}" + " ms".join(times) + " ms"


def test_both_sides_compute_the_same():
    for case in race.make_cases():
        assert race.largest_difference(case) < 1e-5
    wrong = race.make_cases()[1]._replace(by_mha=lambda: np.zeros((1, 12, 512, 64)))
    assert race.largest_difference(wrong) > 0.5


def test_times_that_vary_are_called_so():
    assert race.is_unsteady([1.0, 1.6, 1.7])
    assert not race.is_unsteady([1.0, 1.1, 5.0])


def test_a_busy_machine_is_called_so(monkeypatch, capsys):
    def race_of_a_second(cases):
        for case in cases:
            case.mha_seconds.append(1.0)
            case.numpy_seconds.append(1.0)

    monkeypatch.setattr(race, "race", race_of_a_second)
    for load, said in ((0.1, ""), (1000.0, "Others are at work here (a load of 1000.0)")):
        monkeypatch.setattr(race, "load_of_machine", lambda load=load: load)
        race.show_and_race(False)
        printed = capsys.readouterr().out
        assert said in printed
        assert ("Others" in printed) == bool(said)
