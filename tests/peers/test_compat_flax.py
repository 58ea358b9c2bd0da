"""mha.compat.flax against Flax itself, Linen and NNX, over random configurations.

Flax' LayerNorm takes the variance as the mean of squares less the square of the mean, which loses
digits where the mean is large beside it: heads of at least 4 columns keep enough of them. And where
an output is one number alone, its terms may cancel to any smallness, beside which their roundings
are large: outputs are at least 4 wide.
"""

import functools

import flax.linen
import flax.nnx
import jax
import numpy as np
import pytest
from configurations import COUNT
from gate import assert_agrees, assert_same

from mha.compat import flax as compat
from mha.compat.flax import nnx

pytestmark = pytest.mark.filterwarnings("ignore:You are passing an array of shape")

DOUBLE = 1e-12  # of Flax in float64, whose LayerNorm is the least exact of all


def sizes_of(rng):
    """The settings that Linen and NNX share, and widths of query, key and value."""
    heads, head_dim = int(rng.integers(1, 5)), int(rng.integers(4, 17))
    settings = {"num_heads": heads, "use_bias": bool(rng.random() < 0.7),
                "normalize_qk": bool(rng.random() < 0.3),
                "out_features": None if rng.random() < 0.5 else int(rng.integers(4, 20))}
    given = rng.random() < 0.5
    settings["qkv_features"] = heads * head_dim if given else None
    query_dim = int(rng.integers(4, 20)) if given else heads * head_dim
    return settings, query_dim


def inputs_of(rng, query_dim, key_dim, value_dim):
    """(query, key or None, value or None) with 0 to 2 batch axes."""
    batch = tuple(int(size) for size in rng.integers(1, 4, rng.integers(0, 3)))
    query_len, key_len = (int(size) for size in rng.integers(1, 16, 2))
    query = rng.normal(size=(*batch, query_len, query_dim))
    kind = rng.integers(3)
    key = rng.normal(size=(*batch, key_len, key_dim)) if kind else None
    value = rng.normal(size=(*batch, key_len, value_dim)) if kind == 2 else None
    return query, key, value


def mask_of(rng, batch, heads, query_len, key_len):
    """None, or a mask with some axes of size 1 or absent; bool or of numbers."""
    if rng.random() < 0.4:
        return None
    shape = [1 if rng.random() < 0.3 else size for size in (*batch, heads, query_len, key_len)]
    mask = rng.random(shape) < 0.7
    if rng.random() < 0.3:
        mask[..., 0, :] = False  # a query that sees nothing
    return mask if rng.random() < 0.6 else mask.astype(np.float32)


def as_type(dtype, tree):
    """Its arrays of floats in this type; None stays."""
    return jax.tree.map(lambda array: np.asarray(array, dtype), tree)


def random_like(rng, tree):
    """Arrays of these shapes: biases start at zero, where an error would not show."""
    return jax.tree.map(lambda array: rng.normal(size=array.shape) / (array.shape[0] ** 0.5),
                        tree)


def linen_case(seed):
    """(settings, parameters, inputs, mask) of one call."""
    rng = np.random.default_rng(seed)
    settings, query_dim = sizes_of(rng)
    inputs = inputs_of(rng, query_dim, *(int(size) for size in rng.integers(1, 20, 2)))
    key = inputs[0] if inputs[1] is None else inputs[1]
    mask = mask_of(rng, inputs[0].shape[:-2], settings["num_heads"], inputs[0].shape[-2],
                   key.shape[-2])
    start = compat.MultiHeadDotProductAttention(**settings).init(0, *inputs)["params"]
    return settings, random_like(rng, start), inputs, mask


@pytest.mark.parametrize("seed", range(COUNT))
def test_linen_layer_is_flax(seed):
    settings, parameters, inputs, mask = linen_case(seed)
    layer = flax.linen.MultiHeadDotProductAttention(**settings)
    call = jax.jit(lambda variables, inputs, mask: layer.apply(
        variables, *inputs, mask=mask, sow_weights=True, mutable=["intermediates"]))


    def ours_in(dtype):
        """(output, output without weights, weights)."""
        variables, given = as_type(dtype, ({"params": parameters}, inputs))
        ours = compat.MultiHeadDotProductAttention(**settings)
        output, made = ours.apply(variables, *given, mask=mask, sow_weights=True,
                                  mutable=["intermediates"])
        return (output, ours.apply(variables, *given, mask=mask),
                made["intermediates"]["attention_weights"][0])

    def theirs_in(dtype):
        with jax.enable_x64(dtype is np.float64):
            variables, given = as_type(dtype, ({"params": parameters}, inputs))
            output, made = jax.tree.map(np.asarray, call(variables, given, mask))
        return output, output, made["intermediates"]["attention_weights"][0]

    exact = ours_in(np.float64)
    for ours, theirs, right in zip(ours_in(np.float32), theirs_in(np.float32), exact):
        assert_agrees(ours, theirs, right, settings)
    if seed % 4 == 0:  # what Flax has to compile takes its time
        for ours, theirs in zip(exact, theirs_in(np.float64)):
            assert_same(ours, theirs, settings, DOUBLE)


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    cases = [linen_case(seed) for seed in range(200)]
    for setting in ("normalize_qk", "use_bias", "out_features", "qkv_features"):
        assert 30 < sum(bool(settings[setting]) for settings, *_ in cases) < 190, setting
    assert {inputs[0].ndim for _, _, inputs, _ in cases} == {2, 3, 4}
    assert sum(inputs[1] is None for _, _, inputs, _ in cases) > 30
    assert sum(inputs[2] is None for _, _, inputs, _ in cases) > 60
    assert {mask.dtype.kind for *_, mask in cases if mask is not None} == {"b", "f"}


@pytest.mark.parametrize("seed", range(COUNT))
def test_linen_decoding_is_flax_step_by_step(seed):
    rng = np.random.default_rng(seed)
    settings, query_dim = sizes_of(rng)
    batch = tuple(int(size) for size in rng.integers(1, 4, rng.integers(0, 3)))
    length = int(rng.integers(1, 7))
    x = rng.normal(size=(*batch, length, query_dim)).astype(np.float32)
    mask = mask_of(rng, batch, settings["num_heads"], 1, length)
    masks = [mask if mask is None else rng.permuted(mask, axis=-1) for _ in range(length)]
    theirs = flax.linen.MultiHeadDotProductAttention(**settings, decode=True)
    ours = compat.MultiHeadDotProductAttention(**settings, decode=True)
    start = ours.init(seed, x)
    wanted = jax.eval_shape(theirs.init, jax.random.PRNGKey(seed), x)
    assert jax.tree.map(lambda array: (array.shape, array.dtype), start) == jax.tree.map(
        lambda array: (array.shape, array.dtype), wanted)
    variables = {**start, "params": as_type(np.float32, random_like(rng, start["params"]))}
    step = jax.jit(lambda variables, x, mask: theirs.apply(variables, x, mask=mask,
                                                           mutable=["cache"]))
    ours_now, theirs_now = dict(variables), dict(variables)
    exact_now = as_type(np.float64, variables)
    for index, mask in enumerate(masks):
        row = x[..., index:index + 1, :]
        their_output, their_made = step(theirs_now, row, mask)
        our_output, our_made = ours.apply(ours_now, row, mask=mask, mutable=["cache"])
        exact_output, exact_made = ours.apply(exact_now, row.astype(np.float64), mask=mask,
                                              mutable="cache")
        assert_agrees(our_output, np.asarray(their_output), exact_output, settings)
        for name in ("cached_key", "cached_value"):
            assert_agrees(our_made["cache"][name], np.asarray(their_made["cache"][name]),
                          exact_made["cache"][name], settings)
        assert our_made["cache"]["cache_index"] == their_made["cache"]["cache_index"] == index + 1
        ours_now, theirs_now = {**ours_now, **our_made}, {**theirs_now, **their_made}
        exact_now = {**exact_now, **exact_made}


def nnx_layers(rng, seed, **options):
    """(Flax' layer, ours in float32, ours in float64, the widths of query and of key)."""
    settings, query_dim = sizes_of(rng)
    kv_heads = int(rng.choice([divisor for divisor in range(1, settings["num_heads"] + 1)
                               if settings["num_heads"] % divisor == 0]))
    key_dim = None if rng.random() < 0.4 else int(rng.integers(1, 20))
    settings = {**settings, **options, "in_features": query_dim, "num_kv_heads": kv_heads,
                "in_kv_features": key_dim}
    theirs = flax.nnx.MultiHeadAttention(**settings, rngs=flax.nnx.Rngs(seed),
                                         kernel_init=jax.nn.initializers.zeros)
    parameters = random_like(rng, flax.nnx.to_pure_dict(flax.nnx.state(theirs, flax.nnx.Param)))
    flax.nnx.update(theirs, jax.tree.map(jax.numpy.asarray, as_type(np.float32, parameters)))
    ours = nnx.MultiHeadAttention(**settings, rngs=seed)
    exact = nnx.MultiHeadAttention(**settings, rngs=seed)
    nnx.update(ours, as_type(np.float32, parameters))
    nnx.update(exact, as_type(np.float64, as_type(np.float32, parameters)))
    return theirs, ours, exact, settings, query_dim, key_dim or query_dim


@pytest.mark.parametrize("seed", range(COUNT))
def test_nnx_layer_is_flax(seed):
    rng = np.random.default_rng(seed)
    theirs, ours, exact, settings, query_dim, key_dim = nnx_layers(rng, seed, decode=False)
    query, key, value = inputs_of(rng, query_dim, key_dim, key_dim)
    if key is None and query_dim != key_dim:
        key = rng.normal(size=(*query.shape[:-1], key_dim))
    given = as_type(np.float32, (query, key, value))
    key_len = given[0].shape[-2] if key is None else key.shape[-2]
    scores = (*query.shape[:-2], settings["num_heads"], query.shape[-2], key_len)
    mask = mask_of(rng, scores[:-3], *scores[-3:])
    if mask is not None and query.ndim == 4:  # NNX joins the batch axes of masks as they are
        mask = np.broadcast_to(mask, scores)
    options = {"mask": mask, "is_causal": bool(rng.random() < 0.4)}
    called = flax.nnx.jit(lambda layer, *inputs: layer(*inputs, **options))
    assert_agrees(ours(*given, **options), np.asarray(called(theirs, *given)),
                  exact(*as_type(np.float64, given), **options), settings)


@pytest.mark.parametrize("seed", range(max(3, COUNT // 4)))
def test_nnx_decoding_is_flax_step_by_step(seed):
    rng = np.random.default_rng(seed)
    theirs, ours, exact, settings, query_dim, key_dim = nnx_layers(rng, seed, decode=True)
    batch, length = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    for layer in (theirs, ours):
        layer.init_cache((batch, length, query_dim))
    exact.init_cache((batch, length, query_dim), np.float64)
    called = flax.nnx.jit(lambda layer, *inputs: layer(*inputs))
    for index in range(length):
        rows = [rng.normal(size=(batch, 1, width)).astype(np.float32)
                for width in (query_dim, key_dim)]
        assert_agrees(ours(*rows), np.asarray(called(theirs, *rows)),
                      exact(*as_type(np.float64, rows)), settings)
        assert ours.cache_index == theirs.cache_index[...] == index + 1
        assert_agrees(ours.cached_key, np.asarray(theirs.cached_key[...]), exact.cached_key,
                      settings)


def test_parameters_go_to_flax_and_back_to_the_bit():
    for settings in ({}, {"use_bias": False, "normalize_qk": True, "out_features": 5}):
        x = np.ones((2, 3, 8), np.float32)
        ours = compat.MultiHeadDotProductAttention(num_heads=2, **settings).init(0, x)
        theirs = flax.linen.MultiHeadDotProductAttention(num_heads=2, **settings)
        shapes = jax.tree.map(np.shape, theirs.init(jax.random.PRNGKey(0), x))
        assert jax.tree.map(np.shape, ours) == shapes
        theirs.apply(ours, x)
        layer = flax.nnx.MultiHeadAttention(2, 8, decode=False, rngs=flax.nnx.Rngs(0), **settings)
        twin = nnx.MultiHeadAttention(2, 8, decode=False, rngs=0, **settings)
        sent = flax.nnx.to_pure_dict(flax.nnx.state(layer, flax.nnx.Param))
        nnx.update(twin, sent)
        back = nnx.state(twin)
        assert jax.tree.structure(back) == jax.tree.structure(sent)
        jax.tree.map(np.testing.assert_array_equal, back, sent)


def test_start_is_drawn_from_flax_distributions():
    x = np.ones((1, 1, 300), np.float32)
    settings = {"num_heads": 4, "qkv_features": 80, "normalize_qk": True}
    theirs = flax.linen.MultiHeadDotProductAttention(**settings).init(jax.random.PRNGKey(0), x)
    ours = compat.MultiHeadDotProductAttention(**settings).init(0, x)
    for drawn, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert drawn.std() == pytest.approx(float(wanted.std()), rel=0.05)
        assert abs(drawn).max() == pytest.approx(float(abs(wanted).max()), rel=1e-2)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_drops_what_flax_drops(shared):
    """Not the same weights, but as many, and the same of all heads where they share it."""
    x = np.random.default_rng(0).normal(size=(3, 60, 8)).astype(np.float32)
    settings = {"num_heads": 2, "dropout_rate": 0.25, "broadcast_dropout": shared,
                "deterministic": False, "use_bias": False, "qkv_features": 120,
                "out_features": 120}
    parameters = compat.MultiHeadDotProductAttention(**settings).init(0, x)["params"]
    # Scores of zeros, and values that tell the keys apart: the output shows the weights.
    parameters["query"]["kernel"][:] = 0
    parameters["value"]["kernel"][:] = 1
    parameters["out"]["kernel"] = np.eye(120, dtype=np.float32).reshape(2, 60, 120)
    keys = np.ones_like(x) / 8
    theirs = flax.linen.MultiHeadDotProductAttention(**settings).apply(
        {"params": parameters}, x, keys, rngs={"dropout": jax.random.PRNGKey(0)})
    ours = compat.MultiHeadDotProductAttention(**settings).apply(
        {"params": parameters}, x, keys, rngs={"dropout": 0})
    for output in (np.asarray(theirs), ours):
        kept = output.reshape(3, 60, 2, 60)[..., 0] * 0.75  # the share of the weights kept
        assert kept.mean() == pytest.approx(0.75, abs=0.02)
        assert (kept == kept[:1, :, :1]).all() == shared


@pytest.mark.parametrize("shared", [True, False])
def test_flax_gives_nan_for_a_dropout_of_1(shared):
    """Zero times the inverse of nothing kept: why ours refuses it. Once this fails, it may do as
    the other adapters do."""
    x = np.ones((2, 3, 8), np.float32)
    layer = flax.linen.MultiHeadDotProductAttention(
        2, dropout_rate=1.0, deterministic=False, broadcast_dropout=shared)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, x)
    assert np.isnan(layer.apply(variables, x, rngs={"dropout": jax.random.key(1)})).all()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")  # but in nnx.capture
@pytest.mark.parametrize("decode", [True, False])
def test_nnx_sows_weights_as_flax_does(decode):
    rng = np.random.default_rng(0)
    theirs, ours, exact, settings, query_dim, key_dim = nnx_layers(rng, 1, decode=decode)
    given = [rng.normal(size=(2, 1 if decode else 4, width)).astype(np.float32)
             for width in (query_dim, key_dim)]
    for layer in (theirs, ours, exact) if decode else ():
        layer.init_cache((2, 3, query_dim))
    assert not hasattr(ours, "attention_weights")
    for sow_weights in (1, np.True_, False):
        for layer in (theirs, ours, exact):
            layer(*given, sow_weights=sow_weights)
    np.testing.assert_allclose(ours.attention_weights[0], theirs.attention_weights[0], atol=1e-6)
    popped = flax.nnx.to_pure_dict(flax.nnx.pop(theirs, flax.nnx.Intermediate))
    found, right = nnx.pop(ours), nnx.pop(exact)
    assert len(popped["attention_weights"]) == 2
    for array, wanted, precise in zip(*(tree["attention_weights"] for tree in (
            found, popped, right)), strict=True):
        assert_agrees(array, np.asarray(wanted), precise, settings)
    assert nnx.pop(ours) == {} and not hasattr(ours, "attention_weights")


def test_linen_sows_behind_what_was_sown():
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    ours, theirs = (module.MultiHeadDotProductAttention(num_heads=2)
                    for module in (compat, flax.linen))
    variables = ours.init(0, x)
    for _ in range(2):
        made = [layer.apply(variables, x, sow_weights=True, mutable=["intermediates"])[1]
                for layer in (ours, theirs)]
        for array, wanted in zip(*(tree["intermediates"]["attention_weights"] for tree in made),
                                 strict=True):
            np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6)
        variables = {**variables, **made[0]}


def test_masks_are_flax():
    rng = np.random.default_rng(0)
    lengths = [rng.random((2, 3, size)) < 0.6 for size in (4, 5)]
    pairs = [
        (compat.make_attention_mask(*lengths), flax.linen.make_attention_mask(*lengths)),
        (compat.make_attention_mask(*lengths, np.logical_or, 2, bool),
         flax.linen.make_attention_mask(*lengths, jax.numpy.logical_or, 2, bool)),
        (compat.make_causal_mask(lengths[0]), flax.linen.make_causal_mask(lengths[0])),
        (compat.combine_masks(lengths[0], None, lengths[0] * 2),
         flax.linen.combine_masks(lengths[0], None, lengths[0] * 2))]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert compat.combine_masks(None) is flax.linen.combine_masks(None) is None


def test_initializers_of_jax_that_draw_nothing_fit():
    settings = {"num_heads": 2, "kernel_init": jax.nn.initializers.constant(0.5),
                "bias_init": jax.nn.initializers.ones}
    x = np.ones((3, 8), np.float32)
    ours = compat.MultiHeadDotProductAttention(**settings).init(0, x)
    theirs = flax.linen.MultiHeadDotProductAttention(**settings).init(jax.random.PRNGKey(0), x)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_arrays_and_keys_of_jax_are_taken():
    x = jax.numpy.ones((2, 3, 8))
    layer = compat.MultiHeadDotProductAttention(num_heads=2)
    variables = layer.init(jax.random.PRNGKey(0), x, mask=flax.linen.make_causal_mask(x[..., 0]))
    on_device = jax.tree.map(jax.numpy.asarray, variables)
    np.testing.assert_array_equal(layer.apply(on_device, x), layer.apply(variables, np.asarray(x)))
    for key in (jax.random.key(0), {"params": jax.random.key(0)}):
        jax.tree.map(np.testing.assert_array_equal, layer.init(key, x), variables)


def test_streams_of_nnx_draw_parameters_and_dropout():
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    rngs = flax.nnx.Rngs(0)
    settings = {"decode": False, "dropout_rate": 0.5, "deterministic": False}
    layers = [nnx.MultiHeadAttention(2, 8, rngs=given, keep_rngs=False, **settings)
              for given in (rngs, rngs, flax.nnx.Rngs(0))]
    kernels = [layer.query.kernel for layer in layers]
    assert (kernels[0] != kernels[1]).any() and (kernels[0] == kernels[2]).all()
    one, other = (layers[0](x, rngs=rngs) for _ in range(2))
    assert (one != other).any()
    with pytest.raises(ValueError, match=r"^rngs: got None"):
        layers[0](x)
    assert layers[0](x, deterministic=True).shape == x.shape
    assert nnx.MultiHeadAttention(2, 8, rngs=0, **settings)(x).shape == x.shape


def test_initializers_of_jax_draw_from_their_distributions():
    """Each kernel another one, by the shape that Flax hands them: all inputs, all outputs."""
    x = np.ones((1, 1, 200), np.float32)
    for make in (jax.nn.initializers.xavier_uniform, jax.nn.initializers.he_normal,
                 jax.nn.initializers.orthogonal, jax.nn.initializers.normal):
        settings = {"num_heads": 4, "qkv_features": 80, "kernel_init": make(),
                    "bias_init": functools.partial(jax.random.normal)}
        ours = compat.MultiHeadDotProductAttention(**settings).init(0, x)["params"]
        theirs = flax.linen.MultiHeadDotProductAttention(**settings).init(
            jax.random.PRNGKey(0), x)["params"]
        assert (ours["query"]["kernel"] != ours["key"]["kernel"]).all()
        for part in ("query", "out"):
            for name, spread in (("kernel", 0.05), ("bias", 0.4)):
                drawn, wanted = ours[part][name], np.asarray(theirs[part][name])
                assert drawn.shape == wanted.shape and drawn.dtype == wanted.dtype
                assert drawn.std() == pytest.approx(wanted.std(), rel=spread)


def test_a_clone_has_other_arguments():
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    settings = {"num_heads": 2, "qkv_features": 6, "out_features": 5}
    ours, theirs = (module.MultiHeadDotProductAttention(**settings).clone(
        decode=True, use_bias=False) for module in (compat, flax.linen))
    variables = ours.init(0, x)
    shapes = jax.eval_shape(theirs.init, jax.random.PRNGKey(0), x)
    assert jax.tree.map(np.shape, variables) == jax.tree.map(np.shape, shapes)
    assert compat.SelfAttention(num_heads=2).clone(decode=True).decode
