"""Pictures of attention: heat maps of the weights and masks, and heat maps as text.

`heads`, `attention`, `mask` and `importance` need matplotlib (pip install "mha[plot]") and return
the figure without showing it: a notebook draws it once, a script calls `figure.savefig`. `text`
needs nothing.
"""

import io
import math
import shutil
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attention", "heads", "importance", "mask", "text"]

COLOURS = "YlOrRd"      # light where there is no weight, dark where there is much
ANNOTATED_AT_MOST = 8   # rows and columns of a matrix that shows its numbers by default
LABELS_AT_MOST = 60     # of a longer axis every second (third, ...) label is shown
SHADES = " ·░▒▓█"


def heads(weights: ArrayLike, query_labels: Sequence[object] | None = None,
          key_labels: Sequence[object] | None = None, *, batch: int = 0,
          heads: Sequence[int] | None = None, columns: int | None = None,
          annotate: bool | None = None, vmax: float | None = None, cmap: Any = COLOURS,
          title: str | None = None,
          axes: "Sequence[Axes] | NDArray[Any] | None" = None) -> "Figure":
    """One heat map a head, on one scale from 0 to the largest weight shown, with one colour bar.

    weights (batch, heads, query_len, key_len), of which one batch item is drawn; or
    (heads, query_len, key_len), or (query_len, key_len). key_labels default to query_labels where
    the lengths are equal. heads: which to draw, by default all. columns: panels in a row.
    annotate: write the numbers, by default into small matrices. vmax: the end of the scale.
    axes: draw into these, one a head, instead of into a new figure. Returns the figure.

    Raises ValueError for a shape, label count or index that does not fit, and ImportError
    without matplotlib.

    >>> output, weights = layer(x, return_weights=True)
    >>> mha.plot.heads(weights, ["The", "cat", "sat"]).savefig("heads.png")
    """
    maps, head_indices = _chosen_heads(weights, batch, heads)
    query_len, key_len = maps.shape[1:]
    query_labels, key_labels = _labels(query_labels, key_labels, query_len, key_len)
    annotate = _small(query_len, key_len) if annotate is None else annotate

    if axes is None:
        columns = _columns(columns, len(maps), query_len, key_len)
        rows = math.ceil(len(maps) / columns)
        figure = _new_figure(rows, columns, query_len, key_len, annotate, key_labels, query_labels)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        figure.supxlabel("key", fontsize=10)
        figure.supylabel("query", fontsize=10)
        for unused in panels[len(maps):]:
            unused.remove()
    else:
        _matplotlib()
        panels = np.ravel(np.asarray(axes, object))
        if len(panels) < len(maps):
            raise ValueError(f"axes: got {len(panels)}, wanted one for each of {len(maps)} heads")
        figure = panels[0].figure

    vmax = _scale_end(maps, vmax)
    panels = panels[:len(maps)]
    for panel, matrix, head in zip(panels, maps, head_indices):
        image = _draw(panel, matrix, query_labels, key_labels, annotate, vmax, cmap)
        panel.set_title(f"head {head}", fontsize=10)
        if axes is not None:
            panel.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=list(panels), label="attention weight", fraction=0.05, aspect=40)
    if axes is None:
        _set_title(figure, title, figure.get_figwidth())
    elif title:
        figure.suptitle(title, fontsize=11)
    return figure


def attention(weights: ArrayLike, query_labels: Sequence[object] | None = None,
              key_labels: Sequence[object] | None = None, *, ax: "Axes | None" = None,
              annotate: bool | None = None, vmax: float | None = None, cmap: Any = COLOURS,
              title: str | None = None) -> "Figure":
    """One heat map of one matrix of weights (query_len, key_len), with its numbers when small.

    Axes of size 1 before the last two are dropped. The other arguments are those of `heads`; ax:
    draw into it instead of into a new figure. Returns the figure.

    >>> output, weights = mha.scaled_dot_product_attention(q, k, v, return_weights=True)
    >>> mha.plot.attention(weights[0], title="first sequence").savefig("attention.png")
    """
    matrix = _one_matrix(_numbers(weights, "weights"), "weights")
    query_labels, key_labels = _labels(query_labels, key_labels, *matrix.shape)
    annotate = _small(*matrix.shape) if annotate is None else annotate
    figure, ax = _figure_of(ax, matrix.shape, annotate, key_labels, query_labels, title)
    image = _draw(ax, matrix, query_labels, key_labels, annotate, _scale_end(matrix, vmax), cmap)
    ax.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=ax, label="attention weight")
    return figure


def mask(mask: ArrayLike, query_labels: Sequence[object] | None = None,
         key_labels: Sequence[object] | None = None, *, ax: "Axes | None" = None,
         cmap: Any = None, title: str | None = None) -> "Figure":
    """One mask (query_len, key_len), bool, True = attend, in two colours with a legend.

    Axes of size 1 before the last two are dropped. cmap: a colour map whose two ends stand for
    blocked and attend. Raises TypeError for a mask that is not bool. Returns the figure.

    >>> mha.plot.mask(mha.masks.causal(6), title="causal").savefig("mask.png")
    """
    array = np.asarray(mask)
    if array.dtype != bool:
        raise TypeError(f"mask: got an array of {array.dtype}, wanted bool, True = attend; write"
                        " mask != 0 where 1 means attend, mask == 0 where 1 means blocked")
    matrix = _one_matrix(array, "mask").astype(float)
    query_labels, key_labels = _labels(query_labels, key_labels, *matrix.shape)
    figure, ax = _figure_of(ax, matrix.shape, False, key_labels, query_labels, title, beside=1.0)
    matplotlib = _matplotlib()
    if cmap is None:
        cmap = matplotlib.colors.ListedColormap(["#e4e4e4", "#2f6db3"])
    image = _draw(ax, matrix, query_labels, key_labels, False, 1, cmap)
    _grid_lines(ax, matrix.shape)
    ax.set(xlabel="key", ylabel="query")
    patches = [matplotlib.patches.Patch(facecolor=image.cmap(image.norm(end)), label=label)
               for end, label in ((1.0, "attend"), (0.0, "blocked"))]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0,
              frameon=False)
    return figure


def importance(scores: ArrayLike, *, annotate: bool | None = None, cmap: Any = COLOURS,
               label: str = "importance", title: str | None = None,
               ax: "Axes | None" = None) -> "Figure":
    """How much each head matters: bars for one layer, a map of layers and heads for several.

    scores (heads,) or (layers, heads), as the functions of `mha.importance` give them. annotate:
    write the numbers into the map, by default where there are at most 12 layers of 16 heads.
    label: what the scores are. ax: draw into this. Returns the figure.

    Raises ValueError for another shape and ImportError without matplotlib.

    >>> scores = mha.importance.confidence(weights)
    >>> mha.plot.importance(scores, label="confidence").savefig("importance.png")
    """
    array = _numbers(scores, "scores")
    if array.ndim not in (1, 2) or 0 in array.shape:
        raise ValueError(f"scores: got shape {array.shape}, wanted (heads,) or (layers, heads)")
    if array.ndim == 1:
        figure, ax = _figure_of(ax, (8, len(array)), True, None, None, title)
        ax.bar(range(len(array)), array, color=_matplotlib().colormaps.get_cmap(cmap)(0.6))
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(xlabel="head", ylabel=label, xticks=range(len(array)))
        return figure
    layers, num_heads = array.shape
    annotate = layers <= 12 and num_heads <= 16 if annotate is None else annotate
    figure, ax = _figure_of(ax, array.shape, annotate, None, None, title, beside=0.5)
    finite = array[np.isfinite(array)]
    lowest, highest = finite.min(initial=0), finite.max(initial=0)
    image = _draw(ax, array, None, None, annotate, highest if highest > lowest else 1.0, cmap,
                  vmin=lowest, digits=".2f" if highest - lowest >= 0.1 else ".1e")
    ax.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=ax, label=label, fraction=0.05, aspect=30)
    return figure


def text(weights: ArrayLike, query_words: Sequence[object],
         key_words: Sequence[object] | None = None, *, vmax: float | None = None,
         width: int | None = None) -> str:
    """A heat map for the terminal: a shade and the percentage of each weight, a row a query.

    weights (query_len, key_len); key_words default to query_words. The shades run from 0 to vmax,
    by default the largest weight. Where the columns do not fit into width (the terminal's, by
    default), keys are numbered and the percentages left out. Needs no matplotlib.

    >>> print(mha.plot.text([[0.9, 0.1], [0.4, 0.6]], ["cat", "sat"]))
           cat    sat
    cat  ██ 90  ·· 10
    sat  ░░ 40  ▒▒ 60
    """
    matrix = _one_matrix(_numbers(weights, "weights"), "weights")
    query_words, key_words = _labels(query_words, key_words, len(matrix), matrix.shape[1],
                                     called="words")
    if key_words is None:
        raise ValueError(f"key_words: got none, wanted {matrix.shape[1]} words, one a key")
    vmax = _scale_end(matrix, vmax)
    width = shutil.get_terminal_size().columns if width is None else width

    columns = [max(_width(word), 5) for word in key_words]
    label_width = max(map(_width, query_words))
    if label_width + sum(columns) + 2 * len(columns) <= width:
        lines = [_pad("", label_width) + "".join(
            "  " + _pad(word, column, right=True) for word, column in zip(key_words, columns))]
        for word, row in zip(query_words, matrix):
            lines.append(_pad(word, label_width) + "".join(
                "  " + (_shade(w, vmax) * 2 + _percent(w)).rjust(column)
                for w, column in zip(row, columns)))
        return "\n".join(line.rstrip() for line in lines)
    return _numbered_text(matrix, query_words, key_words, vmax, label_width, width)


def _numbered_text(matrix, query_words, key_words, vmax, label_width, width):
    """The narrow form: the keys as numbers, three or (for very many keys) one column each."""
    digits = len(str(max(matrix.shape) - 1))
    column = max(3, digits + 1)
    if digits + 1 + label_width + column * matrix.shape[1] > width:
        column = 1
        ruler = "".join(str(key // 10 % 10) if key % 10 == 0 else "·" for key in
                        range(matrix.shape[1]))
    else:
        ruler = "".join(str(key).rjust(column) for key in range(matrix.shape[1]))
    lines = [" " * (digits + 1 + label_width + (column == 1)) + ruler]
    for query, (word, row) in enumerate(zip(query_words, matrix)):
        shades = "".join((_shade(w, vmax) * min(column, 2)).rjust(column) for w in row)
        lines.append(f"{query:>{digits}} {_pad(word, label_width)}" + " " * (column == 1) + shades)
    if key_words != query_words:
        lines.append("keys: " + ", ".join(f"{i} {word}" for i, word in enumerate(key_words)))
    return "\n".join(line.rstrip() for line in lines)


def _shade(weight, vmax):
    if math.isnan(weight):
        return "?"
    share = min(max(weight / vmax, 0), 1)
    return SHADES[round(share * (len(SHADES) - 1))]


def _percent(weight):
    return "nan" if math.isnan(weight) else f"{100 * weight:3.0f}"


def _width(word):
    """Columns that a terminal gives the word: two for wide characters, none for combining ones."""
    return sum(0 if unicodedata.category(character) in ("Mn", "Me", "Cf")
               else 2 if unicodedata.east_asian_width(character) in "WF" else 1
               for character in word)


def _pad(word, width, right=False):
    space = " " * (width - _width(word))
    return space + word if right else word + space


def _numbers(weights, name):
    array = np.asarray(weights)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: got an array of {array.dtype}, wanted real numbers")
    return array.astype(float)


def _one_matrix(array, name):
    """(1, ..., 1, query_len, key_len) -> (query_len, key_len)."""
    if array.ndim < 2 or math.prod(array.shape[:-2]) != 1 or 0 in array.shape:
        raise ValueError(f"{name}: got shape {array.shape}, wanted one matrix (query_len, key_len)"
                         f"; choose one, as in {name}[0, 0]")
    return array.reshape(array.shape[-2:])


def _chosen_heads(weights, batch, chosen):
    """The maps to draw (heads, query_len, key_len), and the index of each."""
    array = _numbers(weights, "weights")
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise ValueError(f"weights: got shape {array.shape}, wanted"
                         " (batch, heads, query_len, key_len) without the first one or two axes"
                         " at will, and none of size 0")
    if array.ndim == 4:
        if not -len(array) <= batch < len(array):
            raise ValueError(f"batch: got {batch}, wanted an index into {len(array)} items")
        array = array[batch]
    array = array.reshape(-1, *array.shape[-2:])
    indices = list(range(len(array))) if chosen is None else np.ravel(chosen).tolist()
    if not indices or not all(-len(array) <= head < len(array) for head in indices):
        raise ValueError(f"heads: got {chosen!r}, wanted indices into {len(array)} heads")
    return array[indices], [head % len(array) for head in indices]


def _labels(query_labels, key_labels, query_len, key_len, called="labels"):
    """Both as lists of words of the right number, or None."""
    if key_labels is None and query_labels is not None and query_len == key_len:
        key_labels = query_labels
    checked = []
    for name, labels, length in (("query_" + called, query_labels, query_len),
                                 ("key_" + called, key_labels, key_len)):
        if labels is not None:
            labels = ["".join(c if c.isprintable() else " " for c in str(label))
                      for label in labels]
            if len(labels) != length:
                raise ValueError(f"{name}: got {len(labels)}, wanted {length}, one a row or column"
                                 " of the weights")
        checked.append(labels)
    return checked


def _small(query_len, key_len):
    return max(query_len, key_len) <= ANNOTATED_AT_MOST


def _scale_end(maps, vmax):
    """vmax, or the largest weight shown; 1 where all of them are 0."""
    if vmax is None:
        finite = maps[np.isfinite(maps)]
        vmax = finite.max() if finite.size else 0.0
        return vmax if vmax > 0 else 1.0
    if not vmax > 0:
        raise ValueError(f"vmax: got {vmax}, wanted a number above 0")
    return vmax


def _columns(columns, panels, query_len, key_len):
    if columns is not None:
        if columns < 1:
            raise ValueError(f"columns: got {columns}, wanted at least 1")
        return min(columns, panels)
    if key_len > 4 * query_len:  # flat maps go below one another
        return 1 if key_len > 20 else min(2, panels)
    return {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}.get(panels, 4)


def _matplotlib():
    try:
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
    except ImportError:
        raise ImportError('mha.plot draws with matplotlib: pip install "mha[plot]"; without it,'
                          " mha.plot.text gives a heat map as text") from None
    return matplotlib


def _figure_class():
    """matplotlib's Figure, which a notebook can draw though pyplot does not know of it.

    A figure made by pyplot would be drawn twice: by pyplot and as the cell's value.
    """
    return type("Figure", (_matplotlib().figure.Figure,), {"_repr_png_": _as_png})


def _as_png(figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    return png.getvalue()


def _new_figure(rows, columns, query_len, key_len, annotate, key_labels, query_labels):
    """A figure for rows x columns panels, with room for the cells, their numbers and the labels."""
    letter = 0.075  # inches
    cell = 0.46 if annotate else 0.24
    below = letter * max(map(len, key_labels)) if _upright(key_labels, cell) else 0.2
    beside = letter * max(map(len, query_labels or ["00"]))
    panel_width = min(max(key_len * cell, 1.7), 7 if columns == 1 else 4.5) + beside + 0.3
    panel_height = min(max(query_len * cell, 0.8), 7 if rows == 1 else 4.5) + below + 0.4
    return _figure_class()(figsize=(columns * panel_width + 1.2, rows * panel_height + 0.7),
                           layout="constrained", dpi=100)


def _figure_of(ax, shape, annotate, key_labels, query_labels, title, beside=0.0):
    """The given axes and their figure, or new ones with room for a legend beside, titled."""
    if ax is not None:
        if title:
            ax.set_title(title)
        return ax.figure, ax
    figure = _new_figure(1, 1, *shape, annotate, key_labels, query_labels)
    _set_title(figure, title, figure.get_figwidth() + beside)
    return figure, figure.subplots()


def _set_title(figure, title, width):
    """A title over the whole figure, which grows to hold it."""
    if title:
        figure.suptitle(title, fontsize=11)
        width = max(width, 0.5 + 0.1 * max(map(len, title.splitlines())))
    figure.set_figwidth(width)


def _upright(labels, cell):
    """Whether the key labels must stand upright, being wider than their cells."""
    return labels is not None and max(map(len, labels)) * 0.085 > cell


def _draw(ax, matrix, query_labels, key_labels, annotate, vmax, cmap, vmin=0.0,
          digits=".2f"):
    """One matrix into one axes, with its labels and numbers."""
    query_len, key_len = matrix.shape
    stretched = max(query_len / key_len, key_len / query_len) > 8
    image = ax.imshow(matrix, vmin=vmin, vmax=vmax, cmap=cmap, interpolation="nearest",
                      aspect="auto" if stretched else "equal")
    for axis, labels in ((ax.yaxis, query_labels), (ax.xaxis, key_labels)):
        if labels is None:
            labels = range(query_len if axis is ax.yaxis else key_len)
            step = 1 if len(labels) <= 12 else 5 * math.ceil(len(labels) / 60)
            axis.set_ticks(labels[::step], labels[::step], fontsize=8)
            continue
        step = math.ceil(len(labels) / LABELS_AT_MOST)
        upright = axis is ax.xaxis and _upright(labels, 0.46 if annotate else 0.24)
        axis.set_ticks(range(0, len(labels), step), labels[::step], fontsize=8,
                       rotation=90 if upright else 0, parse_math=False)
    if annotate:
        _write_numbers(ax, image, matrix, digits)
    return image


def _write_numbers(ax, image, matrix, digits):
    for (query, key), weight in np.ndenumerate(matrix):
        red, green, blue, _ = image.cmap(image.norm(weight))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        ax.text(key, query, f"{weight:{digits}}", ha="center", va="center", fontsize=7.5,
                color="white" if dark else "black")


def _grid_lines(ax, shape):
    """Thin white lines between the cells of a small mask."""
    if max(shape) <= 40:
        for query in range(1, shape[0]):
            ax.axhline(query - 0.5, color="white", linewidth=1)
        for key in range(1, shape[1]):
            ax.axvline(key - 0.5, color="white", linewidth=1)
