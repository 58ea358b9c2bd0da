"""PyTorch's threads at mha's work: the same bits, no threads beside them, Ctrl-C and forks."""

import os
import subprocess
import sys

import pytest
import torch

from mha.compat.pytorch import _team as team

PRELUDE = """
import os, signal, threading, time
import torch
import mha
from mha.compat.pytorch._tensors import attention

torch.manual_seed(0)
torch.set_num_threads(2)
mha.set_num_threads(2)
query = torch.randn(1, 8, 3000, 64)
torch.randn(2000, 2000) @ torch.randn(2000, 2000)
(query + query).sum()  # its threads are there


def run(x=query):
    return attention(x, x, x)


with mha.threads(1):
    wanted = run()
"""


def said(code, timeout=100):
    done = subprocess.run(
        [sys.executable, "-W", "ignore:.*fork:DeprecationWarning", "-c", PRELUDE + code], text=True,
        capture_output=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_thread_is_made():
    assert said("""
from mha.compat.pytorch._team import runtime_of_openmp
assert runtime_of_openmp().startswith(os.path.dirname(torch.__file__))
before = len(os.listdir("/proc/self/task"))
for _ in range(3):
    assert torch.equal(run(), wanted)
print(len(os.listdir("/proc/self/task")) - before)
""") == "0"


def test_from_many_threads_and_with_other_numbers():
    assert said("""
def check(number):
    torch.set_num_threads(number)
    for _ in range(3):
        assert torch.equal(run(), wanted)
    done.append(number)


done = []
callers = [threading.Thread(target=check, args=(1 + i % 3,)) for i in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
check(1)
check(4)
print(len(done))
""") == "6"


def test_interrupted():
    seconds = float(said("""
long = torch.randn(1, 8, 60000, 64)
signal.setitimer(signal.ITIMER_REAL, 0.3)
signal.signal(signal.SIGALRM, signal.default_int_handler)
start = time.perf_counter()
try:
    run(long)
except KeyboardInterrupt:
    print(time.perf_counter() - start)
assert torch.equal(run(), wanted)
"""))
    assert seconds < 3  # of about 20


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_that_forks(raises):
    assert said(f"""
children = []


def fork(*_):
    if not children:
        children.append(os.fork())
        if {raises} and children[0] == 0:
            raise KeyboardInterrupt


signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    while not children:
        found = run()
except KeyboardInterrupt:
    found = wanted
if children[0] == 0:
    os._exit(0 if torch.equal(found, wanted) and torch.equal(run(), wanted) else 1)
assert torch.equal(found, wanted)
assert os.waitpid(children[0], 0)[1] == 0, "the child's result is wrong"
print("both are right")
""") == "both are right"


def test_without_an_openmp_of_its_own(monkeypatch):
    monkeypatch.setattr(team, "runtime_of_openmp", lambda: None)
    assert not team.share_threads()
    monkeypatch.undo()
    assert team.share_threads() == ("OpenMP" in torch.__config__.parallel_info())


def test_first_used_by_a_signal_handler():
    """In the middle of a call, whose thread holds the pool: that call goes on as it began."""
    program = """
import signal
import numpy as np
import mha
from mha.compat.pytorch import _team as team

x = np.random.default_rng(0).standard_normal((1, 8, 3000, 64), np.float32)
with mha.threads(1):
    wanted = mha.scaled_dot_product_attention(x, x, x)
answers = []
signal.signal(signal.SIGALRM, lambda *_: answers.append(team.share_threads()))
signal.setitimer(signal.ITIMER_REAL, 0.05)
with mha.threads(2):
    while not answers:
        assert np.array_equal(mha.scaled_dot_product_attention(x, x, x), wanted)
    assert np.array_equal(mha.scaled_dot_product_attention(x, x, x), wanted)
print(answers)
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True,
                          timeout=100)
    assert done.stdout.strip() == "[True]", done.stderr
