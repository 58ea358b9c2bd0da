"""Docstrings as reStructuredText. In ours, words in `backquotes` are code, `mha.x` is a link, lines
that are indented stand as they are, and all else is plain text: stars, bars and underscores mean
themselves."""

import re

SECTIONS = {"Parameters", "Returns", "Raises", "Attributes", "Calls", "Yields", "Notes"}
ERROR = r"[A-Z]\w*(?:Error|Warning):"
DEFINING = {"Parameters", "Attributes"}  # name : type, with text indented below


def as_restructured_text(app, what, name, obj, options, lines):
    lines[:] = converted(lines)


def converted(lines):
    """The lines, with sections as headings, parameters as definitions, examples as they are."""
    lines = _joined([line.rstrip() for line in lines])
    made, section, kind = [], None, "text"
    for at, line in enumerate(lines):
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if re.fullmatch("-{3,}", line):
            continue
        if line in SECTIONS and re.fullmatch("-{3,}", following):
            section, kind = line, "text"
            made += ["", f".. rubric:: {line}", ""]
            continue
        before, kind = kind, _kind(line, kind, section)
        if kind == "literal" and before != kind:
            made += ["", "::", ""]
        elif kind != before and line and (before, kind) != ("term", "definition"):
            made.append("")
        made += {"text": [escaped(line)], "item": [escaped(line)], "term": _term(line, following),
                 "definition": [f"    {escaped(line.strip())}"]}.get(kind, [line])
    return [*made, ""]


def _joined(lines):
    """What goes on in the next line, in one: an item of a list, a type of a parameter, the errors
    of one paragraph, which become a list."""
    made, section = [], None
    for at, line in enumerate(lines):
        if line in SECTIONS and re.fullmatch("-{3,}", [*lines, ""][at + 1]):
            section = line
        before = made[-1] if made else ""
        goes_on = line.startswith(" ") and (
            before.startswith("- ") or (" : " in before and not before.startswith(" ")
            and section in DEFINING and re.search(r"(,| or| must)$", before)))
        if goes_on:
            made[-1] += f" {line.strip()}"
        elif section == "Raises" and before.startswith("- ") and line:
            made[-1:] = _errors(f"{before} {line}")
        elif section == "Raises" and re.match(ERROR, line):
            made += ["", *_errors(f"- {line}")]
        else:
            made.append(line)
    return made


def _errors(text):
    """"- ValueError: this. TypeError: that." as an item for each."""
    first, *others = re.split(rf"(?<=\.) (?={ERROR})", text)
    return [first, *(f"- {other}" for other in others)]


def _kind(line, before, section):
    """What the line is; an empty one belongs to what came before, but ends an example."""
    if not line:
        return before if before in ("literal", "definition") else "text"
    if line.startswith(">>>") or before == "example":
        return "example"
    if line.startswith("- "):
        return "item"
    if line.startswith(" "):
        return "definition" if section in DEFINING else "literal"
    return "term" if section in DEFINING and " : " in line else "text"


def _term(line, following):
    """A parameter, with its definition where text is indented below."""
    name, _, kind = line.partition(" : ")
    text = f"**{escaped(name)}** : {escaped(kind)}"
    return ["", text] if following.startswith(" ") else ["", f"| {text}", ""]


def escaped(text):
    """Plain text but for `code`, and `mha.names`, which are links."""
    parts = re.split(r"`+([^`]+)`+", text)
    for at, part in enumerate(parts):
        if at % 2 == 0:
            parts[at] = re.sub(r"([\\*|_])", r"\\\1", part)
        elif re.fullmatch(r"mha(\.\w+)+", part):
            parts[at] = f":py:obj:`{part}`"
        else:
            parts[at] = f"``{part}``"
        if at % 2 and parts[at + 1][:1].isalnum():  # `mha.x`s: markup ends before a letter
            parts[at] += "\\ "
    return re.sub("^Source:", "*Source:*", "".join(parts))
