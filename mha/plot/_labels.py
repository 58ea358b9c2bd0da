"""The words beside a picture's rows and columns: as many as there are, none too long, in a font
that has their letters.
"""

import contextlib
import itertools
import math
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.font_manager import FontEntry

LONGEST = 40          # columns; a longer label is cut
LABELS_AT_MOST = 60   # of a longer axis every second (third, ...) label is shown
LINE = 1.2 / 72       # inches that a line of text takes for each point of its size
# Families that have thousands of letters, looked at before all others.
LARGE_FAMILIES = ("Noto Sans CJK", "Source Han Sans", "Hiragino", "PingFang", "Microsoft YaHei",
                  "Yu Gothic", "MS Gothic", "Malgun Gothic", "Apple SD Gothic", "WenQuanYi",
                  "IPA", "Takao", "VL Gothic", "Nanum", "Droid Sans Fallback", "Noto Sans",
                  "FreeSans", "Arial Unicode", "Unifont")
# Fonts that have a box or nothing for every letter.
WITHOUT_LETTERS = ("Last Resort", "LastResort", "Adobe Blank", "Fallback SIL")


def checked(query_labels: Sequence[object] | None, key_labels: Sequence[object] | None,
            query_len: int, key_len: int) -> tuple[list[str] | None, list[str] | None]:
    """Both as lists of printable words of the right number, or None. Keys default to queries."""
    if key_labels is None and query_labels is not None and query_len == key_len:
        key_labels = query_labels
    return (None if query_labels is None else words_of(query_labels, query_len, "query_labels"),
            None if key_labels is None else words_of(key_labels, key_len, "key_labels"))


def words_of(labels: Sequence[object], length: int, name: str) -> list[str]:
    """The labels as printable words, of which there must be so many."""
    return ["".join(c if c.isprintable() else " " for c in text)
            for text in texts_of(labels, length, name)]


def texts_of(labels: Sequence[object], length: int, name: str) -> list[str]:
    """The labels as text, of which there must be so many."""
    try:
        texts = [str(label) for label in itertools.islice(labels, length + 1)]
    except TypeError:
        raise TypeError(f"{name}: got {type(labels).__name__}, wanted a sequence of {length}"
                        " tokens") from None
    if len(texts) != length:
        got = len(labels) if isinstance(labels, Sized) else len(texts)
        raise ValueError(f"{name}: got {got}, wanted {length}, one a row or column of the weights")
    return texts


def columns_of(word: str) -> int:
    """Columns that a terminal gives the word: two for wide characters, none for combining ones."""
    return sum(0 if unicodedata.category(character) in ("Mn", "Me", "Cf")
               else 2 if unicodedata.east_asian_width(character) in "WF" else 1
               for character in word)


def cut(word: str, columns: int) -> str:
    """The word, or as much of it as fits before an ellipsis."""
    if columns_of(word) <= columns:
        return word
    kept = ""
    for character in word:
        if columns_of(kept + character) > columns - 1:
            break
        kept += character
    return kept + "…"


class Fonts:
    """What the texts of one picture are drawn with.

    families : matplotlib's own, then others that have what those lack.
    lacking : the letters that no font has, drawn as their numbers.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        from matplotlib import rcParams
        self.families = list(rcParams["font.family"])
        letters = frozenset(letter for text in texts for letter in text
                            if ord(letter) > 127 and not letter.isspace())
        for path in _own_fonts() if letters else ():
            letters -= _found(path, letters)
        for fonts in (_known_fonts, _new_fonts):
            for family, path in fonts() if letters else ():
                found = _found(path, letters)
                if found:
                    self.families.append(family)
                    letters -= found
                if not letters:
                    break
        self.lacking = letters
        if letters:
            _say_once("".join(sorted(letters)))

    def drawable(self, text: str) -> str:
        """The text, with U+ and a number for what no font has: one for a run of such letters."""
        shown, in_run = "", False
        for letter in text:
            lacks = letter in self.lacking
            if not lacks:
                shown += letter
            elif not in_run:
                shown += f"U+{ord(letter):04X}"
            elif not shown.endswith("…"):
                shown += "…"
            in_run = lacks
        return shown

    def width(self, texts: Iterable[str], size: float) -> float:
        """Inches that the widest of the texts takes at a size in points."""
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path
        properties = FontProperties(family=self.families, size=size)
        return max((text_to_path.get_text_width_height_descent(text, properties, False)[0] / 72
                    for text in texts if text), default=0.0)


_said: set[str] = set()  # the letters that a warning has named
_letters_of: dict[tuple[str, frozenset[str]], frozenset[str]] = {}  # answers of _found


def _say_once(letters: str) -> None:
    if letters in _said:
        return
    _said.add(letters)
    warnings.warn(f"no font that matplotlib finds has {letters!r}: labels show their numbers."
                  " Install a font that has them (Debian: apt install fonts-noto-cjk)",
                  stacklevel=5)


def _own_fonts() -> Iterator[str]:
    from matplotlib import font_manager, rcParams
    for family in rcParams["font.family"]:
        yield font_manager.findfont(font_manager.FontProperties(family=[family]))


def _known_fonts() -> Iterator[tuple[str, str]]:
    """(family, path) of all that matplotlib knows, the likeliest to have many letters first."""
    from matplotlib import font_manager
    for font in sorted(font_manager.fontManager.ttflist, key=_rank):
        if not font.name.startswith(WITHOUT_LETTERS):
            yield font.name, font.fname


def _new_fonts() -> Iterator[tuple[str, str]]:
    """The same of those installed since: matplotlib remembers the fonts of its first day."""
    from matplotlib import font_manager
    known = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
            with contextlib.suppress(Exception):  # whatever a broken file makes FreeType say
                font_manager.fontManager.addfont(path)
    for family, path in _known_fonts():
        if path not in known:
            yield family, path


def _rank(font: "FontEntry") -> tuple[int, bool, bool, str]:
    """Sorts fonts: large families first, upright and regular before bold and italic."""
    place = next((i for i, family in enumerate(LARGE_FAMILIES) if font.name.startswith(family)),
                 len(LARGE_FAMILIES))
    return place, font.style != "normal", str(font.weight) not in ("400", "normal"), font.name


def _found(path: str, letters: frozenset[str]) -> frozenset[str]:
    """Those of the letters that the font has; remembered, for there may be hundreds of fonts."""
    if (path, letters) not in _letters_of:
        from matplotlib.ft2font import FT2Font
        found = frozenset[str]()
        with contextlib.suppress(Exception):  # bitmaps, as most colour emoji, cannot be opened
            font = FT2Font(path)
            found = frozenset(letter for letter in letters if font.get_char_index(ord(letter)))
        _letters_of[path, letters] = found
    return _letters_of[path, letters]


class Ticks:
    """Which labels an axis of cells shows, how large, and whether upright.

    labels None numbers the cells. `positions` and `words` are what is shown; `depth` is the room,
    in inches, that the words take beside the axis.
    """

    def __init__(self, labels: list[str] | None, length: int, cell: float, fonts: Fonts, *,
                 horizontal: bool) -> None:
        self.size = next((size for size in (8, 7, 6) if size * LINE <= cell), 7)
        line = self.size * LINE
        shown = labels
        if shown is None:
            shown = [str(i) for i in range(length)]
            room = fonts.width(shown[-1:], self.size) + 0.05 if horizontal else 0
            step = _round_step(max(1.5 * line, room) / cell)
        else:
            step = max(math.ceil(length / LABELS_AT_MOST), math.ceil(line / cell - 0.01))
        self.positions = list(range(0, length, step))
        self.words = shown[::step]
        widest = fonts.width(self.words, self.size)
        self.upright = horizontal and labels is not None and widest + 0.05 > step * cell
        self.depth = widest if self.upright or not horizontal else line


def _round_step(at_least: float) -> int:
    """The first of 1, 2, 5, 10, 20, 50, ... that is no less."""
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if step >= at_least:
                return step
        power *= 10
