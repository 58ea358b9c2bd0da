"""The ways in which a callable may want its arrays and may hold its weights: a Subject for each."""

import copy
import functools

from mha.diagnosis.compare import HEAD_DIM, HEADS
from mha.diagnosis.model import Model
from mha.diagnosis.signature import (
    CannotTestError,
    construct,
    parameters_of,
    plain,
    says_heads,
    signature,
    size_named,
)
from mha.diagnosis.subject import (
    AS_IS,
    BATCH,
    FEATURES_FIRST,
    HEADS_THIRD,
    LEN_FIRST,
    ONE_SEQUENCE,
    Subject,
)
from mha.diagnosis.weights import DICTS, Opened, called_as, has_no_weights, opened

TWIN = (2, 12)  # heads and head_dim of the second trial


def function_subjects(function, heads=HEADS, head_dim=HEAD_DIM):
    """Subjects of a function of heads: for each number of axes, as it is and in other layouts."""
    called = signature(function)
    for axes, layouts in (((BATCH, heads), (AS_IS, HEADS_THIRD)), ((BATCH,), (AS_IS,)),
                          ((), (AS_IS,))):
        rank = len(axes) + 2
        for layout in (*layouts, FEATURES_FIRST[rank]):
            subject = Subject(
                function, called, Model(False, heads, heads, one_input=len(called.roles) < 3),
                functools.partial(_head_shapes, axes, head_dim), layout, f"{rank}-D input")
            if (heads, head_dim) != TWIN:
                subject.twin = _once(subject, functools.partial(
                    _twin_of_function, function, rank, layout))
            yield rank, subject


def _head_shapes(axes, head_dim, query_len, key_len, value_dim):
    value_dim = head_dim if value_dim == HEAD_DIM else value_dim
    return ((*axes, query_len, head_dim), (*axes, key_len, head_dim), (*axes, key_len, value_dim))


def _twin_of_function(function, rank, layout):
    return next(subject for other, subject in function_subjects(function, *TWIN)
                if other == rank and subject.layout is layout)


def layer_subjects(make, fill=True, heads=HEADS, head_dim=HEAD_DIM, twin=None):
    """(Subject, Opened) of a layer: a batch or one sequence, matrices either way round.

    make(heads, head_dim, fill) gives the Opened; fill: whether its weights get other numbers, which
    shows more, but not where the layer keeps copies of them. twin: a make that heeds heads and
    head_dim, or None.
    """
    layer = make(heads, head_dim, fill)
    called = signature(layer.function, layer.taken)
    for arranged in ("thirds", "heads", "turns") if layer.fused else ("thirds",):
        for transposed in layer.orientations:
            for layout in (AS_IS, ONE_SEQUENCE, LEN_FIRST):
                subject = _layer_subject(layer, called, transposed, arranged, layout)
                if subject is not None:
                    if twin:
                        subject.twin = _once(subject, functools.partial(
                            _twin_of_layer, twin, transposed, arranged, layout, fill))
                    yield subject, layer


def _layer_subject(layer, called, transposed, arranged, layout):
    try:
        matrices = layer.matrices(transposed, arranged)
    except ValueError:
        return None
    one = len(called.roles) < 3
    width = [matrices[name].shape[0] if name in matrices else layer.width
             for name in ("W_q", "W_k", "W_v")]
    if one:
        width = [width[0], width[0] if len(called.roles) == 1 else width[1], width[1]]
    batch = 1 if layout is ONE_SEQUENCE else BATCH
    subject = Subject(layer.function, called,
                      Model(True, layer.heads, layer.kv_heads, matrices, one_input=one),
                      functools.partial(_layer_shapes, batch, width), layout, arrays=layer.arrays)
    subject.transposed, subject.arranged = transposed, arranged
    return subject


def _layer_shapes(batch, width, query_len, key_len, _):
    return ((batch, query_len, width[0]), (batch, key_len, width[1]), (batch, key_len, width[2]))


def _twin_of_layer(make, transposed, arranged, layout, fill):
    layer = make(*TWIN, fill)
    return _layer_subject(layer, signature(layer.function, layer.taken), transposed, arranged,
                          layout)


def _once(subject, make):
    """A function that gives the twin after its plain call, or None; made when first wanted."""
    made = []

    def twin():
        if not made:
            made.append(None)
            try:
                other = make()
                if other is not None:
                    other.constant = subject.constant
                    other.inputs = other.random_inputs(tuple(
                        {3: 4, 5: 6, 7: 9, HEAD_DIM: 10}[n] for n in subject.sizes[:2])
                        + subject.sizes[2:])
                    other.returned = other.called(other.inputs)
                    made[0] = other
            except (CannotTestError, StopIteration):
                pass
        return made[0]
    return twin


def of_class(layer_class, kv_heads=None, **options):
    """make() of `layer_subjects` for a class."""
    def make(heads, head_dim, fill):
        layer = construct(layer_class, heads, head_dim, kv_heads, **options)
        return opened(layer, heads, head_dim, fill, heads if says_heads(layer_class) else None)
    return make


def of_instance(layer):
    """make() for an instance: copies of it."""
    def make(heads, head_dim, fill):
        return opened(copied(layer), heads, head_dim, fill)
    return make


def of_function(function):
    """make() for a function that takes its weights."""
    def make(heads, head_dim, _):
        return opened(function, heads, head_dim)
    return make


def alone(thing):
    """The function that a class or an instance without weights is, or None."""
    layer = construct(thing, HEADS, HEAD_DIM) if isinstance(thing, type) else thing
    return called_as(copied(layer)) if has_no_weights(layer) else None


def copied(layer):
    try:
        return copy.deepcopy(layer)
    except Exception as error:
        raise CannotTestError(f"cannot copy this {type(layer).__name__}: {type(error).__name__}:"
                              f" {error}; diagnose its class") from None


def splits_heads(function):
    """Whether a function without weights is told a number of heads."""
    return any(size_named(name) == "num_heads" for name in parameters_of(function))


def without_weights(function):
    """make() for a function that splits heads, but projects nothing."""
    def make(heads, head_dim, _):
        names = [name for name in parameters_of(function) if size_named(name) == "num_heads"]
        return Opened(functools.partial(function, **{names[0]: heads}), {}, heads, heads, (False,),
                      taken=(names[0],), width=heads * head_dim)
    return make


def takes_a_dict(function):
    """Whether a function takes its weights by name in one argument."""
    return any(plain(name) in DICTS and parameter.default is parameter.empty
               for name, parameter in parameters_of(function).items())
