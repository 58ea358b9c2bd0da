"""The calls of empty_shapes.py while every array of NumPy, what the calls make included, lies
against a page that nobody may touch: not even the byte that an empty array has is there. Run by
test_guard_pages.py, as `python empty_between_pages.py KIND SIDE`; SIDE is where the forbidden page
lies, "behind" or "before"."""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "helpers"))
from empty_shapes import CALLS, gradients_of, has_gradients, results_of

import mha

PAGE = mmap.PAGESIZE
READ_AND_WRITE, FORBIDDEN = 3, 0
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NO_MEMORY = ctypes.c_void_p(-1).value

pointer, size_t = ctypes.c_void_p, ctypes.c_size_t
ALLOCATE = ctypes.CFUNCTYPE(pointer, pointer, size_t)
ALLOCATE_ZEROS = ctypes.CFUNCTYPE(pointer, pointer, size_t, size_t)
REALLOCATE = ctypes.CFUNCTYPE(pointer, pointer, pointer, size_t)
RELEASE = ctypes.CFUNCTYPE(None, pointer, pointer, size_t)


class Handler(ctypes.Structure):
    """PyDataMem_Handler of numpy/ndarraytypes.h."""

    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("context", pointer),
                ("allocate", ALLOCATE), ("allocate_zeros", ALLOCATE_ZEROS),
                ("reallocate", REALLOCATE), ("release", RELEASE)]


class GuardedMemory:
    """Blocks between forbidden pages, given to NumPy for its arrays."""

    def __init__(self, is_behind):
        self.is_behind = is_behind
        self.blocks = {}  # address -> base, size of the whole, size
        self.handler = Handler(b"guarded", 1, None, ALLOCATE(self.allocate),
                               ALLOCATE_ZEROS(lambda context, count, size:
                                              self.allocate(context, count * size)),
                               REALLOCATE(self.reallocate), RELEASE(self.release))

    def allocate(self, context, size):
        inner = (size + PAGE - 1) // PAGE * PAGE
        whole = inner + 2 * PAGE
        private, anonymous = 0x02, mmap.MAP_ANONYMOUS
        base = libc.mmap(None, whole, FORBIDDEN, private | anonymous, -1, 0)
        assert base != NO_MEMORY, os.strerror(ctypes.get_errno())
        assert libc.mprotect(base + PAGE, inner, READ_AND_WRITE) == 0
        address = base + PAGE + (inner - size if self.is_behind else 0)
        self.blocks[address] = base, whole, size
        return address

    def release(self, context, address, size):
        base, whole, _ = self.blocks.pop(address)
        assert libc.munmap(base, whole) == 0

    def reallocate(self, context, address, size):
        moved = self.allocate(context, size)
        ctypes.memmove(moved, address, min(size, self.blocks[address][2]))
        self.release(context, address, size)
        return moved

    def use(self):
        """From now on NumPy's arrays lie here."""
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [pointer, ctypes.c_char_p, pointer]
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype = ctypes.POINTER(pointer)
        get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        umath = sys.modules.get("numpy._core._multiarray_umath") or sys.modules[
            "numpy.core._multiarray_umath"]
        table = get_pointer(umath._ARRAY_API, None)
        place_of_set_handler = 304  # in NumPy's table of functions, since 1.22
        prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
        self.capsule = new_capsule(ctypes.addressof(self.handler), b"mem_handler", None)
        prototype(table[place_of_set_handler])(self.capsule)


def main(kind, side):
    memory = GuardedMemory(side == "behind")
    memory.use()
    count = 0
    for name, arguments, options in CALLS[kind]():
        shapes = [np.shape(array) for array in arguments if not isinstance(array, list)]
        os.write(1, f"{name} {shapes} {sorted(options)}\n".encode())
        results_of(mha, name, arguments, options)
        if has_gradients(name):
            gradients_of(mha, name, arguments, options)
        count += 1
    assert memory.blocks, "NumPy's arrays lie elsewhere"
    os.write(1, f"{count} calls\n".encode())
    os._exit(0)  # arrays outlive the memory that would be told to release them


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
