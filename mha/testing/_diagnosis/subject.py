"""The tested callable: how it is called, and what it should have returned."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from mha.testing._diagnosis.aliases import Array, Inputs, Mistakes, Shape, Sizes, Tested
from mha.testing._diagnosis.model import Model
from mha.testing._diagnosis.signature import CannotTestError, Signature

BATCH = 2
SLOW = 0.5  # seconds a call: what takes longer is called some twenty times only
TOLERANCE = 1e-4  # of the largest number: float32 passes, no mistake does


def _unchanged(x: Array) -> Array:
    return x


@dataclass(frozen=True)
class Layout:
    """How the callable wants its arrays, where that is not (batch, [heads,] len, dim)."""

    note: str = ""
    to_user: Callable[[Array], Array] = _unchanged
    from_user: Callable[[Array], Array] = _unchanged


AS_IS = Layout()


def _swap(note: str, first: int, second: int, axes: int) -> Layout:
    """Arrays with two axes swapped; a result with fewer axes stays as it is."""
    def exchange(x: Array) -> Array:
        return np.swapaxes(x, first, second) if x.ndim == axes else x
    return Layout(note, exchange, exchange)


HEADS_THIRD = _swap("takes (batch, len, heads, head_dim); here heads come before len", -2, -3, 4)
LEN_FIRST = _swap("takes (len, batch, d_model); here the batch comes first", 0, 1, 3)
FEATURES_FIRST = {axes: _swap("takes (dim, len), a position a column; here it is a row", -1, -2,
                              axes) for axes in (2, 3, 4)}
ONE_SEQUENCE = Layout("", lambda x: x[0], lambda x: x[None])
ONE_ITEM = Layout("takes a batch of one sequence only")


Constant: TypeAlias = Mapping[str, Callable[[Inputs], object]]  # {required option: its value}


@dataclass(eq=False)
class Subject:
    """A callable with its signature, its Model, and the shapes of its inputs.

    shapes(query_len, key_len, value_dim) are those of query, key and value as the model takes
    them. what: words for where it was tested, like "2-D input". transposed, arranged: how the
    matrices of a layer are read. sizes, inputs, returned: of the plain call, once it ran.
    """

    function: Tested
    signature: Signature
    model: Model
    shapes: Callable[[int, int, int], tuple[Shape, Shape, Shape]]
    layout: Layout = AS_IS
    what: str = ""
    arrays: list[Array] = field(default_factory=list)  # weights, which a call must not change
    transposed: bool = False
    arranged: str = "thirds"
    twin: "Callable[[], Subject | None] | None" = None  # gives the same with another head_dim
    sizes: Sizes = field(init=False)
    inputs: Inputs = field(init=False)
    returned: "Returned" = field(init=False)
    failure: str = ""  # of sizes tried before
    faults: list[str] = field(default_factory=list)  # found on the way, whatever is tested
    seconds: float = float("inf")  # of the fastest call
    constant: Constant = field(default_factory=dict)

    def random_inputs(self, sizes: Sizes, seed: int = 3) -> list[Array]:
        """Query, key, value; one array for those that the callable takes together."""
        generator = np.random.default_rng(seed)
        arrays = [generator.normal(size=shape) for shape in self.shapes(*sizes)]
        taken = len(self.signature.roles)
        return arrays if taken == 3 else [arrays[0], arrays[1], arrays[1]] if taken == 2 else \
            [arrays[0]] * 3

    def call(self, inputs: Inputs, **options: object) -> list[Array]:
        """Whatever it returned, as a list of float64 arrays laid out as the model's."""
        return self.called(inputs, **options).arrays

    def called(self, inputs: Inputs, **options: object) -> "Returned":
        arrays = [np.ascontiguousarray(self.layout.to_user(inputs[role])).copy()
                  for role in self.signature.roles]
        before = [array.copy() for array in arrays]
        given = {**self.signature.given,
                 **{name: value(inputs) for name, value in self.constant.items()}, **options}
        kept = {name: value.copy() for name, value in given.items()
                if isinstance(value, np.ndarray)}
        held = [array.copy() for array in self.arrays]
        started = time.perf_counter()
        try:
            result = self.function(*self._arguments(arrays, given), **given)
        except (Exception, SystemExit) as error:
            raise CannotTestError(_told(error, arrays, options)) from None
        self.seconds = min(self.seconds, time.perf_counter() - started)
        if any(not np.array_equal(a, b) for a, b in zip(arrays, before)):
            self._fault("changes its inputs: work on a copy")
        for name, value in kept.items():
            if not np.array_equal(given[name], value, equal_nan=value.dtype.kind == "f"):
                self._fault(f"changes its argument {name}: work on a copy")
        for array, value in zip(self.arrays, held):
            if not np.array_equal(array, value):
                self._fault("changes its own weights when it is called")
                array[...] = value
        return Returned(result, self.layout)

    def _arguments(self, arrays: list[Array], given: dict[str, Any]) -> list[Array]:
        """Positional arguments; those that are known by name go into `given`."""
        positional = []
        for name, array in zip(self.signature.inputs, arrays):
            if name is None:
                positional.append(array)
            else:
                given[name] = array
        return positional

    def _fault(self, words: str) -> None:
        if words not in self.faults:
            self.faults.append(words)

    def expected(self, inputs: Inputs, mistakes: Mistakes | None = None,
                 visible: Array | None = None) -> tuple[Array, Array]:
        return self.model.run(inputs, mistakes, visible)

    def mine(self, inputs: Inputs, shape: Shape, **options: object) -> Array | None:
        """The first returned array of this shape, or None."""
        return of_shape(self.call(inputs, **options), shape)


class Returned:
    """What a callable returned: `arrays`, and the words for it where they are unusual."""

    def __init__(self, result: object, layout: Layout) -> None:
        if isinstance(result, dict):
            result = list(result.values())
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if isinstance(result, list) and results and not hasattr(results[0], "shape"):
            results = [result]  # nested lists of numbers
        try:
            raw = [np.asarray(_numpy(array)) for array in results if array is not None]
            self.dtypes = [array.dtype for array in raw]
            self.shapes = [array.shape for array in raw]
            if any(array.dtype.kind == "c" for array in raw):
                raise TypeError
            self.arrays = [layout.from_user(array.astype(float)) for array in raw]
        except (Exception, SystemExit):
            name = type(results[0] if len(results) == 1 else result).__name__
            raise CannotTestError(f"returns {name}, wanted NumPy arrays of numbers") from None


def _numpy(array: object) -> object:
    """Arrays of other libraries, too."""
    for name in ("detach", "numpy"):
        method = getattr(array, name, None)
        if callable(method) and not isinstance(array, np.ndarray):
            array = method()
    return array


def _told(error: BaseException, arrays: Sequence[Array], options: Mapping[str, object]) -> str:
    shapes = ", ".join(str(array.shape) for array in arrays)
    with_options = "".join(
        f", {name} {value.shape} of {value.dtype}" if isinstance(value, np.ndarray)
        else f", {name}={value}" for name, value in options.items() if value is not None)
    try:
        message = str(error)
    except Exception:
        message = "(an error without words)"
    return f"raised {type(error).__name__}: {message} (called with shapes {shapes}{with_options})"


def seen_pairs(subject: Subject, inputs: Inputs, options: Mapping[str, object]) -> Array | None:
    """Which key reaches which query, (query_len, key_len), found by changing one key's input at a
    time; where the queries come with it, a query always reaches itself. None if shapes differ."""
    taken = len(subject.signature.roles)
    before = subject.call(inputs, **options)[0]
    query_len, key_len = inputs[0].shape[-2], inputs[1].shape[-2]
    if before.ndim < 2 or before.shape[-2] != query_len:
        return None
    seen = np.zeros((query_len, key_len), bool)
    for index in range(key_len):
        changed = list(inputs)
        which = {1: 0, 2: 1, 3: 2}[taken]
        changed[which] = inputs[which].copy()
        changed[which][..., index, :] += 1 + np.arange(inputs[which].shape[-1]) % 3
        if taken < 3:
            changed = [changed[0], changed[which], changed[which]]
        after = subject.call(changed, **options)[0]
        with np.errstate(all="ignore"):
            difference = np.abs(after - before)
        moved = difference > 1e-9 * np.nanmax(np.abs(before))
        seen[:, index] = moved.any(axis=-1).reshape(-1, query_len).any(axis=0)
        if taken == 1:
            seen[index, index] = True
    return seen


def of_shape(arrays: Iterable[Array], shape: Shape) -> Array | None:
    return next((array for array in arrays if array.shape == shape), None)


def same(mine: Array, expected: Array, tolerance: float = TOLERANCE,
         without_rows: Array | None = None) -> bool:
    """As `equal`, but what is not finite has to be so in the same places, in the same way."""
    finite = np.isfinite(mine)
    if mine.shape != expected.shape or finite.all():
        return equal(mine, expected, tolerance, without_rows)
    if without_rows is not None and without_rows.any() and mine.ndim >= 2 \
            and mine.shape[-2] == len(without_rows):
        mine, expected = mine[..., ~without_rows, :], expected[..., ~without_rows, :]
        finite = np.isfinite(mine)
    return bool(finite.any()) and np.array_equal(
        mine[~finite], expected[~finite], equal_nan=True) and equal(
        mine[finite], expected[finite], tolerance)


def equal(mine: Array | None, expected: Array, tolerance: float = TOLERANCE,
          without_rows: Array | None = None) -> bool:
    """Whether they agree; without_rows: queries, along axis -2, that are not compared. What is not
    finite agrees with nothing: any difference is small beside infinity."""
    if mine is None or mine.shape != expected.shape:
        return False
    if without_rows is not None and without_rows.any() and mine.ndim >= 2 \
            and mine.shape[-2] == len(without_rows):
        mine, expected = mine[..., ~without_rows, :], expected[..., ~without_rows, :]
    if not mine.size:
        return without_rows is None
    with np.errstate(all="ignore"):
        bound = tolerance * np.max(np.abs(expected))
        return bool(np.max(np.abs(mine - expected)) <= bound < np.inf)
