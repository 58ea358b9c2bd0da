"""Files that are wrong in random ways, and a program that reads them with little memory.

    python hostile_files.py SEED COUNT FOLDER

Each file is some kilobytes. What reads it may give arrays or a ValueError that begins with the
file's path, and nothing else: no other error, no memory beyond what its bytes can stand for.
"""

import io
import json
import random
import resource
import struct
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np

import mha
from mha.view import _command as command

MEMORY = 1 << 29  # bytes beyond those of the program that has imported all
WIDTH = 16
LETTERS = {letter: np.ones((WIDTH, WIDTH), np.float32) for letter in "qkvo"}
ARRAYS = {**{f"l.self_attn.{letter}_proj.weight": array for letter, array in LETTERS.items()},
          "ints": np.arange(3), "none": np.zeros((0, 5), np.float16)}
NAMES = {"float32": "F32", "int64": "I64", "float16": "F16"}
TYPES = ["F64", "F16", "BF16", "F8_E4M3", "F4", "C64", "BOOL", "X", "", None, 3]
SHAPES = [[], [-1, 16], [2**63, 0], [16, 16, 1], [0], [1.0], "x", None, [True], [2**64],
          [256] * 20, [1] * 70]
OFFSETS = [[0, 0], [0, 2**63], [-4, 0], [4, 0], [0], [1, 1025], "x", None, [0, 1024, 2048]]
DESCRIPTIONS = [
    "'<f4'", "'<f8'", "'>f4'", "'|O'", "'<U0'", "'|V0'", "'|S0'", "'<U3'", "'|b1'", "'<M8[s]'",
    "'<f2'", "'<c8'", "[('a', '<f4')]", "[('a', '<f4', (2,))]", "'V2'", "('<f4', (2,))", "'|u1'",
    "[('mha_bfloat16', '<u2')]", "('O', {'f': ('<f4', 0)})", "[['a']]", "None", "1", "'aaaaaaaa'",
    "{'names': ['a'], 'formats': ['<f4'], 'offsets': [2**31], 'itemsize': 2**31}", "'<U99999999'",
    "__import__('os')", "[('', '<f4')] * 5"]
MEMBER_SHAPES = [
    "(2, 2)", "(1, 2, 2)", "(2, 2, 2)", "()", "(0,)", "(4,)", "(-1,)", "(-2, -2)", "(2**62,)",
    "(4611686018427387904,)", "(0, 4611686018427387904)", "(1.0, 2)", "(True, 2)", "[2, 2]", "'x'",
    "(10000000000000000000000,)", "(2147483648, 2147483648, 0)", "(134217728,)", "(2, 2, None)",
    "(" + "1, " * 65 + ")", "(" + "2, " * 33 + ")"]
MEMBER_NAMES = ["w", "tokens", "key_tokens", "../x", "/abs", "a\0b", "layer_1", "\x1b[2J",
                "\u202e", "x" * 3000, "", "1" * 400, "W_q"]
METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def header_and_data():
    """Of a right .safetensors file."""
    header, data = {}, b""
    for name, array in ARRAYS.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {"dtype": NAMES[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [start, len(data)]}
    return header, data


def safetensors(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def wrong_header(draw):
    """A .safetensors file whose header says something else."""
    header, data = header_and_data()
    tensor = header[draw.choice(list(header))]
    kind = draw.randrange(9)
    if kind < 3:
        field, values = [("dtype", TYPES), ("shape", SHAPES), ("data_offsets", OFFSETS)][kind]
        tensor[field] = draw.choice(values)
    elif kind == 3:
        header[draw.choice(["__metadata__", "a\0b", "\ud800", "x" * 10000, ""])] = draw.choice(
            [{"a": "b"}, {"a": 1}, [], None,
             {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}])
    text = json.dumps(header).encode()
    if kind == 4:
        text = text.replace(b'"dtype"', b'"dtype": "F32", "dtype"', 1)
    elif kind == 5:
        text = text[:-1] + b"," + text[1:]
    elif kind == 6:
        text = draw.choice([b"[", b'{"a":']) * draw.choice([100, 200, 50000])
    elif kind == 7:
        text += b" " * draw.choice([1, 10**5])
    elif kind == 8:
        text = text.decode().encode("utf-16")
    return safetensors(text, data)


def member(draw):
    """An .npy file whose header and data are drawn apart."""
    shape = draw.choice(MEMBER_SHAPES)
    header = (f"{{'descr': {draw.choice(DESCRIPTIONS)}, 'fortran_order':"
              f" {draw.choice(['False', 'True', '1', 'None'])}, 'shape': {shape}, }}").encode()
    header += draw.choice([b"\n", b" " * 60 + b"\n", b"", b" " * 200000])
    version = draw.choice([1, 1, 1, 2, 3, 0, 255])
    length = struct.pack("<H", len(header) % 2**16) if version == 1 else struct.pack(
        "<I", draw.choice([len(header), 2**32 - 1]))
    data = draw.choice([b"", bytes(16), bytes(64), b"\xff" * 32, np.full(4, 0.5).tobytes(),
                        np.full(4, 0.5, "<f4").tobytes(), bytes(10**6)])
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def archive(draw):
    """An .npz file of such members."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw.choice(METHODS)) as into:
        for _ in range(draw.randrange(1, 4)):
            into.writestr(draw.choice(MEMBER_NAMES) + ".npy", member(draw))
    return made.getvalue()


def right_archive(draw):
    made = io.BytesIO()
    save = draw.choice([np.savez, np.savez_compressed])
    save(made, tokens=np.array(["a", "b"]), **LETTERS, w=np.full((1, 2, 2), 0.5))
    return made.getvalue()


def gguf_text(word):
    return struct.pack("<Q", len(word)) + word.encode()


def right_gguf():
    """A .gguf file with arrays of floats and of blocks, and metadata of some types."""
    values = [("general.architecture", 8, gguf_text("llama")),
              ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 9) + gguf_text("word") * 9),
              ("tokenizer.ggml.scores", 9, struct.pack("<IQ5f", 6, 5, *range(5))),
              *((f"llama.{key}", 4, struct.pack("<I", number)) for key, number in (
                  ("embedding_length", 256), ("attention.head_count", 2),
                  ("attention.head_count_kv", 2), ("context_length", 9), ("block_count", 1))),
              ("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
              ("llama.rope.scaling.type", 8, gguf_text("yarn")),
              ("llama.rope.scaling.factor", 6, struct.pack("<f", 2))]
    header, data = b"", b""
    for name, kind, numbers, nbytes in (
            ("attn_q", 8, 32, 34), ("attn_k", 2, 32, 18), ("attn_v", 12, 256, 144),
            ("attn_output", 14, 256, 210), ("ffn_up", 0, 1, 4), ("ffn_down", 10, 256, 84)):
        rows = 2 if name == "ffn_up" else 256
        header += gguf_text(f"blk.0.{name}.weight") + struct.pack("<IQQIQ", 2, 256, rows, kind,
                                                                  len(data))
        data += bytes(rows * 256 // numbers * nbytes)
    start = b"GGUF" + struct.pack("<IQQ", 3, 6, len(values)) + b"".join(
        gguf_text(key) + struct.pack("<I", kind) + value for key, kind, value in values) + header
    return start + bytes(-len(start) % 32) + data


def mutated_gguf(draw):
    """With changes in the header, where all sizes are."""
    whole = right_gguf()
    length = 1 + whole.index(bytes(1000))
    return mutated(draw, whole[:length]) + whole[length:]


def mutated(draw, content):
    """With some bytes changed, lost or put in between; most near both ends, where sizes are."""
    content = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        place = draw.choice([draw.randrange(len(content)), draw.randrange(min(len(content), 300)),
                             len(content) - 1 - draw.randrange(min(len(content), 120))])
        kind = draw.randrange(4)
        if kind == 0:
            content[place] = draw.randrange(256)
        elif kind == 1:
            content[place] ^= 1 << draw.randrange(8)
        elif kind == 2:
            content[place:place + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        else:
            content[place:place + 4] = struct.pack("<I", draw.choice([0, 2**32 - 1, 2**31, 1]))
        if not content:
            return b""
    return bytes(content[:draw.randrange(len(content) + 1)] if draw.random() < 0.1 else content)


def file_of(draw):
    """(how its name ends, its bytes)"""
    kind = draw.randrange(8)
    if kind > 5:
        return "gguf", mutated_gguf(draw)
    if kind == 0:
        return "safetensors", mutated(draw, safetensors(*header_and_data()))
    if kind == 1:
        return "safetensors", wrong_header(draw)
    if kind == 2:
        return "npz", mutated(draw, right_archive(draw))
    if kind == 3:
        return "npz", archive(draw)
    if kind == 4:
        return draw.choice(["npz", "npy"]), member(draw)
    return "npz", mutated(draw, archive(draw))


def open_all(path, draw):
    """Every array, and a layer of them; ValueErrors about an array or a layer are fine."""
    with mha.parameters.open(path) as read:
        for name in read:
            try:
                assert isinstance(np.asarray(read[name]), np.ndarray)
            except ValueError as error:
                assert str(error).startswith(f"{path}: ")  # noqa: PT017
        if hasattr(read, "metadata"):
            assert len(dict(read.metadata)) == len(read.metadata)
        is_gguf = path.suffix == ".gguf"
        layout = "llama" if is_gguf else draw.choice(mha.parameters.layouts())
        try:
            mha.MultiHeadAttention.from_state(read, layout, num_heads=2,
                                              prefix="blk.0." if is_gguf else "l.self_attn.")
        except ValueError as error:
            assert str(error).isprintable()  # noqa: PT017


def show(path, draw):
    try:
        layers, tokens, key_tokens = command.read(path, draw.random() < 0.2)
        mha.view.model(layers, tokens, key_tokens)
    except TypeError as error:
        assert "wanted real numbers" in str(error)  # noqa: PT017


def main(seed, count, folder):
    with open("/proc/self/statm", encoding="ascii") as sizes:
        taken = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    draw = random.Random(seed)
    warnings.simplefilter("ignore")
    for index in range(count):
        ending, content = file_of(draw)
        path = folder / f"{index % 10}.{ending}"
        path.write_bytes(content)
        for read in (open_all, show) if ending == "npz" else (
                (show,) if ending == "npy" else (open_all,)):
            try:
                read(path, draw)
            except ValueError:
                pass
            except BaseException as error:
                raise AssertionError(f"file {index} of seed {seed}, {path}") from error
    print(count, "read")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
