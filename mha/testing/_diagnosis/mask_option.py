"""A mask that the callable takes as an array: its form, its meaning, and what is wrong."""

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs, MaskEntry, Shape
from mha.testing._diagnosis.attention_mistakes import as_it_is
from mha.testing._diagnosis.mask_mistakes import ADDITIVE, ONE_BLOCKS
from mha.testing._diagnosis.model import Masked
from mha.testing._diagnosis.restrictions import IGNORED, Restriction, batch_of, over_heads
from mha.testing._diagnosis.signature import CannotTestError
from mha.testing._diagnosis.subject import Subject, equal, of_shape

Convert: TypeAlias = Callable[[Array], Array]   # visibility in another type of mask
HandOver: TypeAlias = Callable[[Array], Array]  # (query_len or 1, key_len) as the mask wanted

_TYPES: tuple[Convert, ...] = (
    np.copy, lambda mask: mask.astype(int), lambda mask: mask.astype(float),
    lambda mask: np.where(mask, 0.0, -np.inf), lambda mask: np.where(mask, 0.0, -1e9))


def _forms(subject: Subject, inputs: Inputs, keys_only: bool) -> Iterator[tuple[Shape, Convert]]:
    """(shape, convert) for every shape and type that a mask may be wanted in."""
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    batch = batch_of(subject, inputs)
    axes = inputs[0].shape[:-2]
    if subject.model.layer and subject.what != "one":
        axes = (batch, subject.model.heads)
    shapes: list[Shape]
    if keys_only:
        shapes = [(batch, key_len), (batch, 1, key_len), (batch, 1, 1, key_len), (key_len,),
                  (1, key_len), (batch, query_len, key_len), (*axes, query_len, key_len)]
    else:
        shapes = [(query_len, key_len), (*axes[:1], query_len, key_len),
                  (*axes[:1], *[1] * len(axes[1:]), query_len, key_len),
                  (*axes, query_len, key_len)]
        if subject.model.layer:
            shapes.append((batch * subject.model.heads, query_len, key_len))
    for convert in _TYPES:
        for shape in dict.fromkeys(shapes):
            yield shape, convert


def _pattern(inputs: Inputs, keys_only: bool) -> Array:
    """(query_len or 1, key_len): every query attends and blocks some key."""
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    if keys_only:
        return (np.arange(key_len) % 3 != 1)[None] if key_len > 3 else np.arange(key_len)[None] != 1
    attend = np.add.outer(np.arange(query_len), 2 * np.arange(key_len)) % 3 != 1
    return attend | np.eye(query_len, key_len, dtype=bool)


def test_mask(subject: Subject, name: str, kind: str, problems: list[str],
              notes: list[str]) -> None:
    """Which meaning a mask has, and what goes wrong with it."""
    tried: list[tuple[Restriction, Array]] = []
    failure = ""
    kinds = (True,) if kind == "key_mask" else (False, True)
    sizes = list(dict.fromkeys((subject.sizes, (7, 7, subject.sizes[2]))))
    for keys_only, size in [(k, s) for k in kinds for s in sizes]:
        inputs = subject.random_inputs(size)
        attend = _pattern(inputs, keys_only)
        plain, _ = subject.expected(inputs)
        for shape, convert in _forms(subject, inputs, keys_only):
            hand_over = functools.partial(_handed, shape, convert)
            given, visible = _first_mask(subject, inputs, attend, shape, convert, keys_only)
            try:
                mine = of_shape(subject.call(inputs, **{name: given.copy()}), plain.shape)
            except CannotTestError as reason:
                failure = failure or str(reason)
                continue
            if mine is None:
                continue
            additive = given.dtype.kind == "f" and given.min() < 0
            rights = {"": visible} if additive else {"": visible, "blocks": ~visible}
            found = Restriction(subject, inputs, mine, rights,
                                _wrong(name, visible, inputs))
            meaning = found.right()
            if meaning is not None and not (additive and not _is_added(
                    subject, inputs, name, hand_over, plain)):
                _meaning_known(subject, inputs, name, attend, hand_over, meaning, problems, notes)
                if kind == "mask" and shape == (inputs[0].shape[-2], inputs[1].shape[-2]):
                    _check_items(subject, inputs, name, convert, meaning, problems)
                return
            if meaning is None and visible.ndim > 2 and not found.fits(None) and (
                    names := [words for words, seen in found.wrongs.items() if found.fits(seen)]):
                problems.append(names[0])
                return
            if meaning is None:
                tried.append((found, given))
        if tried:
            break
    if not tried:
        problems.append(f"the mask does not work: {failure or 'the output changes its shape'}"
                        + _which(subject, name))
        return
    _name_mistake(subject, name, tried, problems)


def _handed(shape: Shape, convert: Convert, visible: Array) -> Array:
    """A mask of this shape and type that leaves `visible`, (query_len or 1, key_len)."""
    return convert(np.broadcast_to(visible, shape) if len(shape) > 1 else visible[0])


def _first_mask(subject: Subject, inputs: Inputs, attend: Array, shape: Shape, convert: Convert,
                keys_only: bool) -> tuple[Array, Array]:
    """What is handed over first, and what it leaves visible: masks of keys differ from one batch
    item to the next, where the shape has room for that."""
    batch = batch_of(subject, inputs)
    if not keys_only or batch < 2 or shape[0] != batch or inputs[0].shape[-2] in shape[1:-1]:
        return _handed(shape, convert, attend), attend
    items = np.stack([np.roll(attend, shift, axis=-1) for shift in range(batch)])
    given = items.reshape(batch, *[1] * (len(shape) - 2), -1)
    return convert(given), over_heads(items, subject.model, inputs[0].ndim)


def _is_added(subject: Subject, inputs: Inputs, name: str, hand_over: HandOver,
              plain: Array) -> bool:
    """Whether any numbers in the mask are added to the scores."""
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    bias = np.random.default_rng(7).normal(size=(1, key_len)) * np.ones((query_len, 1))
    given = hand_over(np.ones((1, key_len), bool)).shape
    added = np.broadcast_to(bias if given[-2:-1] == (query_len,) else bias[:1], given[-2:])
    mine = subject.mine(inputs, plain.shape, **{name: np.broadcast_to(added, given).copy()})
    mistakes = {**subject.model.found, "mask": Masked(MaskEntry(lambda s, b: s + b, as_it_is))}
    return equal(mine, subject.expected(inputs, mistakes, bias)[0])


def _name_mistake(subject: Subject, name: str, tried: list[tuple[Restriction, Array]],
                  problems: list[str]) -> None:
    """The known mistake of the first form that has one; ignoring the mask counts last."""
    named = [names for found, _ in tried[:8] if (names := found.mistakes())]
    named.sort(key=lambda names: names == [IGNORED])
    if named:
        only = not _which(subject, name)
        problems += [IGNORED.replace("the mask", "the mask" if only else name)
                     if words == IGNORED else words + _which(subject, name) for words in named[0]]
        return
    found, given = tried[0]
    told = found.described(name, {name: given})
    if not subject.model.found:
        problems.append("the mask gives neither meaning's result (1 attends, or 1 blocks): " + told)


def _which(subject: Subject, name: str) -> str:
    """Which of several masks is meant."""
    masks = [other for other, kind in subject.signature.options.items() if "mask" in kind]
    return f" ({name})" if len(masks) > 1 else ""


def _meaning_known(subject: Subject, inputs: Inputs, name: str, attend: Array,
                   hand_over: HandOver, meaning: str, problems: list[str],
                   notes: list[str]) -> None:
    given = hand_over(attend)
    flip = meaning == "blocks"
    if flip:
        notes.append(ONE_BLOCKS + _which(subject, name))
    elif given.dtype.kind == "f" and given.min() < 0:
        notes.append(ADDITIVE + _which(subject, name))
    _check_blocking(subject, inputs, attend, problems, notes, lambda visible: {
        name: hand_over(~visible if flip else visible)}, name)


def _wrong(name: str, attend: Array, inputs: Inputs) -> dict[str, Array]:
    """Visible pairs that a mistake leaves where `attend` was meant, or its opposite."""
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    wrong: dict[str, Array] = {}
    if attend.ndim > 2:  # masks of keys, one a batch item
        for visible, extra in ((attend, ""), (~attend, " (1 blocks)")):
            queries = np.swapaxes(np.resize(visible, (*visible.shape[:-1], query_len)), -1, -2) \
                if query_len == key_len else np.swapaxes(visible[..., :query_len], -1, -2)
            wrong |= {
                f"{name}: every batch item has the first item's mask{extra}": visible[:1],
                f"{name}: every batch item has the last item's mask{extra}": visible[-1:],
                f"{name}: the masks of the batch items are in reverse order{extra}": visible[::-1]}
            if queries.shape[-2] == query_len:
                every = np.ones((*queries.shape[:-1], key_len), bool)
                wrong[f"{name} is used for the queries instead of the keys{extra}"] = \
                    queries & every
                wrong[f"{name} blanks queries, too: only keys are padding{extra}"] = \
                    queries & visible
        return wrong
    for visible in (attend, ~attend):
        extra = "" if visible is attend else " (1 blocks)"
        if visible.shape == (query_len, query_len):
            wrong[f"{name} is transposed: rows are queries, columns keys{extra}"] = visible.T
        if visible.shape == (query_len, key_len):
            wrong[f"only the first row of {name} is used, for every query{extra}"] = \
                np.broadcast_to(visible[:1], visible.shape)
        else:
            queries = np.resize(visible[0], query_len)[:, None] & np.ones(key_len, bool)
            wrong[f"{name} is used for the queries instead of the keys{extra}"] = queries
            if query_len == key_len:
                wrong[f"{name} blanks queries, too: only keys are padding{extra}"] = \
                    queries & visible
    return wrong


def _check_blocking(subject: Subject, inputs: Inputs, attend: Array, problems: list[str],
                    notes: list[str], options: Callable[[Array], dict[str, Array]],
                    name: str) -> None:
    """With the meaning known: nothing may come from blocked keys, and empty rows have a value."""
    expected = subject.expected(inputs)[0]
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]

    def call(visible: Array, value: Array | None = None) -> Array | None:
        given = inputs if value is None else [*inputs[:2], value]
        return of_shape(subject.call(given, **options(visible)), expected.shape)

    found = subject.model.found.keys()
    mixes_positions = {"split", "merge", "inputs", "values"} & found
    # A softmax that is wrong gives blocked keys weight whatever their scores are.
    if len(subject.signature.roles) == 3 and not mixes_positions and "softmax" not in found:
        without_last = attend.copy()
        without_last[:, 0], without_last[:, -1] = True, False
        changed = inputs[2].copy()
        changed[..., -1, :] += 1e4
        try:
            before, after = call(without_last), call(without_last, changed)
        except CannotTestError:
            before = after = None
        if before is not None and after is not None and not equal(after, before, tolerance=1e-10) \
                and np.isfinite(before).all():
            problems.append("blocked keys still get some weight: fill their scores with -inf, or"
                            " -1e9, instead of a small number" + _which(subject, name))
    empty = np.array(np.broadcast_to(attend, (attend.shape[0], key_len)))
    empty[0] = False
    try:
        mine = call(empty)
    except CannotTestError as reason:
        notes.append(f"empty rows (a query that may see no key): {reason}")
        return
    if mine is None:
        return
    rows = np.zeros(query_len, bool)
    rows[0] = True
    others = mine[..., ~rows, :] if attend.shape[0] > 1 and mine.ndim > 1 else mine[:0]
    if not mixes_positions and np.isnan(others).any() and (
            again := call(attend)) is not None and np.isfinite(again).all():
        problems.append("one empty row (a query that may see no key) gives NaN in other rows, too")
    elif np.isnan(mine).any():
        notes.append("empty rows give NaN: a query that may see no key divides 0 by 0; ours gives"
                     " zeros" + _which(subject, name))
    elif not subject.model.found and equal(mine, subject.expected(inputs, visible=empty)[0]):
        notes.append('empty rows give the mean of all values (here: empty_rows="uniform")')


def _check_items(subject: Subject, inputs: Inputs, name: str, convert: Convert, meaning: str,
                 problems: list[str]) -> None:
    """Masks that differ from batch item to item, in every shape that runs."""
    batch = batch_of(subject, inputs)
    if batch < 2 or subject.model.found:
        return
    attend = _pattern(inputs, False)
    items = np.stack([np.roll(attend, shift, axis=-1) for shift in range(batch)])
    items[..., 0] = True
    wanted = over_heads(items, subject.model, inputs[0].ndim)
    visible = ~items if meaning == "blocks" else items
    shapes = [(batch, 1, *attend.shape)] if wanted.ndim == 4 else [items.shape]
    if wanted.ndim == 4:
        shapes.append((batch, subject.model.heads if subject.model.layer else inputs[0].shape[1],
                       *attend.shape))
    in_all = np.logical_and.reduce(wanted, keepdims=True)
    in_any = np.logical_or.reduce(wanted, keepdims=True)
    for shape in shapes:
        given = np.broadcast_to(visible[:, None] if len(shape) == 4 else visible, shape)
        try:
            mine = of_shape(subject.call(inputs, **{name: convert(given)}),
                            subject.expected(inputs)[0].shape)
        except CannotTestError:
            continue
        if mine is None:
            continue
        for words, seen in {"": wanted, "every item gets the first item's mask": wanted[:1],
                            "every item gets the last item's mask": wanted[-1:],
                            "the items' masks are in reverse order": wanted[::-1],
                            "the masks of all items are joined (and)": in_all,
                            "the masks of all items are joined (or)": in_any,
                            "it is ignored": np.ones_like(wanted)}.items():
            if equal(mine, subject.expected(inputs, visible=seen)[0]):
                if words:
                    problems.append(f"a mask of shape {shape}, one an item: {words}")
                break
        else:
            problems.append(f"a mask of shape {shape}, one an item, is broadcast wrongly: insert"
                            " the axis of the heads, mask[:, None]")
