"""`diagnose`: what is wrong with an attention that you wrote yourself, in plain words.

It calls your function or layer on random inputs and compares with attention computed step by step.
Where they differ it looks for the mistake that explains the difference: it computes attention with
each of the well-known mistakes put in, then with two and three of them, and what gives your
numbers is yours. Where nothing does it says which properties of attention hold, and which do not.
`mha.testing._diagnosis` has the parts.
"""

import contextlib
import inspect
import io
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mha._base.dtypes import is_half, stored_dtype
from mha._layer.layer import MultiHeadAttention
from mha.testing._diagnosis import attempts, torch_modules
from mha.testing._diagnosis.aliases import Tested, TestedClass
from mha.testing._diagnosis.compare import (
    Outcome,
    alike_is_right,
    check_twin,
    explain,
    keeps_copies,
    run_plain,
)
from mha.testing._diagnosis.mask_mistakes import CAUSAL, CAUSAL_FROM_START
from mha.testing._diagnosis.model import IMPOSSIBLE
from mha.testing._diagnosis.options import diagnose_options
from mha.testing._diagnosis.properties import WEIGHTS_UNSEEN, differences, items_mix
from mha.testing._diagnosis.signature import (
    CannotTestError,
    flags_of,
    is_function,
    signature,
    takes_size,
    weight_parameters,
)
from mha.testing._diagnosis.subject import AS_IS, ONE_ITEM, ONE_SEQUENCE, SLOW, Subject
from mha.testing._diagnosis.weights import Opened

Findings: TypeAlias = tuple[list[str], list[str]]  # problems and notes
Candidate: TypeAlias = tuple[Outcome, Opened]

__all__ = ["Diagnosis", "diagnose"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found: true when nothing is wrong, printed in plain words.

    problems: what is wrong, in the order of the computation. notes: what is merely good to know,
    and which options were not tested.
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
    - a function that takes weights (W_q, W_k, W_v, W_o, ...) and num_heads among its arguments;
    - a layer: a class to construct with (d_model, num_heads) or a config, or an instance (a copy
      is used), called as layer(query, key, value[, mask]), by `forward`, or with one x. Its
      weights are found by their usual names, either way round: W_q, q_proj, fc_q, query, w_qs ...,
      out_proj, dense, fused as c_attn, qkv or in_proj_weight, a matrix a head, in layers of layers;
    - a torch.nn.Module, class or instance, or a function of tensors, likewise.
    It returns the output, alone or with the weights. In a mask, 1 may mean attend or blocked. The
    options that the signature offers (mask, causal, valid_lens, key_padding_mask, scale, bias ...)
    are switched on one by one; the notes name those that were not tested.

    Raises TypeError when my_attention cannot be called; what it raises itself is reported. What it
    prints is not shown. Takes a second or less; a few where no single mistake explains the numbers.

    >>> mha.testing.diagnose(lambda q, k, v: mha.reference.softmax(q @ k.T)[0] @ v)
    forgot to divide by sqrt(d_k)
    note: takes 2-D input only
    note: takes no mask
    """
    if inspect.ismethod(my_attention) and my_attention.__name__ in ("forward", "__call__", "call"):
        layer: Any = my_attention.__self__  # whose weights and sizes are looked for
        my_attention = layer
    my_attention = torch_modules.original(my_attention)
    testable = inspect.isclass(my_attention) or is_function(my_attention) or callable(
        my_attention) or hasattr(my_attention, "forward")
    if not testable:
        raise TypeError(f"my_attention: got {type(my_attention).__name__}, wanted a function or a"
                        " layer")
    with warnings.catch_warnings(), np.errstate(all="ignore"), contextlib.redirect_stdout(
            io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            tested = _without_halves(my_attention)
            problems, notes = _diagnose(tested)
            if tested is not my_attention:
                notes = [*notes, "tested was a copy of the layer in float32"]
        except CannotTestError as reason:
            problems, notes = [f"{reason}{_advice(my_attention)}"], []
        except Exception as error:  # code too unusual for what is here
            if os.environ.get("MHA_DIAGNOSE_RAISES"):
                raise
            problems = [f"cannot be tested: {type(error).__name__}: {error}"]
            notes = []
    return Diagnosis(tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)))


def _advice(my_attention: Any) -> str:
    can_be_read = torch_modules.unreadable(my_attention) == ""
    return torch_modules.advice(my_attention) if can_be_read else ""


def _without_halves(my_attention: Any) -> Any:
    """A layer of halves in float32, in which ours computes; all else as it is."""
    if isinstance(my_attention, MultiHeadAttention) and is_half(stored_dtype(my_attention.dtype)):
        return my_attention.astype(np.float32)
    return torch_modules.in_float32(my_attention)


def _diagnose(my_attention: Any) -> Findings:
    """As a function of tensors where it seems to be one; if it fails as that, as one of arrays."""
    if is_function(my_attention) and torch_modules.speaks_torch(my_attention):
        try:
            return _diagnose_arrays(torch_modules.with_tensors(my_attention))
        except CannotTestError as reason:
            try:
                return _diagnose_arrays(my_attention)
            except CannotTestError:
                raise reason from None
    return _diagnose_arrays(my_attention)


def _diagnose_arrays(my_attention: Any) -> Findings:
    if not is_function(my_attention) and (function := attempts.alone(my_attention)) is not None:
        return _diagnose_function(function)
    if inspect.isclass(my_attention):
        make = attempts.of_class(my_attention)
        problems, notes = _diagnose_layer(make, my_attention, make)
        if not problems and takes_size(my_attention, "num_kv_heads"):
            _diagnose_groups(my_attention, problems)
        for name, value in flags_of(my_attention).items():
            _diagnose_flag(my_attention, name, value, problems, notes)
        return problems, notes
    if not is_function(my_attention):
        return _diagnose_layer(attempts.of_instance(my_attention), my_attention,
                               attempts.of_class(type(my_attention)))
    if weight_parameters(my_attention) or attempts.takes_a_dict(my_attention):
        make = attempts.of_function(my_attention)
        return _diagnose_layer(make, my_attention, make)
    if takes_size(my_attention, "num_heads"):
        make = attempts.without_weights(my_attention)
        return _diagnose_layer(make, my_attention, make)
    return _diagnose_function(my_attention)


def _diagnose_function(function: Tested) -> Findings:
    outcomes: dict[int, Outcome] = {}  # by the number of axes
    failures: dict[int, str] = {}
    for rank, subject in attempts.function_subjects(function):
        settled = rank in outcomes and (outcomes[rank].right or explain(outcomes[rank], 1))
        if settled:
            continue
        try:
            outcome = run_plain(subject)
        except CannotTestError as reason:
            failures.setdefault(rank, str(reason))
            continue
        if rank not in outcomes or outcome.right:  # another layout counts where it is right
            outcomes[rank] = outcome
    if not outcomes and len(signature(function).roles) == 1:
        raise CannotTestError("; ".join([*dict.fromkeys(failures.values()), WEIGHTS_UNSEEN]))
    if not outcomes:
        raise CannotTestError(failures[2])
    for outcome in outcomes.values():
        explain(outcome, 1)
    _keep_one_layout(outcomes)

    # Everything else is tested with the most axes that it gets right; or that it runs with.
    right = [rank for rank, outcome in outcomes.items() if outcome.right]
    rank = max(right or [r for r, o in outcomes.items() if o.explained] or outcomes)
    chosen = outcomes.pop(rank)
    for other, outcome in outcomes.items():
        if right and not outcome.right:
            _explain_or_describe(outcome, 2)
            chosen.problems += [f"{other}-D input: {problem}" for problem in outcome.problems]
    untaken = failures.keys() - outcomes.keys() - {rank}
    if untaken:
        taken = " and ".join(f"{n}-D" for n in (2, 3, 4) if n not in untaken)
        chosen.notes.append(f"takes {taken} input only")
    return _finished(chosen, function)


def _keep_one_layout(outcomes: dict[int, Outcome]) -> None:
    """A layout that is right for some axes explains no others where it makes them wrong."""
    usual = [outcome.subject.layout.note for outcome in outcomes.values() if outcome.right]
    if usual and any(usual):
        for rank in [r for r, o in outcomes.items() if not o.right]:
            del outcomes[rank]


def _diagnose_layer(make: attempts.Make, named: object, twin: attempts.Make) -> Findings:
    candidates = _layer_calls(make, twin)
    chosen, layer = _best(candidates, 1)
    if not chosen.right and not chosen.settled and layer.arrays:  # does it keep copies of them?
        with contextlib.suppress(CannotTestError):
            as_made, made = _best(_plain_calls(attempts.layer_subjects(make, False, twin=twin)), 0)
            if as_made.right and keeps_copies(as_made):
                chosen, layer = as_made, made
    if not chosen.settled:
        chosen, layer = _best(candidates, 3)
    subject = chosen.subject
    if subject.transposed and len(layer.orientations) > 1 and layer.arrays:
        chosen.notes.append("your weights are stored (out, in) and used as x @ W.T")
    if subject.arranged != "thirds":
        chosen.notes.append("your fused matrix holds query, key and value by "
                            + ("head" if subject.arranged == "heads" else "turns"))
    if len(subject.signature.roles) == 1:
        chosen.notes.append("takes one input: self-attention only")
    problems, notes = _finished(chosen, named)
    problems += _in_a_batch(chosen, candidates)
    if layer.unread and any("no known mistake" in problem for problem in problems):
        notes.append("arrays that were taken for no weight: " + ", ".join(layer.unread[:8]))
    if layer.heads > 1 and "W_o" not in subject.model.matrices and subject.model.matrices:
        problems.append("there is no output projection W_o: the heads are concatenated, but never"
                        " mixed")
    return [*layer.problems, *problems], notes


def _layer_calls(make: attempts.Make, twin: attempts.Make) -> list[Candidate]:
    """The plain calls of a layer; with a batch of one where larger ones do not come out whole."""
    failure: CannotTestError | None = None
    candidates: list[Candidate] = []
    try:
        candidates = _plain_calls(attempts.layer_subjects(make, twin=twin))
    except CannotTestError as reason:
        failure = reason
    if any(outcome.right or outcome.keeps_shape for outcome, _ in candidates):
        return candidates
    with contextlib.suppress(CannotTestError):
        ones = _plain_calls(attempts.layer_subjects(make, twin=twin, layouts=(ONE_ITEM,)))
        if any(outcome.right or outcome.keeps_shape for outcome, _ in ones):
            return ones
    if failure:
        raise failure
    return candidates


def _plain_calls(subjects: Iterable[tuple[Subject, Opened]]) -> list[Candidate]:
    """Those of the subjects that run, up to the first that is right."""
    candidates: list[Candidate] = []
    failure = ""
    for subject, layer in subjects:
        try:
            candidates.append((run_plain(subject), layer))
        except CannotTestError as reason:
            failure = failure or str(reason)
            continue
        except IMPOSSIBLE:  # these matrices cannot be multiplied
            failure = failure or "its weights do not fit the shape of its inputs"
            continue
        if candidates[-1][0].right:
            break
    if not candidates:
        raise CannotTestError(failure)
    return candidates


def _best(candidates: list[Candidate], most: int) -> Candidate:
    """The right one; else what the fewest mistakes, at most `most`, explain; else the first."""
    for outcome, layer in candidates:
        if outcome.right:
            return outcome, layer
    first = candidates[0][0].subject
    likely = [(outcome, layer) for outcome, layer in candidates
              if outcome.subject.layout is first.layout and outcome.subject.arranged == "thirds"]
    likely = [pair for pair in likely if alike_is_right(pair[0])] or likely
    others = [pair for pair in candidates if pair not in likely
              and (pair[0].subject.layout is first.layout or items_mix(first))]
    for count, among in ((1, likely), (2, likely), (1, others), (3, likely)):
        for outcome, layer in among:
            if count <= most and explain(outcome, count):
                return outcome, layer
    return likely[0]


def _in_a_batch(chosen: Outcome, candidates: list[Candidate]) -> list[str]:
    """The mistake that spoils a batch where one sequence comes out right."""
    return [f"with a batch of sequences: {problem}" for outcome, _ in candidates
            if chosen.right and chosen.subject.layout is ONE_SEQUENCE
            and outcome.subject.layout is AS_IS and outcome.subject.transposed
            == chosen.subject.transposed and explain(outcome, 1) for problem in outcome.problems]


def _explain_or_describe(outcome: Outcome, most: int) -> None:
    if not explain(outcome, most):
        outcome.problems += differences(outcome)


def _finished(outcome: Outcome, named: object) -> Findings:
    """Problems and notes with everything but the plain call tested, too."""
    subject = outcome.subject
    if not outcome.right:
        _explain_or_describe(outcome, 3)
    elif inspect.isclass(named) or is_function(named):  # an instance has one head_dim
        check_twin(outcome)
    if subject.layout.note:
        outcome.notes.append(subject.layout.note)
    if subject.seconds > SLOW:
        outcome.notes.append("not tested: its options, as a call with"
                             f" {subject.sizes[0]} queries takes {subject.seconds:.1f} s")
    elif outcome.right or outcome.explained:
        diagnose_options(outcome, named)
    if subject.failure and not outcome.problems and subject.sizes[2] != 6:
        outcome.problems.append("works only when queries and keys are equally many; otherwise"
                                f" {subject.failure}")
    elif subject.failure and subject.sizes[0] != subject.sizes[1]:
        outcome.notes.append("values must be as wide as the keys" if not outcome.problems else
                             f"with other sizes it {subject.failure}")
    return [*outcome.problems, *subject.faults], outcome.notes


def _diagnose_groups(layer_class: TestedClass, problems: list[str]) -> None:
    """Fewer key heads than query heads, where a class can be constructed so."""
    make = attempts.of_class(layer_class, kv_heads=2)
    try:
        outcome, _ = _best(_plain_calls(attempts.layer_subjects(make, heads=4)), 1)
    except CannotTestError as reason:
        problems.append(f"with 2 key heads for 4 query heads: {reason}")
        return
    if not outcome.right:
        _explain_or_describe(outcome, 2)
        problems += [f"with 2 key heads for 4 query heads: {words}" for words in outcome.problems]


def _diagnose_flag(layer_class: TestedClass, name: str, value: bool, problems: list[str],
                   notes: list[str]) -> None:
    """A causal flag of the constructor, switched over."""
    make = attempts.of_class(layer_class, **{name: value})
    try:
        outcome, _ = _best(_plain_calls(attempts.layer_subjects(make, twin=make)), 1)
    except CannotTestError as reason:
        problems.append(f"{name}={value}: {reason}")
        return
    if not outcome.right:
        _explain_or_describe(outcome, 2)
    causal = outcome.subject.model.found.get("triangle") in (CAUSAL, CAUSAL_FROM_START)
    found = [words for words in outcome.problems if not (
        causal and words in (CAUSAL, CAUSAL_FROM_START)) and words not in problems]
    if value and not causal and not found:
        found = ["is ignored: later keys are seen"]
    if not value and any("always causal" in note for note in notes) and not causal:
        notes[:] = [note for note in notes if "always causal" not in note]
    problems += [f"{name}={value}: {words}" for words in found]
