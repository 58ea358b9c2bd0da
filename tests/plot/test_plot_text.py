"""Heat maps as text: shades, numbers, words, and the letters that a terminal has."""

import io
import sys

import numpy as np
import pytest

import mha

WORDS = ["The", "cat", "sat", "on", "the", "mat"]


def some_weights(*shape):
    weights = np.random.default_rng(0).random(shape)
    return weights / weights.sum(axis=-1, keepdims=True)


def test_text_shows_shade_and_percentage():
    assert mha.plot.text([[0.9, 0.1], [0.4, 0.6]], ["cat", "sat"], width=80) == (
        "       cat    sat\n"
        "cat  ██ 90  ·· 10\n"
        "sat  ░░ 40  ▒▒ 60")


def test_text_takes_other_key_words_and_a_scale():
    assert mha.plot.text([[0.5, np.nan]], ["q"], ["key", "longer word"], vmax=1, width=80) == (
        "     key  longer word\n"
        "q  ░░ 50        ??nan")


def test_text_is_aligned_with_wide_and_combining_characters():
    lines = mha.plot.text(np.eye(3), ["猫", "座った", "e\u0301t"], width=80).splitlines()
    columns = [sum(2 if c in "猫座った" else c != "\u0301" for c in line) for line in lines]
    assert columns[0] == columns[3] == 6 + 2 + 5 + 2 + 6 + 2 + 5
    assert lines[3] == "e\u0301t          0       0  ██100"


def test_text_numbers_the_keys_where_the_words_do_not_fit():
    text = mha.plot.text(np.eye(6), WORDS, width=30)
    assert text.splitlines()[:3] == ["       0  1  2  3  4  5",
                                     "0 The ██",
                                     "1 cat    ██"]
    narrow = mha.plot.text(np.eye(40), [f"w{i}" for i in range(40)], width=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.splitlines()[41 - 1].endswith("w39" + " " * 40 + "█")
    assert "keys: 0 a, 1 b" in mha.plot.text(np.ones((1, 2)), ["query"], "ab", width=14)


def test_text_keeps_to_its_width():
    rng = np.random.default_rng(0)
    letters = np.array([*"abcdefgh猫座é"])
    for width in [10, 11, 12, 17, 24, 39, 80, 200]:
        for query_len, key_len in ((1, 1), (3, 3), (4, 11), (12, 3), (2, 101), (101, 2), (1, 1200)):
            queries, keys = (["".join(rng.choice(letters, rng.integers(0, 30)))
                              for _ in range(length)] for length in (query_len, key_len))
            weights = some_weights(query_len, key_len) * rng.choice([0.01, 1])
            lines = mha.plot.text(weights, queries, keys, width=width).splitlines()
            assert max(map(mha.plot._labels.columns_of, lines)) <= width


def test_text_in_blocks_shows_every_key_below_its_number():
    lines = mha.plot.text(np.eye(95), [f"w{i}" for i in range(95)], width=40).splitlines()
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) == 4
    for first, block in zip(range(0, 95, 30), blocks):
        ruler, *rows = block.splitlines()
        assert len(rows) == 95
        for number in range(first, min(first + 30, 95), 10):
            column = ruler.index(str(number), 4)
            assert rows[number][column] == "█"
            assert rows[number].split()[0] == str(number)


def test_text_shows_weights_above_one_in_line():
    lines = mha.plot.text([[12.0, 3.0], [0.0, 0.5]], "ab", width=80).splitlines()
    assert lines == ["        a      b", "a  ██1200  ··300", "b       0     50"]


@pytest.mark.parametrize(("encoding", "lines"), [
    ("ascii", ["         caf\\xe9  \\u732b",
               "caf\\xe9    ## 90   .. 10",
               "\\u732b     :: 40   ++ 60"]),
    ("cp1252", ["         café  \\u732b",
                "café    ## 90   ·· 10",
                "\\u732b  :: 40   ++ 60"]),
    ("cp437", ["         café  \\u732b",
               "café    ██ 90   ·· 10",
               "\\u732b  ░░ 40   ▒▒ 60"]),
    ("utf-8", ["       café     猫",
               "café  ██ 90  ·· 10",
               "猫    ░░ 40  ▒▒ 60"]),
])
def test_text_is_in_letters_that_stdout_has(monkeypatch, encoding, lines):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert mha.plot.text([[0.9, 0.1], [0.4, 0.6]], ["café", "猫"], width=80).splitlines() == lines
    cut = mha.plot.text(np.eye(30), ["▁mañana"] * 30, list(range(30)), width=20)
    cut.encode(encoding)
    assert max(map(len, cut.splitlines())) <= 20


@pytest.mark.parametrize("stdout", [None, io.StringIO()])
def test_text_without_an_encoding_has_all_letters(monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    assert mha.plot.text(np.eye(2), ["猫", "x"], width=80).splitlines()[1] == "猫  ██100      0"
