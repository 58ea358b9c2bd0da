"""What turns docstrings into pages, and what finds broken links; `make docs` builds the site."""

import importlib
import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def module(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


docstrings, links = module("docstrings"), module("links")

DOCSTRING = """\
x * W_ for `code` and `mha.linear`.

    an indented line *

Parameters
----------
x, W : arrays (..., n)
    As they
    are.
rest : int
no definition

Raises
------
ValueError: if | so. TypeError: what
is `x`s.

>>> 1 * 2
2"""

PAGE = """\
x \\* W\\_ for ``code`` and :py:obj:`mha.linear`.

::

    an indented line *

.. rubric:: Parameters

**x, W** : arrays (..., n)
    As they
    are.

| **rest** : int

no definition

.. rubric:: Raises

- ValueError: if \\| so.
- TypeError: what is ``x``\\ s.

>>> 1 * 2
2"""


def test_docstrings_become_pages():
    made = "\n".join(docstrings.converted(DOCSTRING.split("\n")))
    while "\n\n\n" in made:
        made = made.replace("\n\n\n", "\n\n")
    assert made.strip() == PAGE


def test_broken_links_are_found(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "one.html").write_text(
        '<p id="here"></p><a href="#here"></a><a href="below/two.html#there"></a>'
        '<a href="#gone"></a><a href="https://example.org/a"></a><a href="mailto:x@y"></a>'
        '<img src="missing.png">')
    (tmp_path / "below" / "two.html").write_text(
        '<a name="there"></a><a href="../one.html#here"></a>'
        '<svg><a href="../one.html#no"></a></svg>')
    broken, external = links.found(tmp_path)
    assert broken == {"one.html -> #gone", "one.html -> missing.png",
                      "below/two.html -> ../one.html#no"}
    assert external == {"https://example.org/a"}


def test_the_reference_begins_with_a_table_of_all_names():
    api = DOCS / "api"
    listed = re.findall(r"^   (mha\.\S+)$", (api / "index.md").read_text(encoding="utf-8"), re.M)
    wanted = {"mha.reference.steps"}
    for page in api.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for kind, name in re.findall(r"^\.\. auto(\w+):: (mha\.\S+)$", text, re.M):
            if kind != "module":
                wanted.add(name)
            elif not name.startswith(("mha.compat", "mha.reference")):
                members = importlib.import_module(name).__all__
                wanted |= {f"{name}.{member}" for member in members}
    assert sorted(listed) == sorted(wanted)
