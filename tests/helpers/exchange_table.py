"""A library that exchanges tensors in C: DLPack's table of functions, made by hand over arrays."""

import ctypes
from typing import NamedTuple

import dlpack_capsules
from dlpack_capsules import CPU, FOREVER, python

CODES = {"f": 2, "b": 6, "i": 0, "u": 1, "c": 5}
LEND = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(dlpack_capsules.Tensor))
GIVE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32 * 2), ("previous", ctypes.c_void_p),
                ("allocate", ctypes.c_void_p), ("take", ctypes.c_void_p), ("give", GIVE),
                ("lend", LEND), ("stream", ctypes.c_void_p)]


class Storage(NamedTuple):
    address: int
    nbytes: int

    def __len__(self):
        return self.nbytes

    def data_ptr(self):
        return self.address


class Lent:
    """A tensor over an array; `changes` are fields as no good library sets them. As PyTorch's it
    may be negated when it is read, and its storage may be smaller than it."""

    refuses = False
    negated = False

    def __init__(self, array, **changes):
        self.array = array
        axes, item = array.ndim, array.itemsize
        self.shape = (ctypes.c_int64 * axes)(*array.shape)
        self.strides = (ctypes.c_int64 * axes)(*[stride // item for stride in array.strides])
        self.fields = {
            "data": array.ctypes.data, "axes": axes, "code": CODES.get(array.dtype.kind, 4),
            "bits": 8 * item, "lanes": 1, "shape": ctypes.addressof(self.shape),
            "strides": ctypes.addressof(self.strides), "byte_offset": 0, **changes}
        whole = array if array.base is None else array.base
        self.storage = [whole.ctypes.data, whole.nbytes]

    def is_neg(self):
        return self.negated

    def untyped_storage(self):
        address, nbytes = self.storage
        return Storage(address, nbytes)


FUNCTIONS = Lent.is_neg, Lent.untyped_storage, Storage.data_ptr


class Given:
    """A tensor that was made of an array, which it frees."""

    def __init__(self, address):
        self.address = address
        self.whole = dlpack_capsules.Versioned.from_address(address)
        tensor = self.whole.tensor
        self.data, self.code, self.bits = tensor.data, tensor.code, tensor.bits
        self.shape, self.strides = (
            tuple((ctypes.c_int64 * tensor.axes).from_address(numbers))
            for numbers in (tensor.shape, tensor.strides))

    def free(self):
        self.whole.deleter(self.address)


def _lend(tensor, to):
    if tensor.refuses:
        return -1
    fields = dict(tensor.fields)
    to[0].device[0] = fields.pop("device", CPU)
    for field, value in fields.items():
        setattr(to[0], field, value)
    return 0


def _give(address, to):
    if Given.refuses:
        return -1
    given = Given(address)
    python.Py_IncRef(ctypes.py_object(given))
    to[0] = id(given)
    return 0


Given.refuses = False


def capsule(version=(1, 3), name=b"dlpack_exchange_api", **changes):
    table = Table(**{"give": GIVE(_give), "lend": LEND(_lend)} | changes)
    table.version[:] = version
    FOREVER.extend([table, name])
    return dlpack_capsules.new_capsule(ctypes.addressof(table), name, None)
