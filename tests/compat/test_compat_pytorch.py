"""mha.compat.pytorch without PyTorch: known answers, golden data, option meanings and errors.

`make test-peers` compares it with PyTorch itself.
"""

from pathlib import Path

import numpy as np
import pytest

import mha
from mha import reference
from mha.compat import pytorch as compat

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "notebook.npz")


def assert_close(ours, expected, tolerance=1e-12):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.nanmax(abs(expected)))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def layer_and_input(length=5, batch=2, **options):
    """A float64 layer, batch first unless said otherwise, with biases that are not zero."""
    options = {"batch_first": True, "dtype": np.float64, "rng": 0, **options}
    layer = compat.MultiheadAttention(12, 3, **options)
    for bias in (layer.in_proj_bias, layer.out_proj.bias):
        bias[:] = random(*bias.shape, seed=1)
    return layer, random(batch, length, 12, seed=2)


def figure(layer, query, key, value, **options):
    """The plain reference with the layer's parameters: output and weights per head."""
    W_q, W_k, W_v = (weight.T for weight in np.split(layer.in_proj_weight, 3))
    b_q, b_k, b_v = np.split(layer.in_proj_bias, 3)
    return reference.multi_head_attention(
        query, key, value, W_q, W_k, W_v, layer.out_proj.weight.T, b_q=b_q, b_k=b_k, b_v=b_v,
        b_o=layer.out_proj.bias, num_heads=layer.num_heads, return_weights=True, **options)


# scaled_dot_product_attention


def test_known_answer():
    query, key = np.array([[2.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    value = np.array([[10.0], [20.0]])
    share = 1 / (1 + np.exp(-2 * 0.5))  # scores 2 and 0, scale 0.5
    output = compat.scaled_dot_product_attention(query, key, value, scale=0.5)
    assert_close(output, np.array([[10 * share + 20 * (1 - share)]]))


def test_true_attends_and_causal_is_upper_left():
    query, key, value = np.zeros((2, 4)), random(3, 4), np.array([[1.0], [2.0], [6.0]])
    attend = np.array([[True, True, False], [False, True, True]])
    assert compat.scaled_dot_product_attention(query, key, value, attend).tolist() == [[1.5], [4.0]]
    output = compat.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert output.tolist() == [[1.0], [1.5]]


def test_float_mask_is_added_and_minus_infinity_blocks():
    query, value = np.zeros((1, 4)), np.array([[1.0], [2.0], [6.0]])
    added = np.array([[np.log(3.0), 0.0, -np.inf]])
    assert_close(compat.scaled_dot_product_attention(query, random(3, 4), value, added),
                 np.array([[1.25]]))


@pytest.mark.parametrize("mask", [np.zeros((2, 3), bool), np.full((2, 3), -np.inf)])
def test_empty_rows_are_zeros(mask):
    output = compat.scaled_dot_product_attention(random(2, 4), random(3, 4), random(3, 5), mask)
    assert output.tolist() == np.zeros((2, 5)).tolist()


@pytest.mark.parametrize(("query_leading", "key_leading", "value_leading"), [
    ((2, 3), (2, 3), (2, 3)), ((2, 3), (1, 3), (2, 1)), ((2, 3), (3,), ()), ((3,), (2, 1), (2, 3)),
    ((2, 2, 3), (2, 1, 3), (3,)), ((3,), (1,), ())])
def test_leading_axes_broadcast(query_leading, key_leading, value_leading):
    query, key = random(*query_leading, 4, 8), random(*key_leading, 5, 8, seed=1)
    value = random(*value_leading, 5, 6, seed=2)
    leading = np.broadcast_shapes(query_leading, key_leading, value_leading)
    output = compat.scaled_dot_product_attention(query, key, value)
    assert output.shape == (*leading, 4, 6)
    spread = [np.broadcast_to(array, leading + array.shape[-2:]) for array in (query, key, value)]
    for index in np.ndindex(leading):
        one = reference.scaled_dot_product_attention(*(array[index] for array in spread))
        assert_close(output[index], one)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("value_heads", [1, 2, 4])
def test_grouped_heads_repeat_by_interleaving(batch, value_heads):
    query, key = random(*batch, 4, 5, 8), random(*batch, 2, 6, 8, seed=1)
    value = random(*batch, value_heads, 6, 7, seed=2)
    mask = random(4, 5, 6, seed=3) < 1
    output = compat.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    for head in range(4):
        one = reference.scaled_dot_product_attention(
            query[..., head, :, :], key[..., head // 2, :, :],
            value[..., head * value_heads // 4, :, :], mask=mask[head])
        assert_close(output[..., head, :, :], one)


def test_dropout_acts_and_is_drawn_from_rng():
    query, key, value = random(1, 2, 6, 8), random(1, 2, 9, 8), random(1, 2, 9, 8)
    first, again = (compat.scaled_dot_product_attention(query, key, value, None, 0.5, rng=3)
                    for _ in range(2))
    expected = reference.scaled_dot_product_attention(query, key, value, dropout=0.5, rng=3)
    assert_close(first, expected)
    np.testing.assert_array_equal(first, again)


def test_result_keeps_float32_and_inputs_stay():
    query = random(2, 3, 4).astype(np.float32)
    before = query.copy()
    assert compat.scaled_dot_product_attention(query, query, query).dtype == np.float32
    np.testing.assert_array_equal(query, before)


@pytest.mark.parametrize(("error", "name", "shapes", "options"), [
    (ValueError, "attn_mask.*is_causal", [(3, 4)] * 3,
     {"attn_mask": np.ones((3, 3), bool), "is_causal": True}),
    (TypeError, "attn_mask.*int64", [(3, 4)] * 3, {"attn_mask": np.ones((3, 3), int)}),
    (ValueError, r"attn_mask.*\(2, 3\)", [(3, 4)] * 3, {"attn_mask": np.ones((2, 3), bool)}),
    (ValueError, "attn_mask", [(3, 4)] * 3, {"attn_mask": np.ones((2, 3, 3), bool)}),
    (ValueError, "query, key, value", [(2, 3, 4), (3, 3, 4), (2, 3, 4)], {}),
    (ValueError, "query, key, value", [(4,), (3, 4), (3, 4)], {}),
    (ValueError, "key", [(3, 4), (3, 5), (3, 4)], {}),
    (ValueError, "value", [(3, 4), (3, 4), (2, 4)], {}),
    (ValueError, "enable_gqa", [(3, 4)] * 3, {"enable_gqa": True}),
    (ValueError, "key: got 3 heads", [(4, 3, 4), (3, 3, 4), (3, 3, 4)], {"enable_gqa": True}),
    (ValueError, "dropout", [(3, 4)] * 3, {"dropout_p": 1.5}),
    (ValueError, "scale", [(3, 4)] * 3, {"scale": np.nan})])
def test_functional_errors(error, name, shapes, options):
    with pytest.raises(error, match=name):
        compat.scaled_dot_product_attention(*(random(*shape) for shape in shapes), **options)


# MultiheadAttention: golden data, layouts and options


def golden_layer():
    layer = compat.MultiheadAttention(64, int(GOLDEN["num_heads"]), batch_first=True)
    layer.load_state_dict({
        "in_proj_weight": np.concatenate([GOLDEN[f"W_{name}_weight"] for name in "qkv"]),
        "in_proj_bias": np.concatenate([GOLDEN[f"W_{name}_bias"] for name in "qkv"]),
        "out_proj.weight": GOLDEN["W_o_weight"], "out_proj.bias": GOLDEN["W_o_bias"]})
    return layer.eval()


def test_golden_output_and_weights():
    layer, sentence = golden_layer(), GOLDEN["sentence"]
    output, averaged = layer(sentence, sentence, sentence)
    _, per_head = layer(sentence, sentence, sentence, average_attn_weights=False)
    assert output.dtype == np.float32
    assert_close(output, GOLDEN["torch_output"], 2e-6)
    assert_close(averaged, GOLDEN["torch_weights_averaged"], 2e-6)
    assert_close(per_head, GOLDEN["torch_weights_per_head"], 2e-6)


def test_golden_masked_where_true_blocks():
    layer, sentence = golden_layer(), GOLDEN["sentence"]
    blocked = GOLDEN["attend_mask"][0, 0] == 0
    output, weights = layer(sentence, sentence, sentence, attn_mask=blocked,
                            average_attn_weights=False, is_causal=True)
    assert_close(output, GOLDEN["masked_output"], 2e-6)
    assert_close(weights, GOLDEN["masked_weights"], 2e-6)
    assert (weights[..., blocked] == 0).all()


def test_layouts_agree():
    layer, x = layer_and_input()
    output, weights = layer(x, x, x)
    layer.batch_first = False
    by_length = x.swapaxes(0, 1)
    output_by_length, same_weights = layer(by_length, by_length, by_length)
    assert output_by_length.shape == (5, 2, 12)
    np.testing.assert_array_equal(output_by_length.swapaxes(0, 1), output)
    np.testing.assert_array_equal(same_weights, weights)
    for item in range(2):
        one, one_weights = layer(x[item], x[item], x[item])
        assert_close(one, output[item])
        assert_close(one_weights, weights[item])


def test_call_is_the_figure():
    layer, query = layer_and_input(batch_first=False)
    query, key, value = random(5, 2, 12), random(7, 2, 12, seed=3), random(7, 2, 12, seed=4)
    output, weights = layer(query, key, value, average_attn_weights=False)
    expected, expected_weights = figure(layer, *(x.swapaxes(0, 1) for x in (query, key, value)))
    assert_close(output.swapaxes(0, 1), expected)
    assert_close(weights, expected_weights)
    assert layer(query, key, value, need_weights=False)[1] is None
    assert_close(layer(query, key, value, need_weights=False)[0], output)
    assert_close(layer(query, key, value)[1], expected_weights.mean(axis=1))


@pytest.mark.parametrize("attn_kind", [None, "bool", "float", "per head"])
@pytest.mark.parametrize("padding_kind", [None, "bool", "float"])
def test_masks_block_or_add(attn_kind, padding_kind):
    layer, x = layer_and_input()
    rng = np.random.default_rng(5)
    attn = rng.random((2 * 3, 5, 5) if attn_kind == "per head" else (5, 5)) < 0.4
    attn[..., 0] = False
    padding = np.array([[False] * 5, [False, False, False, True, True]])
    added = rng.normal(size=padding.shape)
    options, visible, bias = {}, np.ones((2, 3, 5, 5), bool), np.zeros((2, 3, 5, 5))
    if attn_kind == "float":
        options["attn_mask"] = np.where(attn, -np.inf, 0.5 * attn.cumsum(axis=1))
        bias = bias + options["attn_mask"]
    elif attn_kind:
        options["attn_mask"] = attn
        visible &= ~(attn.reshape(2, 3, 5, 5) if attn_kind == "per head" else attn)
    if padding_kind == "bool":
        options["key_padding_mask"] = padding
        visible &= ~padding[:, None, None]
    elif padding_kind == "float":
        options["key_padding_mask"] = added
        bias = bias + added[:, None, None]
    output, weights = layer(x, x, x, average_attn_weights=False, **options)
    expected, expected_weights = figure(layer, x, x, x, mask=visible, bias=bias)
    assert_close(output, expected)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize(("bias_kv", "zero"), [(True, False), (False, True), (True, True)])
def test_appended_keys_stay_visible_and_add_columns(bias_kv, zero):
    layer, x = layer_and_input(add_bias_kv=bias_kv, add_zero_attn=zero)
    blocked = np.triu(np.ones((5, 5), bool), 1)
    output, weights = layer(x, x, x, attn_mask=blocked, average_attn_weights=False,
                            key_padding_mask=np.array([[False] * 5, [True] * 5]))
    assert weights.shape == (2, 3, 5, 5 + bias_kv + zero)
    assert (weights[0, :, :, :5][:, blocked] == 0).all()
    assert (weights[..., 5:] > 0).all()
    assert (weights[1, ..., :5] == 0).all()  # padding alone: only the appended keys are left
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-12)
    if not zero:  # one visible key has all the weight, whatever its score
        b_o, W_o = layer.out_proj.bias, layer.out_proj.weight.T
        assert_close(output[1], np.broadcast_to(layer.bias_v[0] @ W_o + b_o, (5, 12)))


def test_zero_key_scores_zero_and_adds_nothing():
    layer, x = layer_and_input(add_zero_attn=True, add_bias_kv=True)
    _, weights = layer(x, x, x, attn_mask=np.zeros((5, 5)), average_attn_weights=False)
    lse = figure(layer, x, x, x, return_lse=True)[2]
    # The zero key comes last; exp(lse) is the sum of the five keys' exponentials.
    assert_close(weights[..., 6] / weights[..., :5].sum(axis=-1), 1 / np.exp(lse))


def test_causal_hint_replaces_the_mask_only_without_weights():
    layer, x = layer_and_input()
    nothing_blocked = np.zeros((5, 5), bool)
    hinted, _ = layer(x, x, x, attn_mask=nothing_blocked, is_causal=True, need_weights=False)
    assert_close(hinted, figure(layer, x, x, x, causal=True, query_offset=0)[0])
    unmasked, _ = figure(layer, x, x, x)
    for others in ({}, {"need_weights": False, "key_padding_mask": np.zeros((2, 5), bool)}):
        masked, _ = layer(x, x, x, attn_mask=nothing_blocked, is_causal=True, **others)
        assert_close(masked, unmasked)


def test_kdim_and_vdim_have_weights_of_their_own():
    layer = compat.MultiheadAttention(12, 3, kdim=5, vdim=7, dtype=np.float64, rng=0)
    assert layer.in_proj_weight is None
    assert layer.q_proj_weight.shape == (12, 12)
    assert layer.k_proj_weight.shape == (12, 5)
    assert layer.v_proj_weight.shape == (12, 7)
    query, key, value = random(4, 12), random(6, 5), random(6, 7)
    output, weights = layer(query, key, value, average_attn_weights=False)
    expected, expected_weights = reference.multi_head_attention(
        query, key, value, layer.q_proj_weight.T, layer.k_proj_weight.T, layer.v_proj_weight.T,
        layer.out_proj.weight.T, num_heads=3, return_weights=True)
    assert_close(output, expected)
    assert_close(weights, expected_weights)


# NaN rows, dropout


@pytest.mark.parametrize("training", [True, False])
def test_empty_rows_are_nan_with_weights(training):
    layer, x = layer_and_input()
    blocked = np.zeros((6, 5, 5), bool)
    blocked[4, 2] = True  # batch item 1, head 1, query 2
    output, weights = layer.train(training)(x, x.copy(), x.copy(), attn_mask=blocked,
                                            average_attn_weights=False)
    assert np.argwhere(np.isnan(weights).all(axis=-1)).tolist() == [[1, 1, 2]]
    assert np.isnan(weights).sum() == 5
    assert np.argwhere(np.isnan(output).all(axis=-1)).tolist() == [[1, 2]]
    assert np.isnan(output).sum() == 12
    _, averaged = layer(x, x.copy(), x.copy(), attn_mask=blocked)
    assert np.argwhere(np.isnan(averaged).all(axis=-1)).tolist() == [[1, 2]]


def test_empty_rows_without_weights_attend_to_nothing():
    layer, x = layer_and_input()
    blocked = np.zeros((5, 5), bool)
    blocked[2] = True
    output, _ = layer(x, x, x, attn_mask=blocked, need_weights=False)
    np.testing.assert_array_equal(output[:, 2], np.broadcast_to(layer.out_proj.bias, (2, 12)))


@pytest.mark.parametrize("leaves_it", [None, "training", "copied key", "odd heads", "no bias",
                                       "batch second", "float mask", "appended"])
def test_empty_rows_without_weights_are_nan_on_the_fast_path_alone(leaves_it):
    layer = compat.MultiheadAttention(
        12, 3 if leaves_it == "odd heads" else 2, bias=leaves_it != "no bias",
        batch_first=leaves_it != "batch second", add_zero_attn=leaves_it == "appended")
    layer.train(leaves_it == "training")
    x = random(5, 5, 12)
    blocked = np.zeros((5, 5), bool)
    blocked[2] = True
    if leaves_it == "float mask":
        blocked = np.where(blocked, -np.inf, 0)
    key = x.copy() if leaves_it == "copied key" else x
    output, _ = layer(x, key, x, attn_mask=blocked, need_weights=False)
    assert np.isnan(output).any() == (leaves_it is None)
    assert np.isnan(output[:, 2]).all() == (leaves_it is None)


def test_no_keys_at_all_is_no_nan():
    layer, x = layer_and_input()
    output, weights = layer(x, x[:, :0], x[:, :0])
    assert weights.shape == (2, 5, 0)
    np.testing.assert_array_equal(output, np.broadcast_to(layer.out_proj.bias, output.shape))


def test_nan_behind_a_mask_does_not_leak():
    layer, x = layer_and_input()
    padding = np.array([[False] * 5, [False] * 4 + [True]])
    expected, _ = layer(x, x, x, key_padding_mask=padding)
    spoilt = x.copy()
    spoilt[1, 4] = np.nan
    output, _ = layer(x, spoilt, spoilt, key_padding_mask=padding)
    assert_close(output, expected)


@pytest.mark.parametrize("appended", [False, True])
def test_returned_weights_are_those_after_dropout(appended):
    """The output is what the returned weights give, in training; eval() drops nothing."""
    layer, x = layer_and_input(length=40, dropout=0.3, add_zero_attn=appended)
    _, weights = layer(x, x, x, average_attn_weights=False)
    output, _ = layer(x, x, x, average_attn_weights=False)
    assert (output != layer(x, x, x)[0]).any()  # every call draws anew
    _, before = layer.eval()(x, x, x, average_attn_weights=False)
    kept_fraction = 1 - round(65536 * 0.3) / 65536
    assert (weights == 0).mean() == pytest.approx(0.3, abs=0.02)
    assert_close(weights[weights != 0], before[weights != 0] / kept_fraction)
    twin, _ = layer_and_input(length=40, dropout=0.3, add_zero_attn=appended)
    first_output, first_weights = twin(x, x, x, average_attn_weights=False)
    np.testing.assert_array_equal(first_weights, weights)  # the same rng, the same draws
    W_v, b_v = np.split(twin.in_proj_weight, 3)[2].T, np.split(twin.in_proj_bias, 3)[2]
    values = mha.split_heads(x @ W_v + b_v, 3)
    merged = mha.merge_heads(weights[..., :40] @ values)
    assert_close(first_output, merged @ twin.out_proj.weight.T + twin.out_proj.bias)


# Parameters


def test_state_dict_names_and_layouts():
    plain = compat.MultiheadAttention(12, 3).state_dict()
    assert {name: array.shape for name, array in plain.items()} == {
        "in_proj_weight": (36, 12), "in_proj_bias": (36,), "out_proj.weight": (12, 12),
        "out_proj.bias": (12,)}
    assert all(array.flags.c_contiguous and array.dtype == np.float32 for array in plain.values())
    rest = compat.MultiheadAttention(12, 3, kdim=5, bias=False, add_bias_kv=True).state_dict()
    assert {name: array.shape for name, array in rest.items()} == {
        "q_proj_weight": (12, 12), "k_proj_weight": (12, 5), "v_proj_weight": (12, 12),
        "bias_k": (1, 1, 12), "bias_v": (1, 1, 12), "out_proj.weight": (12, 12)}


def test_load_state_dict_round_trip_copies():
    source, x = layer_and_input(add_bias_kv=True)
    target = compat.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True, dtype=np.float64)
    saved = source.state_dict()
    assert target.load_state_dict(saved) == compat.IncompatibleKeys([], [])
    expected = source(x, x, x)[0]
    saved["in_proj_weight"][:] = 0
    np.testing.assert_array_equal(target(x, x, x)[0], expected)
    target.in_proj_weight[:] = 0
    assert (target(x, x, x)[0] != expected).any()  # a changed parameter is seen


def test_load_state_dict_not_strict():
    layer, _ = layer_and_input()
    kept = layer.in_proj_weight.copy()
    found = layer.load_state_dict({"in_proj_bias": np.ones(36), "extra": 1}, strict=False)
    assert found.missing_keys == ["in_proj_weight", "out_proj.weight", "out_proj.bias"]
    assert found.unexpected_keys == ["extra"]
    assert (layer.in_proj_bias == 1).all()
    np.testing.assert_array_equal(layer.in_proj_weight, kept)


@pytest.mark.parametrize(("error", "name", "change"), [
    (ValueError, r"missing keys \['in_proj_bias'\]", {"in_proj_bias": None}),
    (ValueError, r"unexpected keys \['extra'\]", {"extra": np.ones(3)}),
    (ValueError, r"in_proj_bias: got shape \(3,\), wanted \(36,\)", {"in_proj_bias": np.ones(3)}),
    (TypeError, "out_proj.bias: got an array of <U1", {"out_proj.bias": np.array(["a"] * 12)})])
def test_load_state_dict_errors_change_nothing(error, name, change):
    layer, _ = layer_and_input()
    before = layer.state_dict()
    given = {key: array for key, array in {**layer.state_dict(), **change}.items()
             if array is not None}
    given["in_proj_weight"] = np.zeros((36, 12))
    with pytest.raises(error, match=name):
        layer.load_state_dict(given)
    for key, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, before[key])


def test_start_has_torchs_distributions():
    packed = compat.MultiheadAttention(128, 4, add_bias_kv=True, rng=0)
    separate = compat.MultiheadAttention(128, 4, kdim=64, rng=0)
    for weight, bound in ((packed.in_proj_weight, (6 / (4 * 128)) ** 0.5),
                          (packed.out_proj.weight, 128 ** -0.5),
                          (separate.q_proj_weight, (6 / 256) ** 0.5),
                          (separate.k_proj_weight, (6 / (128 + 64)) ** 0.5)):
        assert weight.dtype == np.float32
        assert 0.99 * bound < abs(weight).max() <= bound * (1 + 1e-6)
        assert weight.std() == pytest.approx(bound / 3 ** 0.5, rel=0.02)
    assert not packed.in_proj_bias.any()
    assert not packed.out_proj.bias.any()
    assert packed.bias_k.std() == pytest.approx(128 ** -0.5, rel=0.3)
    assert (packed.bias_k != packed.bias_v).all()
    again = compat.MultiheadAttention(128, 4, add_bias_kv=True, rng=0)
    np.testing.assert_array_equal(again.in_proj_weight, packed.in_proj_weight)


def test_starts_in_training_mode_and_switches():
    layer = compat.MultiheadAttention(4, 2)
    assert layer.training
    assert not layer.eval().training
    assert layer.train().training
    assert not layer.train(False).training


def test_input_is_cast_to_the_layers_type():
    layer = compat.MultiheadAttention(4, 2, device="cpu", dtype="float32")
    assert layer(*[np.ones((3, 1, 4))] * 3)[0].dtype == np.float32
    assert layer(*[np.ones((3, 1, 4), int)] * 3)[0].dtype == np.float32


@pytest.mark.parametrize(("error", "name", "arguments"), [
    (ValueError, "embed_dim.*10.*num_heads.*3", {"embed_dim": 10, "num_heads": 3}),
    (ValueError, "num_heads.*0", {"embed_dim": 8, "num_heads": 0}),
    (ValueError, "embed_dim.*-8", {"embed_dim": -8, "num_heads": 2}),
    (TypeError, "embed_dim", {"embed_dim": 8.0, "num_heads": 2}),
    (ValueError, "kdim.*0", {"embed_dim": 8, "num_heads": 2, "kdim": 0}),
    (ValueError, "dropout.*1.5", {"embed_dim": 8, "num_heads": 2, "dropout": 1.5}),
    (TypeError, "num_heads: got ndarray", {"embed_dim": 8, "num_heads": np.array([2.0])}),
    (TypeError, "dtype: got 'flaot32'", {"embed_dim": 8, "num_heads": 2, "dtype": "flaot32"}),
    (TypeError, "dtype.*int32", {"embed_dim": 8, "num_heads": 2, "dtype": np.int32})])
def test_constructor_errors(error, name, arguments):
    with pytest.raises(error, match=name):
        compat.MultiheadAttention(**arguments)


def test_no_dropout_may_be_false():
    assert compat.MultiheadAttention(8, 2, dropout=False).dropout == 0.0


@pytest.mark.parametrize(("error", "name", "change"), [
    (ValueError, "query.*1", {"query": random(12)}),
    (ValueError, "query.*12", {"query": random(2, 5, 11)}),
    (ValueError, "key.*2 dimensions|key.*3 dimensions", {"key": random(5, 12)}),
    (ValueError, "key.*batch", {"key": random(1, 5, 12)}),
    (ValueError, "value.*key", {"value": random(2, 4, 12)}),
    (TypeError, "value.*complex", {"value": random(2, 5, 12) * 1j}),
    (ValueError, r"attn_mask.*\(1, 5, 5\).*\(5, 5\) or \(6, 5, 5\)",
     {"attn_mask": np.zeros((1, 5, 5), bool)}),
    (TypeError, "attn_mask.*uint8", {"attn_mask": np.zeros((5, 5), np.uint8)}),
    (ValueError, r"key_padding_mask.*\(5, 2\).*\(2, 5\)",
     {"key_padding_mask": np.zeros((5, 2), bool)}),
    (TypeError, "key_padding_mask.*int64", {"key_padding_mask": np.zeros((2, 5), int)}),
    (ValueError, "attn_mask.*is_causal", {"is_causal": True})])
def test_call_errors(error, name, change):
    layer, x = layer_and_input()
    with pytest.raises(error, match=name):
        layer(**{"query": x, "key": x, "value": x, **change})
