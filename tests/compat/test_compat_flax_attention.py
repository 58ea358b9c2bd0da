"""mha.compat.flax' dot_product_attention, halves, clone and keep_rngs, without Flax."""

import inspect

import numpy as np
import pytest
from half_types import BFLOAT16, HALVES

import mha
from mha import reference
from mha.compat.flax import linen, nnx

each_module = pytest.mark.parametrize("module", [linen, nnx], ids=["linen", "nnx"])


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


class Sowing:
    """What Flax' modules are to the function."""

    def sow(self, collection, name, array):
        self.sown = collection, name, array


@each_module
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
def test_call_is_attention_on_heads_behind_the_lengths(module, batch):
    query, key, value = random(*batch, 5, 4, 6), random(*batch, 7, 4, 6, seed=1), random(
        *batch, 7, 4, 3, seed=2)
    mask = random(*batch, 1, 5, 7, seed=3) > -0.5
    mask[..., 0, :] = False  # a query that sees no key
    bias = random(4, 5, 7, seed=4)
    output = module.dot_product_attention(query, key, value, bias, mask)
    scores = np.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(6) + bias
    scores = np.where(mask, scores, -1e300)
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exp / exp.sum(-1, keepdims=True)
    expected = np.einsum("...hqk,...khd->...qhd", weights, value)
    assert output.shape == (*batch, 5, 4, 3)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)


def test_nnx_shares_keys_among_heads_and_is_causal():
    query, key, value = random(2, 5, 6, 4), random(2, 7, 2, 4, seed=1), random(2, 7, 2, 4, seed=2)
    output = nnx.dot_product_attention(query, key, value, is_causal=True)
    heads = [array.swapaxes(1, 2) for array in (query, *(
        array.repeat(3, axis=2) for array in (key, value)))]
    expected = reference.scaled_dot_product_attention(*heads, causal=True, query_offset=0)
    np.testing.assert_allclose(output.swapaxes(1, 2), expected, rtol=0, atol=1e-13)


@each_module
@pytest.mark.parametrize("shared", [True, False])
def test_dropout_is_mhas_mask(module, shared):
    query, key, value = random(2, 5, 3, 4), random(2, 7, 3, 4, seed=1), random(2, 7, 3, 4, seed=2)
    bias, mask = random(2, 3, 5, 7, seed=3), random(1, 3, 1, 7, seed=4) > -1
    options = {"bias": bias, "mask": mask, "dropout_rate": 0.5, "broadcast_dropout": shared}
    output = module.dot_product_attention(query, key, value, dropout_rng=7, **options)
    seed = int(np.random.default_rng(7).integers(2**64, dtype=np.uint64))
    kept = mha.dropout_mask((5, 7) if shared else (2, 3, 5, 7), 0.5, seed) / 0.5
    heads = [array.swapaxes(1, 2) for array in (query, key, value)]
    _, weights = reference.scaled_dot_product_attention(
        *heads, bias=bias, mask=np.broadcast_to(mask, bias.shape), return_weights=True)
    np.testing.assert_allclose(output.swapaxes(1, 2), (weights * kept) @ heads[2], rtol=0,
                               atol=1e-13)
    plain = module.dot_product_attention(query, key, value, bias, mask)
    np.testing.assert_array_equal(plain, module.dot_product_attention(
        query, key, value, deterministic=True, **options))


def test_weights_are_sown_before_dropout():
    query, module = random(2, 5, 3, 4), Sowing()
    linen.dot_product_attention(query, query, query, dropout_rate=0.5, dropout_rng=1, module=module)
    collection, name, weights = module.sown
    assert (collection, name, weights.shape) == ("intermediates", "attention_weights", (2, 3, 5, 5))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-13)
    for forced, dtype in ((False, np.float16), (True, np.float32)):
        linen.dot_product_attention(query, query, query, dtype="float16", module=module,
                                    force_fp32_for_softmax=forced)
        assert module.sown[2].dtype == dtype


@each_module
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_computed_in_float32_and_rounded_once(module, dtype):
    arrays = [random(2, 5, 3, 4, seed=seed).astype(dtype) for seed in range(3)]
    found = module.dot_product_attention(*arrays)
    wanted = module.dot_product_attention(*(array.astype(np.float32) for array in arrays))
    assert found.dtype == dtype and wanted.dtype == np.float32
    np.testing.assert_array_equal(found, wanted.astype(dtype))
    wide = [array.astype(np.float64) for array in arrays]
    np.testing.assert_array_equal(module.dot_product_attention(*wide, dtype=dtype), found)


def layers_of(dtype, param_dtype, **options):
    """(call of x, its parameters) of a layer of Linen and of one of NNX."""
    of_linen = linen.MultiHeadDotProductAttention(3, dtype=dtype, param_dtype=param_dtype,
                                                  normalize_qk=True, **options)
    variables = of_linen.init(0, np.ones((1, 2, 12), np.float32))
    of_nnx = nnx.MultiHeadAttention(3, 12, dtype=dtype, param_dtype=param_dtype, rngs=0,
                                    normalize_qk=True, decode=False, **options)
    nnx.update(of_nnx, variables["params"])
    return ((lambda x: of_linen.apply(variables, x), variables["params"]),
            (of_nnx, nnx.state(of_nnx)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layers_of_halves(dtype):
    x = random(2, 5, 12).astype(np.float32)
    singles = layers_of(None, np.float32)
    for (layer, parameters), (single, _) in zip(layers_of(None, dtype), singles):
        assert all(array.dtype == dtype for part in parameters.values() for array in part.values())
        assert layer(x).dtype == np.float32  # the widest of inputs and parameters
        assert layer(x.astype(dtype)).dtype == dtype
        assert single(x.astype(dtype)).dtype == np.float32
    for (layer, parameters), _ in zip(layers_of(dtype, np.float32), singles):
        rounded = {part: {name: array.astype(dtype).astype(np.float32)
                          for name, array in own.items()} for part, own in parameters.items()}
        plain = linen.MultiHeadDotProductAttention(3, normalize_qk=True)
        wanted = plain.apply({"params": rounded}, x.astype(dtype).astype(np.float32))
        assert layer(x).dtype == dtype
        np.testing.assert_array_equal(layer(x), wanted.astype(dtype))
    mixed = linen.MultiHeadDotProductAttention(3, param_dtype=HALVES[dtype == HALVES[0]])
    assert mixed.apply(mixed.init(0, x), x.astype(dtype)).dtype == np.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_caches_of_halves(dtype):
    x = random(2, 4, 12)
    layer = linen.MultiHeadDotProductAttention(3, dtype=dtype, decode=True)
    variables = layer.init(0, x)
    steps = []
    for position in range(4):
        output, made = layer.apply(variables, x[:, position:position + 1], mutable=["cache"])
        variables = {**variables, **made}
        steps.append(output)
    assert variables["cache"]["cached_key"].dtype == dtype
    whole = layer.clone(decode=False, dtype=None).apply(
        variables, x, mask=linen.make_causal_mask(x[..., 0]))
    np.testing.assert_allclose(np.concatenate(steps, 1).astype(np.float64), whole, rtol=0,
                               atol=4 * 2.0**(-11 if dtype == np.float16 else -8))
    of_nnx = nnx.MultiHeadAttention(3, 12, rngs=0, decode=True)
    of_nnx.init_cache((2, 4, 12), dtype=dtype)
    assert of_nnx(x[:, :1]).dtype == np.float64 and of_nnx.cached_key.dtype == dtype


def test_forced_float32_weights_are_not_rounded():
    x = random(2, 5, 12)
    for forced, dtype in ((False, BFLOAT16), (True, np.float32)):
        layer = linen.MultiHeadDotProductAttention(3, dtype="bfloat16",
                                                   force_fp32_for_softmax=forced)
        _, made = layer.apply(layer.init(0, x), x, sow_weights=True, mutable=["intermediates"])
        assert made["intermediates"]["attention_weights"][0].dtype == dtype


@pytest.mark.parametrize(("rate", "keep", "kept"), [(0.5, True, True), (0.5, False, False),
                                                    (0.0, True, False)])
def test_rngs_are_kept_where_a_layer_has_dropout(rate, keep, kept):
    layer = nnx.MultiHeadAttention(3, 12, rngs=0, dropout_rate=rate, keep_rngs=keep, decode=False,
                                   deterministic=False)
    assert (layer.rngs is not None) == kept
    x = random(2, 5, 12)
    if rate and not keep:
        with pytest.raises(ValueError, match="rngs: got None for the dropout of a layer made with"):
            layer(x)
    else:
        assert np.array_equal(layer(x), layer(x)) == (not rate)
    assert layer(x, rngs=3).shape == x.shape


def test_a_clone_shares_nothing():
    layer = nnx.MultiHeadAttention(3, 12, rngs=0, dropout_rate=0.5, decode=True,
                                   deterministic=False)
    layer.init_cache((2, 4, 12))
    x = random(2, 1, 12)
    layer(x, sow_weights=True)
    twin = nnx.clone(layer)
    np.testing.assert_array_equal(twin(x), layer(x))  # the same numbers drawn, the same cache
    assert twin.cache_index == layer.cache_index == 2
    twin.query.kernel[:] = 0
    twin(x)
    assert layer.query.kernel.any() and (twin.cache_index, layer.cache_index) == (3, 2)
    assert len(nnx.pop(twin)["attention_weights"]) == 1
    assert len(nnx.pop(layer)["attention_weights"]) == 1


HEADS = np.ones((2, 5, 4, 8))


@each_module
@pytest.mark.parametrize(("error", "message", "arrays", "options"), [
    (ValueError, r"query: got shape \(4, 8\)", [HEADS[0, 0]] * 3, {}),
    (ValueError, r"key: got shape \(5, 4, 8\)", [HEADS, HEADS[0], HEADS[0]], {}),
    (ValueError, r"key: got shape \(1, 5, 4, 8\)", [HEADS, HEADS[:1], HEADS[:1]], {}),
    (ValueError, r"key: got shape \(2, 5, 4, 7\)", [HEADS, HEADS[..., :7], HEADS], {}),
    (ValueError, r"value: got shape \(2, 4, 4, 8\)", [HEADS, HEADS, HEADS[:, :4]], {}),
    (ValueError, "key: got 3 heads", [HEADS, HEADS[:, :, :3], HEADS[:, :, :3]], {}),
    (ValueError, "mask: got shape", [HEADS] * 3, {"mask": np.ones((5, 4))}),
    (ValueError, "bias: got shape", [HEADS] * 3, {"bias": np.ones((3, 5, 5))}),
    (ValueError, "dropout_rng: got None", [HEADS] * 3, {"dropout_rate": 0.5}),
    (ValueError, "dropout_rate: got 1", [HEADS] * 3, {"dropout_rate": 1.0}),
    (TypeError, "dtype: got 'int8'", [HEADS] * 3, {"dtype": "int8"}),
    (TypeError, "query: got", [HEADS.astype(complex), HEADS, HEADS], {}),
    (TypeError, "scale: got a keyword", [HEADS] * 3, {"scale": 1.0}),
])
def test_errors(module, error, message, arrays, options):
    with pytest.raises(error, match=message):
        module.dot_product_attention(*arrays, **options)


def test_errors_of_each_module():
    with pytest.raises(ValueError, match="key: got 2 heads, wanted query's 4"):
        linen.dot_product_attention(HEADS, HEADS[:, :, :2], HEADS[:, :, :2])
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(ValueError, match=f"{name}: got .*wanted None"):
            linen.dot_product_attention(HEADS, HEADS, HEADS, **{name: np.einsum})
    with pytest.raises(ValueError, match=r"promote_dtype: got .*wanted None"):
        nnx.dot_product_attention(HEADS, HEADS, HEADS, promote_dtype=max)


def test_signatures():
    """Flax 0.12's: test-peers compares them with the installed ones."""
    common = ["query", "key", "value", "bias", "mask", "broadcast_dropout", "dropout_rng",
              "dropout_rate", "deterministic", "dtype", "precision", "module"]
    assert [*inspect.signature(linen.dot_product_attention).parameters] == [
        *common, "force_fp32_for_softmax", "einsum_dot_general", "qk_attn_weights_einsum",
        "attn_weights_value_einsum"]
    assert [*inspect.signature(nnx.dot_product_attention).parameters] == [
        *common, "promote_dtype", "is_causal"]
