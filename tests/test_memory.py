"""Memory: linear in the length, and nothing leaks."""

import os
import subprocess
import sys

import numpy as np
import pytest

PEAK = """
import resource, sys
import numpy as np
import mha
x = np.ones((1, 8, {length}, 64), np.float32)
out = np.ones_like(x)
mha.scaled_dot_product_attention(x[:, :, :100], x[:, :, :100], x[:, :, :100])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mha.scaled_dot_product_attention(x[:, :, :{queries}], x, x, {options} out=out[:, :, :{queries}])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("options", ["", "causal=True,", "key_lengths=[9000],", "window=(300, 0),"])
def test_scores_are_never_materialised(options):
    """One head's scores of 2,000 x 16,384 would take 131 MB; the call may take 8 MiB."""
    code = PEAK.format(length=16384, queries=2000, options=options)
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True,
                          env={**os.environ, "MHA_NUM_THREADS": "2"})
    assert int(done.stdout) * 1024 <= 8 * 2**20, done.stdout


def test_a_mask_is_read_as_it_is():
    """A bool mask is not widened to floats: a broadcast one costs nothing at all."""
    code = PEAK.format(length=16384, queries=2000,
                       options="mask=np.broadcast_to(np.arange(16384) < 5000, (2000, 16384)),")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert int(done.stdout) * 1024 <= 8 * 2**20, done.stdout


def test_inputs_are_not_written_to():
    import mha

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 3, 5, 4)) for _ in range(3)]
    for array in arrays:
        array.flags.writeable = False
    before = [array.copy() for array in arrays]
    mha.scaled_dot_product_attention(*arrays, causal=True, dropout=0.5, rng=1)
    assert all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True))
