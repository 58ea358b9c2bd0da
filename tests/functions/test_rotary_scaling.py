"""Rotary.from_config against the papers' formulas, written out in NumPy; and what it refuses."""

import decimal
import math

import numpy as np
import pytest

import mha

LLAMA_3 = {"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}}
GPT_OSS = {"rope_theta": 150000, "max_position_embeddings": 131072, "rope_scaling": {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096}}


def plain(dims, base):
    return base ** (-2 * np.arange(dims // 2) / dims)


def close(rotary, frequencies, magnitude=1.0):
    np.testing.assert_allclose(rotary.frequencies, frequencies, rtol=1e-13)
    assert math.isclose(rotary.magnitude, magnitude, rel_tol=1e-14)


def from_config(head_dim=64, length=None, layer_type=None, layout="half", **config):
    return mha.Rotary.from_config(config, head_dim, length=length, layer_type=layer_type,
                                  layout=layout)


def test_default():
    assert from_config() == mha.Rotary(64)
    assert from_config(rope_theta=5e5, layout="interleaved") == mha.Rotary(
        64, base=5e5, layout="interleaved")
    assert from_config(rope_theta=5e5).base == 5e5
    for config in ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}},
                   {"rope_scaling": {"type": None}}, {"rope_scaling": {}}):
        assert from_config(rope_theta=123, **config) == mha.Rotary(64, base=123)
    assert from_config(rotary_emb_base=777, rotary_pct=0.25) == mha.Rotary(16, base=777)
    assert from_config(partial_rotary_factor=0.5) == mha.Rotary(32)
    assert from_config(rotary_dim=40) == mha.Rotary(40)
    assert from_config(rope_parameters={"rope_type": "default", "rope_theta": 9.0,
                                        "partial_rotary_factor": 0.5}) == mha.Rotary(32, base=9)


def test_linear():
    close(from_config(rope_scaling={"type": "linear", "factor": 4.0}), plain(64, 1e4) / 4)


@pytest.mark.parametrize(("length", "counted"), [(None, 2048), (100, 2048), (2049, 2049),
                                                 (10000, 10000)])
def test_dynamic(length, counted):
    """Base * (factor * length / maximum - (factor - 1)) ** (dims / (dims - 2))."""
    base = 1e4 * (3.0 * counted / 2048 - 2.0) ** (64 / 62)
    close(from_config(length=length, max_position_embeddings=2048,
                      rope_scaling={"rope_type": "dynamic", "factor": 3.0}), plain(64, base))


@pytest.mark.parametrize("truncate", [None, True, False])
@pytest.mark.parametrize(("fast", "slow"), [(None, None), (32, 1), (16.0, 2.0), (64, 0.5)])
def test_yarn(truncate, fast, slow):
    """By turns within the original length (Peng et al. 2023, equations 17 to 19 and 21)."""
    dims, base, original, factor = 128, 1e6, 4096, 16.0
    scaling = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow,
               "truncate": truncate, "original_max_position_embeddings": original}
    frequencies = plain(dims, base)

    def border(turns):  # the pair that turns so often: base ** (-2c/dims) * original = 2 pi turns
        return dims / 2 * math.log(original / (2 * math.pi * turns), base)

    first, last = border(fast or 32), border(slow or 1)
    if truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    ramp = np.clip((np.arange(dims // 2) - first) / (last - first), 0, 1)
    close(from_config(dims, rope_theta=base, rope_scaling=scaling),
          frequencies / factor * ramp + frequencies * (1 - ramp), 0.1 * math.log(factor) + 1)


def test_magnitude_of_yarn():
    def magnitude(**scaling):
        return from_config(max_position_embeddings=8192, rope_scaling={
            "type": "yarn", "original_max_position_embeddings": 2048, **scaling}).magnitude
    assert math.isclose(magnitude(factor=40), 0.1 * math.log(40) + 1, rel_tol=1e-14)
    assert math.isclose(magnitude(), 0.1 * math.log(4) + 1, rel_tol=1e-14)  # 8192 / 2048
    assert magnitude(factor=40, attention_factor=0.7) == 0.7
    assert magnitude(factor=40, mscale=1.0, mscale_all_dim=1.0) == 1
    assert math.isclose(magnitude(factor=40, mscale=1.0, mscale_all_dim=0.5), rel_tol=1e-14,
                        b=(0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert magnitude(factor=1) == 1


@pytest.mark.parametrize(("length", "name"), [(None, "short_factor"), (4096, "short_factor"),
                                              (4097, "long_factor")])
def test_longrope(length, name):
    factors = {"short_factor": [1 + 0.01 * c for c in range(48)],
               "long_factor": [1 + c for c in range(48)]}
    rotary = from_config(96, length, max_position_embeddings=131072,
                         original_max_position_embeddings=4096,
                         rope_scaling={"type": "longrope", **factors})
    close(rotary, plain(96, 1e4) / factors[name],
          math.sqrt(1 + math.log(131072 / 4096) / math.log(4096)))
    given = from_config(96, max_position_embeddings=4096, rope_scaling={
        "type": "longrope", **factors, "attention_factor": 1.5})
    assert given.magnitude == 1.5
    assert from_config(96, max_position_embeddings=4096,
                       rope_scaling={"type": "longrope", **factors}).magnitude == 1
    # A factor counts where the original length belongs to the scaling, not to the model.
    stated = {"type": "longrope", "factor": 8.0,
              **{name: np.array(numbers) for name, numbers in factors.items()}}
    assert from_config(96, length, max_position_embeddings=131072, rope_scaling=stated,
                       original_max_position_embeddings=4096).magnitude == rotary.magnitude
    assert math.isclose(from_config(96, rope_scaling=stated | {
        "original_max_position_embeddings": 4096}).magnitude,
        math.sqrt(1 + math.log(8) / math.log(4096)), rel_tol=1e-15)


def test_llama3():
    """By wavelength, as its paper's code has it."""
    frequencies = plain(128, 5e5)
    wanted = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            wanted.append(frequency)
        elif wavelength > 8192 / 1:
            wanted.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            wanted.append((1 - smooth) * frequency / 8 + smooth * frequency)
    close(mha.Rotary.from_config(LLAMA_3, 128), wanted)
    assert len({wanted[c] / frequencies[c] for c in range(64)}) > 5


def test_layers_of_several_kinds():
    nested = {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    close(from_config(layer_type="full_attention", **nested), plain(64, 1e6) / 8)
    assert from_config(layer_type="sliding_attention", **nested) == mha.Rotary(64)
    for layer_type in (None, "other"):
        with pytest.raises(ValueError, match=r"layer_type: got .*, wanted one of full_att"):
            from_config(layer_type=layer_type, **nested)
    gemma = {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    close(from_config(layer_type="full_attention", **gemma), plain(64, 1e6) / 8)
    assert from_config(layer_type="sliding_attention", **gemma) == mha.Rotary(64)
    bases = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}  # ModernBERT
    assert from_config(layer_type="full_attention", **bases) == mha.Rotary(64, base=160000)
    assert from_config(layer_type="sliding_attention", **bases) == mha.Rotary(64)


def test_the_callers_decimal_context_does_not_matter():
    wanted = mha.Rotary(64), from_config(rope_scaling={"type": "linear", "factor": 3.3})
    with decimal.localcontext() as context:
        context.traps[decimal.Inexact] = context.traps[decimal.FloatOperation] = True
        context.prec, context.rounding = 3, decimal.ROUND_UP
        assert wanted == (mha.Rotary(64),
                          from_config(rope_scaling={"type": "linear", "factor": 3.3}))


def test_a_factor_beyond_40_digits_is_a_value_error():
    with pytest.raises(ValueError, match=r"^rope_type: got 'dynamic' with numbers too far apart"):
        from_config(max_position_embeddings=100_000,
                    rope_scaling={"rope_type": "dynamic", "factor": 1e50})


@pytest.mark.parametrize("config", [
    {"rope_theta": 1e-320}, {"rope_theta": 10**5000}, {"rope_theta": decimal.Decimal("sNaN")},
    {"partial_rotary_factor": 1e308}])
def test_numbers_beyond_all_floats(config):
    with pytest.raises(ValueError, match=f"^{next(iter(config))}: got"):
        mha.Rotary.from_config(config, 64)
    with pytest.raises(ValueError, match=r"^base: got one that makes frequencies beyond"):
        mha.Rotary(64, base=1e-320)


def test_dynamic_by_alpha():
    """base * alpha ** (dims / (dims - 2)), whatever the lengths (Tencent Hunyuan Team 2024)."""
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    close(from_config(128, rope_scaling=scaling), plain(128, 1e4 * 1000 ** (128 / 126)))


def test_a_config_rotates():
    for config in (LLAMA_3, GPT_OSS):
        rotary = mha.Rotary.from_config(config, 64)
        assert rotary(np.ones((3, 64))).shape == (3, 64)
    assert math.isclose(rotary.magnitude, 1.3465735902799727, rel_tol=1e-15)


def scaled(**scaling):
    return {"rope_scaling": scaling}


@pytest.mark.parametrize(("config", "message"), [
    (scaled(type="su"), "rope_type: got 'su', wanted one of default, linear, dynamic, yarn, longr"),
    (scaled(rope_type=3), "rope_type: got 3, wanted one of"),
    (scaled(type="linear"), r"factor: got none among \['rope_scaling', 'type'\], wanted a value"),
    (scaled(type="linear", factor=0), "factor: got 0, wanted a number above 0"),
    (scaled(type="linear", factor="2"), "factor: got str, wanted a number"),
    (scaled(type="linear", factor=math.nan), "factor: got nan, wanted a finite number"),
    (scaled(type="dynamic", factor=2), "max_position_embeddings: got none"),
    (scaled(type="yarn", factor=2), "max_position_embeddings: got none"),
    (scaled(type="yarn", factor=2, original_max_position_embeddings=0), "at least 1"),
    (scaled(type="yarn", factor=2, original_max_position_embeddings=9, truncate=1), "truncate: "),
    (scaled(type="yarn", factor=2, original_max_position_embeddings=9, beta_fast=-1), "beta_fast"),
    (scaled(type="longrope", original_max_position_embeddings=9), "short_factor: got none"),
    (scaled(type="longrope", original_max_position_embeddings=9, short_factor=[1.0]),
     "short_factor: got 1 numbers, wanted 4, one a pair"),
    (scaled(type="longrope", original_max_position_embeddings=9, short_factor=[1, 1, 1, 0]),
     "short_factor: got 0, wanted numbers above 0"),
    (scaled(type="longrope", original_max_position_embeddings=9, short_factor="1234"),
     "short_factor: got str, wanted a list"),
    (scaled(type="llama3", factor=2, original_max_position_embeddings=9), "low_freq_factor: got n"),
    (scaled(type="llama3", factor=2, original_max_position_embeddings=9, low_freq_factor=4,
            high_freq_factor=1), "high_freq_factor: got 1, wanted a number above 4"),
    ({"rope_scaling": "yarn"}, "rope_scaling: got str, wanted names with values"),
    ({"rope_theta": -1}, "rope_theta: got -1, wanted a number above 0"),
    ({"partial_rotary_factor": 0.4}, "partial_rotary_factor: got 3 of 8 columns"),
    ({"rotary_pct": 1.5}, "rotary_pct: got 12 of 8 columns"),
    ({"rotary_dim": 7}, "rotary_dim: got 7 of 8 columns"),
    ({"rotary_dim": 10}, "rotary_dim: got 10 of 8 columns"),
    ([], "mapping: got list, wanted names with values")])
def test_bad_configs(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mha.Rotary.from_config(config, 8)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="head_dim: got 7 of 7 columns"):
        mha.Rotary.from_config({}, 7)
    with pytest.raises(ValueError, match="length: got 0, wanted at least 1"):
        mha.Rotary.from_config({}, 8, length=0)
    with pytest.raises(TypeError, match="layer_type: got int"):
        mha.Rotary.from_config({}, 8, layer_type=1)
    with pytest.raises(ValueError, match="dims: got 2, wanted at least 4 for rope_type 'dynamic'"):
        mha.Rotary.from_config(scaled(type="dynamic", factor=2) | {
            "max_position_embeddings": 8}, 2)


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "message"), [
    ({"rope_type": "default", "xdrope_section": [1, 1, 2]},
     r"^xdrope_section: got it inside {}, and mha has no sections of columns whose pairs turn by"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 9,
      "llama_4_scaling_beta": 0.1}, r"^llama_4_scaling_beta: got it inside {}, and mha has no que"),
    ({"rope_type": "axial"}, r"^rope_type: got 'axial', wanted one of default"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 9,
      "attention_facter": 0.5},
     r"^attention_facter: got an unknown key inside {}, wanted 'attention_factor'"),
    ({"rope_typ": "linear", "factor": 4.0},
     r"^rope_typ: got an unknown key inside {}, wanted 'rope_type'"),
    ({"rope_type": "linear", "Factor": 4.0}, r"^Factor: got an unknown key .*, wanted 'factor'"),
    ({"\x1b[2J": False}, r"^\\x1b\[2J: got an unknown key inside {}, wanted one of alpha, att"),
    ({"factor": 4.0}, "^rope_type: got none beside factor, wanted one of default, linear"),
])
def test_what_is_not_read_inside_a_scaling_is_refused(where, scaling, message):
    message = message.format(where)
    with pytest.raises(ValueError, match=message):
        mha.Rotary.from_config({where: scaling}, 8)
    nested = {where: {"full_attention": scaling, "sliding_attention": {"rope_type": "default"}}}
    with pytest.raises(ValueError, match=message.replace(where, rf"{where}\['full_attention'\]")):
        mha.Rotary.from_config(nested, 8, layer_type="full_attention")
    assert mha.Rotary.from_config(nested, 8, layer_type="sliding_attention") == mha.Rotary(8)


def test_keys_without_a_value_and_beside_the_layers_types():
    assert from_config(rope_scaling={"xdrope_section": None, "anything": None}) == mha.Rotary(64)
    kinds = {"full_attention": {"rope_theta": 9.0}, "sliding_attention": None}
    assert from_config(layer_type="full_attention",
                       rope_parameters=kinds) == mha.Rotary(64, base=9)
    with pytest.raises(ValueError, match=r"^full_atention: got an unknown key inside rope_p"):
        from_config(layer_type="full_attention", rope_parameters=kinds | {"full_atention": 3})


def test_a_scaling_that_stands_elsewhere_or_twice():
    for inner in ({"rope_type": "linear", "factor": 4.0}, {"mrope_section": [1, 1, 2]}):
        with pytest.raises(ValueError, match=f"^{next(iter(inner))}: got it outside of rope_scal"):
            mha.Rotary.from_config(inner, 8)
    linear = {"rope_type": "linear", "factor": 4.0}
    twice = from_config(rope_scaling=linear, rope_parameters=linear | {"rope_theta": 9.0})
    close(twice, plain(64, 9.0) / 4)
    assert from_config(rope_scaling={}, rope_parameters=linear) == from_config(rope_scaling=linear)
    with pytest.raises(ValueError, match=r"^rope_scaling: got factor not as in rope_parameters"):
        from_config(rope_scaling=linear, rope_parameters=linear | {"factor": 2.0})


@pytest.mark.parametrize(("length", "magnitude"), [(None, 1.2), (5000, 1.3)])
def test_a_magnitude_for_short_and_one_for_long_sequences(length, magnitude):
    """Phi-3.5-MoE's: cosine and sine times short_mscale or long_mscale."""
    factors = {"short_factor": [1.5] * 32, "long_factor": [2.5] * 32}
    rotary = from_config(length=length, max_position_embeddings=131072,
                         original_max_position_embeddings=4096,
                         rope_scaling={"type": "longrope", **factors, "short_mscale": 1.2,
                                       "long_mscale": 1.3})
    close(rotary, plain(64, 1e4) / (2.5 if length else 1.5), magnitude)


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_sections(where):
    """Qwen2-VL's, one behind the other, and Qwen3-VL's, in turns."""
    split = mha.Rotary(64, base=1e6, sections=(8, 12, 12))
    for scaling in ({"type": "mrope"}, {"rope_type": "default"}, {"type": "default"}, {},
                    {"rope_type": "default", "type": "mrope", "mrope_interleaved": False}):
        assert from_config(rope_theta=1e6, **{where: {
            **scaling, "mrope_section": [8, 12, 12]}}) == split
    in_turns = mha.Rotary(64, base=1e6, sections=(12, 10, 10), section_layout="interleaved")
    for turns in ({"mrope_interleaved": True}, {"interleaved": True}):
        assert from_config(rope_theta=1e6, **{where: {
            **turns, "rope_type": "default", "mrope_section": [12, 10, 10]}}) == in_turns
    unsaid = {where: {"mrope_section": [12, 10, 10]}}  # Qwen3-VL's and Qwen3.5's take turns anyway
    assert from_config(rope_theta=1e6, model_type="qwen3_vl_text", **unsaid) == in_turns
    unsaid[where]["mrope_interleaved"] = False
    assert from_config(model_type="qwen3_vl_text", **unsaid).section_layout == "split"
    yarn = from_config(max_position_embeddings=4096, **{where: {
        "rope_type": "yarn", "factor": 4.0, "mrope_section": np.array([8, 12, 12])}})
    assert yarn.sections == (8, 12, 12) and yarn.magnitude > 1 and yarn.base is None
    partial = from_config(partial_rotary_factor=0.5, layout="interleaved", **{where: {
        "mrope_section": [4, 6, 6]}})
    assert partial == mha.Rotary(32, layout="interleaved", sections=(4, 6, 6))
    assert from_config(**{where: {"mrope_section": None}}).sections is None


@pytest.mark.parametrize(("config", "message"), [
    ({"mrope_section": [1, 1, 1]}, r"^sections: got \(1, 1, 1\), wanted two .* sum to 4, the"),
    ({"mrope_section": 4}, "^mrope_section: got int, wanted a list of ints"),
    ({"mrope_section": ["1", 1, 2]}, "^mrope_section: got str, wanted an int"),
    ({"type": "mrope"}, "^mrope_section: got none among"),
    ({"type": "default", "mrope_interleaved": True}, "^mrope_section: got none among"),
    ({"mrope_section": [1, 1, 2], "mrope_interleaved": 1}, "^mrope_interleaved: got int, wanted"),
])
def test_bad_sections(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mha.Rotary.from_config({"rope_scaling": config}, 8)


@pytest.mark.parametrize("model_type", ["ernie4_5_vl_moe_text", "hunyuan_vl"])
def test_sections_in_another_order_are_refused(model_type):
    with pytest.raises(ValueError, match=f"^mrope_section: got that of model_type '{model_type}'"):
        from_config(model_type=model_type, rope_parameters={"mrope_section": [12, 10, 10]})


def test_proportional():
    """Gemma 4: a share of the pairs of the whole head turns, with the frequencies of all."""
    def rotary(head_dim=64, **scaling):
        return from_config(head_dim, rope_parameters={
            "rope_type": "proportional", "rope_theta": 1e6, **scaling})
    for share, turning in ((0.25, 8), (0.3, 9), (1.0, 32), (1e-9, 0)):
        found = rotary(partial_rotary_factor=share)
        frequencies = np.where(np.arange(32) < turning, plain(64, 1e6), 0)
        np.testing.assert_allclose(found.frequencies, frequencies, rtol=1e-14)
        assert found.dims == 64 and found.magnitude == 1
    close(rotary(), plain(64, 1e6))
    close(rotary(factor=8.0), plain(64, 1e6) / 8)
    x = np.random.default_rng(0).standard_normal((5, 64))
    still = [*range(8, 32), *range(40, 64)]
    got = rotary(partial_rotary_factor=0.25)(x)
    assert np.array_equal(got[:, still], x[:, still]) and (got[1:, :8] != x[1:, :8]).all()
    for share in (1.5, 0, -1):
        with pytest.raises(ValueError, match=rf"^partial_rotary_factor: got {share}, wanted"):
            rotary(partial_rotary_factor=share)
    with pytest.raises(ValueError, match=r"^head_dim: got 7 of 7 columns"):
        rotary(7)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl_text"])
def test_a_layer_of_sections(model_type):
    layer = mha.MultiHeadAttention(16, 2, rng=0, use_bias="qkv")
    config = {"model_type": model_type, "num_attention_heads": 2, "rope_theta": 1e4,
              "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    read = mha.MultiHeadAttention.from_state(layer.to_state("llama"), config=config)
    assert read.rotary == mha.Rotary(8, sections=(1, 1, 2))
