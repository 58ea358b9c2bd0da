"""Puts the page together: its skeleton, style and script lie beside this file."""

import base64
import html
import json
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

SCRIPTS = ("weights.js", "address.js", "colours.js", "keys.js", "grid.js", "lines.js",
           "heat_map.js", "viewer.js")
LARGEST_CODE = 65534  # of the largest weight
UNKNOWN = 65535       # NaN
PART = 1 << 20        # weights that are converted at a time


def data_of(layers: Sequence[NDArray[np.float64]], tokens: list[str],
            key_tokens: list[str] | None, title: str) -> str:
    """Layers of weights, (heads, query_len, key_len) each, as the JSON that the page reads."""
    largest = max(float(np.nanmax(weights, initial=0.0)) for weights in layers)
    scale = largest / LARGEST_CODE or 1.0
    packer = zlib.compressobj()
    packed = b"".join([*(packer.compress(_codes(part, scale).tobytes()) for weights in layers
                         for part in np.array_split(weights.ravel(), weights.size // PART + 1)),
                       packer.flush()])
    data: dict[str, object] = {
        "title": title, "tokens": tokens, "key_tokens": key_tokens, "scale": scale,
        "layers": [len(weights) for weights in layers],
        "weights": base64.b64encode(packed).decode()}
    # No text can end the script around it.
    return json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e")


def data_in(page: str) -> list[str]:
    """What `data_of` gave for each sentence of a page."""
    return re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)


def count_of(data: str) -> int:
    """The number of weights in what `data_of` gave."""
    read = json.loads(data)
    keys = read["key_tokens"] or read["tokens"]
    return sum(read["layers"]) * len(read["tokens"]) * len(keys)


def page_of(sentences: Sequence[str], title: str) -> str:
    """The page of one or more sentences, of which each is what `data_of` gives."""
    first, *others = sentences
    more = "\n".join(f'<script type="application/json" class="data">{data}</script>'
                     for data in others)
    parts = {"{title}": html.escape(title.encode(errors="replace").decode()),
             "{style}": _text("page.css"), "{data}": first, "{more}": more,
             "{script}": "\n".join(_text(name) for name in SCRIPTS)}
    page = _text("page.html")
    for name in sorted(parts, key=page.index, reverse=True):  # what is put in is not read again
        before, _, after = page.partition(name)
        page = before + parts[name] + after
    return page


def _codes(weights: NDArray[np.float64], scale: float) -> NDArray[np.uint16]:
    """Each weight as a multiple of scale, little-endian."""
    unknown = np.isnan(weights)
    codes = np.rint(np.where(unknown, 0.0, np.maximum(weights, 0.0)) / scale)
    codes = np.minimum(codes, LARGEST_CODE)  # the scale of subnormal numbers is a rough one
    codes[unknown] = UNKNOWN
    return codes.astype("<u2")


def _text(name: str) -> str:
    return (files("mha.view") / name).read_text("utf-8")
