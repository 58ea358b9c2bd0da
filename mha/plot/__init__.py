"""Pictures of attention: heat maps of the weights and masks, and heat maps as text.

`heads`, `attention`, `mask` and `importance` need matplotlib (pip install matplotlib) and return
the figure without showing it: a notebook draws it once, a script calls `figure.savefig`. `text`
needs nothing. Labels that have no room are thinned out or rotated; NaN is grey and crossed out.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_size
from mha.plot import _labels as plot_labels
from mha.plot import _layout as plot_layout
from mha.plot import _text as plot_text
from mha.plot._layout import Layout, LayoutKeywords, matplotlib_module
from mha.plot._weights import as_numbers, as_weights, check_sums, weights_of_item

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
else:  # for typing.get_type_hints, which shall not import it
    Axes = Colormap = Figure = Any

__all__ = ["attention", "heads", "importance", "mask", "text"]


def __dir__() -> list[str]:
    return sorted(__all__)


COLOURS = "YlOrRd"      # light where there is no weight, dark where there is much
NAN_COLOUR = "#9a9a9a"
ANNOTATED_AT_MOST = 8   # rows and columns of a matrix that shows its numbers by default

Number = TypeVar("Number", np.bool_, np.float64)


def heads(weights: ArrayLike, query_labels: Sequence[object] | None = None,
          key_labels: Sequence[object] | None = None, *, batch: int = 0,
          heads: Sequence[int] | None = None, columns: int | None = None,
          annotate: bool | None = None, vmax: float | None = None, cmap: str | Colormap = COLOURS,
          title: str | None = None,
          axes: Sequence[Axes] | NDArray[Any] | None = None) -> Figure:
    """One heat map a head, on one scale from 0 to the largest weight shown, with one colour bar.

    weights (batch, heads, query_len, key_len), of which one batch item is drawn; or
    (heads, query_len, key_len), or (query_len, key_len). key_labels default to query_labels where
    the lengths are equal. heads: which to draw, by default all. columns: panels in a row.
    annotate: write the numbers, by default into small matrices. vmax: the end of the scale.
    axes: draw into these, one a head, instead of into a new figure. Returns the figure: 96 heads
    still make one page, on which the outer panels alone have labels.

    Raises ValueError for a shape, label count or index that does not fit and for numbers that are
    no weights, as an output's; TypeError for a tuple, as calls return; ImportError without
    matplotlib.

    >>> output, weights = layer(x, return_weights=True)
    >>> mha.plot.heads(weights, ["The", "cat", "sat"]).savefig("heads.png")
    """
    maps, head_indices = _chosen_heads(weights, batch, heads)
    query_len, key_len = shape = maps.shape[1:]
    annotate = _small(shape) if annotate is None else annotate
    drawing = _Drawing(shape, query_labels, key_labels, annotate, _scale_end(maps, vmax), cmap,
                       title)
    layout = None
    panels: list[Axes]
    if axes is None:
        columns = _columns(columns, len(maps), query_len, key_len)
        layout = drawing.layout(maps, -(-len(maps) // columns), columns, panel_titles=True)
        layout.name_axes("key", "query")
        figure, panels = layout.figure, layout.axes.ravel().tolist()
        for unused in panels[len(maps):]:
            unused.remove()
    else:
        matplotlib_module()
        panels = np.ravel(np.asarray(axes, object)).tolist()
        if len(panels) < len(maps):
            raise ValueError(f"axes: got {len(panels)}, wanted one for each of {len(maps)} heads")
        figure = _figure_of(panels[0])
        if title:
            figure.suptitle(drawing.fonts.drawable(title), fontsize=11,
                            fontfamily=drawing.fonts.families)

    check_sums(maps)
    panels = panels[:len(maps)]
    for place, (panel, matrix, head) in enumerate(zip(panels, maps, head_indices)):
        image = drawing.draw(panel, matrix, layout)
        panel.set_title(f"head {head}", fontsize=10, pad=4)
        if layout is None:
            panel.set(xlabel="key", ylabel="query")
        else:
            left, bottom = layout.has_labels(place, len(maps))
            panel.tick_params(labelleft=left, labelbottom=bottom)
    drawing.colour_bar(image, panels, layout, bool(np.isnan(maps).any()))
    return figure


def attention(weights: ArrayLike, query_labels: Sequence[object] | None = None,
              key_labels: Sequence[object] | None = None, *, ax: Axes | None = None,
              annotate: bool | None = None, vmax: float | None = None,
              cmap: str | Colormap = COLOURS, title: str | None = None) -> Figure:
    """One heat map of one matrix of weights (query_len, key_len), with its numbers when small.

    Axes of size 1 before the last two are dropped. The other arguments are those of `heads`; ax:
    draw into it instead of into a new figure. Returns the figure.

    >>> output, weights = mha.scaled_dot_product_attention(q, k, v, return_weights=True)
    >>> mha.plot.attention(weights[0], title="first sequence").savefig("attention.png")
    """
    matrix = _one_matrix(as_weights(weights), "weights")
    annotate = _small(matrix.shape) if annotate is None else annotate
    drawing = _Drawing(matrix.shape, query_labels, key_labels, annotate,
                       _scale_end(matrix, vmax), cmap, title)
    check_sums(matrix)
    return drawing.one(matrix, ax, "key", "query")


def mask(mask: ArrayLike, query_labels: Sequence[object] | None = None,
         key_labels: Sequence[object] | None = None, *, ax: Axes | None = None,
         cmap: str | Colormap | None = None, title: str | None = None) -> Figure:
    """One mask (query_len, key_len), bool, True = attend, in two colours with a legend.

    A `mha.BlockMask` of long sequences is drawn in cells, the darker the more of one is visible.
    Axes of size 1 before the last two are dropped. cmap: a colour map whose two ends stand for
    blocked and attend. Raises TypeError for a mask that is not bool. Returns the figure.

    >>> mha.plot.mask(mha.masks.causal(6), title="causal").savefig("mask.png")
    """
    matrix, lengths = _mask_matrix(mask)
    matplotlib = matplotlib_module()
    if cmap is None:
        cmap = matplotlib.colors.LinearSegmentedColormap.from_list("mask", ["#e4e4e4", "#2f6db3"])
    drawing = _Drawing(matrix.shape, query_labels, key_labels, False, 1, cmap, title)
    layout, axes = drawing.place(matrix, ax)
    image = drawing.draw(axes, matrix, layout)
    _grid_lines(axes, matrix.shape)
    axes.set(xlabel="key", ylabel="query")
    for side, length, cells in zip((axes.yaxis, axes.xaxis), lengths, matrix.shape, strict=True):
        if length > cells:
            ticks = matplotlib.ticker.MaxNLocator(6).tick_values(0, length)
            ticks = ticks[ticks < length]
            side.set_ticks(ticks * (cells / length), [f"{tick:,.0f}" for tick in ticks])
    colours = image.to_rgba(np.array([1.0, 0.0]))
    patches = [matplotlib.patches.Patch(facecolor=colour, label=label)
               for colour, label in zip(colours, ("attend", "blocked"))]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), borderaxespad=0.8,
                frameon=False, fontsize=9)
    return _figure_of(axes)


def _mask_matrix(mask: Any) -> tuple[NDArray[Any], tuple[int, int]]:
    """The mask as numbers from 0 to 1, one a pair or one a cell of them, and its lengths."""
    most, least = 512, 0.3  # cells; what shows one pair of a cell
    if not hasattr(mask, "_shares"):
        array = np.asarray(mask)
        if array.dtype != bool:
            raise TypeError(f"mask: got an array of {array.dtype}, wanted bool, True = attend;"
                            " write mask != 0 where 1 means attend, mask == 0 where 1 means"
                            " blocked")
        matrix = _one_matrix(array, "mask").astype(float)
        return matrix, matrix.shape
    if (mask.batch, mask.heads) != (1, 1):
        raise ValueError(f"mask: got a BlockMask of batch {mask.batch} and heads {mask.heads},"
                         " wanted one of 1 and 1")
    if 0 in (mask.query_len, mask.key_len):
        raise ValueError(f"mask: got a BlockMask of {mask.query_len} queries and {mask.key_len}"
                         " keys, wanted at least one of each")
    shares = mask._shares(most, most)
    return np.where(shares > 0, least + (1 - least) * shares, 0), (mask.query_len, mask.key_len)


def importance(scores: ArrayLike, *, annotate: bool | None = None, cmap: str | Colormap = COLOURS,
               label: str = "importance", title: str | None = None,
               ax: Axes | None = None) -> Figure:
    """How much each head matters: bars for one layer, a map of layers and heads for several.

    scores (heads,) or (layers, heads), as the functions of `mha.importance` give them. annotate:
    write the numbers into the map, by default where there are at most 12 layers of 16 heads.
    label: what the scores are. ax: draw into this. Returns the figure.

    Raises ValueError for another shape and ImportError without matplotlib.

    >>> scores = mha.importance.confidence(weights)
    >>> mha.plot.importance(scores, label="confidence").savefig("importance.png")
    """
    array = as_numbers(scores, "scores")
    if array.ndim not in (1, 2) or 0 in array.shape:
        raise ValueError(f"scores: got shape {array.shape}, wanted (heads,) or (layers, heads)")
    if array.ndim == 1:
        return _bars(array, ax, cmap, label, title)
    layers, num_heads = array.shape
    annotate = layers <= 12 and num_heads <= 16 if annotate is None else annotate
    finite = array[np.isfinite(array)]
    lowest, highest = finite.min(initial=0), finite.max(initial=0)
    drawing = _Drawing(array.shape, None, None, annotate, highest if highest > lowest else 1.0,
                       cmap, title, vmin=lowest, label=label,
                       digits=".2f" if highest - lowest >= 0.1 else ".1e")
    return drawing.one(array, ax, "head", "layer")


def _bars(scores: NDArray[np.float64], ax: Axes | None, cmap: str | Colormap, label: str,
          title: str | None) -> Figure:
    """The scores (heads,) of one layer as bars, with NaN in words."""
    # The label is as wide as the numbers beside the bars may be.
    drawing = _Drawing((1, len(scores)), ["-0.0000"], None, False, 1.0, cmap, title, label=label)
    layout, ax = drawing.place(scores[None], ax, beside=0.2,
                               panel=(min(max(0.3 * len(scores), 3), 10), 3.0))
    ax.bar(range(len(scores)), scores, color=matplotlib_module().colormaps.get_cmap(cmap)(0.6))
    ax.axhline(0, color="black", linewidth=0.8)
    for head in np.flatnonzero(np.isnan(scores)).tolist():
        ax.text(head, 0, " NaN", rotation=90, ha="center", va="bottom", fontsize=8,
                color="dimgrey")
    drawing.tick(ax.xaxis, None, len(scores), drawing.cells(ax, layout)[0])
    ax.set(xlabel="head", xlim=(-0.6, len(scores) - 0.4))
    ax.tick_params(axis="y", labelsize=8)
    ax.ticklabel_format(axis="y", scilimits=(-3, 4))
    ax.yaxis.get_offset_text().set_fontsize(8)
    ax.set_ylabel(drawing.label, fontfamily=drawing.fonts.families)
    return _figure_of(ax)


def text(weights: ArrayLike, query_words: Sequence[object],
         key_words: Sequence[object] | None = None, *, vmax: float | None = None,
         width: int | None = None) -> str:
    """A heat map for the terminal: a shade and the percentage of each weight, a row a query.

    weights (query_len, key_len); key_words default to query_words. The shades run from 0 to vmax,
    by default the largest weight. Where the columns do not fit into width (the terminal's, by
    default; at least 10), keys are numbered and the percentages left out; where that is too wide
    still, long words are cut and the keys stand in several blocks. Needs no matplotlib. What
    sys.stdout cannot encode, as on a terminal of cp1252 or ASCII, is written in plain letters:
    shades as .:+*#, other letters as their numbers.

    >>> print(mha.plot.text([[0.9, 0.1], [0.4, 0.6]], ["cat", "sat"]))
           cat    sat
    cat  ██ 90  ·· 10
    sat  ░░ 40  ▒▒ 60
    """
    matrix = _one_matrix(as_weights(weights), "weights")
    query_len, key_len = matrix.shape
    queries = plot_labels.words_of(query_words, query_len, "query_words")
    if key_words is None and key_len != query_len:
        raise ValueError(f"key_words: got none, wanted {key_len} words, one a key")
    keys = queries if key_words is None else plot_labels.words_of(key_words, key_len, "key_words")
    if width is None:
        width = max(shutil.get_terminal_size().columns, plot_text.NARROWEST)
    if width < plot_text.NARROWEST:
        raise ValueError(f"width: got {width}, wanted at least {plot_text.NARROWEST} columns")
    vmax = _scale_end(matrix, vmax)
    check_sums(matrix)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    queries, keys = (plot_text.plain_words(words, encoding) for words in (queries, keys))
    return plot_text.plain_shades(plot_text.heat_map(matrix, queries, keys, vmax, width), encoding)


def _one_matrix(array: NDArray[Number], name: str) -> NDArray[Number]:
    """(1, ..., 1, query_len, key_len) -> (query_len, key_len)."""
    if array.ndim < 2 or math.prod(array.shape[:-2]) != 1 or 0 in array.shape:
        raise ValueError(f"{name}: got shape {array.shape}, wanted one matrix (query_len, key_len)"
                         f"; choose one, as in {name}[{', '.join('0' * (array.ndim - 2))}]")
    return array.reshape(array.shape[-2:])


def _chosen_heads(weights: ArrayLike, batch: int,
                  chosen: Sequence[int] | None) -> tuple[NDArray[np.float64], list[int]]:
    """The maps to draw (heads, query_len, key_len), and the index of each."""
    array = weights_of_item(weights, batch)
    indices = list(range(len(array))) if chosen is None else np.ravel(chosen).tolist()
    if not indices or not all(-len(array) <= head < len(array) for head in indices):
        raise ValueError(f"heads: got {chosen!r}, wanted indices into {len(array)} heads")
    return array[indices], [head % len(array) for head in indices]


def _scale_end(maps: NDArray[np.float64], vmax: float | None) -> float:
    """vmax, or the largest weight shown; 1 where all of them are 0."""
    if vmax is None:
        finite = maps[np.isfinite(maps)]
        vmax = finite.max() if finite.size else 0.0
        return vmax if vmax > 0 else 1.0
    if not vmax > 0:
        raise ValueError(f"vmax: got {vmax}, wanted a number above 0")
    return vmax


def _figure_of(axes: Axes) -> Figure:
    """The figure; of axes in a SubFigure that one, as whoever gave them knows."""
    return cast("Figure", axes.figure)


def _small(shape: tuple[int, ...]) -> bool:
    return max(shape) <= ANNOTATED_AT_MOST


def _columns(columns: int | None, panels: int, query_len: int, key_len: int) -> int:
    if columns is None:
        return plot_layout.columns_for(panels, query_len, key_len)
    return min(as_size(columns, "columns"), panels)


class _Drawing:
    """How the matrices of one picture are drawn: their labels, scale and colours."""

    def __init__(self, shape: tuple[int, int], query_labels: Sequence[object] | None,
                 key_labels: Sequence[object] | None, annotate: bool, vmax: float,
                 cmap: str | Colormap, title: str | None, *, vmin: float = 0.0,
                 digits: str = ".2f", label: str = "attention weight") -> None:
        matplotlib = matplotlib_module()
        labels = plot_labels.checked(query_labels, key_labels, *shape)
        self.fonts = plot_labels.Fonts([title or "", label,
                                        *(word for words in labels for word in words or ())])
        self.query_labels, self.key_labels = (words and [
            self.fonts.drawable(plot_labels.cut(word, plot_labels.LONGEST)) for word in words]
            for words in labels)
        self.shape, self.annotate, self.title = shape, annotate, title
        self.label = self.fonts.drawable(label)
        self.vmin, self.vmax, self.digits = vmin, vmax, digits
        self.cmap = matplotlib.colormaps.get_cmap(cmap).with_extremes(bad=NAN_COLOUR)

    def layout(self, matrices: NDArray[np.float64], rows: int, columns: int,
               **options: Unpack[LayoutKeywords]) -> Layout:
        """A new page for them, its cells as large as the numbers in them need."""
        cell = plot_layout.cell_for(matrices if self.annotate else None, self.digits)
        return Layout(rows, columns, self.shape, cell, self.query_labels, self.key_labels,
                      self.fonts, title=self.title,
                      tall=self.fonts.width([self.label], 10) + 0.1, **options)

    def place(self, matrix: NDArray[np.float64], ax: Axes | None,
              **options: Unpack[LayoutKeywords]) -> tuple[Layout | None, Axes]:
        """(layout, axes): new ones, or None and the given ax, with the title."""
        if ax is None:
            layout = self.layout(matrix, 1, 1, **options)
            return layout, layout.axes[0, 0]
        if self.title:
            ax.set_title(self.fonts.drawable(self.title), fontfamily=self.fonts.families)
        return None, ax

    def one(self, matrix: NDArray[np.float64], ax: Axes | None, x: str, y: str) -> Figure:
        """A figure of one matrix, with its colour bar."""
        layout, ax = self.place(matrix, ax)
        image = self.draw(ax, matrix, layout)
        ax.set(xlabel=x, ylabel=y)
        self.colour_bar(image, ax, layout, bool(np.isnan(matrix).any()))
        return _figure_of(ax)

    def draw(self, ax: Axes, matrix: NDArray[np.float64],
             layout: Layout | None) -> AxesImage:
        """One matrix into one axes, with its labels and numbers."""
        fills = layout is not None or plot_layout.stretched(self.shape)
        aspect: Literal["auto", "equal"] = "auto" if fills else "equal"
        image = ax.imshow(matrix, vmin=self.vmin, vmax=self.vmax, cmap=self.cmap,
                          interpolation="nearest", aspect=aspect)
        width, height = self.cells(ax, layout)
        self.tick(ax.yaxis, self.query_labels, self.shape[0], height)
        self.tick(ax.xaxis, self.key_labels, self.shape[1], width)
        if self.annotate:
            self._write_numbers(ax, image, matrix, min(width, height))
        else:
            queries, keys = np.nonzero(np.isnan(matrix))
            ax.scatter(keys, queries, s=(36 * min(width, height))**2, marker="x", color="black",
                       linewidth=0.7)
        return image

    def cells(self, ax: Axes, layout: Layout | None) -> tuple[float, float]:
        """The (width, height) of a cell, in inches."""
        query_len, key_len = self.shape
        if layout is not None:
            return layout.width / key_len, layout.height / query_len
        dpi = ax.figure.dpi
        width, height = ax.bbox.width / dpi / key_len, ax.bbox.height / dpi / query_len
        return (width, height) if plot_layout.stretched(self.shape) else (min(width, height),) * 2

    def tick(self, axis: XAxis | YAxis, labels: list[str] | None, length: int,
             cell: float) -> None:
        """The labels that have room beside the cells, or their numbers."""
        ticks = plot_labels.Ticks(labels, length, cell, self.fonts,
                                  horizontal=axis.axis_name == "x")
        axis.set_ticks(ticks.positions, ticks.words, fontsize=ticks.size,
                       rotation=90 if ticks.upright else 0, parse_math=False,
                       fontfamily=self.fonts.families)

    def colour_bar(self, image: AxesImage, panels: Axes | list[Axes], layout: Layout | None,
                   any_nan: bool) -> None:
        """The colour bar, with a patch for NaN below it where there is any."""
        if layout is None:
            bar = image.figure.colorbar(image, ax=panels, fraction=0.05, aspect=30)
        else:
            bar = image.figure.colorbar(image, cax=layout.bar_axes(0.3 if any_nan else 0.0))
        bar.set_label(self.label, fontsize=9, fontfamily=self.fonts.families)
        bar.ax.tick_params(labelsize=8)
        bar.ax.yaxis.get_offset_text().set_fontsize(8)
        bar.ax.ticklabel_format(axis="y", scilimits=(-3, 4))
        if any_nan:
            patch = matplotlib_module().patches.Patch(facecolor=NAN_COLOUR, label="NaN")
            bar.ax.legend(handles=[patch], loc="upper left", bbox_to_anchor=(0, 0), fontsize=8,
                          borderaxespad=1, borderpad=0, handlelength=1.6, frameon=False)

    def _write_numbers(self, ax: Axes, image: AxesImage, matrix: NDArray[np.float64],
                       cell: float) -> None:
        room = cell / plot_layout.cell_for(matrix, self.digits)
        size = max(3, plot_layout.NUMBER_SIZE * min(1, room))
        colours = image.to_rgba(matrix)
        for (query, key), weight in np.ndenumerate(matrix):
            red, green, blue, _ = colours[query, key]
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            ax.text(key, query, f"{weight:{self.digits}}", ha="center", va="center",
                    fontsize=size, color="white" if dark else "black")


def _grid_lines(ax: Axes, shape: tuple[int, int]) -> None:
    """Thin white lines between the cells of a small mask."""
    if max(shape) <= 40:
        for query in range(1, shape[0]):
            ax.axhline(query - 0.5, color="white", linewidth=1)
        for key in range(1, shape[1]):
            ax.axvline(key - 0.5, color="white", linewidth=1)
