"""python -m mha view weights.npz: the page of `mha.view.model` for weights in a file."""

import argparse
import re
import sys
import webbrowser
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mha import view

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FILE = """\
The file is what numpy.savez writes: tokens=[...] and, for cross-attention, key_tokens=[...] are
the words; every other array is the weights of a layer, (heads, query_len, key_len) or with a batch
before, in the order of their names; or there is one of all layers, (layers, heads, query_len,
key_len).

    numpy.savez("weights.npz", weights=numpy.stack(weights_of_layers), tokens=tokens)
"""


def add_to(commands: "Commands") -> None:
    parser = commands.add_parser("view", help="make a page that shows attention weights",
                                 description=__doc__, epilog=FILE,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="the .npz file, described below")
    parser.add_argument("--output", type=Path,
                        help="the page (default: the file's name with .html)")
    parser.add_argument("--batch", type=int, default=0, help="which item of a batch (default: 0)")
    parser.add_argument("--title", help="the page's title (default: the file's name)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    output = options.output or options.weights.with_suffix(".html")
    try:
        layers, tokens, key_tokens = read(options.weights)
        page = view.model(layers, tokens, key_tokens, batch=options.batch,
                          title=options.title or options.weights.stem)
        page.save(output)
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        sys.exit(f"{options.weights}: {error}")
    print(f"{output}: {len(page.html) / 1e6:.1f} MB; open it in a browser")
    if options.open:
        webbrowser.open(output.resolve().as_uri())


def read(path: Path) -> tuple[list[NDArray[Any]], list[object], list[object] | None]:
    """(the weights of each layer, tokens, key_tokens) of a file; tokens are numbers by default."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        arrays = {"weights": loaded}
    else:
        with loaded:
            arrays = dict(loaded)
    words = {name: arrays.pop(name).tolist() for name in ("tokens", "key_tokens") if name in arrays}
    layers = [arrays[name] for name in sorted(arrays, key=_in_order)]
    if not layers:
        raise ValueError(f"got no weights, wanted arrays of them.\n{FILE}")
    if len(layers) == 1 and layers[0].ndim == 4:
        layers = list(layers[0])
    if layers and layers[0].ndim < 2:
        raise ValueError(f"got an array of {layers[0].ndim} axes, wanted weights.\n{FILE}")
    query_len, key_len = layers[0].shape[-2:]
    tokens = words.get("tokens", list(range(query_len)))
    return layers, tokens, words.get("key_tokens", None if query_len == key_len or
                                     len(tokens) == key_len else list(range(key_len)))


def _in_order(name: str) -> list[object]:
    """layer_2 before layer_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
