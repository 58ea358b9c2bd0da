"""python -m mha view weights.npz: the page of `mha.view.model` for weights in a file."""

import argparse
import math
import re
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from mha import view
from mha._base.arguments import printable
from mha.parameters._files import Npy, Npz, Numpys
from mha.parameters._regular_files import open_regular

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
MOST_WORDS = 100_000  # each is an object


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
    path = options.weights
    title = path.stem if options.title is None else options.title
    try:
        output = options.output or path.with_suffix(".html")
        layers, tokens, key_tokens = read(path, options.batch is not None)
        page = view.model(layers, tokens, key_tokens, batch=options.batch or 0, title=title)
        if output.exists() and output.samefile(path):
            raise ValueError("got the same file as page, wanted another --output")
        page.save(output)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(_printable(f"{path}: {str(error).removeprefix(f'{printable(str(path))}: ')}"))
    except MemoryError:
        sys.exit(_printable(f"{path}: got more than the memory holds, wanted fewer weights"))
    said = _printable(f"{output}: {len(page.html) // 1000:,} kB; open it in a browser")
    coding = sys.stdout.encoding or "utf-8"
    print(said.encode(coding, "backslashreplace").decode(coding))
    if options.open:
        webbrowser.open(output.resolve().as_uri())


def _printable(text: str) -> str:
    """Lines that a terminal shows and does not obey, whatever names are in them."""
    return "\n".join(map(printable, text.split("\n")))


def read(path: Path, has_batch: bool,
         ) -> tuple[list[NDArray[Any]], list[object], list[object] | None]:
    """(the weights of each layer, tokens, key_tokens) of a file; tokens are numbers by default."""
    with _opened(str(path)) as arrays:
        layers = [arrays[name] for name in _of_weights(arrays, has_batch)]
        if len(layers) == 1 and layers[0].ndim == 4 and not has_batch:
            layers = list(layers[0])
        if not layers or layers[0].ndim < 2:
            raise ValueError(f"got no matrix of weights.\n{FILE}")
        words = {name: arrays[name].ravel().tolist() for name in WORDS if name in arrays}
    query_len, key_len = layers[0].shape[-2:]
    tokens = words.get("tokens", list(range(query_len)))
    return layers, tokens, words.get("key_tokens", None if query_len == key_len or
                                     len(tokens) == key_len else list(range(key_len)))


def _opened(path: str) -> Numpys:
    with open_regular(path) as file:
        is_archive = file.read(2) == b"PK"
    return Npz(path) if is_archive else Npy(path, "weights")


def _of_weights(arrays: Numpys, has_batch: bool) -> list[str]:
    """The names of all arrays but the words, in order. What is larger than can be shown is refused
    by what the file says of it, before it is read."""
    longest, left, numbers = 0, MOST_BYTES, view.MOST_WEIGHTS
    names = sorted(set(arrays) - set(WORDS), key=_in_order)
    if not names:
        raise ValueError(f"got no weights, wanted arrays of them.\n{FILE}")
    for name in (*names, *(word for word in WORDS if word in arrays)):
        header = arrays.header(name)
        left -= header.nbytes
        one_item = header.shape[-3:] if has_batch or len(names) > 1 else header.shape
        numbers -= math.prod(one_item)
        if left < 0 or numbers < 0:
            raise ValueError(f"{name}: got shape {header.shape}, with what the file holds before"
                             " more than a page can show; save some layers, or of a batch one item,"
                             " in a file of its own")
        if name not in WORDS:
            longest = max(longest, *header.shape[-2:], 0)
        elif math.prod(header.shape) > longest:
            raise ValueError(f"{name}: got shape {header.shape}, wanted a word for each of at most"
                             f" {longest} queries or keys")
    if longest > MOST_WORDS:
        raise ValueError(f"got weights of {longest:,} queries or keys, wanted at most"
                         f" {MOST_WORDS:,}: more than a page can show")
    return names


def _in_order(name: str) -> list[object]:
    """layer_2 before layer_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", name)]
