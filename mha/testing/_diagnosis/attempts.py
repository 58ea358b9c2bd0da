"""The ways in which a callable may want its arrays and may hold its weights: a Subject for each."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, cast

from mha.testing._diagnosis import torch_modules
from mha.testing._diagnosis.aliases import Shape, Tested, TestedClass
from mha.testing._diagnosis.compare import HEAD_DIM, HEADS
from mha.testing._diagnosis.model import Model
from mha.testing._diagnosis.signature import (
    CannotTestError,
    construct,
    parameters_of,
    plain,
    signature,
    size_named,
    takes_size,
)
from mha.testing._diagnosis.subject import (
    AS_IS,
    BATCH,
    FEATURES_FIRST,
    HEADS_THIRD,
    LEN_FIRST,
    ONE_ITEM,
    ONE_SEQUENCE,
    Layout,
    Subject,
)
from mha.testing._diagnosis.weights import DICTS, Opened, called_as, has_no_weights, opened

Layer = TypeVar("Layer")
TWIN = (2, 12)  # heads and head_dim of the second trial


class Make(Protocol):
    """Makes the tested layer, taken apart; fill: whether its weights get other numbers."""

    def __call__(self, heads: int, head_dim: int, fill: bool, /) -> Opened: ...


def function_subjects(function: Tested, heads: int = HEADS,
                      head_dim: int = HEAD_DIM) -> Iterator[tuple[int, Subject]]:
    """Subjects of a function of heads: for each number of axes, as it is and in other layouts."""
    called = signature(function)
    forms: tuple[tuple[Shape, tuple[Layout, ...]], ...] = (
        ((BATCH, heads), (AS_IS, HEADS_THIRD)), ((BATCH,), (AS_IS,)), ((), (AS_IS,)))
    for axes, layouts in forms:
        rank = len(axes) + 2
        for layout in (*layouts, FEATURES_FIRST[rank]):
            subject = Subject(
                function, called, Model(False, heads, heads, one_input=len(called.roles) < 3),
                functools.partial(_head_shapes, axes, head_dim), layout, f"{rank}-D input")
            if (heads, head_dim) != TWIN:
                subject.twin = _once(subject, functools.partial(
                    _twin_of_function, function, rank, layout))
            yield rank, subject


def _head_shapes(axes: Shape, head_dim: int, query_len: int, key_len: int,
                 value_dim: int) -> tuple[Shape, Shape, Shape]:
    value_dim = head_dim if value_dim == HEAD_DIM else value_dim
    return ((*axes, query_len, head_dim), (*axes, key_len, head_dim), (*axes, key_len, value_dim))


def _twin_of_function(function: Tested, rank: int, layout: Layout) -> Subject:
    return next(subject for other, subject in function_subjects(function, *TWIN)
                if other == rank and subject.layout is layout)


def layer_subjects(make: Make, fill: bool = True, heads: int = HEADS, head_dim: int = HEAD_DIM,
                   twin: Make | None = None, layouts: Sequence[Layout] = (
                       AS_IS, ONE_SEQUENCE, LEN_FIRST)) -> Iterator[tuple[Subject, Opened]]:
    """(Subject, Opened) of a layer: a batch or one sequence, matrices either way round.

    make(heads, head_dim, fill) gives the Opened; fill: whether its weights get other numbers, which
    shows more, but not where the layer keeps copies of them. twin: a make that heeds heads and
    head_dim, or None.
    """
    layer = make(heads, head_dim, fill)
    for alone, arranged, transposed, layout in itertools.product(
            (False, True) if signature(layer.function, layer.taken).second else (False,),
            ("thirds", "heads", "turns") if layer.fused else ("thirds",), layer.orientations,
            layouts):
        subject = _layer_subject(layer, alone, transposed, arranged, layout)
        if subject is not None:
            if twin:
                subject.twin = _once(subject, functools.partial(
                    _twin_of_layer, twin, alone, transposed, arranged, layout, fill))
            yield subject, layer


def _layer_subject(layer: Opened, alone: bool, transposed: bool, arranged: str,
                   layout: Layout) -> Subject | None:
    """alone: without the second input, which has a default."""
    called = signature(layer.function, layer.taken)
    called = called.alone() if alone else called
    try:
        matrices = layer.matrices(transposed, arranged)
    except ValueError:
        return None
    one = len(called.roles) < 3
    width = [matrices[name].shape[0] if name in matrices else layer.width
             for name in ("W_q", "W_k", "W_v")]
    if one:
        width = [width[0], width[0] if len(called.roles) == 1 else width[1], width[1]]
    batch = 1 if layout in (ONE_SEQUENCE, ONE_ITEM) else BATCH
    return Subject(layer.function, called,
                   Model(True, layer.heads, layer.kv_heads, matrices, one_input=one),
                   functools.partial(_layer_shapes, batch, width), layout,
                   arrays=layer.arrays, transposed=transposed, arranged=arranged)


def _layer_shapes(batch: int, width: Sequence[int], query_len: int, key_len: int,
                  _: int) -> tuple[Shape, Shape, Shape]:
    return ((batch, query_len, width[0]), (batch, key_len, width[1]), (batch, key_len, width[2]))


def _twin_of_layer(make: Make, alone: bool, transposed: bool, arranged: str, layout: Layout,
                   fill: bool) -> Subject | None:
    return _layer_subject(make(*TWIN, fill), alone, transposed, arranged, layout)


def _once(subject: Subject, make: Callable[[], Subject | None]) -> Callable[[], Subject | None]:
    """A function that gives the twin after its plain call, or None; made when first wanted."""
    made: list[Subject | None] = []

    def twin() -> Subject | None:
        if not made:
            made.append(None)
            try:
                other = make()
                if other is not None:
                    other.constant = subject.constant
                    query_len, key_len = ({3: 4, 5: 6, 7: 9, HEAD_DIM: 10}[n]
                                          for n in subject.sizes[:2])
                    other.inputs = other.random_inputs((query_len, key_len, subject.sizes[2]))
                    other.returned = other.called(other.inputs)
                    made[0] = other
            except (CannotTestError, StopIteration):
                pass
        return made[0]
    return twin


def of_class(layer_class: TestedClass, kv_heads: int | None = None, **options: object) -> Make:
    """make() of `layer_subjects` for a class."""
    def make(heads: int, head_dim: int, fill: bool) -> Opened:
        layer = construct(layer_class, heads, head_dim, kv_heads, **options)
        return opened(layer, heads, head_dim, fill, heads if
                      takes_size(layer_class, "num_heads", "config") else None)
    return make


def of_instance(layer: object) -> Make:
    """make() for an instance: copies of it."""
    def make(heads: int, head_dim: int, fill: bool) -> Opened:
        return opened(copied(layer), heads, head_dim, fill)
    return make


def of_function(function: Tested) -> Make:
    """make() for a function that takes its weights."""
    def make(heads: int, head_dim: int, _: bool) -> Opened:
        return opened(function, heads, head_dim)
    return make


def alone(thing: object) -> Tested | None:
    """The function that a class or an instance without weights is, or None."""
    layer = construct(thing, HEADS, HEAD_DIM) if isinstance(thing, type) else thing
    return called_as(copied(layer)) if has_no_weights(layer) else None


def copied(layer: Layer) -> Layer:
    try:
        return cast(Layer, torch_modules.copied(layer))
    except Exception as error:
        raise CannotTestError(f"cannot copy this {type(layer).__name__}: {type(error).__name__}:"
                              f" {error}; diagnose its class") from None


def without_weights(function: Tested) -> Make:
    """make() for a function that splits heads, but projects nothing."""
    def make(heads: int, head_dim: int, _: bool) -> Opened:
        names = [name for name in parameters_of(function) if size_named(name) == "num_heads"]
        return Opened(functools.partial(function, **{names[0]: heads}), {}, heads, heads, (False,),
                      taken=(names[0],), width=heads * head_dim)
    return make


def takes_a_dict(function: Tested) -> bool:
    """Whether a function takes its weights by name in one argument."""
    return any(plain(name) in DICTS and parameter.default is parameter.empty
               for name, parameter in parameters_of(function).items())
