"""Threads, the instruction set in use, and show_config."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import warnings
from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np

from mha import _core
from mha._base.keywords import checks_keywords

__all__ = ["get_num_threads", "instruction_set", "set_num_threads", "show_config", "threads"]


def get_num_threads() -> int:
    """How many threads a call from here may use.

    At the start: MHA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that the process may use
    (affinity and cgroup quota included). Importing mha warns where what a variable says is not
    used. The child of a fork counts its own CPUs.

    >>> with mha.threads(2):
    ...     mha.get_num_threads()
    2
    """
    return _core.get_num_threads()


@checks_keywords
def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of the whole process, at most 256: larger numbers count as 256.

    The result's bits never depend on it.

    Raises
    ------
    ValueError: num_threads < 1. TypeError: num_threads is not an int.

    >>> mha.set_num_threads(4)
    >>> mha.get_num_threads()
    4
    """
    _core.set_num_threads(num_threads)


@checks_keywords
def threads(num_threads: int) -> contextlib.AbstractContextManager[None]:
    """Within `with mha.threads(n):` calls of this context use n threads; others are untouched.

    Raises
    ------
    ValueError: num_threads < 1. TypeError: num_threads is not an int.

    >>> x = np.ones((4, 8))
    >>> with mha.threads(1):
    ...     output = mha.scaled_dot_product_attention(x, x, x)
    """
    return _threads(num_threads)


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    token = _core.num_threads_variable.set(_core.checked_num_threads(num_threads))
    try:
        yield
    finally:
        _core.num_threads_variable.reset(token)


def instruction_set() -> str:
    """The kernel set in use: "baseline", "avx2", "avx512", "amx" or "neon".

    MHA_ISA, in any case, forces one; "amx", whose sums differ in the last bits, is never chosen
    without it.

    >>> mha.instruction_set() in ("baseline", "avx2", "avx512", "amx", "neon")
    True
    """
    return _core.instruction_set()


@overload
def show_config(mode: Literal["stdout"] = ...) -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
@checks_keywords
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print version, instruction set, threads and NumPy's version: what a bug report needs.

    mode="dicts" returns them as a dictionary that JSON can hold, and prints nothing; NumPy's
    function of this name has the same two modes.

    Raises
    ------
    ValueError: another mode.

    >>> mha.show_config()  # doctest: +ELLIPSIS
    mha ...
      instruction set: ...
    >>> mha.show_config(mode="dicts")["threads"] == mha.get_num_threads()
    True
    """
    from mha._version import __version__

    found: dict[str, Any] = {
        "mha": __version__, "instruction_set": instruction_set(),
        "instruction_sets": list(_core.instruction_sets()), "threads": get_num_threads(),
        "NumPy": np.__version__, "Python": platform.python_version(),
        "machine": platform.machine()}
    if mode == "dicts":
        return found
    if mode != "stdout":
        raise ValueError(f'mode: got {mode!r}, wanted "stdout" or "dicts"')
    print(f"mha {found['mha']}")
    available = ", ".join(found["instruction_sets"])
    print(f"  instruction set: {found['instruction_set']} (of {available})")
    print(f"  threads:         {found['threads']}")
    print(f"  NumPy:           {found['NumPy']}")
    print(f"  Python:          {found['Python']} on {found['machine']}")
    return None


_MOST_THREADS = 256  # MHA_MAX_THREADS of csrc/include/mha/runtime.h
_PLAIN = r"\s*\+?0*[1-9][0-9]*\s*"
_PLAIN_NUMBERS = {"MHA_NUM_THREADS": _PLAIN, "OMP_NUM_THREADS": f"{_PLAIN}(,{_PLAIN})*"}


def warn_of_wrong_environment() -> None:
    """The core takes a wrong number of threads as far as it is one, else what comes next."""
    for variable, plain in _PLAIN_NUMBERS.items():
        given = os.environ.get(variable, "")
        begins = re.match(r"\s*\+?0*([1-9][0-9]{0,9})", given)
        number = int(begins[1]) if begins else 0
        if given and (not re.fullmatch(plain, given, re.ASCII) or number > _MOST_THREADS):
            a_list = ", or a list of such ints" if variable == "OMP_NUM_THREADS" else ""
            now = get_num_threads()
            warnings.warn(f"{variable}: got {given!r}, wanted an int from 1 to {_MOST_THREADS}"
                          f"{a_list}; calls use {now} thread{'s' * (now > 1)}", RuntimeWarning,
                          stacklevel=3)
        if number > 0:
            return
