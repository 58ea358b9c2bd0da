"""Tensors by DLPack's table of C functions, as PyTorch's come in and go out."""

import sys

import numpy as np
import pytest
from exchange_table import FUNCTIONS, GIVE, LEND, Given, Lent, capsule
from half_types import BFLOAT16

from mha import _core

EXCHANGE = capsule()


def arrays_of(*tensors, exchange=EXCHANGE):
    return _core.arrays_of_tensors((Lent,), exchange, FUNCTIONS, tensors)


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16, bool, np.int64,
                                   np.int32, np.int8, np.uint16, np.uint64])
def test_arrays_are_views(dtype):
    for array in (whole := (10 * numbers(4, 5, 6)).astype(dtype), whole[1:, ::2, :-1],
                  whole.transpose(2, 0, 1), whole[::-1], whole[:0], whole[1, 2, 3]):
        tensor = Lent(np.asarray(array))
        before = sys.getrefcount(tensor)
        [view, nothing] = arrays_of(tensor, None)
        assert nothing is None and view.dtype == dtype
        assert view.shape == array.shape and not view.flags.writeable
        if view.size:
            assert view.ctypes.data == tensor.array.ctypes.data
            assert view.strides == array.strides
        assert np.array_equal(view, array)
        assert sys.getrefcount(tensor) == before + 1
        del view
        assert sys.getrefcount(tensor) == before


@pytest.mark.parametrize("changes", [
    {"device": 2}, {"axes": -1}, {"axes": 33}, {"shape": None}, {"data": None}, {"lanes": 4},
    {"bits": 24}, {"code": 5}, {"byte_offset": 1}, {"byte_offset": 2**64 - 2},
    {"code": 4, "bits": 8}, {"code": 0, "bits": 128}],
    ids=str)
def test_what_cannot_be_lent(changes):
    good, bad = Lent(numbers(3, 4)), Lent(numbers(3, 4), **changes)
    before = sys.getrefcount(good)
    assert arrays_of(good, bad) is None
    assert sys.getrefcount(good) == before


def test_other_types():
    """What inherits from a type may mean something else by its memory."""
    tensor = Lent(numbers(3, 4))
    for other in (3, type("Heir", (Lent,), {})(numbers(3, 4))):
        assert arrays_of(tensor, other) is None


@pytest.mark.parametrize("part", [slice(None), slice(1, 3), slice(None, None, -1)], ids=str)
def test_memory_that_is_not_the_numbers(part):
    """Storages are freed by making them smaller, and negations are put off."""
    whole = numbers(4, 6)
    tensor = Lent(whole[part])
    assert arrays_of(tensor) is not None
    for address, nbytes in ((0, 0), (whole.ctypes.data, 8), (whole.ctypes.data + 96, 96),
                            (whole.ctypes.data, whole.nbytes - 100), (-1, whole.nbytes)):
        tensor.storage = [address, nbytes]
        assert arrays_of(tensor) is None
    tensor.storage = [whole.ctypes.data, whole.nbytes]
    tensor.negated = True
    assert arrays_of(tensor) is None


def test_what_is_refused():
    tensor = Lent(numbers(3, 4))
    tensor.refuses = True
    assert arrays_of(tensor) is None
    Given.refuses = True
    try:
        with pytest.raises(RuntimeError, match="refused"):
            _core.tensor_of_array(EXCHANGE, numbers(3), False)
    finally:
        Given.refuses = False


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16])
@pytest.mark.parametrize("by_token", [False, True])
def test_tensors_are_views(dtype, by_token):
    for array in (whole := numbers(2, 3, 4, 5).astype(dtype), whole[:, ::2, 1:], whole[:, :, :0],
                  whole.transpose(0, 2, 1, 3)):
        before = sys.getrefcount(array)
        tensor = _core.tensor_of_array(EXCHANGE, array, by_token)
        wanted = array.swapaxes(1, 2) if by_token else array
        assert tensor.shape == wanted.shape
        assert tensor.strides == tuple(step // array.itemsize for step in wanted.strides)
        assert tensor.data == array.ctypes.data
        assert (tensor.code, tensor.bits) == (4 if dtype == BFLOAT16 else 2, 8 * array.itemsize)
        del wanted
        assert sys.getrefcount(array) == before + 1
        tensor.free()
        assert sys.getrefcount(array) == before


@pytest.mark.parametrize("array", [
    np.arange(3), np.ones(3, bool), np.ones(3, ">f4"), np.ones(3, complex), np.ones(3, object),
    np.zeros(17, np.int8)[1:].view(np.float64), np.zeros(3, "f4, i2")["f0"],
    np.ones(9, np.float32)[::-2]],
    ids=lambda array: str(array.dtype))
def test_what_is_no_tensor(array):
    with pytest.raises(TypeError, match="floating-point"):
        _core.tensor_of_array(EXCHANGE, array, False)


def test_wrong_arguments():
    tensor, array = Lent(numbers(3, 4)), numbers(3, 4)
    with pytest.raises(TypeError, match="by_token in at least 3 axes"):
        _core.tensor_of_array(EXCHANGE, array, True)
    for arguments in ((), ((Lent,), EXCHANGE, FUNCTIONS), (Lent, EXCHANGE, FUNCTIONS, (tensor,)),
                      ((Lent,), EXCHANGE, FUNCTIONS, [tensor]),
                      ((Lent,), EXCHANGE, FUNCTIONS[1:], (tensor,))):
        with pytest.raises(TypeError, match="wanted a tuple of types"):
            _core.arrays_of_tensors(*arguments)
    for arguments in ((), (EXCHANGE, array), (EXCHANGE, 3, False), (EXCHANGE, array, 1)):
        with pytest.raises(TypeError, match="wanted an exchange, an array and a bool"):
            _core.tensor_of_array(*arguments)
    no_functions = [capsule(give=GIVE()), capsule(lend=LEND())]
    for wrong in (None, 3, capsule(name=b"dltensor"), capsule(version=(2, 0)), *no_functions):
        with pytest.raises(ValueError, match=r"PyCapsule|exchange: got DLPack"):
            arrays_of(tensor, exchange=wrong)
        with pytest.raises(ValueError, match=r"PyCapsule|exchange: got DLPack"):
            _core.tensor_of_array(wrong, array, False)

