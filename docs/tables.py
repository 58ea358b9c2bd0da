"""Tables that fit the page: code in them may break where names do, and on a narrow screen a table
of three columns and more becomes a list, whose entries carry the names of their columns."""

import re

from docutils import nodes

STACKED_FROM = 3  # columns
DENSE_FROM = 7


def fit(app, doctree, docname):
    for table in doctree.findall(nodes.table):
        head = next(iter(table.findall(nodes.thead)), None)
        names = [entry.astext() for entry in head[0]] if head else []
        for literal in list(table.findall(nodes.literal)):
            _let_break(literal)
        if len(names) >= STACKED_FROM:
            table["classes"].append("stacked")
            for body in table.findall(nodes.tbody):
                for row in body:
                    _name_columns(row, names)
        if len(names) >= DENSE_FROM:
            table["classes"].append("dense")


def _let_break(literal):
    """Lines may end behind underscores, slashes, commas, brackets, and dots but those of a file's
    extension."""
    first, *others = re.split(r"(?<=[_/,(=])(?=\w)|(?<=\.)(?=\w{3})", literal.astext())
    literal.children = []
    literal += nodes.Text(first)
    for part in others:
        literal += nodes.raw("", "<wbr>", format="html")
        literal += nodes.Text(part)


def _name_columns(row, names):
    """Before each entry the name of its column, which only a narrow screen shows; the first entry
    is the title of its row."""
    for entry, name in list(zip(row, names, strict=False))[1:]:
        if not entry.astext().strip():
            entry["classes"].append("blank")
        elif name and isinstance(entry[0], nodes.paragraph):
            entry[0].insert(0, nodes.inline("", f"{name}: ", classes=["column-name"]))
