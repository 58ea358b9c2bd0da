"""Every argument as every kind of tensor: the numbers that PyTorch would read, or an error that
names the argument and the kind. Never what the memory happens to hold."""

import numpy as np
import pytest
import torch
import torch.nn.attention.bias
from odd_tensors import KINDS, Wrapper, freed, letter

import mha
from mha.compat import pytorch as compat
from mha.compat import pytorch_notebook
from mha.compat import transformers as mha_transformers
from mha.compat.d2l import torch as d2l

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in (
    "The PyTorch API of nested tensors", "torch.quantize_per_tensor", "Sparse",
    "Lower right causal")]

FLOATS = torch.arange(48.0).reshape(2, 2, 3, 4) / 48
MASK = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
ROWS = FLOATS.reshape(2, 6, 4)[:, :3].transpose(0, 1).contiguous()  # (len, batch, width)
WEIGHT = torch.eye(4) + 0.1
LAYER = compat.MultiheadAttention(4, 2, rng=0)
STATE = {name: torch.from_numpy(array) for name, array in LAYER.state_dict().items()}


def heads(**others):
    return {"query": FLOATS, "key": FLOATS + 1, "value": FLOATS + 2, **others}


def loaded(**state):
    layer = compat.MultiheadAttention(4, 2)
    layer.load_state_dict({name.replace("__", "."): array for name, array in state.items()})
    return layer(ROWS, ROWS, ROWS)[0]


def functional_layer(**given):
    return compat.multi_head_attention_forward(
        embed_dim_to_check=4, num_heads=2, add_zero_attn=False, dropout_p=0.0, **given)[0]


def cached(key, value):
    cache = mha.KVCache(2, 2, 4)
    cache.append(key, value)
    return np.concatenate([cache.key, cache.value])


def projected(x):
    layer = mha.MultiHeadAttention(4, 2, rng=0)
    layer.W_v = x
    return layer(ROWS.numpy())


# What takes tensors: a function, and plain tensors for its arguments.
TAKERS = {
    "functional_attention": (compat.functional_attention, heads(
        mask=MASK, bias=torch.ones(3, 3), alibi=torch.ones(2), relative_bias=torch.ones(2, 5),
        sinks=torch.ones(2), key_lengths=torch.tensor([2, 3]))),
    "its outputs": (lambda **given: compat.functional_attention(
        **given, causal=True, return_weights=True, return_lse=True)[1], heads()),
    "scaled_dot_product_attention": (
        compat.scaled_dot_product_attention, heads(attn_mask=MASK)),
    "with an additive mask": (
        compat.scaled_dot_product_attention, heads(attn_mask=torch.ones(3, 3))),
    "MultiheadAttention": (lambda **given: LAYER(**given)[0], {
        "query": ROWS, "key": ROWS, "value": ROWS, "attn_mask": ~MASK,
        "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}),
    "load_state_dict": (loaded, {name.replace(".", "__"): array for name, array in STATE.items()}),
    "multi_head_attention_forward": (functional_layer, {
        "query": ROWS, "key": ROWS, "value": ROWS, "in_proj_weight": STATE["in_proj_weight"],
        "in_proj_bias": torch.ones(12), "bias_k": torch.ones(1, 1, 4),
        "bias_v": torch.ones(1, 1, 4), "out_proj_weight": WEIGHT, "out_proj_bias": torch.ones(4),
        "attn_mask": ~MASK}),
    "static heads": (functional_layer, {
        "query": ROWS, "key": ROWS, "value": ROWS, "in_proj_weight": None, "in_proj_bias": None,
        "bias_k": None, "bias_v": None, "out_proj_weight": WEIGHT, "out_proj_bias": None,
        "use_separate_proj_weight": True, "q_proj_weight": WEIGHT, "k_proj_weight": WEIGHT,
        "v_proj_weight": WEIGHT, "static_k": torch.ones(4, 3, 2), "static_v": torch.ones(4, 3, 2)}),
    "notebook": (lambda **given: pytorch_notebook.scaled_dot_product_attention(**given)[0],
                 heads(mask=MASK)),
    "d2l": (lambda **given: d2l.DotProductAttention(0.0).eval()(**given), {
        "queries": FLOATS[0], "keys": FLOATS[0], "values": FLOATS[0],
        "valid_lens": torch.tensor([2, 3])}),
    "d2l's softmax": (lambda X, valid_lens: d2l.masked_softmax(X, valid_lens), {
        "X": FLOATS[0], "valid_lens": torch.tensor([2, 3])}),
    "transformers": (lambda **given: mha_transformers.attention_forward(
        torch.nn.Module(), **given, scaling=0.5)[0], heads(
        attention_mask=MASK, s_aux=torch.ones(2), position_bias=torch.ones(3, 3))),
    "core": (mha.scaled_dot_product_attention, heads(
        mask=MASK, bias=torch.ones(3, 3), alibi=torch.ones(2), relative_bias=torch.ones(2, 5),
        sinks=torch.ones(2), key_lengths=torch.tensor([2, 3]))),
    "linear": (lambda x, weight, bias: mha.linear(x, weight, bias), {
        "x": ROWS, "weight": WEIGHT, "bias": torch.ones(4)}),
    "a list": (lambda x: mha.linear([[x], [x]], np.eye(4, dtype=np.float32)), {"x": ROWS}),
    "cache": (cached, {"key": FLOATS, "value": FLOATS}),
    "parameter": (projected, {"x": WEIGHT}),
    "masks": (lambda mask: mha.masks.from_blocked(mask), {"mask": MASK}),
    "rotary": (lambda x, positions: mha.Rotary(4)(x, positions), {
        "x": FLOATS, "positions": torch.tensor([2, 3, 4])}),
}
# transformers' modules read their shapes, or add them, and PyTorch refuses that in its own words.
REFUSED_BEFORE = {("transformers", "query", "nested"), ("transformers", "query", "uninitialized"),
                  ("transformers", "attention_mask", "uninitialized")}
CASES = [(taker, name, kind) for taker, (_, given) in TAKERS.items()
         for name, plain in given.items() if isinstance(plain, torch.Tensor)
         for kind in KINDS if letter(plain) in KINDS[kind].of
         and (taker, name, kind) not in REFUSED_BEFORE]
# What stands for a tensor goes through PyTorch's dispatcher there, which knows what it means.
BY_OPERATOR = ("functional_attention", "its outputs", "transformers")


@pytest.mark.parametrize(("taker", "name", "kind"), CASES)
def test_every_argument_as_every_kind(taker, name, kind):
    function, plain = TAKERS[taker]
    made, words, _ = KINDS[kind]
    odd = made(plain[name])
    given = {**plain, name: odd}
    if words is None or (kind == "wrapper" and taker in BY_OPERATOR):
        got = function(**given)
        got = got.inner if isinstance(got, Wrapper) else got
        np.testing.assert_array_equal(np.asarray(got), np.asarray(function(**plain)))
    else:
        with pytest.raises((TypeError, ValueError), match=rf"^\S+: got .*({words})"):
            function(**given)


@pytest.mark.parametrize("taker", ["functional_attention", "its outputs", "core",
                                   "scaled_dot_product_attention"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].words is None
                                  or kind in ("freed", "cut short", "meta", "fake", "batched")])
def test_bfloat16_as_every_kind(taker, kind):
    """NumPy knows nothing of it: it comes by DLPack, which says nothing of a negation."""
    function, _ = TAKERS[taker]
    halves = {name: tensor.bfloat16() for name, tensor in heads().items()}
    made, words, _ = KINDS[kind]
    given = {**halves, "key": made(halves["key"].float() if kind == "imaginary" else halves["key"])}
    if words is not None:
        with pytest.raises((TypeError, ValueError), match=rf"^\S+: got .*({words})"):
            function(**given)
        return
    wanted, got = (torch.as_tensor(np.asarray(each, np.float32) if isinstance(each, np.ndarray)
                                   else each.float())
                   for each in (function(**halves), function(**given)))
    assert torch.equal(wanted, got) if kind != "imaginary" else torch.allclose(
        wanted, got, rtol=1e-2)


@pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (5, 3)])
@pytest.mark.parametrize("make", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("attend", [
    lambda q, k, v, m: compat.scaled_dot_product_attention(q, k, v, m),
    lambda q, k, v, m: compat.functional_attention(q, k, v, mask=m),
    lambda q, k, v, m: compat.functional_attention(q.requires_grad_(), k, v, mask=m).detach(),
    lambda q, k, v, m: mha.scaled_dot_product_attention(q, k, v, mask=m)],
    ids=["compat", "functional", "with gradients", "core"])
def test_causal_biases_are_pytorchs(attend, make, lengths):
    query_len, key_len = lengths
    bias = getattr(torch.nn.attention.bias, make)(query_len, key_len)
    query, key, value = (torch.randn(2, 3, length, 8) for length in (query_len, key_len, key_len))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)
    np.testing.assert_allclose(np.asarray(attend(query, key, value, bias)), wanted.numpy(),
                               atol=2e-6)


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_causal_biases_beside_what_is_compiled():
    """torch.compile cannot take such a bias: attention runs outside of what it compiles."""
    bias = torch.nn.attention.bias.causal_lower_right(3, 3)

    @torch.compile(backend="aot_eager")
    def attend(x):
        return compat.functional_attention(2 * x, x, x, mask=bias) + 1

    wanted = torch.nn.functional.scaled_dot_product_attention(2 * FLOATS, FLOATS, FLOATS, bias) + 1
    torch.testing.assert_close(attend(FLOATS), wanted)


def test_a_causal_bias_for_other_lengths_is_refused():
    bias = torch.nn.attention.bias.causal_upper_left(4, 4)
    with pytest.raises(ValueError, match=r"attn_mask: got shape \(4, 4\)"):
        compat.scaled_dot_product_attention(FLOATS, FLOATS, FLOATS, bias)
    with pytest.raises(ValueError, match=r"mask: got shape \(4, 4\)"):
        compat.functional_attention(FLOATS, FLOATS, FLOATS, mask=bias)


@pytest.mark.parametrize("extras", [{}, {"return_weights": True, "return_lse": True}])
@pytest.mark.parametrize("name", ["query", "key", "value", "mask"])
def test_one_meta_tensor_beside_others(name, extras):
    given = {**heads(mask=MASK), name: {**heads(mask=MASK)}[name].to("meta")}
    with pytest.raises(TypeError, match=r"got a tensor on (cpu|meta), wanted one on (cpu|meta)"):
        compat.functional_attention(**given, **extras)


def test_part_of_a_storage_that_was_cut_short():
    """The storage has the numbers of the first half of the key, and not those of the second."""
    key = freed(torch.randn(4, 2, 3, 4), 2 * 2 * 3 * 4 * 4)
    compat.functional_attention(FLOATS, torch.as_strided(key, (2, 2, 3, 4), (24, 12, 4, 1)), FLOATS)
    rest = torch.empty(0).set_(torch.randn(4, 2, 3, 4).untyped_storage(), 48, (2, 2, 3, 4))
    compat.functional_attention(FLOATS, rest, FLOATS)
    rest.untyped_storage().resize_(48 * 4 + 4)
    for attend in (compat.functional_attention, compat.scaled_dot_product_attention,
                   mha.scaled_dot_product_attention):
        with pytest.raises(ValueError, match=r"key: got a tensor .* resized to 196 bytes"):
            attend(FLOATS, rest, FLOATS)
