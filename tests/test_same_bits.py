"""One answer everywhere: the same bits at any thread count and on every set with FMA."""

import os
import subprocess
import sys

from spread_of_calls import digest

import mha
from mha import _core


def digest_in_process(isa, num_threads):
    environment = {**os.environ, "MHA_ISA": isa, "MHA_NUM_THREADS": str(num_threads)}
    done = subprocess.run([sys.executable, "tests/spread_of_calls.py"], env=environment, text=True,
                          capture_output=True, check=True)
    used_isa, used_threads, sha = done.stdout.split()
    assert (used_isa, used_threads) == (isa, str(num_threads))
    return sha


def test_same_bits_at_any_thread_count():
    digests = set()
    for num_threads in (1, 2, 3, 8):
        with mha.threads(num_threads):
            digests.add(digest())
    assert len(digests) == 1


def test_same_bits_on_every_instruction_set_with_fma():
    with_fma = [isa for isa in _core.instruction_sets() if isa != "baseline"] or ["baseline"]
    digests = {digest_in_process(isa, num_threads) for isa in with_fma for num_threads in (1, 3)}
    assert len(digests) == 1
    if mha.instruction_set() != "baseline":
        assert digests == {digest()}
