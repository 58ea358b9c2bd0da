"""`diagnose`: what is wrong with an attention that you wrote yourself, in plain words.

It calls your function or layer on random inputs and compares with `mha.reference`. Where they
differ it looks for the mistake that explains the difference: it computes attention with each of
the well-known mistakes put in (`mha.mistakes`), and the one that gives your numbers is yours.
"""

import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha import mistakes as known
from mha.introspection import (
    HEAD_DIM,
    CannotTestError,
    construct,
    opened,
    parameters_named,
    signature,
)
from mha.mistakes import FUNCTION_TABLES, HEADS, LAYER_TABLES, MASK, MERGE, OUTPUT, PROJECT, SPLIT

__all__ = ["Diagnosis", "diagnose"]

BATCH = 2
# (query_len, key_len, value_dim): all different, then ever more equal, for code that needs it.
SIZES = ((5, 7, 6), (5, 7, HEAD_DIM), (7, 7, HEAD_DIM), (HEAD_DIM, HEAD_DIM, HEAD_DIM))
TOLERANCE = 1e-4  # of the largest number: float32 passes, no mistake does


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found: true when nothing is wrong, printed in plain words.

    problems: what is wrong, in the order of the computation. notes: what is merely good to know.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = self.problems or ("correct",)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def diagnose(my_attention: Callable[..., Any]) -> Diagnosis:
    """Compare your attention with the reference, and say in plain words what is wrong.

    my_attention is one of
    - a function (query, key, value[, mask]) of NumPy arrays, for one head (len, dim), a batch
      (batch, len, dim) or heads (batch, heads, len, dim);
    - a function that has W_q, W_k, W_v, W_o and num_heads among its arguments too;
    - a layer: a class to construct with (d_model, num_heads), or an instance (a copy is used),
      called as layer(query, key, value[, mask]), by `forward`, or with one x, and with its
      weights in the attributes W_q, W_k, W_v and W_o, either way round.
    It returns the output, alone or with the weights. In the mask, 1 may mean attend or blocked.

    Raises TypeError when my_attention cannot be called; what it raises itself is reported.

    >>> mha.testing.diagnose(lambda q, k, v: mha.reference.softmax(q @ k.T)[0] @ v)
    forgot to divide by sqrt(d_k)
    note: takes 2-D input only
    note: takes no mask
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            if inspect.isclass(my_attention):
                return _diagnose_layer(construct(my_attention))
            if inspect.isroutine(my_attention) or isinstance(my_attention, functools.partial):
                return _diagnose_function(my_attention)
            if callable(my_attention) or hasattr(my_attention, "forward"):
                return _diagnose_layer(copy.deepcopy(my_attention))
        except CannotTestError as reason:
            return Diagnosis((str(reason),))
    raise TypeError(f"my_attention: got {type(my_attention).__name__}, wanted a function or a"
                    " layer")


# 1. What is tested, and the same computation with mistakes put in.


class _Subject:
    """The tested callable, how it is called, and what it should have returned.

    heads_of(inputs, mistakes) gives the query, key and value that attention itself sees;
    finish(attended, mistakes) makes the output of what comes out of it.
    """

    def __init__(self, function, shapes, tables, heads_of, finish):
        self.function, self.shapes, self.tables = function, shapes, tables
        self.heads_of, self.finish = heads_of, finish
        self.mistakes = {}  # the mistake found in each step
        self.mask_name, self.others, self.inputs_taken = signature(function)

    def inputs(self, sizes):
        """Random query, key, value; one x for all where the callable takes one."""
        generator = np.random.default_rng(3)
        arrays = [generator.normal(size=shape) for shape in self.shapes(*sizes)]
        return arrays if self.inputs_taken == 3 else [arrays[0]] * 3

    def call(self, inputs, mask=None):
        """Whatever it returned, as a list of arrays."""
        given = {} if mask is None else {self.mask_name: mask}
        arrays = [array.copy() for array in inputs[:self.inputs_taken]]
        try:
            result = self.function(*arrays, **self.others, **given)
        except Exception as error:
            shapes = ", ".join(str(array.shape) for array in arrays)
            with_mask = f", mask {mask.shape} of {mask.dtype}" if mask is not None else ""
            raise CannotTestError(f"raised {type(error).__name__}: {error} (called with shapes"
                                  f" {shapes}{with_mask})") from None
        if any(not np.array_equal(a, b) for a, b in zip(arrays, inputs)):
            raise CannotTestError("changes its inputs: work on a copy")
        return _arrays(result)

    def expected(self, inputs, mistakes=None, visible=None):
        """Output and weights, with the given mistakes (those found so far) put in."""
        mistakes = self.mistakes if mistakes is None else mistakes
        query, key, value = self.heads_of(inputs, mistakes)
        attended, weights = known.attention(query, key, value, mistakes, visible)
        return self.finish(attended, mistakes), weights


# 2. Functions and layers.


def _diagnose_function(function):
    if {"W_q", "W_k", "W_v", "W_o"} <= parameters_named(function).keys():
        return _diagnose_layer(function)
    outcomes, failures = {}, {}
    for axes in ((BATCH, HEADS), (BATCH,), ()):
        def shapes(query_len, key_len, value_dim, axes=axes):
            return ((*axes, query_len, HEAD_DIM), (*axes, key_len, HEAD_DIM),
                    (*axes, key_len, value_dim))

        subject = _Subject(function, shapes, FUNCTION_TABLES, lambda inputs, _: inputs,
                           lambda attended, _: attended)
        try:
            outcomes[len(axes) + 2] = (subject, *_compare(subject))
        except CannotTestError as reason:
            failures[len(axes) + 2] = str(reason)
    if not outcomes:
        raise CannotTestError(failures[2])

    # Everything else is tested with the most axes that it gets right; or that it runs with.
    right = [rank for rank, (_, problems, *_) in outcomes.items() if not problems]
    rank = max(right or outcomes)
    subject, problems, notes, inputs = outcomes.pop(rank)
    problems += [f"{other}-D input: {problem}" for other, outcome in outcomes.items()
                 for problem in outcome[1] if right]
    if failures:
        taken = " and ".join(f"{n}-D" for n in (2, 3, 4) if n not in failures)
        notes.append(f"takes {taken} input only")
    return _diagnose_further(subject, inputs, problems, notes)


def _diagnose_layer(layer):
    function, weights, heads = opened(layer)
    embed_dim = weights["W_q"].shape[0]

    def shapes(query_len, key_len, _):
        return ((BATCH, query_len, embed_dim), (BATCH, key_len, embed_dim),
                (BATCH, key_len, embed_dim))

    def project(x, name):
        matrix = weights[name].T if subject.transposed else weights[name]
        return x @ matrix + weights.get("b" + name[1:], 0)

    def heads_of(inputs, mistakes):
        names = PROJECT[mistakes.get("project", "")]
        split = SPLIT[mistakes.get("split", "")]
        return [split(x if name is None else project(x, name), heads)
                for x, name in zip(inputs, names)]

    def finish(attended, mistakes):
        merged = MERGE[mistakes.get("merge", "")](attended)
        return project(merged, "W_o") if OUTPUT[mistakes.get("output", "")] else merged

    subject = _Subject(function, shapes, LAYER_TABLES, heads_of, finish)
    attempts = []
    for subject.transposed in (False, True):  # weights stored (in, out), or (out, in)
        subject.mistakes = {}
        problems, notes, inputs = _compare(subject)
        explained = not problems or bool(subject.mistakes)
        attempts.append((not explained, len(problems), subject.transposed, subject.mistakes,
                         problems, notes, inputs))
    (_, _, subject.transposed, subject.mistakes, problems, notes,
     inputs) = min(attempts, key=lambda attempt: attempt[:3])
    if subject.transposed:
        notes.append("your weights are stored (out, in) and used as x @ W.T")
    if subject.inputs_taken == 1:
        notes.append("takes one input: self-attention only")
    return _diagnose_further(subject, inputs, problems, notes)


# 3. The comparisons.


def _compare(subject):
    """Problems and notes of the plain call, and the inputs that it ran with."""
    problems, notes, failure = [], [], None
    for sizes in SIZES:
        inputs = subject.inputs(sizes)
        try:
            returned = subject.call(inputs)
            break
        except CannotTestError as reason:
            failure = failure or str(reason)
    else:
        raise CannotTestError(failure)

    output, weights = subject.expected(inputs)
    mine = _of_shape(returned, output.shape)
    if mine is None:
        shapes = " and ".join(str(array.shape) for array in returned) or "nothing"
        problems.append(f"returns {shapes}, wanted {output.shape}"
                        + ("" if returned else ": is the return statement missing?"))
    elif not _equal(_of_shape(subject.call(inputs), output.shape), mine):
        problems.append("two calls with the same input differ: switch dropout off first")
    elif not _equal(mine, output):
        subject.mistakes = _explanation(subject, inputs, mine)
        problems += subject.mistakes.values()
        if not problems:
            largest = np.max(np.abs(mine - output))
            problems.append("gives NaN on ordinary input" if np.isnan(largest) else
                            f"differs from the reference by up to {largest:.2g}, and no known"
                            " mistake explains it" + _where_weights_are(subject))
    else:
        notes += _returned_order(returned, output, weights)
        problems += _check_weights(returned, output, weights)
    if failure and not problems and sizes is SIZES[1]:
        notes.append("values must be as wide as the keys")
    elif failure and not problems:
        problems.append(f"works only when queries and keys are equally many; otherwise {failure}")
    elif failure:
        notes.append(f"with other sizes it {failure}")
    return problems, notes, inputs


def _explanation(subject, inputs, mine):
    """The fewest mistakes, at most three, that give these numbers: {step: mistake}."""
    for count in (1, 2, 3):
        for steps in itertools.combinations(subject.tables, count):
            for names in itertools.product(*([n for n in subject.tables[s] if n] for s in steps)):
                mistakes = dict(zip(steps, names))
                try:
                    output, _ = subject.expected(inputs, mistakes)
                except (ValueError, np.exceptions.AxisError):  # impossible with these shapes
                    continue
                if output.shape == mine.shape and _equal(mine, output):
                    return mistakes
    return {}


def _returned_order(returned, output, weights):
    first_two = [array.shape for array in returned[:2]]
    if first_two == [weights.shape, output.shape]:
        yield "returns (weights, output); the usual order is (output, weights)"


def _check_weights(returned, output, weights):
    mine = _of_shape([a for a in returned if a.shape != output.shape], weights.shape)
    if mine is not None and not _equal(mine, weights):
        yield "the output is right, but the returned weights are not the weights used"


def _diagnose_further(subject, inputs, problems, notes):
    """Masks, empty rows and large scores, where the plain call was right or explained."""
    if problems and not subject.mistakes:
        return Diagnosis(tuple(problems), tuple(notes))
    if subject.mask_name is None:
        notes.append("takes no mask")
    else:
        _diagnose_mask(subject, inputs, problems, notes)
    large = [inputs[0] * 1e4, *inputs[1:]] if subject.inputs_taken == 3 else [inputs[0] * 100] * 3
    output, _ = subject.expected(large)
    mine = _of_shape(subject.call(large), output.shape)
    if np.isfinite(output).all() and not np.isfinite(mine).all():
        problems.append("overflows at large scores: subtract each row's maximum before exp")
    elif not subject.mistakes and not problems and not _equal(mine, output, 0.02):
        problems.append("is wrong at large scores: are they clipped?")
    return Diagnosis(tuple(problems), tuple(notes))


def _diagnose_mask(subject, inputs, problems, notes):
    """Which meaning the mask has, and what goes wrong with it."""
    *_, query_len, key_len = subject.expected(inputs)[1].shape
    attend = np.add.outer(np.arange(query_len), np.arange(key_len)) % 3 != 1
    attend |= np.eye(query_len, key_len, dtype=bool)  # every query attends and blocks some key
    meaning, hand_over, wrong, failure = _mask_meaning(subject, inputs, attend)
    if meaning is not None:
        notes += filter(None, [meaning])
        _check_blocking(subject, inputs, hand_over, attend, problems, notes)
    elif wrong is None:
        problems.append(f"the mask does not work: {failure or 'the output changes its shape'}")
    elif (name := _mask_mistake(subject, inputs, wrong, attend)) is not None:
        problems.append(name)
    elif not subject.mistakes:
        problems.append("the mask gives neither meaning's result (1 attends, or 1 blocks): blocked"
                        " scores must become -inf, or -1e9, before the softmax")


def _mask_meaning(subject, inputs, attend):
    """A note on the meaning ("": ours; None: not found), how to hand over a mask of ours, and the
    first result and the first failure where no meaning fits."""
    plain, weights = subject.expected(inputs)
    as_attend, _ = subject.expected(inputs, visible=attend)
    as_blocked, _ = subject.expected(inputs, visible=~attend)
    wrong, failure = None, None
    for form in _mask_forms(weights.shape):
        try:
            mine = _of_shape(subject.call(inputs, form(attend)), plain.shape)
        except CannotTestError as reason:
            failure = failure or str(reason)
            continue
        if mine is not None and _equal(mine, as_attend):
            additive = form(attend).dtype.kind == "f" and form(attend).min() < 0
            return ADDITIVE if additive else "", form, None, None
        if mine is not None and _equal(mine, as_blocked):
            return ONE_BLOCKS, lambda visible, form=form: form(~visible), None, None
        wrong = mine if wrong is None else wrong
    return None, None, wrong, failure


def _where_weights_are(subject):
    return ("; a layer's weights are found by the names W_q, W_k, W_v and W_o"
            if subject.tables is LAYER_TABLES else "")


ONE_BLOCKS = ("your mask's 1 means blocked; here True means attend: mha.masks.from_blocked(mask)"
              " turns yours into ours")
ADDITIVE = "your mask is added to the scores: 0 attends, -inf blocks; here that is bias="


def _mask_forms(scores_shape):
    """Every shape and type that a mask may be wanted in, as functions of a (query, key) mask."""
    *axes, query_len, key_len = scores_shape
    shapes = [(query_len, key_len), (*axes[:1], query_len, key_len),
              (*axes[:1], *[1] * len(axes[1:]), query_len, key_len), scores_shape]
    types = (np.copy, lambda mask: mask.astype(int), lambda mask: mask.astype(float),
             lambda mask: np.where(mask, 0.0, -np.inf))
    for convert in types:
        for shape in dict.fromkeys(shapes):
            yield lambda mask, shape=shape, convert=convert: convert(np.broadcast_to(mask, shape))


def _check_blocking(subject, inputs, hand_over, attend, problems, notes):
    """With the meaning known: nothing may come from blocked keys, and empty rows have a value."""
    expected = subject.expected(inputs)[0]

    def call(visible, value=inputs[2]):
        return _of_shape(subject.call([*inputs[:2], value], hand_over(visible)), expected.shape)

    mixes_positions = {"split", "merge"} & subject.mistakes.keys()
    if subject.inputs_taken == 3 and not mixes_positions:
        without_last = attend.copy()
        without_last[:, 0], without_last[:, -1] = True, False
        changed = inputs[2].copy()
        changed[..., -1, :] += 1e4
        if not _equal(call(without_last, changed), call(without_last), tolerance=1e-10):
            problems.append("blocked keys still get some weight: fill their scores with -inf, or"
                            " -1e9, instead of a small number")
    empty = attend.copy()
    empty[0] = False
    try:
        mine = call(empty)
    except CannotTestError as reason:
        problems.append(f"empty rows (a query that may see no key): {reason}")
        return
    if np.isnan(mine).any():
        problems.append("empty rows give NaN: a query that may see no key divides 0 by 0")
    elif not subject.mistakes and _equal(mine, subject.expected(inputs, visible=empty)[0]):
        notes.append('empty rows give the mean of all values (here: empty_rows="uniform")')


def _mask_mistake(subject, inputs, wrong, attend):
    for name in filter(None, MASK):
        for visible in (attend, ~attend):
            expected = subject.expected(inputs, {**subject.mistakes, "mask": name}, visible)[0]
            if _equal(wrong, expected):
                return name
    return None


def _arrays(result):
    """What was returned, as float64 arrays."""
    if isinstance(result, dict):
        result = list(result.values())
    results = result if isinstance(result, (tuple, list)) else [result]
    try:
        return [np.asarray(array, float) for array in results if array is not None]
    except (TypeError, ValueError):
        raise CannotTestError(f"returns {type(result).__name__}, wanted NumPy arrays") from None


def _of_shape(arrays, shape):
    return next((array for array in arrays if array.shape == shape), None)


def _equal(mine, expected, tolerance=TOLERANCE):
    with np.errstate(all="ignore"):
        return bool(np.max(np.abs(mine - expected)) <= tolerance * np.max(np.abs(expected)))
