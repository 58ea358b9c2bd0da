"""Heat maps: what is drawn, its scale and labels."""

import itertools
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager, pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import mha

WORDS = ["The", "cat", "sat", "on", "the", "mat"]


def some_weights(*shape):
    weights = np.random.default_rng(0).random(shape)
    return weights / weights.sum(axis=-1, keepdims=True)


def panels(figure):
    """The axes with a heat map, without the colour bar's."""
    return [ax for ax in figure.axes if ax.images]


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_heads_draws_every_head_of_one_batch_item_on_one_scale():
    weights = some_weights(2, 4, 6, 6)
    weights[1] *= np.array([1, 2, 3, 4])[:, None, None] / 4
    figure = mha.plot.heads(weights, WORDS, batch=1, title="Four heads")
    drawn = panels(figure)
    assert [ax.get_title() for ax in drawn] == ["head 0", "head 1", "head 2", "head 3"]
    for head, ax in enumerate(drawn):
        np.testing.assert_array_equal(ax.images[0].get_array(), weights[1, head])
        assert ax.images[0].get_clim() == (0, weights[1].max())
        assert labels(ax.xaxis) == labels(ax.yaxis) == WORDS
    assert len(figure.axes) == 5  # one colour bar
    assert figure.get_suptitle() == "Four heads"


def test_heads_draws_the_chosen_heads_and_scales_to_them():
    weights = some_weights(8, 5, 7)
    weights[0] = 1
    figure = mha.plot.heads(weights, heads=[6, -1, 2], columns=2)
    assert [ax.get_title() for ax in panels(figure)] == ["head 6", "head 7", "head 2"]
    assert panels(figure)[0].images[0].get_clim()[1] == weights[[6, 7, 2]].max()
    assert panels(figure)[0].get_gridspec().ncols == 2


def test_numbers_are_written_into_small_matrices():
    def numbers(figure):
        return [text.get_text() for text in panels(figure)[0].texts]

    weights = some_weights(3, 3)
    assert numbers(mha.plot.attention(weights)) == [f"{w:.2f}" for w in weights.ravel()]
    assert numbers(mha.plot.attention(weights, annotate=False)) == []
    assert numbers(mha.plot.attention(some_weights(30, 30))) == []
    assert len(numbers(mha.plot.heads(some_weights(2, 12, 12), annotate=True))) == 144


def test_attention_draws_one_matrix_with_labels():
    figure = mha.plot.attention(some_weights(1, 1, 2, 3), ["a", "b"], ["x", "y", "z"], vmax=0.5,
                                title="t")
    (ax,) = panels(figure)
    assert (labels(ax.yaxis), labels(ax.xaxis)) == (["a", "b"], ["x", "y", "z"])
    assert ax.images[0].get_clim() == (0, 0.5)
    assert (ax.get_xlabel(), ax.get_ylabel(), figure.get_suptitle()) == ("key", "query", "t")


def test_importance_is_a_map_or_bars():
    scores = np.array([[0.1, 0.9, 0.3], [-0.2, 0.0, 0.5]])
    figure = mha.plot.importance(scores, label="ablation", title="two layers")
    ax, colour_bar = figure.axes
    image = ax.images[0]
    np.testing.assert_array_equal(image.get_array(), scores)
    assert image.get_clim() == (-0.2, 0.9)
    assert [text.get_text() for text in ax.texts] == [f"{score:.2f}" for score in scores.ravel()]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")
    assert colour_bar.get_ylabel() == "ablation"
    assert figure.get_suptitle() == "two layers"
    bars = mha.plot.importance(scores[1]).axes[0].patches
    assert [bar.get_height() for bar in bars] == scores[1].tolist()
    assert not mha.plot.importance(np.ones((13, 3))).axes[0].texts
    for row in ([-3.0, -0.5], [0.0, 0.0]):
        image = mha.plot.importance([row], cmap=pyplot.get_cmap("viridis")).axes[0].images[0]
        assert image.get_clim() == (min(row), 0 if row[0] else 1)
    small = mha.plot.importance([[-1e-3, 2e-5], [np.nan, 0.0]]).axes[0].texts
    assert [text.get_text() for text in small] == ["-1.0e-03", "2.0e-05", "nan", "0.0e+00"]
    assert mha.plot.importance([1.0, 2.0], cmap=pyplot.get_cmap("viridis")).axes[0].patches
    own = Figure().subplots()
    assert mha.plot.importance(scores, ax=own) is own.figure
    for wrong in (np.ones((2, 2, 2)), np.ones((0, 3)), 1.0):
        with pytest.raises(ValueError, match="scores: got shape"):
            mha.plot.importance(wrong)


def test_mask_draws_two_colours_with_a_legend():
    figure = mha.plot.mask(mha.masks.causal(4))
    (ax,) = panels(figure)
    np.testing.assert_array_equal(ax.images[0].get_array(), np.tri(4))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["attend", "blocked"]


def test_a_block_mask_is_drawn_in_cells():
    """Its axes count tokens; a cell of which one pair is visible is to be seen."""
    mask = mha.BlockMask.causal(4)
    np.testing.assert_array_equal(panels(mha.plot.mask(mask))[0].images[0].get_array(), np.tri(4))
    (ax,) = panels(mha.plot.mask(mha.BlockMask.strided(100_000, stride=200_000)))
    drawn = ax.images[0].get_array()
    assert drawn.shape == (512, 512)
    assert (np.diag(drawn) > 0.3).all()
    assert np.count_nonzero(drawn) == len(drawn)
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["0", "20,000", "40,000", "60,000", "80,000"]


def test_figures_are_not_known_to_pyplot_and_draw_themselves_in_a_notebook():
    figure = mha.plot.heads(some_weights(2, 3, 3))
    assert isinstance(figure, Figure)
    assert pyplot.get_fignums() == []
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_existing_axes_are_drawn_into():
    figure, axes = pyplot.subplots(1, 3)
    try:
        assert mha.plot.heads(some_weights(2, 4, 4), axes=axes) is figure
        assert [len(ax.images) for ax in axes] == [1, 1, 0]
        assert mha.plot.attention(some_weights(4, 4), ax=axes[2]) is figure
        assert len(axes[2].images) == 1
        assert mha.plot.mask(mha.masks.causal(3), ax=axes[2], title="causal") is figure
        assert axes[2].get_title() == "causal"
    finally:
        pyplot.close(figure)


def drawn(figure):
    """The figure's renderer, after drawing, for it is then that everything has its place."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def assert_whole_and_readable(figure):
    """Nothing reaches over the figure's edge, and no label of an axis touches another."""
    renderer = drawn(figure)
    everything = figure.get_tightbbox(renderer)
    assert everything.x0 >= 0 and everything.y0 >= 0
    assert everything.x1 <= figure.get_figwidth() and everything.y1 <= figure.get_figheight()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            boxes = [label.get_window_extent(renderer) for label in axis.get_ticklabels()]
            boxes.sort(key=lambda box: (box.x0, box.y0))
            for one, other in itertools.pairwise(boxes):
                assert not one.overlaps(other)
    frames = [ax.get_tightbbox(renderer) for ax in panels(figure)]
    for one, other in itertools.combinations(frames, 2):
        assert not one.overlaps(other)


SIXTY = [f"{word}{i}" for i in range(10) for word in WORDS]


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [6, 16, 24, 32, 96])
def test_importance_of_many_layers_is_whole(layers):
    scores = some_weights(layers, 12 if layers < 16 else layers)
    assert_whole_and_readable(mha.plot.importance(scores, label="confidence", title="layers"))
    assert_whole_and_readable(mha.plot.importance(-1e-5 * scores, annotate=layers < 24))
    assert_whole_and_readable(mha.plot.importance(1e-5 * scores[0] - 1e-6, title="bars"))
    ticks = labels(mha.plot.importance(scores).axes[0].yaxis)
    assert ticks[:2] == ["0", "1"] or layers > 32


@pytest.mark.thorough
@pytest.mark.parametrize("draw", [
    lambda: mha.plot.attention(some_weights(60, 60), SIXTY, title="sixty tokens"),
    lambda: mha.plot.attention(some_weights(1, 60), ["query"], SIXTY),
    lambda: mha.plot.attention(some_weights(60, 2), SIXTY, ["a", "b"]),
    lambda: mha.plot.attention(some_weights(3, 3), ["a" * 200, "b", "c" * 30]),
    lambda: mha.plot.attention([[1.0]], ["a"]),
    lambda: mha.plot.attention(some_weights(300, 300)),
    lambda: mha.plot.attention(some_weights(4, 4) * 1e-6, title="two\nlines"),
    lambda: mha.plot.mask(mha.masks.causal(60), SIXTY, title="causal"),
    lambda: mha.plot.heads(some_weights(12, 60, 60), SIXTY, title="twelve heads"),
    lambda: mha.plot.heads(some_weights(5, 2, 60), ["a", "b"], SIXTY),
    lambda: mha.plot.heads(some_weights(7, 60, 3), SIXTY, ["a", "b", "c"]),
    lambda: mha.plot.heads(some_weights(6, 30, 30), SIXTY[:30], columns=6),
    lambda: mha.plot.heads(some_weights(13, 200, 25), range(200), ["a", *["b" * 50] * 23, "c"]),
    lambda: mha.plot.heads(some_weights(12, 1, 9), ["a"], ["b" * 50] * 9, title="two\nlines"),
    lambda: mha.plot.importance(some_weights(1, 60), label="a label as long as an arm or a leg"),
])
def test_pictures_of_many_tokens_are_whole(draw):
    assert_whole_and_readable(draw())


@pytest.mark.thorough
def test_ninety_six_heads_are_one_page():
    figure = mha.plot.heads(some_weights(96, 12, 12), SIXTY[:12], title="96 heads")
    assert figure.get_figwidth() < 18 and figure.get_figheight() < 18
    assert_whole_and_readable(figure)
    assert len(panels(figure)) == 96
    shown = [(bool(labels(ax.yaxis)), bool(labels(ax.xaxis))) for ax in panels(figure)]
    assert shown == [(head % 12 == 0, head >= 84) for head in range(96)]


@pytest.mark.parametrize("heads", [16, 17, 20, 23, 24, 32, 40, 64, 128])
def test_many_heads_leave_few_places_empty(heads):
    columns = mha.plot._layout.columns_for(heads, 10, 10)
    rows = -(-heads // columns)
    assert rows * columns - heads <= max(1, heads // 12)
    assert rows <= columns <= 3 * rows


def test_labels_in_existing_axes_are_thinned_to_their_room():
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 4))
    try:
        mha.plot.heads(some_weights(2, 60, 60), SIXTY, axes=axes)
        renderer = drawn(figure)
        for label_list in (axes[0].get_xticklabels(), axes[0].get_yticklabels()):
            boxes = [label.get_window_extent(renderer) for label in label_list]
            assert len(boxes) > 10
            assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
    finally:
        pyplot.close(figure)


def font_with(letters, name, folder):
    """A font file that has a square for each of the letters."""
    builder = FontBuilder(1000, isTTF=True)
    glyphs = [".notdef", *(f"u{ord(letter):X}" for letter in letters)]
    builder.setupGlyphOrder(glyphs)
    builder.setupCharacterMap({ord(letter): f"u{ord(letter):X}" for letter in letters})
    pen = TTGlyphPen(None)
    for step, at in (("moveTo", (0, 0)), ("lineTo", (0, 800)), ("lineTo", (800, 800)),
                     ("lineTo", (800, 0))):
        getattr(pen, step)(at)
    pen.closePath()
    square = pen.glyph()
    builder.setupGlyf(dict.fromkeys(glyphs, square))
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": name, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(folder / f"{name}.ttf")
    return str(folder / f"{name}.ttf")


@pytest.fixture
def own_fonts(monkeypatch):
    """matplotlib knows the fonts that came with it alone, and finds those of a list."""
    manager, found = font_manager.fontManager, []
    own = [font for font in manager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(manager, "ttflist", own)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: found)
    monkeypatch.setattr(mha.plot._labels, "_said", set())
    return found


CJK = ["猫", "が", "座った", "The", "안녕", "東京"]


def test_letters_that_the_font_lacks_come_from_one_that_has_them(own_fonts, tmp_path):
    own_fonts += [font_with("猫が座った東京", "Kana", tmp_path),
                  font_with("안녕", "Hangul", tmp_path), str(tmp_path / "missing.ttf")]
    figure = mha.plot.attention(some_weights(6, 6), CJK, title="東京")
    assert_whole_and_readable(figure)  # a box for a letter would be a warning, and so an error
    (ax,) = panels(figure)
    assert labels(ax.xaxis) == labels(ax.yaxis) == CJK
    families = ax.get_xticklabels()[0].get_fontfamily()
    assert families[0] == "sans-serif" and set(families[1:]) == {"Kana", "Hangul"}
    assert_whole_and_readable(mha.plot.importance(some_weights(4), label="座", title="猫"))


def test_letters_that_no_font_has_are_numbers_and_said_once(own_fonts, tmp_path):
    own_fonts.append(font_with("猫", "Cat", tmp_path))
    with pytest.warns(UserWarning, match=r"no font that matplotlib finds has 'が.*fonts-noto-cjk"):
        figure = mha.plot.heads(some_weights(2, 6, 6), CJK, title="座った cat")
    assert_whole_and_readable(figure)
    assert labels(panels(figure)[0].xaxis) == ["猫", "U+304C", "U+5EA7…", "The", "U+C548…",
                                               "U+6771…"]
    assert figure.get_suptitle() == "U+5EA7… cat"
    mha.plot.heads(some_weights(2, 6, 6), CJK, title="座った cat")


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 4, 8, 12])
def test_labels_are_neither_clipped_nor_on_top_of_each_other(count):
    words = ["[CLS]", "internationalization", "of", "incomprehensibilities", "$x$ costs $", "##s",
             "a", "b", "c", "d", "e", "[SEP]"]
    figure = mha.plot.heads(some_weights(count, 12, 12), words, title="A title")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    for ax in panels(figure):
        boxes = [label.get_window_extent(renderer) for label in ax.get_xticklabels()]
        boxes += [label.get_window_extent(renderer) for label in ax.get_yticklabels()]
        for box in boxes:
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
    frames = [ax.get_tightbbox(renderer) for ax in panels(figure)]
    for i, frame in enumerate(frames):
        assert not any(frame.overlaps(other) for other in frames[:i])


def test_a_long_title_fits_into_a_small_picture():
    for figure in (mha.plot.attention(np.eye(2), title="A title that is wider than the map" * 2),
                   mha.plot.mask(mha.masks.causal(2), title="Another long title, of a mask" * 2),
                   mha.plot.heads(np.eye(2), title="And a third long title, of some heads" * 2)):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        box = figure._suptitle.get_window_extent(canvas.get_renderer())
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_many_labels_are_thinned():
    ax = panels(mha.plot.attention(some_weights(3, 200), key_labels=range(200)))[0]
    assert len(labels(ax.xaxis)) == 50
    assert labels(ax.xaxis)[:3] == ["0", "4", "8"]


def test_weights_of_zero_and_nan_are_drawn():
    assert panels(mha.plot.attention(np.zeros((2, 2))))[0].images[0].get_clim() == (0, 1)
    weights = np.array([[np.nan, 0.25], [0.5, 0.5]])
    assert panels(mha.plot.attention(weights))[0].images[0].get_clim() == (0, 0.5)


@pytest.mark.parametrize("annotate", [False, True])
@pytest.mark.parametrize("draw", [
    lambda weights, annotate: mha.plot.attention(weights[0], annotate=annotate),
    lambda weights, annotate: mha.plot.heads(weights, annotate=annotate),
    lambda weights, annotate: mha.plot.heads(weights, annotate=annotate,
                                             axes=Figure().subplots(1, 2)),
    lambda weights, annotate: mha.plot.importance(weights[0], annotate=annotate)])
def test_nan_is_drawn_as_such(draw, annotate):
    weights = some_weights(2, 5, 5)
    figure = draw(weights, annotate)
    assert not any(ax.get_legend() for ax in figure.axes)
    weights[0, 1] = weights[0, 3, 4] = np.nan
    figure = draw(weights, annotate)
    ax = panels(figure)[0]
    image = ax.images[0]
    colours = image.cmap(image.norm(image.get_array()))
    grey = matplotlib.colors.to_rgba(mha.plot.NAN_COLOUR)
    is_grey = (colours == grey).all(axis=-1)
    np.testing.assert_array_equal(is_grey, np.isnan(weights[0]))
    if annotate:
        assert [text.get_text() for text in ax.texts].count("nan") == 6
    else:
        (crosses,) = ax.collections
        assert len(crosses.get_offsets()) == 6
    assert [text.get_text() for ax in figure.axes if ax.get_legend()
            for text in ax.get_legend().get_texts()] == ["NaN"]
    if figure.axes[-1].get_label() != "<colorbar>":
        assert_whole_and_readable(figure)


def test_nan_among_bars_is_a_word():
    ax = mha.plot.importance([1.0, np.nan, 2.0]).axes[0]
    assert [(text.get_text().strip(), text.get_position()) for text in ax.texts] == [
        ("NaN", (1, 0))]


LAYER = mha.MultiHeadAttention(12, 2, rng=0)
OUTPUT, WEIGHTS = LAYER(np.random.default_rng(0).standard_normal((2, 3, 12)), return_weights=True)


@pytest.mark.parametrize("draw", [mha.plot.heads, mha.plot.attention, mha.plot.importance,
                                  lambda weights: mha.plot.text(weights, "abc")])
def test_what_a_call_returns_is_refused_where_weights_are_wanted(draw):
    for returned in ((OUTPUT, WEIGHTS), (WEIGHTS, OUTPUT), (OUTPUT[0], WEIGHTS[0]),
                     (OUTPUT, WEIGHTS, OUTPUT), (OUTPUT,)):
        with pytest.raises(TypeError, match=r"got a tuple of . arrays?, .*output, weights ="):
            draw(returned)
    with pytest.raises(ValueError, match="got rows or matrices of unlike sizes"):
        draw([[1, 2], [3]])
    if draw is not mha.plot.importance:
        for output in (OUTPUT, OUTPUT[0], OUTPUT[:, None]):
            with pytest.raises(ValueError, match=r"weights: got numbers below 0 .*return_w"):
                draw(output)


@pytest.mark.parametrize("draw", [mha.plot.heads, mha.plot.attention,
                                  lambda weights: mha.plot.text(weights, "abc", "abcdefgh")])
def test_an_output_without_negative_numbers_is_refused_by_its_sums(draw):
    output = 0.3 + np.random.default_rng(0).random((3, 8))
    with pytest.raises(ValueError, match=r"weights: got rows that sum to .*return_weights=True"):
        draw(output)
    draw(output / output.sum(axis=-1, keepdims=True) * 2)  # what dropout of a half may leave


def test_rows_may_come_as_a_tuple():
    assert "90" in mha.plot.text(((0.9, 0.1), (0.4, 0.6)), "ab", width=80)
    assert "90" in mha.plot.text((np.array([0.9, 0.1]), np.array([0.4, 0.6])), "ab", width=80)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: mha.plot.heads(np.ones(3)), ValueError, r"weights: got shape \(3,\)"),
    (lambda: mha.plot.heads(np.ones((1, 2, 0, 3))), ValueError, "weights: got shape"),
    (lambda: mha.plot.heads(np.ones((1, 2, 3, 3)), batch=1), ValueError, "batch: got 1"),
    (lambda: mha.plot.heads(np.ones((2, 3, 3)), heads=[2]), ValueError, r"heads: got \[2\]"),
    (lambda: mha.plot.heads(np.ones((2, 3, 3)), heads=[]), ValueError, "heads: got"),
    (lambda: mha.plot.heads(np.ones((2, 3, 3)), columns=0), ValueError, "columns: got 0"),
    (lambda: mha.plot.heads(np.ones((2, 3, 3)), WORDS), ValueError,
     "query_labels: got 6, wanted 3"),
    (lambda: mha.plot.heads(np.ones((2, 3, 3)), axes=[]), ValueError, "axes: got 0"),
    (lambda: mha.plot.attention(np.ones((2, 3, 3))), ValueError, r"weights\[0\]"),
    (lambda: mha.plot.attention(np.ones((1, 2, 3, 3))), ValueError, r"weights\[0, 0\]"),
    (lambda: mha.plot.attention(np.ones((3, 3)), vmax=0), ValueError, "vmax: got 0"),
    (lambda: mha.plot.attention(np.ones((3, 3), complex)), TypeError, "weights: got an array of"),
    (lambda: mha.plot.mask(np.ones((3, 3))), TypeError, "mask: got an array of float64"),
    (lambda: mha.plot.mask(mha.BlockMask.prefix([1, 2], 3)), ValueError, "BlockMask of batch 2"),
    (lambda: mha.plot.mask(mha.BlockMask.causal(0, 5)), ValueError, "0 queries and 5 keys"),
    (lambda: mha.plot.text(np.ones((2, 2, 2)), "ab"), ValueError, "weights: got shape"),
    (lambda: mha.plot.text(np.ones((2, 3)), "ab"), ValueError, "key_words: got none"),
    (lambda: mha.plot.text(np.ones((2, 3)), "abc"), ValueError, "query_words: got 3, wanted 2"),
    (lambda: mha.plot.text(np.ones((2, 2)), "ab", width=9), ValueError, "width: got 9, wanted at"),
])
def test_what_does_not_fit_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_without_matplotlib_pictures_say_what_to_install_and_text_works():
    program = """
import sys
sys.modules["matplotlib"] = None
import mha
print(mha.plot.text([[1.0]], ["cat"]))
try:
    mha.plot.heads([[1.0]])
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8",
                         env=None, check=True)
    assert "██100" in run.stdout
    assert "pip install matplotlib" in run.stdout
