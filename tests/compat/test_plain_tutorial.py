"""The plain tutorial's arithmetic: shapes at every step, parameter counts, configurations; its
table of single against multi-head attention, row by row; and its practice questions, by number.

Its GPT-3 configuration needs 2.4 GB of weights and is run by tests/tools/large_layer.py.
"""

import numpy as np
import pytest

import mha

# (embed_dim, num_heads): head size 64 in each.
CONFIGURATIONS = {"Transformer": (512, 8), "BERT-base": (768, 12), "GPT-2": (768, 12)}


def test_number_of_parameters():
    layer = mha.MultiHeadAttention(512, 8, use_bias=False)
    assert layer.num_parameters == 4 * 512**2 == 1_048_576
    assert sum(parameter.size for parameter in layer.parameters().values()) == 1_048_576
    # One head or eight: the heads share the width, so the count stays.
    assert mha.MultiHeadAttention(512, 1, use_bias=False).num_parameters == 1_048_576


def test_trace():
    """(2, 4, 512) -> (2, 8, 4, 64) -> (2, 4, 512), and the steps give what the layer gives."""
    layer = mha.MultiHeadAttention(512, 8, use_bias=False, rng=0)
    x = np.random.default_rng(1).standard_normal((2, 4, 512), np.float32)
    query, key, value = (mha.linear(x, weight) for weight in (layer.W_q, layer.W_k, layer.W_v))
    assert query.shape == key.shape == value.shape == (2, 4, 512)
    heads = [mha.split_heads(array, 8) for array in (query, key, value)]
    assert [array.shape for array in heads] == [(2, 8, 4, 64)] * 3
    attended = mha.scaled_dot_product_attention(*heads)
    assert attended.shape == (2, 8, 4, 64) and attended[:, 0].shape == (2, 4, 64)
    merged = mha.merge_heads(attended)
    assert merged.shape == (2, 4, 512)
    output = mha.linear(merged, layer.W_o)
    assert output.shape == (2, 4, 512)
    np.testing.assert_allclose(layer(x), output, rtol=0, atol=2e-6 * np.abs(output).max())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(name):
    embed_dim, num_heads = CONFIGURATIONS[name]
    layer = mha.MultiHeadAttention(embed_dim, num_heads, rng=0)
    assert layer.head_dim == 64
    assert layer.num_parameters == 4 * embed_dim**2 + 4 * embed_dim
    x = np.random.default_rng(1).standard_normal((2, 10, embed_dim), np.float32)
    causal = name == "GPT-2"
    output, weights = layer(x, causal=causal, return_weights=True)
    assert weights.shape == (2, num_heads, 10, 10)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    wanted = in_float64(x, layer, causal)
    assert output.dtype == np.float32 and output.shape == wanted.shape
    assert np.abs(output - wanted).max() <= 2e-6 * np.abs(wanted).max()


def in_float64(x, layer, causal):
    """The tutorial's five steps, head by head."""
    x = x.astype(float)
    W_q, W_k, W_v, W_o = (weight.astype(float)
                          for weight in (layer.W_q, layer.W_k, layer.W_v, layer.W_o))
    heads = []
    for start in range(0, layer.embed_dim, layer.head_dim):
        columns = slice(start, start + layer.head_dim)
        query, key, value = (x @ weight[:, columns] for weight in (W_q, W_k, W_v))
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(layer.head_dim)
        if causal:
            scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(exponentials / exponentials.sum(-1, keepdims=True) @ value)
    return np.concatenate(heads, axis=-1) @ W_o


def test_number_of_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"embed_dim: got 512, wanted a multiple of num_heads"):
        mha.MultiHeadAttention(512, 7)


def test_scores_grow_with_the_square_of_the_length():
    layer = mha.MultiHeadAttention(64, 8, rng=0)
    for length in (4, 8, 16):
        weights = layer(np.ones((1, length, 64), np.float32), return_weights=True)[1]
        assert weights.size == 8 * length**2


# The table: one head, and eight, of a width of 512.

def test_table_row_1_attention_operations():
    x = np.random.default_rng(1).standard_normal((1, 5, 512), np.float32)
    for num_heads in (1, 8):
        _, weights = mha.MultiHeadAttention(512, num_heads, rng=0)(x, return_weights=True)
        assert weights.shape[1] == num_heads
        different = np.unique(weights[0].round(6), axis=0)
        assert len(different) == num_heads  # each of them looks somewhere else


def test_table_row_2_dimension_of_a_head():
    assert [mha.MultiHeadAttention(512, heads).head_dim for heads in (1, 8)] == [512, 64]


def test_table_row_3_parameters():
    """d_model^2 is one matrix: so many has a single head if its input is query, key and value as it
    is. With the four projections of the layer one head has as many parameters as eight."""
    of_eight = mha.MultiHeadAttention(512, 8, use_bias=False)
    of_one = mha.MultiHeadAttention(512, 1, use_bias=False)
    assert of_one.W_o.size == 512**2 == 262_144
    assert of_eight.num_parameters == of_one.num_parameters == 4 * 512**2


def losses_of_two_wishes(num_heads, seed=0, steps=300, head_dim=None):
    """Adam on a task of two wishes: each place wants four numbers of the place before it and four
    of the place behind. What is left of the target's variance at each step."""
    width, length, batch = 16, 8, 32
    rng = np.random.default_rng(seed)
    layer = mha.MultiHeadAttention(width, num_heads, head_dim=head_dim, use_bias=False, rng=rng)
    mean, square = ({name: np.zeros(parameter.shape)
                     for name, parameter in layer.parameters().items()} for _ in range(2))
    places = np.broadcast_to(4 * np.eye(length, dtype=np.float32), (batch, length, length))
    left = []
    for step in range(1, steps + 1):
        tokens = rng.standard_normal((batch, length, width - length), np.float32)
        target = np.zeros((batch, length, width), np.float32)
        target[..., :4] = np.roll(tokens, 1, axis=1)[..., :4]
        target[..., 4:8] = np.roll(tokens, -1, axis=1)[..., 4:]
        output, pullback = layer.vjp(np.concatenate([tokens, places], axis=-1))
        left.append(((output - target)**2).sum() / (target**2).sum())
        gradients = pullback(2 * (output - target) / target.size)
        for name, parameter in layer.parameters().items():
            gradient = getattr(gradients, name)
            mean[name] += 0.1 * (gradient - mean[name])
            square[name] += 0.01 * (gradient**2 - square[name])
            scale = np.sqrt(square[name] / (1 - 0.99**step)) + 1e-8
            parameter -= (0.01 * mean[name] / (1 - 0.9**step) / scale).astype(np.float32)
    return np.array(left)


@pytest.mark.parametrize("seed", [0, 1])
def test_table_rows_4_and_5_expressiveness_and_training(seed):
    """One softmax has to divide itself between two wishes, whatever its width, and half of the
    variance stays; two heads learn both, from every start."""
    of_one, of_two = (losses_of_two_wishes(num_heads, seed)[-20:].mean() for num_heads in (1, 2))
    assert 0.35 < of_one < 0.6
    assert of_two < 0.01
    if seed == 0:  # and heads of a single feature are too narrow for it: question 4
        assert losses_of_two_wishes(16, seed)[-20:].mean() > 0.2


# The practice questions.

def test_question_1_one_head_with_h_times_the_computation_is_still_one_pattern():
    """Its output mixes all numbers by one row of weights a query, however many features it has."""
    assert 0.35 < losses_of_two_wishes(1, head_dim=128)[-20:].mean() < 0.6
    x = np.random.default_rng(2).standard_normal((1, 6, 16), np.float32)
    layer = mha.MultiHeadAttention(16, 1, head_dim=128, use_bias=False, rng=0)
    output, weights = layer(x, return_weights=True)
    by_one_pattern = weights[:, 0] @ x @ (layer.W_v @ layer.W_o)
    np.testing.assert_allclose(output, by_one_pattern, rtol=0, atol=1e-5)


def test_question_2_heads_that_do_not_divide_the_width():
    test_number_of_heads_must_divide_the_width()
    # Unless the size of a head is given: 7 heads of 73 make 511, projected back to 512.
    layer = mha.MultiHeadAttention(512, 7, head_dim=73, rng=0)
    assert layer.W_q.shape == (512, 511) and layer.W_o.shape == (511, 512)
    assert layer(np.ones((1, 3, 512))).shape == (1, 3, 512)


def test_question_3_heads_are_no_ensemble():
    """An ensemble averages models that know nothing of each other. Heads add up, too, through their
    rows of W_o, but the gradient of each depends on what the others gave."""
    rng = np.random.default_rng(3)
    layer = mha.MultiHeadAttention(24, 4, rng=rng, dtype=np.float64)
    x, target = rng.standard_normal((2, 2, 5, 24))
    alone = sum(layer(x, head_gate=gate) - layer.b_o for gate in np.eye(4))
    np.testing.assert_allclose(layer(x), alone + layer.b_o, atol=1e-12)

    def gradient_of_head_0(gate):
        output, pullback = layer.vjp(x, head_gate=gate)
        return pullback(2 * (output - target)).W_v[:, :6]

    together, by_itself = gradient_of_head_0(np.ones(4)), gradient_of_head_0(np.eye(4)[0])
    assert np.abs(together - by_itself).max() > 0.1 * np.abs(by_itself).max()
    assert layer.num_parameters == mha.MultiHeadAttention(24, 1).num_parameters  # not fourfold


@pytest.mark.parametrize("head_dim", [1, 2, 4, 8, 16])
def test_question_4_the_rank_of_a_heads_scores_is_at_most_its_dimension(head_dim):
    """The scores query key^T of a head are a matrix of at most rank d_k (Bhojanapalli et al. 2020):
    with fewer dimensions than places, not every pattern can be had."""
    rng = np.random.default_rng(4)
    layer = mha.MultiHeadAttention(64, 64 // head_dim, use_bias=False, rng=rng, dtype=np.float64)
    x = rng.standard_normal((1, 12, 64))
    query, key = (mha.split_heads(x @ weight, layer.num_heads) for weight in (layer.W_q, layer.W_k))
    ranks = np.linalg.matrix_rank(query @ key.swapaxes(-1, -2))
    assert (ranks == min(head_dim, 12)).all()
    # The weights show it, too: their logarithms are the scores less one number a row.
    weights = layer(x, return_weights=True)[1]
    assert (np.linalg.matrix_rank(np.log(weights), tol=1e-9) <= min(head_dim + 1, 12)).all()
