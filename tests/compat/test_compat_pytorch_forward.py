"""mha.compat.pytorch without PyTorch: multi_head_attention_forward, the habits of torch's modules,
and what is imported when. tests/peers compares with PyTorch itself."""

import subprocess
import sys

import numpy as np
import pytest

import mha
from mha.compat import pytorch as compat

RNG = np.random.default_rng(0)
WIDTH, HEADS = 12, 3
PACKED = RNG.standard_normal((3 * WIDTH, WIDTH))
OUT = RNG.standard_normal((WIDTH, WIDTH))
QUERY, KEY = RNG.standard_normal((5, 2, WIDTH)), RNG.standard_normal((7, 2, WIDTH))


def forward(query=QUERY, key=KEY, value=KEY, **options):
    arguments = {"in_proj_weight": PACKED, "in_proj_bias": None, "bias_k": None, "bias_v": None,
                 "add_zero_attn": False, "dropout_p": 0.0, "out_proj_weight": OUT,
                 "out_proj_bias": None, "embed_dim_to_check": WIDTH, "num_heads": HEADS, **options}
    return compat.multi_head_attention_forward(query, key, value, **arguments)


def as_static(array, part):
    """The heads that key (1) or value (2) is projected to, as static_k and static_v have them."""
    projected = mha.split_heads(array.swapaxes(0, 1) @ np.split(PACKED, 3)[part].T, HEADS)
    return projected.reshape(2 * HEADS, len(array), WIDTH // HEADS)


def test_it_is_the_figure():
    W_q, W_k, W_v = (np.ascontiguousarray(part.T) for part in np.split(PACKED, 3))
    wanted = mha.multi_head_attention(QUERY.swapaxes(0, 1), KEY.swapaxes(0, 1),
                                      KEY.swapaxes(0, 1), W_q, W_k, W_v, OUT.T, num_heads=HEADS)
    output, weights = forward()
    np.testing.assert_allclose(output, wanted.swapaxes(0, 1), rtol=1e-12, atol=1e-12)
    assert weights.shape == (2, 5, 7)
    assert forward(need_weights=False)[1] is None
    assert forward(average_attn_weights=False)[1].shape == (2, HEADS, 5, 7)


def test_static_heads_stand_for_projected_ones():
    output, weights = forward()
    for names in (("static_k",), ("static_v",), ("static_k", "static_v")):
        static = {name: as_static(KEY, 1 + (name == "static_v")) for name in names}
        got, got_weights = forward(**static)
        np.testing.assert_allclose(got, output, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(got_weights, weights, rtol=1e-12)
    longer = RNG.standard_normal((2 * HEADS, 9, WIDTH // HEADS))
    assert forward(static_k=longer, static_v=longer,
                   key_padding_mask=np.zeros((2, 9), bool))[1].shape == (2, 5, 9)
    assert forward(static_k=longer, static_v=longer, add_zero_attn=True)[1].shape == (2, 5, 10)
    for given, problem in (({"static_k": longer}, "static_k: got length 9, wanted 7 as value has"),
                           ({"static_v": longer}, "static_v: got length 9, wanted 7 as key has"),
                           ({"static_k": longer, "static_v": longer[:, :8]},
                            "static_v: got length 8, wanted 9 as static_k has")):
        with pytest.raises(ValueError, match=problem):
            forward(**given)


@pytest.mark.parametrize("appended", [{}, {"add_zero_attn": True},
                                      {"bias_k": np.ones((1, 1, WIDTH)),
                                       "bias_v": np.ones((1, 1, WIDTH))}])
def test_padding_of_no_keys(appended):
    none = KEY[:0]
    output, weights = forward(QUERY, none, none, key_padding_mask=np.zeros((2, 0), bool),
                              **appended)
    wanted, wanted_weights = forward(QUERY, none, none, **appended)
    np.testing.assert_array_equal(output, wanted)
    np.testing.assert_array_equal(weights, wanted_weights)


def test_static_heads_of_no_sequences():
    none = np.empty((0, 7, WIDTH // HEADS))
    output, weights = forward(QUERY[:, :0], KEY[:, :0], KEY[:, :0], static_k=none, static_v=none)
    assert output.shape == (5, 0, WIDTH) and weights.shape == (0, 5, 7)


def test_separate_weights_and_one_sequence():
    separate = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), np.split(PACKED, 3),
                        strict=True))
    output, _ = forward(QUERY[:, 0], KEY[:, 0], KEY[:, 0], in_proj_weight=None,
                        use_separate_proj_weight=True, **separate)
    np.testing.assert_allclose(output, forward()[0][:, 0], rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training():
    assert np.array_equal(forward(dropout_p=0.5, training=False)[0], forward()[0])
    first, again, other = (forward(dropout_p=0.5, rng=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_type_is_that_of_the_widest():
    single = [array.astype(np.float32) for array in (QUERY, KEY, KEY)]
    assert forward(*single)[0].dtype == np.float64
    parameters = {"in_proj_weight": PACKED.astype(np.float32),
                  "out_proj_weight": OUT.astype(np.float16)}
    assert forward(*single, **parameters)[0].dtype == np.float32


@pytest.mark.parametrize(("change", "text"), [
    ({"in_proj_weight": None}, "in_proj_weight: got None, wanted an array"),
    ({"use_separate_proj_weight": True}, "q_proj_weight: got None, wanted an array"),
    ({"in_proj_weight": PACKED[1:]}, r"in_proj_weight: got shape \(35, 12\), wanted \(36, 12\)"),
    ({"num_heads": 5}, "embed_dim_to_check: got 12, wanted a multiple of num_heads"),
    ({"embed_dim_to_check": 6}, "in_proj_weight: got shape"),
    ({"bias_k": np.zeros((1, 1, WIDTH))}, "bias_v: got None beside bias_k"),
    ({"bias_k": np.zeros((1, 1, WIDTH)), "bias_v": np.zeros((1, 1, WIDTH)),
      "static_k": np.zeros((6, 7, 4))}, "bias_k: got an array beside static_k"),
    ({"static_k": np.zeros((5, 7, 4))}, r"static_k: got shape \(5, 7, 4\), wanted \(6, \*, 4\)"),
    ({"static_v": np.zeros((6, 3, 4))}, "static_v: got length 3, wanted 7 as key has"),
    ({"is_causal": True}, "attn_mask: got None with is_causal=True"),
    ({"out_proj_bias": np.zeros(3)}, r"out_proj_bias: got shape \(3,\), wanted \(12,\)"),
])
def test_what_does_not_fit_is_an_error(change, text):
    with pytest.raises(ValueError, match=text):
        forward(**change)


def test_strings_are_no_numbers():
    with pytest.raises(TypeError, match="in_proj_bias: got an array of"):
        forward(in_proj_bias=np.array(["a"] * 3 * WIDTH))


def test_habits_of_modules():
    layer = compat.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, rng=0)
    named = dict(layer.named_parameters())
    assert list(named) == ["in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj.weight",
                           "out_proj.bias"]
    assert sum(array.size for array in layer.parameters()) == 4 * WIDTH**2 + 6 * WIDTH
    assert [array is named[name] for name, array in layer.named_parameters()] == [True] * 6
    before, _ = layer(QUERY, KEY, KEY)
    named["out_proj.bias"][:] += 1  # the arrays are the layer's own
    np.testing.assert_allclose(layer(QUERY, KEY, KEY)[0], before + 1, rtol=1e-5, atol=1e-5)
    assert layer.double() is layer
    assert {array.dtype for array in layer.parameters()} == {np.dtype(np.float64)}
    assert layer(QUERY, KEY, KEY)[0].dtype == np.float64
    assert layer.to("cpu").dtype == np.float64
    assert layer.to(np.float32).dtype == layer.out_proj.weight.dtype == np.float32
    assert layer.to("cpu", np.float64).bias_k.dtype == np.float64
    assert layer.eval().training is False
    assert layer.train() is layer
    with pytest.raises(TypeError, match="dtype: got"):
        layer.to(np.int32)


def test_torch_is_imported_by_tensors_alone():
    code = ("import sys, mha.compat.pytorch as compat; compat.functional_attention;"
            " print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_masks_of_ints_are_told_how_to_be_bool():
    """1 is a real token in a tokenizer's mask; True blocks here and attends in the function."""
    ints = np.array([[1, 1, 1, 1, 1, 0, 0]] * 2)
    with pytest.raises(TypeError, match="key_padding_mask == 0 where 1 means attend, key_padding_"):
        forward(key_padding_mask=ints)
    with pytest.raises(TypeError, match="attn_mask != 0 where 1 means attend"):
        mha.compat.pytorch.scaled_dot_product_attention(*[np.ones((1, 7, 4))] * 3,
                                                        attn_mask=ints[:1])
    with pytest.raises(ValueError, match=r"np\.triu\(np\.ones\(\(len, len\), bool\), 1\)"):
        forward(is_causal=True)
