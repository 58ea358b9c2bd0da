"""The page of docs/ that says what came of each model of transformers."""

import textwrap

import transformers

PAGE = """\
# Models of transformers

What `make sweep-transformers` found with transformers {version}: every file of the package whose
code asks for an attention implementation, or has a class that says that it supports them, as the
smallest random model that "eager" runs, under "mha" beside "eager". No weights are downloaded. A
model of text and images or sounds gets text alone where that is enough: its other parts do not run.

| what became of the files | how many |
|---|---|
{counts}

"eager" runs {eager:.1%} of the {all} files; mha's function was called, its calls counted, in
{called:.1%} of those.

"Same" means, for a forward's numbers and for the gradients of all parameters: the error against
"eager" in float64 is at most twice that of "eager" in float32, or 1e-6 of the largest number;
without padding, and with padding on either side of a row. Generated tokens are equal: greedy, by
beams, with a static cache, with a hybrid one of full and sliding-window layers where the model has
such layers, and with an assistant model. Sliding windows are {window} keys wide, shorter than the
inputs. "All" is all of that but the hybrid cache, which is named. What "eager" itself does not take
is left out, with its reason. "As sdpa" is where "eager" is alone: padding flows into what counts,
by recurrence or pooling, or two beams are equally good.

"Refused by name" is a UserWarning: the model has attention of its own, and keeps it. Models whose
code asks for no implementation at all, such as Falcon, BLOOM and MPT, have no row;
[they are refused likewise](coming_from.md#transformers-and-pytorch).

| model | mha | what is the same | class, and reasons |
|---|---|---|---|
{rows}
"""
STATUS = {"same": "same", "different": "different", "refused": "refused by name",
          "not called": "ignored by the model", "not buildable": "not built", "crash": "crash"}
ALL = ("forward", "gradients", "padding left", "padding right", "greedy", "beams", "static cache",
       "assisted")
RAN = ("same", "different", "refused", "not called")
WORDS = {"left": "padding left", "right": "padding right", "static": "static cache",
         "hybrid": "hybrid cache"}


def write_table(path, rows, window, shares):
    """shares: of models that "eager" runs, and of those in which mha was called."""
    counts = {word: sum(row["status"] == status for row in rows) for status, word in STATUS.items()}
    path.write_text(PAGE.format(
        version=transformers.__version__, window=window, eager=shares[0], called=shares[1],
        all=len(rows), counts="\n".join(f"| {word} | {count} |" for word, count in counts.items()),
        rows="\n".join(map(line, rows))), encoding="utf-8")


def line(row):
    """A row of the table."""
    checks = row.get("checks", {})
    same = [WORDS.get(name, name) for name, word in checks.items()
            if word == "same" and not name.endswith(" gradients")]
    if {*ALL} <= {*same}:
        same = ["all", *[name for name in same if name not in ALL]]
    if row["status"] in ("refused", "not called"):  # what ran was not mha
        same = []
    reasons = {}
    for name, word in checks.items():
        if word.startswith(("eager: ", "as sdpa: ")):
            reasons.setdefault(word.removeprefix("eager: "), []).append(WORDS.get(name, name))
    said = [f"{', '.join(names)}: {plain(why)}" for why, names in reasons.items()]
    if "reason" in row:
        said.insert(0, plain(row["reason"]))
    said = [*([f"`{row['class']}`"] if "class" in row else []), *said]
    cells = f"`{row['name']}`", STATUS[row["status"]], ", ".join(same), "; ".join(said)
    return f"| {' | '.join(cells)} |"


def plain(text):
    """Of an error, without what Markdown would take for its own; whole words of a long one."""
    text = textwrap.shorten(text, 160, placeholder=" ...")
    for mark in "\\`*_<>[]|$#":
        text = text.replace(mark, f"\\{mark}")
    return text
