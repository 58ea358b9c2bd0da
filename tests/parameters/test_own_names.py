"""from_state(names=...): layers of programs with names of their own."""

import ast

import numpy as np
import pytest
from layouts import HEADS, WIDTH, error_of

import mha

from_state = mha.MultiHeadAttention.from_state
NAMES = {"q": "W_query", "k": "W_key", "v": "W_value", "o": "out_proj"}
X = np.random.default_rng(3).standard_normal((2, 5, WIDTH)).astype(np.float32)


def layer_of(**options):
    layer = mha.MultiHeadAttention(WIDTH, HEADS, rng=0, **options)
    rng = np.random.default_rng(1)
    for name, parameter in layer.parameters().items():
        setattr(layer, name, rng.standard_normal(parameter.shape).astype(np.float32))
    return layer


def state_of(layer, transposed=True, ending=".weight", prefix=""):
    """By the names of NAMES, written out."""
    state = {}
    for letter, name in NAMES.items():
        weight = getattr(layer, f"W_{letter}")
        state[f"{prefix}{name}{ending}"] = (weight.T if transposed else weight).copy()
        if getattr(layer, f"b_{letter}") is not None and ending:
            state[f"{prefix}{name}.bias"] = getattr(layer, f"b_{letter}").copy()
    return state


def same(layer, other):
    assert repr(layer) == repr(other)
    for name, parameter in other.parameters().items():
        np.testing.assert_array_equal(layer.parameters()[name], parameter, err_msg=name)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("ending", [".weight", ".kernel", ""])
@pytest.mark.parametrize("use_bias", [True, False, "qkv", "o", "kv"])
def test_linear_layers_by_name(transposed, ending, use_bias):
    if not ending:
        use_bias = False
    layer = layer_of(use_bias=use_bias)
    state = state_of(layer, transposed, ending)
    read = from_state(state, names=NAMES, num_heads=HEADS, transposed=transposed)
    same(read, layer)
    np.testing.assert_array_equal(read(X, causal=True), layer(X, causal=True))
    told = error_of(from_state, state, names=NAMES, num_heads=HEADS)
    assert "transposed: needed, since the shapes fit both ways" in told
    assert told.startswith("state: got what does not fit names= under prefix ''")


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("options", [{"head_dim": 10, "num_kv_heads": 2, "key_dim": 7},
                                     {"output_dim": 9, "key_dim": 13}])
def test_shapes_tell_what_is_transposed_where_biases_have_them(transposed, options):
    layer = layer_of(**options)
    same(from_state(state_of(layer, transposed), names=NAMES, num_heads=HEADS), layer)


@pytest.mark.parametrize("transposed", [True, False])
def test_one_weight_of_all_three(transposed):
    layer = layer_of()
    weight = np.concatenate([layer.W_q, layer.W_k, layer.W_v], axis=1)
    state = {"c_attn.weight": weight.T if transposed else weight,
             "c_attn.bias": np.concatenate([layer.b_q, layer.b_k, layer.b_v]),
             "c_proj.weight": layer.W_o.T if transposed else layer.W_o, "c_proj.bias": layer.b_o}
    names = {"qkv": "c_attn", "o": "c_proj"}
    same(from_state(state, names=names, num_heads=HEADS), layer)
    told = error_of(from_state, state, names=names, num_heads=HEADS, transposed=not transposed)
    assert "c_attn.bias: got shape (72,), wanted" in told


def test_arrays_by_their_own_names_and_trees():
    layer = layer_of(head_dim=10, num_kv_heads=2, qk_norm="head", norm_eps=1e-5, sinks=True)
    theirs = {own: f"their_{own.lower()}" for own in layer.parameters()}
    state = {"attention": {theirs[own]: array for own, array in layer.parameters().items()}}
    options = {"names": theirs, "prefix": "attention.", "num_heads": HEADS}
    same(from_state(state, norm_eps=1e-5, **options), layer)
    same(from_state(state, config={"rms_norm_eps": 1e-5, "model_type": "qwen3"}, **options), layer)
    assert "norm_eps: needed and given nowhere" in error_of(from_state, state, **options)
    del options["num_heads"]
    assert "num_heads: needed and given nowhere" in error_of(from_state, state, norm_eps=1e-5,
                                                             **options)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("kind", ["element", "head"])
def test_an_output_gate_of_either_kind(kind, transposed):
    layer = layer_of(head_dim=10, output_gate=kind)
    state = {**state_of(layer, transposed), "gate.bias": layer.b_g,
             "gate.weight": layer.W_g.T if transposed else layer.W_g}
    same(from_state(state, names={**NAMES, "g": "gate"}, num_heads=HEADS), layer)
    own = {name: name for name in layer.parameters()}
    same(from_state(layer.parameters(), names=own, num_heads=HEADS), layer)


def test_layers_of_a_model_with_masks_that_it_stores():
    layers, state = [layer_of(), layer_of(use_bias=False)], {}
    for index, layer in enumerate(layers):
        state |= state_of(layer, prefix=f"blocks.{index}.att.")
        state[f"blocks.{index}.att.mask"] = np.triu(np.ones((9, 9)), 1)
    options = {"names": NAMES, "transposed": True, "prefix": "blocks.{layer}.att.",
               "config": {"n_heads": HEADS}, "window": (3, 0), "rotary": mha.Rotary(6)}
    read = from_state(state, **options)
    for one, other in zip(read, layers, strict=True):
        np.testing.assert_array_equal(one.W_k, other.W_k)
        assert one.window == (3, 0) and one.rotary == mha.Rotary(6)
    state["blocks.1.att.gate.weight"] = np.ones(3)
    assert "left over gate.weight" in error_of(from_state, state, **options)


@pytest.mark.parametrize(("names", "kind", "message"), [
    ([], TypeError, "names: got list, wanted a mapping as {\"q\": \"W_query\""),
    ({"q": 3}, TypeError, "names: got 'q': 3, wanted names of ours with theirs"),
    ({**NAMES, "query": "x"}, ValueError,
     "names: got 'query', wanted one of q, k, v, o, qkv, g, W_q"),
    ({**NAMES, "w_q": "x"}, ValueError, "names: got 'w_q', wanted one of W_q"),
    ({"q": "a", "k": "b"}, ValueError, "names: got none for o, v, wanted one each for q"),
    ({**NAMES, "qkv": "x"}, ValueError, "names: got two for ['W_k', 'W_q', 'W_v']"),
    ({**NAMES, "W_q": "x"}, ValueError, "names: got two for ['W_q']"),
    ({**NAMES, "k": "W_query"}, ValueError, "names: got a name twice"),
])
def test_names_that_are_wrong(names, kind, message):
    state = state_of(layer_of())
    assert message in error_of(from_state, state, names=names, num_heads=HEADS, kind=kind)


def test_a_wrong_prefix_and_names_of_a_layout_are_told():
    state = state_of(layer_of(), prefix="att.")
    options = {"names": NAMES, "num_heads": HEADS, "transposed": True}
    told = error_of(from_state, state, **options)
    assert "looks like names= elsewhere: try prefix='att.'" in told
    assert "missing W_query.weight, W_key.weight, W_value.weight" in error_of(
        from_state, {"x": X}, **options)
    bert = layer_of().to_state("bert")
    assert "looks like bert: try layout='bert'" in error_of(from_state, bert, **options)


def test_transposed_is_a_bool():
    assert "transposed: got int" in error_of(from_state, state_of(layer_of()), names=NAMES,
                                             num_heads=HEADS, transposed=1, kind=TypeError)


@pytest.mark.parametrize("letters", [
    ("q", "k", "v", "o"), ("W_query", "W_key", "W_value", "out_proj"),
    ("to_q", "to_k", "to_v", "to_out"), ("q_lin", "k_lin", "v_lin", "dense")])
def test_errors_say_how_to_give_names_of_your_own(letters):
    """And what they say to give is right."""
    layer = mha.MultiHeadAttention(6, 2, use_bias=False, rng=0, head_dim=4)
    state = {f"block.{name}.weight": layer.parameters()[f"W_{letter}"].T
             for letter, name in zip("qkvo", letters)}
    for layout in (None, "pytorch"):
        with pytest.raises(ValueError, match="names of your own: names=") as told:
            mha.MultiHeadAttention.from_state(state, layout, prefix="block.", num_heads=2)
        names = ast.literal_eval(str(told.value).split("names=")[-1].split(", num_heads")[0])
        read = mha.MultiHeadAttention.from_state(state, names=names, prefix="block.", num_heads=2,
                                               transposed=True)
        assert np.array_equal(read.W_o, layer.W_o)


def test_an_error_says_how_to_join_weights_of_heads():
    state = {f"heads.{head}.{name}.weight": np.ones((8, 4)) for head in (0, 1)
             for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=r"a weight a head, wanted one for all, joined by np\."):
        mha.MultiHeadAttention.from_state(state, "pytorch", num_heads=2)
