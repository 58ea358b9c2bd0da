"""The page of mha.view at its edges: odd shapes, narrow windows, directions, paper, other keys."""

import numpy as np
import pytest
from pages import WORDS, random_weights, settle

import mha


def box(page, selector):
    return page.locator(selector).bounding_box()


def title_at(page, canvas, x, y):
    corner = box(page, canvas)
    page.mouse.move(corner["x"] + x, corner["y"] + y)
    settle(page)
    return page.inner_text("#isolated-title").replace("\u2068", "").replace("\u2069", "")


@pytest.mark.parametrize(("queries", "keys"), [(1, 4000), (4, 4000), (4000, 4), (600, 3), (40, 40)])
def test_heat_maps_of_any_shape_can_be_seen_and_pointed_at(opened, queries, keys):
    weights = np.full((queries, keys), 1 / keys)
    page = opened(mha.view.heads(weights, range(queries), range(keys)))
    page.check("input[value=heat-map]")
    settle(page)
    size = box(page, "#heat-maps canvas")
    assert size["height"] >= 48 and size["width"] >= 48 and size["height"] <= 8300
    title = title_at(page, "#heat-maps canvas", size["width"] - 3, 46 if queries < 40 else 300)
    assert title.startswith("query ")
    assert int(title.split("→ ")[1].split(":")[0]) >= keys - 1 - 3 * keys // size["width"]


def test_modes_have_thresholds_of_their_own(opened):
    weights = np.full((4, 4), 0.25)
    page = opened(mha.view.heads(weights, WORDS))
    assert page.inner_text("#threshold-shown") == "19 %"
    assert page.inner_text("#left-out") == "Weights below 19 % are not shown."
    page.check("input[value=heat-map]")
    assert page.inner_text("#threshold-shown") == "0 %"
    assert page.inner_text("#left-out") == ""
    page.locator("#threshold").fill("90")
    page.check("input[value=lines]")
    assert page.inner_text("#threshold-shown") == "19 %"
    page.check("input[value=heat-map]")
    settle(page)
    assert page.inner_text("#threshold-shown") == "50 %"


@pytest.mark.parametrize("heads", [4, 12, 24])
@pytest.mark.parametrize("width", [420, 700, 1000, 1040, 1280])
def test_nothing_covers_the_lines(opened, width, heads):
    page = opened(mha.view.model(random_weights(2, heads, 4, 4), WORDS))
    page.set_viewport_size({"width": width, "height": 700})
    settle(page)
    left, detail = box(page, "#left"), box(page, "#detail")
    beside = left["x"] + left["width"] <= detail["x"] + 1
    if width >= 640:
        assert beside
    else:
        assert not beside and page.evaluate(
            "getComputedStyle(document.getElementById('left')).position") == "static"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_words_from_right_to_left_keep_their_numbers(opened):
    page = opened(mha.view.heads(np.full((2, 2), 0.5), ["שלום", "مرحبا"], title="\u202eabc"))
    page.check("input[value=heat-map]")
    settle(page)
    page.focus("#heat-maps canvas")
    page.keyboard.press("ArrowRight")
    settle(page)
    pieces = page.locator("#isolated-title bdi").all_inner_texts()
    assert pieces == ["שלום", "שלום"]
    assert page.inner_text("#title") == "U+202Eabc"


def test_the_legend_says_when_it_ends(opened):
    page = opened(mha.view.heads(random_weights(26, 3, 3), WORDS[:3]))
    page.get_by_role("button", name="all heads of layer 0").click()
    settle(page)
    items = page.locator("#legend li").all_inner_texts()
    assert len(items) == 25 and items[-1].startswith("and 2 more")


def test_arrows_go_on_to_the_names_of_rows_and_columns(opened):
    page = opened(mha.view.model(random_weights(2, 3, 4, 4), WORDS))
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.locator("#grid [tabindex='0']").count() == 1  # one stop of Tab
    page.focus("#grid [tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == "head 1 of all layers"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    settle(page)
    assert page.inner_text("#chosen") == "2 heads"
    for key in ("ArrowDown", "ArrowDown", "Home", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate(focused) == "all heads of layer 1"
    page.keyboard.press("End")
    assert page.evaluate(focused) == "layer 1, head 2"


def test_keys_with_alt_belong_to_the_browser(opened):
    page = opened(mha.view.heads(random_weights(2, 4, 4), WORDS))
    page.focus("#queries button >> nth=1")
    stopped = page.evaluate("""() => ["ArrowDown", "ArrowLeft", "Home"].map(
        key => !document.activeElement.dispatchEvent(new KeyboardEvent(
            "keydown", {key, altKey: true, bubbles: true, cancelable: true})))""")
    assert stopped == [False] * 3
    page.focus("#grid [tabindex='0']")
    page.keyboard.press("Control+ArrowRight")
    assert page.evaluate("document.activeElement.dataset.head") == "0"


def test_letting_go_by_the_button_keeps_the_focus_near(opened):
    page = opened(mha.view.heads(random_weights(1, 4, 4), WORDS))
    page.click("#queries button >> nth=1")
    settle(page)
    page.focus("#let-go")
    page.keyboard.press("Enter")
    settle(page)
    assert page.evaluate("document.activeElement.id") == "isolated-title"


def test_the_strongest_tokens_have_their_places(opened):
    page = opened(mha.view.heads(np.array([[0.25, 0.75], [0.5, 0.5]]), ["a", "a"]))
    page.hover("#queries button >> nth=0")
    settle(page)
    places = page.locator("#strongest li").evaluate_all(
        "items => items.map(item => getComputedStyle(item, '::before').content)")
    assert places == ['"1"', '"0"']


def test_paper_says_what_is_left_out_and_has_its_scale(opened):
    page = opened(mha.view.heads(random_weights(1, 4, 4), WORDS))
    page.click("#queries button >> nth=1")
    page.emulate_media(media="print")
    assert page.is_visible("#left-out") and not page.is_visible("#let-go")
    scale = "getComputedStyle(document.querySelector('#scale span'))"
    assert page.evaluate(f"{scale}.printColorAdjust") == "exact"
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")  # in a frame
    page.evaluate("""() => ["beforeprint", "beforeprint", "afterprint"].forEach(
        name => window.dispatchEvent(new Event(name)))""")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_heat_map_drawn_for_a_wide_window_fits_on_paper(opened):
    page = opened(mha.view.heads(random_weights(1, 40, 40), range(40)))
    page.set_viewport_size({"width": 2560, "height": 1200})
    page.check("input[value=heat-map]")
    settle(page)
    drawn = box(page, "#heat-maps canvas")
    page.emulate_media(media="print")
    page.evaluate("document.querySelector('#detail').style.width = '640px'")
    printed = box(page, "#heat-maps canvas")
    assert drawn["width"] > 900 and printed["width"] <= 640
    assert abs(printed["height"] / printed["width"] - drawn["height"] / drawn["width"]) < 0.01


def test_the_frame_in_a_notebook_holds_the_page(opened):
    for weights in (random_weights(4, 6, 6), random_weights(6, 12, 6, 6), random_weights(1, 3, 3)):
        view = mha.view.model([weights] if weights.ndim == 3 else weights, range(weights.shape[-1]))
        page = opened(view)
        page.set_viewport_size({"width": 864, "height": view.height})
        settle(page)
        assert page.evaluate("document.documentElement.scrollHeight") <= view.height
