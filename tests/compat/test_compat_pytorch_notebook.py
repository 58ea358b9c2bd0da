"""The PyTorch notebook: its shapes, counts and golden data, by the plain API and by its adapter."""

from pathlib import Path

import numpy as np
import pytest

import mha
from mha.compat import pytorch_notebook as notebook

GOLDEN = dict(np.load(Path(__file__).parent.parent / "data" / "notebook.npz"))
LINEARS = ("W_q", "W_k", "W_v", "W_o")
SENTENCE = GOLDEN["sentence"]
WORDS = ["The", "cat", "sat", "on", "the", "mat"]


def assert_agrees(got, wanted, bound=2e-6):
    """As near as bound, relative to the largest entry."""
    assert got.dtype == wanted.dtype == np.float32 and got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= bound * np.abs(wanted).max()


@pytest.fixture
def golden_layer():
    layer = notebook.MultiHeadAttention(d_model=64, num_heads=4)
    for name in LINEARS:
        getattr(layer, name).weight = GOLDEN[f"{name}_weight"]
        getattr(layer, name).bias = GOLDEN[f"{name}_bias"]
    return layer.eval()


def plain_arguments():
    """The golden weights as `mha.multi_head_attention` takes them: W (in, out)."""
    weights = {name: GOLDEN[f"{name}_weight"].T for name in LINEARS}
    return weights | {"b" + name[1:]: GOLDEN[f"{name}_bias"] for name in LINEARS}


def test_attention_by_adapter_and_by_plain_api():
    inputs = [GOLDEN[f"sdpa_{name}"] for name in ("query", "key", "value")]
    for output, weights in (notebook.scaled_dot_product_attention(*inputs),
                            mha.scaled_dot_product_attention(*inputs, return_weights=True)):
        assert_agrees(output, GOLDEN["sdpa_output"])
        assert_agrees(weights, GOLDEN["sdpa_weights"])


def test_layer_by_adapter(golden_layer):
    output, weights = golden_layer(SENTENCE, SENTENCE, SENTENCE)
    assert_agrees(output, GOLDEN["output"])
    assert_agrees(weights, GOLDEN["weights"])
    mask = notebook.create_causal_mask(6)
    assert np.array_equal(mask, GOLDEN["attend_mask"])
    output, weights = golden_layer.forward(SENTENCE, SENTENCE, SENTENCE, mask=mask)
    assert_agrees(output, GOLDEN["masked_output"])
    assert_agrees(weights, GOLDEN["masked_weights"])
    assert (weights[0, :, ~np.tri(6, dtype=bool)] == 0).all()


def test_layer_by_plain_api():
    layer = mha.MultiHeadAttention(64, 4)
    layer.load_parameters(plain_arguments())
    output, weights = layer(SENTENCE, return_weights=True)
    assert_agrees(output, GOLDEN["output"])
    assert_agrees(weights, GOLDEN["weights"])
    for options in ({"causal": True}, {"mask": mha.masks.from_attend(GOLDEN["attend_mask"])}):
        output, weights = mha.multi_head_attention(
            SENTENCE, SENTENCE, SENTENCE, **plain_arguments(), num_heads=4, return_weights=True,
            **options)
        assert_agrees(output, GOLDEN["masked_output"])
        assert_agrees(weights, GOLDEN["masked_weights"])


def test_comparison_with_the_builtin_layer(golden_layer):
    output, weights = golden_layer(SENTENCE, SENTENCE, SENTENCE)
    assert_agrees(output, GOLDEN["torch_output"])
    assert_agrees(weights, GOLDEN["torch_weights_per_head"])
    assert_agrees(weights.mean(axis=1), GOLDEN["torch_weights_averaged"])


def test_shapes_and_parameter_count():
    layer = notebook.MultiHeadAttention(512, 8)
    assert sum(parameter.size for parameter in layer.parameters()) == 1_050_624
    assert mha.MultiHeadAttention(512, 8).num_parameters == 1_050_624
    assert [parameter.shape for parameter in layer.parameters()] == [(512, 512), (512,)] * 4
    assert (layer.d_model, layer.num_heads, layer.d_k) == (512, 8, 64)
    x = np.random.default_rng(0).standard_normal((2, 10, 512), np.float32)
    output, weights = layer.eval()(x, x, x)
    assert output.shape == (2, 10, 512) and weights.shape == (2, 8, 10, 10)
    assert layer(x[:, :3], x, x)[1].shape == (2, 8, 3, 10)


def test_split_and_combine_heads():
    layer = notebook.MultiHeadAttention(12, 3)
    x = np.arange(2 * 5 * 12.0).reshape(2, 5, 12)
    heads = layer.split_heads(x)
    assert heads.shape == (2, 3, 5, 4) and np.array_equal(heads[1, 2], x[1, :, 8:])
    assert np.array_equal(layer.combine_heads(heads), x)


def test_modes():
    layer = notebook.MultiHeadAttention(8, 2, dropout=0.5, rng=0)
    assert layer.training
    assert layer.eval() is layer and not layer.training
    assert layer.train() is layer and layer.training
    assert not layer.train(False).training
    x = np.random.default_rng(0).standard_normal((1, 40, 8), np.float32)
    first, second = (layer(x, x, x)[0] for _ in range(2))
    assert np.array_equal(first, second)
    layer.train()
    first, second = (layer(x, x, x)[0] for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("dropout", [0.1, 0.3, 0.75])
def test_weights_are_those_after_dropout(dropout):
    layer = notebook.MultiHeadAttention(8, 2, dropout=dropout, rng=1)
    x = np.random.default_rng(2).standard_normal((3, 50, 8), np.float32)
    output, weights = layer(x, x, x)
    _, full = layer.eval()(x, x, x)
    kept = weights != 0
    fraction = (65536 - round(65536 * dropout)) / 65536
    assert abs(kept.mean() - fraction) < 0.02  # 15,000 draws: six standard deviations
    np.testing.assert_allclose(weights[kept], (full / fraction)[kept], rtol=1e-6)

    # The output is what these weights give, computed apart in float64.
    value = x @ layer.W_v.weight.T.astype(float) + layer.W_v.bias
    heads = weights.astype(float) @ value.reshape(3, 50, 2, 4).swapaxes(1, 2)
    wanted = (heads.swapaxes(1, 2).reshape(3, 50, 8) @ layer.W_o.weight.T.astype(float)
              + layer.W_o.bias)
    assert_agrees(output, wanted.astype(np.float32))


def test_rng_repeats_weights_and_dropout():
    x = np.random.default_rng(2).standard_normal((1, 9, 8), np.float32)
    results = [notebook.MultiHeadAttention(8, 2, 0.5, rng=7)(x, x, x) for _ in range(2)]
    for first, second in zip(*results):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("shape", [(6,), (6, 6), (4, 6, 6), (1, 6, 6), (1, 1, 6, 6), (1, 4, 6, 6)])
def test_mask_broadcasts(golden_layer, shape):
    mask = np.random.default_rng(3).integers(0, 2, shape)
    mask[..., 0] = 1  # every query sees the first key
    _, weights = golden_layer(SENTENCE, SENTENCE, SENTENCE, mask)
    visible = np.broadcast_to(mask != 0, weights.shape)
    assert (weights[~visible] == 0).all() and (weights[visible] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    for same in (mask.astype(bool), mask.astype(np.float32)):
        assert np.array_equal(golden_layer(SENTENCE, SENTENCE, SENTENCE, same)[1], weights)


def test_fully_masked_row_is_uniform(golden_layer):
    mask = notebook.create_causal_mask(6)
    mask[..., 3, :] = 0
    _, weights = golden_layer(SENTENCE, SENTENCE, SENTENCE, mask)
    assert (weights[:, :, 3] == np.float32(1 / 6)).all()
    _, weights = notebook.scaled_dot_product_attention(SENTENCE, SENTENCE, SENTENCE, mask[0])
    assert (weights[:, 3] == np.float32(1 / 6)).all()


def test_parameters_are_live(golden_layer):
    golden_layer.W_o.weight[...] = 0
    golden_layer.W_o.bias[...] = 3
    assert (golden_layer(SENTENCE, SENTENCE, SENTENCE)[0] == 3).all()


def test_sentence_example():
    example = notebook.create_sentence_example(seed=4)
    assert example.shape == (1, 6, 64) and example.dtype == np.float32
    assert np.array_equal(example, notebook.create_sentence_example(seed=4))
    drawn = np.random.default_rng(4).standard_normal((1, 6, 64), np.float32)[0]
    assert np.array_equal(example[0, [0, 3, 4, 5]], drawn[[0, 3, 4, 5]])
    np.testing.assert_allclose(example[0, 1], drawn[1] + drawn[4] / 2, rtol=1e-6)
    np.testing.assert_allclose(example[0, 2], drawn[2] + drawn[5] / 2, rtol=1e-6)
    before = np.random.get_state()[1].copy()
    assert not np.array_equal(notebook.create_sentence_example(),
                              notebook.create_sentence_example())
    assert np.array_equal(np.random.get_state()[1], before)


def heat_maps(figure):
    """The numbers that each heat map of a figure shows."""
    return [np.asarray(image.get_array()) for axes in figure.axes for image in axes.get_images()]


def test_visualizations(golden_layer):
    _, weights = golden_layer(SENTENCE, SENTENCE, SENTENCE)

    figure = notebook.visualize_attention(weights[:, 2], "One head")
    assert figure.get_suptitle() == "One head"
    [shown] = heat_maps(figure)
    assert np.array_equal(shown, weights[0, 2])

    for count, expected in ((4, 4), (8, 4), (3, 3), (1, 1)):
        figure = notebook.visualize_multihead_attention(weights, num_heads_to_show=count)
        assert np.array_equal(heat_maps(figure), weights[0, :expected])

    figure = notebook.visualize_sentence_attention(weights, WORDS, num_heads_to_show=2)
    assert np.array_equal(heat_maps(figure), weights[0, :2])
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == WORDS


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda layer, x: notebook.MultiHeadAttention(10, 3), ValueError, "d_model: got 10"),
    (lambda layer, x: notebook.MultiHeadAttention(8, 2, 1.5), ValueError, "dropout: got 1.5"),
    (lambda layer, x: notebook.MultiHeadAttention(8, 2, "0.1"), TypeError, "dropout: got str"),
    (lambda layer, x: setattr(layer.W_q, "weight", x[0]), ValueError, "weight: got shape"),
    (lambda layer, x: setattr(layer.W_q, "bias", x[0]), ValueError, "bias: got shape"),
    (lambda layer, x: setattr(layer.W_q, "weight", np.ones((64, 64), complex)), TypeError,
     "weight: got an array of complex"),
    (lambda layer, x: layer(x, x, x, "mask"), TypeError, "mask: got"),
    (lambda layer, x: layer(x, x, x, np.ones((5, 6))), ValueError, "mask"),
    (lambda layer, x: layer.split_heads(x[0]), ValueError, "x: got shape"),
    (lambda layer, x: layer.combine_heads(x), ValueError, "x: got shape"),
    (lambda layer, x: notebook.visualize_multihead_attention(x), ValueError, "attention_weights"),
    (lambda layer, x: notebook.visualize_sentence_attention(GOLDEN["weights"], WORDS, 0),
     ValueError, "num_heads_to_show: got 0"),
])
def test_bad_calls(golden_layer, call, error, message):
    with pytest.raises(error, match=message):
        call(golden_layer, SENTENCE)
