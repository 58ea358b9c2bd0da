"""DLPack capsules made by hand, good and bad, whose deleters count."""

import ctypes

import numpy as np

CPU, BFLOAT16_CODE = 1, 4
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2),
                ("axes", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plain(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p),
                ("deleter", DELETER), ("flags", ctypes.c_uint64), ("tensor", Tensor)]


NAMES = {Plain: b"dltensor", Versioned: b"dltensor_versioned"}
python = ctypes.pythonapi
new_capsule = python.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
is_valid = python.PyCapsule_IsValid
is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
FOREVER = []  # what a C library would keep: callbacks outlive what they are for


class ForgedTensor:
    """An object with `__dlpack__` over an array with any strides; `changes` are fields of the
    tensor, or version and name, as no good library sets them. Counts the tensors that were taken
    over and those that were deleted; the others stay its own."""

    has_no_deleter = False

    def __init__(self, array, kind=Versioned, **changes):
        self.bits = array
        self.type = CODES[array.dtype.kind], 8 * array.itemsize
        self.kind, self.changes = kind, changes
        self.capsules, self.deleted = [], 0

    @property
    def taken(self):
        used = b"used_" + NAMES[self.kind]
        return sum(is_valid(capsule, used) for capsule in self.capsules)

    def __dlpack__(self, *, max_version=None, **others):
        if self.kind is Plain and max_version is not None:
            raise TypeError("max_version: of before version 1")
        tensor, changes = self.kind(), dict(self.changes)
        axes = self.bits.ndim
        shape = (ctypes.c_int64 * axes)(*self.bits.shape)
        strides = (ctypes.c_int64 * axes)(*[stride // self.bits.itemsize
                                            for stride in self.bits.strides])
        if self.kind is Versioned:
            tensor.version[:] = changes.pop("version", (1, 0))
        fields = {"data": self.bits.ctypes.data, "axes": axes, "code": self.type[0],
                  "bits": self.type[1], "lanes": 1, "shape": ctypes.addressof(shape),
                  "strides": ctypes.addressof(strides)}
        name = changes.pop("name", NAMES[self.kind])
        tensor.tensor.device[0] = changes.pop("device", CPU)
        for field in ("shape", "strides"):
            if isinstance(changes.get(field), list):
                numbers = (ctypes.c_int64 * len(changes[field]))(*changes[field])
                FOREVER.append(numbers)
                changes[field] = ctypes.addressof(numbers)
        for field, value in (fields | changes).items():
            setattr(tensor.tensor, field, value)

        def delete(address):
            assert address == ctypes.addressof(tensor)
            self.deleted += 1

        tensor.deleter = DELETER() if self.has_no_deleter else DELETER(delete)
        FOREVER.extend([tensor, shape, strides, name])
        self.capsules.append(new_capsule(ctypes.addressof(tensor), name, None))
        return self.capsules[-1]

    def __dlpack_device__(self):
        return self.changes.get("device", CPU), 0


class Bfloat16Tensor(ForgedTensor):
    """The same over halves, an array of 16 bits."""

    def __init__(self, halves, kind=Versioned, **changes):
        super().__init__(halves.view(np.uint16), kind, **changes)
        self.type = BFLOAT16_CODE, 16


class LikeTorch(Bfloat16Tensor):
    """With an `__array__` that knows no bfloat16."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")
