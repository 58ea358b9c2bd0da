"""Attention to look into: a page of HTML with every layer and head, lines from token to token, and
heat maps.

`heads` shows one layer, `model` all of them, `several` puts such pages into one. What they return
shows itself in a notebook; elsewhere `save` writes the page, which holds its data and its script,
and asks no network for anything.
`python -m mha view weights.npz` makes a page of a file.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha.plot._labels import texts_of
from mha.plot._weights import check_sums, weights_of_item
from mha.view._page import count_of, data_in, data_of, page_of

__all__ = ["View", "heads", "model", "several"]

MOST_WEIGHTS = 100_000_000  # 200 MB in the browser


def __dir__() -> list[str]:
    return sorted(__all__)


class View:
    """A page of HTML; `heads`, `model` and `several` make it.

    html : str, the whole page. height : int, pixels of the frame in which a notebook shows it; what
    is in the frame can reach nothing around it.

    >>> page = mha.view.heads(weights, ["The", "cat", "sat"])
    >>> page.height = 500
    """

    def __init__(self, page: str, height: int) -> None:
        self.html = page
        self.height = height

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file; any browser of the last years opens it.

        >>> mha.view.heads(weights, ["The", "cat", "sat"]).save("heads.html")
        """
        if Path(path).suffix.lower() in (".png", ".pdf", ".svg", ".jpg", ".jpeg"):
            raise ValueError(f"path: got {os.fspath(path)}, wanted a page, as heads.html; pictures:"
                             " mha.plot.heads(weights, tokens).savefig")
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        return (f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-modals"'
                f' width="100%" height="{html.escape(str(self.height))}" style="border: 0"'
                ' title="attention weights"></iframe>')

    def __repr__(self) -> str:
        return f"<View, {len(self.html) // 1000:,} kB: a notebook shows it, .save(path) writes it>"


def heads(weights: ArrayLike, tokens: Sequence[object] | None = None,
          key_tokens: Sequence[object] | None = None, *, batch: int = 0,
          title: str = "Attention") -> View:
    """One layer's heads: thumbnails of all, lines from token to token or heat maps of those chosen.

    weights (batch, heads, query_len, key_len), of which one batch item is shown; or
    (heads, query_len, key_len), or (query_len, key_len). tokens: query_len of them, shown as text
    whatever they hold, by default their numbers; key_tokens: key_len, for cross-attention, by
    default the same. Weights are kept to 1/65,534 of the largest; NaN stays NaN.

    Raises ValueError for a shape, a number of tokens or an index that does not fit and for numbers
    that are no weights, as an output's; TypeError for a tuple, as calls return.

    >>> output, weights = layer(x, return_weights=True)
    >>> mha.view.heads(weights, ["The", "cat", "sat"]).save("heads.html")
    """
    return _view([weights], tokens, key_tokens, batch, title)


def model(weights_of_layers: Sequence[ArrayLike] | NDArray[np.floating],
          tokens: Sequence[object] | None = None, key_tokens: Sequence[object] | None = None, *,
          batch: int = 0, title: str = "Attention") -> View:
    """All layers of a model: as `heads`, with a row of thumbnails for each layer.

    weights_of_layers: the weights of each layer, as `heads` takes them, or one array of them all,
    (layers, heads, query_len, key_len). Layers may have unlike numbers of heads, but have the same
    queries and keys.

    Raises what `heads` raises, and ValueError where layers differ in query_len or key_len.

    >>> weights_of_layers = [layer(x, return_weights=True)[1] for layer in (layer, layer)]
    >>> mha.view.model(weights_of_layers, ["The", "cat", "sat"]).save("model.html")
    """
    if not isinstance(weights_of_layers, np.ndarray):
        if not isinstance(weights_of_layers, Iterable):
            raise TypeError(f"weights_of_layers: got {type(weights_of_layers).__name__}, wanted the"
                            " weights of each layer")
        weights_of_layers = list(weights_of_layers)
    elif weights_of_layers.ndim < 3:
        raise ValueError(f"weights_of_layers: got shape {weights_of_layers.shape}, wanted (layers,"
                         " heads, query_len, key_len); of one layer: mha.view.heads")
    if len(weights_of_layers) == 0:
        raise ValueError("weights_of_layers: got none, wanted the weights of one layer or more")
    return _view(weights_of_layers, tokens, key_tokens, batch, title)


def several(views: Iterable[View], *, title: str = "Attention") -> View:
    """Several pages in one, with a list to choose from: the sentences of a batch, say, or a model
    before training and after.

    views: what `heads`, `model` and `several` return, in the order of the list, which shows their
    titles. The heads that are chosen stay chosen from one to the next.

    Raises TypeError for what is no View, ValueError for none, or for more weights than a browser
    holds.

    >>> views = [mha.view.heads(weights, ["The", "cat", "sat"], title=title)
    ...          for title in ("one", "two")]
    >>> mha.view.several(views).save("sentences.html")
    """
    views = list(views)
    for number, view in enumerate(views):
        if not isinstance(view, View):
            raise TypeError(f"views: got {type(view).__name__} as number {number}, wanted what"
                            " mha.view.heads or mha.view.model returns")
    sentences = [data for view in views for data in data_in(view.html)]
    if not sentences:
        raise ValueError("views: got none, wanted one view or more")
    _check_count(sum(map(count_of, sentences)))
    return View(page_of(sentences, str(title)), min(max(view.height for view in views) + 40, 900))


def _view(weights_of_layers: Sequence[ArrayLike] | NDArray[np.floating],
          tokens: Sequence[object] | None, key_tokens: Sequence[object] | None, batch: int,
          title: str) -> View:
    several = len(weights_of_layers) > 1
    layers = [_weights_of(weights, batch, f"layer {layer}: " if several else "")
              for layer, weights in enumerate(weights_of_layers)]
    query_len, key_len = shape = layers[0].shape[1:]
    for layer, weights in enumerate(layers):
        if weights.shape[1:] != shape:
            raise ValueError(f"weights_of_layers: got {weights.shape[1:]} queries and keys in layer"
                             f" {layer}, wanted {shape} as in layer 0")
    count = sum(weights.size for weights in layers)
    _check_count(count)
    if key_tokens is None and key_len != query_len:
        if tokens is not None:
            raise ValueError(f"key_tokens: got none, wanted {key_len} tokens, one a key")
        key_tokens = range(key_len)
    queries = _words(range(query_len) if tokens is None else tokens, query_len, "tokens")
    keys = None if key_tokens is None else _words(key_tokens, key_len, "key_tokens")
    return View(page_of([data_of(layers, queries, keys, str(title))], str(title)),
                _height(len(layers), count // (query_len * key_len), max(query_len, key_len)))


def _check_count(count: int) -> None:
    if count > MOST_WEIGHTS:
        raise ValueError(f"weights: got {count:,}, wanted at most {MOST_WEIGHTS:,}: more than a"
                         " browser holds; choose some layers, heads or positions, as in"
                         " weights[:, :4, :512, :512]")


def _height(num_layers: int, num_heads: int, most_tokens: int) -> int:
    """Of the frame: that of the page as wide as in a notebook, at most 900 pixels."""
    overview = 0 if num_heads == 1 else 190 + 30 * num_layers
    return min(120 + max(overview + 190, 110 + 22 * most_tokens), 900)


def _weights_of(weights: ArrayLike, batch: int, where: str) -> NDArray[np.float64]:
    """(heads, query_len, key_len) of one layer; errors begin with where it is."""
    try:
        of_item = weights_of_item(weights, batch)
        check_sums(of_item)
        if np.isinf(of_item).any():
            raise ValueError("weights: got infinite numbers, wanted attention weights")
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}{error}") from error
    return of_item


def _words(tokens: Sequence[object], length: int, name: str) -> list[str]:
    if isinstance(tokens, (str, bytes)):
        raise TypeError(f"{name}: got {type(tokens).__name__}, wanted a sequence of {length} tokens"
                        ", as a tokenizer or text.split() gives")
    return texts_of(tokens, length, name)
