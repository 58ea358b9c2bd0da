"""What textbooks say of multi-head attention, as identities that the layer must keep."""

import numpy as np
import pytest

import mha

BATCH, QUERY_LEN, KEY_LEN, WIDTH, HEADS = 2, 7, 9, 24, 4
HEAD_DIM = WIDTH // HEADS
BOUND = {np.float32: 2e-6, np.float64: 1e-14}

both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def make(dtype, use_bias=False):
    """A layer with query (2, 7, 24) and key, value (2, 9, 24)."""
    generator = np.random.default_rng(5)
    layer = mha.MultiHeadAttention(WIDTH, HEADS, use_bias=use_bias, dtype=dtype, rng=generator)
    for name, parameter in layer.parameters().items():
        if name.startswith("b_"):
            parameter[...] = generator.standard_normal(parameter.shape)
    query, key, value = (generator.standard_normal((BATCH, length, WIDTH)).astype(dtype)
                         for length in (QUERY_LEN, KEY_LEN, KEY_LEN))
    return layer, query, key, value


def assert_close(got, wanted):
    """Equal up to a few roundings, relative to the largest entry."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= BOUND[got.dtype.type] * np.abs(wanted).max()


def single_heads(layer, query, key, value, **options):
    """Every head on its own, by its own columns of the weights: (batch, query_len, head_dim)."""
    for head in range(HEADS):
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        yield mha.scaled_dot_product_attention(
            query @ layer.W_q[:, columns], key @ layer.W_k[:, columns],
            value @ layer.W_v[:, columns], **options)


@both_types
@pytest.mark.parametrize("causal", [False, True])
def test_heads_one_by_one_equal_all_at_once(dtype, causal):
    layer, query, key, value = make(dtype)
    options = {"causal": causal, "query_offset": 2} if causal else {}
    concatenated = np.concatenate(list(single_heads(layer, query, key, value, **options)), axis=-1)
    assert_close(layer(query, key, value, **options), concatenated @ layer.W_o)


@both_types
def test_concatenation_times_output_weight_is_the_sum_over_heads(dtype):
    layer, query, key, value = make(dtype)
    total = np.zeros((BATCH, QUERY_LEN, WIDTH), dtype)
    for head, output in enumerate(single_heads(layer, query, key, value)):
        total += output @ layer.W_o[head * HEAD_DIM:(head + 1) * HEAD_DIM]
    assert_close(layer(query, key, value), total)


@both_types
def test_the_layer_is_the_sum_of_its_heads_gated_one_at_a_time(dtype):
    layer, query, key, value = make(dtype)
    gated = sum(layer(query, key, value, head_gate=gate) for gate in np.eye(HEADS))
    assert_close(gated, layer(query, key, value))


@both_types
def test_permuting_keys_with_values_changes_nothing(dtype):
    layer, query, key, value = make(dtype, use_bias=True)
    order = np.random.default_rng(6).permutation(KEY_LEN)
    output, weights = layer(query, key, value, return_weights=True)
    permuted_output, permuted_weights = layer(query, key[:, order], value[:, order],
                                              return_weights=True)
    assert_close(permuted_output, output)
    assert_close(permuted_weights, weights[..., order])
    assert np.abs(layer(query, key[:, order], value) - output).max() > 0.01  # not keys alone


@both_types
def test_permuting_queries_permutes_the_output(dtype):
    layer, query, key, value = make(dtype, use_bias=True)
    order = np.random.default_rng(6).permutation(QUERY_LEN)
    assert_close(layer(query[:, order], key, value), layer(query, key, value)[:, order])


@both_types
def test_self_attention_is_permutation_equivariant(dtype):
    layer, _, x, _ = make(dtype, use_bias=True)
    order = np.random.default_rng(6).permutation(KEY_LEN)
    assert_close(layer(x[:, order]), layer(x)[:, order])


@both_types
@pytest.mark.parametrize("now", range(KEY_LEN - 1))
def test_causal_outputs_do_not_see_the_future(dtype, now):
    layer, _, x, _ = make(dtype, use_bias=True)
    output = layer(x, causal=True)
    changed = x.copy()
    changed[:, now + 1:] = np.random.default_rng(7).standard_normal(changed[:, now + 1:].shape)
    changed_output = layer(changed, causal=True)
    assert np.array_equal(changed_output[:, :now + 1], output[:, :now + 1])
    assert (np.abs(changed_output[:, now + 1:] - output[:, now + 1:]).max(axis=-1) > 1e-3).all()


@both_types
def test_first_causal_output_is_the_first_value(dtype):
    layer, _, x, _ = make(dtype, use_bias=True)
    first = (x[:, :1] @ layer.W_v + layer.b_v) @ layer.W_o + layer.b_o
    assert_close(layer(x, causal=True)[:, :1], first)


@both_types
def test_rows_of_weights_sum_to_one(dtype):
    layer, query, key, value = make(dtype, use_bias=True)
    weights = layer(query, key, value, return_weights=True)[1]
    assert weights.shape == (BATCH, HEADS, QUERY_LEN, KEY_LEN) and (weights > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=BOUND[dtype])


@both_types
def test_adding_one_number_to_all_scores_of_a_query_changes_nothing(dtype):
    layer, query, key, value = make(dtype, use_bias=True)
    shift = np.arange(QUERY_LEN, dtype=dtype)[:, None] * np.ones((QUERY_LEN, KEY_LEN), dtype)
    assert_close(layer(query, key, value, bias=shift), layer(query, key, value))


@both_types
def test_equal_keys_give_the_mean_of_the_values(dtype):
    layer, query, key, value = make(dtype)
    key = np.broadcast_to(key[:, :1], key.shape)
    mean = np.broadcast_to(value.mean(axis=1, keepdims=True), query.shape)
    assert_close(layer(query, key, value), (mean @ layer.W_v) @ layer.W_o)
