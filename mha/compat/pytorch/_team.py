"""PyTorch's own threads for mha's calls.

The threads of OpenMP, by which PyTorch works, spin for milliseconds after each of its operations.
Workers of our own would wait for the cores that they hold, so those threads help here instead.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from mha import _core

TEAM = b"mha.team"  # the name that the core asks for; a capsule keeps its address alone
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def runtime_of_openmp() -> str | None:
    """The path of the runtime (GNU's) that PyTorch has loaded, or None."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libgomp" in line}
    folder = str(Path(torch.__file__).parent)
    own = [path for path in loaded if path.startswith(folder)] or list(loaded)
    return own[0] if len(own) == 1 else None


def share_threads() -> bool:
    """Let PyTorch's threads work off mha's calls from now on; whether they do."""
    path = runtime_of_openmp()
    if path is None or "OpenMP" not in torch.__config__.parallel_info():
        return False
    run = ctypes.CDLL(path).GOMP_parallel
    _core.use_team(_new_capsule(ctypes.cast(run, ctypes.c_void_p), TEAM, None))
    return True
