"""Head importance: known answers, the definitions written out, real pruning against gates."""

import copy
import itertools
from fractions import Fraction

import numpy as np
import pytest

import mha
from mha import importance


def random_weights(rng, batch=3, heads=4, query_len=6, key_len=6, lengths=None):
    scores = 3 * rng.standard_normal((batch, heads, query_len, key_len))
    if lengths is not None:
        blocked = np.arange(key_len) >= np.array(lengths)[:, None, None, None]
        scores = np.where(blocked, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_the_two_extremes():
    even, sharp = np.full((1, 5, 8), 1 / 8), np.zeros((1, 5, 8))
    sharp[..., 3] = 1
    both = np.concatenate([even, sharp])
    np.testing.assert_allclose(importance.confidence(both), [1 / 8, 1])
    np.testing.assert_allclose(importance.entropy(both), [np.log(8), 0], atol=1e-15)
    np.testing.assert_allclose(importance.variance(both), [0, 7 / 64], atol=1e-15)


def test_a_pruned_layer_has_arrays_of_its_own():
    layer = mha.MultiHeadAttention(12, 3)
    before = layer.parameters()
    layer.prune_heads([0])
    assert not any(np.shares_memory(before[name], array)
                   for name, array in layer.parameters().items())


@pytest.mark.parametrize(("function", "of_row"), [
    (importance.variance, lambda row: ((row - row.mean())**2).mean()),
    (importance.confidence, max),
    (importance.entropy, lambda row: -sum(w * np.log(w) for w in row if w > 0))])
def test_scores_of_weights_row_by_row(function, of_row):
    lengths = [6, 2, 4]
    weights = random_weights(np.random.default_rng(0), lengths=lengths)
    expected = []
    for head in range(4):
        rows = [of_row(weights[item, head, query, :length])
                for item, length in enumerate(lengths) for query in range(length)]
        expected.append(np.mean(rows))
    np.testing.assert_allclose(function(weights, lengths=lengths), expected, rtol=1e-12)
    np.testing.assert_allclose(function(weights[0]), function(weights[:1]))
    assert function(weights.astype(np.float32)).dtype == np.float64


def small_model(rng, layers=2, heads=3, width=12, length=5):
    """loss(x, gates (layers, heads)) and its pullback to the gates."""
    attentions = [mha.MultiHeadAttention(width, heads, dtype=np.float64, rng=i)
                  for i in range(layers)]
    target = rng.standard_normal((length, width))

    def loss_vjp(x, gates):
        pullbacks = []
        for attention, gate in zip(attentions, gates, strict=True):
            attended, pullback = attention.vjp(x, head_gate=gate)
            x = x + attended
            pullbacks.append(pullback)

        def pullback():
            grad, of_gates = x - target, []
            for pull in reversed(pullbacks):
                gradients = pull(grad)
                of_gates.append(gradients.head_gate)
                grad = grad + gradients.query
            return np.array(of_gates[::-1])

        return 0.5 * ((x - target)**2).sum(), pullback

    return loss_vjp


def test_ablation_is_the_loss_without_the_head():
    rng = np.random.default_rng(1)
    loss_vjp, x = small_model(rng), rng.standard_normal((5, 12))
    calls = []

    def loss(gates):
        calls.append(gates.copy())
        return loss_vjp(x, gates)[0]

    scores = importance.ablation(loss, (2, 3))
    assert len(calls) == 7
    np.testing.assert_array_equal(importance.ablation(loss, [2, 3]), scores)
    for layer, head in np.ndindex(2, 3):
        gates = np.ones((2, 3))
        gates[layer, head] = 0
        assert scores[layer, head] == loss_vjp(x, gates)[0] - loss_vjp(x, np.ones((2, 3)))[0]


def test_gradient_score_is_the_mean_of_the_sizes():
    """Against central differences of the loss in each gate."""
    rng = np.random.default_rng(2)
    loss_vjp, examples = small_model(rng), rng.standard_normal((4, 5, 12))
    ones, step = np.ones((2, 3)), 1e-5
    by_differences = np.zeros((2, 3))
    for x, gate in itertools.product(examples, np.ndindex(2, 3)):
        change = np.zeros((2, 3))
        change[gate] = step
        rise = loss_vjp(x, ones + change)[0] - loss_vjp(x, ones - change)[0]
        by_differences[gate] += abs(rise / (2 * step)) / 4
    gradients = [loss_vjp(x, ones)[1]() for x in examples]
    plain = importance.gradient(iter(gradients), normalise=False)
    np.testing.assert_allclose(plain, by_differences, rtol=1e-6)
    normalised = importance.gradient(gradients)
    np.testing.assert_allclose((normalised**2).sum(axis=1), 1)
    np.testing.assert_allclose(normalised[1] / plain[1], 1 / np.linalg.norm(plain[1]))
    assert importance.gradient([np.zeros(3)]).tolist() == [0, 0, 0]
    for tiny_or_huge in (1e-200, 1e200):
        assert np.allclose(importance.gradient([np.array([3, 4]) * tiny_or_huge]), [0.6, 0.8])


def test_rollout():
    rng = np.random.default_rng(3)
    weights = [random_weights(rng) for _ in range(3)]
    expected = np.eye(6)
    for layer in weights:
        expected = (0.5 * layer.mean(axis=1) + 0.5 * np.eye(6)) @ expected
    rolled = importance.rollout(weights)
    np.testing.assert_allclose(rolled, expected)
    np.testing.assert_allclose(rolled.sum(axis=-1), 1)
    np.testing.assert_allclose(importance.rollout([w[1] for w in weights]), expected[1])
    np.testing.assert_allclose(importance.rollout(weights, residual=1.0)[0], np.eye(6))
    np.testing.assert_allclose(importance.rollout(weights[:1], residual=0.0),
                               weights[0].mean(axis=1))


def leaves_equal_groups(heads, kv_heads):
    left = [len(set(range(first, first + 6 // kv_heads)) - set(heads))
            for first in range(0, 6, 6 // kv_heads)]
    return len({count for count in left if count}) == 1


@pytest.mark.parametrize(("kv_heads", "sizes"), [
    (6, {}), (6, {"head_dim": 5, "value_head_dim": 3, "output_dim": 7}), (3, {}), (2, {}),
    (1, {"use_bias": False})])
def test_a_pruned_layer_gives_what_the_gated_one_gave(kv_heads, sizes):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 9, 24))
    for count in range(6):
        for heads in itertools.combinations(range(6), count):
            layer = mha.MultiHeadAttention(24, 6, num_kv_heads=kv_heads, dtype=np.float64, rng=0,
                                           **sizes)
            for name, array in layer.parameters().items():
                if name[0] == "b":
                    array[...] = rng.standard_normal(array.shape)
            gate = np.ones(6)
            gate[list(heads)] = 0
            gated, parameters = layer(x, causal=True, head_gate=gate), layer.num_parameters
            if not leaves_equal_groups(heads, kv_heads):
                with pytest.raises(ValueError, match=r"heads: got .* to the key heads"):
                    layer.prune_heads(heads)
                assert np.array_equal(layer(x, causal=True, head_gate=gate), gated)
                continue
            assert layer.prune_heads(heads) is layer
            np.testing.assert_allclose(layer(x, causal=True), gated, atol=1e-13)
            np.testing.assert_array_equal(layer.freeze()(x, causal=True),
                                          layer.unfreeze()(x, causal=True))
            assert layer.num_heads == 6 - count
            assert (layer.num_parameters < parameters) == (count > 0)
            output, pullback = layer.vjp(x)
            for name, gradient in pullback(output)._asdict().items():
                assert gradient is None or name in ("query", "head_gate") or (
                    gradient.shape == getattr(layer, name).shape)


def test_pruning_key_heads_that_are_shared():
    layer = mha.MultiHeadAttention(48, 12, num_kv_heads=3)
    layer.prune_heads([4, 5, 6, 7])  # a whole group
    assert (layer.num_heads, layer.num_kv_heads) == (8, 2)
    layer.prune_heads([0, 5])  # one of each group
    assert (layer.num_heads, layer.num_kv_heads) == (6, 2)
    with pytest.raises(ValueError, match=r"leaves \[2, 3\] heads to the key heads"):
        layer.prune_heads({0})


def test_a_pruned_layer_is_a_layer_like_any_other():
    layer = mha.MultiHeadAttention(32, 4, rng=0)
    original = copy.copy(layer)
    layer.prune_heads([-1, 1, 1])
    assert original.num_heads == 4
    assert original.W_q.shape == (32, 32)
    assert layer.num_heads == 2
    assert "head_dim=8" in repr(layer)
    assert "head_dim=1" in repr(mha.MultiHeadAttention(4, 4).prune_heads([0]))
    x = np.ones((1, 3, 32), np.float32)
    assert copy.deepcopy(layer).astype(np.float64)(x).shape == (1, 3, 32)
    output, pullback = layer.vjp(x)
    assert pullback(output).W_q.shape == (32, 16)
    again = mha.MultiHeadAttention(32, 2, head_dim=8)
    again.load_parameters(layer.parameters())
    assert np.array_equal(again(x), layer(x))


@pytest.mark.parametrize(("heads", "error", "message"), [
    ([4], ValueError, "heads: got 4"), ([-5], ValueError, "heads: got -5"),
    (range(4), ValueError, "heads: got all 4"), (1, TypeError, "heads: got int"),
    ("1", TypeError, "heads: got str"),
    (np.array(1), TypeError, "heads: got ndarray"), ([0.5], TypeError, "heads: got float"),
    ([True], TypeError, "heads: got bool")])
def test_errors_of_pruning(heads, error, message):
    layer = mha.MultiHeadAttention(32, 4)
    before = layer.parameters()
    with pytest.raises(error, match=message):
        layer.prune_heads(heads)
    assert layer.num_heads == 4
    assert all(array is before[name] for name, array in layer.parameters().items())
    with pytest.raises(ValueError, match=r"heads: .*frozen"):
        layer.freeze().prune_heads([0])


W = np.full((1, 2, 3, 3), 1 / 3)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: importance.variance(np.ones(3)), ValueError, r"weights: got shape \(3,\)"),
    (lambda: importance.entropy(np.ones((0, 2, 3, 3))), ValueError, "weights: got shape"),
    (lambda: importance.entropy(W.astype(complex)), TypeError, "weights: got an array of complex"),
    (lambda: importance.confidence(W, lengths=[4]), ValueError, "lengths: got 4"),
    (lambda: importance.confidence(W, lengths=[0]), ValueError, "lengths: got 0"),
    (lambda: importance.confidence(W, lengths=[1, 2]), ValueError, "lengths: got shape"),
    (lambda: importance.confidence(W, lengths=[1.0]), TypeError, "lengths: got an array of float"),
    (lambda: importance.ablation(lambda gates: gates, 3), ValueError, "loss: got"),
    (lambda: importance.ablation(lambda gates: np.nan, 3), ValueError, "loss: got array.nan"),
    (lambda: importance.ablation(lambda gates: "1", 3), TypeError, "loss: got array..1"),
    (lambda: importance.ablation(lambda gates: gates @ [1], 3), ValueError, "matmul"),
    (lambda: importance.ablation(lambda gates: 1.0, 0), ValueError, "shape: got 0"),
    (lambda: importance.ablation(lambda gates: 1.0, (2, "a")), TypeError, "shape: got str"),
    (lambda: importance.ablation(lambda gates: 1.0, 2**62), MemoryError, f"shape.*{2**62}"),
    (lambda: importance.gradient([]), ValueError, "gate_gradients: got none"),
    (lambda: importance.gradient([[1.0], [1.0, 2.0]]), ValueError, "gate_gradients: got shape"),
    (lambda: importance.gradient([1.0]), ValueError, "gate_gradients: got shape"),
    (lambda: importance.gradient([[]]), ValueError, "gate_gradients: got shape"),
    (lambda: importance.gradient([[1.0], [np.nan]]), ValueError,
     "gate_gradients: got NaN or infinity in example 1"),
    (lambda: importance.gradient([[1.0]], normalise=3), TypeError, "normalise: got int"),
    (lambda: importance.rollout([]), ValueError, "weights: got none"),
    (lambda: importance.rollout([W, W[0]]), ValueError, "weights: got shape"),
    (lambda: importance.rollout([W[..., :2]]), ValueError, "weights: got shape"),
    (lambda: importance.rollout([W], residual=2), ValueError, "residual: got 2"),
    (lambda: importance.rollout([W], residual="a"), TypeError, "residual: got str"),
    (lambda: importance.rollout(3), TypeError, "weights: got int, wanted a sequence"),
    (lambda: importance.gradient(3), TypeError, "gate_gradients: got int, wanted a sequence"),
    (lambda: importance.ablation(3, 2), TypeError, "loss: got int, wanted a function")])
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_fractions_and_bfloat16_are_numbers():
    weights = np.full((2, 3, 3), 1 / 4, np.float32)
    halves = (weights.view(np.uint32) >> 16).astype(np.uint16).view([("mha_bfloat16", np.uint16)])
    rolled = mha.importance.rollout([halves], residual=Fraction(1, 2))
    assert rolled.dtype == np.float64
    np.testing.assert_array_equal(rolled, mha.importance.rollout([weights], residual=0.5))
    with pytest.raises(TypeError, match="gate_gradients: got ndarray, wanted a sequence"):
        mha.importance.gradient(np.array(1.0))
