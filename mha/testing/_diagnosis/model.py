"""The right computation, run with any step of it replaced by a mistake."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs, MaskEntry, Mistakes, Visibility
from mha.testing._diagnosis.attention_mistakes import (
    AFTERWARDS,
    INPUTS,
    SCALE,
    SCORES,
    SOFTMAX,
    VALUES,
)
from mha.testing._diagnosis.layer_mistakes import (
    ATTENDED,
    BIAS,
    BIAS_STAYS,
    GROUP,
    MERGE,
    ORDER,
    OUTPUT,
    PROJECT,
    SPLIT,
    TRANSPOSED,
)
from mha.testing._diagnosis.mask_mistakes import MASK, TRIANGLE

Tables: TypeAlias = dict[str, Mapping[str, object]]  # {step: {mistake: what it does}}
Memory: TypeAlias = dict[tuple[str, ...], Any]  # what was computed, or the error that it raised
Computed = TypeVar("Computed")

ATTENTION_TABLES: Tables = {
    "inputs": INPUTS, "scores": SCORES, "scale": SCALE, "triangle": TRIANGLE, "softmax": SOFTMAX,
    "values": VALUES, "afterwards": AFTERWARDS}
LAYER_TABLES: Tables = {
    "inputs": INPUTS, "project": PROJECT, "transposed": TRANSPOSED, "bias": BIAS, "split": SPLIT,
    "order": ORDER, "group": GROUP, "scores": SCORES, "scale": SCALE, "triangle": TRIANGLE,
    "softmax": SOFTMAX, "values": VALUES, "merge": MERGE, "output": OUTPUT,
    "afterwards": AFTERWARDS, "attended": ATTENDED}
BEFORE_SCORES = ("inputs", "project", "transposed", "bias", "split", "order", "group")
IMPOSSIBLE = (ValueError, IndexError, TypeError, ZeroDivisionError, KeyError)


class HardCoded(str):
    """The mistake of a scale that is a number: its name, and the number."""

    divisor: float
    shown: str

    def __new__(cls, divisor: float, head_dim: int) -> Self:
        root = round(divisor ** 2)
        shown = (f"{divisor:.4g}" if root < 2 or abs(divisor ** 2 - root) > 1e-3 * root
                 or math.isqrt(root) ** 2 == root else f"sqrt({root})")
        made = super().__new__(cls, f"the scores are divided by {shown} instead of sqrt(d_k), here"
                                    f" sqrt({head_dim})")
        made.divisor, made.shown = divisor, shown
        return made


class Masked(str):
    """A mistake by its name. Of the step "mask": the given mask acts by `how`. Of the step
    "triangle": a mask that nobody gave, by which visible(query_len, key_len) is seen."""

    how: MaskEntry
    visible: Visibility | None

    def __new__(cls, how: MaskEntry, name: str = "the mask acts in another way",
                visible: Visibility | None = None) -> Self:
        made = super().__new__(cls, name)
        made.how, made.visible = how, visible
        return made


@dataclass(eq=False)
class Model:
    """What the tested callable should compute.

    matrices: of a layer, W_q, W_k, W_v, W_o as (in, out) and b_q ...; a missing one does nothing.
    layer: whether inputs are (batch, len, d_model), to be split into heads. found: the mistakes
    that are part of it from now on, {step: mistake}.
    """

    layer: bool
    heads: int
    kv_heads: int
    matrices: dict[str, Array] = field(default_factory=dict)
    one_input: bool = False
    found: Mistakes = field(default_factory=dict)

    def tables(self) -> Tables:
        """The steps in which this callable can go wrong, with their mistakes."""
        tables = dict(LAYER_TABLES if self.layer else ATTENTION_TABLES)
        if self.one_input:
            del tables["inputs"]
        if not self.layer or self.kv_heads == self.heads:
            tables.pop("group", None)
        if not any(name.startswith("W") for name in self.matrices):
            for step in ("project", "transposed"):
                tables.pop(step, None)
        if not any(name.startswith("b") for name in self.matrices):
            tables.pop("bias", None)
        if "W_o" not in self.matrices:
            tables.pop("output", None)
        return tables

    def run(self, inputs: Inputs, mistakes: Mistakes | None = None, visible: Array | None = None,
            memory: Memory | None = None) -> tuple[Array, Array]:
        """Output and weights with the given mistakes (else those found) put in.

        memory: a dict that keeps what several runs with the same inputs have in common.
        """
        mistakes = self.found if mistakes is None else mistakes
        memory = {} if memory is None else memory
        with np.errstate(all="ignore"):
            heads = _remembered(
                memory, BEFORE_SCORES, mistakes, lambda: self.heads_of(inputs, mistakes))
            weights = _remembered(
                memory, (*BEFORE_SCORES, "scores", "scale", "triangle", "mask", "softmax"),
                mistakes, lambda: self._weights(*heads, mistakes, visible))
            attended = VALUES[mistakes.get("values", "")](weights, *heads)
            if self.layer:
                attended = ATTENDED[mistakes.get("attended", "")](attended, heads)
                merged = MERGE[mistakes.get("merge", "")](attended)
                attended = OUTPUT[mistakes.get("output", "")](
                    merged, _OutputProjection(self, mistakes), inputs[0])
            return AFTERWARDS[mistakes.get("afterwards", "")](attended, inputs), weights

    def heads_of(self, inputs: Inputs, mistakes: Mistakes) -> tuple[Array, Array, Array]:
        """Query, key and value as the scores and the weights meet them."""
        sources = [inputs[i] for i in INPUTS[mistakes.get("inputs", "")]]
        if self.layer:
            names = PROJECT[mistakes.get("project", "")]
            sources = [x if name is None else self.project(x, name, place, mistakes)
                       for x, name, place in zip(sources, names, ("W_q", "W_k", "W_v"))]
            splits = SPLIT[mistakes.get("split", "")]
            sources = [split(x, heads) for split, x, heads in
                       zip(splits, sources, (self.heads, self.kv_heads, self.kv_heads))]
            sources = [sources[place] for place in ORDER[mistakes.get("order", "")]]
        query, key, value = sources
        if query.ndim == 4 and key.shape[1] != query.shape[1] and self.kv_heads != self.heads:
            group = GROUP[mistakes.get("group", "")]
            key = group(key, query.shape[1] // key.shape[1])
            value = group(value, query.shape[1] // value.shape[1])
        return query, key, value

    def project(self, x: Array, name: str, place: str, mistakes: Mistakes) -> Array:
        """x with the matrix `name`, in the place of the matrix `place`."""
        matrix = self.matrices.get(name)
        if matrix is None:
            return x
        if place in TRANSPOSED[mistakes.get("transposed", "")]:
            matrix = matrix.T
        own = "b" + (place if mistakes.get("bias") == BIAS_STAYS else name)[1:]
        instead = BIAS[mistakes.get("bias", "")].get(own, own)
        times, added = (instead, own) if isinstance(instead, int) else (1, instead)
        bias = None if added is None else self.matrices.get(added)
        return x @ matrix if bias is None else x @ matrix + times * bias

    def _weights(self, query: Array, key: Array, value: Array, mistakes: Mistakes,
                 visible: Array | None) -> Array:
        scale = mistakes.get("scale", "")
        before, after = (scale.divisor, 1) if isinstance(scale, HardCoded) else SCALE[scale](
            query, key, value, self.heads)
        scores = SCORES[mistakes.get("scores", "")](query, key) / before
        masks: list[tuple[Array, MaskEntry]] = []
        triangle, how = _triangle(mistakes)
        if triangle is not None:
            masks.append((triangle(*scores.shape[-2:]), how))
        if visible is not None:
            mask = mistakes.get("mask", "")
            masks.append((visible, mask.how if isinstance(mask, Masked) else MASK[mask]))
        for pairs, how in masks:
            scores = how.on_scores(scores, pairs)
        weights = SOFTMAX[mistakes.get("softmax", "")](scores) / after
        for pairs, how in masks:
            weights = how.on_weights(weights, pairs)
        return weights

    def empty_rows(self, mistakes: Mistakes, query_len: int, key_len: int,
                   visible: Array | None = None) -> Array:
        """Which queries see no key, (query_len,): what they get is not compared."""
        triangle, _ = _triangle(mistakes)
        seen = np.ones((query_len, key_len), bool)
        if triangle is not None:
            seen &= triangle(query_len, key_len)
        if visible is not None:
            seen = seen & visible
        blind = np.asarray(~seen.any(axis=-1))
        return np.asarray(blind.reshape(-1, query_len).any(axis=0))


class _OutputProjection:
    """x @ W_o + b_o with the mistakes; .bias(name) is a bias alone."""

    def __init__(self, model: Model, mistakes: Mistakes) -> None:
        self.model, self.mistakes = model, mistakes

    def __call__(self, x: Array, name: str) -> Array:
        return self.model.project(x, name, "W_o", self.mistakes)

    def bias(self, name: str) -> Array:
        return self.model.matrices[name]


def _triangle(mistakes: Mistakes) -> tuple[Visibility | None, MaskEntry]:
    """What is visible without any mask, a function of the lengths, and how the rest is blocked."""
    name = mistakes.get("triangle", "")
    if isinstance(name, Masked):
        return name.visible, name.how
    visible, how = TRIANGLE[name]
    return visible, MASK[how]


def _remembered(memory: Memory, steps: tuple[str, ...], mistakes: Mistakes,
                compute: Callable[[], Computed]) -> Computed:
    """The same mistakes in the same steps give the same intermediate."""
    kind = (steps[-1], *(mistakes.get(step, "") for step in steps))
    if kind not in memory:
        try:
            memory[kind] = compute()
        except IMPOSSIBLE as error:
            memory[kind] = error
    if isinstance(memory[kind], Exception):
        raise memory[kind]
    return memory[kind]
