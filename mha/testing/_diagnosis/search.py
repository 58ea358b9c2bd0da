"""Which mistakes give the numbers that came: a single one, two of which one is usual, three usual.

The search is by trial: the model computes with each mistake put in, and what agrees to TOLERANCE
explains. There are some 300 single mistakes and ten thousand such pairs, of 50 microseconds each.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mha._base.progress import progress
from mha.testing._diagnosis.aliases import Array, Inputs, MaskEntry, Mistakes
from mha.testing._diagnosis.layer_mistakes import BIAS_STAYS
from mha.testing._diagnosis.mask_mistakes import ALWAYS, INFINITE, MASK, causal_from_start, filled
from mha.testing._diagnosis.model import IMPOSSIBLE, HardCoded, Masked, Memory, Model
from mha.testing._diagnosis.subject import TOLERANCE, equal, same

# What beginners do most; two mistakes at a time have one of these, three are all of them.
USUAL = ("reshaped without the transpose", "forgot to divide", "divided by d_k instead",
         "divided by sqrt(d_model)", "over the queries instead", "forgot the softmax",
         "forgot the output projection", "heads interleaved", "the values are projected with W_k",
         "keys are projected with W_q", "never split", "causal mask", "the query is added",
         "are made from", "key and value are swapped", "the softmax is applied twice",
         "no bias is added", "not projected with W_v", "multiplied by sqrt(d_k)",
         "matrices of key and value", "is transposed, unlike", "reverse order",
         "after the softmax instead", "of the first head")
FLOAT16 = 5e-3  # of the largest number: what half precision is off by at most here


def distance(mine: Array, model: Model, inputs: Inputs, mistakes: Mistakes,
             visible: Array | None = None) -> float:
    """How far `mine` is from what the model computes, relative to its largest number."""
    try:
        output, _ = model.run(inputs, mistakes, visible)
    except IMPOSSIBLE:
        return math.inf
    if output.shape != mine.shape:
        return math.inf
    difference = np.max(np.abs(output - mine)) / np.max(np.abs(output))
    return float(difference) if np.isfinite(difference) else math.inf


class Search:
    """The mistakes of a model that give `mine` on these inputs.

    alike: what came for `values_alike(inputs)`, where whoever attends to whom makes no difference.
    If that is right, no mistake that changes it is looked for; if not, at least one such is.
    seen: which key reaches which query, or None where that is not known. Where a mask that is
    always on explains it, the others are looked for beside that mask, as in a decoder.
    """

    def __init__(self, model: Model, inputs: Inputs, mine: Array, tolerance: float = TOLERANCE,
                 alike: Array | None = None, seen: Array | None = None) -> None:
        self.model, self.inputs, self.mine = model, inputs, mine
        self.tolerance, self.alike = tolerance, alike
        self.memory: Memory = {}
        self.rows: dict[str, Array] = {}
        finite = np.flatnonzero(np.isfinite(mine))
        self.any_finite, self.spoiled = finite.size > 0, finite.size < mine.size
        self.probe = np.unravel_index(finite[finite.size // 2], mine.shape) if finite.size else ()
        self.near = 1e-3 * (1 + np.max(np.abs(mine.flat[finite]), initial=0))
        # Values alone tell what reaches what; keys and queries do so by the sums of the softmax.
        self.sees_all = seen is not None and not model.one_input and bool(
            seen[0, -1] and seen[-1, 0])
        self.bases = self._always_on(seen)

    def _always_on(self, seen: Array | None) -> list[Mistakes]:
        """The masks that leave these pairs; where numbers are spoiled all that can do that."""
        if not self.spoiled and (seen is None or seen.all()):
            return []
        bases: list[Mistakes] = []
        left: list[Array] = []
        for name, visible in ALWAYS.items():
            pairs = visible(self.inputs[0].shape[-2], self.inputs[1].shape[-2])
            shown = pairs | (np.eye(*pairs.shape) > 0) if self.model.one_input else pairs
            if any(np.array_equal(pairs, other) for other in left):
                continue
            if self.spoiled or (seen is not None and np.array_equal(shown, seen)):
                left.append(pairs)
                bases.append({"triangle": Masked(
                    INFINITE if self.spoiled else MASK[""], name, visible)})
        return bases

    def fits(self, mistakes: Mistakes) -> bool:
        """Whether the model with these mistakes computes `mine`."""
        try:
            output, _ = self.model.run(self.inputs, mistakes, memory=self.memory)
        except IMPOSSIBLE:
            return False
        if output.shape != self.mine.shape or not self.any_finite:
            return False
        rows = self._empty_rows(mistakes)
        counts = rows is None or output.ndim < 2 or output.shape[-2] != len(rows) or not rows[
            self.probe[-2]]
        if self.tolerance == TOLERANCE and counts and not abs(
                output[self.probe] - self.mine[self.probe]) <= self.near:
            return False  # most are already wrong in one number
        return same(self.mine, output, self.tolerance, without_rows=rows)

    def _empty_rows(self, mistakes: Mistakes) -> Array | None:
        """Which queries a mask that is always on lets see no key; None without such a mask."""
        name = mistakes.get("triangle", "")
        if name and name not in self.rows:
            self.rows[name] = self.model.empty_rows(
                mistakes, self.inputs[0].shape[-2], self.inputs[1].shape[-2])
        return self.rows.get(name)

    def singles(self) -> list[Mistakes]:
        return [{step: name} for step, table in self.model.tables().items()
                for name in table if name and name != BIAS_STAYS
                and (self.inputs[0].ndim > 2 or "batch item" not in name)]

    def explanations(self, count: int) -> list[Mistakes]:
        """All the {step: mistake} of `count` mistakes that fit; [] if none does."""
        if count == 1:
            return self._single() or self._weak_triangle() or [
                found for base in self.bases for found in self._single(base)]
        if self.bases:
            bases = self.bases[:1] if self.spoiled or count > 2 else self.bases
            return [found for base in bases for found in self._several(count, base)]
        return self._several(count, {})

    def _single(self, base: Mistakes | None = None) -> list[Mistakes]:
        """The single mistakes that fit, beside those of the base if there is one."""
        singles = self.singles()
        if base:
            singles = [base, *({**base, **m} for m in singles if "triangle" not in m)]
        found = [mistakes for mistakes in self._tried(singles, 1) if self.fits(mistakes)]
        number = None if found else self.hard_coded(base or {})
        return found if number is None else [number]

    def _several(self, count: int, base: Mistakes) -> list[Mistakes]:
        """Two or three mistakes at a time that fit, beside those of the base."""
        singles = [mistakes for mistakes in self.singles() if "triangle" not in mistakes
                   or not (base or self.sees_all or ", and wrong" in mistakes["triangle"])]
        changing = self._changing_alike(singles, base)
        if changing is not None and not changing[0]:
            singles = [m for m, changes in zip(singles, changing[1]) if not changes]
        usual = [mistakes for mistakes in singles
                 if any(words in name for name in mistakes.values() for words in USUAL)]
        if changing is not None and changing[0]:
            wanted = {id(m) for m, changes in zip(singles, changing[1])
                      if changes or "triangle" in m}  # a triangle changes what others do
        else:
            wanted = None
        if count == 2:
            return self._pairs(singles, usual, wanted, base)
        triples = ({**base, **a, **b, **c} for a, b, c in itertools.combinations(usual, 3)
                   if len(a.keys() | b.keys() | c.keys()) == 3
                   and (wanted is None or not wanted.isdisjoint((id(a), id(b), id(c)))))
        return list(itertools.islice(filter(self.fits, self._tried(triples, 3)), 3))

    def _tried(self, attempts: Iterable[Mistakes], count: int) -> Iterator[Mistakes]:
        """The attempts, with a bar where they take long."""
        return progress(attempts, f"{count} mistakes at a time" if count > 1 else "mistakes", "try")

    def _changing_alike(self, singles: Sequence[Mistakes],
                        base: Mistakes) -> tuple[bool, list[bool]] | None:
        """Whether `alike` is wrong, and which mistakes make it so; None where it cannot tell."""
        if self.alike is None or not np.isfinite(self.alike).all():
            return None
        inputs = values_alike(self.inputs)
        right, _ = self.model.run(inputs, base)
        if self.alike.shape != right.shape:
            return None
        memory: Memory = {}
        changes = []
        for mistakes in singles:
            try:
                changed, _ = self.model.run(inputs, {**base, **mistakes}, memory=memory)
                changes.append(not equal(changed, right))
            except IMPOSSIBLE:
                changes.append(True)
        return not equal(self.alike, right), changes

    def _pairs(self, singles: Sequence[Mistakes], usual: Sequence[Mistakes],
               wanted: set[int] | None, base: Mistakes) -> list[Mistakes]:
        """Two mistakes of which one is usual, or a usual one and a scale that is any number."""
        rare = [mistakes for mistakes in singles if mistakes not in usual]
        if "bias" in self.model.tables():
            usual = [*usual, {"bias": BIAS_STAYS}]
        pairs: Iterator[tuple[Mistakes, Mistakes]] = itertools.chain(
            itertools.combinations(usual, 2), itertools.product(usual, rare))
        if wanted is not None:
            pairs = ((a, b) for a, b in pairs if id(a) in wanted or id(b) in wanted)
        both: Iterable[Mistakes] = ({**base, **a, **b} for a, b in pairs if a.keys() != b.keys())
        found = [mistakes for mistakes in self._tried(both, 2) if self.fits(mistakes)]
        if found:
            return found
        for mistakes in usual:
            if "scale" not in mistakes and (
                    number := self.hard_coded({**base, **mistakes})) is not None:
                return [number]
        return []

    def _weak_triangle(self) -> list[Mistakes]:
        """A causal mask that is always on, and lets some weight through."""
        def off(entry: MaskEntry) -> float:
            mistakes = {"triangle": Masked(entry, "", causal_from_start)}
            return distance(self.mine, self.model, self.inputs, mistakes)

        weak = weak_fill(off)
        return [] if weak is None else [{"triangle": Masked(
            weak[1], f"the causal mask is always on, and {weak[0]}", causal_from_start)}]

    def hard_coded(self, mistakes: Mistakes) -> Mistakes | None:
        """The same with the scores divided by another number than any we know, or None."""
        def with_divisor(divisor: float) -> Mistakes:
            return {**mistakes, "scale": HardCoded(divisor, self.head_dim)}

        def error(logarithm: float) -> float:
            try:
                output, _ = self.model.run(self.inputs, with_divisor(math.exp(logarithm)),
                                           memory=dict(memory))
            except IMPOSSIBLE:
                return math.inf
            if output.shape != self.mine.shape:
                return math.inf
            difference = np.abs(output - self.mine)[np.isfinite(self.mine)].mean()
            return float(difference) if np.isfinite(difference) else math.inf

        memory = {key: value for key, value in self.memory.items() if key[0] == "group"}
        if math.isinf(error(0.0)):
            return None
        divisor = math.exp(_smallest(error, -6.0, 10.0))
        if abs(divisor - round(divisor, 2)) < 1e-4 * divisor:
            divisor = round(divisor, 2)
        explained = with_divisor(divisor)
        return explained if self.fits(explained) else None

    @property
    def head_dim(self) -> int:
        width = self.inputs[0].shape[-1]
        if not self.model.layer:
            return width
        matrix = self.model.matrices.get("W_q")
        return (width if matrix is None else matrix.shape[-1]) // self.model.heads


def values_alike(inputs: Inputs) -> list[Array]:
    """The same inputs with values that are all alike; with one input, positions that are."""
    which = 0 if inputs[0] is inputs[2] else 2
    alike = np.repeat(inputs[which][..., :1, :], inputs[which].shape[-2], axis=-2)
    return [alike if x is inputs[which] else x for x in inputs]


def _smallest(error: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is smallest: a grid, then the golden section."""
    grid = np.linspace(low, high, 49)
    at = int(np.argmin([error(point) for point in grid]))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, 48)]
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = error(left), error(right)
    for _ in range(36):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = error(right)
    return (low + high) / 2


def weak_fill(off: Callable[[MaskEntry], float]) -> tuple[str, MaskEntry] | None:
    """(name, entry of MASK) for the number that blocked scores become, or None.

    off(entry) says how far off the output is with it, as a part of the largest number.
    """
    for kind in (0, 1):
        def error(size: float, kind: int = kind) -> float:
            return off(list(filled(-size).values())[kind])

        number = -_smallest(error, 0.0, 40.0)
        name, entry = list(filled(number).items())[kind]
        if number < -0.01 and off(entry) < TOLERANCE:
            return name, entry
    return None
