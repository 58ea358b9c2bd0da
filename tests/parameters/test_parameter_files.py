"""mha.parameters.open: what a file holds, lazily, and hostile files."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import ChainMap

import numpy as np
import pytest
from half_types import BFLOAT16
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mha

NAMES = {np.dtype(dtype): name for name, dtype in (
    ("F64", "f8"), ("F32", "f4"), ("F16", "f2"), ("BF16", BFLOAT16), ("I64", "i8"), ("U8", "u1"),
    ("BOOL", "?"))}
fuzzed = settings(max_examples=100, deadline=None, derandomize=True,
                  suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_raw(path, header, data=b"", length=None):
    """A .safetensors file of these bytes."""
    length = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", length % 2**64) + header + data)
    return path


def described(arrays):
    """The header and the bytes of a .safetensors file of these arrays."""
    header, data = {}, b""
    for name, array in arrays.items():
        start = len(data)
        data += np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [start, len(data)]}
    return header, data


def write(path, arrays):
    header, data = described(arrays)
    return write_raw(path, json.dumps(header).encode(), data)


def arrays_of(dtypes):
    """None is negative, which AArch64 says is invalid for an unsigned integer."""
    rng = np.random.default_rng(0)
    return {f"layer.{index}.weight": abs(4 * rng.standard_normal((index + 1, 3))).astype(dtype)
            for index, dtype in enumerate(dtypes)}


def assert_equal(read, arrays):
    assert list(read) == list(arrays) and len(read) == len(arrays)
    for name, array in arrays.items():
        assert name in read and read[name].dtype == array.dtype
        assert read[name].shape == array.shape and read[name].tobytes() == array.tobytes()
        read[name][...] = 0  # its own: what was read can be written
        assert read[name].tobytes() == array.tobytes()


def test_safetensors_of_every_type(tmp_path):
    arrays = arrays_of(NAMES) | {"empty": np.zeros((0, 3), np.float32),
                                 "scalar": np.array(3.0)}
    read = mha.parameters.open(write(tmp_path / "a.safetensors", arrays))
    assert_equal(read, arrays)
    assert "nothing" not in read
    with pytest.raises(KeyError):
        read["nothing"]
    assert repr(read).startswith("<9 arrays of '")


def test_metadata_is_no_array(tmp_path):
    header, data = described(arrays_of([np.float32]))
    header = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    assert list(mha.parameters.open(write_raw(tmp_path / "a.SafeTensors", header, data))) == [
        "layer.0.weight"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_every_type(tmp_path, save):
    dtypes = [np.float32, np.float64, np.float16, np.int8, np.dtype(">f4")]
    arrays = arrays_of(dtypes) | {"columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
                                  "empty": np.zeros((0, 3), np.float32), "scalar": np.array(3.0)}
    save(tmp_path / "a.npz", **arrays)
    with mha.parameters.open(str(tmp_path / "a.npz")) as read:
        assert_equal(read, arrays)
        first = read["columns"]
    np.testing.assert_array_equal(first, arrays["columns"])
    with pytest.raises(ValueError, match="closed"):
        read["columns"]


def test_a_layer_goes_to_a_file_and_back(tmp_path):
    layers = [mha.MultiHeadAttention(8, 2, rng=seed, dtype=BFLOAT16) for seed in range(2)]
    states = [layer.to_state("llama", prefix=f"model.layers.{index}.self_attn.")
              for index, layer in enumerate(layers)]
    paths = [write(tmp_path / f"{index}.safetensors", state) for index, state in enumerate(states)]
    shards = ChainMap(*map(mha.parameters.open, paths))
    read = mha.MultiHeadAttention.from_state(
        shards, "llama", prefix="model.layers.{layer}.self_attn.", num_heads=2, rotary=None)
    for layer, again in zip(layers, read, strict=True):
        assert again.dtype == BFLOAT16
        for name, parameter in layer.parameters().items():
            assert again.parameters()[name].tobytes() == parameter.tobytes()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_bfloat16_goes_through_numpys_files(tmp_path, save):
    layer = mha.MultiHeadAttention(8, 2, rng=0, dtype=BFLOAT16)
    save(tmp_path / "a.npz", **layer.to_state("bert"))
    with mha.parameters.open(tmp_path / "a.npz") as state:
        assert state["self.key.weight"].dtype == BFLOAT16
        again = mha.MultiHeadAttention.from_state(state, "bert", num_heads=2)
    assert again.dtype == BFLOAT16 and again.W_q.tobytes() == layer.W_q.tobytes()
    with np.load(tmp_path / "a.npz") as state:  # NumPy alone does not know
        told = r"float64; NumPy writes bfloat16 so: mha\.parameters\.open reads it back, or array"
        with pytest.raises(ValueError, match=told):
            mha.MultiHeadAttention.from_state(state, "bert", num_heads=2)
    save(tmp_path / "b.npz", **layer.parameters())
    with np.load(tmp_path / "b.npz") as state, pytest.raises(
            TypeError, match=r"W_q: got an array of \|V2, wanted bfloat16; NumPy writes bfloat16"):
        layer.load_parameters(state)
    with mha.parameters.open(tmp_path / "b.npz") as state:
        layer.load_parameters(state)


def test_flax_from_a_file_of_flat_names(tmp_path):
    layer = mha.MultiHeadAttention(8, 2, rng=0)
    state = layer.to_state("flax")
    np.savez(tmp_path / "a.npz", **{f"{one}.{two}": array for one, of in state.items()
                                    for two, array in of.items()})
    with mha.parameters.open(tmp_path / "a.npz") as read:
        again = mha.MultiHeadAttention.from_state(read, "flax")
    np.testing.assert_array_equal(again.W_o, layer.W_o)


def test_one_layer_of_10_gb_is_read_without_the_rest(tmp_path):
    """While the process never holds 16 MB more, from a file with a hole."""
    layer = mha.MultiHeadAttention(64, 2, rng=0)
    state = layer.to_state("bart", prefix="last.")
    header, data = described(state)
    hole = 10 * 2**30
    for tensor in header.values():
        tensor["data_offsets"] = [hole + offset for offset in tensor["data_offsets"]]
    header = json.dumps({"first": {"dtype": "F32", "shape": [hole // 4], "data_offsets": [0, hole]},
                         **header}).encode()
    path = write_raw(tmp_path / "large.safetensors", header)
    with path.open("r+b") as file:
        file.seek(8 + len(header) + hole)
        file.write(data)
    program = f"""
import mha, tracemalloc
tracemalloc.start()
with mha.parameters.open({str(path)!r}) as state:
    layer = mha.MultiHeadAttention.from_state(state, "bart", prefix="last.", num_heads=2)
print(layer.W_q.tobytes() == bytes.fromhex({layer.W_q.tobytes().hex()!r}),
      tracemalloc.get_traced_memory()[1] < 2**24)"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "True True\n", run.stderr
    path.unlink()


def test_bfloat16_without_ml_dtypes(tmp_path):
    layer = mha.MultiHeadAttention(8, 2, rng=0, dtype=BFLOAT16)
    path = write(tmp_path / "a.safetensors", layer.to_state("bert"))
    x = np.ones((1, 3, 8), np.float32)
    program = f"""
import sys, mha, numpy as np
with mha.parameters.open({str(path)!r}) as state:
    layer = mha.MultiHeadAttention.from_state(state, "bert", num_heads=2)
output = layer(np.ones((1, 3, 8), np.float32))
print("ml_dtypes" in sys.modules, output.dtype, output.tobytes().hex())"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    wanted = layer(x).astype(np.float32).tobytes().hex()
    assert run.stdout.split() == ["False", "float32", wanted], run.stderr


def test_other_files(tmp_path):
    for path, kind, message in (
            (tmp_path / "a.bin", ValueError, r"to convert it: safetensors\.torch\.save_file"),
            (tmp_path / "a.dat", ValueError, r"a name that ends with \.safetensors, \.npz, \.g"),
            (3, TypeError, "int"),
            (b"a.npz", TypeError, "path: got bytes"),
            (tmp_path / "none.npz", FileNotFoundError, "none.npz"),
            (tmp_path / "none.safetensors", FileNotFoundError, "none.safetensors")):
        with pytest.raises(kind, match=message):
            mha.parameters.open(path)


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.safetensors", GOOD)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"wanted pip install safetensors"):
        mha.parameters.open(path)


# Hostile files

def tensor(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


TWICE = (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
         b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
HOSTILE = {
    "nothing": (None, b"", 0), "a header that is too long": ({"a": tensor()}, b"\0" * 8, 10**9),
    "a header of 2**63 bytes": ({"a": tensor()}, b"\0" * 8, 2**63),
    "a header of 2**64 - 1 bytes": ({"a": tensor()}, b"\0" * 8, 2**64 - 1),
    "fewer bytes": ({"a": tensor()}, b"\0" * 7, None),
    "more bytes": ({"a": tensor()}, b"\0" * 9, None),
    "offsets out of range": ({"a": tensor(offsets=(8, 16))}, b"\0" * 8, None),
    "offsets backwards": ({"a": tensor(offsets=(8, 0))}, b"\0" * 8, None),
    "overlapping": ({"a": tensor(), "b": tensor()}, b"\0" * 8, None),
    "overlapping by half": ({"a": tensor(), "b": tensor(offsets=(4, 12))}, b"\0" * 12, None),
    "negative offsets": ({"a": tensor(offsets=(-8, 0))}, b"\0" * 8, None),
    "negative sizes": ({"a": tensor(shape=(-1, -2))}, b"\0" * 8, None),
    "sizes that overflow": ({"a": tensor(shape=(2**33, 2**33))}, b"\0" * 8, None),
    "sizes that wrap to what is there": ({"a": tensor(shape=(2**62, 4, 2))}, b"\0" * 8, None),
    "another type": ({"a": tensor(dtype="F31")}, b"\0" * 8, None),
    "a name twice": (TWICE, b"\0" * 8, None),
    "deep JSON": (b"[" * 10**6, b"", None),
    "deep JSON in a tensor": (b'{"a":{"x":' + b"[" * 10**5 + b"]" * 10**5 + b"}}", b"", None),
    "no JSON": (b"\xff" * 20, b"", None), "a list": (b"[]", b"", None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_safetensors_is_a_value_error(case, tmp_path):
    header, data, length = HOSTILE[case]
    if not isinstance(header, bytes):
        header = b"" if header is None else json.dumps(header).encode()
    path = write_raw(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(ValueError, match=r"a\.safetensors: got .*, wanted a file that fits"):
        mha.parameters.open(path)


@pytest.mark.parametrize("shape", [(0, 2**62), (2**40, 0, 2**40), (1,) * 70],
                         ids=["too long", "too large", "70 axes"])
def test_a_shape_that_numpy_does_not_have_is_an_error_when_it_is_read(tmp_path, shape):
    header = {"a": tensor(shape=shape, offsets=(0, 4 * (0 not in shape)))}
    path = write_raw(tmp_path / "a.safetensors", json.dumps(header).encode(),
                     b"\0" * 4 * (0 not in shape))
    with pytest.raises(ValueError, match=r"a\.safetensors: got a: .*, wanted a file that fits"):
        mha.parameters.open(path)["a"]


def test_a_type_that_numpy_does_not_know_is_an_error_when_it_is_read(tmp_path):
    header = {"a": tensor(shape=(8,), dtype="F8_E4M3"), "b": tensor(offsets=(8, 16))}
    path = write_raw(tmp_path / "a.safetensors", json.dumps(header).encode(), b"\0" * 16)
    read = mha.parameters.open(path)
    assert read["b"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="a of type F8_E4M3, wanted one of F64, F32"):
        read["a"]


@pytest.mark.parametrize("change", ["cut", "replaced", "written over"])
def test_a_file_that_changed_since_is_an_error(tmp_path, change):
    path = write(tmp_path / "a.safetensors", arrays_of([np.float32, np.float32]))
    read = mha.parameters.open(path)
    content = path.read_bytes()
    other = {"cut": content[:-4], "replaced": content, "written over": content[:-4] + b"1234"}
    if change == "replaced":
        (tmp_path / "b").write_bytes(content)
        (tmp_path / "b").replace(path)
    else:
        path.write_bytes(other[change])
        os.utime(path, ns=(0, 0))  # as if clocks were that fine
    with pytest.raises(ValueError, match=r"wanted mha\.parameters\.open once more"):
        read["layer.1.weight"]


def test_a_relative_path_stays_the_same_file(tmp_path, monkeypatch):
    arrays = arrays_of([np.float32])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.safetensors", arrays)
        arrays = {name: array + 1 for name, array in arrays.items()}
    monkeypatch.chdir(tmp_path / "one")
    read = mha.parameters.open("a.safetensors")
    wanted = dict(read)
    monkeypatch.chdir(tmp_path / "two")
    assert all(np.array_equal(read[name], array) for name, array in wanted.items())


def bytes_until_refused(path, message):
    """The most memory taken on the way to the error about array "a"."""
    with mha.parameters.open(path) as read:
        tracemalloc.start()
        with pytest.raises(ValueError, match=message):
            read["a"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_a_members_size_is_compared_before_it_is_read(tmp_path):
    large = npy_bytes(np.zeros(50_000_000, np.float32)).replace(b"(50000000,)", b"(2,)       ")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", large)
    del large
    message = r"200000000 bytes for shape \(2,\) of float32"
    assert bytes_until_refused(tmp_path / "a.npz", message) < 10_000_000


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_the_archive_claims_is_compared_with_the_file(tmp_path, method):
    header = header_of("{'descr': '|u1', 'fortran_order': False, 'shape': (2000000000,), }")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("a.npy", header + b"\0" * 100)
        member = archive.infolist()[0]
        member.file_size = len(header) + 2_000_000_000
        member.compress_size = member.file_size if method == zipfile.ZIP_STORED else 2_000_000
    message = r"a\.npz: got a: [0-9]{3} bytes that claim to be 20"
    assert bytes_until_refused(tmp_path / "a.npz", message) < 1_000_000


def test_names_that_a_terminal_would_obey_are_written_out(tmp_path):
    header = {"\x1b[31mred\t": tensor(shape=(8,), dtype="F8_E4M3", offsets=(0, 8))}
    path = write_raw(tmp_path / "a.safetensors", json.dumps(header).encode(), b"\0" * 8)
    state = mha.parameters.open(path)
    with pytest.raises(ValueError, match=r"got \\x1b\[31mred\\t of type F8_E4M3"):
        dict(state)
    with pytest.raises(ValueError, match=r"left over \\x1b\[31mred\\t"):
        mha.MultiHeadAttention.from_state(state, "pytorch", num_heads=2)


def npy_bytes(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def header_of(text):
    """The header of .npy with this text, and 8 bytes of data."""
    text = text.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) % 2**16) + text + b"\0" * 8


class Bomb:
    def __reduce__(self):
        return (print, ("unpickled",))


MEMBERS = {
    "pickled": npy_bytes(np.array([Bomb()], object), allow_pickle=True),
    "a pickle alone": pickle.dumps(Bomb()),
    "fewer bytes": npy_bytes(np.ones(3))[:-1], "more bytes": npy_bytes(np.ones(3)) + b"\0",
    "no magic": b"\0" * 200, "nothing": b"",
    "a header that is too long": header_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" + " " * 20000),
    "deep": header_of("(" * 5000 + ")" * 5000),
    "sizes that overflow": header_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }"),
    "sizes beyond the file": header_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"),
    "negative sizes": header_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -2), }"),
    "a size of -1": header_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }"),
    "code": header_of("__import__('os').abort()"),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_a_hostile_member_of_npz_is_a_value_error(case, tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("good.npy", npy_bytes(np.ones(3)))
        archive.writestr("bad.npy", MEMBERS[case])
    with mha.parameters.open(tmp_path / "a.npz") as read:
        assert read["good"].tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match=r"a\.npz: got bad: .*, wanted a file") as told:
            read["bad"]
    assert ("pickled Python objects" in str(told.value)) == (case == "pickled")
    assert not capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_archive_is_a_value_error(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.ones(100), b=np.ones(100))
    whole = path.read_bytes()
    for torn in (b"", whole[:-1], whole[:100], whole[100:], b"\0" * 100):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match=r"a\.npz: got"):
            dict(mha.parameters.open(path))
    with zipfile.ZipFile(path, "w") as archive:
        for _ in range(2):
            archive.writestr("a.npy", npy_bytes(np.ones(3)))
    with pytest.raises(ValueError, match="a name twice"):
        mha.parameters.open(path)
    path.write_bytes(whole.replace(np.ones(100).tobytes(), np.zeros(100).tobytes(), 1))
    with pytest.raises(ValueError, match="a: Bad CRC-32"):
        dict(mha.parameters.open(path))


def open_all(path):
    """Read every array of a file, or get the ValueError that it does not fit together."""
    try:
        with mha.parameters.open(path) as read:
            arrays = dict(read)
    except ValueError as error:
        message = str(error)
    else:
        message = f"{path}: fine"
        assert sum(array.nbytes for array in arrays.values()) <= 1032 * path.stat().st_size
    assert message.startswith(f"{path}: ")


GOOD = arrays_of([np.float32, BFLOAT16, np.float16])
edits = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 3), st.binary(max_size=9)),
                 min_size=1, max_size=4)


def edited(whole, changes):
    """Bytes put in the place of 0 to 3 others, here and there; the end cut off if that is 3."""
    for place, count, new in changes:
        place %= len(whole) + 1
        whole = whole[:place] + new + (whole[place + count:] if count < 3 else b"")
    return whole


@fuzzed
@given(changes=edits)
def test_fuzzed_bytes_of_safetensors(changes, tmp_path):
    path = write(tmp_path / "a.safetensors", GOOD)
    path.write_bytes(edited(path.read_bytes(), changes))
    open_all(path)


numbers = st.one_of(st.integers(-2, 40), st.sampled_from(
    [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 1.5, None, True, "2"]))
tensors = st.fixed_dictionaries({
    "dtype": st.sampled_from([*NAMES.values(), "F8_E4M3", "F4", "", None]),
    "shape": st.lists(numbers, max_size=3), "data_offsets": st.lists(numbers, min_size=1,
                                                                     max_size=3)})
headers = st.dictionaries(st.text(max_size=3), tensors, max_size=3)


@fuzzed
@given(header=headers, size=st.integers(0, 64), length=st.none() | st.integers(0, 2**64 - 1))
def test_fuzzed_headers_of_safetensors(header, size, length, tmp_path):
    text = json.dumps(header).encode()
    open_all(write_raw(tmp_path / "a.safetensors", text, b"\0" * size, length))


@fuzzed
@given(changes=edits, compressed=st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_bytes_of_npz(changes, compressed, tmp_path):
    path = tmp_path / "a.npz"
    (np.savez_compressed if compressed else np.savez)(path, **arrays_of([np.float32, np.int8]))
    path.write_bytes(edited(path.read_bytes(), changes))
    open_all(path)


@fuzzed
@given(descr=st.sampled_from(["<f4", "|O", "<f8", ">f2", "|V2", "<U3", "<M8[s]", "x", "", "<f4,O"]),
       shape=st.lists(numbers, max_size=3), order=st.sampled_from([True, False, 3]),
       size=st.integers(0, 64))
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_headers_of_npz(descr, shape, order, size, tmp_path):
    text = repr({"descr": descr, "fortran_order": order, "shape": tuple(shape)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header_of(text)[:-8] + b"\0" * size)
    open_all(tmp_path / "a.npz")


def test_a_bomb_is_not_unpacked(tmp_path):
    """A directory that claims more than deflate can hold."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.ones(1000))
    whole = path.read_bytes()
    size = struct.pack("<I", len(npy_bytes(np.ones(1000))))
    place = whole.rindex(size)
    path.write_bytes(whole[:place] + struct.pack("<I", 2**32 - 2) + whole[place + 4:])
    with pytest.raises(ValueError, match="bytes that claim to be 4294967294"):
        mha.parameters.open(path)["a"]
