"""mha.compat.flax without Flax: known answers, parameter trees, caches, masks and errors.

`make test-peers` compares it with Flax itself, Linen and NNX.
"""

import subprocess
import sys

import numpy as np
import pytest

from mha import reference
from mha.compat import flax as compat
from mha.compat.flax import linen, nnx

X = np.random.default_rng(0).normal(size=(2, 5, 12))


def assert_close(ours, expected, tolerance=1e-12):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * abs(expected).max())


def variables_of(layer, *inputs):
    """Parameters in float64, biases and scales random too."""
    rng = np.random.default_rng(1)
    drawn = layer.init(0, *inputs)
    return {**drawn, "params": {part: {name: rng.normal(size=array.shape) for name, array
                                       in own.items()} for part, own in drawn["params"].items()}}


def figure(parameters, query, key, value, **options):
    """The plain reference with a tree's parameters: output and weights per head."""
    weights = {f"W_{name[0]}": part["kernel"].reshape(part["kernel"].shape[0], -1)
               for name, part in parameters.items()}
    weights["W_o"] = parameters["out"]["kernel"].reshape(-1, parameters["out"]["kernel"].shape[-1])
    biases = {f"b_{name[0]}": part["bias"].ravel() for name, part in parameters.items()
              if "bias" in part}
    return reference.multi_head_attention(
        query, key, value, **weights, **biases, return_weights=True,
        num_heads=parameters["query"]["kernel"].shape[1],
        num_kv_heads=parameters["key"]["kernel"].shape[1], **options)


# Linen


def test_apply_is_the_figure():
    key, value = np.ones((2, 4, 7)) * X[:, :4, :7], X[:, 1:, :9]
    layer = linen.MultiHeadDotProductAttention(num_heads=3, qkv_features=6, out_features=10)
    variables = variables_of(layer, X, key, value)
    mask = np.random.default_rng(2).random((2, 1, 5, 4)) < 0.6
    expected, weights = figure(variables["params"], X, key, value, mask=mask,
                               empty_rows="uniform")
    assert_close(layer.apply(variables, X, key, value, mask=mask), expected)
    output, sown = layer.apply(variables, X, key, value, mask=mask.astype(int), sow_weights=True,
                               mutable="intermediates")
    assert_close(output, expected)
    assert_close(sown["intermediates"]["attention_weights"][0], weights)
    assert_close(layer.bind(variables)(X, key, value, mask=mask), expected)


def test_a_query_without_keys_gets_the_mean():
    layer = linen.MultiHeadDotProductAttention(num_heads=3)
    variables = variables_of(layer, X)
    nothing = np.zeros((1, 1, 1, 1))
    expected = figure(variables["params"], X, X, X, mask=nothing != 0, empty_rows="uniform")[0]
    assert_close(layer.apply(variables, X, mask=nothing), expected)


def test_key_and_value_default():
    layer = linen.MultiHeadAttention(num_heads=3)
    variables = variables_of(layer, X)
    alone = layer.apply(variables, X)
    np.testing.assert_array_equal(alone, layer.apply(variables, X, X))
    np.testing.assert_array_equal(alone, layer.apply(variables, X, X, X))
    with pytest.warns(DeprecationWarning, match="inputs_kv: Flax will take it no longer"):
        np.testing.assert_array_equal(alone, layer.apply(variables, X, inputs_kv=X))
    of_self = linen.SelfAttention(num_heads=3)
    mask = linen.make_causal_mask(X[..., 0])
    np.testing.assert_array_equal(of_self.apply(variables, X, mask),
                                  layer.apply(variables, X, mask=mask))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_batch_axes(batch):
    x = np.random.default_rng(0).normal(size=(*batch, 5, 12))
    layer = linen.MultiHeadDotProductAttention(num_heads=3)
    variables = variables_of(layer, x)
    mask = np.random.default_rng(2).random((*batch, 3, 5, 5)) < 0.6
    output = layer.apply(variables, x, mask=mask)
    for index in np.ndindex(batch):
        assert_close(output[index], layer.apply(variables, x[index], mask=mask[index]))
    one_for_all = layer.apply(variables, x, mask=mask[(0,) * len(batch)])
    assert_close(one_for_all[(0,) * len(batch)], output[(0,) * len(batch)])


def test_norms_are_layer_norms_of_each_head():
    layer = linen.MultiHeadDotProductAttention(num_heads=3, normalize_qk=True)
    variables = variables_of(layer, X)
    parameters = variables["params"]
    heads = {}
    for name in ("query", "key", "value"):
        projected = np.einsum("bld,dhk->bhlk", X, parameters[name]["kernel"])
        heads[name] = projected + parameters[name]["bias"][:, None]
    for name in ("query", "key"):
        array = heads[name]
        deviation = np.sqrt(array.var(axis=-1, keepdims=True) + 1e-6)
        heads[name] = (array - array.mean(axis=-1, keepdims=True)) / deviation * (
            parameters[f"{name}_ln"]["scale"])
    attended = reference.scaled_dot_product_attention(*heads.values())
    expected = np.einsum("bhlk,hkd->bld", attended, parameters["out"]["kernel"])
    assert_close(layer.apply(variables, X), expected + parameters["out"]["bias"])


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_decoding_step_by_step_is_one_causal_call(normalize_qk):
    settings = {"num_heads": 3, "normalize_qk": normalize_qk, "dtype": np.float64}
    decoding = linen.MultiHeadDotProductAttention(**settings, decode=True)
    variables = variables_of(decoding, X)
    whole = linen.MultiHeadDotProductAttention(**settings).apply(
        {"params": variables["params"]}, X, mask=linen.make_causal_mask(X[..., 0]))
    assert variables["cache"]["cached_key"].shape == (2, 5, 3, 4)
    first = variables
    for index in range(5):
        output, made = decoding.apply(variables, X[:, index:index + 1], mutable=["cache"])
        assert_close(output[:, 0], whole[:, index])
        assert made["cache"]["cache_index"] == index + 1
        variables = {**variables, **made}
    assert not first["cache"]["cached_key"].any()  # what was given stays
    with pytest.raises(ValueError, match="cache: got 5 positions of 5, wanted room"):
        decoding.apply(variables, X[:, :1], mutable=["cache"])


def test_decoding_wants_a_cache_that_may_change_and_one_position():
    layer = linen.MultiHeadDotProductAttention(num_heads=3, decode=True)
    variables = layer.init(0, X)
    with pytest.raises(ValueError, match=r"mutable: got no 'cache'.*wanted mutable=\['cache'\]"):
        layer.apply(variables, X[:, :1])
    with pytest.raises(ValueError, match=r"inputs_q: .*wanted one position a call"):
        layer.apply(variables, X[:, :2], mutable=["cache"])
    with pytest.raises(ValueError, match=r"cache: got .*cached_value"):
        layer.apply({**variables, "cache": {"cached_key": 1}}, X[:, :1], mutable=["cache"])
    _, made = layer.apply({"params": variables["params"]}, X, mutable=["cache"])
    assert made["cache"]["cached_key"].shape == (2, 5, 3, 4)


def test_init_gives_the_tree():
    layer = linen.MultiHeadDotProductAttention(num_heads=3, qkv_features=6, out_features=7,
                                               normalize_qk=True, param_dtype=np.float64)
    output, variables = layer.init_with_output({"params": 0}, X)
    assert {part: {name: array.shape for name, array in own.items()}
            for part, own in variables["params"].items()} == {
        "query": {"kernel": (12, 3, 2), "bias": (3, 2)},
        "key": {"kernel": (12, 3, 2), "bias": (3, 2)},
        "value": {"kernel": (12, 3, 2), "bias": (3, 2)},
        "query_ln": {"scale": (2,)}, "key_ln": {"scale": (2,)},
        "out": {"kernel": (3, 2, 7), "bias": (7,)}}
    np.testing.assert_array_equal(output, layer.apply(variables, X))
    again, other = layer.init(0, X), layer.init(1, X)
    kernel = variables["params"]["query"]["kernel"]
    np.testing.assert_array_equal(kernel, again["params"]["query"]["kernel"])
    assert (kernel != other["params"]["query"]["kernel"]).any()
    assert kernel.dtype == np.float64
    wide = linen.MultiHeadDotProductAttention(num_heads=1).init(0, np.ones((1, 400)))["params"]
    assert wide["query"]["kernel"].std() == pytest.approx(400 ** -0.5, rel=0.01)
    assert not wide["query"]["bias"].any()


def test_initializers_are_functions():
    layer = linen.MultiHeadDotProductAttention(
        num_heads=3, bias_init=lambda generator, shape, dtype: np.full(shape, 2.0),
        kernel_init=lambda generator, shape, dtype: generator.normal(size=shape),
        out_kernel_init=lambda generator, shape, dtype: np.zeros(shape))
    assert (layer.apply(layer.init(0, X), X) == 2).all()


def test_types_are_the_widest_unless_given():
    layer = linen.MultiHeadDotProductAttention(num_heads=3)
    variables = layer.init(0, X)
    for dtype, wanted in ((np.float32, np.float32), (np.float64, np.float64), (int, np.float32),
                          (np.float16, np.float32)):
        assert layer.apply(variables, X.astype(dtype)).dtype == wanted
    layer = linen.MultiHeadDotProductAttention(num_heads=3, dtype=np.float32)
    assert layer.apply(variables, X).dtype == np.float32


@pytest.mark.parametrize("layer", [
    lambda **options: linen.MultiHeadDotProductAttention(num_heads=3, dropout_rate=0.5, **options),
    lambda **options: linen.MultiHeadDotProductAttention(
        num_heads=3, dropout_rate=0.5, normalize_qk=True, **options)])
def test_dropout_is_the_same_for_all_heads_or_not(layer):
    x = np.broadcast_to(X[:1], X.shape)
    for shared in (True, False):
        module = layer(broadcast_dropout=shared, deterministic=False)
        variables = module.init(0, x)
        one, again = (module.apply(variables, x, rngs={"dropout": 7}) for _ in range(2))
        np.testing.assert_array_equal(one, again)
        assert (one[0] == one[1]).all() == shared  # two sequences that are the same
        assert (one != module.apply(variables, x, rngs={"dropout": 8})).any()
        assert (one == module.apply(variables, x, dropout_rng=7)).all()
    quiet = layer()
    np.testing.assert_array_equal(
        quiet.apply(variables, x, deterministic=True),
        quiet.apply(variables, x, deterministic=True, rngs={"dropout": 7}))


def test_shared_dropout_weighs_what_is_kept():
    """Against mha's own mask of one head, and the weights returned are those before."""
    import mha

    layer = linen.MultiHeadDotProductAttention(num_heads=3, dropout_rate=0.5, deterministic=False)
    variables = variables_of(layer, X)
    output, sown = layer.apply(variables, X, dropout_rng=7, sow_weights=True,
                               mutable=["intermediates"])
    weights = sown["intermediates"]["attention_weights"][0]
    assert_close(weights, figure(variables["params"], X, X, X)[1])
    seed = int(np.random.default_rng(7).integers(2**64, dtype=np.uint64))
    kept = mha.dropout_mask((5, 5), 0.5, seed) / 0.5
    parameters = variables["params"]
    value = np.einsum("bld,dhk->bhlk", X, parameters["value"]["kernel"])
    value += parameters["value"]["bias"][:, None]
    expected = np.einsum("bhqk,bhkd,hdo->bqo", weights * kept, value, parameters["out"]["kernel"])
    assert_close(output, expected + parameters["out"]["bias"])


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, "MultiHeadAttention: got a call of a layer without parameters, wanted layer.apply",
     lambda: linen.MultiHeadAttention(num_heads=3)(X)),
    (ValueError, "qkv_features: got 12, wanted a multiple of num_heads",
     lambda: linen.MultiHeadAttention(num_heads=5).init(0, X)),
    (ValueError, "inputs_v: got an array without inputs_k",
     lambda: linen.MultiHeadAttention(num_heads=3).init(0, X, None, X)),
    (ValueError, "inputs_kv: got it together",
     lambda: linen.MultiHeadAttention(num_heads=3).init(0, X, X, inputs_kv=X)),
    (ValueError, "inputs_k: got shape", lambda: linen.MultiHeadAttention(num_heads=3).init(
        0, X, X[:1])),
    (ValueError, r"mask: got shape \(4, 5\), wanted one that broadcasts to the scores"
     r" \(2, 3, 5, 5\)", lambda: linen.MultiHeadAttention(num_heads=3).init(
         0, X, mask=np.ones((4, 5)))),
    (ValueError, "deterministic: got None", lambda: linen.MultiHeadAttention(
        num_heads=3, dropout_rate=0.1).init(0, X)),
    (ValueError, "deterministic: got it from the layer and", lambda: linen.MultiHeadAttention(
        num_heads=3, dropout_rate=0.1, deterministic=True).init(0, X, deterministic=True)),
    (ValueError, r"rngs: got none for dropout, wanted rngs=\{'dropout': key\}",
     lambda: linen.MultiHeadAttention(num_heads=3, dropout_rate=0.1, deterministic=False).apply(
         linen.MultiHeadAttention(num_heads=3).init(0, X), X)),
    (ValueError, "variables: got .*wanted 'params'",
     lambda: linen.MultiHeadAttention(num_heads=3).apply({"query": {}}, X)),
    (ValueError, r"params: missing \['out.kernel', 'value.kernel'\], unexpected \['w.kernel'\]",
     lambda: linen.MultiHeadAttention(num_heads=3, use_bias=False).apply({"params": {
         name: {"kernel": np.ones((12, 3, 4))} for name in ("query", "key", "w")}}, X)),
    (ValueError, r"query.kernel: got shape \(12, 3, 4\), wanted \(5, 3, 4\)",
     lambda: linen.MultiHeadAttention(num_heads=3, qkv_features=12, out_features=12).apply(
         linen.MultiHeadAttention(num_heads=3).init(0, X), X[..., :5])),
    (TypeError, "rngs: got .*wanted an int", lambda: linen.MultiHeadAttention(num_heads=3).init(
        "key", X)),
    (ValueError, "attention_fn: got", lambda: linen.MultiHeadAttention(3, attention_fn=max)),
    (TypeError, "dtype: got", lambda: linen.MultiHeadAttention(3, dtype=np.int8)),
    (TypeError, "embed_dim: got a keyword .*wanted qkv_features=",
     lambda: linen.MultiHeadAttention(3, embed_dim=8)),
    (TypeError, "training: got a keyword .*wanted deterministic=, its opposite",
     lambda: linen.MultiHeadAttention(3).init(0, X, training=True)),
    (ValueError, "masks: got shapes", lambda: linen.combine_masks(np.ones(3), np.ones((1, 3)))),
    (ValueError, "num_heads: got 4, wanted a multiple of 3", lambda: nnx.MultiHeadAttention(
        4, 12, num_kv_heads=3, rngs=0)),
    (ValueError, "decode: got None", lambda: nnx.MultiHeadAttention(3, 12, rngs=0)(X)),
    (ValueError, "decode: got True without a cache", lambda: nnx.MultiHeadAttention(
        3, 12, rngs=0, decode=True)(X)),
    (ValueError, r"inputs_q: got shape \(2, 5, 5\), wanted 12", lambda: nnx.MultiHeadAttention(
        3, 12, rngs=0, decode=False)(X[..., :5])),
    (ValueError, "params: missing", lambda: nnx.update(nnx.MultiHeadAttention(3, 12, rngs=0),
                                                       {})),
    (TypeError, "causal: got a keyword .*wanted is_causal=", lambda: nnx.MultiHeadAttention(
        3, 12, rngs=0)(X, causal=True)),
])
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_masks():
    assert linen.make_causal_mask(np.zeros((2, 3))).tolist() == [[np.tri(3).tolist()]] * 2
    assert linen.make_causal_mask(np.zeros(2), 1, bool).shape == (1, 1, 2, 2)
    mask = linen.make_attention_mask(np.array([[1, 0]]), np.array([[1, 1, 0]]))
    assert mask.tolist() == [[[[1, 1, 0], [0, 0, 0]]]]
    assert mask.dtype == np.float32
    assert linen.combine_masks(None, mask, None, dtype=bool).tolist() == (mask != 0).tolist()
    assert linen.combine_masks() is None


# NNX


def test_nnx_is_the_figure():
    layer = nnx.MultiHeadAttention(6, 12, 18, 7, 2, 9, decode=False, rngs=0)
    rng = np.random.default_rng(1)
    nnx.update(layer, {part: {name: rng.normal(size=array.shape) for name, array in own.items()}
                       for part, own in nnx.state(layer).items()})
    key = X[:, :4, :9]
    assert layer.key.kernel.shape == (9, 2, 3) and layer.out.kernel.shape == (6, 3, 7)
    expected = figure(nnx.state(layer), X, key, key, causal=True, query_offset=0)[0]
    assert_close(layer(X, key, is_causal=True), expected)
    layer.out.kernel = np.zeros((6, 3, 7))
    assert_close(layer(X, key), np.broadcast_to(layer.out.bias, (2, 5, 7)))
    assert layer.query_ln is None and nnx.MultiHeadAttention(2, 8, rngs=0, use_bias=False
                                                             ).query.bias is None


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_nnx_decodes_step_by_step(normalize_qk):
    layer = nnx.MultiHeadAttention(6, 12, 24, num_kv_heads=2, normalize_qk=normalize_qk, rngs=0,
                                   decode=True, dtype=np.float64)
    whole = layer(X, is_causal=True, decode=False)
    layer.init_cache(X.shape, np.float64)
    for index in range(5):
        assert_close(layer(X[:, index:index + 1])[:, 0], whole[:, index])
    assert layer.cache_index == 5 and layer.cached_key.shape == (2, 5, 2, 4)
    kept = layer.cached_key
    with pytest.raises(ValueError, match="cache: got 5 positions"):
        layer(X[:, :1])
    assert layer.cached_key is kept
    layer.init_cache(X.shape)
    assert layer.cache_index == 0
    with pytest.raises(ValueError, match="is_causal: got True with decode"):
        layer(X[:, :1], is_causal=True)


def test_nnx_shares_dropout_among_grouped_heads():
    grouped = nnx.MultiHeadAttention(6, 12, num_kv_heads=2, rngs=0, decode=False,
                                     dropout_rate=0.5, deterministic=False)
    plain = nnx.MultiHeadAttention(6, 12, rngs=0, decode=False, dropout_rate=0.5,
                                   deterministic=False)
    tree = nnx.state(grouped)
    for part in ("key", "value"):
        tree[part] = {"kernel": tree[part]["kernel"].repeat(3, axis=1),
                      "bias": tree[part]["bias"].repeat(3, axis=0)}
    nnx.update(plain, tree)
    assert_close(grouped(X, rngs=5), plain(X, rngs=5))
    assert (grouped(X, rngs=5) != grouped(X, deterministic=True)).any()


def test_nnx_state_is_a_copy():
    layer = nnx.MultiHeadAttention(3, 12, rngs=0, normalize_qk=True)
    before = nnx.state(layer)
    before["query"]["kernel"][:] = 7
    assert (layer.query.kernel != 7).all()
    nnx.update(layer, before)
    before["query"]["kernel"][:] = 8
    assert (layer.query.kernel == 7).all()


def test_flax_and_jax_are_not_imported():
    assert compat.MultiHeadDotProductAttention is linen.MultiHeadDotProductAttention
    code = ("import sys, numpy as np; from mha.compat import flax; flax.nnx;"
            "layer = flax.MultiHeadAttention(2); layer.init(0, np.ones((1, 2, 4)));"
            "print({'flax', 'jax'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
