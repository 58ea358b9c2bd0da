"""bfloat16 where ml_dtypes is not installed: layers and caches compute, and what would have to show
an array of it is an ImportError that says what to install."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from half_types import BFLOAT16, same_bits

import mha

BLOCKED = """
import copy, pickle, sys
sys.modules["ml_dtypes"] = None  # importing it raises
import numpy as np
import mha

def refused(call, words="ml_dtypes"):
    try:
        call()
    except ImportError as error:
        assert words in str(error) and "pip install ml_dtypes" in str(error), error
    else:
        raise AssertionError("shown without ml_dtypes")

def is_rounded(array):
    assert array.dtype == np.float32
    return not (array.view(np.uint32) & 0xFFFF).any()

x = np.random.default_rng(0).standard_normal((2, 9, 24)).astype(np.float32)
options = {"num_kv_heads": 2, "sinks": True, "relative_bias": 3, "qk_norm": "head",
           "rotary": mha.Rotary(4), "alibi": [1, 0.5, 0.25, 0.125]}
"""

LAYERS = BLOCKED + """
for given in ({}, options):
    wide = mha.MultiHeadAttention(24, 4, rng=0, **given)
    layer = mha.MultiHeadAttention(24, 4, rng=0, dtype="bfloat16", **given)
    assert layer.dtype == "bfloat16" and "dtype=bfloat16" in repr(layer)
    wanted = layer(x)
    assert is_rounded(wanted) and wanted.any()
    assert np.abs(wanted - wide(x)).max() < 0.05 * np.abs(wanted).max()
    frozen = copy.deepcopy(layer).freeze()
    others = [frozen, copy.deepcopy(frozen), copy.copy(layer), pickle.loads(pickle.dumps(frozen)),
              pickle.loads(pickle.dumps(layer)), copy.deepcopy(frozen).unfreeze(),
              wide.astype("bfloat16"), layer.astype("bfloat16").freeze()]
    loaded = mha.MultiHeadAttention(24, 4, dtype="bfloat16", rng=5, **given)
    loaded.load_parameters(wide.parameters())
    assigned = mha.MultiHeadAttention(24, 4, dtype="bfloat16", rng=5, **given)
    for name, parameter in wide.parameters().items():
        setattr(assigned, name, parameter)
    for other in [*others, loaded, assigned]:
        assert np.array_equal(other(x), wanted), other
        assert np.array_equal(other(x.astype(np.float64)), wanted)
    output, weights, lse = frozen(x, causal=True, return_weights=True, return_lse=True)
    assert is_rounded(output) and weights.dtype == lse.dtype == np.float32
    back = layer.astype(np.float32)
    assert is_rounded(back.W_q) and not np.array_equal(back.W_q, wide.W_q)
    assert layer.astype(np.float16).W_q.dtype == np.float16
    layer.prune_heads([0, 2])
    assert layer(x).shape == x.shape and layer.num_parameters < wide.num_parameters
    refused(lambda: frozen.W_q), refused(lambda: frozen.b_o), refused(frozen.parameters)
    refused(lambda: frozen.vjp(x)), refused(lambda: frozen.vjp(x[0], starts=[0, 4, 9]))
    ragged = frozen(x[0], starts=[0, 9])
    assert is_rounded(ragged) and np.array_equal(ragged, frozen(x[:1], causal=False)[0])
    for wrong in (np.float16, np.int32, np.uint16, bool):
        for call in (lambda: frozen(x.astype(wrong)),
                     lambda: frozen(x.astype(wrong), cache=frozen.new_cache(2))):
            try:
                call()
            except TypeError as error:
                assert "bfloat16" in str(error), error
            else:
                raise AssertionError(wrong)
"""

CACHES = BLOCKED + """
options.pop("qk_norm")
for dtype in (np.float32, "bfloat16", np.float64):
    layer = mha.MultiHeadAttention(24, 4, rng=0, dtype=dtype, **options).freeze()
    cache = layer.new_cache(2, dtype="bfloat16")
    whole = layer(x, cache=layer.new_cache(2, dtype="bfloat16"))
    cut = [layer(x[:, begin:end], cache=cache) for begin, end in ((0, 1), (1, 8), (8, 9))]
    assert np.array_equal(np.concatenate(cut, axis=1), whole)
    assert is_rounded(whole) if dtype == "bfloat16" else whole.dtype == dtype
    assert cache.dtype == "bfloat16" and "bfloat16" in repr(cache)
    cache.select([1, 0]), cache.truncate(5)
    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    assert np.array_equal(layer(x[::-1, 5:6], cache=cache), whole[::-1, 5:6])
    refused(lambda: cache.key), refused(lambda: cache.value)
    ones = np.ones((2, 2, 1, 6), np.float32)
    for wrong in (np.float16, np.uint16, np.int64, bool):
        try:
            cache.append(ones.astype(wrong), ones)
        except TypeError as error:
            assert "bfloat16" in str(error)
        else:
            raise AssertionError(wrong)
    cache.append(ones, ones.astype(np.float64))
layer = mha.MultiHeadAttention(24, 4, rng=0, dtype="bfloat16")
memory = layer.new_memory(x)
assert memory.dtype == "bfloat16" and is_rounded(layer(x[:, :2], cache=memory))
refused(lambda: memory.key)
for wrong in (np.uint16, "uint16", "bfloat", None):
    for make in (lambda: mha.KVCache(1, 1, 2, dtype=wrong),
                 lambda: mha.MultiHeadAttention(8, 2, dtype=wrong)):
        try:
            make()
        except TypeError as error:
            assert "bfloat16" in str(error)
        else:
            raise AssertionError(wrong)
"""


@pytest.mark.parametrize("code", [LAYERS, CACHES], ids=["layers", "caches"])
def test_without_ml_dtypes(code):
    subprocess.run([sys.executable, "-c", code], check=True)


PICKLED = BLOCKED + """
layer = pickle.loads(sys.stdin.buffer.read())
assert layer.frozen and layer.dtype == "bfloat16"
output = layer(x)
assert is_rounded(output)
sys.stdout.buffer.write(pickle.dumps((layer, output)))
"""


def test_the_numbers_are_those_with_it():
    """A layer goes there and back, with the same output but for its type."""
    x = np.random.default_rng(0).standard_normal((2, 9, 24)).astype(np.float32)
    layer = mha.MultiHeadAttention(24, 4, rng=3, dtype=BFLOAT16).freeze()
    answer = subprocess.run([sys.executable, "-c", PICKLED], input=pickle.dumps(layer), check=True,
                            capture_output=True).stdout
    back, output = pickle.loads(answer)
    assert back.dtype == BFLOAT16 and same_bits(back.W_q, layer.W_q)
    assert same_bits(back(x), layer(x)) and np.array_equal(layer(x).astype(np.float32), output)


LATER = """
import numpy as np
import mha
layer = mha.MultiHeadAttention(24, 4, rng=0, dtype="bfloat16")
x = np.random.default_rng(0).standard_normal((2, 9, 24)).astype(np.float32)
before = layer(x)
import ml_dtypes
assert layer.dtype == ml_dtypes.bfloat16 == layer.W_q.dtype == layer(x).dtype
assert np.array_equal(layer(x).astype(np.float32), before)
layer.W_q[...] = 0
assert layer.parameters()["W_q"].any() == 0 and not np.array_equal(layer(x), before)
output, pullback = layer.vjp(x)
assert pullback(output).W_q.dtype == output.dtype == ml_dtypes.bfloat16
layer(x, cache=layer.new_cache(2))
"""


def test_imported_later():
    """Parameters are shown then, as views of what is there."""
    subprocess.run([sys.executable, "-c", LATER], check=True)
