"""One answer everywhere: the same bits at any thread count and on every set with FMA."""

import os
import subprocess
import sys

import numpy as np
import pytest
from agreement import by_token
from option_cases import SCORES, by_head
from spread_of_calls import digest

import mha
from mha import _core


def digest_in_process(isa, num_threads):
    environment = {**os.environ, "MHA_ISA": isa, "MHA_NUM_THREADS": str(num_threads)}
    done = subprocess.run([sys.executable, "tests/helpers/spread_of_calls.py"], env=environment,
                          text=True, capture_output=True, check=True)
    used_isa, used_threads, sha = done.stdout.split()
    assert (used_isa, used_threads) == (isa, str(num_threads))
    return sha


@pytest.mark.thorough
def test_same_bits_at_any_thread_count():
    digests = set()
    for num_threads in (1, 2, 3, 8):
        with mha.threads(num_threads):
            digests.add(digest())
    assert len(digests) == 1


def test_same_bits_on_every_instruction_set_with_fma(request):
    others = {"baseline", "amx"}
    with_fma = [isa for isa in _core.instruction_sets() if isa not in others] or ["baseline"]
    counts = (1, 3) if request.config.getoption("--all") else (3,)  # of threads
    digests = {digest_in_process(isa, count) for isa in with_fma for count in counts}
    assert len(digests) == 1
    if mha.instruction_set() not in others:
        assert digests == {digest()}


def check_that_neighbours_do_not_matter(dtype, length, head_dim, parts):
    """Attention of rows first..last alone has the bits that it has among all queries."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((length, head_dim)).astype(dtype) for _ in range(3))
    key, value = (np.concatenate([array] * (300 // length + 1)) for array in (key, value))
    mask = rng.random((length, len(key))) < 0.5
    bias = rng.standard_normal((length, len(key))).astype(dtype)
    lengths = rng.integers(0, len(key) + 1, length)
    for options in ({}, {"causal": True}, {"window": (70, 3)}, *SCORES, *by_head(1, dtype)):
        whole = mha.scaled_dot_product_attention(
            query, key, value, query_offset=0, mask=mask, bias=bias, key_lengths=lengths,
            return_weights=True, return_lse=True, **options)
        plain = mha.scaled_dot_product_attention(query, key, value, query_offset=0, **options)
        for first, last in parts:
            rows = slice(first, last)
            part = mha.scaled_dot_product_attention(
                query[rows], key, value, query_offset=first, mask=mask[rows], bias=bias[rows],
                key_lengths=lengths[rows], return_weights=True, return_lse=True, **options)
            for one, other in zip(part, whole, strict=True):
                assert np.array_equal(one, other[rows])
            assert np.array_equal(plain[rows], mha.scaled_dot_product_attention(
                query[rows], key, value, query_offset=first, **options))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_queries_give_the_same_bits_whatever_others_share_their_block(dtype):
    parts = ((0, 5), (3, 50), (17, 23), (100, 299), (290, 300))
    check_that_neighbours_do_not_matter(dtype, 300, 16, parts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_query_alone_gives_the_same_bits_as_among_a_few(dtype):
    check_that_neighbours_do_not_matter(dtype, 4, 40, ((0, 1), (3, 4), (1, 4), (0, 2)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_grouped_heads_give_the_same_bits_as_heads_of_their_own(dtype):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 20, 2, 40)).astype(dtype)
    key, value = (rng.standard_normal((2, 1, 700, 40)).astype(dtype) for _ in range(2))
    grouped = mha.scaled_dot_product_attention(query, key, value, causal=True, query_offset=600)
    alone = mha.scaled_dot_product_attention(
        query, np.repeat(key, 20, 1), np.repeat(value, 20, 1), causal=True, query_offset=600)
    assert np.array_equal(grouped, alone)


@pytest.mark.parametrize("options", [
    {}, {"causal": True, "dropout": 0.2}, {"window": (40, 40)}, {"key_lengths": [0, 530]},
    *by_head(4), {"causal": True, "query_offset": -100, "empty_rows": "uniform"}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_bits_however_rows_lie(dtype, options):
    """Rows that lie apart are copied side by side first; nothing else may change."""
    rng = np.random.default_rng(0)
    query, grad_output = (rng.standard_normal((2, 4, 600, 24)).astype(dtype) for _ in range(2))
    key, value = (rng.standard_normal((2, 2, 650, 24)).astype(dtype) for _ in range(2))
    found = []
    for lay in (np.ascontiguousarray, by_token):
        laid = [lay(array) for array in (query, key, value)]
        plain = mha.scaled_dot_product_attention(*laid, **options, rng=1)
        output, pullback = mha.scaled_dot_product_attention_vjp(*laid, **options, rng=1)
        with mha.threads(3):
            by_three = mha.scaled_dot_product_attention(*laid, **options, rng=1)
        found.append([plain, by_three, output, *pullback(lay(grad_output))[:3]])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
