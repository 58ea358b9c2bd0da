"""Files of other people's, opened so that a name alone can do no harm: what may wait or never end
is refused, and what is no file of its kind is called by what it is."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

from mha._base.arguments import printable

MOST_JSON = 1 << 26  # bytes; the index of a model of 10^5 arrays has 2^23
OF_WINDOWS = getattr(os, "O_BINARY", 0)
LONGEST_START = 512  # bytes that tell what a file is
KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
         (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
OF_SERVERS = "the file itself: a server sends this instead where a link or a login is wrong"
# How other files begin, letters small: what they are, and what to do.
BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of Git LFS, which stands for the file",
     "the file itself: git lfs pull"),
    (b"<!doctype", "a page of HTML", OF_SERVERS), (b"<html", "a page of HTML", OF_SERVERS),
    (b"<head", "a page of HTML", OF_SERVERS), (b"<?xml", "XML", OF_SERVERS),
    (b"{", "JSON", OF_SERVERS),
    (b"gguf", "a GGUF file", "a name that ends with .gguf"),
    (b"\x89hdf", "an HDF5 file", "its arrays by numpy.savez"),
    (b"\x93numpy", "an .npy file", "numpy.savez, which gives arrays their names"),
    (b"pk\x03\x04", "a zip archive, as numpy.savez and torch.save write",
     "a name that ends with .npz, or for torch.save: {convert}"),
    (b"\x80\x02", "a pickle, as torch.save wrote", "{convert}"),
    (b"\x1f\x8b", "a gzip archive", "the file in it"))
CONVERT = ("safetensors.torch.save_file(torch.load(path, weights_only=True), \"model.safetensors\")"
           ", in PyTorch")


def open_regular(path: str) -> BinaryIO:
    """The file, to be read; a ValueError for a FIFO or a device, which may wait or never end."""
    # Opening a FIFO waits for somebody to write into it, without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | OF_WINDOWS | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((kind for is_one, kind in KINDS if is_one(mode)), "something else")
        raise wrong(path, kind, "a regular file")
    return os.fdopen(descriptor, "rb")


def wrong(path: str, got: object, wanted: str = "a file that fits together") -> ValueError:
    first_line = str(got).partition("\n")[0]  # NumPy goes on to advise allow_pickle=True
    return ValueError(f"{printable(path)}: got {printable(first_line)}, wanted {wanted}")


def not_read(path: str, error: object, is_right: Callable[[bytes], bool],
             wanted: str = "a file that fits together") -> ValueError:
    """The error for a file that cannot be read as what it should be: what it is, where it does not
    begin as is right and its first bytes tell, or else what went wrong."""
    with open_regular(path) as file:
        start = file.read(LONGEST_START)
    if not start:
        return wrong(path, "an empty file", "the whole file")
    letters = b"" if is_right(start) else start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, got, instead in BEGINNINGS:
        if letters.startswith(beginning):
            return wrong(path, got, instead.format(convert=CONVERT))
    return wrong(path, error, wanted)


def read_json(path: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict,
              ) -> dict[str, Any]:
    """The mapping in a JSON file."""
    with open_regular(path) as file:
        text = file.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise wrong(path, f"more than {MOST_JSON} bytes", "a config or an index")
    try:
        found = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise not_read(path, error, lambda start: start.lstrip().startswith(b"{")) from error
    if not isinstance(found, dict):
        raise wrong(path, f"JSON of a {type(found).__name__}", "names with values")
    return found


def each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError(f"a name twice among {[name for name, _ in pairs][:12]}")
    return names
