"""A heat map as text, no wider than it is told: `mha.plot.text`."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mha.plot._labels import columns_of, cut

SHADES = " ·░▒▓█"
PLAIN = dict(zip("·░▒▓█…", ".:+*#~"))  # where a terminal's encoding has no such letter
NARROWEST = 10  # columns: a number of five digits, a letter of the word, two shades


def heat_map(matrix: NDArray[np.float64], query_words: Sequence[str], key_words: Sequence[str],
             vmax: float, width: int) -> str:
    """The lines of `mha.plot.text`: with words and percentages above each other where they fit."""
    cells = [[_shade(weight, vmax) * 2 + _percent(weight) for weight in row] for row in matrix]
    columns = [max(columns_of(word), *(len(row[key]) for row in cells))
               for key, word in enumerate(key_words)]
    label_width = max(map(columns_of, query_words))
    if label_width + sum(columns) + 2 * len(columns) > width:
        return "\n".join(line.rstrip() for line in
                         _numbered(matrix, query_words, key_words, vmax, width))
    lines = [_pad("", label_width) + "".join(
        "  " + _pad(word, column, right=True) for word, column in zip(key_words, columns))]
    for word, row in zip(query_words, cells):
        lines.append(_pad(word, label_width) + "".join(
            "  " + cell.rjust(column) for cell, column in zip(row, columns)))
    return "\n".join(line.rstrip() for line in lines)


def plain_words(words: Sequence[str], encoding: str) -> list[str]:
    r"""The words in an encoding, with \u and a number for each letter that it does not have."""
    return [word.encode(encoding, "backslashreplace").decode(encoding) for word in words]


def plain_shades(picture: str, encoding: str) -> str:
    """A picture whose words the encoding has, in shades that it has too."""
    lacking = {ord(letter): plain for letter, plain in PLAIN.items()
               if letter.encode(encoding, "ignore") == b""}
    return picture.translate(lacking)


def _numbered(matrix: NDArray[np.float64], query_words: Sequence[str], key_words: Sequence[str],
              vmax: float, width: int) -> Iterator[str]:
    """The narrow form: the keys as numbers, three columns each or, where that is too wide, one,
    in several blocks if need be; then which word each number is."""
    key_len = matrix.shape[1]
    digits = len(str(max(matrix.shape) - 1))
    label_width = min(max(map(columns_of, query_words)), max(1, width // 3 - digits))
    starts = [f"{query:>{digits}} {_pad(cut(word, label_width), label_width)}"
              for query, word in enumerate(query_words)]
    room = width - digits - 1 - label_width
    column = max(3, digits + 1)
    if column * key_len <= room:
        yield " " * (width - room) + "".join(str(key).rjust(column) for key in range(key_len))
        for start, row in zip(starts, matrix):
            yield start + "".join((_shade(weight, vmax) * 2).rjust(column) for weight in row)
    else:
        at_once = room - 1
        if at_once < key_len and at_once > 10:
            at_once -= at_once % 10
        for first in range(0, key_len, at_once):
            if first:
                yield ""
            keys = range(first, min(first + at_once, key_len))
            yield " " * (width - room + 1) + _ruler(keys)
            for start, row in zip(starts, matrix):
                yield start + " " + "".join(_shade(row[key], vmax) for key in keys)
    if key_words != query_words:
        yield from _legend(key_words, width)


def _ruler(keys: range) -> str:
    """The numbers of every tenth key, each beginning above its column: 0·········10········20."""
    ruler = ""
    for key in keys:
        if len(ruler) > key - keys[0]:
            continue
        number = str(key) if key % 10 == 0 or key == keys[0] else "·"
        ruler += number if len(ruler) + len(number) <= len(keys) else "·"
    return ruler


def _legend(words: Sequence[str], width: int) -> Iterator[str]:
    """Which word each key is, in as many lines as it takes."""
    line = "keys:"
    for key, word in enumerate(words):
        comma = "," if key + 1 < len(words) else ""
        entry = f" {cut(f'{key} {word}', width - 2 - len(comma))}{comma}"
        if columns_of(line + entry) > width:
            yield line
            line = " "
        line += entry
    yield line


def _shade(weight: float, vmax: float) -> str:
    if math.isnan(weight):
        return "?"
    share = min(max(weight / vmax, 0), 1)
    return SHADES[round(share * (len(SHADES) - 1))]


def _percent(weight: float) -> str:
    return "nan" if math.isnan(weight) else f"{100 * weight:3.0f}"


def _pad(word: str, width: int, right: bool = False) -> str:
    space = " " * (width - columns_of(word))
    return space + word if right else word + space
