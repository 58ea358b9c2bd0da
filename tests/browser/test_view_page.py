"""The page of mha.view as people use it: pointer, keys, colours, hostile words."""

import base64
import zlib

import numpy as np
import pytest
from pages import WORDS, pixel, random_weights, settle

import mha

ROW = 22  # pixels a token


def strongest(page):
    """[(token, percents)] beside the isolated token."""
    return [tuple(item.split("\n")) for item in page.locator("#strongest li").all_inner_texts()]


def one_line_each():
    """Two heads of 4 tokens: head 0 looks at the next token, head 1 at the first."""
    return np.stack([np.roll(np.eye(4), 1, axis=1), np.eye(4)[[0, 0, 0, 0]]])


def test_the_page_has_every_number(opened):
    weights = random_weights(3, 5, 7, 6)
    weights[1, 2, 3] = np.nan
    page = opened(mha.view.model(weights, range(7), range(6)))
    codes, scale = page.evaluate("""async () => {
        const data = JSON.parse(document.getElementById("data").textContent);
        return [[...await unpack(data)], data.scale];
    }""")
    shown = np.where(np.array(codes) == 65535, np.nan, np.array(codes) * scale)
    np.testing.assert_allclose(shown, weights.ravel(), rtol=0, atol=np.nanmax(weights) / 65534 / 2)


def test_a_click_opens_a_head(opened):
    page = opened(mha.view.model(random_weights(2, 3, 4, 4), WORDS, title="two layers"))
    assert (page.title(), page.inner_text("#title")) == ("two layers", "two layers")
    assert page.inner_text("#chosen") == "Layer 0, head 0"
    page.click("button[data-head='4']")
    settle(page)
    assert page.inner_text("#chosen") == "Layer 1, head 1"
    pressed = page.locator("#grid [aria-pressed=true]").evaluate_all(
        "buttons => buttons.map(button => button.dataset.head)")
    assert pressed == ["4"]
    assert page.inner_text("#status") == "layer 1, head 1 shown"


def test_several_heads_by_control_by_their_names_and_by_the_check_box(opened):
    page = opened(mha.view.model(random_weights(2, 3, 4, 4), WORDS))

    def chosen():
        settle(page)
        return page.locator("#grid [aria-pressed=true]").evaluate_all(
            "buttons => buttons.map(button => Number(button.dataset.head))")

    page.click("button[data-head='2']", modifiers=["Control"])
    assert chosen() == [0, 2]
    assert page.locator("#legend li").all_inner_texts() == ["layer 0, head 0", "layer 0, head 2"]
    page.click("button[data-head='0']", modifiers=["Control"])
    assert chosen() == [2]
    page.click("button[data-head='2']", modifiers=["Control"])
    assert chosen() == [2]  # one stays
    page.get_by_role("button", name="all heads of layer 1").click()
    assert chosen() == [3, 4, 5]
    page.get_by_role("button", name="head 1 of all layers").click()
    assert chosen() == [1, 4]
    page.check("#several")
    page.click("button[data-head='5']")
    assert chosen() == [1, 4, 5]


def test_lines_go_from_query_to_key(opened):
    page = opened(mha.view.heads(one_line_each(), WORDS))
    width = page.locator("#line-canvas").bounding_box()["width"]
    for query in range(4):
        y = ROW * (query + 0.5)
        assert pixel(page, "#line-canvas", 1, y)[3] > 80
        assert pixel(page, "#line-canvas", width - 2, y)[3] > 80  # of the query before
    assert pixel(page, "#line-canvas", width / 2, ROW * 1)[3] > 60  # from 0 to 1, half-way
    page.click("button[data-head='1']")
    settle(page)
    assert pixel(page, "#line-canvas", width - 2, ROW * 0.5)[3] > 80
    assert pixel(page, "#line-canvas", width - 2, ROW * 2.5)[3] == 0


def test_colours_that_come_again_are_dashed(opened):
    weights = np.zeros((9, 4, 4))
    weights[:8, :, 0] = 1
    weights[8] = np.eye(4)
    page = opened(mha.view.heads(weights, WORDS))

    def inked_along_query_2():
        settle(page)
        return {pixel(page, "#line-canvas", x, ROW * 2.5)[3] > 80 for x in range(150, 250)}

    page.click("button[data-head='8']")
    assert inked_along_query_2() == {True}
    page.get_by_role("button", name="all heads of layer 0").click()
    assert inked_along_query_2() == {True, False}
    styles = page.locator("#legend span").evaluate_all(
        "spans => spans.map(span => getComputedStyle(span).borderTopStyle)")
    assert styles == ["solid"] * 8 + ["dashed"]


def test_hovering_isolates_a_token_on_either_side(opened):
    weights = one_line_each()
    weights[0, 1] = [0.25, 0.125, 0.5, 0.125]
    page = opened(mha.view.heads(weights, WORDS))
    width = page.locator("#line-canvas").bounding_box()["width"]
    page.hover("#queries button >> nth=1")
    settle(page)
    assert page.inner_text("#isolated-title") == "query 1: cat"
    assert strongest(page) == [("sat", "50 %"), ("The", "25 %"), ("cat", "13 %"), ("down", "13 %")]
    assert pixel(page, "#line-canvas", 1, ROW * 1.5)[3] > 80
    assert pixel(page, "#line-canvas", 1, ROW * 2.5)[3] == 0
    shade = page.locator("#keys button").evaluate_all(
        "buttons => buttons.map(button => Number(button.style.getPropertyValue('--weight')))")
    assert shade == [0.5, 0.25, 1, 0.25]
    page.hover("#keys button >> nth=0")
    settle(page)
    assert page.inner_text("#isolated-title") == "key 0: The"
    assert strongest(page) == [("down", "100 %"), ("cat", "25 %")]
    assert page.inner_text("#status") == "key 0, The, is attended by down 100 %, cat 25 %"
    page.hover("#title")
    settle(page)
    assert page.inner_text("#isolated-title") == "Point at a token"
    assert pixel(page, "#line-canvas", 1, ROW * 2.5)[3] > 80
    assert pixel(page, "#line-canvas", width / 2, ROW * 2)[3] > 60


def test_a_click_keeps_a_token_until_escape(opened):
    page = opened(mha.view.heads(one_line_each(), WORDS))
    page.click("#queries button >> nth=1")
    page.hover("#queries button >> nth=3")
    settle(page)
    assert page.inner_text("#isolated-title") == "query 1: cat"
    assert page.get_attribute("#queries button >> nth=1", "aria-pressed") == "true"
    page.keyboard.press("Escape")
    settle(page)
    assert page.inner_text("#isolated-title") == "Point at a token"


def test_a_finger_lets_go_what_it_kept(opened):
    page = opened(mha.view.heads(one_line_each(), WORDS), has_touch=True)
    page.tap("#queries button >> nth=1")
    settle(page)
    assert page.inner_text("#isolated-title") == "query 1: cat"
    assert page.is_visible("#let-go")
    page.tap("#queries button >> nth=1")
    settle(page)
    assert page.inner_text("#isolated-title") == "Point at a token"
    page.tap("#queries button >> nth=2")
    page.tap("#let-go")
    settle(page)
    assert page.inner_text("#isolated-title") == "Point at a token"
    assert not page.is_visible("#let-go")


def test_nan_comes_first(opened):
    weights = random_weights(1, 30, 30)
    weights[0, 2, 5] = np.nan
    page = opened(mha.view.heads(weights, range(30)))
    page.hover("#queries button >> nth=2")
    settle(page)
    assert strongest(page)[0] == ("5", "NaN") and len(strongest(page)) == 10


def test_the_way_back_shows_what_the_controls_say(opened):
    page = opened(mha.view.heads(one_line_each(), WORDS))
    page.check("input[value=heat-map]")
    settle(page)
    page.goto("about:blank")
    page.go_back()
    page.locator("html[data-ready]").wait_for(state="attached")
    settle(page)
    assert page.is_checked("input[value=heat-map]") == page.is_visible("#heat-maps")
    assert page.is_checked("input[value=lines]") == page.is_visible("#lines")


def test_chosen_things_are_seen_in_forced_colours(opened):
    page = opened(mha.view.heads(one_line_each(), WORDS), forced_colors="active")
    outlines = page.locator("#grid td button").evaluate_all(
        "buttons => buttons.map(button => getComputedStyle(button).outlineStyle)")
    assert outlines == ["solid", "none"]


def test_the_mean_of_several_heads_is_listed(opened):
    page = opened(mha.view.heads(one_line_each(), WORDS))
    page.get_by_role("button", name="all heads of layer 0").click()
    page.hover("#queries button >> nth=1")
    settle(page)
    assert page.inner_text("#mean") == "mean of 2 heads"
    assert strongest(page) == [("The", "50 %"), ("sat", "50 %")]


def test_the_threshold_hides_light_weights(opened):
    weights = np.full((1, 4, 4), 0.1)
    weights[0] += 0.6 * np.eye(4)
    page = opened(mha.view.heads(weights, WORDS))
    middle = page.locator("#line-canvas").bounding_box()["width"] / 2

    def drawn():
        settle(page)
        return [pixel(page, "#line-canvas", middle, ROW * place)[3] > 0 for place in (1, 0.5)]

    page.locator("#threshold").fill("0")
    assert drawn() == [True, True]
    page.locator("#threshold").fill("80")
    assert drawn() == [False, True]
    assert page.inner_text("#threshold-shown") == "25 %"
    page.locator("#threshold").fill("100")
    assert drawn() == [False, False]


def test_too_many_lines_are_cut_to_the_heaviest(opened):
    page = opened(mha.view.heads(random_weights(8, 60, 60), range(60)))
    page.locator("#threshold").fill("0")
    page.get_by_role("button", name="all heads of layer 0").click()
    settle(page)
    shown, total = map(int, page.inner_text("#cut").split(" lines")[0].split(" of "))
    assert 3000 < shown <= 4000 and total <= 8 * 60 * 60


@pytest.mark.parametrize(("weights", "drawn"), [
    (np.full((1, 64, 64), 1 / 64), "4000 of 4096 lines, the heaviest"),
    (np.full((1, 63, 63), 1 / 63), ""),
    (np.concatenate([np.eye(100)[:1], np.full((99, 100), 0.01)])[None],
     "4000 of 9901 lines, the heaviest"),
])
def test_equal_weights_are_cut_too(opened, weights, drawn):
    page = opened(mha.view.heads(weights, range(weights.shape[-1])))
    page.locator("#threshold").fill("0")
    settle(page)
    assert page.inner_text("#cut") == drawn
    assert pixel(page, "#line-canvas", 1, 8)[3] > 0


def test_a_fifth_is_no_less_than_twenty_percent(opened):
    page = opened(mha.view.heads(np.full((1, 5, 5), 0.2), range(5)))
    assert float(page.inner_text("#threshold-shown").split()[0]) <= 20
    assert pixel(page, "#line-canvas", 1, ROW * 0.5)[3] > 0


def test_the_heat_map_has_the_colours_of_the_weights(opened):
    weights = one_line_each()
    weights[0, 3] = np.nan
    page = opened(mha.view.heads(weights, WORDS))
    page.check("input[value=heat-map]")
    settle(page)
    left, top, cell = page.evaluate("""() => {
        const canvas = document.querySelector("#heat-maps canvas");
        const {width, height} = canvas.style, cell = 30;
        return [parseFloat(width) - 4 * cell, parseFloat(height) - 4 * cell, cell];
    }""")
    assert page.inner_text("#scale-end") == "100 %"
    for query in range(4):
        for key in range(4):
            at = left + cell * (key + 0.5), top + cell * (query + 0.5)
            expected = ((154, 154, 154) if query == 3 else
                        (90, 10, 20) if weights[0, query, key] else (255, 255, 255))
            assert pixel(page, "#heat-maps canvas", *at)[:3] == expected, (query, key)
    box = page.locator("#heat-maps canvas").bounding_box()
    page.mouse.move(box["x"] + left + 2.5 * cell, box["y"] + top + 1.5 * cell)
    settle(page)
    assert page.inner_text("#status") == "sat: 100 % of cat"
    assert page.inner_text("#isolated-title") == "query 1: cat → sat: 100 %"
    page.mouse.click(box["x"] + left + 0.5 * cell, box["y"] + top + 3.5 * cell)
    settle(page)
    assert page.inner_text("#status") == "The: NaN of down"


def test_a_kept_cell_stays_when_another_head_is_opened(opened):
    page = opened(mha.view.heads(np.stack([np.eye(4), np.full((4, 4), 0.25)]), WORDS))
    page.check("input[value=heat-map]")
    settle(page)
    box = page.locator("#heat-maps canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 15, box["y"] + box["height"] - 15)
    settle(page)
    assert page.inner_text("#isolated-title") == "query 3: down → down: 100 %"
    page.click("button[data-head='1']")
    settle(page)
    assert page.inner_text("#isolated-title") == "query 3: down → down: 25 %"
    assert page.inner_text("#mean") == "head 1"


def test_very_many_heads_are_not_all_drawn_as_heat_maps(opened):
    page = opened(mha.view.model(random_weights(5, 10, 4, 4), WORDS))
    page.check("input[value=heat-map]")
    page.check("#several")
    for layer in range(5):
        page.get_by_role("button", name=f"all heads of layer {layer}").click()
    settle(page)
    assert page.locator("#heat-maps canvas").count() == 36
    assert page.inner_text("#cut") == "the first of 50 heads"


def test_long_tokens_are_cut_once(opened):
    page = opened(mha.view.heads(random_weights(2, 64, 64), ["lorem ipsum " * 100] * 64))
    page.check("input[value=heat-map]")
    settle(page)
    took = page.evaluate("""() => {
        const before = performance.now();
        document.querySelector("#heat-maps canvas").dispatchEvent(
            new PointerEvent("pointermove", {clientX: 600, clientY: 400}));
        return new Promise(done => requestAnimationFrame(() => done(performance.now() - before)));
    }""")
    assert took < 2000  # it was half a minute


def test_several_heat_maps_name_their_heads(opened):
    page = opened(mha.view.model(random_weights(2, 3, 4, 9), WORDS, range(9)))
    page.check("input[value=heat-map]")
    page.get_by_role("button", name="all heads of layer 1").click()
    settle(page)
    names = page.locator("#heat-maps figcaption").all_inner_texts()
    assert names == [f"layer 1, head {head}" for head in range(3)]
    page.click("button[data-head='0']")
    settle(page)
    assert page.locator("#heat-maps canvas").count() == 1


def test_all_of_it_by_keys(opened):
    page = opened(mha.view.model(random_weights(2, 3, 4, 4), WORDS))
    focused = "document.activeElement.getAttribute('aria-label')"

    def press(*keys):
        for key in keys:
            page.keyboard.press(key)
        settle(page)

    page.focus("input[value=lines]")
    press("ArrowRight")
    assert page.is_checked("input[value=heat-map]")
    press("ArrowLeft", "Tab")
    assert page.is_checked("input[value=lines]")
    assert page.evaluate("document.activeElement.id") == "threshold"
    page.focus("button[data-head='0']")
    press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight")
    assert page.evaluate(focused) == "layer 1, head 2"
    press("Enter")
    assert page.inner_text("#chosen") == "Layer 1, head 2"
    press("Home", " ")
    assert page.inner_text("#chosen") == "2 heads"
    page.focus("#queries button >> nth=0")
    assert page.locator("#queries [tabindex='0']").count() == 1  # one stop of Tab
    press("ArrowDown", "ArrowDown")
    assert page.evaluate(focused) == "query 2: sat"
    assert page.inner_text("#isolated-title") == "query 2: sat"
    press("ArrowRight", "End", "Enter")
    assert page.evaluate(focused) == "key 3: down"
    press("Home")
    assert page.inner_text("#isolated-title") == "key 3: down"  # it is kept
    press("Escape", "End")
    assert page.inner_text("#status").startswith("key 3, down, is attended by ")
    page.check("input[value=heat-map]")
    settle(page)  # what is not drawn yet cannot be focused
    page.focus("#heat-maps canvas >> nth=0")
    press("ArrowRight", "ArrowRight", "ArrowDown")
    assert page.inner_text("#isolated-title").startswith("query 1: cat → cat: ")


def test_every_control_has_a_name_and_the_page_its_regions(opened):
    page = opened(mha.view.model(random_weights(2, 3, 4, 4), WORDS))
    for role, name in (("radio", "Lines"), ("radio", "Heat map"), ("slider", "Hide weights below"),
                       ("checkbox", "Choose several heads"), ("region", "All heads"),
                       ("region", "Layer 0, head 0"), ("list", "from (query)"),
                       ("list", "to (key)"), ("complementary", "Point at a token"),
                       ("button", "layer 1, head 2"), ("button", "query 2: sat")):
        assert page.get_by_role(role, name=name).count() == 1, (role, name)
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input")].filter(
        one => !one.textContent.trim() && !one.getAttribute("aria-label") && !one.labels?.length
    ).length""")
    assert nameless == 0


HOSTILE = ["</script><script>document.title = 'taken'</script>", "<img src=x onerror=alert(1)>",
           "&lt;b&gt;", "{data}", "{script}{title}", "a\u202eb", "", "\n", "  ", "\x00", "\ud800",
           "]]>", "<!--", "𝕏" * 80, "שלום", "'\"`${alert(1)}"]


def test_tokens_are_text_whatever_they_hold(opened):
    count = len(HOSTILE)
    page = opened(mha.view.heads(random_weights(2, count, count), HOSTILE,
                                 title="</title><script>document.title = 'taken'</script>"))
    assert page.title() == "</title><script>document.title = 'taken'</script>"
    assert page.locator("img, b, #queries script").count() == 0
    assert page.locator("script").count() == 2
    shown = page.locator("#queries bdi").all_text_contents()
    assert shown[:2] == HOSTILE[:2] and shown[2:5] == HOSTILE[2:5]
    assert shown[5:10] == ["aU+202Eb", "∅", "↵", "␣␣", "␀"]
    assert shown[11:13] == HOSTILE[11:13] and shown[14:] == HOSTILE[14:]
    for index in range(count):
        page.hover(f"#queries button >> nth={index}")
        settle(page)
    page.check("input[value=heat-map]")
    settle(page)
    assert page.title() == "</title><script>document.title = 'taken'</script>"
    widest = page.locator("#queries button").evaluate_all(
        "buttons => Math.max(...buttons.map(button => button.offsetWidth))")
    assert widest < 250


def test_long_tokens_do_not_push_the_page_aside(opened):
    page = opened(mha.view.heads(random_weights(2, 3, 3), ["word" * 500, "b", "c"],
                                 title="t" * 3000))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_follow_the_system_and_the_button(opened, scheme):
    page = opened(mha.view.heads(one_line_each(), WORDS), color_scheme=scheme)

    def paper():
        settle(page)
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
    assert paper() == (light if scheme == "light" else dark)
    line = pixel(page, "#line-canvas", 1, ROW * 1.5)
    page.click("#theme")
    assert paper() == (dark if scheme == "light" else light)
    assert pixel(page, "#line-canvas", 1, ROW * 1.5) != line


def test_paper_gets_the_light_colours_and_no_controls(opened, tmp_path):
    weights = np.tile(one_line_each()[0], (12, 12, 1, 1))
    page = opened(mha.view.model(weights, WORDS), color_scheme="dark")
    page.evaluate("addEventListener('beforeprint', () => setTimeout(() => 0));"
                  "window.printed = []; addEventListener('beforeprint', () => printed.push("
                  "document.documentElement.dataset.theme))")
    page.evaluate("addEventListener('beforeprint', () => { const read = document.createElement("
                  "'canvas').getContext('2d'); read.drawImage(document.querySelector("
                  "'button[data-head=\"143\"] canvas'), 0, 0);"
                  "printed.push(...read.getImageData(0, 1, 1, 1).data); })")
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert page.evaluate("printed") == ["light", 255, 255, 255, 255]  # the last head's, too
    settle(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.emulate_media(media="print")
    assert not page.is_visible("#tools") and page.is_visible("#grid") and page.is_visible("#lines")


def test_a_notebook_shows_it_in_a_frame_of_its_own(opened):
    view = mha.view.heads(one_line_each(), ["</iframe><script>parent.document.title = 'taken'"
                                            "</script>", '"', "'", "&quot;"])
    page = opened(view, html=f"<title>notebook</title><div>{view._repr_html_()}</div>")
    frame = page.frame_locator("iframe")
    assert frame.locator("#chosen").inner_text() == "Head 0"
    assert frame.locator("#queries bdi").all_text_contents()[1:] == ['"', "'", "&quot;"]
    assert page.title() == "notebook"
    frame.locator("button[data-head='1']").click()
    frame.locator("#chosen", has_text="Head 1").wait_for()


def test_one_matrix_needs_no_overview(opened):
    page = opened(mha.view.heads(np.eye(4), WORDS))
    assert not page.is_visible("#overview") and page.is_visible("#lines")


def test_a_page_that_cannot_be_read_says_so(chromium, tmp_path):
    view = mha.view.heads(one_line_each(), WORDS)
    packed = base64.b64encode(zlib.compress(b"")).decode()
    begin = view.html.index('"weights": "') + len('"weights": "')
    end = view.html.index('"', begin)
    path = tmp_path / "broken.html"
    path.write_text(view.html[:begin] + "!" + packed + view.html[end:])
    page = chromium.new_page()
    page.goto(path.as_uri())
    page.wait_for_function("document.getElementById('title').textContent.includes('could not')")
    page.close()


def test_many_tokens_and_heads_still_open(opened):
    weights = np.zeros((2, 16, 700, 700), np.float32)
    weights[..., np.arange(700), np.arange(700)] = 1
    page = opened(mha.view.model(weights, range(700)))
    page.click("button[data-head='31']")
    settle(page)
    assert page.inner_text("#chosen") == "Layer 1, head 15"
    assert pixel(page, "#line-canvas", 1, 16 * 699.5)[3] > 60
    page.check("input[value=heat-map]")
    settle(page)
    assert page.locator("#heat-maps canvas").bounding_box()["width"] > 300
