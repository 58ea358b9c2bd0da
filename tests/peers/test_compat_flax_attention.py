"""dot_product_attention of mha.compat.flax against Flax' own, over random configurations; halves,
signatures and clones."""

import inspect

import flax.linen
import flax.nnx
import jax
import ml_dtypes
import numpy as np
import pytest
from configurations import COUNT
from gate import assert_agrees

from mha.compat.flax import linen, nnx

OURS, THEIRS = (linen, nnx), (flax.linen, flax.nnx)


def case_of(seed):
    """(whether it is Linen's, arrays, options) of one call."""
    rng = np.random.default_rng(seed)
    of_linen = bool(seed % 2)
    batch = tuple(int(size) for size in rng.integers(1, 4, rng.integers(1, 3)))
    query_len, key_len = (int(size) for size in rng.integers(1, 16, 2))
    kv_heads, dim = int(rng.integers(1, 4)), int(rng.integers(4, 17))
    heads = kv_heads * (1 if of_linen else int(rng.integers(1, 4)))
    arrays = [rng.normal(size=(*batch, length, of, dim)) for length, of in (
        (query_len, heads), (key_len, kv_heads), (key_len, kv_heads))]
    options = {}
    if rng.random() < 0.5:
        options["bias"] = rng.normal(size=(*batch, heads, query_len, key_len))
    if rng.random() < 0.6:
        options["mask"] = rng.random((*batch, heads, query_len, key_len)) < 0.7
    if not of_linen:
        options["is_causal"] = bool(rng.random() < 0.5)
    return of_linen, arrays, options


@pytest.mark.parametrize("seed", range(COUNT))
def test_function_is_flax(seed):
    of_linen, arrays, options = case_of(seed)
    ours, theirs = (modules[not of_linen] for modules in (OURS, THEIRS))
    single = {name: array if name != "bias" else array.astype(np.float32)
              for name, array in options.items()}
    arrays = [array.astype(np.float32) for array in arrays]
    exact = ours.dot_product_attention(*(array.astype(np.float64) for array in arrays), **single)
    found = ours.dot_product_attention(*arrays, **single)
    wanted = np.asarray(theirs.dot_product_attention(*map(jax.numpy.asarray, arrays), **{
        name: option if isinstance(option, bool) else jax.numpy.asarray(option)
        for name, option in single.items()}))
    assert_agrees(found, wanted, exact, (of_linen, options.keys()))


def test_cases_cover_every_feature():
    cases = [case_of(seed) for seed in range(200)]
    for name in ("bias", "mask", "is_causal"):
        assert sum(options.get(name) is not None for *_, options in cases) > 40, name
    assert sum(arrays[0].shape[-2] != arrays[1].shape[-2] for _, arrays, _ in cases) > 40
    assert sum(arrays[0].ndim == 5 for _, arrays, _ in cases) > 40


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("of_linen", [True, False])
def test_halves_are_those_of_flax_to_their_rounding(of_linen, dtype):
    """Flax rounds after each step, ours once."""
    ours, theirs = (modules[not of_linen] for modules in (OURS, THEIRS))
    arrays = [np.random.default_rng(seed).normal(size=(2, 9, 3, 8)).astype(dtype)
              for seed in range(3)]
    found = ours.dot_product_attention(*map(jax.numpy.asarray, arrays))
    exact = ours.dot_product_attention(*(array.astype(np.float64) for array in arrays))
    wanted = np.asarray(theirs.dot_product_attention(*map(jax.numpy.asarray, arrays)))
    assert found.dtype == wanted.dtype == dtype
    error, their_error = (abs(array.astype(np.float64) - exact).max() / abs(exact).max()
                          for array in (found, wanted))
    assert error <= ml_dtypes.finfo(dtype).eps / 2
    assert error <= their_error


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
@pytest.mark.parametrize("param_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("of_inputs", ["float16", "bfloat16", "float32"])
def test_types_of_layers_are_flax(dtype, param_dtype, of_inputs):
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(of_inputs)
    options = {"num_heads": 3, "dtype": dtype, "param_dtype": param_dtype, "normalize_qk": True}
    layers = [module.MultiHeadDotProductAttention(**options) for module in (linen, flax.linen)]
    variables = layers[0].init(0, x)
    found, wanted = layers[0].apply(variables, x), layers[1].apply(variables, x)
    assert found.dtype == wanted.dtype
    layer = nnx.MultiHeadAttention(in_features=12, rngs=0, decode=False, **options)
    nnx.update(layer, variables["params"])
    np.testing.assert_array_equal(layer(x), found)
    names = {str(of) for of in (of_inputs, param_dtype, dtype, found.dtype) if of is not None}
    eps = max(float(ml_dtypes.finfo(name).eps) for name in names)
    np.testing.assert_allclose(found.astype(np.float64), np.asarray(wanted, np.float64), rtol=0,
                               atol=8 * eps * abs(found.astype(np.float64)).max())


@pytest.mark.parametrize("of_linen", [True, False])
def test_signatures_are_those_of_flax(of_linen):
    """Names, order and defaults, but for what is a function of Flax'."""
    theirs, ours = ({name: parameter.default for name, parameter in inspect.signature(
        modules[not of_linen].dot_product_attention).parameters.items()}
        for modules in (THEIRS, OURS))
    theirs = {name: None if callable(default) and default is not inspect.Parameter.empty
              else default for name, default in theirs.items()}
    assert list(theirs.items()) == list(ours.items())


def test_weights_are_sown_as_flax_sows_them():
    class Linens(flax.linen.Module):
        ours: bool

        @flax.linen.compact
        def __call__(self, x):
            function = (linen if self.ours else flax.linen).dot_product_attention
            return function(x, x, x, module=self)

    class Nnxs(flax.nnx.Module):
        pass

    x = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 4)), "float32")
    linens = [Linens(ours=ours).apply({}, x, mutable=["intermediates"])[1]["intermediates"][
        "attention_weights"][0] for ours in (True, False)]
    np.testing.assert_allclose(*linens, rtol=0, atol=1e-6)
    for module in (nnx, flax.nnx):
        _, made = flax.nnx.capture(lambda holder, module=module: module.dot_product_attention(
            x, x, x, module=holder), flax.nnx.Intermediate)(Nnxs())
        np.testing.assert_allclose(made["attention_weights"][0], linens[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("keep_rngs", [True, False])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_rngs_are_kept_as_flax_keeps_them(keep_rngs, dropout_rate):
    options = {"dropout_rate": dropout_rate, "keep_rngs": keep_rngs}
    layers = [module.MultiHeadAttention(2, 4, rngs=flax.nnx.Rngs(0), **options)
              for module in (nnx, flax.nnx)]
    assert len({layer.rngs is None for layer in layers}) == 1
