"""The options of a signature, switched on one by one, and large scores."""

import inspect
import math
import re

import numpy as np

from mha.testing._diagnosis.aliases import Array, MaskEntry
from mha.testing._diagnosis.attention_mistakes import as_it_is
from mha.testing._diagnosis.compare import HEAD_DIM, Outcome, check_weights
from mha.testing._diagnosis.mask_mistakes import CAUSAL, CAUSAL_FROM_START
from mha.testing._diagnosis.mask_option import test_mask
from mha.testing._diagnosis.model import IMPOSSIBLE, HardCoded, Masked
from mha.testing._diagnosis.restrictions import check_leak, test_causal, test_lengths
from mha.testing._diagnosis.search import Search
from mha.testing._diagnosis.signature import CannotTestError, parameters_of
from mha.testing._diagnosis.subject import Subject, equal, of_shape

RESTRICTING = ("mask", "key_mask", "causal", "lengths")


def diagnose_options(outcome: Outcome, named: object) -> None:
    """Masks, flags and lengths, returned weights, and large scores."""
    subject, problems, notes = outcome.subject, outcome.problems, outcome.notes
    options = subject.signature.options
    _judge_always_causal(outcome, named)
    if not any(kind in RESTRICTING for kind in options.values()):
        notes.append("takes no mask")
    for name, kind in options.items():
        try:
            if kind in ("mask", "key_mask"):
                test_mask(subject, name, kind, problems, notes)
            elif kind == "causal" and not subject.model.found.get("triangle"):
                test_causal(subject, name, problems, notes)
            elif kind == "lengths":
                test_lengths(subject, name, problems, notes)
            elif kind == "scale":
                _test_scale(subject, name, problems)
            elif kind == "bias":
                _test_bias(subject, name, problems)
            elif kind == "weights":
                _test_weights(subject, name, problems)
        except CannotTestError as reason:
            problems.append(f"{name}: {reason}")
    try:
        _check_large_scores(outcome)
    except CannotTestError as reason:
        problems.append(f"at large scores it {reason}")
    untested = [name for name in parameters_of(subject.function)
                if name in subject.signature.untested]
    if untested:
        notes.append("not tested: " + ", ".join(untested))


def _judge_always_causal(outcome: Outcome, named: object) -> None:
    """Causal attention without a switch is right for a decoder, which its name may tell."""
    subject = outcome.subject
    triangle = subject.model.found.get("triangle", "")
    flags = [name for name, kind in subject.signature.options.items() if kind == "causal"]
    if not triangle:
        return
    if flags and triangle in outcome.problems:
        outcome.problems.remove(triangle)
        outcome.problems.append(f"{triangle}, whatever {flags[0]} says")
    elif triangle in (CAUSAL, CAUSAL_FROM_START) and triangle in outcome.problems and (
            len(subject.signature.roles) == 1 or _says_causal(named)):
        outcome.problems.remove(triangle)
        outcome.notes.append("always causal: no query sees a later key, as in a decoder (GPT); an"
                             " encoder needs a switch")
    if triangle and subject.model.found and not outcome.problems:
        outcome.problems += check_weights(
            subject.returned.arrays, *subject.expected(subject.inputs))
    if triangle and subject.model.found and not outcome.problems:
        check_leak(subject, subject.inputs, {}, outcome.problems, "the causal mask")


def _says_causal(named: object) -> bool:
    """Whether the name, docstring, parameters or attributes speak of causal attention."""
    made = named if inspect.isclass(named) else type(named)
    words = [getattr(named, "__qualname__", ""), made.__qualname__, getattr(named, "__doc__", ""),
             *parameters_of(named), *getattr(named, "__dict__", {})]
    if inspect.isclass(named):
        code = getattr(getattr(named, "__init__", None), "__code__", None)
        words += [*parameters_of(named), *(code.co_names if code else ())]
    return bool(re.search(r"causal|gpt|decoder|masked|autoregress|tril|triu|block_?size"
                          r"|context_?len|look_?ahead|future", " ".join(map(str, words)).lower()))


def _check_large_scores(outcome: Outcome) -> None:
    subject, inputs = outcome.subject, outcome.subject.inputs
    if any("float16" in words for words in outcome.problems):
        return
    if subject.model.found.get("softmax") or "afterwards" in subject.model.found:
        return
    large = {3: [inputs[0] * 1e4, *inputs[1:]], 2: [inputs[0] * 1e4, *inputs[1:]],
             1: [inputs[0] * 100] * 3}[len(subject.signature.roles)]
    output, _ = subject.expected(large)
    rows = None
    if subject.model.found.get("triangle"):
        rows = subject.model.empty_rows(subject.model.found, large[0].shape[-2], large[1].shape[-2])
    mine = of_shape(subject.call(large), output.shape)
    if mine is None:
        return
    kept: slice | Array = slice(None)
    if rows is not None and output.ndim >= 2 and output.shape[-2] == len(rows):
        kept = ~rows
    finite = mine[..., kept, :] if mine.ndim > 1 else mine
    if np.isfinite(output).all() and not np.isfinite(finite).all():
        outcome.problems.append(
            "overflows at large scores: subtract each row's maximum before exp")
    elif not subject.model.found and not outcome.problems and not equal(mine, output, 0.02):
        outcome.problems.append("is wrong at large scores: are they clipped?")


def _head_dim(subject: Subject) -> int:
    return Search(subject.model, subject.inputs, subject.inputs[0]).head_dim


def _test_scale(subject: Subject, name: str, problems: list[str]) -> None:
    """A scale that is handed over replaces or accompanies 1 / sqrt(d_k); a flag switches it off."""
    default = parameters_of(subject.function)[name].default
    inputs, root = subject.inputs, math.sqrt(_head_dim(subject))
    given = False if isinstance(default, bool) else 0.3
    plain, _ = subject.expected(inputs)
    mine = of_shape(subject.call(inputs, **{name: given}), plain.shape)
    if equal(mine, plain):
        problems.append(f"{name} is ignored: the output does not change")
        return
    divisors = [1.0] if given is False else [1 / 0.3, 0.3, root / 0.3, root * 0.3]
    if given is False or subject.model.found.get("scale"):
        divisors += [root, *divisors]
    for divisor in divisors:
        mistakes = {**subject.model.found, "scale": HardCoded(divisor, HEAD_DIM)}
        if equal(mine, subject.expected(inputs, mistakes)[0]):
            return
    problems.append(f"{name}={given}: differs from the reference with that scale")


def _test_bias(subject: Subject, name: str, problems: list[str]) -> None:
    """Numbers that are added to the scores."""
    inputs, root = subject.inputs, math.sqrt(_head_dim(subject))
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    bias = np.random.default_rng(5).normal(size=(query_len, key_len))
    plain, weights = subject.expected(inputs)
    meanings = {
        "": MaskEntry(lambda s, b: s + b, as_it_is),
        f"{name} is ignored: the output does not change": MaskEntry(as_it_is, as_it_is),
        f"{name} is added before the scores are divided by sqrt(d_k)":
            MaskEntry(lambda s, b: s + b / root, as_it_is),
        f"{name} is subtracted from the scores": MaskEntry(lambda s, b: s - b, as_it_is),
        f"{name} is multiplied by the scores": MaskEntry(lambda s, b: s * b, as_it_is),
        f"{name} is added after the softmax": MaskEntry(as_it_is, lambda w, b: w + b)}
    failure = None
    for shape in dict.fromkeys([bias.shape, weights.shape]):
        try:
            given = np.array(np.broadcast_to(bias, shape))
            mine = subject.mine(inputs, plain.shape, **{name: given})
        except CannotTestError as reason:
            failure = str(reason)
            continue
        for words, entry in meanings.items():
            try:
                mistakes = {**subject.model.found, "mask": Masked(entry)}
                expected, _ = subject.expected(inputs, mistakes, bias)
            except IMPOSSIBLE:
                continue
            if equal(mine, expected):
                problems += filter(None, [words])
                return
        problems.append(f"{name}: differs from the reference, which adds it to the scores")
        return
    problems.append(f"{name}: {failure}")


def _test_weights(subject: Subject, name: str, problems: list[str]) -> None:
    """Asked for its weights the callable gives the same output, and the weights it used."""
    output, weights = subject.expected(subject.inputs)
    returned = subject.call(subject.inputs, **{name: True})
    if not equal(of_shape(returned, output.shape), output):
        problems.append(f"{name}=True: changes the output")
    elif not subject.model.found:
        problems += check_weights(returned, output, weights)
