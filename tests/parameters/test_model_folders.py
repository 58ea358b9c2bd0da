"""mha.parameters.open of a model's folder or index, configs by their path, and files of other kinds
than their names say."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from layouts import error_of, layer_of
from test_parameter_files import write

import mha

from_state = mha.MultiHeadAttention.from_state
PREFIX = "model.layers.{layer}.self_attn."
CONFIG = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 10, "rms_norm_eps": 1e-5, "rope_theta": 500.0}


def model(folder, shards=1, config=CONFIG):
    """The layers of a model that is written into the folder as one file or as shards."""
    layers = [layer_of("qwen3", seed=seed) for seed in range(3)]
    states = [layer.to_state("qwen3", prefix=PREFIX.replace("{layer}", str(index)))
              for index, layer in enumerate(layers)]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write(folder / "model.safetensors", {**states[0], **states[1], **states[2]})
        return layers
    where = {}
    for index, state in enumerate(states):
        file = f"model-0000{index + 1}-of-00003.safetensors"
        write(folder / file, state)
        where |= dict.fromkeys(state, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": 1}, "weight_map": where}))
    return layers


def check(read, layers):
    assert len(read) == len(layers)
    for one, other in zip(read, layers, strict=True):
        assert repr(one) == repr(other)
        for name, parameter in other.parameters().items():
            np.testing.assert_array_equal(getattr(one, name), parameter)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_downloaded_model(tmp_path, shards):
    layers = model(tmp_path, shards)
    with mha.parameters.open(tmp_path) as state:
        assert state.config == CONFIG and len(state) == 18
        check(from_state(state, prefix=PREFIX), layers)
        check([from_state(state, prefix=PREFIX, layer_index=1)], layers[1:2])
        told = error_of(from_state, state, "qwen3", prefix=PREFIX, config={})
        assert "got none for 'rms_norm_eps'" in told
        other = from_state(state, prefix=PREFIX, config={**CONFIG, "rope_theta": 7.0})
        assert other[0].rotary.base == 7.0


def test_the_index_itself(tmp_path):
    layers = model(tmp_path, 3)
    with mha.parameters.open(str(tmp_path / "model.safetensors.index.json")) as state:
        assert state.config is None
        check(from_state(state, prefix=PREFIX, config=tmp_path / "config.json"), layers)
        check(from_state(state, prefix=PREFIX, config=str(tmp_path)), layers)
        assert repr(state).startswith("<18 arrays of '")
        with pytest.raises(KeyError):
            state["nothing"]


def test_a_folder_of_one_file_by_another_name_and_without_a_config(tmp_path):
    layers = model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "config.json").unlink()
    with mha.parameters.open(tmp_path) as state:
        assert state.config is None
        check(from_state(state, "qwen3", prefix=PREFIX, config=CONFIG), layers)
    write(tmp_path / "another.safetensors", {"a": np.ones(3)})
    assert ("got a folder with adapter_model.safetensors, another.safetensors, wanted the path of"
            " one of them") in error_of(mha.parameters.open, tmp_path)
    write(tmp_path / "model.safetensors", {"a": np.ones(3)})
    assert list(mha.parameters.open(tmp_path)) == ["a"]


def test_metas_config_is_another(tmp_path):
    layer = layer_of("llama_meta")
    write(tmp_path / "consolidated.safetensors", layer.to_state("llama_meta", prefix="a."))
    (tmp_path / "params.json").write_text(json.dumps(
        {"dim": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 10, "rope_theta": 500.0}))
    with mha.parameters.open(tmp_path) as state:
        check([from_state(state, "llama_meta", prefix="a.")], [layer])
        check([from_state(state, "llama_meta", prefix="a.", config=tmp_path)], [layer])


@pytest.mark.parametrize(("files", "message"), [
    ({}, "got a folder without .safetensors, wanted the folder of a model"),
    ({"pytorch_model.bin": b""}, "got a folder with pytorch_model.bin and no .safetensors, wanted"),
    ({"pytorch_model.bin.index.json": b"{}", "pytorch_model-1.bin": b""},
     "to convert it: safetensors.torch.save_file(torch.load(path, weights_only=True)"),
    ({"a.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"},
     "a.safetensors: got a pointer of Git LFS, which stands for the file, wanted the file itself: "
     "git lfs pull"),
    ({"a.safetensors.index.json": b"version https://git-lfs.github.com/spec/v1\n"}, "of Git LFS"),
    ({"a.safetensors.index.json": b"[]"}, "got JSON of a list, wanted names with values"),
    ({"a.safetensors.index.json": b"{}"}, "got no weight_map of names and files"),
    ({"a.safetensors.index.json": b'{"weight_map": {"a": 3}}'}, "got no weight_map"),
    ({"a.safetensors.index.json": b"{" * 10**6}, "wanted a file that fits together"),
    ({"a.safetensors.index.json": b'{"a":' * 10**5}, "wanted a file that fits together"),
    ({"a.safetensors.index.json": b'{"weight_map": {"a": "x", "a": "y"}}'}, "a name twice"),
    ({"a.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}'},
     "got the shard '../b.safetensors', wanted .safetensors files beside the index"),
    ({"a.safetensors.index.json": b'{"weight_map": {"a": "/b.safetensors"}}'}, "got the shard '/"),
    ({"a.safetensors.index.json": rb'{"weight_map": {"a": "..\\b.safetensors"}}'}, "got the shard"),
    ({"a.safetensors.index.json": b'{"weight_map": {"a": "b.bin"}}'}, "; to convert: safetensors."),
    ({"a.safetensors": b"good", "config.json": b"{"}, "config.json: got Expecting property name"),
    ({"a.safetensors": b"good", "config.json": b"<html>"}, "config.json: got a page of HTML"),
    ({"a.safetensors": b"good", "a.safetensors.index.json":
      b'{"weight_map": {"\\u001b[2Jw": "a.safetensors"}}'},
     r"index.json: got \x1b[2Jw in a.safetensors, which has no such array, wanted shards that"),
])
def test_folders_that_are_wrong(tmp_path, files, message):
    for name, content in files.items():
        if content == b"good":
            write(tmp_path / name, {"a": np.ones(3)})
        else:
            (tmp_path / name).write_bytes(content)
    told = error_of(mha.parameters.open, tmp_path)
    assert message in told and told.isprintable(), told


def test_a_shard_that_is_missing(tmp_path):
    model(tmp_path, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of" in error_of(mha.parameters.open, tmp_path, kind=FileNotFoundError)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "got an empty file, wanted the whole file"),
    (b"version https://git-lfs.github.com/spec/v1\noid", "got a pointer of Git LFS"),
    (b"\n <!DOCTYPE html><html>", "got a page of HTML, wanted the file itself: a server sends"),
    (b"<html><body>404", "got a page of HTML"), (b"<?xml version='1.0'?><Error>", "got XML"),
    (b'{"error": "Repository not found"}', "got JSON, wanted the file itself"),
    (b"GGUF\x03\0\0\0\1", "got a GGUF file"), (b"\x89HDF\r\n\x1a\n", "got an HDF5 file"),
    (b"PK\x03\x04\x14\0\0\0", "got a zip archive, as numpy.savez and torch.save write"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF", "got a pickle, as torch.save wrote, wanted safetensors.torch"),
    (b"\x1f\x8b\x08\0\1\2\3\4", "got a gzip archive"), (b"\x93NUMPY\x01\0v\0", "got an .npy file"),
    (b"\x7b\0\0\0\0\0\0\0", "wanted a file that fits together"),
    (b'{"\0\0\0\0\0\0[]', "wanted a file that fits together"),
])
def test_what_a_file_is_that_is_no_safetensors(tmp_path, content, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    told = error_of(mha.parameters.open, path)
    assert told.startswith(f"{path}: ") and message in told, told


@pytest.mark.parametrize(("content", "message"), [
    (b"version https://git-lfs.github.com/spec/v1\noid", "got a pointer of Git LFS"),
    (b"<!doctype HTML>", "got a page of HTML"), (b"PK\x03\x04 torn", "not a zip file"),
    (b"\x93NUMPY\x01\0v\0", "got an .npy file, wanted numpy.savez")])
def test_what_a_file_is_that_is_no_npz(tmp_path, content, message):
    (tmp_path / "a.npz").write_bytes(content)
    assert message in error_of(mha.parameters.open, tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "config.json"])
@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a device of links"])
def test_only_regular_files_are_read(tmp_path, name, kind):
    """In a child: what waits for ever must not stop the tests."""
    path = tmp_path / name
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        (tmp_path / "b").symlink_to("/dev/zero")
        path.symlink_to(tmp_path / "b")
    call = (f"mha.MultiHeadAttention.from_state({{}}, config={str(path)!r})"
            if name == "config.json" else f"mha.parameters.open({str(path)!r})")
    done = subprocess.run([sys.executable, "-c", f"import mha; {call}"], capture_output=True,
                          text=True, timeout=60)
    kind = "a FIFO" if kind == "a FIFO" else "a device"
    assert done.stderr.endswith(f"ValueError: {path}: got {kind}, wanted a regular file\n")


def test_configs_by_a_path_that_is_wrong(tmp_path):
    state = layer_of("qwen3").to_state("qwen3")
    told = error_of(from_state, state, config=tmp_path)
    assert told == (f"{tmp_path}: got a folder without config.json or params.json, wanted the"
                    " folder of a model")
    assert "none.json" in error_of(from_state, state, config=str(tmp_path / "none.json"),
                                   kind=FileNotFoundError)
    (tmp_path / "config.json").write_bytes(b" " * (2**26 + 1))
    assert "got more than 67108864 bytes" in error_of(from_state, state, config=tmp_path)
