"""Files of llama.cpp: arrays as the model had them, the metadata as a config, bad files."""
import collections
import random

import gguf
import numpy as np
import pytest

import mha

EMBED, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
ROWS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}


def permuted(rows, heads):
    """What llama.cpp's converter does to query and key of Llama: halves become pairs."""
    split = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def written(path, architecture, arrays, **metadata):
    """A file as the gguf package writes it; metadata by the last part of its keys, None to leave
    one out."""
    known = {"block_count": 2, "embedding_length": EMBED, "attention__head_count": HEADS,
             "attention__head_count_kv": KV_HEADS, "attention__key_length": HEAD_DIM,
             "context_length": 4096, "rope__freq_base": 5e5,
             "attention__layer_norm_rms_epsilon": 1e-5, **metadata}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in known.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
               list: writer.add_array, bool: writer.add_bool}.get(type(value))
        if add is not None:
            add(f"{architecture}.{key.replace('__', '.')}", value)
    for name, array in arrays.items():
        kind = None
        if isinstance(array, tuple):
            kind, array = array
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def draw(seed, *, norms=False, biases=False):
    """A layer's arrays, as transformers has them."""
    rng = np.random.default_rng(seed)
    shapes = {f"{letter}_proj.weight": (rows, EMBED) for letter, rows in ROWS.items()}
    shapes["o_proj.weight"] = (EMBED, HEADS * HEAD_DIM)
    if biases:
        shapes |= {f"{letter}_proj.bias": (rows,) for letter, rows in ROWS.items()}
    if norms:
        shapes |= {f"{letter}_norm.weight": (HEAD_DIM,) for letter in "qk"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def as_converted(arrays, architecture, layer, heads=HEADS, kv_heads=KV_HEADS):
    found = {f"blk.{layer}.attn_norm.weight": np.ones(EMBED, np.float32),
             f"blk.{layer}.ffn_up.weight": np.ones((3, EMBED), np.float32)}
    for name, array in arrays.items():
        module, kind = name.split(".")
        if architecture == "llama" and module in ("q_proj", "k_proj"):
            array = permuted(array, heads if module == "q_proj" else kv_heads)
        if module.endswith("norm"):
            array = array + np.float32(architecture.startswith("gemma"))
            found[f"blk.{layer}.attn_{module}.{kind}"] = array
        else:
            found[f"blk.{layer}.{NAMES[module[0]]}.{kind}"] = array
    return found


CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
          "hidden_size": EMBED, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
MODELS = {
    "llama": ({}, {}, {}),
    "qwen2": ({"biases": True}, {}, {}),
    "qwen3": ({"norms": True}, {}, {}),
    "gemma2": ({}, {"attn_logit_softcapping": 50.0, "attention__sliding_window": 5},
               {"attn_logit_softcapping": 50.0, "sliding_window": 5,
                "query_pre_attn_scalar": HEAD_DIM}),
    "gemma3": ({"norms": True}, {"attention__sliding_window": 5, "rope__scaling__type": "linear",
                                 "rope__scaling__factor": 8.0},
               {"sliding_window": 5, "query_pre_attn_scalar": HEAD_DIM,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_layers_are_those_of_the_model(tmp_path, architecture):
    """Every layer, by the file's own config, gives the bits of the model's own arrays."""
    kinds, metadata, config = MODELS[architecture]
    layers = [draw(seed, **kinds) for seed in range(6)]
    stored = {name: array for index, arrays in enumerate(layers)
              for name, array in as_converted(arrays, architecture, index).items()}
    path = written(tmp_path / "model.gguf", architecture, stored, **metadata)
    x = np.random.default_rng(9).standard_normal((1, 12, EMBED)).astype(np.float32)
    with mha.parameters.open(path) as file:
        assert len(file) == len(stored)
        assert np.array_equal(file["blk.3.ffn_up.weight"], stored["blk.3.ffn_up.weight"])
        read = mha.MultiHeadAttention.from_state(file, prefix="blk.{layer}.")
        by_metadata = mha.MultiHeadAttention.from_state(file, prefix="blk.1.", layer_index=1,
                                                        config=file.metadata)
    for index, arrays in enumerate(layers):
        own = mha.MultiHeadAttention.from_state(
            arrays, "gemma3_text" if architecture == "gemma3" else architecture,
            config={**CONFIG, **config}, layer_index=index)
        assert repr(read[index]) == repr(own)
        if architecture != "gemma3":  # w + 1 - 1 is not always w
            assert np.array_equal(read[index](x, causal=True), own(x, causal=True))
        np.testing.assert_allclose(read[index](x, causal=True), own(x, causal=True), atol=2e-5)
    assert np.array_equal(by_metadata(x, causal=True), read[1](x, causal=True))


def test_types_of_arrays(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(2)
    numbers = rng.standard_normal((5, 64)).astype(np.float32)
    of = gguf.GGMLQuantizationType
    bf16 = numbers.astype(ml_dtypes.bfloat16)
    blocks = gguf.quants.quantize(numbers, of.Q5_1)
    stored = {"single": numbers, "half": numbers.astype(np.float16), "double": numbers.astype("f8"),
              "ints": np.arange(7, dtype=np.int32), "brain": (of.BF16, bf16.view(np.uint8)),
              "blocks": (of.Q5_1, blocks)}
    with mha.parameters.open(written(tmp_path / "model.gguf", "llama", stored)) as file:
        for name in ("single", "half", "double", "ints"):
            assert file[name].dtype == stored[name].dtype
            assert np.array_equal(file[name], stored[name])
        assert file["brain"].dtype == ml_dtypes.bfloat16
        assert file["brain"].tobytes() == bf16.tobytes()
        with pytest.raises(ValueError, match=r"got blocks of type Q5_1, wanted one of F64, F32, .*"
                                             "I8, Q8_0, Q4_0, Q4_K, Q6_K$"):
            file["blocks"]


def test_frequencies_of_llama_3(tmp_path):
    """rope_freqs.weight is what llama3's scaling divides the frequencies by."""
    plain, scaled = (mha.Rotary.from_config(
        {**CONFIG, "rope_scaling": scaling}, HEAD_DIM) for scaling in (
            None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}))
    factors = np.divide(plain.frequencies, scaled.frequencies).astype(np.float32)
    assert factors.max() > 7
    stored = as_converted(draw(0), "llama", 0) | {"rope_freqs.weight": factors}
    with mha.parameters.open(written(tmp_path / "model.gguf", "llama", stored)) as file:
        layer = mha.MultiHeadAttention.from_state(file, prefix="blk.0.")
        same = mha.MultiHeadAttention.from_state(file, prefix="blk.0.", config=file.metadata)
    for read in (layer, same):
        np.testing.assert_allclose(read.rotary.frequencies, scaled.frequencies, rtol=1e-6)


def test_the_largest_gemmas_scale_by_their_width(tmp_path):
    path = written(tmp_path / "model.gguf", "gemma2", {}, block_count=46,
                   attention__sliding_window=5, attn_logit_softcapping=50.0)
    with mha.parameters.open(path) as file:
        assert file.config["query_pre_attn_scalar"] == EMBED / HEADS
        assert file.config["rms_norm_eps"] == 1e-5


def test_other_models(tmp_path):
    """Their arrays are read, but for those whose rows may lie in another order."""
    stored = as_converted(draw(0), "granite", 0)
    with mha.parameters.open(written(tmp_path / "model.gguf", "granite", stored)) as file:
        assert file.config is None
        assert np.array_equal(file["blk.0.attn_v.weight"], stored["blk.0.attn_v.weight"])
        with pytest.raises(ValueError, match=r"got blk\.0\.attn_q\.weight of a model 'granite', "
                                             "wanted one of llama, qwen2"):
            file["blk.0.attn_q.weight"]
        with pytest.raises(ValueError, match=r"general\.architecture: got 'granite', wanted one"):
            mha.MultiHeadAttention.from_state(file, prefix="blk.0.", config=file.metadata)


def test_bad_input(tmp_path):
    path = written(tmp_path / "model.gguf", "llama", as_converted(draw(0), "llama", 0))
    file = mha.parameters.open(path)
    with pytest.raises(TypeError, match=r"config: got a copy of a file's metadata, wanted the"):
        mha.MultiHeadAttention.from_state(file, prefix="blk.0.", config=dict(file.metadata))
    for name, content, message in (("empty", b"", "an empty file"),
                                   ("pickle", b"\x80\x02...", "a pickle"),
                                   ("big", b"GGUF\0\0\0\3" + bytes(64), "byte order|ends before"),
                                   ("old", b"GGUF\1\0\0\0" + bytes(64), "version 1"),
                                   ("other", bytes(64), "a file of another kind")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            mha.parameters.open(tmp_path / f"{name}.gguf")
    for architecture, heads in (("llama", 0), ("llama", True), ("llama", 3), ("llama", [4, 4])):
        bad = written(tmp_path / "heads.gguf", architecture,
                      as_converted(draw(0), architecture, 0), attention__head_count=heads)
        with pytest.raises(ValueError, match=r"heads\.gguf: (llama\.attention\.head_count: )?got "):
            mha.parameters.open(bad)["blk.0.attn_q.weight"]
    with open(path, "r+b") as again:
        again.truncate(2000)
    with pytest.raises(ValueError, match=r"wanted mha\.parameters\.open once more"):
        file["blk.0.attn_v.weight"]


def test_hostile_files(tmp_path):
    """Cut, or with bytes of the header changed: a ValueError, or a file that is as it says."""
    path = written(tmp_path / "model.gguf", "llama", as_converted(draw(0), "llama", 0),
                   rope__scaling__type="yarn", rope__scaling__factor=4.0)
    with open(path, "rb") as file:
        whole = file.read()
    generator, ends = random.Random(5), collections.Counter()
    bad = tmp_path / "bad.gguf"
    for number in range(1500):
        content = bytearray(whole)
        if number % 3 == 0:
            del content[generator.randrange(len(content)):]
        for _ in range(generator.choice((1, 2, 8)) if number % 3 else 0):
            content[generator.randrange(1400)] = generator.choice((0, 1, 127, 128, 255))
        bad.write_bytes(content)
        try:
            with mha.parameters.open(bad) as read:
                for name in read:
                    np.asarray(read[name])
                dict(read.metadata)
                dict(read.config or {})
            ends["read"] += 1
        except ValueError as error:
            ends["refused" if str(error).startswith(str(bad)) else str(error)] += 1
    assert ends.keys() == {"read", "refused"}
    assert ends["read"] > 20 and ends["refused"] > 700
