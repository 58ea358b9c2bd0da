"""Every function of mha._core with junk in place of each of its arguments, forged capsules and
tensors of DLPack among it: each call raises one of the errors below or returns. Run by
test_junk_of_the_core.py in processes of its own, `python junk_of_the_core.py FUNCTION ...`, since
what goes wrong here ends the process."""

import ctypes
import itertools
import os
import re
import sys

import bad_input
import numpy as np
from dlpack_capsules import FOREVER, ForgedTensor, Plain, Versioned, new_capsule
from test_hostile_input import calls_of_the_core

import mha
from mha import _core

REFUSALS = (ValueError, TypeError, MemoryError, BufferError)
NO_MEMORY_THERE = 16
ZEROS, ONES = np.zeros(4096, np.uint8), np.full(4096, 255, np.uint8)
DLPACK = ("dltensor", "dltensor_versioned")
OTHER_NAMES = ("used_dltensor", "mha.dltensor", "mha.dltensor_versioned", "mem_handler", "", None)
READ_BY_NAME = (*DLPACK, "dlpack_exchange_api")  # as their standard wants it


def forged(name, address):
    FOREVER.append(name := None if name is None else name.encode())
    return new_capsule(address, name, None)


def own_names():
    """The names of the capsules that functions of the core hand out."""
    found = re.findall(r'capsule object "([\w.]+)"', repr([
        arguments for _, arguments in calls_of_the_core().values()]))
    return sorted(set(found) - set(READ_BY_NAME))


def capsules():
    """Of every name that something asks for: an address where nothing is, or where no such struct
    is."""
    for name in (*own_names(), *OTHER_NAMES):
        yield forged(name, NO_MEMORY_THERE)
    for name, memory in itertools.product((*own_names(), *READ_BY_NAME), (ZEROS, ONES)):
        yield forged(name, memory.ctypes.data)


class Offers:
    """An object with one method that gives `answer`, or raises it."""

    def __init__(self, method, answer):
        self.answer = answer
        self.__class__ = type("Offers", (Offers,), {method: Offers.give})

    def give(self, *arguments, **options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def forged_tensors():
    """Each field as no library sets it, one or two at a time."""
    array = np.ones((2, 3), np.float32)
    fields = {"data": [None], "axes": [-1, 33, 64, 2**31 - 1, -2**31], "code": [4, 5, 9, 255],
              "bits": [0, 4, 8, 255], "lanes": [0, 2, 65535],
              "shape": [None, [-1, 3], [2**62, 3], [-2**63, 3], [2**40, 2**40]],
              "strides": [[2**62, 1], [-2**63, 1], [2**56, 1], [-2**50, -2**50]],
              "byte_offset": [1, 2**57, 2**63, 2**64 - 1], "device": [0, 2, -1, 2**31 - 1],
              "version": [(0, 0), (2, 0), (2**32 - 1, 0)]}
    changes = [{name: value} for name, values in fields.items() for value in values]
    pairs = [one | other for one, other in itertools.combinations(changes, 2)]
    for kind in (Plain, Versioned):
        for change in changes + pairs:
            if not (kind is Plain and "version" in change):
                yield ForgedTensor(array, kind, **change)


def junk():
    arrays = [np.array(None), np.array(["x"]), np.zeros(3, "M8[s]"), np.zeros(2, "f4, i2"),
              np.zeros((0,)), np.zeros((1,) * 32), np.zeros((), complex), np.zeros(3, ">i2"),
              np.broadcast_to(np.float32(1), (2**20, 2**20, 2**20)), np.zeros((2, 0, 3)),
              np.lib.stride_tricks.as_strided(np.zeros(9), (2, 2), (3, 5)), np.zeros(5, "V0")]
    plain = [None, True, -1, 2**63, 10**40, float("nan"), "zeros", b"\0", (), [[]], {}, {"query"},
             slice(2), ..., int, object(), memoryview(b""), ctypes.c_int(3), np.float32, sys,
             iter(())]
    answers = [None, 3, "x", ValueError("no"), ZEROS, *capsules()]
    offering = [Offers(method, answer) for method in ("__dlpack__", "__array__", "__index__",
                                                      "__float__", "__array_interface__")
                for answer in answers]
    return [*arrays, *plain, *capsules(), *offering]


def all_functions():
    """Good arguments of each function, by position."""
    simple = {"use_team": (_core.use_team, [None]), "set_num_threads": (_core.set_num_threads, [2]),
              "get_num_threads": (_core.get_num_threads, []),
              "instruction_set": (_core.instruction_set, []),
              "instruction_sets": (_core.instruction_sets, []),
              "check_block_mask": (_core.check_block_mask,
                                   [mha.BlockMask.causal(3)._core_record])}
    return calls_of_the_core() | simple


def call(function, arguments):
    try:
        function(*arguments)
    except REFUSALS:
        return 1
    return 0


def main(name):
    function, good = all_functions()[name]
    function(*good)
    worthless, refused = junk(), 0
    if name == "as_array":
        assert all(call(function, (tensor, "x")) for tensor in forged_tensors())
    for place in range(len(good)):
        for value in worthless:
            os.write(1, f"{name}: {place} {type(value)}\n".encode())
            arguments = [*good[:place], value, *good[place + 1:]]
            refused += call(function, arguments)
    for arguments in ([], good[:-1], [*good, None], [None] * len(good)):
        call(function, arguments)
    for value in worthless:
        token = _core.num_threads_variable.set(value)
        call(function, good)
        _core.num_threads_variable.reset(token)
    assert bad_input.answer() == bad_input.GOOD_ANSWER
    assert mha.get_num_threads() >= 1
    os.write(1, f"refused {name} {refused}\n".encode())


if __name__ == "__main__":
    for function_name in sys.argv[1:]:
        main(function_name)
