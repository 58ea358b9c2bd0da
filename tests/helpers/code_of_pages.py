"""The blocks of Python in the README and in the pages of docs/, for the tests that run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks_of(page):
    """page: a path from the root of the project."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def names_of(page):
    """What the blocks define, run one after the other."""
    names = {}
    for block in blocks_of(page):
        exec(block, names)
    return names


def block_with(page, line):
    """The one block with such a line: a page may get other blocks before it."""
    block, = (each for each in blocks_of(page) if line in each)
    return block
