"""What can be said where no known mistake fits: which properties of attention hold."""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs
from mha.testing._diagnosis.compare import Outcome, returned_weights
from mha.testing._diagnosis.signature import CannotTestError
from mha.testing._diagnosis.subject import Subject, equal, seen_pairs

# Whether something holds, or words for how it fails; None where that cannot be seen.
Answer: TypeAlias = bool | str | None


# Of a function that takes x alone.
WEIGHTS_UNSEEN = ("if it has weights of its own, they cannot be seen: give the object that holds"
                  " them as W_q, W_k, W_v and W_o, or a function (x, W_q, W_k, W_v, W_o,"
                  " num_heads)")


def differences(outcome: Outcome) -> list[str]:
    """Words for an outcome that nothing explains: how far off it is, and where."""
    subject, mine = outcome.subject, outcome.mine
    output, weights = subject.expected(subject.inputs)
    if mine is None or mine.shape != output.shape:
        if _is_scores(subject):
            return ["the output is the scores: softmax and the values are missing"]
        shapes = " and ".join(str(shape) for shape in subject.returned.shapes)
        wanted = np.shape(subject.layout.to_user(output)) if output.ndim > 2 else output.shape
        return [f"returns {shapes}, wanted {wanted}"]
    largest = np.max(np.abs(mine - output))
    if np.isnan(mine).any():
        return ["gives NaN on ordinary input"
                + ("" if np.isnan(mine).all() else ", in some of the rows")]
    if np.isinf(largest):
        return ["gives infinity on ordinary input"]
    if len(subject.signature.roles) == 1 and not subject.model.matrices:
        return [f"differs from attention without weights; {WEIGHTS_UNSEEN}"]
    words = [f"differs from the reference by up to {largest:.2g}, and no known mistake explains it"
             + ("; a layer's weights are found by names like W_q, W_k, W_v and W_o"
                if subject.model.matrices else "")]
    if (factor := _factor(outcome, mine)) is not None:
        return [f"the output is {factor:.4g} times what it should be"]
    held: list[str] = []
    for holds, good, bad in _checks(outcome, weights):
        try:
            answer = holds()
        except (CannotTestError, ValueError, IndexError, TypeError, ZeroDivisionError):
            continue
        if answer is True:
            held += filter(None, [good])
        elif answer is not None:
            words.append(bad if answer is False else f"{bad}: {answer}")
    if held:
        outcome.notes.append("what is as it should be: " + ", ".join(held))
    return words


def _checks(outcome: Outcome,
            weights: Array) -> Iterator[tuple[Callable[[], Answer], str, str]]:
    """(check, words where it holds, words where it does not) of what one can see from outside."""
    subject, inputs = outcome.subject, outcome.subject.inputs
    three = len(subject.signature.roles) == 3
    yield (lambda: _weights_agree(outcome, weights), "the returned weights",
           "the returned weights are wrong, so the mistake comes before the values")
    if inputs[0].ndim > 2 and inputs[0].shape[0] > 1:
        yield (lambda: _only_moves(subject, 0, 0), "batch items do not mix",
               "batch items mix: changing the first item changes the others")
    if inputs[0].ndim > 3:
        yield (lambda: _only_moves(subject, 0, 1), "heads do not mix",
               "heads mix: changing the first head changes the others")
    if three:
        yield (lambda: _only_moves(subject, 0, -2, (0,)), "queries do not mix",
               "queries mix: changing the first query changes the outputs of others (is the"
               " softmax over the keys?)")
        yield (lambda: _permuted(subject), "the order of the keys does not matter",
               "the order of the keys matters, though keys and values were permuted alike (is a"
               " mask or a position used?)")
        yield (lambda: _linear(subject), "the output is a weighted sum of the values",
               "the output is not a weighted sum of the values: doubling the values does not"
               " double it (or a bias is added)")
        if subject.model.layer:
            yield (lambda: _row_sums(subject), "values that are all alike come out as they should",
                   "values that are all alike do not come out as they should: the weights of a row"
                   " do not sum to 1, or W_v, the merging or W_o is used wrongly")
        else:
            yield (lambda: _row_sums(subject), "the weights of a row sum to 1",
                   "the weights of a row should sum to 1, here they sum to")
            yield lambda: _dropped(subject), "", "some weights are dropped"
        yield (lambda: _uniform(subject), "a query of zeros averages the values",
               "a query of zeros should get equal weights for all keys, and does not")
        yield (lambda: _sees_all(subject), "every query sees every key",
               "not every query sees every key")
    else:
        yield (lambda: _permuted_self(subject), "permuting the positions permutes the output",
               "the order of the positions matters (is a mask or a position used?)")
        yield (lambda: _sees_all(subject), "every query sees every key",
               "not every query sees every key")
    yield (lambda: _sharpness(subject), "the size of the scores",
           "the weights are flatter or sharper than they should be; judged by them the scores are"
           " multiplied by")


def _is_scores(subject: Subject) -> bool:
    """Whether a function of query, key and value returns their scores, without a scale."""
    query, key, _ = subject.inputs
    scores = query @ np.swapaxes(key, -1, -2)
    return not subject.model.layer and len(subject.signature.roles) == 3 and any(
        equal(array, scores) for array in subject.returned.arrays)


def _factor(outcome: Outcome, mine: Array) -> float | None:
    """The number that the whole output is multiplied by, if it is."""
    expected, _ = outcome.subject.expected(outcome.subject.inputs)
    factor = float((mine * expected).sum() / (expected * expected).sum())
    return factor if equal(mine, factor * expected) else None


def _weights_agree(outcome: Outcome, weights: Array) -> Answer:
    output, _ = outcome.subject.expected(outcome.subject.inputs)
    found = returned_weights(outcome.subject.returned.arrays, output, weights)
    return None if found is None else equal(*found)


def items_mix(subject: Subject) -> bool:
    """Whether the batch items reach each other, which other layouts may explain."""
    try:
        return subject.inputs[0].shape[0] < 2 or not _only_moves(subject, 0, 0)
    except (CannotTestError, ValueError, IndexError):
        return True


def _moved(subject: Subject, inputs: Inputs) -> Array:
    return subject.call(inputs)[0]


def _only_moves(subject: Subject, index: int, axis: int,
                which: tuple[int, ...] = (0, 1, 2)) -> bool:
    """Whether changing item `index` of an axis leaves the other items of the output alone."""
    taken = {1: (0,), 2: (0, 1), 3: which}[len(subject.signature.roles)]
    before = _moved(subject, subject.inputs)
    changed = [x.copy() for x in subject.inputs]
    for place in taken:
        np.moveaxis(changed[place], axis, 0)[index] += 1 + np.arange(changed[place].shape[-1]) % 3
    if len(subject.signature.roles) == 1:
        changed = [changed[0]] * 3
    elif len(subject.signature.roles) == 2:
        changed[2] = changed[1]
    after = _moved(subject, changed)
    others = np.arange(before.shape[axis]) != index
    return equal(np.moveaxis(after, axis, 0)[others], np.moveaxis(before, axis, 0)[others], 1e-6)


def _permuted(subject: Subject) -> bool:
    query, key, value = subject.inputs
    order = np.random.default_rng(0).permutation(key.shape[-2])
    return equal(_moved(subject, [query, key[..., order, :], value[..., order, :]]),
                 _moved(subject, subject.inputs), 1e-5)


def _permuted_self(subject: Subject) -> bool:
    order = np.random.default_rng(0).permutation(subject.inputs[0].shape[-2])
    if len(subject.signature.roles) == 2:
        return equal(_moved(subject, [subject.inputs[0], *[subject.inputs[1][
            ..., np.random.default_rng(0).permutation(subject.inputs[1].shape[-2]), :]] * 2]),
            _moved(subject, subject.inputs), 1e-5)
    moved = _moved(subject, [subject.inputs[0][..., order, :]] * 3)
    return equal(moved, _moved(subject, subject.inputs)[..., order, :], 1e-5)


def _linear(subject: Subject) -> Answer:
    query, key, value = subject.inputs
    zero = _moved(subject, [query, key, value * 0])
    once, twice = (_moved(subject, [query, key, value * k]) for k in (1, 2))
    if equal(once, zero):
        return "the values do not reach it"
    return equal(twice - zero, 2 * (once - zero), 1e-5)


def _row_sums(subject: Subject) -> Answer:
    query, key, value = subject.inputs
    zero = _moved(subject, [query, key, value * 0])
    same = np.ones_like(value) + np.arange(value.shape[-1]) * 0.1
    mine = _moved(subject, [query, key, same]) - zero
    if subject.model.layer:
        with_zero, _ = subject.expected([query, key, value * 0])
        expected = subject.expected([query, key, same])[0] - with_zero
    else:
        expected = same[..., :1, :]
    if equal(mine, np.broadcast_to(expected, mine.shape), 1e-4):
        return True
    if subject.model.layer:
        return False
    with np.errstate(all="ignore"):
        sums = np.nanmedian(mine / expected, axis=-1)
    return f"{np.min(sums):.3g} ... {np.max(sums):.3g}"


def _uniform(subject: Subject) -> Answer:
    query, key, value = subject.inputs
    if subject.model.layer:
        return None
    mine = _moved(subject, [query * 0, key, value])
    mean = value.mean(axis=-2, keepdims=True)
    return equal(mine, np.broadcast_to(mean, mine.shape), 1e-4)


def _sees_all(subject: Subject) -> Answer:
    seen = seen_pairs(subject, subject.inputs, {})
    if seen is None or seen.all():
        return None if seen is None else True
    query, key = np.argwhere(~seen)[0]
    return f"query {query} does not depend on key {key} (counted from 0)"


def _effective_weights(subject: Subject) -> Array | None:
    """What each value counts for each query, of a function; None where that cannot be seen."""
    query, key, value = subject.inputs
    if subject.model.layer or len(subject.signature.roles) != 3:
        return None
    key_len = key.shape[-2]
    width = max(key_len, value.shape[-1])
    basis = np.broadcast_to(np.eye(key_len, width), (*value.shape[:-1], width))
    return _moved(subject, [query, key, basis])[..., :key_len]


def _dropped(subject: Subject) -> Answer:
    """Whether some weights are 0 and the others right but for a factor: dropout."""
    weights = _effective_weights(subject)
    if weights is None:
        return None
    _, right = subject.expected(subject.inputs)
    lost = np.abs(weights) < 1e-12
    if not 0 < lost.mean() < 0.95:
        return None
    ratio = weights[~lost] / right[~lost]
    if np.ptp(ratio) > 1e-4 * abs(ratio.mean()):
        return None
    return (f"{lost.mean():.0%} of them are 0, the others are {ratio.mean():.3g} times as large (is"
            " dropout on?)")


def _sharpness(subject: Subject) -> Answer:
    """Effective scores, from how the values count, against the right ones: their ratio."""
    weights = _effective_weights(subject)
    if weights is None or (weights <= 0).any():
        return None
    query, key, _ = subject.inputs
    scores = np.log(weights)
    right = query @ np.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1])
    scores, right = (x - x.mean(axis=-1, keepdims=True) for x in (scores, right))
    ratio = float((scores * right).sum() / (right * right).sum())
    correlation = ratio * math.sqrt(float((right ** 2).sum() / (scores ** 2).sum()))
    if correlation < 0.98:
        return None if correlation > 0.9 else f"about {ratio:.2g}, and hardly follow them"
    return True if abs(ratio - 1) < 0.01 else f"{ratio:.3g}"
