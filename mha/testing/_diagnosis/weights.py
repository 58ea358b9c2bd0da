"""Where a layer that someone else wrote keeps its weights, found by their names."""

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, TypeAlias

import numpy as np

from mha.testing._diagnosis import torch_modules
from mha.testing._diagnosis.aliases import Array, Shape, Tested
from mha.testing._diagnosis.signature import (
    CannotTestError,
    is_function,
    matrix_named,
    parameters_of,
    plain,
    size_named,
    takes_size,
    weight_parameters,
)

CALLED = ("__call__", "forward", "call", "apply", "attend", "attention", "compute", "run",
          "compute_attention", "multi_head_attention", "predict")
_OF_LINEAR = ("weight", "weights", "W", "w", "kernel", "matrix")
DICTS = ("params", "parameters", "weights", "theta", "w", "p")  # of functions: weights by name
_BIAS_OF_LINEAR = ("bias", "b", "biases")

Held: TypeAlias = "tuple[Path, Array, bool]"  # and whether a matrix is known to be (in, out)
Path: TypeAlias = tuple[str | int, ...]  # names of attributes and indices of lists
Found: TypeAlias = dict[str, list[Array]]  # {W_q or b_q ...: [one array, or one a head]}


@dataclass(eq=False)
class Opened:
    """A layer taken apart: how it is called, its weights by name, as they are stored.

    orientations: whether the matrices may be (in, out), False, or (out, in), True; of the settled
    ones it is known that they are (in, out). unread: names of what was taken for no weight.
    """

    function: Tested
    stored: dict[str, Array]
    heads: int
    kv_heads: int
    orientations: tuple[bool, ...] = (False, True)
    taken: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    width: int = 0  # of the inputs, where no matrix tells

    def matrices(self, transposed: bool, arranged: str = "thirds") -> dict[str, Array]:
        """W_q, W_k, W_v, W_o as (in, out), and the biases that there are."""
        found: dict[str, Array] = {}
        for name, array in self.stored.items():
            array = np.asarray(array, float)
            if name[:2] != "b_" and array.ndim == 2 and transposed and name not in self.settled:
                array = array.T
            if name in ("qkv", "kv", "b_qkv", "b_kv"):
                letters = name.removeprefix("b_")
                kind = "b_" if name[:2] == "b_" else "W_"
                for letter, part in zip(letters, _parts(array, len(letters), arranged, self.heads)):
                    found.setdefault(kind + letter, part)
            else:
                found[name] = array
        return found

    @property
    def fused(self) -> bool:
        return "qkv" in self.stored


def _parts(array: Array, count: int, arranged: str, heads: int) -> list[Array]:
    """The matrices that stand side by side in a fused one, (in, count * out)."""
    if arranged == "thirds":
        return np.split(array, count, axis=-1)
    if arranged == "heads":  # each head has its query, key and value side by side
        by_head = array.reshape(*array.shape[:-1], heads, count, -1)
        return [by_head[..., part, :].reshape(*array.shape[:-1], -1) for part in range(count)]
    return [array[..., part::count] for part in range(count)]  # one column of each in turn


def called_as(layer: object) -> Tested:
    """The method that computes attention, as a function of arrays; dropout is switched off."""
    method = _method_of(layer)
    modules = torch_modules.modules_of(layer)
    for part in [layer, *modules]:
        if callable(switch := _quietly(getattr, part, "eval")):
            _quietly(switch)
    return torch_modules.with_tensors(method, modules) if modules else method


def _method_of(layer: object) -> Tested:
    for name in CALLED:
        method = _quietly(getattr, layer, name)
        named = {p.kind for p in parameters_of(method).values()} if callable(method) else set()
        if callable(method) and (name != "__call__" or len(named - {2, 4}) or not callable(
                _quietly(getattr, layer, "forward"))):  # forward tells more than *args
            return method
    raise CannotTestError(f"cannot test {type(layer).__name__}: it has no __call__ or forward")


def opened(layer: object, heads: int, head_dim: int, fill: bool = True,
           told_heads: int | None = None) -> Opened:
    """A layer, or a function that takes its weights as arguments, taken apart.

    told_heads: the number of heads that it was constructed with, where it was.
    """
    if is_function(layer):  # its weights are drawn here
        return _opened_function(layer, heads, head_dim)
    if reason := torch_modules.unreadable(layer):
        raise CannotTestError(f"cannot test {type(layer).__name__}: {reason}")
    result = Opened(called_as(layer), {}, 1, 1)
    sizes = _sizes_of(layer)
    if _missing(_by_role(list(_arrays_in(layer)))) and _unset(layer):
        _call_once(result.function, width := sizes.get("d_model", heads * head_dim))
        for module in torch_modules.modules_of(layer):
            _quietly(torch_modules.give_shape, module, width)
    held = list(_arrays_in(layer))
    found = _by_role(held)
    if missing := _missing(found):
        _complain(layer, [*missing, *([] if "W_o" in found else ["W_o"])])
    matrix = np.asarray(found["qkv" if "qkv" in found else "W_q"][0])
    a_head_each = len(found["W_q"]) if len(found.get("W_q", ())) > 1 else (
        matrix.shape[0] if matrix.ndim == 3 else None)
    _note_shared(found, result.problems)
    result.arrays = [array for arrays in found.values() for array in arrays]
    read = {id(array) for array in result.arrays}
    result.unread = [".".join(map(str, path)) for path, array, _ in held if id(array) not in read]
    result.settled = {name for name, arrays in found.items() if all(
        known for _, other, known in held for array in arrays if array is other)}
    if fill:
        _fill(found)
    result.stored = {name: _joined(name, arrays) for name, arrays in found.items()}
    result.orientations = _orientations(result.stored, sizes.get("d_model"), result.settled)
    columns = _columns(result.stored, result.orientations[0])
    result.heads = a_head_each or sizes.get("num_heads") or told_heads or (
        columns // sizes["head_dim"] if sizes.get("head_dim") else 1)
    result.kv_heads = sizes.get("num_kv_heads") or result.heads
    return result


def _missing(found: Found) -> list[str]:
    return [name for name in ("W_q", "W_k", "W_v") if name not in found
            and not ("qkv" in found or ("kv" in found and name != "W_q"))]


def _unset(layer: object) -> list[str]:
    """Names of weights that hold nothing yet, or objects that do not show any."""
    if torch_modules.is_module(layer):
        return torch_modules.unset(layer)
    return [name for name, held in getattr(layer, "__dict__", {}).items() if matrix_named(name)
            and not isinstance(held, np.ndarray)]


def _call_once(function: Tested, width: int) -> None:
    """Layers that make their weights when first called make them."""
    required = sum(p.default is p.empty for p in parameters_of(function).values())
    for shape in ((2, 5, width), (5, width)):
        for count in (3, 1):
            _quietly(function, *[np.ones(shape)] * count, *[None] * (required - count))


def has_no_weights(layer: object) -> bool:
    """Whether a layer is attention alone: nothing to project with, no heads to split into."""
    return not _by_role(list(_arrays_in(layer))) and "num_heads" not in _sizes_of(layer) \
        and not _unset(layer) and not torch_modules.has_matrices(layer)


def _opened_function(function: Tested, heads: int, head_dim: int) -> Opened:
    generator, width = np.random.default_rng(0), heads * head_dim
    parameters, roles = parameters_of(function), weight_parameters(function)
    if not takes_size(function, "num_heads"):
        heads = 1  # nothing says how many
    given: dict[str, Any] = {}
    stored: dict[str, Array] = {}
    for name, role in roles.items():
        letters = role[2:] if role[1] == "_" else role
        parts = [_random(generator, (width,) if role[0] == "b" else (width, width))
                 for _ in range(len(letters))]
        stored[role] = given[name] = np.concatenate(parts, axis=-1)
    for name, parameter in parameters.items():
        size = size_named(name)
        value = {"num_heads": heads, "d_model": width, "head_dim": width // heads}.get(size or "")
        if name not in given and value is not None and (
                parameter.default is parameter.empty or size == "num_heads"):
            given[name] = value
        elif plain(name) in DICTS and \
                parameter.default is parameter.empty:
            given[name] = _GivenByName(generator, width, stored)
    bound = functools.partial(function, **given)
    if any(isinstance(value, _GivenByName) for value in given.values()):
        _call_once(bound, width)
    return Opened(bound, stored, heads, heads, (False,), taken=tuple(given), width=width)


class _GivenByName(dict[str, Any]):
    """A dict of weights that makes whatever is asked for by a usual name."""

    def __init__(self, generator: np.random.Generator, width: int,
                 stored: dict[str, Array]) -> None:
        super().__init__()
        self.generator, self.width, self.stored = generator, width, stored

    def __missing__(self, name: str) -> Any:
        role = matrix_named(name)
        if role is None:
            if size_named(name) == "d_model":
                return self.width
            raise KeyError(name)
        letters = role[2:] if role[1] == "_" else role
        shape = (self.width,) if role[0] == "b" else (self.width, self.width)
        if role not in self.stored:
            self.stored[role] = np.concatenate(
                [_random(self.generator, shape) for _ in letters], axis=-1)
        self[name] = self.stored[role]
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def _random(generator: np.random.Generator, shape: Shape) -> Array:
    return generator.normal(size=shape) / (shape[0] ** 0.5 if len(shape) == 2 else 1)


def _quietly(function: Callable[..., Any], *arguments: object) -> object:
    """What it returns; None where it raises."""
    try:
        return function(*arguments)
    except (Exception, SystemExit):
        return None


def attributes(thing: object) -> list[tuple[str | int, object]]:
    """The names and values of what an object or dict holds; what raises is left out."""
    if isinstance(thing, dict):
        return list(thing.items())
    if torch_modules.is_module(thing):
        return torch_modules.attributes(thing)
    names = list(getattr(thing, "__dict__", {}))
    names += [name for name in dir(type(thing)) if name not in names and not name.startswith("__")
              and not callable(_quietly(getattr, type(thing), name))]
    held: list[tuple[str | int, object]] = [
        (name, _quietly(getattr, thing, name)) for name in names]
    return [(name, value) for name, value in held if value is not None]


def _arrays_in(thing: object, path: Path = (),
               above: tuple[object, ...] = ()) -> Iterator[Held]:
    """Every array of floats inside an object, its dicts, lists, layers and modules, and where."""
    if len(above) > 4 or any(thing is other for other in above):
        return
    for name, held in attributes(thing):
        yield from _arrays_at(held, (*path, name), (*above, thing))


def _arrays_at(held: object, path: Path,
               above: tuple[object, ...]) -> Iterator[Held]:
    known = None
    if torch_modules.is_tensor(held):
        held = torch_modules.array_of(held)
        if held is not None and torch_modules.is_module(above[-1]):
            known = torch_modules.in_out(above[-1], path[-1], held)
    if isinstance(held, np.ndarray):
        if held.dtype.kind == "f" and held.ndim in (1, 2, 3) and held.size:
            yield path, held if known is None else known, known is not None
    elif isinstance(held, (list, tuple)):
        for index, part in enumerate(held[:64]):
            yield from _arrays_at(part, (*path, index), above)
    elif _is_part(held):
        yield from _arrays_in(held, path, above)


def _by_role(arrays: Sequence[Held]) -> Found:
    found: Found = {}
    ranks: dict[str, int] = {}
    places: dict[str, list[str]] = {}  # where the first array of a list is
    by_head = {array.shape[::2] for _, array, _ in arrays if array.ndim == 3}
    for path, array, _ in arrays:
        role, rank = _role_of(path, array)
        if role is None or ((role[:2] == "b_") != (array.ndim == 1) and not (
                role[:2] == "b_" and array.ndim == 2 and (
                    1 in array.shape or array.shape in by_head))):
            continue
        if rank > ranks.get(role, -1):
            found[role], ranks[role] = [array], rank
            places[role] = [part for part in path if isinstance(part, str)]
        elif len(places[role]) < len(path) and places[role] == [
                part for part in path if isinstance(part, str)]:
            found[role].append(array)
    if not {"W_q", "W_k", "W_v", "qkv"} & found.keys():
        found = _in_order(arrays) or found
    return found


def _in_order(arrays: Sequence[Held]) -> Found:
    """Three or four square matrices without telling names, and the biases beside them: query, key,
    value, output."""
    matrices = [(path, array) for path, array, _ in arrays if array.ndim == 2]
    shapes = {array.shape for _, array in matrices}
    if len(matrices) not in (3, 4) or len(shapes) > 1 or len(set(*shapes)) > 1:
        return {}
    found: Found = {}
    for letter, (path, matrix) in zip("qkvo", matrices):
        found[f"W_{letter}"] = [matrix]
        found |= {f"b_{letter}": [array] for other, array, _ in arrays if array.ndim == 1
                  and other[:-1] == path[:-1] and other[-1] in _BIAS_OF_LINEAR}
    return found


def _role_of(path: Path, array: Array) -> tuple[str | None, int]:
    """The role that the last telling part of a path names, and how sure that is."""
    names = [part for part in path if isinstance(part, str)]
    bias = False
    if names and len(names) > 1 and names[-1] in _OF_LINEAR + _BIAS_OF_LINEAR:
        bias = names.pop() in _BIAS_OF_LINEAR
    for depth, name in enumerate(reversed(names)):
        if plain(name) == "bias" or re.search(r"mask|tril|triu|grad|cache|pos|rope", plain(name)):
            return None, 0  # nanoGPT calls its triangle "bias"
        role = matrix_named(name)
        if role is not None:
            if bias and role[:2] != "b_":
                role = "b_" + role.removeprefix("W_")
            telling = len(plain(name)) > 1 or len(path) > len(names)
            return role, 4 * telling + 2 * (array.ndim < 3) + (depth == 0)
    return None, 0


def _complain(layer: Any, missing: list[str]) -> Never:
    names = dict(attributes(layer))
    empty = [name for name in missing if name in map(matrix_named, _unset(layer))]
    if empty:
        raise CannotTestError(f"cannot test {type(layer).__name__}: {', '.join(empty)} hold no"
                              " numbers yet; call the layer once, and diagnose the instance")
    if torch_modules.is_module(layer):
        names = dict(layer.named_parameters())
    there = ", ".join(str(name) for name in list(names)[:12]) or "none"
    kind = "parameter" if torch_modules.is_module(layer) else "attribute"
    raise CannotTestError(
        f"cannot test {type(layer).__name__}: found no {kind} {', '.join(missing)} (W_q, q_proj,"
        f" query ..., or fused as c_attn, qkv); its {kind}s are {there}")


def _sizes_of(layer: object, above: tuple[object, ...] = ()) -> dict[str, int]:
    """The sizes that a layer's attributes name, its own before those of its parts."""
    sizes: dict[str, int] = {}
    parts = []
    for name, held in attributes(layer):
        if isinstance(held, (int, np.integer)) and not isinstance(held, bool):
            if held > 0 and (size := size_named(name)):
                sizes.setdefault(size, int(held))
        elif _is_part(held):
            parts.append(held)
    for part in parts if len(above) < 3 else ():
        if not any(part is other for other in above):
            for name, held in _sizes_of(part, (*above, layer)).items():
                sizes.setdefault(name, held)
    return sizes


def _is_part(held: object) -> bool:
    """Whether an attribute is an object of its own, or a dict, that may hold weights."""
    return isinstance(held, dict) or (
        hasattr(held, "__dict__") and not isinstance(
            held, (type, types.ModuleType, np.ndarray, np.random.Generator))
        and not is_function(held))


def _note_shared(found: Found, problems: list[str]) -> None:
    """Two roles with the same memory are one matrix, whatever its numbers."""
    names = [name for name in ("W_q", "W_k", "W_v", "W_o") if name in found]
    for first in names:
        same = [second for second in names if any(
            a.shape == b.shape and a.ctypes.data == b.ctypes.data and np.shares_memory(a, b)
            for a, b in zip(found[first], found[second]))]
        if len(same) > 1:
            problems.append(f"{', '.join(same[:-1])} and {same[-1]} are the same array: each needs"
                            " numbers of its own (copy it, or draw it again)")
            break
    for name in names:
        for index, array in enumerate(found[name]):
            if any(np.shares_memory(array, other) for other in found[name][:index]):
                problems.append(f"heads share the first head's weights: {name} is one array for"
                                " several heads, each needs its own")
                break


def _fill(found: Found) -> None:
    """Numbers large enough to tell mistakes apart, in the place of what the layer starts with."""
    generator = np.random.default_rng(1)
    for name in sorted(found):
        for array in found[name]:
            if array.flags.writeable:
                scale = 1 if name[:2] == "b_" else array.shape[-2] ** -0.5
                array[...] = generator.normal(size=array.shape) * scale


def _joined(name: str, arrays: list[Array]) -> Array:
    """One matrix of what is held a head: side by side, for W_o one below the other."""
    parts = [np.asarray(array, float) for array in arrays]
    if parts[0].ndim == 3:
        parts = list(parts[0])
    if name[:2] == "b_":
        return np.concatenate([part.reshape(-1) for part in parts])
    return np.concatenate(parts, axis=0 if name == "W_o" else -1) if len(parts) > 1 else parts[0]


def _columns(stored: Mapping[str, Array], transposed: bool) -> int:
    matrix = stored["W_q" if "W_q" in stored else "qkv"]
    return matrix.shape[0 if transposed else 1] // (1 if "W_q" in stored else 3)


def _orientations(stored: Mapping[str, Array], width: int | None,
                  settled: set[str]) -> tuple[bool, ...]:
    """Which way round the others can be than the settled: (in, out), False, or (out, in), True."""
    if all(name in settled or array.ndim != 2 for name, array in stored.items()):
        return (False,)
    fused = "W_q" not in stored
    if ("qkv" if fused else "W_q") in settled:
        return False, True
    rows, columns = stored["qkv" if fused else "W_q"].shape
    if rows == columns or not (fused or width in (rows, columns)):
        return False, True
    if fused:
        return (rows == 3 * columns,)
    return (width == columns,)
