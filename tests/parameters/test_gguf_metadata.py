"""The metadata of .gguf files: read when it is asked for, and a config whose errors name its keys;
and headers that do not fit together."""
import pickle
import struct
import sys
import time

import gguf
import numpy as np
import pytest
from test_gguf import CONFIG, EMBED, HEAD_DIM, HEADS, as_converted, draw, written

import mha

WORDS = 128_000
GEMMA2 = {"attn_logit_softcapping": 50.0, "attention__sliding_window": 5}
GEMMA3 = {"attention__sliding_window": 5}
LAYER = as_converted(draw(0), "llama", 0)


def with_vocabulary(path, words):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(EMBED)
    writer.add_head_count(HEADS)
    writer.add_token_list(words)
    writer.add_token_scores([0.5] * len(words))
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([f"{word} x" for word in words])
    writer.add_chat_template("{{ messages }} \u00e9")
    writer.add_array("some.flags", [True, False, True])
    writer.add_array("some.numbers", [-(2**31), 7])
    writer.add_tensor("blk.0.attn_v.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_vocabulary_is_read_when_it_is_asked_for(tmp_path):
    words = [f"word {number} \u00e9" for number in range(WORDS)]
    path = with_vocabulary(tmp_path / "model.gguf", words)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        with mha.parameters.open(path) as file:
            assert np.array_equal(file["blk.0.attn_v.weight"], np.ones((2, 32)))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.2
    metadata = file.metadata
    assert metadata["tokenizer.ggml.tokens"] == words
    assert metadata["tokenizer.ggml.tokens"] is metadata["tokenizer.ggml.tokens"]
    assert metadata["tokenizer.ggml.merges"][-1] == f"{words[-1]} x"
    assert metadata["tokenizer.ggml.scores"] == [0.5] * WORDS
    assert metadata["tokenizer.ggml.token_type"] == [1] * WORDS
    assert metadata["tokenizer.chat_template"] == "{{ messages }} \u00e9"
    assert metadata["some.flags"] == [True, False, True]
    assert metadata["some.numbers"] == [-(2**31), 7]
    assert metadata["llama.embedding_length"] == EMBED
    assert "some.flags" in metadata and "other" not in metadata
    assert len(metadata) == len(list(metadata)) == 10
    assert repr(metadata) == f"<10 values of {path!r}>"


def test_the_values_are_those_of_the_gguf_package(tmp_path):
    """Words of every length, some longer than a piece of the file."""
    words = ["", "a", "\n", "\u20ac" * 3, "x" * (1 << 20), "y" * ((3 << 20) + 5)] * 3 + ["end"]
    path = with_vocabulary(tmp_path / "model.gguf", words)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()
              if not name.startswith("GGUF.")}
    metadata = mha.parameters.open(path).metadata
    assert dict(metadata) == fields
    assert list(metadata) == list(fields)


def test_every_type_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    wanted = {}
    for kind, numbers in (("uint8", (0, 255)), ("int8", (-128, 127)), ("uint16", (0, 65535)),
                          ("int16", (-32768, 32767)), ("uint32", (0, 2**32 - 1)),
                          ("int32", (-2**31, 2**31 - 1)), ("uint64", (0, 2**64 - 1)),
                          ("int64", (-2**63, 2**63 - 1)), ("float32", (0.25, -1e30)),
                          ("float64", (0.1, -1e300)), ("bool", (False, True))):
        for place, number in enumerate(numbers):
            getattr(writer, f"add_{kind}")(f"a.{kind}.{place}", number)
            wanted[f"a.{kind}.{place}"] = float(np.float32(number)) if kind == "float32" else number
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = mha.parameters.open(tmp_path / "model.gguf").metadata
    assert {key: metadata[key] for key in wanted} == wanted


def test_numbers_of_float64_stay_as_they_are(tmp_path):
    """Those of float32 become what a config.json had."""
    file = mha.parameters.open(written(tmp_path / "model.gguf", "llama", LAYER))
    for number, wanted in ((1e300, 1e300), (0.1, 0.1), (float(np.float32(0.1)), 0.1)):
        file.metadata._values["llama.rope.freq_base"] = number
        assert file.metadata.config()["rope_theta"] == wanted


def test_a_file_that_changed_since(tmp_path):
    path = with_vocabulary(tmp_path / "model.gguf", ["a", "b"])
    file = mha.parameters.open(path)
    again = pickle.loads(pickle.dumps(file))
    assert again.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    with open(path, "ab") as end:
        end.write(b"\0")
    with pytest.raises(ValueError, match=r"wanted mha\.parameters\.open once more"):
        file.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(KeyError, match="other"):
        file.metadata["other"]


def test_a_package_is_not_needed(tmp_path, monkeypatch):
    path = written(tmp_path / "model.gguf", "llama", LAYER)
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    with mha.parameters.open(path) as file:
        mha.MultiHeadAttention.from_state(file, prefix="blk.0.")


MISSING = [
    ("llama", {"embedding_length": None, "attention__key_length": None}, "llama.embedding_length",
     "it, or llama.attention.key_length, in the metadata, or config="),
    ("llama", {"attention__head_count": None}, "llama.attention.head_count", "it in the metadata"),
    ("qwen2", {"attention__head_count": None}, "qwen2.attention.head_count", "it in the metadata"),
    ("qwen3", {"attention__layer_norm_rms_epsilon": None},
     "qwen3.attention.layer_norm_rms_epsilon", "it in the metadata"),
    ("gemma2", {**GEMMA2, "attn_logit_softcapping": None}, "gemma2.attn_logit_softcapping", "it"),
    ("gemma2", {**GEMMA2, "attention__sliding_window": None}, "gemma2.attention.sliding_window",
     "it"),
    ("gemma2", {**GEMMA2, "block_count": None}, "gemma2.block_count", "it in"),
    ("gemma2", {**GEMMA2, "block_count": 46, "embedding_length": None}, "gemma2.embedding_length",
     "it in"),
    ("gemma3", {**GEMMA3, "attention__layer_norm_rms_epsilon": None},
     "gemma3.attention.layer_norm_rms_epsilon", "it in"),
    ("gemma3", {"attention__sliding_window": None}, "gemma3.attention.sliding_window", "it in"),
    ("llama", {"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor", "it in"),
    ("llama", {"rope__scaling__type": "linear"}, "llama.rope.scaling.factor", "it in"),
    ("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
               "context_length": None}, "llama.context_length",
     "it, or llama.rope.scaling.original_context_length,"),
]


@pytest.mark.parametrize(("architecture", "metadata", "key", "wanted"), MISSING)
def test_what_is_missing_is_said_when_the_config_is_asked_for(tmp_path, architecture, metadata,
                                                              key, wanted):
    """By the file's own key. The file is open, and its arrays can be read."""
    stored = as_converted(draw(0), architecture, 0)
    path = written(tmp_path / "model.gguf", architecture, stored, **metadata)
    file = mha.parameters.open(path)
    name = "blk.0.attn_v.weight"
    assert np.array_equal(file[name], stored[name])
    for ask in (lambda: file.config,
                lambda: mha.MultiHeadAttention.from_state(file, prefix="blk.0."),
                lambda: mha.MultiHeadAttention.from_state(file, prefix="blk.0.",
                                                          config=file.metadata)):
        with pytest.raises(ValueError) as raised:
            ask()
        assert str(raised.value).startswith(f"{path}: {key}: got none, wanted {wanted}")


def test_little_metadata_and_a_config_of_ones_own(tmp_path):
    left_out = ("embedding_length", "attention__head_count", "attention__key_length")
    path = written(tmp_path / "model.gguf", "qwen2", as_converted(draw(0, biases=True), "qwen2", 0),
                   **dict.fromkeys(left_out))
    file = mha.parameters.open(path)
    layer = mha.MultiHeadAttention.from_state(file, prefix="blk.0.",
                                              config={**CONFIG, "model_type": "qwen2"})
    assert layer.num_heads == HEADS


def config_of(path):
    with mha.parameters.open(path) as file:
        return file.config


WRONG = [
    ("llama", {"attention__head_count": 0}, "attention.head_count: got 0, wanted a whole number"),
    ("llama", {"attention__head_count": 2**31}, "attention.head_count: got 2147483648, wanted"),
    ("llama", {"attention__head_count": 4.0}, r"attention.head_count: got 4\.0, wanted a whole"),
    ("llama", {"attention__head_count": True}, "attention.head_count: got True, wanted a whole"),
    ("llama", {"attention__head_count": [4, 4]}, "attention.head_count: got an array, wanted a"),
    ("llama", {"embedding_length": "x" * 99}, r"embedding_length: got 'x{40}', wanted a whole"),
    ("llama", {"attention__head_count_kv": -1}, "attention.head_count_kv: got -1, wanted a whole"),
    ("llama", {"rope__freq_base": 0.0}, r"rope.freq_base: got 0\.0, wanted a finite number above"),
    ("qwen3", {"attention__layer_norm_rms_epsilon": float("nan")},
     "attention.layer_norm_rms_epsilon: got nan, wanted a finite number above 0"),
    ("gemma2", {**GEMMA2, "attn_logit_softcapping": float("inf")},
     "attn_logit_softcapping: got inf, wanted a finite number above 0"),
    ("llama", {"rope__dimension_count": 4}, "rope.dimension_count: got 4, wanted 8, all columns"),
    ("llama", {"rope__scaling__type": "longrope", "rope__scaling__factor": 4.0},
     "rope.scaling.type: got 'longrope', wanted none, linear or yarn"),
    ("llama", {"rope__scaling__type": 1}, "rope.scaling.type: got 1, wanted none, linear or yarn"),
    ("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 0.0},
     r"rope.scaling.factor: got 0\.0, wanted a finite number above 0"),
    ("llama", {"rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5},
     r"rope.scaling.attn_factor: got 0\.5, wanted a model without it"),
    ("llama", {"rope__scaling__yarn_log_multiplier": 0.5}, "yarn_log_multiplier: got 0.5, wanted"),
]


@pytest.mark.parametrize(("architecture", "metadata", "message"), WRONG)
def test_wrong_values_are_named_by_the_files_keys(tmp_path, architecture, metadata, message):
    if metadata.get("attention__head_count_kv") == -1:
        metadata = {"attention__head_count_kv": "-1"}
        message = message.replace("-1", "'-1'")
    path = written(tmp_path / "model.gguf", architecture, LAYER, **metadata)
    with pytest.raises(ValueError, match=rf"model\.gguf: {architecture}\.(.*\.)?{message}"):
        config_of(path)


def scaled(tmp_path, **metadata):
    path = written(tmp_path / "model.gguf", "llama", LAYER, **metadata)
    return config_of(path).get("rope_scaling")


def test_scalings(tmp_path):
    """A factor without a type is linear, in the files of 2023 under another key."""
    assert scaled(tmp_path) is None
    assert scaled(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0) is None
    linear = {"rope_type": "linear", "factor": 4.0}
    assert scaled(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0) == linear
    assert scaled(tmp_path, rope__scaling__factor=4.0, rope__scaling__attn_factor=1.0) == linear
    assert scaled(tmp_path, rope__scale_linear=4.0, rope__scaling__finetuned=True) == linear
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert scaled(tmp_path, **yarn) == {"rope_type": "yarn", "factor": 4.0,
                                        "original_max_position_embeddings": 4096}
    assert scaled(tmp_path, **yarn, rope__scaling__original_context_length=512,
                  rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_beta_slow=2.0) == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 16.0, "beta_slow": 2.0}


def test_the_base_of_gemma_3s_sliding_layers(tmp_path):
    stored = as_converted(draw(0, norms=True), "gemma3", 0)
    for metadata, base in ((GEMMA3, 1e4), ({**GEMMA3, "rope__freq_base_swa": 2e4}, 2e4)):
        path = written(tmp_path / "model.gguf", "gemma3", stored, **metadata)
        with mha.parameters.open(path) as file:
            layer = mha.MultiHeadAttention.from_state(file, prefix="blk.0.", layer_index=0)
        assert layer.rotary.base == base


@pytest.mark.parametrize(("factors", "metadata", "message"), [
    (np.ones(3), {}, r"rope_freqs\.weight of shape \(3,\), wanted 4 finite numbers above 0"),
    (np.zeros(4), {}, "wanted 4 finite numbers above 0"),
    (np.full(4, np.nan), {}, "wanted 4 finite numbers above 0"),
    (np.ones(4), {"rope__scaling__factor": 2.0}, "beside llama.rope.scaling.type, wanted one of"),
])
def test_wrong_factors(tmp_path, factors, metadata, message):
    assert HEAD_DIM == 8
    path = written(tmp_path / "model.gguf", "llama",
                   {**LAYER, "rope_freqs.weight": factors.astype(np.float32)}, **metadata)
    with pytest.raises(ValueError, match=message):
        config_of(path)


def header(*, values=b"", count=0, tensors=b"", count_of_tensors=0, data=bytes(64)):
    start = b"GGUF" + struct.pack("<IQQ", 3, count_of_tensors, count) + values + tensors
    return start + bytes(-len(start) % 32) + data


def text(word):
    return struct.pack("<Q", len(word)) + word


def value(key, kind, content):
    return text(key) + struct.pack("<I", kind) + content


def tensor(name, shape, kind=0, start=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


HUGE = 2**64 - 1
ENDS = "a file that ends before what it has said"
FILES = [
    (header(count=HUGE), "the key '' twice"), (header(count=HUGE, data=b""), ENDS),
    (header(count_of_tensors=HUGE, data=b""), ENDS),
    (header(values=struct.pack("<Q", HUGE), count=1), f"a name of {HUGE} bytes"),
    (header(values=value(b"a", 8, struct.pack("<Q", HUGE)), count=1), ENDS),
    (header(values=value(b"a", 8, struct.pack("<Q", 1 << 40)), count=1), ENDS),
    (header(values=value(b"a", 9, struct.pack("<IQ", 8, HUGE)), count=1), f"an array of {HUGE} te"),
    (header(values=value(b"a", 9, struct.pack("<IQ", 8, 1 << 23)), count=1), ENDS),
    (header(values=value(b"a", 9, struct.pack("<IQ", 4, HUGE)), count=1), ENDS),
    (header(values=value(b"a", 9, struct.pack("<IQ", 9, 1) * 1000), count=1),
     "an array of values of type 9"),
    (header(values=value(b"a", 13, b""), count=1), "a value of type 13"),
    (header(values=value(b"a", 0, b"\1") * 2, count=2), "the (key|array) 'a' twice"),
    (header(values=value(b"\xff", 0, b"\1"), count=1), "codec"),
    (header(values=value(b"general.alignment", 4, struct.pack("<I", 0)), count=1), "no power of"),
    (header(values=value(b"general.alignment", 4, struct.pack("<I", 48)), count=1), "no power of"),
    (header(values=value(b"general.alignment", 8, text(b"32")), count=1), "no power of two"),
    (header(tensors=tensor(b"a", [1] * 5), count_of_tensors=1), "a of 5 axes"),
    (header(tensors=tensor(b"a", [HUGE, HUGE]), count_of_tensors=1), "a, which ends at byte"),
    (header(tensors=tensor(b"a", [17]), count_of_tensors=1), "which ends at byte 132, in 128"),
    (header(tensors=tensor(b"a", [4], start=HUGE), count_of_tensors=1), "a, which ends at byte"),
    (header(tensors=tensor(b"a", [31], kind=8), count_of_tensors=1), "whose rows are no blocks"),
    (header(tensors=tensor(b"a", [], kind=8), count_of_tensors=1), "whose rows are no blocks"),
    (header(tensors=tensor(b"a", [4]) * 2, count_of_tensors=2), "the (key|array) 'a' twice"),
    (header(tensors=tensor(b"a", [8]) + tensor(b"b", [4], start=28), count_of_tensors=2),
     "b within the bytes of a"),
    (header(tensors=tensor(b"a", [8], start=1) + tensor(b"b", [1]), count_of_tensors=2),
     "a within the bytes of b"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=range(len(FILES)))
def test_headers_that_do_not_fit_together(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        mha.parameters.open(tmp_path / "bad.gguf")
    assert str(raised.value).startswith(f"{tmp_path / 'bad.gguf'}: got ")


def test_headers_that_do(tmp_path):
    tensors = (tensor(b"\xc3\xa9", [2, 3]), tensor(b"point", [], start=24),
               tensor(b"none", [5, 0], start=60), tensor(b"blocks", [32], kind=99, start=28),
               tensor(b"wide", [2**62, 0, 2**62], start=60))
    (tmp_path / "model.gguf").write_bytes(header(
        values=value(b"general.alignment", 4, struct.pack("<I", 64)), count=1,
        tensors=b"".join(tensors), count_of_tensors=len(tensors), data=bytes(128)))
    with mha.parameters.open(tmp_path / "model.gguf") as file:
        shapes = {name: file[name].shape for name in ("\u00e9", "point", "none")}
        assert shapes == {"\u00e9": (3, 2), "point": (), "none": (0, 5)}
        with pytest.raises(ValueError, match=r"got blocks of type number 99, wanted one of F64"):
            file["blocks"]
        with pytest.raises(ValueError, match=r"model\.gguf: got wide: "):
            file["wide"]
        assert file.config is None


def test_a_text_that_is_none(tmp_path):
    """It is wrong when it is asked for."""
    (tmp_path / "model.gguf").write_bytes(header(values=value(b"a", 8, text(b"\xff")), count=1))
    metadata = mha.parameters.open(tmp_path / "model.gguf").metadata
    with pytest.raises(ValueError, match=r"model\.gguf: got a: 'utf-8' codec can't decode"):
        metadata["a"]
