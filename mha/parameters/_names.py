"""The names of a state: what is there under a prefix, and what it looks like."""

from __future__ import annotations

import bisect
import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mha._base.arguments import printable
from mha._base.keywords import close_matches
from mha.parameters._layouts import LAYOUTS, OF_MODELS
from mha.parameters._refused import refusal
from mha.parameters._table import Form, Layout

PLACE = "{layer}"  # in a prefix, for the number of a layer
MOST_SHOWN = 12
ONE_OF_THEM = "one of mha.parameters.layouts()"


def layout_named(name: Any) -> Layout:
    """By its own name or by what configs call one of its models."""
    if not isinstance(name, str):
        raise TypeError(f"layout: got {type(name).__name__}, wanted a name")
    known = OF_MODELS | LAYOUTS
    if name not in known:
        why = refusal(name)
        close = ", ".join(close_matches(name, known, 4))
        raise ValueError(printable(f"layout: got {name!r}, " + (
            f"which has {why}" if why else f"wanted one of {close}; or another"
            f" of mha.parameters.layouts()" if close else f"wanted {ONE_OF_THEM}")))
    return known[name]


def check_layer(layout: Layout, latent: bool) -> None:
    """That it is a layout of this class of layers."""
    if layout.latent != latent:
        raise ValueError(f"layout: got {layout.name!r}, which is one of {layer_of(layout.name)},"
                         " wanted a call of that class")


def layer_of(layout: str) -> str:
    """The class of layers that a layout is one of."""
    latent = LAYOUTS[layout].latent if layout in LAYOUTS else False
    return f"mha.MultiHead{'Latent' * latent}Attention"


def flattened(tree: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """A tree of mappings as one, names joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat


def as_tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


def layer_indices(names: Iterable[str], prefix: str) -> list[int]:
    """The numbers that stand in the prefix's place for them; all from 0 on, or a ValueError."""
    before, _, behind = map(re.escape, prefix.partition(PLACE))
    again = behind.replace(re.escape(PLACE), r"\1")  # a prefix may name the layer more than once
    pattern = re.compile(before + r"(\d{1,9})" + again)
    found = {int(match[1]) for match in map(pattern.match, names) if match}
    missing = sorted(set(range(len(found))) - found)
    if missing:
        raise ValueError(f"state: got layers {shown(sorted(found))} under prefix {prefix!r}, wanted"
                         f" {missing[0]} too")
    return sorted(found)


def best_forms(layout: Layout, names: Iterable[str]) -> list[Form]:
    """Of a layout's forms the one that has most of its names there, and others of its names."""
    there = set(names)
    best = max(layout.forms, key=lambda form: sum(
        name in there for name, stored in form.items() if not stored.optional))
    return [form for form in layout.forms if form.keys() == best.keys()]


def left_over(layout: Layout, form: Form, names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in form and not any(
        fnmatch.fnmatchcase(name, pattern) for pattern in layout.passed_over)]


def looks_like(names: set[str]) -> list[str]:
    """The layouts that these names are those of, those first that have the fewest more; of those
    with the same form one."""
    found: list[tuple[str, Form]] = []
    for layout in LAYOUTS.values():
        form = fitting(layout, names)
        if form is not None and all(form != other for _, other in found):
            found.append((layout.name, form))
    return [name for name, form in sorted(found, key=lambda each: len(each[1].keys() - names))]


def fits(layout: Layout, names: set[str]) -> bool:
    """Whether these are a layout's names."""
    return fitting(layout, names) is not None


def fitting(layout: Layout, names: set[str]) -> Form | None:
    """The form of a layout that these are the names of: none is missing and none left over."""
    return next((form for form in layout.forms
                 if required(form) <= names and not left_over(layout, form, names)), None)


def required(form: Form) -> set[str]:
    return {name for name, stored in form.items()
            if not stored.optional and not stored.in_layer_0}


def places(layout: Layout, names: Iterable[str]) -> list[str]:
    """Prefixes under which a state has the names of a layout, layers' numbers as {layer}."""
    there = set(names)
    ordered = sorted(there)
    found = set()
    for form in layout.forms:
        first, *others = sorted(required(form))
        prefixes = {name.removesuffix(first) for name in there if name.endswith(first)}
        found |= {prefix for prefix in prefixes if all(prefix + other in there for other in others)
                  and fits(layout, _under(prefix, ordered))}
    # Layers count from 0.
    general = {prefix: re.sub(r"\d+", PLACE, prefix, count=1) for prefix in found}
    return sorted({wide if wide.replace(PLACE, "0", 1) in found else prefix
                   for prefix, wide in general.items()})


def _under(prefix: str, ordered: list[str]) -> set[str]:
    """What stands behind a prefix in sorted names: those that begin with it are beside each other.
    """
    behind = itertools.islice(ordered, bisect.bisect_left(ordered, prefix), None)
    return {name.removeprefix(prefix)
            for name in itertools.takewhile(lambda name: name.startswith(prefix), behind)}


def advice(layout: Layout, under: set[str], names: Iterable[str], prefix: str) -> list[str]:
    """What else the state may be: another layout, or this one or another elsewhere."""
    if fits(layout, under):
        return []
    others = looks_like(under)
    if others:
        return [f"looks like {' or '.join(others)}: try layout={others[0]!r}"]
    if under and required(best_forms(layout, under)[0]) & under:
        return []
    for other in (layout, *LAYOUTS.values()):
        elsewhere = places(other, names)
        if elsewhere:
            also = "" if other is layout else f" layout={other.name!r},"
            one = elsewhere[0].replace(PLACE, "0")
            several = one != elsewhere[0] and PLACE not in prefix
            return [f"looks like {other.name} elsewhere: try{also} prefix={elsewhere[0]!r}"
                    + f", a list of all layers, or {one!r}, the first" * several]
    return []


def shown(things: Iterable[Any]) -> str:
    listed = [str(thing) or "''" for thing in things]
    more = len(listed) - MOST_SHOWN
    return ", ".join(listed[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "") or "nothing"
