"""MultiHeadLatentAttention without a cache: the reference's numbers, gradients, parameters."""

import copy
import pickle

import numpy as np
import pytest
from agreement import FLOOR, assert_accurate, relative_error
from latent_layers import KINDS, SIZES, as_function, latent_layer, rows

import mha
from mha import reference

STEP = 1e-30
OPTIONS = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0, "causal": True}, "scale": {"scale": 0.1},
    "lengths": {"key_lengths": [5, 0, 9]}, "gate": {"head_gate": [1, 0.5, 0, -1]},
    "bias": {"bias": np.linspace(-1, 1, 4 * 9 * 9).reshape(1, 4, 9, 9), "alibi": [0.1, 0, 1, 2]},
    "mask": {"mask": np.tri(9, dtype=bool), "sinks": [0.5, -1, 0, 2.0]},
    "distances": {"relative_bias": np.linspace(-1, 1, 12).reshape(4, 3), "positions": range(3, 12)},
}


def cast(options, dtype):
    return {name: np.asarray(value, dtype) if name in (
        "bias", "alibi", "sinks", "relative_bias", "head_gate") else value
        for name, value in options.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_against_the_reference(kind, name, dtype):
    layer, x = latent_layer(kind, dtype), rows(3, 9, 40, dtype=dtype)
    options = cast(OPTIONS[name], dtype)
    if kind == "plain":
        options.pop("positions", None)
    names = list(layer.parameters())

    def by_reference(x, *arrays):
        return reference.multi_head_latent_attention(
            x, **as_function(layer) | dict(zip(names, arrays, strict=True)), **{
                "return_weights": True, "return_lse": True} | options)

    def by_layer(x, *arrays):
        return layer(x, return_weights=True, return_lse=True, **options)

    if "scale" in options:
        scale = options.pop("scale")
        layer = latent_layer(kind, dtype, scale=scale)
    assert_accurate(by_layer, by_reference, [x, *layer.parameters().values()], {})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_wide_against_the_reference(kind, dtype):
    layer = latent_layer(kind, dtype, embed_dim=96, num_heads=6, kv_rank=64, nope_dim=40,
                         value_head_dim=33)
    x, key = rows(2, 70, 96, dtype=dtype), rows(2, 150, 96, dtype=dtype, seed=3)
    wide = layer.astype(np.float64)
    exact = reference.multi_head_latent_attention(
        x.astype(np.longdouble), key.astype(np.longdouble),
        **{name: value.astype(np.longdouble) if isinstance(value, np.ndarray) else value
           for name, value in as_function(wide).items()})
    assert relative_error(layer(x, key), exact.astype(np.float64)) <= FLOOR[np.dtype(dtype)]


def test_the_reference_is_the_formula():
    """A head at a time, as the paper writes it; and absorbed, the same."""
    layer, x = latent_layer("query_rank", np.float64), rows(9, 40, dtype=np.float64)
    P = layer.parameters()

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x):
        return np.stack([layer.rotary(row[None], [at])[0] for at, row in enumerate(x)])

    query = norm(x @ P["W_dq"] + P["b_dq"], P["q_norm"]) @ P["W_uq"]
    compressed = x @ P["W_dkv"] + P["b_dkv"]
    latent, rope = norm(compressed[:, :32], P["kv_norm"]), turned(compressed[:, 32:])
    heads = []
    for head in range(4):
        own = query[:, head * 24:(head + 1) * 24]
        key = latent @ P["W_uk"][:, head * 16:(head + 1) * 16]
        scores = (own[:, :16] @ key.T + turned(own[:, 16:]) @ rope.T) / np.sqrt(24)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        heads.append(weights @ latent @ P["W_uv"][:, head * 12:(head + 1) * 12])
    wanted = np.concatenate(heads, axis=1) @ P["W_o"] + P["b_o"]
    for absorbed in (False, True):
        got = reference.multi_head_latent_attention(x, **as_function(layer), absorbed=absorbed)
        assert relative_error(got, wanted) < 1e-14
    assert relative_error(layer(x), wanted) < 1e-14


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_by_complex_step(kind, name, shared):
    rng = np.random.default_rng(5)
    layer, x = latent_layer(kind, np.float64), rows(3, 9, 40, dtype=np.float64)
    options = cast(OPTIONS[name], np.float64)
    if kind == "plain":
        options.pop("positions", None)
    if kind == "rotary":
        options.pop("scale", None)
    key = None if shared else rows(3, 9, 40, dtype=np.float64, seed=4)
    output, pullback = layer.vjp(x, key, **options)
    grad_output, grad_lse = rng.standard_normal(output.shape), rng.standard_normal((3, 4, 9))
    if name == "lengths":
        grad_lse[1] = 0  # of -inf
    got = pullback(grad_output, grad_lse)
    arrays = {"query": x, "key": key, **layer.parameters(), **{
        given: options[given] for given in ("head_gate", "bias", "alibi", "relative_bias", "sinks")
        if given in options}}
    fixed = {**as_function(layer), **options}
    if "scale" in options:
        fixed["scale"] = options["scale"]
    for given, array in arrays.items():
        if array is None:
            assert getattr(got, given) is None
            continue
        direction = rng.standard_normal(array.shape)
        stepped, lse = reference.multi_head_latent_attention(**{
            "query": x, "key": key, **fixed, given: array + 1j * STEP * direction}, return_lse=True)
        lse = np.where(np.isfinite(lse), lse, 0)
        wanted = ((stepped.imag * grad_output).sum() + (lse.imag * grad_lse).sum()) / STEP
        gradient = (getattr(got, given) * direction).sum()
        assert np.isclose(gradient, wanted, rtol=1e-10, atol=1e-11), given
    missing = set(got._fields) - set(arrays)
    assert all(getattr(got, given) is None for given in missing)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_float32(kind):
    """Beside those of float64, which the complex step has checked."""
    wide = latent_layer(kind, np.float32).astype(np.float64)
    layer, x = wide.astype(np.float32), rows(3, 20, 40)
    output, pullback = layer.vjp(x, causal=True, head_gate=[1, 0.5, 2, -1])
    grad = rows(*output.shape, seed=7)
    got = pullback(grad)
    exact = wide.vjp(x.astype(np.float64), causal=True, head_gate=[1, 0.5, 2, -1.0])[1](
        grad.astype(np.float64))
    for name, gradient in got._asdict().items():
        wanted = getattr(exact, name)
        assert (gradient is None) == (wanted is None), name
        if wanted is not None:
            assert gradient.dtype == np.float32
            assert relative_error(gradient, wanted) < 5e-6, name


def test_some_gradients_are_those_of_all():
    layer, x = latent_layer(), rows(3, 9, 40)
    output, pullback = layer.vjp(x, head_gate=np.ones(4), bias=np.zeros((9, 9), np.float32))
    assert np.array_equal(output, layer(x, bias=np.zeros((9, 9), np.float32)))
    everything = pullback(output)
    again = pullback(output)
    for name, gradient in everything._asdict().items():
        assert np.array_equal(gradient, getattr(again, name)) or gradient is None
        alone = layer.vjp(x, head_gate=np.ones(4), bias=np.zeros((9, 9), np.float32),
                          wrt=(name,))[1](output)
        assert (gradient is None) == (getattr(alone, name) is None)
        assert gradient is None or np.array_equal(getattr(alone, name), gradient), name
        assert sum(other is not None for other in alone) == (gradient is not None)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{"key_lengths": [3, 5]}, {"causal": True, "query_offset": -3},
                                     {"mask": np.arange(5) < np.array([[3], [3]])[:, None, None]}])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_know_nothing_of_hidden_keys(kind, options, poison):
    """NaN in padding: the gradients are the bits of those beside zeros."""
    layer, query = latent_layer(kind), rows(2, 3, 40)
    key = rows(2, 5, 40, seed=3)
    clean, dirty = key.copy(), key.copy()
    hidden = np.s_[0, 3:] if "key_lengths" in options else np.s_[:, 3:]
    clean[hidden], dirty[hidden] = 0, poison
    both = []
    for given in (clean, dirty):
        output, pullback = layer.vjp(query, given, **options)
        both.append([output, *pullback(np.ones_like(output))])
    for one, other in zip(*both, strict=True):
        assert one is other is None or np.array_equal(one, other)


def test_a_key_that_is_given_has_its_own_gradient():
    layer, x = latent_layer(), rows(3, 9, 40)
    together = layer.vjp(x, positions=range(2, 11))[1](x)
    apart = layer.vjp(x, x, positions=range(2, 11))[1](x)
    assert together.key is None and np.array_equal(apart.query + apart.key, together.query)
    assert np.array_equal(apart.W_dkv, together.W_dkv)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_and_small_shapes(kind, shape):
    layer, x = latent_layer(kind), rows(*shape, 40)
    wanted = reference.multi_head_latent_attention(x, **as_function(layer))
    got, pullback = layer.vjp(x)
    assert np.array_equal(got, layer(x)) and got.shape == (*shape, 40)
    assert relative_error(got, wanted) < 1e-6
    assert pullback(got).query.shape == x.shape and pullback(got).W_uk.shape == layer.W_uk.shape
    nothing = layer(x, x[:, :0])
    assert np.array_equal(nothing, np.broadcast_to(layer.b_o if layer.use_bias else 0, got.shape))


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_are_computed_in_float32_and_rounded_once(kind, dtype):
    if dtype == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    layer, x = latent_layer(kind, np.float32).astype(dtype), rows(2, 9, 40).astype(dtype)
    wide = layer.astype(np.float32)
    wanted = wide(x.astype(np.float32), causal=True)
    for own in (layer, copy.copy(layer).freeze()):
        assert own(x, causal=True).dtype == dtype
        assert np.array_equal(own(x, causal=True), wanted.astype(dtype))
    output, pullback = layer.vjp(x, causal=True)
    gradients = pullback(output)
    wider = wide.vjp(x.astype(np.float32), causal=True)[1](output.astype(np.float32))
    for name, gradient in gradients._asdict().items():
        if gradient is not None:
            assert gradient.dtype == dtype, name
            assert np.array_equal(gradient, getattr(wider, name).astype(dtype)), name


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_has_the_same_bits_at_any_thread_count(kind):
    layer, x = latent_layer(kind), rows(5, 33, 40)
    wanted = layer(x, causal=True)
    frozen = copy.deepcopy(layer).freeze()
    for threads in (1, 2, 3):
        with mha.threads(threads):
            assert np.array_equal(layer(x, causal=True), wanted)
            assert np.array_equal(frozen(x, causal=True), wanted)
            assert np.array_equal(np.stack([frozen(one, causal=True) for one in x]), wanted)
    assert frozen.frozen and not layer.frozen
    one, other = frozen.vjp(x)[1](wanted), layer.vjp(x)[1](wanted)
    assert np.array_equal(one.W_dkv, other.W_dkv) and np.array_equal(one.query, other.query)
    with pytest.raises(ValueError, match="W_uk: got a change to a frozen layer"):
        frozen.W_uk = layer.W_uk
    assert np.array_equal(frozen.unfreeze()(x, causal=True), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_pickles_and_types(kind):
    layer, x = latent_layer(kind), rows(2, 9, 40)
    wanted = layer(x)
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)),
                  pickle.loads(pickle.dumps(copy.copy(layer).freeze()))):
        assert type(other) is mha.MultiHeadLatentAttention
        assert np.array_equal(other(x), wanted)
        assert repr(other).replace(", frozen", "") == repr(layer)
    names = {"MultiHeadLatentAttention": mha.MultiHeadLatentAttention, "Rotary": mha.Rotary,
             "float32": np.float32}
    again = eval(repr(layer), names)
    assert repr(again) == repr(layer)
    again.load_parameters(layer.parameters())
    assert np.array_equal(again(x), wanted)
    assert layer.num_parameters == sum(array.size for array in layer.parameters().values())
    wide = layer.astype(np.float64)
    assert wide.dtype == np.float64 and wide.W_uk.dtype == np.float64
    assert relative_error(layer(x), wide(x)) < 1e-6
    layer.W_o = np.zeros_like(layer.W_o)
    assert not np.array_equal(layer(x), wanted)


@pytest.mark.parametrize("bits", ["q8_0", "q4_0"])
def test_quantised_matrices_are_those_that_pack_gives(bits):
    sizes = {"embed_dim": 64, "num_heads": 2, "query_rank": 32, "value_head_dim": 32}
    plain, x = latent_layer(**sizes), rows(3, 20, 64)
    layer = copy.deepcopy(plain).quantize(bits)
    numbers = copy.deepcopy(layer).unfreeze()
    assert np.array_equal(layer(x, causal=True), numbers(x, causal=True))
    for name in ("W_dq", "W_uq", "W_dkv", "W_uk", "W_uv", "W_o"):
        packed = mha.pack(getattr(plain, name), dtype=bits).unpack()
        assert np.array_equal(getattr(layer, name), packed), name
    again = pickle.loads(pickle.dumps(layer))
    assert np.array_equal(again(x), layer(x)) and repr(again) == repr(layer)
    assert repr(layer).endswith(f"frozen, {bits})")
    for absorbed in (True, False):
        one, other = (each.new_cache(3, absorbed=absorbed) for each in (layer, numbers))
        assert np.array_equal(layer(x, cache=one), numbers(x, cache=other))
    assert np.array_equal(copy.deepcopy(layer).prune_heads([1])(x),
                          copy.deepcopy(numbers).prune_heads([1])(x))
    gradients = layer.vjp(x)[1](x)
    assert gradients.W_uk is None and gradients.W_o is None and gradients.query is not None
    with pytest.raises(ValueError, match=r"wrt: got \['W_uk'\], which are quantised"):
        layer.vjp(x, wrt=("W_uk",))
    some = copy.deepcopy(plain).quantize(bits, parameters=("W_o",))
    assert np.array_equal(some.W_uk, plain.W_uk) and not np.array_equal(some.W_o, plain.W_o)
    with pytest.raises(ValueError, match="W_q: got a parameter for a layer without, wanted one"
                                         " made with query_rank=None"):
        copy.copy(plain).quantize(bits, parameters=("W_q",))
    with pytest.raises(ValueError, match="W_dq: got a parameter for a layer without"):
        latent_layer("plain").quantize(bits, parameters=("W_dq",))


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_heads(kind):
    layer, x = latent_layer(kind), rows(2, 9, 40)
    wanted = layer(x, head_gate=[0, 1, 0, 1], causal=True)
    pruned = copy.copy(layer).prune_heads([0, -2])
    assert pruned.num_heads == 2 and pruned.W_uv.shape == (32, 24)
    assert relative_error(pruned(x, causal=True), wanted) < 1e-6
    for absorbed in (True, False):
        cache = pruned.new_cache(2, absorbed=absorbed)
        assert relative_error(pruned(x, cache=cache), wanted) < 1e-6
    with pytest.raises(ValueError, match="heads: got all 2, wanted one to stay"):
        pruned.prune_heads([0, 1])
    with pytest.raises(ValueError, match="heads: got a change to a frozen layer"):
        pruned.freeze().prune_heads([0])


@pytest.mark.parametrize(("more", "error", "message"), [
    ({"kv_rank": 0}, ValueError, "kv_rank: got 0, wanted at least 1"),
    ({"nope_dim": 2.0}, TypeError, "nope_dim: got float, wanted an int"),
    ({"query_rank": -1}, ValueError, "query_rank: got -1, wanted at least 1"),
    ({"rotary": 8}, TypeError, "rotary: got int, wanted an mha.Rotary"),
    ({"rotary": mha.Rotary(16)}, ValueError, r"rotary: got 16 dims, wanted at most rope_dim \(8\)"),
    ({"use_bias": "qkv"}, TypeError, "use_bias: got str, wanted True or False"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps: got -1.0, wanted a finite number"),
    ({"scale": float("nan")}, ValueError, "scale: got nan, wanted a finite number"),
    ({"dtype": int}, TypeError, "dtype: got <class 'int'>, wanted float16"),
    ({"rng": "x"}, TypeError, "rng: got str"),
    ({"kv_lora_rank": 3}, TypeError, "kv_lora_rank: got a keyword that MultiHeadLatentAttention"
                                     " does not have, wanted kv_rank="),
])
def test_what_the_constructor_refuses(more, error, message):
    with pytest.raises(error, match=message):
        mha.MultiHeadLatentAttention(40, 4, **{**SIZES, **more})


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"query": np.ones((2, 9, 41))}, ValueError, "query: got shape .*, wanted a last axis of 40"),
    ({"query": np.ones(40)}, ValueError, "query: got shape"),
    ({"query": np.ones((2, 9, 40), complex)}, TypeError, "query: got an array of complex128"),
    ({"key": np.ones((3, 9, 40))}, ValueError, "key: got shape .*, wanted the batch of query"),
    ({"key": np.ones((9, 40))}, ValueError, "key: got shape .*, wanted the batch of query"),
    ({"mask": np.ones((2, 9, 9), bool)}, ValueError, "mask: got 3 dimensions, wanted 2"),
    ({"mask": np.ones((9, 9))}, TypeError, "mask: got an array of float64"),
    ({"positions": range(8)}, ValueError, r"positions: got shape \(8,\), wanted \(9,\)"),
    ({"head_gate": [1, 2]}, ValueError, "head_gate: got"),
    ({"starts": [0, 9]}, ValueError, "starts: got some for latent attention, wanted one padded"),
    ({"sequences": [0]}, ValueError, "sequences: got some for latent attention"),
    ({"lengths": [9, 9]}, ValueError, "lengths: got some without a cache"),
    ({"attn_mask": None}, TypeError, "attn_mask: got a keyword that a call of"
                                     " MultiHeadLatentAttention does not have, wanted"),
    ({"cache": {}}, TypeError, "cache: got dict, wanted one of new_cache"),
])
def test_what_a_call_refuses(arguments, error, message):
    layer = latent_layer()
    with pytest.raises(error, match=message):
        layer(**{"query": rows(2, 9, 40), **arguments})
    of_vjp = {"starts", "sequences", "lengths", "cache", "attn_mask"}
    if not of_vjp & arguments.keys():
        with pytest.raises(error, match=message):
            layer.vjp(**{"query": rows(2, 9, 40), **arguments})


@pytest.mark.parametrize(("options", "message"), [
    ({"causal": True, "query_offset": [1]}, r"query_offset: got shape \(1,\), wanted an int"),
    ({"key_lengths": [9]}, r"key_lengths: got shape \(1,\), wanted an int or \(9,\)"),
    ({"key_lengths": [[9] * 9]}, r"key_lengths: got shape \(1, 9\), wanted an int or \(9,\)"),
])
def test_one_sequence_has_no_axis_of_the_batch_in_options(options, message):
    layer = latent_layer()
    for call in (layer, layer.vjp):
        with pytest.raises(ValueError, match=message):
            call(rows(9, 40), **options)


@pytest.mark.parametrize("offset", [0, -1, 10**30, np.int32(2), np.array(3)])
def test_one_sequence_takes_the_offsets_of_a_batch(offset):
    layer, x = latent_layer(), rows(9, 40)
    assert np.array_equal(layer(x, causal=True, query_offset=offset),
                          layer(x[None], causal=True, query_offset=offset)[0])


def test_one_sequence_has_no_axis_of_the_batch_in_gradients():
    _, pullback = latent_layer().vjp(rows(9, 40))
    with pytest.raises(ValueError, match=r"grad_output: got shape \(8, 40\), wanted \(9, 40\)"):
        pullback(rows(8, 40))
    with pytest.raises(ValueError, match=r"grad_lse: got shape \(1, 4, 9\), wanted \(4, 9\)"):
        pullback(rows(9, 40), rows(1, 4, 9))


def test_what_assignments_are_refused():
    layer = latent_layer("rotary")
    for name in ("W_dq", "q_norm", "W_uq", "b_dq"):
        assert getattr(layer, name) is None
        with pytest.raises(ValueError, match=f"{name}: got a parameter for a layer without, wanted"
                                             " one made with query_rank=r"):
            setattr(layer, name, np.ones((4, 4)))
    with pytest.raises(ValueError, match="b_o: got a bias for a layer without, wanted use_bias="):
        latent_layer("plain").b_o = np.ones(40)
    with pytest.raises(ValueError, match=r"W_uk: got shape \(64, 32\), wanted \(32, 64\); stored"):
        layer.W_uk = np.ones((64, 32))
    with pytest.raises(AttributeError, match="kv_rank: got an assignment"):
        layer.kv_rank = 3
    with pytest.raises(AttributeError, match="kv_lora_rank"):
        layer.kv_lora_rank = 3
    state = layer.__getstate__()
    with pytest.raises(ValueError, match="state: got one that does not fit together"):
        layer.__setstate__({**state, "kv_rank": 31})
    with pytest.raises(ValueError, match=r"state: got none for \['nope_dim'\]"):
        layer.__setstate__({name: value for name, value in state.items() if name != "nope_dim"})
    with pytest.raises(ValueError, match="mapping: got none for"):
        layer.load_parameters({})
