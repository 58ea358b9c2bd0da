"""Masks, causal flags and lengths: what they leave visible, compared with what they should."""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs, MaskEntry, Mistakes
from mha.testing._diagnosis.mask_mistakes import (
    MASK,
    OFF_BY_ONE,
    UNSEEN,
    causal,
    causal_from_start,
)
from mha.testing._diagnosis.model import IMPOSSIBLE, Masked, Model
from mha.testing._diagnosis.search import FLOAT16, distance, weak_fill
from mha.testing._diagnosis.signature import CannotTestError
from mha.testing._diagnosis.subject import TOLERANCE, Subject, equal, of_shape, seen_pairs

IGNORED = next(name for name in MASK if "ignored" in name)


class Restriction:
    """One call with an option on: what came, and what it can mean.

    rights and wrongs: {name: visible} that are as they should be, and that are mistakes.
    """

    def __init__(self, subject: Subject, inputs: Inputs, mine: Array, rights: Mapping[str, Array],
                 wrongs: Mapping[str, Array]) -> None:
        self.subject, self.inputs, self.mine = subject, inputs, mine
        self.rights, self.wrongs = rights, wrongs

    def fits(self, visible: Array | None, mistakes: Mistakes | None = None,
             tolerance: float = TOLERANCE) -> bool:
        """Whether attention that sees these pairs (None: all), with these mistakes, gives it."""
        model = self.subject.model
        mistakes = {**model.found, **(mistakes or {})}
        try:
            output, _ = model.run(self.inputs, mistakes, visible)
        except IMPOSSIBLE:
            return False
        query_len, key_len = self.inputs[0].shape[-2], self.inputs[1].shape[-2]
        rows = None if visible is None else model.empty_rows(mistakes, query_len, key_len, visible)
        return equal(self.mine, output, tolerance, without_rows=rows)

    def right(self) -> str | None:
        """The name of the right meaning that fits, or None."""
        return next((name for name, visible in self.rights.items() if self.fits(visible)), None)

    def mistakes(self) -> list[str]:
        """The names of what is wrong; [] where nothing known fits."""
        if self.fits(None):
            return [IGNORED]
        every = {**self.rights, **self.wrongs}
        for name, visible in self.wrongs.items():
            if self.fits(visible):
                return [name]
        for name, visible in every.items():
            for how in filter(None, MASK):
                if self.fits(visible, {"mask": how}):
                    return [*([name] if name in self.wrongs else []), how]
        for name, visible in every.items():
            for step, table in self.subject.model.tables().items():
                for mistake in filter(None, table):
                    if step != "triangle" and self.fits(visible, {step: mistake}):
                        return [*([name] if name in self.wrongs else []), f"only then: {mistake}"]
        for visible in self.rights.values():
            if (weak := weak_fill(functools.partial(self._off, visible))) is not None:
                return [weak[0]]
            if self.fits(visible, tolerance=FLOAT16):
                return ["right to about three digits only: blocked keys keep some weight, or"
                        " float16"]
        return []

    def _off(self, visible: Array, entry: MaskEntry) -> float:
        model = self.subject.model
        return distance(self.mine, model, self.inputs,
                        {**model.found, "mask": Masked(entry)}, visible)

    def described(self, name: str, options: Mapping[str, object]) -> str:
        """What is wrong where no known mistake fits, from which keys reach which queries."""
        if np.isnan(self.mine).all():
            return f"{name}: gives NaN throughout"
        wanted = next(iter(self.rights.values()))
        while wanted.ndim > 2:  # of the first batch item and head
            wanted = wanted[0]
        wanted = np.broadcast_to(wanted, (self.inputs[0].shape[-2], self.inputs[1].shape[-2]))
        try:
            seen = seen_pairs(self.subject, self.inputs, options)
        except CannotTestError:
            seen = None
        if seen is None or seen.shape != wanted.shape:
            return f"{name}: differs from the reference, and no known mistake explains it"
        extra, missing = np.argwhere(seen & ~wanted), np.argwhere(wanted & ~seen)
        if len(extra):
            return (f"{name}: query {extra[0][0]} still depends on key {extra[0][1]}, which is"
                    " blocked (counted from 0)")
        if len(missing):
            return (f"{name}: query {missing[0][0]} does not depend on key {missing[0][1]}, which"
                    " it may see (counted from 0)")
        return (f"{name}: the right keys are blocked, but the weights of the others are wrong:"
                " blocked scores must become -inf, or -1e9, before the softmax")


def over_heads(visible: Array, model: Model, axes: int) -> Array:
    """Visibility of batch items (batch, query_len or 1, key_len) as the scores' axes want it."""
    return visible[:, None] if model.layer or axes == 4 else visible


def batch_of(subject: Subject, inputs: Inputs) -> int:
    """How many items a mask or lengths may tell apart."""
    return inputs[0].shape[0] if inputs[0].ndim > 2 else 1


def test_causal(subject: Subject, name: str, problems: list[str], notes: list[str]) -> None:
    """A flag that switches a causal mask on."""
    seen_wrong = False
    for sizes in dict.fromkeys(((7, 7, subject.sizes[2]), subject.sizes)):
        inputs = subject.random_inputs(sizes)
        query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
        plain, _ = subject.expected(inputs)
        square = query_len == key_len
        try:
            mine = of_shape(subject.call(inputs, **{name: True}), plain.shape)
        except CannotTestError as reason:
            if square:
                if not _causal_with_mask(subject, name, inputs, plain, notes):
                    problems.append(f"{name}=True: {reason}")
                return
            notes.append(f"{name}: takes equally many queries and keys only")
            return
        rights = {"": causal(query_len, key_len)}
        if not square:
            rights["from the start"] = causal_from_start(query_len, key_len)
        if mine is None:
            problems.append(f"{name}=True: the output changes its shape")
            return
        found = Restriction(subject, inputs, mine, rights, {
            f"{name}: the mask is off by one: {UNSEEN}": causal(query_len, key_len, -1),
            f"{name}: the mask is off by one: a query sees the next key, one of the future":
                causal(query_len, key_len, 1),
            f"{name}: the mask is upside down (upper triangle): a query sees its own and later"
            " keys, not earlier ones": ~causal(query_len, key_len, -1),
            f"{name}: the mask is upside down (upper triangle): a query sees only later keys":
                ~causal(query_len, key_len),
            f"{name}: a query sees its own key only": np.eye(query_len, key_len, dtype=bool),
            f"{name}: only the diagonal is blocked": ~np.eye(query_len, key_len, dtype=bool),
            f"{name}: the mask is off by two: a query sees two keys of the future":
                causal(query_len, key_len, 2)})
        meaning = found.right()
        if meaning == "from the start":
            notes.append(f"{name}: counts from the first key; here, with fewer queries than keys"
                         " (a cache), the last query sees the last key (query_offset=0 for yours)")
        if meaning is None:
            if seen_wrong:
                return
            seen_wrong = True
            names = found.mistakes()
            if names == [IGNORED]:
                names = [f"{name} is ignored: the output does not change"]
            problems += [words if name in words or OFF_BY_ONE in words else f"{name}=True: {words}"
                         for words in names] or [found.described(f"{name}=True", {name: True})]
            return
        if square:
            check_leak(subject, inputs, {name: True}, problems, f"{name}=True")


def _causal_with_mask(subject: Subject, name: str, inputs: Inputs, plain: Array,
                      notes: list[str]) -> bool:
    """Whether a flag works beside the causal mask itself, as PyTorch's layer wants it."""
    visible = causal(inputs[0].shape[-2], inputs[1].shape[-2])
    for mask in (m for m, kind in subject.signature.options.items() if kind == "mask"):
        for given in (visible, ~visible, np.where(visible, 0.0, -np.inf)):
            try:
                mine = subject.mine(inputs, plain.shape, **{name: True, mask: given})
            except CannotTestError:
                continue
            if mine is not None and Restriction(
                    subject, inputs, mine, {"": visible}, {}).right() is not None:
                notes.append(f"{name}: wants the causal mask as {mask}, too")
                return True
    return False


def check_leak(subject: Subject, inputs: Inputs, options: Mapping[str, object], problems: list[str],
               what: str) -> None:
    """Nothing may come from the last key, which all queries but the last may not see."""
    if {"split", "merge", "afterwards", "softmax"} & subject.model.found.keys():
        return
    changed = [x.copy() for x in inputs]
    index = len(subject.signature.roles) - 1
    changed[index][..., -1, :] += 1e4 if index == 2 else 50
    if len(subject.signature.roles) < 3:
        changed = [changed[0], changed[index], changed[index]]
    before, after = subject.call(inputs, **options)[0], subject.call(changed, **options)[0]
    if before.shape == after.shape and before.ndim >= 2 and before.shape[-2] > 1 and not equal(
            after[..., :-1, :], before[..., :-1, :], tolerance=1e-10):
        problems.append(f"{what}: blocked keys still get some weight: fill their scores with -inf,"
                        " or -1e9, instead of a small number")


def test_lengths(subject: Subject, name: str, problems: list[str], notes: list[str]) -> None:
    """Lengths of the keys of each batch item: keys from there on are padding."""
    inputs = subject.random_inputs(subject.sizes)
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    batch, heads = batch_of(subject, inputs), subject.model.heads
    lengths = (np.arange(batch) * 2 + 2) % (key_len - 1) + 1
    plain, _ = subject.expected(inputs)
    failure = ""
    tried: list[tuple[Restriction, object]] = []
    forms: list[Callable[[Array], object]] = [
        np.array, list, lambda x: np.repeat(x, heads), lambda x: int(x[0]),
             lambda x: np.asarray(x)[:, None],
             lambda x: np.repeat(x, query_len).reshape(-1, query_len)]
    for form in forms:
        given = np.full(batch, lengths[0]) if isinstance(form(lengths), int) else lengths
        try:
            mine = of_shape(subject.call(inputs, **{name: form(given)}), plain.shape)
        except CannotTestError as reason:
            failure = failure or str(reason)
            continue
        if mine is None:
            continue
        found = Restriction(subject, inputs, mine, {"": _before(given, inputs, subject)},
                            _wrong_lengths(name, given, inputs, subject))
        if found.right() is not None:
            _check_padding(subject, inputs, {name: form(given)}, problems, name, given)
            return
        tried.append((found, form(given)))
    if not tried:
        problems.append(f"{name}: {failure or 'the output changes its shape'}")
        return
    for found, _ in tried:
        names = found.mistakes()
        if names == [IGNORED]:
            names = [f"{name} is ignored: the output does not change"]
        if names:
            if "blanks queries" in names[0] and subject.model.one_input:
                notes.append(names[0])
            else:
                problems += [words if name in words else f"{name}: {words}" for words in names]
            return
    problems.append(tried[0][0].described(name, {name: tried[0][1]}))


def _check_padding(subject: Subject, inputs: Inputs, options: Mapping[str, object],
                   problems: list[str], name: str, lengths: Array) -> None:
    """Blocked keys must not count at all, however large their values."""
    if len(subject.signature.roles) != 3 or (
            {"split", "merge", "softmax"} & subject.model.found.keys()):
        return
    changed = [x.copy() for x in inputs]
    changed[2][..., int(np.max(lengths)):, :] += 1e4
    if not equal(subject.call(changed, **options)[0], subject.call(inputs, **options)[0], 1e-10):
        problems.append(f"{name}: blocked keys still get some weight: fill their scores with -inf,"
                        " or -1e9, instead of a small number")


def _before(lengths: Array, inputs: Inputs, subject: Subject, shift: int = 0) -> Array:
    """Which keys come before the lengths."""
    visible = np.arange(inputs[1].shape[-2]) < np.asarray(lengths)[:, None, None] + shift
    return visible[0] if inputs[0].ndim == 2 else over_heads(visible, subject.model, inputs[0].ndim)


def _wrong_lengths(name: str, lengths: Array, inputs: Inputs,
                   subject: Subject) -> dict[str, Array]:
    before = functools.partial(_before, inputs=inputs, subject=subject)
    visible = before(lengths)
    queries = np.arange(inputs[0].shape[-2])[:, None] < np.asarray(lengths)[:, None, None]
    queries = queries[0] if inputs[0].ndim == 2 else over_heads(queries, subject.model,
                                                                inputs[0].ndim)
    wrong = {
        f"{name} is off by one: <= lets one padded key in, < is right": before(lengths, shift=1),
        f"{name} is off by one: the last valid key is blocked": before(lengths, shift=-1),
        f"{name} has the wrong sign: the valid keys are blocked, the padding is not": ~visible,
        f"{name} is used for the queries instead of the keys": queries | (visible & False),
        f"{name} blanks queries, too: only keys are padding": queries & visible,
        f"{name}: the lengths of another batch item are used": before(lengths[::-1]),
        f"{name}: every batch item has the first item's length":
            before(np.full(len(lengths), lengths[0])),
        f"{name}: every batch item has the last item's length (or the largest)":
            before(np.full(len(lengths), lengths[-1]))}
    heads = subject.model.heads
    if visible.ndim == 4:
        tiled = np.tile(lengths, heads).reshape(len(lengths), heads, 1, 1)
        wrong[f"{name}: the lengths are tiled over heads, so that batch items mix: repeat each one"
              " (np.repeat), not the whole list (np.tile)"] = np.arange(visible.shape[-1]) < tiled
    return wrong
