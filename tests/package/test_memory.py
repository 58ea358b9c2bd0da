"""Memory: linear in the length, and nothing leaks."""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mha

PEAK = """
import resource, sys
import numpy as np
import mha
mha.set_num_threads(2)  # each has a workspace of its own, and a machine may have hundreds
x = np.ones((1, 8, {length}, 64), np.float32)
out = np.ones_like(x)
mha.scaled_dot_product_attention(x[:, :, :100], x[:, :, :100], x[:, :, :100])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mha.scaled_dot_product_attention(x[:, :, :{queries}], x, x, {options} out=out[:, :, :{queries}])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["", "causal=True,", "key_lengths=[9000],", "window=(300, 0),"])
def test_scores_are_never_materialised(options):
    """One head's scores of 2,000 x 16,384 would take 131 MB; the call may take 8 MiB."""
    code = PEAK.format(length=16384, queries=2000, options=options)
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert int(done.stdout) * 1024 <= 8 * 2**20, done.stdout


@pytest.mark.parametrize("option", [
    "mask=np.broadcast_to(np.arange(16384) < 5000, (2000, 16384)),",
    "bias=np.broadcast_to(np.zeros(16384), (1, 8, 2000, 16384)),"])
def test_what_is_broadcast_costs_nothing(option):
    """A bool mask is not widened to floats, and a bias is cast once for all that repeat it."""
    code = PEAK.format(length=16384, queries=2000, options=option)
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert int(done.stdout) * 1024 <= 8 * 2**20, done.stdout


@pytest.mark.parametrize("call", [
    "scaled_dot_product_attention_vjp(q, x[:, :1], x[:, :1])",
    "additive_attention_vjp(q, x[:, :1], x[:, :1], x[0, 0, :64, :4], x[0, 0, :64, :4],"
    " q[0, 0, 0, :4])"])
def test_gradients_do_not_store_the_weights(call):
    """The weights of 16,384 x 2,000 pairs would take 131 MB. 9 MB are output and gradients."""
    code = PEAK.format(length=16384, queries=2000, options="").replace(
        "mha.scaled_dot_product_attention(x[:, :, :2000], x, x,  out=out[:, :, :2000])",
        f"q = x[:, :1, :2000]; out, pull = mha.{call}; pull(out)")
    assert "pull(out)" in code
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert int(done.stdout) * 1024 <= 24 * 2**20, done.stdout


FRESH_PAGES = """
import resource
import numpy as np
import mha
mha.set_num_threads({num_threads})
layer = mha.MultiHeadAttention(768, 12, rng=0).freeze()
def fresh_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layer(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for batch, length in ((1, 128), (8, 128), (32, 128), (1, 1024)):
    x = np.ones((batch, length, 768), np.float32)
    print(min([fresh_pages() for _ in range(6)][2:]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_layer_called_again_touches_no_fresh_page(num_threads):
    """Its workspace, 50 MB for 32 sequences, stays: it would be 12,000 page faults a call."""
    code = FRESH_PAGES.format(num_threads=num_threads)
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["0"] * 4


def test_inputs_are_not_written_to():
    import mha

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 3, 5, 4)) for _ in range(3)]
    for array in arrays:
        array.flags.writeable = False
    before = [array.copy() for array in arrays]
    mha.scaled_dot_product_attention(*arrays, causal=True, dropout=0.5, rng=1)
    assert all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def large_results(count, size=200_000):
    """`count` results of 0.8 MB, each filled with its own number."""
    results = [mha.linear(np.zeros((1, 1), np.float32), np.zeros((1, size), np.float32))
               for _ in range(count)]
    for number, result in enumerate(results):
        result.fill(number)
    return results


def test_living_results_never_share_memory():
    rng = np.random.default_rng(0)
    living = {}
    for number in range(400):
        size = int(rng.choice([200_000, 200_001, 1_000_000, 60_000]))
        living[number] = mha.linear(np.zeros((1, 1), np.float32), np.zeros((1, size), np.float32))
        living[number].fill(number)
        for dying in rng.choice(list(living), size=min(2, len(living)), replace=False):
            if rng.random() < 0.6:
                del living[int(dying)]
        assert all((array == name).all() for name, array in living.items())


def test_results_die_in_other_threads_and_processes():
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        for results in executor.map(large_results, [5] * 20):
            assert all((array == number).all() for number, array in enumerate(results))
    child = os.fork()
    if child == 0:
        results = large_results(5)
        os._exit(0 if all((array == i).all() for i, array in enumerate(results)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_large_result_can_be_resized():
    result, = large_results(1)
    result.resize((400_000,), refcheck=False)
    assert (result[200_000:] == 0).all() and (result[:200_000] == 0).all()


def test_what_dead_results_keep_is_bounded():
    large_results(200)
    before = resident_bytes()
    for size in range(10_000_000, 10_000_020):
        mha.linear(np.zeros((1, 1), np.float32), np.zeros((1, size), np.float32)).fill(1)
    assert resident_bytes() - before < 60 * 2**20
