"""One answer everywhere: the same bits at any thread count and on every set with FMA."""

import os
import subprocess
import sys

import numpy as np
import pytest
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_query_alone_gives_the_same_bits_as_among_others(dtype):
    """A block of queries is as wide as the vectors are: which queries share it must not matter."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((300, 16)).astype(dtype) for _ in range(3))
    mask = rng.random((300, 300)) < 0.5
    bias = rng.standard_normal((300, 300)).astype(dtype)
    lengths = rng.integers(0, 301, 300)
    for options in ({}, {"causal": True}, {"window": (70, 3)}, {"softcap": 3.0}):
        whole = mha.scaled_dot_product_attention(
            query, key, value, query_offset=0, mask=mask, bias=bias, key_lengths=lengths,
            return_weights=True, return_lse=True, **options)
        plain = mha.scaled_dot_product_attention(query, key, value, query_offset=0, **options)
        for first, last in ((0, 1), (5, 6), (3, 50), (17, 18), (100, 299), (299, 300)):
            rows = slice(first, last)
            part = mha.scaled_dot_product_attention(
                query[rows], key, value, query_offset=first, mask=mask[rows], bias=bias[rows],
                key_lengths=lengths[rows], return_weights=True, return_lse=True, **options)
            for one, other in zip(part, whole, strict=True):
                assert np.array_equal(one, other[rows])
            assert np.array_equal(plain[rows], mha.scaled_dot_product_attention(
                query[rows], key, value, query_offset=first, **options))
