"""bfloat16 as PyTorch has it: its tensors come by DLPack, and its attention agrees."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import mha

ROUNDING = 2.0**-8  # the largest relative error of rounding to bfloat16


def tensors(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_tensors_of_bfloat16(causal):
    query, key, value = tensors(2, 4, 33, 24)
    got = mha.scaled_dot_product_attention(query, key, value, causal=causal)
    arrays = [tensor.float().numpy().astype(ml_dtypes.bfloat16) for tensor in (query, key, value)]
    assert np.array_equal(got, mha.scaled_dot_product_attention(*arrays, causal=causal))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=causal).numpy()
    error = np.abs(got.astype(np.float64) - wanted).max()
    assert error <= 1.01 * ROUNDING * np.abs(wanted).max()


def test_views_of_tensors_and_other_arguments():
    query, key, value = (tensor.transpose(1, 2)[:, :, 3:] for tensor in tensors(2, 33, 4, 24))
    got = mha.scaled_dot_product_attention(query, key, value)
    copies = [tensor.contiguous() for tensor in (query, key, value)]
    assert np.array_equal(got, mha.scaled_dot_product_attention(*copies))
    x, weight, bias = torch.ones(5, 24), torch.ones(24, 7), torch.ones(7)
    halves = [tensor.to(torch.bfloat16) for tensor in (x, weight, bias)]
    assert (mha.linear(*halves) == 25).all()
    cache = mha.KVCache(2, 4, 24, dtype="bfloat16")
    cache.append(key, value)
    assert np.array_equal(cache.key.astype(np.float32), key.float().numpy())


FIRST = """
import sys, torch
from mha.compat import pytorch as compat
query, mask = torch.randn(2, 3, 4, 8).bfloat16(), torch.randn(4, 4).bfloat16()
assert "ml_dtypes" not in sys.modules
given = eval(sys.argv[1])
got = compat.scaled_dot_product_attention(query, query, **given)
wanted = torch.nn.functional.scaled_dot_product_attention(query, query, **given)
assert str(got.dtype) == "bfloat16", got.dtype
error = abs(torch.from_numpy(got.astype("float32")) - wanted.float()).max()
assert error < 0.02, error
assert compat.scaled_dot_product_attention(query, query.float(), query.float()).dtype == "float32"
"""


@pytest.mark.parametrize("given", [
    "dict(value=query)", "dict(value=query, attn_mask=mask)", "dict(value=query, is_causal=True)",
    "dict(value=query[:, :1], enable_gqa=True)"])
def test_nobody_has_imported_ml_dtypes(given):
    """The adapter imports it, as functional_attention does."""
    subprocess.run([sys.executable, "-c", FIRST, given], check=True)


def test_ml_dtypes_is_not_installed():
    code = FIRST.replace("given = eval", "sys.modules['ml_dtypes'] = None; given = eval")
    found = subprocess.run([sys.executable, "-c", code, "dict(value=query)"], check=False,
                           capture_output=True, text=True)
    assert "ImportError: query: got bfloat16" in found.stderr
    assert "pip install ml_dtypes" in found.stderr
