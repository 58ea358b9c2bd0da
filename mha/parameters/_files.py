"""Files of arrays as mappings: .safetensors and .npz. Opening one reads its names; each array is
read when it is asked for. Nothing is unpickled, and no size that a file claims is believed before
it is compared with the file's own."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mha._base.dtypes import NUMPYS_BFLOAT16, RAW_BFLOAT16, shown_dtype
from mha.parameters._regular_files import each_name_once, not_read, open_regular, wrong

Array = NDArray[Any]

# What safetensors calls the types that arrays can have; its other ones NumPy does not know.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
         "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
         "BOOL": "?", "C64": "<c8"}
MOST_BY_DEFLATE = 1032  # bytes that a compressed one can stand for
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes
PIECE = 1 << 20  # bytes that are read at once, among them the whole header
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Arrays(Mapping[str, Any]):
    """The arrays of a file by name, each read anew when it is asked for."""

    is_lazy: ClassVar = True
    of_folder: Mapping[str, Any] | None = None  # the config of the model's folder
    _names: Mapping[str, Any]

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        return self._read(name, self._names[name])

    @property
    def config(self) -> Mapping[str, Any] | None:
        """That of the folder or the file, where it has one."""
        return self.of_folder

    def _read(self, name: str, where: Any) -> Any:
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
    """Where an array of a file is."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class PlainFile(Arrays):
    """A file in which the numbers of each array lie side by side, from a place on that its header
    tells."""

    _names: dict[str, Tensor]
    _types: ClassVar[Mapping[str, str]]  # what the file calls those that arrays can have
    _other_types: ClassVar = ""  # what else an error says that they can be

    def _remember(self, file: BinaryIO) -> None:
        """Arrays are where the header said, in no other file and in no other bytes."""
        self._absolute = os.path.abspath(self._path)
        self._identity = _identity(file)

    def _opened_again(self) -> BinaryIO:
        file = open_regular(self._absolute)
        if _identity(file) != self._identity:
            file.close()
            raise wrong(self._path, "another file, or other bytes, than were opened",
                        "mha.parameters.open once more")
        return file

    def _numbers(self, name: str, dtype: str, count: int, start: int) -> Array:
        with self._opened_again() as file:
            array: Array = np.fromfile(file, dtype, count, offset=start)
        if len(array) != count:
            raise wrong(self._path, f"{name} of {len(array)} numbers", f"{count}")
        return array

    def _shaped(self, name: str, array: Array, shape: tuple[int, ...]) -> Array:
        try:
            return array.reshape(shape)
        except ValueError as error:  # no numbers, of a shape that NumPy does not have
            raise wrong(self._path, f"{name}: {error}") from error

    def _read(self, name: str, where: Tensor) -> Any:
        if where.dtype not in self._types:
            raise wrong(self._path, f"{name} of type {where.dtype}",
                        f"one of {', '.join(self._types)}{self._other_types}")
        array = self._numbers(name, self._types[where.dtype], math.prod(where.shape), where.start)
        if where.dtype == "BF16":
            array = as_bfloat16(array)
        return self._shaped(name, array, where.shape)


class Safetensors(PlainFile):
    """The safetensors package checks the header; bytes are read here, since it needs ml_dtypes for
    bfloat16, and crashes where a file has been cut since."""

    _types = TYPES

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError("safetensors: got no package to check such files with, wanted"
                              " pip install safetensors") from error
        with open_regular(path) as file:
            try:
                with safe_open(path, framework="numpy"):
                    pass
            except SafetensorError as error:
                raise not_read(path, error, _is_length) from error
            self._remember(file)
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
        try:
            described = json.loads(header, object_pairs_hook=each_name_once)
        except ValueError as error:
            raise wrong(path, error) from error
        described.pop("__metadata__", None)
        self._names = {name: Tensor(tensor["dtype"], tuple(tensor["shape"]),
                                    8 + length + tensor["data_offsets"][0])
                       for name, tensor in described.items()}


def _is_length(start: bytes) -> bool:
    """Whether it may be that of a .safetensors file's header, which is never 2^32 bytes long."""
    return start[4:8] == b"\0\0\0\0"


def _identity(file: BinaryIO) -> tuple[int, ...]:
    """Of the file and its bytes."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def as_bfloat16(bits: Array) -> Array:
    known = shown_dtype(RAW_BFLOAT16)
    return bits.view(RAW_BFLOAT16 if isinstance(known, str) else known)


class Header(NamedTuple):
    """What the beginning of an .npy file says of its array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool
    data: bytes  # the first of the array's, which were read with the header
    size: int    # bytes of the header

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def header_of(file: IO[bytes]) -> Header:
    """Read from a file that stands at its beginning, of which no more than a piece is read."""
    start = io.BytesIO(file.read(PIECE))
    version = npy.read_magic(start)
    if version not in HEADERS:
        raise ValueError(f"version {version} of .npy, which is for records")
    try:
        shape, by_columns, dtype = HEADERS[version](start)
    except (MemoryError, RecursionError) as error:  # of a header that is nested too deep
        raise ValueError(str(error)) from error
    if dtype.hasobject:
        raise ValueError("pickled Python objects")
    if dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise ValueError(f"shape {shape} of {dtype}, which takes no bytes")
    size = start.tell()
    return Header(dtype, shape, by_columns, start.read(), size)


def array_of(file: IO[bytes], header: Header, length: int) -> Array:
    """The array behind the header, in a file of so many bytes."""
    dtype, shape, size = header.dtype, header.shape, header.nbytes
    if length - header.size != size:
        raise ValueError(f"{length - header.size} bytes for shape {shape} of {dtype}")
    data = bytearray(size)
    piece, at = header.data, 0
    while piece:  # to the end, which checks the sum of all bytes
        data[at:at + len(piece)] = piece
        at += len(piece)
        piece = file.read(PIECE)
    if at != size:
        raise ValueError(f"{at} bytes for shape {shape} of {dtype}")
    array: Array = np.frombuffer(data, dtype)
    if dtype == NUMPYS_BFLOAT16:
        array = as_bfloat16(array)
    return array.reshape(shape, order="F" if header.by_columns else "C")


class Numpys(Arrays):
    """Files of NumPy's: each array's header can be read alone."""

    def header(self, name: str) -> Header:
        """What is said of an array; none of it is read but what stands in the first piece."""
        try:
            with self._opened(self._names[name]) as file:
                return header_of(file)
        except Exception as error:
            raise self._wrong(name, error) from error

    def _read(self, name: str, where: Any) -> Array:
        try:
            with self._opened(where) as file:
                return array_of(file, header_of(file), self._length_of(where))
        except MemoryError:
            raise
        except Exception as error:
            raise self._wrong(name, error) from error

    def _wrong(self, name: str, error: Exception) -> ValueError:
        return wrong(self._path, f"{name}: {str(error) or type(error).__name__}")

    def _opened(self, where: Any) -> IO[bytes]:
        raise NotImplementedError

    def _length_of(self, where: Any) -> int:
        """Bytes of the header and the array."""
        raise NotImplementedError


class Npy(Numpys):
    """What numpy.save writes, by a name of one's own."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path)
        with open_regular(path) as file:
            length = os.fstat(file.fileno()).st_size
            if not file.read(len(npy.MAGIC_PREFIX)).startswith(npy.MAGIC_PREFIX):
                raise not_read(path, "a file of another kind", lambda start: False,
                               "what numpy.savez writes")
        self._names = {name: length}

    def _opened(self, where: int) -> IO[bytes]:
        return open_regular(self._path)

    def _length_of(self, where: int) -> int:
        return where


class Npz(Numpys):
    """What numpy.savez and savez_compressed write."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open_regular(path) as file:
            self._length = os.fstat(file.fileno()).st_size
        try:
            self._archive = zipfile.ZipFile(path)
            self._names = each_name_once([
                (member.filename.removesuffix(".npy"), member)
                for member in self._archive.infolist() if member.filename.endswith(".npy")])
        except Exception as error:  # of whatever bytes it may be
            raise not_read(path, error, lambda start: start.startswith(b"PK")) from error

    def _opened(self, where: zipfile.ZipInfo) -> IO[bytes]:
        if where.compress_type not in METHODS:
            raise ValueError("an array that is packed as NumPy packs none")
        packed = min(where.compress_size, self._length)
        if where.file_size > MOST_BY_DEFLATE * (packed + 1):
            raise ValueError(f"{packed} bytes that claim to be {where.file_size}")
        return self._archive.open(where)

    def _length_of(self, where: zipfile.ZipInfo) -> int:
        return where.file_size

    def close(self) -> None:
        self._archive.close()
