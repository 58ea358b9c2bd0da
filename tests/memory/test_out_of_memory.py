"""Memory that runs out at each allocation that the extension reaches (out_of_memory.py), and at
those of its import. LONGER=n multiplies the rounds in which allocations fail at random."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGER = int(os.environ.get("LONGER", "1"))
CASES = re.findall(r'^    "([^"]+)": ', (HERE / "out_of_memory.py").read_text(), re.MULTILINE)

IMPORT = """
import ctypes, glob, importlib.util, os, sys
import numpy as np
folder, = importlib.util.find_spec("mha").submodule_search_locations
path, = glob.glob(folder + "/_core*.so")
shim = ctypes.CDLL(path) and ctypes.CDLL(None)
with open("/proc/self/maps") as maps:
    ranges = [line.split()[0].split("-") for line in maps if path in line]
shim.failing_memory_of(*(ctypes.c_size_t(int(text, 16)) for text in (ranges[0][0], ranges[-1][1])))

def attempt(how, first):
    shim.failing_memory_arm(how, ctypes.c_int64(first))
    try:
        import mha
        return shim.failing_memory_disarm() <= first
    except (MemoryError, ImportError, SystemError):  # CPython's own words for it
        shim.failing_memory_disarm()
    import mha
    x = np.ones((2, 3))
    assert np.allclose(mha.scaled_dot_product_attention(x, x, x), 1)
    return False

for how in (0, 1):
    first = 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                os._exit(int(attempt(how, first)))
            except BaseException as error:
                print(how, first, repr(error), flush=True)
                os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1), (how, first, code)
        if code == 1:
            break
        first += 1
    print("import: %d allocations" % first)
    assert first > 0
"""


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """With the shim loaded, and every object of Python's in memory of its own."""
    shim = tmp_path_factory.mktemp("shim") / "failing_memory.so"
    subprocess.run([os.environ.get("CC", "gcc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror",
                    "-shared", "-fPIC", HERE / "failing_memory.c", "-o", shim, "-ldl"], check=True)
    allocator = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"PYTHONMALLOC": "malloc"}
    return {**os.environ, "LD_PRELOAD": str(shim), **allocator}


def run(command, environment):
    done = subprocess.run([sys.executable, "-X", "faulthandler", *command], env=environment,
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-4000:])


@pytest.mark.parametrize("case", CASES)
def test_calls(case, environment):
    run([HERE / "out_of_memory.py", case, str(20 * LONGER)], environment)


def test_import(environment):
    run(["-c", IMPORT], environment)
