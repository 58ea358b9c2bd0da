"""python -m mha view weights.npz: the page of `mha.view.model` for weights in a file."""

import argparse
import math
import re
import sys
import webbrowser
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mha import view

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FILE = """\
The file is what numpy.savez writes: tokens=[...] and, for cross-attention, key_tokens=[...] are
the words; every other array is the weights of a layer, (heads, query_len, key_len) or, with
--batch, (batch, heads, query_len, key_len), in the order of their names; or there is one of all
layers, (layers, heads, query_len, key_len).

    numpy.savez("weights.npz", weights=numpy.stack(weights_of_layers), tokens=tokens)
"""
WORDS = ("tokens", "key_tokens")
MOST_BYTES = 8 * view.MOST_WEIGHTS  # of all arrays of a file


def add_to(commands: "Commands") -> None:
    parser = commands.add_parser("view", help="make a page that shows attention weights",
                                 description=__doc__, epilog=FILE,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="the .npz file, described below")
    parser.add_argument("--output", type=Path,
                        help="the page (default: the file's name with .html)")
    parser.add_argument("--batch", type=int, help="which item, where arrays are batches")
    parser.add_argument("--title", help="the page's title (default: the file's name)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    title = options.weights.stem if options.title is None else options.title
    try:
        output = options.output or options.weights.with_suffix(".html")
        layers, tokens, key_tokens = read(options.weights, options.batch is not None)
        page = view.model(layers, tokens, key_tokens, batch=options.batch or 0, title=title)
        if output.exists() and output.samefile(options.weights):
            raise ValueError("got the same file as page, wanted another --output")
        page.save(output)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"{options.weights}: {error}")
    except MemoryError:
        sys.exit(f"{options.weights}: got more than the memory holds, wanted fewer weights")
    said = f"{output}: {len(page.html) // 1000:,} kB; open it in a browser"
    coding = sys.stdout.encoding or "utf-8"
    print(said.encode(coding, "backslashreplace").decode(coding))
    if options.open:
        webbrowser.open(output.resolve().as_uri())


def read(path: Path, has_batch: bool,
         ) -> tuple[list[NDArray[Any]], list[object], list[object] | None]:
    """(the weights of each layer, tokens, key_tokens) of a file; tokens are numbers by default."""
    try:
        arrays = dict(_arrays_of(path))
    except (OSError, ValueError):
        raise
    except Exception as error:  # a damaged archive raises whatever its decompressor does
        raise ValueError(f"cannot be read: {str(error) or type(error).__name__}") from error
    words = {name: np.ravel(arrays.pop(name)).tolist() for name in WORDS if name in arrays}
    layers = [arrays[name] for name in sorted(arrays, key=_in_order)]
    if not layers:
        raise ValueError(f"got no weights, wanted arrays of them.\n{FILE}")
    if len(layers) == 1 and layers[0].ndim == 4 and not has_batch:
        layers = list(layers[0])
    if not layers or layers[0].ndim < 2:
        raise ValueError(f"got no matrix of weights.\n{FILE}")
    query_len, key_len = layers[0].shape[-2:]
    tokens = words.get("tokens", list(range(query_len)))
    return layers, tokens, words.get("key_tokens", None if query_len == key_len or
                                     len(tokens) == key_len else list(range(key_len)))


def _arrays_of(path: Path) -> list[tuple[str, NDArray[Any]]]:
    """The arrays of an .npz file, or the one of an .npy file; none is larger than can be shown."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            return [("weights", _array(file, "weights", MOST_BYTES))]
    found = []
    left = MOST_BYTES
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".npy"):
                with archive.open(name) as member:
                    array = _array(member, name, left)
                found.append((name.removesuffix(".npy"), array))
                left -= array.nbytes
    return found


def _array(file: IO[bytes], name: str, most: int) -> NDArray[Any]:
    """The array, if its header says that it is of a size for a page."""
    version = npy.read_magic(file)
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = header(file)
    if math.prod(shape) * max(dtype.itemsize, 1) > most:
        raise ValueError(f"{name}: got shape {shape}, with what the file holds before more than a"
                         " page can show; save some layers, or of a batch one item, in a file of"
                         " its own")
    file.seek(0)
    return npy.read_array(file, allow_pickle=False)


def _in_order(name: str) -> list[object]:
    """layer_2 before layer_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", name)]
