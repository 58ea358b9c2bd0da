"""What newcomers write first, and what the errors then say to write; what help() and TAB show."""

import inspect
import pydoc

import numpy as np
import pytest

import mha
from mha._base.foreign_names import PLACES

X = np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)
ROWS = X[0, :, :8]
MASK = np.tri(5, dtype=bool)


@pytest.fixture
def layer():
    return mha.MultiHeadAttention(32, 4, rng=0)


# An option by position.


@pytest.mark.parametrize("call", ["__call__", "vjp"])
@pytest.mark.parametrize(("given", "words"), [
    ([MASK], "a mask goes by name: mask="), ([MASK.astype(int)], "a mask goes by name: mask="),
    ([MASK[None, None]], "a mask goes by name: mask="),
    ([np.repeat(MASK[None], 2, 0)], "a mask goes by name: mask="),
    ([None, MASK], "a mask goes by name: mask="), ([X, MASK], "a mask goes by name: mask="),
    ([True], "causal goes by name: causal="), ([np.True_], "causal goes by name: causal="),
    ([None, True], "causal goes by name: causal="),
    ([[3, 5]], "key_lengths goes by name: key_lengths="),
    ([np.where(MASK, 0, -np.inf)], "a bias goes by name: bias=")])
def test_an_option_by_position_is_told_its_name(layer, call, given, words):
    with pytest.raises(ValueError, match=f"(key|value): got .*; {words}$"):
        getattr(layer, call)(X, *given)
    with pytest.raises(ValueError, match=f"(key|value): got .*; {words}$"):
        getattr(layer.freeze(), call)(X, *given)


def test_a_wrong_key_is_no_option(layer):
    for key in (0.5, "causal", X[..., 0, 0], X[..., :4], X[0]):
        with pytest.raises((TypeError, ValueError), match=r"^key: got") as raised:
            layer(X, key)
        assert "by name" not in str(raised.value)
    with pytest.raises(ValueError, match=r"^mask: got shape \(5, 4\)") as raised:
        layer(X, X, mask=MASK[:, :4])
    assert "by name" not in str(raised.value)


@pytest.mark.parametrize("name", ["attention_mask", "key_lengths", "key_padding_mask",
                                  "padding_mask", "valid_lens"])
def test_padding_beside_a_cache_is_told_of_lengths(layer, name):
    with pytest.raises((TypeError, ValueError), match=(
            f'^{name}: got .*; with a cache lengths= says how many rows of the call are real,'
            ' padding="left" that the padding comes before them$')):
        layer(X, cache=layer.new_cache(2), **{name: [5, 3]})
    if name != "key_lengths":
        with pytest.raises(TypeError, match=f"^{name}: got a keyword") as raised:
            layer(X, **{name: [5, 3]})
        assert "with a cache" not in str(raised.value)


# A missing argument, and types.


@pytest.mark.parametrize(("call", "words"), [
    (lambda: mha.scaled_dot_product_attention(ROWS, ROWS),
     "value: got nothing, wanted an array: the call is"
     " scaled_dot_product_attention(query, key, value)"),
    (lambda: mha.scaled_dot_product_attention_vjp(query=ROWS, value=ROWS),
     "key: got nothing, wanted an array: the call is"
     " scaled_dot_product_attention_vjp(query, key, value)"),
    (lambda: mha.linear(ROWS), "weight: got nothing, wanted an array: the call is"
     " linear(x, weight)"),
    (lambda: mha.MultiHeadAttention(8, 2)(), "query: got nothing, wanted an array: the call is a"
     " call of MultiHeadAttention(query)"),
    (lambda: mha.KVCache(1, 2, 4).append(ROWS[None, None, :, :4]),
     "value: got nothing, wanted an array: the call is KVCache.append(key, value)")])
def test_a_missing_array_is_told_with_the_call(call, words):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == words


@pytest.mark.parametrize("dtype", [object, complex, np.longdouble, str, "M8[s]", "float8_e4m3fn"])
def test_all_types_that_are_taken_are_named(layer, dtype):
    if dtype == "float8_e4m3fn":
        dtype = getattr(pytest.importorskip("ml_dtypes"), dtype)
    array = np.ones((2, 5, 32)).astype(dtype)
    wanted = "wanted float16, bfloat16, float32, float64 or integers$"
    for call in (lambda: layer(array), lambda: mha.linear(array, np.ones((32, 3))),
                 lambda: mha.scaled_dot_product_attention(array, array, array),
                 lambda: mha.Rotary(32)(array),
                 lambda: mha.scaled_dot_product_attention(X, X, X, bias=array[..., :5])):
        with pytest.raises(TypeError, match=wanted):
            call()


class Nullable:
    """As pandas shows a frame of nullable or Arrow floats to NumPy: objects."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array.astype(object if dtype is None else dtype)

    def to_numpy(self, dtype=None):
        return self.array.astype(object if dtype is None else dtype)


@pytest.mark.parametrize("call", [
    lambda x: mha.scaled_dot_product_attention(x, ROWS, ROWS),
    lambda x: mha.scaled_dot_product_attention(ROWS, ROWS, ROWS, mask=x),
    lambda x: mha.linear(x, np.ones((8, 3))), lambda x: mha.MultiHeadAttention(8, 2)(x),
    lambda x: setattr(mha.MultiHeadAttention(8, 2), "b_q", x),
    lambda x: mha.masks.from_attend(x), lambda x: mha.KVCache(1, 1, 8).append(x, x)])
def test_a_frame_of_objects_is_told_how_to_become_numbers(call):
    with pytest.raises(TypeError, match=(
            r'^\w+: got an array of object \(Nullable\), wanted plain numbers: its'
            r' .to_numpy\("float32"\), of a mask .to_numpy\(bool\)$')):
        call(Nullable(ROWS))


def test_heads_of_objects_stay_what_they_are():
    assert mha.split_heads(Nullable(ROWS), 2).dtype == object
    assert mha.merge_heads(Nullable(ROWS[None])).dtype == object


class ArrayBox:
    """What autograd hands to functions while it looks for gradients."""

    def __init__(self, value):
        self._value, self._trace, self._node = value, 0, None

    def __len__(self):
        return len(self._value)

    def __getitem__(self, index):
        return ArrayBox(self._value[index]) if np.ndim(self._value) else self._value


@pytest.mark.parametrize("call", [
    lambda x: mha.scaled_dot_product_attention(x, ROWS, ROWS),
    lambda x: mha.scaled_dot_product_attention_vjp(ROWS, ROWS, ROWS)[1](x),
    lambda x: mha.linear(x, np.ones((8, 3))), lambda x: mha.MultiHeadAttention(8, 2)(x)])
def test_what_autograd_traces_is_told_the_recipe(call):
    with pytest.raises(TypeError, match=(
            r"^\w+: got numbers that autograd traces \(ArrayBox\), wanted plain ones: make the"
            r" function a primitive of autograd.extend, and give it its gradient by defvjp_argnums"
            r" and mha's _vjp of the same name; there is no second derivative$")):
        call(ArrayBox(ROWS))


# Where things are.


@pytest.mark.parametrize(("module", "name", "where"), [
    (mha, "softmax", "mha.reference.softmax"), (mha, "causal_mask", "mha.masks.causal"),
    (mha, "diagnose", "mha.testing.diagnose"), (mha.masks, "causal_mask", "mha.masks.causal"),
    (mha.masks, "padding", r"mha.masks.from_lengths, or key_lengths= in the call")])
def test_a_name_that_is_elsewhere_is_told_where(module, name, where):
    with pytest.raises(AttributeError, match=f"'{name}', wanted {where}$"):
        getattr(module, name)
    assert not hasattr(module, name)


def test_every_place_is_there_and_every_public_name_has_one():
    told = {name for names in PLACES.values() for name in names.split()}
    for place in PLACES:
        for path in [word.strip(",") for word in place.split() if word.startswith("mha.")]:
            found = mha
            for part in path.split("(")[0].split(".")[1:]:
                found = getattr(found, part)
    assert told.isdisjoint(mha.__all__)
    for module in (mha.masks, mha.importance, mha.parameters):
        assert set(module.__all__) <= told
    assert {"diagnose", "softmax", "steps"} <= told


@pytest.mark.parametrize("module", [mha.testing, mha.reference])
def test_tab_shows_what_is_public(module):
    assert dir(module) == sorted(module.__all__)


def test_help_begins_with_what_is_public():
    text = pydoc.plain(pydoc.render_doc(mha)).split("PACKAGE CONTENTS")[0]
    for name in {*dir(mha)} - {"__version__"}:
        assert name in text
    for module in (mha.masks, mha.parameters):
        line = next(line for line in text.splitlines()
                    if line.split()[:1] == [module.__name__])
        assert all(name in line for name in module.__all__)
    named = inspect.getdoc(mha).split("What is public", 1)[1]
    assert "internal" in named.splitlines()[0]
