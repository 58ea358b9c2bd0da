"""The recipes of docs/autodiff.md and docs/rotary.md, as they stand there, against the attention of
the libraries."""

import re

import numpy as np
import pytest
from code_of_pages import block_with, names_of


def recipe(imported, capsys):
    """What the block of docs/autodiff.md with that import defines; it prints what its comment
    says."""
    block, names = block_with("docs/autodiff.md", imported), {}
    exec(block, names)
    assert capsys.readouterr().out.rstrip() == re.search(r"^print.*# (.*)$", block, re.M)[1]
    return names


def close(ours, theirs, size):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=size * np.abs(theirs).max())


def test_hips_autograd(capsys):
    import autograd
    import autograd.numpy as anp

    attention = recipe("from autograd.extend import", capsys)["attention"]
    query, key, value, weight = np.random.default_rng(1).standard_normal((4, 2, 3, 7, 5))

    def plain(query, key, value):
        scores = anp.einsum("...id,...jd->...ij", query, key) / 5**0.5
        scores = anp.where(np.tril(np.ones((7, 7), bool)), scores, -np.inf)
        exponentials = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
        weights = exponentials / anp.sum(exponentials, axis=-1, keepdims=True)
        return anp.einsum("...ij,...jd->...id", weights, value)

    def loss(function, **options):
        return lambda *inputs: anp.sum(anp.tanh(function(*inputs, **options)) * weight)

    ours, theirs = loss(attention, causal=True), loss(plain)
    for argument in (0, 1, 2, (0, 2), (0, 1, 2)):
        pair = [autograd.grad(each, argument)(query, key, value) for each in (ours, theirs)]
        close(np.array(pair[0]), np.array(pair[1]), 1e-13)
    close(autograd.grad(lambda x: ours(x, x, x))(query),
          autograd.grad(lambda x: theirs(x, x, x))(query), 1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_flax(capsys, causal, compiled):
    import jax
    from flax import linen as nn

    attention_fn = recipe("import jax", capsys)["attention_fn"]
    x = jax.random.normal(jax.random.key(2), (3, 9, 24))
    mask = nn.make_causal_mask(x[..., 0], dtype=bool) if causal else None
    theirs = nn.MultiHeadDotProductAttention(num_heads=3)
    ours = nn.MultiHeadDotProductAttention(num_heads=3, attention_fn=attention_fn)
    variables = theirs.init(jax.random.key(3), x)

    def value_and_gradients(layer):
        def loss(variables, x):
            return (jax.numpy.tanh(layer.apply(variables, x, mask=mask))**2).sum()
        both = jax.value_and_grad(loss, argnums=(0, 1))
        return (jax.jit(both) if compiled else both)(variables, x)

    ours, theirs = (jax.tree.leaves(value_and_gradients(layer)) for layer in (ours, theirs))
    largest = max(np.abs(leaf).max() for leaf in theirs[1:])  # the key's bias has none
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)
    with pytest.raises(NotImplementedError, match="neither bias nor dropout"):
        attention_fn(x, x, x, bias=x)


@pytest.fixture(scope="module")
def rotary_page():
    return names_of("docs/rotary.md")


def attention_of(module, rotary, width=64, heads=2):
    """The module with random weights, and a layer of mha that has them."""
    import torch

    import mha

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, width**-0.5)
    state = {name: numbers.numpy() for name, numbers in module.state_dict().items()}
    layer = mha.MultiHeadAttention(width, heads, rotary=rotary, rng=0,
                                   use_bias=any(".bias" in name for name in state))
    found = {}
    for letter in "qkvo":
        name = f"{letter}_proj"
        found[f"W_{letter}"] = state[f"{name}.weight"].T
        if layer.use_bias:
            found[f"b_{letter}"] = state.get(f"{name}.bias", np.zeros(width, np.float32))
    layer.load_parameters(found)
    return module.eval(), layer


@pytest.mark.parametrize("size", [1, 2])  # of the blocks that are merged later
def test_the_vision_of_qwen2_vl(rotary_page, size):
    import torch
    from transformers import vision_utils
    from transformers.models.qwen2_vl import configuration_qwen2_vl, modeling_qwen2_vl

    import mha

    config = configuration_qwen2_vl.Qwen2VLVisionConfig(
        embed_dim=64, num_heads=2, attn_implementation="eager")
    attention = modeling_qwen2_vl.VisionAttention(config).eval()
    x = np.random.default_rng(0).standard_normal((6 * 4, 64)).astype(np.float32)
    where = vision_utils.get_vision_position_ids(torch.tensor([[1, 6, 4]]), size)
    turned = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)(torch.from_numpy(x), where)
    with torch.no_grad():
        wanted = attention(torch.from_numpy(x), torch.tensor([0, 24]), turned).numpy()
    rotary = rotary_page["qwen_vision_rotary"](32)
    if size == 1:
        assert np.array_equal(rotary_page["rows_and_columns"](6, 4), where.numpy().T)
    state = {name: numbers.numpy() for name, numbers in attention.state_dict().items()}
    weights, biases = np.split(state["qkv.weight"], 3), np.split(state["qkv.bias"], 3)
    layer = mha.MultiHeadAttention(64, 2, rotary=rotary, use_bias=True)
    layer.load_parameters({
        **{f"W_{letter}": weight.T for letter, weight in zip("qkv", weights, strict=True)},
        **{f"b_{letter}": bias for letter, bias in zip("qkv", biases, strict=True)},
        "W_o": state["proj.weight"].T, "b_o": state["proj.bias"]})
    close(layer(x, positions=where.numpy().T), wanted, 2e-6)


def test_the_vision_of_pixtral(rotary_page):
    import torch
    import transformers
    from transformers.models.pixtral import modeling_pixtral

    config = transformers.PixtralVisionConfig(
        hidden_size=64, num_attention_heads=2, image_size=64, patch_size=8,
        attn_implementation="eager")
    attention, layer = attention_of(modeling_pixtral.PixtralAttention(config),
                                    rotary_page["pixtral_rotary"](32))
    positions = rotary_page["rows_and_columns"](5, 7)
    x = np.random.default_rng(0).standard_normal((1, 35, 64)).astype(np.float32)
    turned = modeling_pixtral.PixtralVisionRotaryEmbedding(config)(
        torch.from_numpy(x), torch.from_numpy(positions.T.copy()))
    with torch.no_grad():
        wanted = attention(torch.from_numpy(x), position_embeddings=turned)[0].numpy()
    close(layer(x, positions=positions), wanted, 2e-6)


@pytest.mark.parametrize(("height", "width"), [(5, 7), (4, 4), (1, 6)])
def test_the_vision_of_dinov3(rotary_page, height, width):
    import torch
    import transformers
    from transformers.models.dinov3_vit import modeling_dinov3_vit

    config = transformers.DINOv3ViTConfig(
        hidden_size=64, num_attention_heads=2, image_size=64, patch_size=8,
        attn_implementation="eager")
    rotary = rotary_page["dinov3_rotary"](32, height, width)
    attention, layer = attention_of(modeling_dinov3_vit.DINOv3ViTAttention(config), rotary)
    x = np.random.default_rng(0).standard_normal((2, 5 + height * width, 64)).astype(np.float32)
    turned = modeling_dinov3_vit.DINOv3ViTRopePositionEmbedding(config).eval()(
        torch.ones(1, 3, 8 * height, 8 * width))
    with torch.no_grad():
        wanted = attention(torch.from_numpy(x), position_embeddings=turned)[0].numpy()
    positions = rotary_page["dinov3_positions"](height, width, prefix=5)
    close(layer(x, positions=np.stack([positions] * 2, axis=1)), wanted, 2e-6)
