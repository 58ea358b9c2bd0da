"""The plain call of a subject, compared with the model: right, explained by mistakes, or not."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs, Mistakes, Sizes
from mha.testing._diagnosis.attention_mistakes import ALL_EQUAL, SCALE
from mha.testing._diagnosis.layer_mistakes import BIAS_STAYS
from mha.testing._diagnosis.model import HardCoded
from mha.testing._diagnosis.search import FLOAT16, Search, values_alike
from mha.testing._diagnosis.signature import CannotTestError
from mha.testing._diagnosis.subject import (
    BATCH,
    SLOW,
    Constant,
    Returned,
    Subject,
    equal,
    of_shape,
    same,
    seen_pairs,
)

_log = logging.getLogger(__name__)
HEAD_DIM, HEADS = 8, 3
# (query_len, key_len, value_dim): all different, then ever more equal, for code that needs it.
SIZES: tuple[Sizes, ...] = (
    (5, 7, 6), (5, 7, HEAD_DIM), (7, 7, HEAD_DIM), (HEAD_DIM, HEAD_DIM, HEAD_DIM), (3, 3, HEAD_DIM))


@dataclass(eq=False)
class Outcome:
    """What the plain call of a subject showed."""

    subject: Subject
    right: bool = False
    explained: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mine: Array | None = None  # what came instead of the output, of any shape
    alike: Array | None = None  # what came for values that are all alike
    seen: Array | None = None  # which key reaches which query; no pairs where that cannot be seen
    nothing_seen: bool = False  # a mask that has to be given seems to block everything
    searched: int = 0  # how many mistakes at a time were looked for

    @property
    def keeps_shape(self) -> bool:
        """Whether something of the output's shape came."""
        wanted, _ = self.subject.expected(self.subject.inputs)
        return self.mine is not None and self.mine.shape == wanted.shape

    @property
    def settled(self) -> bool:
        return self.right or self.explained or bool(self.problems)


def shown(mistakes: Mistakes) -> list[str]:
    """The names that the user is told, in the order of the computation."""
    return [str(name) for name in mistakes.values() if name and name != BIAS_STAYS]


def run_plain(subject: Subject) -> Outcome:
    """Call with ever more equal sizes until it runs; the Outcome so far.

    Raises CannotTestError where it runs with none.
    """
    failure = ""
    for sizes in SIZES:
        ran: list[tuple[Outcome, Constant, Returned]] = []
        for constant in _constants(subject):
            subject.constant = constant
            inputs = subject.random_inputs(sizes)
            try:
                subject.returned = subject.called(inputs)
            except CannotTestError as reason:
                failure = failure or str(reason)
                continue
            subject.sizes, subject.inputs = sizes, inputs
            subject.failure = failure if sizes != SIZES[0] else ""
            outcome = _first_look(subject)
            if not subject.signature.required or outcome.right:
                return outcome
            outcome.nothing_seen = outcome.mine is not None and Search(
                subject.model, inputs, outcome.mine).fits({"softmax": ALL_EQUAL})
            if not outcome.nothing_seen and explain(outcome, 1):
                return outcome
            ran.append((outcome, constant, subject.returned))
        if ran:
            ran.sort(key=lambda entry: entry[0].nothing_seen)
            outcome, subject.constant, subject.returned = ran[0]
            return outcome
    raise CannotTestError(failure)


def _constants(subject: Subject) -> Iterator[Constant]:
    """What the options without a default can get so that they do nothing, one after the other."""
    wanted = {name: subject.signature.options[name] for name in subject.signature.required}
    choices: dict[str, list[object]] = {  # values, and functions of the inputs that give them
        "causal": [False], "weights": [False], "training": [False], "scale": [None, True],
        "lengths": [_full_lengths, None],
        "mask": [None, *(functools.partial(_uniform_mask, value, whole) for whole in (False, True)
                         for value in (True, 0.0, False))],
        "key_mask": [None, lambda x: _keys(x, True), lambda x: _keys(x, False)],
        "bias": [None, functools.partial(_uniform_mask, 0.0, False)]}
    for values in itertools.product(*(choices.get(kind, [None]) for kind in wanted.values())):
        yield {name: value if callable(value) else functools.partial(_always, value)
               for name, value in zip(wanted, values)}


def _always(value: object, _: Inputs) -> object:
    return value


def _full_lengths(inputs: Inputs) -> Array:
    return np.full(inputs[1].shape[0] if inputs[1].ndim > 2 else 1, inputs[1].shape[-2])


def _uniform_mask(value: float, whole: bool, inputs: Inputs) -> Array:
    """(query_len, key_len), or with the inputs' other axes before: the same everywhere."""
    axes = inputs[0].shape[:-2] if whole else ()
    return np.full((*axes, inputs[0].shape[-2], inputs[1].shape[-2]), value)


def _keys(inputs: Inputs, value: bool) -> Array:
    batch = inputs[1].shape[0] if inputs[1].ndim > 2 else BATCH
    return np.full((batch, inputs[1].shape[-2]), value)


def _first_look(subject: Subject) -> Outcome:
    """Right, or wrong in a way that needs no search."""
    outcome = Outcome(subject)
    output, weights = subject.expected(subject.inputs)
    returned = subject.returned.arrays
    mine = of_shape(returned, output.shape)
    outcome.mine = mine if mine is not None else next(iter(returned), None)
    if not returned:
        outcome.problems.append(
            f"returns nothing, wanted {output.shape}: is the return statement missing?")
        return outcome
    again = subject.call(subject.inputs)
    if len(again) != len(returned) or not all(
            np.array_equal(a, b, equal_nan=True) or equal(a, b) for a, b in zip(again, returned)):
        outcome.problems.append("two calls with the same input differ: switch dropout off first,"
                                " and keep nothing from one call to the next")
        return outcome
    if mine is not None and mine.size and np.ptp(mine) == 0:
        outcome.problems.append(f"gives {mine.flat[0] + 0.0:.3g} everywhere")
    elif mine is not None and mine.size and not np.isfinite(mine).any():
        outcome.problems.append(
            f"gives {'NaN' if np.isnan(mine).any() else 'infinity'} on ordinary input")
    elif equal(mine, output):
        outcome.right = True
        outcome.notes += _order(returned, output, weights)
        outcome.problems += check_weights(returned, output, weights)
    return outcome


def explain(outcome: Outcome, most: int) -> bool:
    """Search for at most `most` mistakes that explain the outcome; whether they were found."""
    if outcome.settled or outcome.mine is None:
        return True
    while outcome.searched < most:
        outcome.searched += 1
        if _explain(outcome, outcome.mine, outcome.searched):
            return True
    return False


def _explain(outcome: Outcome, mine: Array, count: int) -> bool:
    subject = outcome.subject
    if count > 1:
        alike_is_right(outcome)
    found = Search(subject.model, subject.inputs, mine, alike=outcome.alike,
                   seen=_seen(outcome, mine)).explanations(count)
    _log.debug("%d mistake(s) at a time explain %s: %s", count, mine.shape, found)
    if not found:
        return count == 1 and _imprecise(outcome, mine)
    mistakes, number = _confirmed(subject, found)
    subject.model.found = mistakes
    outcome.problems = shown(mistakes) if number is None else [
        number if step == "scale" else str(name) for step, name in mistakes.items()
        if name != BIAS_STAYS]
    outcome.explained = True
    return True


def _seen(outcome: Outcome, mine: Array) -> Array | None:
    """Which key reaches which query, (query_len, key_len), looked for once; None if it is unknown,
    as it is where the callable is slow."""
    subject = outcome.subject
    if outcome.seen is None and np.isfinite(mine).all() and subject.seconds < SLOW:
        outcome.seen = np.zeros((0, 0), bool)
        with contextlib.suppress(CannotTestError, IndexError, ValueError):
            seen = seen_pairs(subject, subject.inputs, {})
            outcome.seen = outcome.seen if seen is None else seen
    return outcome.seen if outcome.seen is not None and outcome.seen.size else None


def alike_is_right(outcome: Outcome) -> bool:
    """Whether values that are all alike come out as they should: then the way from W_v to the
    output is right, and the matrices are read the right way round."""
    subject = outcome.subject
    if outcome.mine is None or outcome.mine.shape != subject.expected(subject.inputs)[0].shape:
        return False
    inputs = values_alike(subject.inputs)
    if outcome.alike is None:
        with contextlib.suppress(CannotTestError, IndexError):
            outcome.alike = subject.call(inputs)[0]
    return equal(outcome.alike, subject.expected(inputs, {})[0])


def keeps_copies(outcome: Outcome) -> bool:
    """Whether the output does not follow a change of some matrix that the layer holds."""
    subject, mine = outcome.subject, outcome.mine
    if mine is None:
        return False
    for array in subject.arrays:
        kept = array.copy()
        if array.ndim > 1 and array.flags.writeable:
            array *= 1 + np.arange(array.shape[-1]) % 3
            moved = not equal(of_shape(subject.call(subject.inputs), mine.shape), mine)
            array[...] = kept
            if not moved:
                return True
    return False


def _confirmed(subject: Subject, found: list[Mistakes]) -> tuple[Mistakes, str | None]:
    """Of several explanations the first that holds for another head_dim, too; and what to say of a
    scale that is the same number for both."""
    twin = subject.twin() if subject.twin is not None else None
    if twin is None:
        return found[0], None
    for mistakes in found:
        if not isinstance(mistakes.get("scale"), HardCoded) and _holds(twin, mistakes):
            return mistakes, None
    for mistakes in found:
        numbers = _numbers(subject, mistakes)
        if "scale" in mistakes and _holds(twin, {**mistakes, "scale": numbers}):
            return mistakes, _hard_coded(numbers.shown)
    return found[0], None


def _hard_coded(shown_number: str) -> str:
    return (f"hard-coded scale: the scores are divided by {shown_number} whatever d_k is; divide by"
            " sqrt(d_k)")


def _numbers(subject: Subject, mistakes: Mistakes) -> HardCoded:
    """The scale of an explanation as the number that it is here."""
    scale = mistakes.get("scale", "")
    if isinstance(scale, HardCoded):
        return scale
    query, key, value = subject.model.heads_of(subject.inputs, mistakes)
    before, _ = SCALE[scale](query, key, value, subject.model.heads)
    return HardCoded(float(np.max(before)), query.shape[-1])


def _holds(twin: Subject, mistakes: Mistakes) -> bool:
    try:
        inputs = twin.inputs
        output, _ = twin.expected(inputs, mistakes)
        mine = of_shape(twin.returned.arrays, output.shape)
        rows = twin.model.empty_rows(mistakes, inputs[0].shape[-2], inputs[1].shape[-2])
    except Exception:
        return False
    return mine is not None and same(mine, output, without_rows=rows)


def check_twin(outcome: Outcome) -> None:
    """A right outcome must be right for another head_dim, too."""
    subject = outcome.subject
    twin = subject.twin() if subject.twin is not None else None
    if twin is None or _holds(twin, subject.model.found):
        return
    output, _ = twin.expected(twin.inputs)
    mine = of_shape(twin.returned.arrays, output.shape)
    head_dim = Search(twin.model, twin.inputs, output).head_dim
    where = f"right for d_k = {HEAD_DIM}, wrong for d_k = {head_dim}"
    if mine is None:
        outcome.problems.append(f"{where}: returns {twin.returned.shapes}, wanted {output.shape}")
        return
    number = _numbers(subject, {})
    if _holds(twin, {"scale": number}):
        outcome.problems.append(_hard_coded(number.shown))
        return
    found = Search(twin.model, twin.inputs, mine).explanations(1)
    outcome.problems.append(f"{where}: " + (
        ", ".join(shown(found[0])) if found else "is a size written into the code?"))


def _imprecise(outcome: Outcome, mine: Array) -> bool:
    """Say so where the numbers agree but for their last digits."""
    subject = outcome.subject
    half = any(dtype == np.float16 for dtype in subject.returned.dtypes) or _half_inside(
        subject, subject.inputs)
    scores_half = not half and len(subject.signature.roles) > 1 and _half_inside(
        subject, subject.inputs[:1])
    search = Search(subject.model, subject.inputs, mine, FLOAT16, seen=_seen(outcome, mine))
    found = [base for base in ({}, *search.bases) if search.fits(base)]
    if half and not found:
        found = search.explanations(1)
    if not found:
        return False
    subject.model.found = found[0]
    outcome.problems += shown(found[0])
    expected, _ = subject.expected(subject.inputs)
    off = f"off by up to {np.nanmax(np.abs(mine - expected)):.1g}"
    if half:
        outcome.problems.append("computed in float16 (half precision): use float32 or float64")
    elif scores_half:
        outcome.problems.append("computed in float16 (half precision) on the way, or rounded,"
                                f" {off}: use float32 or float64")
    else:
        outcome.problems.append(
            f"right to about three digits only, {off}: computed in float16 somewhere, rounded, or"
            " an epsilon is added that is too large (in the softmax?)")
    outcome.explained = True
    return True


def _half_inside(subject: Subject, inputs: Inputs) -> bool:
    """Whether some inputs that differ by less than half precision can tell change nothing."""
    moved = [x * (1 + 2e-6) if any(x is y for y in inputs) else x for x in subject.inputs]
    first, second = subject.returned.arrays[0], subject.call(moved)[0]
    return first.shape == second.shape and float(np.mean(first == second)) > 0.5


def _order(returned: list[Array], output: Array, weights: Array) -> Iterator[str]:
    first_two = [array.shape for array in returned[:2]]
    if first_two == [weights.shape, output.shape] and weights.shape != output.shape:
        yield "returns (weights, output); the usual order is (output, weights)"


def returned_weights(returned: list[Array], output: Array,
                     weights: Array) -> tuple[Array, Array] | None:
    """The weights among what was returned, laid out as ours, and ours; None without any."""
    others = [array for array in returned if array.shape != output.shape]
    if output.shape == weights.shape and len(returned) > 1:
        others = returned[1:2] if equal(returned[0], output) else returned[:1]
    for array in others:
        if array.shape == weights.shape:
            return array, weights
        if weights.shape[0] == 1 and array.shape == weights.shape[1:]:
            return array, weights[0]
        if weights.ndim == 4 and array.shape == weights.mean(1).shape:
            return array, weights.mean(1)
        if weights.ndim == 4 and array.shape == (weights.shape[0] * weights.shape[1],
                                                 *weights.shape[2:]):
            return array, weights.reshape(array.shape)
    return None


def check_weights(returned: list[Array], output: Array, weights: Array) -> Iterator[str]:
    """What is wrong with the weights that came beside a right output."""
    found = returned_weights(returned, output, weights)
    if found is not None and not equal(*found):
        mine, wanted = found
        with np.errstate(all="ignore"):
            exponentials = np.exp(mine - mine.max(axis=-1, keepdims=True))
            softened = exponentials / exponentials.sum(axis=-1, keepdims=True)
        yield ("the output is right, but the returned weights are not the weights used"
               + (": they are the scores before the softmax" if equal(softened, wanted) else ""))

