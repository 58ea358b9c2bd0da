"""A layer fits together, whatever is assigned to it, unpickled, or done to it in another thread."""

import copy
import pickle
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from interrupts import at_every, interrupts_of

import mha

SETTINGS = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "query_dim",
            "key_dim", "value_dim", "output_dim", "use_bias", "dtype",
            "scale", "softcap", "window", "alibi")
X = np.random.default_rng(0).standard_normal((2, 5, 24)).astype(np.float32)


def random_layer(**options):
    layer = mha.MultiHeadAttention(24, 4, rng=0, **options)
    rng = np.random.default_rng(1)
    for name in ("b_q", "b_k", "b_v", "b_o"):
        setattr(layer, name, rng.standard_normal(24))
    return layer


LAYER = random_layer()
PRUNED = copy.copy(LAYER).prune_heads([0, 2])


def test_parameters_stay():
    layer = random_layer()
    with pytest.raises(AttributeError, match="W_q: got deleted, wanted an array in its place"):
        del layer.W_q
    assert layer(X).shape == X.shape


@pytest.mark.parametrize("shared", [False, True])
def test_an_interrupt_loads_all_parameters_or_none(shared):
    def fresh():
        layer = random_layer()
        if shared:
            layer.W_k = layer.W_q  # so that the two get arrays of their own
        return layer

    new = {name: array + 1 for name, array in fresh().parameters().items()}
    old, loaded = fresh().parameters(), []
    for layer in interrupts_of(lambda layer: layer.load_parameters(new), fresh):
        has = [{name for name, array in layer.parameters().items()
                if np.array_equal(array, of[name])} for of in (old, new)]
        assert sorted(map(len, has)) == [0, len(new)]
        loaded.append(bool(has[1]))
    assert loaded == sorted(loaded) and set(loaded) == {False, True}


def test_parameters_whose_elements_share_memory_get_arrays_of_their_own():
    layer, numbers = random_layer(), np.arange(1000, dtype=np.float32)
    layer.W_q = np.lib.stride_tricks.as_strided(numbers, (24, 24), (32, 4))
    layer.W_k = np.lib.stride_tricks.as_strided(numbers.copy(), (24, 24), (-0, 4))
    layer.W_v = numbers[:576].copy().reshape(24, 24)[::-1].T  # no two at one place
    mine = layer.W_v
    new = {name: array + 1 for name, array in random_layer().parameters().items()}
    layer.load_parameters(new)
    for name, array in new.items():
        np.testing.assert_array_equal(getattr(layer, name), array)
    assert layer.W_v is mine and np.array_equal(numbers, np.arange(1000))


# Assignment.

@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_read_only(name, frozen):
    layer = random_layer()
    if frozen:
        layer.freeze()
    before, output = getattr(layer, name), layer(X)
    for value in (1, "float32", None, before):
        with pytest.raises(AttributeError, match=rf"{name}: got an assignment.* wanted "):
            setattr(layer, name, value)
    with pytest.raises(AttributeError, match=rf"{name}: got deleted, wanted "):
        delattr(layer, name)
    vars(layer)[name] = 1  # seen by nobody
    assert getattr(layer, name) == before
    assert np.array_equal(layer(X), output)


def test_the_error_says_what_to_do():
    for name, advice in (("num_heads", r"prune_heads\(\)"), ("dtype", r"astype\(dtype\)"),
                         ("head_dim", "a new layer"), ("use_bias", "a new layer")):
        with pytest.raises(AttributeError, match=advice):
            setattr(random_layer(), name, 1)


def test_a_name_that_a_layer_does_not_have_is_refused():
    layer = mha.MultiHeadAttention(24, 4)
    for name, wanted in (("Wq", "W_q$"), ("w_q", "W_q$"), ("W_Q", "W_q$")):
        with pytest.raises(AttributeError, match=f"{name}: .* no such name, wanted {wanted}"):
            setattr(layer, name, layer.W_q)

    class Derived(mha.MultiHeadAttention):
        pass

    derived = Derived(24, 4)
    derived.note = "its own"
    assert derived.note == "its own"


def test_a_class_of_the_users_keeps_its_own_errors_and_names():
    class Mixin:
        def __getattr__(self, name):
            return f"the mixin's {name}"

    class Derived(mha.MultiHeadAttention):
        @property
        def broken(self):
            return self.W_q.no_such_attribute

    class Mixed(mha.MultiHeadAttention, Mixin):
        pass

    class Unmade(mha.MultiHeadAttention):
        def __init__(self):
            self.name = "one"

    with pytest.raises(AttributeError, match=r"Unmade .* super\(\).__init__\(embed_dim, num_heads"):
        Unmade()(X)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        Derived(24, 4).broken  # noqa: B018
    assert Mixed(24, 4).note == "the mixin's note"


@pytest.mark.parametrize("value", [[[1], [1, 2]], np.array([[1], None], object), "text", object()])
def test_anything_too_many_is_refused_by_its_place(value):
    with pytest.raises(TypeError, match="got 4 arguments by position, wanted query, key, value"):
        mha.scaled_dot_product_attention(X, X, X, value)


@pytest.mark.parametrize(("values", "wanted"), [
    ([np.array([[1, 1], [1, 0]])], "mask="), ([np.tril(np.ones((3, 3)))], "mask="),
    ([np.ones((3, 3), bool)], "mask="), ([np.array([1, 1])], "key_lengths="),
    ([np.array([[3, 2]])], "key_lengths="), ([np.zeros((3, 3))], "bias="),
    ([np.array([[0, -np.inf]])], "bias="), ([None, 0.0, True], "dropout=, causal="),
    ([None], r"mask=, bias=, alibi=, \.\.\."),
])
def test_what_is_too_many_is_named_by_what_it_looks_like(values, wanted):
    with pytest.raises(TypeError, match=f"and the rest by name: {wanted}$"):
        mha.scaled_dot_product_attention(X, X, X, *values)


def test_an_array_that_cannot_be_made_is_refused_by_its_place():
    class Elsewhere:
        def __array__(self, *_, **__):
            raise RuntimeError("on another device")

    with pytest.raises(TypeError, match="got 4 arguments by position, wanted query, key, value"):
        mha.scaled_dot_product_attention(X, X, X, Elsewhere())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_wrong_width_is_said_of_what_was_given(frozen):
    layer = mha.MultiHeadAttention(24, 4, key_dim=7)
    layer = layer.freeze() if frozen else layer
    with pytest.raises(ValueError, match="query: got a last axis of 20, wanted 24, the layer's qu"):
        layer(X[..., :20])
    with pytest.raises(ValueError, match="key: got a last axis of 24, wanted 7, the layer's key_d"):
        layer(X)


def test_dropout_may_be_assigned():
    layer = random_layer()
    layer.dropout = 0.5
    wanted = random_layer(dropout=0.5)(X, training=True, rng=3)
    assert np.array_equal(layer(X, training=True, rng=3), wanted)
    assert not np.array_equal(wanted, layer(X))
    layer.freeze().dropout = np.float32(0.25)
    assert layer.frozen and layer.dropout == 0.25
    for value, error in ((1.0, ValueError), (-0.1, ValueError), ("0.5", TypeError),
                         (None, TypeError)):
        with pytest.raises(error, match=r"dropout: got .* wanted a number in"):
            layer.dropout = value
    assert layer.dropout == 0.25


# Pickling.

# What MultiHeadAttention(2, 1, use_bias=False) pickled to before its settings were read-only.
OLD_STATE = {
    "embed_dim": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "value_head_dim": 2,
    "query_dim": 2, "key_dim": 2, "value_dim": 2, "output_dim": 2, "dropout": 0.0,
    "use_bias": False, "dtype": np.dtype("float32"), "_packed": False,
    "_parameters": {name: np.full((2, 2), value, np.float32)
                    for value, name in enumerate(("W_q", "W_k", "W_v", "W_o"))}}


def from_state(state, layer_class=mha.MultiHeadAttention):
    layer = layer_class.__new__(layer_class)
    layer.__setstate__(state)
    return layer


@pytest.mark.parametrize("layer_class", [mha.MultiHeadAttention, mha.MultiHeadLatentAttention])
def test_a_layer_without_parameters_cannot_be_pickled_or_copied(layer_class):
    for action in (pickle.dumps, copy.deepcopy, repr):
        with pytest.raises(AttributeError, match="has no parameters yet: its __init__ must call"):
            action(layer_class.__new__(layer_class))


def test_the_state_has_not_changed():
    layer = from_state(OLD_STATE)
    assert repr(layer) == "MultiHeadAttention(2, 1, use_bias=False, dtype=float32)"
    assert np.array_equal(layer.W_o, np.full((2, 2), 3))
    state = layer.__getstate__()
    assert state.keys() == OLD_STATE.keys()
    for name in OLD_STATE.keys() - {"_parameters"}:
        assert state[name] == OLD_STATE[name], name
    swapped = {**OLD_STATE, "dtype": np.dtype(">f4"), "_parameters": {
        name: array.astype(">f4") for name, array in OLD_STATE["_parameters"].items()}}
    assert np.array_equal(from_state(swapped)(np.eye(2)), layer(np.eye(2)))


class Labelled(mha.MultiHeadAttention):
    label = None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_subclass_keeps_its_attributes(protocol):
    layer = Labelled(24, 4, rng=0)
    layer.label = ["a", layer]
    for other in (pickle.loads(pickle.dumps(layer, protocol)), copy.deepcopy(layer)):
        assert type(other) is Labelled and other.label[0] == "a" and other.label[1] is other
        assert np.array_equal(other(X), layer(X))
        assert not np.shares_memory(other.W_q, layer.W_q)


class Strange:
    def __index__(self):
        raise RuntimeError("no size")

    __float__ = __index__


WRONG = [Strange(), "(2", "f4,(", 10**400, None, -1, 0, 1, 2, 3, 7, 2**70, 0.5, 1.5, float("nan"),
         True, "8", "float64", b"", [], {}, (24, 24), np.float16, np.int64, np.dtype("float64"),
         np.dtype("complex64"), object(), np.zeros(3), np.array(4)]
WRONG_ARRAYS = [None, 1.0, [[1.0]], "W", np.zeros((24, 23), np.float32), np.zeros(24),
                np.zeros((24, 24), np.float64), np.zeros((24, 24), complex),
                np.zeros((24, 24), object), np.zeros((24, 24), "U1"), np.zeros((24, 24), bool),
                np.zeros((24, 24), np.float16), np.zeros((24, 24), np.int32)]


def wrong_states():
    """(what is wrong, a state) for every key missing or wrong, and at random several."""
    good = LAYER.__getstate__()
    yield from ((f"is {state!r}", state) for state in (None, [], 1, "x", (good, {}), {1: 2}, {}))
    for name in good:
        yield f"without {name}", {key: value for key, value in good.items() if key != name}
        for value in WRONG:
            yield f"{name}={value!r}", {**good, name: value}
    for name in good["_parameters"]:
        arrays = {key: value for key, value in good["_parameters"].items() if key != name}
        yield f"without {name}", {**good, "_parameters": arrays}
        for index, array in enumerate(WRONG_ARRAYS):
            yield f"{name} {index}", {**good, "_parameters": {**arrays, name: array}}
    yield "a parameter more", {**good, "_parameters": {**good["_parameters"], "W_z": LAYER.W_q}}
    yield "a list of parameters", {**good, "_parameters": list(good["_parameters"].items())}
    yield "with _state", {**good, "_state": LAYER._state if hasattr(LAYER, "_state") else 1}
    generator = random.Random(0)
    for _ in range(500):
        state = dict(good)
        for name in generator.sample(sorted(good), generator.randint(1, 4)):
            if generator.random() < 0.3:
                del state[name]
            else:
                state[name] = generator.choice(WRONG)
        yield f"{state.keys()}", state


def test_a_wrong_state_is_refused_or_fits_together():
    refused = fits = 0
    for what, state in wrong_states():
        layer = mha.MultiHeadAttention.__new__(mha.MultiHeadAttention)
        live = random_layer()
        try:
            layer.__setstate__(state)
        except ValueError:
            assert not vars(layer), what
            with pytest.raises(ValueError, match=r"^state: got .* wanted what pickling a layer"):
                live.__setstate__(state)
            assert np.array_equal(live(X), LAYER(X)), what
            refused += 1
        else:  # another layer, but one that the constructor makes too
            settings = {name: getattr(layer, name) for name in SETTINGS}
            same = mha.MultiHeadAttention(dropout=layer.dropout, **settings)
            same.load_parameters(layer.parameters())
            assert same.parameters().keys() == layer.parameters().keys(), what
            assert np.array_equal(same(X), layer(X)), what
            fits += 1
    assert refused > 700 and fits > 0


# Another thread.

def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def all_of(layer):
    """The output, also by the function."""
    return [layer(X), mha.multi_head_attention(
        X, X, X, **layer.parameters(), num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads)]


def through_vjp(layer):
    output, pullback = layer.vjp(X, wrt=("query",))
    return [output, pullback(output).query]


READERS = {
    "call": lambda layer: [layer(X, causal=True)],
    "vjp": through_vjp,
    "astype": lambda layer: all_of(layer.astype(np.float64)),
    "pickle": lambda layer: all_of(pickle.loads(pickle.dumps(layer))),
    "copy": lambda layer: all_of(copy.copy(layer)),
    "deepcopy": lambda layer: all_of(copy.deepcopy(layer)),
    "repr": lambda layer: [repr(layer)],
    "steps": lambda layer: [mha.reference.steps(layer, X)["output"]],
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_pruned_in_the_middle(name, frozen):
    """Pruned at any instruction of the call, it gives what the old layer or the new one gives."""
    read = READERS[name]
    step = "opcode" if name in ("call", "vjp") else "line"

    def make():
        layer = copy.copy(LAYER)
        return layer.freeze() if frozen else layer

    old, new, seen = read(make()), read(PRUNED), set()
    for layer, result in at_every(step, read, lambda layer: prune(layer.unfreeze()), make):
        assert layer.num_heads == 2
        seen |= {"old"} if same(result, old) else {"new"} if same(result, new) else {"a mix"}
    assert seen == {"old", "new"}


def prune(layer):
    layer.prune_heads([0, 2])


def freeze(layer):
    layer.freeze()


def load(layer):
    layer.load_parameters({name: array + 1 for name, array in LAYER.parameters().items()})


def assign(layer):
    layer.W_o = LAYER.W_o + 1


def result_or_error(change, layer):
    try:
        change(layer)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@pytest.mark.parametrize("change", [freeze, load, assign])
def test_changes_of_two_threads_come_one_after_the_other(change):
    """Pruned by another thread at any line of freeze, load_parameters or an assignment, the layer
    is what either order leaves."""
    orders = []
    for first, second in ((change, prune), (prune, change)):
        layer = copy.deepcopy(LAYER)
        for step in (first, second):
            result_or_error(step, layer)
        orders.append(all_of(layer))
    threads = []

    def prune_elsewhere(layer):
        thread = threading.Thread(target=result_or_error, args=(prune, layer))
        thread.start()
        thread.join(0.003)  # it may have to wait for us
        threads.append(thread)

    for layer, _ in at_every("line", lambda layer: result_or_error(change, layer),
                             prune_elsewhere, lambda: copy.deepcopy(LAYER)):
        threads.pop().join()
        assert any(same(all_of(layer), order) for order in orders)


def test_pruned_under_way():
    """Threads that call a layer while it is pruned see the old one or the new one."""
    wanted = {name: (READERS[name](LAYER), READERS[name](PRUNED)) for name in READERS}
    wrong, layers = [], [copy.copy(LAYER)]
    stop = threading.Event()

    def work(name):
        while not stop.is_set():
            result = READERS[name](layers[0])
            if not any(same(result, one) for one in wanted[name]):
                wrong.append((name, result))
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    workers = [threading.Thread(target=work, args=(name,)) for name in ("call", "call", "vjp",
                                                                        "astype", "pickle")]
    try:
        for worker in workers:
            worker.start()
        for _ in range(1500):
            layers[0] = copy.copy(LAYER)
            layers[0].prune_heads([0, 2])
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        sys.setswitchinterval(interval)
    assert not wrong, wrong[0]


FORKED = """
import os, threading, warnings
import mha, mha._layer.own_parameters
layer = mha.MultiHeadAttention(8, 2)
held, forked = threading.Event(), threading.Event()
def hold():
    with mha._layer.own_parameters.changing:  # as a change does
        held.set()
        forked.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
warnings.simplefilter("ignore")  # Python 3.12 warns of any fork with threads
child = os.fork()
if child == 0:
    layer.prune_heads([0])
    os._exit(7)
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_while_a_layer_changes():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert done.stdout.strip() == "7", done.stderr
