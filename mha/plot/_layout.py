"""Where the panels of a picture stand, in inches, settled before anything is drawn.

matplotlib's own layouts take minutes for a hundred panels, and clip labels beside panels whose
cells are square. Here the labels are measured, and the page is made around them.
"""

import io
import math
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from mha.plot._labels import Fonts, Ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_WIDTH, PAGE_HEIGHT = 16.0, 20.0  # that many panels share; they shrink as far as SMALLEST
LARGEST, SMALLEST = 8.0, 1.0          # the longer side of a panel
CELL, ANNOTATED_CELL = 0.24, 0.46     # the side of a cell where there is room
NUMBER_SIZE = 7.5                     # points, of the numbers in annotated cells
BAR = 1.2                             # a colour bar, its numbers and its label
REPEATED_AT_MOST = 16                 # more panels than these have labels on the outer ones only


def matplotlib_module() -> ModuleType:
    """matplotlib, or an ImportError that says what to do."""
    try:
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
    except ImportError:
        raise ImportError("mha.plot draws with matplotlib: pip install matplotlib; without it,"
                          " mha.plot.text gives a heat map as text") from None
    return matplotlib


def figure_class() -> "type[Figure]":
    """matplotlib's Figure, which a notebook can draw though pyplot does not know of it.

    A figure made by pyplot would be drawn twice: by pyplot and as the cell's value.
    """
    return type("Figure", (matplotlib_module().figure.Figure,), {"_repr_png_": _as_png})


def _as_png(figure: "Figure") -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    return png.getvalue()


def columns_for(panels: int, query_len: int, key_len: int) -> int:
    """How many panels in a row: few empty places, and half as wide again as high."""
    if key_len > 4 * query_len:  # flat maps go below one another
        return 1 if key_len > 20 and panels <= REPEATED_AT_MOST else min(2, panels)
    if panels <= REPEATED_AT_MOST:
        return {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}.get(panels, 4)
    wanted = math.sqrt(1.5 * panels)
    return min(range(math.isqrt(panels), 2 * math.isqrt(panels) + 1),
               key=lambda columns: (-panels % columns, abs(columns - wanted)))


class LayoutKeywords(TypedDict, total=False):
    """The options of a Layout that depend on what is drawn."""

    beside: float
    panel: tuple[float, float]
    panel_titles: bool


class Layout:
    """A page of equal panels for matrices of one shape, with their labels and a colour bar.

    cell : the side of a cell where there is room, in inches.
    beside : the room at the right, for a colour bar or a legend.
    tall : the least height of all panels together, so that the colour bar's label has room.
    panel : (width, height) of a panel, where cells do not decide it.
    panel_titles : whether each panel has a title of its own.
    `figure` and `axes` (rows, columns) are what was made; `labels_at(row, column)` says which axes
    show their labels, where not all do.
    """

    def __init__(self, rows: int, columns: int, shape: tuple[int, int], cell: float,
                 query_labels: list[str] | None, key_labels: list[str] | None, fonts: Fonts, *,
                 beside: float = BAR, tall: float = SMALLEST,
                 panel: tuple[float, float] | None = None, title: str | None = None,
                 panel_titles: bool = False) -> None:
        self.shape, self.rows, self.columns = shape, rows, columns
        self._labels, self._fonts = (query_labels, key_labels), fonts
        head = 0.23 if panel_titles else 0.0
        self._around = 0.34, beside, 0.34, 0.2 + head + (0.24 if title else 0)
        self._head, self._panel, self._tall = head, panel, tall
        self.repeated = rows * columns <= REPEATED_AT_MOST
        self._settle(cell)
        if self.repeated and rows * columns > 1 and (self.cell < 0.99 * cell or self._too_large()):
            self.repeated = False  # labels at the outer panels alone leave more for the cells
            self._settle(cell)
        self._make(title)

    def _settle(self, cell: float) -> None:
        """The panel's size and the gaps; labels and cells depend on each other: two rounds."""
        query_len, key_len = self.shape
        left, right, bottom, top = self._around
        self.width, self.height = self._panel or (key_len * cell, query_len * cell)
        for _ in range(2):
            self._measure_labels()
            repeats = (self.columns, self.rows) if self.repeated else (1, 1)
            room = PAGE_WIDTH - left - right - 0.15 * self.columns - repeats[0] * self.query_depth
            above = (PAGE_HEIGHT - bottom - top - (0.1 + self._head) * self.rows
                     - repeats[1] * self.key_depth)
            self.width, self.height = self._panel or panel_size(
                self.shape, cell, min(LARGEST, max(room / self.columns, SMALLEST)),
                min(LARGEST, max(above / self.rows, SMALLEST)))
        self._measure_labels()  # others may have room now
        self.cell = min(self.width / key_len, self.height / query_len)

    def _measure_labels(self) -> None:
        """How far the labels that have room reach out beside and below a panel."""
        query_len, key_len = self.shape
        queries = Ticks(self._labels[0], query_len, self.height / query_len, self._fonts,
                        horizontal=False)
        keys = Ticks(self._labels[1], key_len, self.width / key_len, self._fonts, horizontal=True)
        self.query_depth, self.key_depth = queries.depth + 0.1, keys.depth + 0.1

    def _too_large(self) -> bool:
        return (self.columns * (self.width + self.query_depth) > PAGE_WIDTH
                or self.rows * (self.height + self.key_depth) > PAGE_HEIGHT)

    def _make(self, title: str | None) -> None:
        left, right, bottom, top = self._around
        gap_x = 0.15 + (self.query_depth if self.repeated else 0)
        gap_y = 0.1 + self._head + (self.key_depth if self.repeated else 0)
        grid_width = self.columns * self.width + (self.columns - 1) * gap_x
        grid_height = self.rows * self.height + (self.rows - 1) * gap_y
        left, bottom = left + self.query_depth, bottom + self.key_depth
        spare = max(0, self._tall - grid_height) / 2
        bottom, top = bottom + spare, top + spare
        width, height = left + grid_width + right, bottom + grid_height + top
        if title:
            title = self._fonts.drawable(title)
            title_width = self._fonts.width(title.splitlines(), 11) * 1.03 + 0.2
            left += max(0, title_width - width) / 2
            width = max(width, title_width)
            further_lines = 0.18 * title.count("\n")
            top, height = top + further_lines, height + further_lines
        self.figure = figure_class()(figsize=(width, height), dpi=100)
        self.axes = self.figure.subplots(self.rows, self.columns, squeeze=False, gridspec_kw={
            "left": left / width, "right": (left + grid_width) / width,
            "bottom": bottom / height, "top": 1 - top / height,
            "wspace": gap_x / self.width, "hspace": gap_y / self.height})
        self._inches = left, bottom, grid_width, grid_height, width, height
        if title:
            middle = min(max(left + grid_width / 2, title_width / 2), width - title_width / 2)
            self.figure.suptitle(title, fontsize=11, x=middle / width, y=1 - 0.1 / height,
                                 va="top", fontfamily=self._fonts.families)

    def name_axes(self, x: str, y: str) -> None:
        """One name below all panels and one beside."""
        left, bottom, grid_width, grid_height, width, height = self._inches
        self.figure.supxlabel(x, x=(left + grid_width / 2) / width, y=0.1 / height, va="bottom",
                              fontsize=10)
        self.figure.supylabel(y, y=(bottom + grid_height / 2) / height, x=0.1 / width, ha="left",
                              fontsize=10)

    def bar_axes(self, below: float = 0.0) -> "Axes":
        """Axes for the colour bar, at most half a foot high, with some room left below it."""
        left, bottom, grid_width, grid_height, width, height = self._inches
        tall = max(grid_height, self._tall)
        long = min(tall, 6.0)
        top = bottom + (grid_height + tall) / 2
        return self.figure.add_axes(((left + grid_width + 0.2) / width,
                                     (top - long + below) / height, 0.18 / width,
                                     (long - below) / height))

    def has_labels(self, panel: int, panels: int) -> tuple[bool, bool]:
        """Whether the panel shows its query labels and its key labels: the outer ones do."""
        return (self.repeated or panel % self.columns == 0,
                self.repeated or panel + self.columns >= panels)


def panel_size(shape: tuple[int, int], cell: float, width: float,
               height: float) -> tuple[float, float]:
    """(width, height) in inches, at most those given. Cells are square unless it is too long."""
    query_len, key_len = shape
    if stretched(shape):
        return (min(max(key_len * cell, SMALLEST), width),
                min(max(query_len * cell, SMALLEST / 2), height))
    side = min(max(cell, SMALLEST / max(shape)), width / key_len, height / query_len)
    return key_len * side, query_len * side


def stretched(shape: tuple[int, int]) -> bool:
    """Whether a matrix is so long that its cells are not square."""
    return max(shape) > 8 * min(shape)


def cell_for(numbers: NDArray[np.float64] | None, digits: str) -> float:
    """The side of a cell, with room for the longest of the numbers written into it."""
    if numbers is None:
        return CELL
    longest = max((f"{number:{digits}}" for number in numbers.ravel()), key=len)
    return max(ANNOTATED_CELL, Fonts(()).width([longest], NUMBER_SIZE) + 0.08)
