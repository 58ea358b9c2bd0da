"""Threads, the instruction set in use, and show_config."""

import contextlib
import platform

import numpy as np

from mha import _core

__all__ = ["get_num_threads", "instruction_set", "set_num_threads", "show_config", "threads"]


def get_num_threads():
    """How many threads a call from here may use.

    At the start: MHA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that the process may use
    (affinity and cgroup quota included).
    """
    return _core.get_num_threads()


def set_num_threads(num_threads):
    """Set the number of threads of the whole process, at least 1. The result's bits never depend
    on it."""
    _core.set_num_threads(num_threads)


@contextlib.contextmanager
def threads(num_threads):
    """Within `with mha.threads(n):` calls of this context use n threads; others are untouched."""
    token = _core.num_threads_variable.set(_core.checked_num_threads(num_threads))
    try:
        yield
    finally:
        _core.num_threads_variable.reset(token)


def instruction_set():
    """The kernel set in use: "baseline", "avx2", "avx512" or "neon". MHA_ISA forces one."""
    return _core.instruction_set()


def show_config():
    """Print version, instruction set, threads and NumPy's version: what a bug report needs."""
    from mha import __version__

    print(f"mha {__version__}")
    available = ", ".join(_core.instruction_sets())
    print(f"  instruction set: {instruction_set()} (of {available})")
    print(f"  threads:         {get_num_threads()}")
    print(f"  NumPy:           {np.__version__}")
    print(f"  Python:          {platform.python_version()} on {platform.machine()}")
