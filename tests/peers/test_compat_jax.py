"""mha.compat.jax against jax.nn.dot_product_attention itself, over random configurations."""

import jax
import ml_dtypes
import numpy as np
import pytest
from configurations import COUNT
from gate import assert_agrees

from mha.compat import jax as compat

OPTIONS = ("scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size",
           "implementation", "return_residual")
theirs_compiled = jax.jit(jax.nn.dot_product_attention, static_argnames=(
    "scale", "is_causal", "local_window_size", "implementation", "return_residual"))


def case_of(seed):
    """Arrays, bias, mask and options of one call."""
    rng = np.random.default_rng(seed)
    batch, query_len, key_len = (int(size) for size in rng.integers(1, 20, 3))
    kv_heads, groups = (int(size) for size in rng.integers(1, 4, 2))
    head_dim = int(rng.integers(1, 33))
    heads = kv_heads * groups
    batched = rng.random() < 0.75
    if not batched:
        batch = 1
    arrays = [rng.normal(size=shape)[() if batched else 0] for shape in (
        (batch, query_len, heads, head_dim), *[(batch, key_len, kv_heads, head_dim)] * 2)]

    def spread(random):
        shape = [1 if rng.random() < 0.3 else size
                 for size in (batch, heads, query_len, key_len)]
        return random(size=shape[rng.integers(2):] if batch == 1 else shape)

    bias = spread(rng.normal) if rng.random() < 0.4 else None
    mask = None
    if rng.random() < 0.5:
        mask = spread(rng.random) < 0.7
        if rng.random() < 0.5:
            mask[..., 0, :] = False  # a query that sees nothing
    options = {"scale": [None, 0.3, -0.4][rng.integers(3)], "is_causal": bool(rng.random() < 0.4),
               "implementation": [None, "xla"][rng.integers(2)],
               "return_residual": bool(rng.random() < 0.5)}
    if rng.random() < 0.3:
        options["query_seq_lengths"] = rng.integers(0, query_len + 3, batch, dtype=np.int32)
    if rng.random() < 0.4:
        options["key_value_seq_lengths"] = rng.integers(0, key_len + 3, batch, dtype=np.int32)
    if rng.random() < 0.4:
        left, right = (int(size) for size in rng.integers(0, 8, 2))
        options["local_window_size"] = left if rng.random() < 0.4 else (left, right)
    return arrays, bias, mask, options


def both(arrays, bias, mask, options, dtype, theirs=theirs_compiled):
    """The results of ours and theirs, as tuples."""
    arrays = [array.astype(dtype) for array in arrays]
    bias = None if bias is None else bias.astype(np.float32)
    results = [function(*arrays, bias, mask, **options)
               for function in (compat.dot_product_attention, theirs)]
    ours, theirs = (found if isinstance(found, tuple) else (found,) for found in results)
    return ours, [np.asarray(array) for array in theirs]


@pytest.mark.parametrize("flag", [0, 1, np.False_, np.True_, None])
@pytest.mark.parametrize("name", ["is_causal", "return_residual"])
def test_flags_are_taken_as_jax_takes_them(name, flag):
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    found, wanted = (function(x, x, x, **{name: flag}) for function in (
        compat.dot_product_attention, jax.nn.dot_product_attention))
    assert isinstance(found, tuple) == isinstance(wanted, tuple)
    for array, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(array, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(COUNT))
def test_dot_product_attention_is_jax(seed):
    arrays, bias, mask, options = case_of(seed)
    arrays = [array.astype(np.float32) for array in arrays]
    bias = None if bias is None else bias.astype(np.float32)
    ours, theirs = both(arrays, bias, mask, options, np.float32)
    exact = compat.dot_product_attention(*(array.astype(np.float64) for array in arrays), bias,
                                         mask, **options)
    exact = exact if isinstance(exact, tuple) else (exact,)
    assert len(ours) == len(theirs) == len(exact)
    for our, their, right in zip(ours, theirs, exact):
        empty = right == compat.EMPTY_RESIDUAL  # of a size that would hide all other numbers
        np.testing.assert_array_equal(our[empty], their[empty])
        assert_agrees(np.where(empty, 0, our), np.where(empty, 0, their), np.where(empty, 0, right),
                      options)


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    cases = [case_of(seed) for seed in range(200)]
    assert {arrays[0].ndim for arrays, *_ in cases} == {3, 4}
    assert sum(arrays[0].shape[-2] != arrays[1].shape[-2] for arrays, *_ in cases) > 60
    assert {mask.ndim for _, _, mask, _ in cases if mask is not None} == {3, 4}
    assert {bias.ndim for _, bias, *_ in cases if bias is not None} == {3, 4}
    for option in OPTIONS:
        assert sum(options.get(option) not in (None, False) if option in (
            "scale", "is_causal", "return_residual", "implementation") else option in options
                   for *_, options in cases) > 40, option
    assert {type(options["local_window_size"]) for *_, options in cases
            if "local_window_size" in options} == {int, tuple}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_halves_keep_their_type(seed, dtype):
    """JAX rounds the weights to halves before the values meet them; ours rounds the output alone:
    it differs by some roundings of theirs."""
    arrays, bias, mask, options = case_of(seed)
    # Compiled for a CPU, JAX has no products of float16.
    ours, theirs = both(arrays, bias, mask, options, dtype, jax.nn.dot_product_attention)
    for our, their in zip(ours, theirs):
        assert our.dtype == their.dtype == dtype
        our, their = our.astype(np.float32), their.astype(np.float32)
        finite = abs(their) < 1e30
        np.testing.assert_array_equal(finite, abs(our) < 1e30)
        largest = abs(their[finite]).max(initial=0)
        assert (abs(our[finite] - their[finite]) <= 4 * ml_dtypes.finfo(dtype).eps * largest).all()


def test_arrays_of_jax_are_taken():
    arrays = [jax.numpy.asarray(array, np.float32) for array in case_of(0)[0]]
    assert_agrees(compat.dot_product_attention(*arrays),
                  np.asarray(jax.nn.dot_product_attention(*arrays)),
                  compat.dot_product_attention(*(np.asarray(array, np.float64)
                                                 for array in arrays)), "arrays of JAX")
