"""Files of arrays as mappings: .safetensors and .npz. Opening one reads its names; each array is
read when it is asked for. Nothing is unpickled, and no size that a file claims is believed before
it is compared with the file's own."""

from __future__ import annotations

import builtins
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mha.arguments import printable
from mha.half_precision import RAW_BFLOAT16, shown_dtype

Array = NDArray[Any]

# What safetensors calls the types that arrays can have; its other ones NumPy does not know.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
         "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
         "BOOL": "?", "C64": "<c8"}
MOST_BY_DEFLATE = 1032  # bytes that a compressed one can stand for
PIECE = 1 << 20  # bytes of a member that are read at once
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Arrays(Mapping[str, Array]):
    """The arrays of a file by name, each read anew when it is asked for."""

    is_lazy: ClassVar = True
    _names: Mapping[str, Any]

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Array:
        return self._read(name, self._names[name])

    def _read(self, name: str, where: Any) -> Array:
        raise NotImplementedError

    def close(self) -> None:
        """Give the file back; arrays that were read stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{len(self)} arrays of {self._path!r}>"


class Tensor(NamedTuple):
    """Where an array of a .safetensors file is."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class Safetensors(Arrays):
    """The safetensors package checks the header; bytes are read here, since it needs ml_dtypes for
    bfloat16, and crashes where a file has been cut since."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError("safetensors: got no package to check such files with, wanted"
                              " pip install safetensors") from error
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise wrong(path, error) from error
        self._absolute = os.path.abspath(path)
        with builtins.open(path, "rb") as file:
            self._identity = _identity(file)
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
        try:
            described = json.loads(header, object_pairs_hook=_each_name_once)
        except ValueError as error:
            raise wrong(path, error) from error
        described.pop("__metadata__", None)
        self._names = {name: Tensor(tensor["dtype"], tuple(tensor["shape"]),
                                    8 + length + tensor["data_offsets"][0])
                       for name, tensor in described.items()}

    def _read(self, name: str, where: Tensor) -> Array:
        if where.dtype not in TYPES:
            raise wrong(self._path, f"{name} of type {where.dtype}", f"one of {', '.join(TYPES)}")
        count = math.prod(where.shape)
        with builtins.open(self._absolute, "rb") as file:
            if _identity(file) != self._identity:
                raise wrong(self._path, "another file, or other bytes, than were opened",
                            "mha.parameters.open once more")
            array: Array = np.fromfile(file, TYPES[where.dtype], count, offset=where.start)
        if len(array) != count:
            raise wrong(self._path, f"{name} of {len(array)} numbers", f"{count}")
        if where.dtype == "BF16":
            known = shown_dtype(RAW_BFLOAT16)
            array = array.view(RAW_BFLOAT16 if isinstance(known, str) else known)
        try:
            return array.reshape(where.shape)
        except ValueError as error:  # no numbers, of a shape that NumPy does not have
            raise wrong(self._path, f"{name}: {error}") from error


def _identity(file: BinaryIO) -> tuple[int, ...]:
    """Of the file and its bytes: arrays are where the header said, in no other."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError(f"a name twice among {[name for name, _ in pairs][:12]}")
    return names


class Npz(Arrays):
    """What numpy.savez and savez_compressed write."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._length = os.path.getsize(path)
        try:
            self._archive = zipfile.ZipFile(path)
            self._names = _each_name_once([
                (member.filename.removesuffix(".npy"), member)
                for member in self._archive.infolist() if member.filename.endswith(".npy")])
        except Exception as error:  # of whatever bytes it may be
            raise wrong(path, error) from error

    def _read(self, name: str, where: zipfile.ZipInfo) -> Array:
        try:
            dtype, shape, by_columns, data = self._content(where)
            array: Array = np.frombuffer(data, dtype)
            return array.reshape(shape, order="F" if by_columns else "C")
        except MemoryError:
            raise
        except Exception as error:
            raise wrong(self._path, f"{name}: {error or type(error).__name__}") from error

    def _content(self, member: zipfile.ZipInfo) -> tuple[np.dtype[Any], tuple[int, ...], bool,
                                                         bytearray]:
        packed = min(member.compress_size, self._length)
        if member.file_size > MOST_BY_DEFLATE * (packed + 1):
            raise ValueError(f"{packed} bytes that claim to be {member.file_size}")
        with self._archive.open(member) as file:
            version = npy.read_magic(file)
            if version not in HEADERS:
                raise ValueError(f"version {version} of .npy, which is for records")
            try:
                shape, by_columns, dtype = HEADERS[version](file)
            except (MemoryError, RecursionError) as error:  # of a header that is nested too deep
                raise ValueError(str(error)) from error
            if dtype.hasobject:
                raise ValueError("pickled Python objects")
            size = dtype.itemsize * math.prod(shape)
            claimed = member.file_size - file.tell()
            if claimed != size:
                raise ValueError(f"{claimed} bytes for shape {shape} of {dtype}")
            data = bytearray(size)
            at = 0
            while piece := file.read(PIECE):  # to the end, which checks the sum of all bytes
                data[at:at + len(piece)] = piece
                at += len(piece)
            if at != size:
                raise ValueError(f"{at} bytes for shape {shape} of {dtype}")
            return dtype, shape, by_columns, data

    def close(self) -> None:
        self._archive.close()


KINDS: dict[str, Callable[[str], Arrays]] = {".safetensors": Safetensors, ".npz": Npz}


def opened(path: str | os.PathLike[str]) -> Arrays:
    """`mha.parameters.open`."""
    name = os.fspath(path) if hasattr(path, "__fspath__") else path
    if not isinstance(name, str):
        raise TypeError(f"path: got {type(name).__name__}, wanted text or a path")
    kind = os.path.splitext(name)[1].lower()
    if kind not in KINDS:
        raise ValueError(f"path: got {name!r}, wanted a name that ends with"
                         f" {' or '.join(KINDS)}")
    with builtins.open(name, "rb"):  # the system's own error, where it may not be read
        pass
    return KINDS[kind](name)


def wrong(path: str, got: object, wanted: str = "a file that fits together") -> ValueError:
    first_line = str(got).partition("\n")[0]  # NumPy goes on to advise allow_pickle=True
    return ValueError(f"{path}: got {printable(first_line)}, wanted {wanted}")
