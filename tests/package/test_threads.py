"""Threads, the GIL, fork, Ctrl-C and interpreter exit."""

import concurrent.futures
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import mha
from mha import _core

# How many times as long as elsewhere a second may take: emulated machines say so
# (tests/tools/arm64.sh).
SLOWER = float(os.environ.get("SLOWER", "1"))


def run_python(code, **environment):
    # Python 3.12 warns of any fork with threads; that is what some of these tests are about.
    warnings = ["-W", "error", "-W", "ignore:.*fork:DeprecationWarning"]
    return subprocess.run([sys.executable, *warnings, "-c", code], text=True,
                          capture_output=True, env={**os.environ, **environment})


def test_number_of_threads():
    before = mha.get_num_threads()
    assert before >= 1
    with mha.threads(3):
        assert mha.get_num_threads() == 3
        with mha.threads(1):
            assert mha.get_num_threads() == 1
        assert mha.get_num_threads() == 3
        seen = contextvars.Context().run(mha.get_num_threads)
    assert seen == before == mha.get_num_threads()
    try:
        mha.set_num_threads(5)
        assert mha.get_num_threads() == 5
    finally:
        mha.set_num_threads(before)


@pytest.mark.parametrize(("environment", "expected"), [
    ({"MHA_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, "3"),
    ({"MHA_NUM_THREADS": " +03 ", "OMP_NUM_THREADS": "5"}, "3"),
    ({"MHA_NUM_THREADS": "3", "OMP_NUM_THREADS": "1e3"}, "3"),  # which nobody asks for
    ({"MHA_NUM_THREADS": "256", "OMP_NUM_THREADS": "5"}, "256"),
    ({"MHA_NUM_THREADS": "", "OMP_NUM_THREADS": "5"}, "5"),
    ({"MHA_NUM_THREADS": "", "OMP_NUM_THREADS": "4,2"}, "4"),
    ({"MHA_NUM_THREADS": "", "OMP_NUM_THREADS": " +4 , 2,1 "}, "4"),
    ({"MHA_NUM_THREADS": "", "OMP_NUM_THREADS": ""}, "1")])  # of the CPUs, here one
def test_environment(environment, expected):
    done = run_python("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
                      "import mha; print(mha.get_num_threads())", **environment)
    assert done.stdout.strip() == expected, done.stderr


WARNINGS = """
import os, warnings
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import mha
print(*{w.filename for w in seen}, mha.get_num_threads())
print(*(f"{w.category.__name__}: {w.message}" for w in seen), sep="\\n")
"""


@pytest.mark.parametrize(("given", "expected"), [
    ("-1", "4"), ("0", "4"), ("none", "4"), ("0x3", "4"), ("1_0", "1"), ("3,2", "3"), ("2.5", "2"),
    ("3 threads", "3"), ("\u0663", "4"), ("4096", "256"), ("257", "256"), ("9" * 5000, "256")])
def test_a_wrong_number_of_threads_in_the_environment(given, expected):
    """A warning that points at the import and says how many it will be."""
    environment = {"MHA_NUM_THREADS": given, "OMP_NUM_THREADS": "4,2", "PYTHONUTF8": "1"}
    done = run_python(WARNINGS, **environment)
    assert done.stdout.splitlines() == [
        f"<string> {expected}", f"RuntimeWarning: MHA_NUM_THREADS: got {given!r}, wanted an int"
        f" from 1 to 256; calls use {expected} thread{'s' * (expected != '1')}"], done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(("given", "expected"), [
    ("1e3", "1"), ("384", "256"), ("none", "1"), ("-2", "1"), ("4;2", "4"), ("4,0", "4"),
    ("4,x", "4"), (",4", "1"), ("dynamic", "1")])
def test_a_wrong_number_of_threads_of_openmp(given, expected):
    """The same where mha's own variable says nothing; each variable that is asked has its own."""
    of_openmp = (f"RuntimeWarning: OMP_NUM_THREADS: got {given!r}, wanted an int from 1 to 256, or"
                 f" a list of such ints; calls use {expected} thread{'s' * (expected != '1')}")
    done = run_python(WARNINGS, MHA_NUM_THREADS="", OMP_NUM_THREADS=given)
    assert done.stdout.splitlines() == [f"<string> {expected}", of_openmp], done.stderr
    done = run_python(WARNINGS, MHA_NUM_THREADS="many", OMP_NUM_THREADS=given)
    first, own, second = done.stdout.splitlines()
    assert own.startswith("RuntimeWarning: MHA_NUM_THREADS: got 'many', wanted"), own
    assert (first, second) == (f"<string> {expected}", of_openmp)


COUNTED_IN_A_CHILD = """
import os, mha
cpus = sorted(os.sched_getaffinity(0))
before = mha.get_num_threads()
{before}
child = os.fork()
if child == 0:
    os.sched_setaffinity(0, cpus[:1])
    os._exit(mha.get_num_threads())
print(before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), mha.get_num_threads())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a child cannot have fewer CPUs")
def test_the_child_of_a_fork_counts_its_own_cpus():
    """But for a number that somebody asked for."""
    own = {"MHA_NUM_THREADS": "", "OMP_NUM_THREADS": ""}
    before, child, after = run_python(COUNTED_IN_A_CHILD.format(before=""), **own).stdout.split()
    assert child == "1" < before == after
    asked = run_python(COUNTED_IN_A_CHILD.format(before="mha.set_num_threads(before + 5)"), **own)
    before, child, after = map(int, asked.stdout.split())
    assert child == after == before + 5
    for variable in own:
        done = run_python(COUNTED_IN_A_CHILD.format(before=""), **own | {variable: "3"})
        assert done.stdout == "3 3 3\n", done.stderr


def test_forced_instruction_set():
    for given in ("baseline", "BASELINE", "Baseline"):
        done = run_python("import mha; print(mha.instruction_set())", MHA_ISA=given)
        assert done.stdout.strip() == "baseline", done.stderr
    for given in ("abacus", "base", "baselines", " "):
        done = run_python("import mha", MHA_ISA=given)
        assert done.returncode != 0
        assert f"MHA_ISA: got {given}, wanted one that runs here" in done.stderr


def test_calls_from_many_threads():
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, 4, 100, 16)) for _ in range(16)]
    wanted = [mha.scaled_dot_product_attention(x, x, x) for x in inputs]

    def work(index):
        return [mha.scaled_dot_product_attention(inputs[index], inputs[index], inputs[index])
                for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for index, results in enumerate(pool.map(work, range(16))):
            assert all(np.array_equal(result, wanted[index]) for result in results)


def test_the_gil_is_released():
    x = np.ones((1, 2, 3000, 64))
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        with mha.threads(1):
            start = time.perf_counter()
            mha.scaled_dot_product_attention(x, x, x)
            end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert sum(start < t < end for t in ticks) >= 3, "no other thread ran during the call"


INTERRUPTED = """
import os, signal, threading, time
import numpy as np
import mha
{before}
when = []
def interrupt():
    time.sleep(0.2)
    when.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    with mha.threads({num_threads}):
        {call}
except KeyboardInterrupt:
    print(time.perf_counter() - when[0])
small = np.ones((1, 8, 100, 64), np.float32)
assert np.allclose(mha.scaled_dot_product_attention(small, small, small), 1)
print("goes on")
"""

LONG_CALLS = {  # what to prepare, and a call that takes seconds on any machine
    "attention": ("x = np.ones((1, 8, 60000, 64), np.float32)",
                  "mha.scaled_dot_product_attention(x, x, x)"),
    "dropout mask": ("", "mha.dropout_mask((1 << 16, 1 << 15), 0.1, 1)"),
    # Tasks of seconds, in every dimension; and one that the caller waits for.
    "one long task": ("x = np.zeros((40, 1 << 19), np.float32)",
                      "[mha.scaled_dot_product_attention(x, x, x) for _ in range(1000)]"),
    "many keys": ("k = np.broadcast_to(np.zeros((1, 2), np.float32), (1 << 30, 2))",
                  "mha.scaled_dot_product_attention(k[:30], k, k)"),
    "many keys of few queries": (
        "k = np.broadcast_to(np.zeros((1, 2), np.float32), (1 << 30, 2))",
        "[mha.scaled_dot_product_attention(k[:1], k, k) for _ in range(9)]"),
    "rows that see nothing": (
        "k = np.broadcast_to(np.zeros((1, 2), np.float32), (1 << 30, 2))",
        "mha.scaled_dot_product_attention(k[:9], k, k, mask=np.zeros((1, 1), bool), "
        "empty_rows='uniform')"),
    "many hidden units": (
        "q, k = np.zeros((500, 8), np.float32), np.zeros((200_000, 8), np.float32)\n"
        "w = np.zeros((8, 512), np.float32)",
        "mha.additive_attention(q, k, k, w, w, w[0])"),
    "deep projection": (
        "x, w = np.zeros((200, 1 << 21), np.float32), np.zeros((1 << 21, 32), np.float32)",
        "[mha.linear(x, w) for _ in range(99)]"),
    "layer of many sequences": (
        "x = np.ones((400, 128, 512), np.float32)\nlayer = mha.MultiHeadAttention(512, 8).freeze()",
        "[layer(x) for _ in range(99)]"),
    "many queries of few keys": (
        "q, k = np.ones((1_000_000, 64), np.float32), np.ones((300, 64), np.float32)\n"
        "output, pullback = mha.scaled_dot_product_attention_vjp(q, k, k)",
        "[pullback(output) for _ in range(99)]"),
    "gradient of one bias": (
        "x, bias = np.ones((20_000, 16), np.float32), np.ones((1, 1), np.float32)\n"
        "output, pullback = mha.scaled_dot_product_attention_vjp("
        "x, x, x, bias=bias, wrt=['bias'])",
        "[pullback(output) for _ in range(99)]"),
    "gradient of a bias that all queries share": (
        "x, bias = np.ones((4, 8, 1024, 64), np.float32), np.ones(1024, np.float32)\n"
        "output, pullback = mha.scaled_dot_product_attention_vjp("
        "x, x, x, bias=bias, wrt=['bias'])",
        "[pullback(output) for _ in range(100)]"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", LONG_CALLS)
def test_ctrl_c(name, num_threads):
    before, call = LONG_CALLS[name]
    done = run_python(INTERRUPTED.format(before=before, call=call, num_threads=num_threads))
    assert "goes on" in done.stdout, (done.stdout, done.stderr)
    assert float(done.stdout.split()[0]) < SLOWER, done.stdout


ROUNDED = """
import ctypes
import numpy as np
import mha
libm = ctypes.CDLL(None)
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((2, 3, 300, 24), np.float32) for _ in range(3))
x, weight = rng.standard_normal((200, 300), np.float32), rng.standard_normal((300, 99), np.float32)
def results():
    yield mha.scaled_dot_product_attention(query, key, value)
    yield mha.scaled_dot_product_attention(query[:, :, :1], key, value, scale=0.3)
    yield mha.linear(x, weight)
    yield from mha.scaled_dot_product_attention_vjp(query, key, value)[1](value)[:3]
odd = {odd}
for num_threads in (1, 3):
    with mha.threads(num_threads):
        assert libm.fesetround(odd) == 0
        rounded = [*results()]  # the workers are made by a thread in this mode
        assert libm.fegetround() == odd
        assert libm.fesetround(0) == 0
        for one, other in zip(rounded, results(), strict=True):
            assert np.array_equal(one, other)
print("the same bits")
"""


def test_results_do_not_depend_on_the_rounding_mode():
    upward = 0x800 if os.uname().machine == "x86_64" else 0x400000
    done = run_python(ROUNDED.format(odd=upward))
    assert done.stdout.strip() == "the same bits", done.stderr


FORKED = """
import os, sys, warnings
import numpy as np
import mha
x = np.random.default_rng(0).standard_normal((4, 8, 200, 32))
{before}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Python 3.12 warns of any fork with threads
    child = os.fork()
with mha.threads(4):
    result = mha.scaled_dot_product_attention(x, x, x)
if child == 0:
    os._exit(0 if np.isfinite(result).all() else 1)
assert os.waitpid(child, 0)[1] == 0
print("both went on")
"""


@pytest.mark.parametrize("before", [
    "", "with mha.threads(4): mha.scaled_dot_product_attention(x, x, x)"])
def test_fork(before):
    done = run_python(FORKED.format(before=before))
    assert done.stdout.strip() == "both went on", done.stderr


FORKED_BY_A_HANDLER = """
import os, signal
import numpy as np
import mha
x = np.random.default_rng(0).standard_normal((1, 8, 4000, 64), np.float32)
with mha.threads(1):
    wanted = mha.scaled_dot_product_attention(x, x, x)
child = []
signal.signal(signal.SIGALRM, lambda *_: child.append(os.fork()) if not child else None)
signal.setitimer(signal.ITIMER_REAL, 0.05)
with mha.threads(2):
    while not child:
        result = mha.scaled_dot_product_attention(x, x, x)
    right = np.array_equal(result, wanted)
    again = np.array_equal(mha.scaled_dot_product_attention(x, x, x), wanted)
if child[0] == 0:
    os._exit(0 if right and again else 1)
assert os.waitpid(child[0], 0)[1] == 0, "the child's result is wrong"
assert right and again
print("both are right")
"""


def test_fork_inside_a_call():
    done = run_python(FORKED_BY_A_HANDLER)
    assert done.stdout.strip() == "both are right", done.stderr


RAISED_IN_THE_CHILD = """
import os, signal
import numpy as np
import mha
x = np.random.default_rng(0).standard_normal((1, 8, 3000, 64), np.float32)
child = []
def fork_and_raise(*_):
    child.append(os.fork())
    if child[0] == 0:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, fork_and_raise)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    with mha.threads(2):
        while not child:
            mha.scaled_dot_product_attention(x, x, x)
except KeyboardInterrupt:
    with mha.threads(2):
        mha.scaled_dot_product_attention(x[:, :, :300], x, x)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]))
"""


def test_a_handler_that_forks_and_raises():
    done = run_python(RAISED_IN_THE_CHILD)
    assert done.stdout.strip() == "7", done.stderr


RESHAPED = """
import threading, time, warnings
import numpy as np
import mha
warnings.simplefilter("ignore")  # NumPy deprecates what this thread does
query, key = np.ones((4, 64)), np.ones((4000, 64), np.float32)  # casting key lets it run
def reshape():
    while True:
        for shape in ((64, 4), (4, 64)):
            query.shape = shape
            time.sleep(1e-4)
threading.Thread(target=reshape, daemon=True).start()
end = time.perf_counter() + 3
while time.perf_counter() < end:
    try:
        output, lse = mha.scaled_dot_product_attention(query, key, key, return_lse=True)
        assert output.shape == (4, 64) and lse.shape == (4,)
    except ValueError:
        pass
print("survived")
"""


@pytest.mark.thorough
def test_another_thread_reshapes_an_argument():
    done = run_python(RESHAPED)
    assert done.stdout.strip() == "survived", (done.returncode, done.stderr)


def test_exit_while_threads_compute():
    code = ("import threading, numpy as np, mha\n"
            "x = np.ones((1, 8, 4000, 64), np.float32)\n"
            "for _ in range(3):\n"
            "    threading.Thread(target=lambda: mha.scaled_dot_product_attention(x, x, x),"
            " daemon=True).start()\n")
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_signal_handler_may_call_us():
    x = np.ones((1, 4, 3000, 32), np.float32)
    small = np.ones((3, 4))
    seen = []

    def handler(number, frame):
        seen.append(mha.scaled_dot_product_attention(small, small, small))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not seen:
            result = mha.scaled_dot_product_attention(x, x, x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert np.array_equal(seen[0], small)
    assert np.allclose(result, 1)


TEAM_IN_A_HANDLER = """
import signal
import numpy as np
import mha
from mha import _core
x = np.ones((1, 8, 6000, 64), np.float32)
seen = []
def use(*_):
    _core.use_team(None)
    seen.append("used")
signal.signal(signal.SIGALRM, use)
with mha.threads(2):
    while not seen:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        mha.scaled_dot_product_attention(x, x, x)
print(*seen)
"""


def test_a_team_is_chosen_in_the_middle_of_a_call():
    """By a signal handler, on the thread whose call holds the pool."""
    done = subprocess.run([sys.executable, "-c", TEAM_IN_A_HANDLER], text=True,
                          capture_output=True, timeout=60 * SLOWER)
    assert done.stdout.strip() == "used", done.stderr


def test_what_is_no_team():
    for wrong in (0, 1, "mha.team", _core.pack_weight(np.ones((2, 2)))):
        with pytest.raises(TypeError, match=r"team: got .*, wanted a capsule named mha\.team"):
            _core.use_team(wrong)
