"""Bars of tqdm for what takes long: on a terminal alone, and gone at the end."""

import io
import sys

import numpy as np
import pytest
from tqdm import tqdm

import mha
from mha._base import progress as module
from mha._base.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def look_at(stream, monkeypatch, seconds=-1.0):
    """Makes it stderr, with bars from the first item on. Within the test: pytest has a stderr of
    its own for each of setup and call."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "SECONDS", seconds)
    return stream


def test_the_items_come_through_with_a_bar_that_ends(monkeypatch):
    terminal = look_at(Terminal(), monkeypatch)
    assert list(progress(range(5), "counting", "number", 5)) == list(range(5))
    shown = terminal.getvalue()
    assert "counting" in shown and "/5" in shown
    assert shown.endswith("\r") and not shown.rsplit("\r", 2)[-2].strip()  # wiped


def test_an_error_or_an_early_end_closes_it(monkeypatch):
    terminal = look_at(Terminal(), monkeypatch)
    for one in progress(range(5), "counting", "number"):
        if one == 2:
            break
    del one
    assert not tqdm._instances
    with pytest.raises(ZeroDivisionError):
        list(progress((1 / (one - 3) for one in range(5)), "counting", "number"))
    assert not terminal.getvalue().rsplit("\r", 2)[-2].strip()


def test_short_work_and_what_nobody_sees_have_none(monkeypatch):
    for stream, seconds in ((Terminal(), 1.0), (io.StringIO(), -1.0)):
        look_at(stream, monkeypatch, seconds)
        assert list(progress(range(5), "counting", "number")) == list(range(5))
        assert stream.getvalue() == ""


def test_without_tqdm_or_with_a_closed_stderr(monkeypatch):
    terminal = look_at(Terminal(), monkeypatch)
    terminal.close()
    assert list(progress(range(3), "counting", "number")) == [0, 1, 2]
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert list(progress(range(3), "counting", "number")) == [0, 1, 2]


def test_a_bar_that_breaks_stops_nothing(monkeypatch):
    terminal = look_at(Terminal(), monkeypatch)
    items = []
    for one in progress(range(500), "counting", "number"):
        items.append(one)
        if one == 10:
            terminal.close()
    assert items == list(range(500))


def test_the_callers_own_bar_is_the_only_one(monkeypatch):
    terminal = look_at(Terminal(), monkeypatch)
    bar = tqdm(range(3), "mine", file=io.StringIO())
    assert list(progress(bar, "counting", "number")) == [0, 1, 2]
    unsized = tqdm(iter([np.ones(2)]), "mine", file=io.StringIO())
    assert mha.importance.gradient(unsized, normalise=False).tolist() == [1, 1]
    assert "counting" not in terminal.getvalue()


def test_ablation_gradients_and_diagnose_have_one(monkeypatch):
    terminal = look_at(Terminal(), monkeypatch)
    mha.importance.ablation(lambda gates: gates.sum(), (2, 3))
    assert "ablation" in terminal.getvalue() and "/6" in terminal.getvalue()
    mha.importance.gradient([np.ones(2)] * 4)
    assert "gradients" in terminal.getvalue() and "/4" in terminal.getvalue()
    mha.testing.diagnose(lambda query, key, value: query + 0.1 * value)
    assert "2 mistakes at a time" in terminal.getvalue()
