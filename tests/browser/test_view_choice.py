"""What is shown of the page of mha.view: one of several sentences, heads that the address keeps,
heads behind a scroll, lines over the whole width."""

import numpy as np
import pytest
from pages import WORDS, random_weights, settle

import mha


def box(page, selector):
    return page.locator(selector).bounding_box()


def chosen(page):
    return page.locator("#grid [aria-pressed=true]").evaluate_all(
        "buttons => buttons.map(button => Number(button.dataset.head))")


@pytest.mark.parametrize("width", [420, 700, 1000, 1280, 2200])
@pytest.mark.parametrize("words", [WORDS, ["a rather long token"] * 4])
def test_lines_are_as_wide_as_the_page(opened, width, words):
    page = opened(mha.view.heads(random_weights(2, 4, 4), words))
    page.set_viewport_size({"width": width, "height": 800})
    queries, canvas, keys = (box(page, name) for name in ("#queries", "#line-canvas", "#keys"))
    lines = box(page, "#lines")
    assert abs(queries["x"] + queries["width"] - canvas["x"]) <= 1
    assert abs(canvas["x"] + canvas["width"] - keys["x"]) <= 1
    assert abs(queries["x"] - lines["x"] - 3) <= 1
    assert abs(keys["x"] + keys["width"] - lines["x"] - lines["width"] + 3) <= 1
    assert canvas["width"] >= 85
    detail = box(page, "#detail")
    assert abs(lines["x"] + lines["width"] - detail["x"] - detail["width"]) <= 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def sentences():
    return mha.view.several([
        mha.view.model(random_weights(2, 3, 4, 4), WORDS, title="The cat sat down"),
        mha.view.model(random_weights(1, 3, 2, 3), ["le", "chat"], ["the", "cat", "."], title=""),
        mha.view.heads(np.eye(70), title="long")], title="all of them")


def test_a_list_of_sentences(opened):
    page = opened(sentences())
    options = page.locator("#sentence option").all_inner_texts()
    assert options == ["1: The cat sat down", "2: ∅", "3: long"]
    assert page.title() == "all of them" and page.inner_text("#title") == "The cat sat down"
    page.click("button[data-head='2']")
    page.click("button[data-head='4']", modifiers=["Control"])
    page.select_option("#sentence", "1")
    page.locator("#keys bdi", has_text="the").wait_for()
    settle(page)
    assert page.locator("#queries bdi").all_inner_texts() == ["le", "chat"]
    assert page.locator("#grid td button").count() == 3 and chosen(page) == [2]
    page.hover("#queries button >> nth=1")
    assert page.inner_text("#isolated-title") == "query 1: chat"
    page.check("input[value=heat-map]")
    page.select_option("#sentence", "2")
    page.locator("#title", has_text="long").wait_for()
    settle(page)
    assert page.locator("#heat-maps canvas").count() == 1 and not page.is_visible("#overview")
    page.select_option("#sentence", "0")
    page.locator("#title", has_text="The cat").wait_for()
    page.check("input[value=lines]")
    assert page.locator("#queries bdi").all_inner_texts() == WORDS
    page.click("button[data-head='5']")
    assert page.inner_text("#chosen") == "Layer 1, head 2"


def test_one_sentence_has_no_list(opened):
    page = opened(mha.view.heads(random_weights(2, 4, 4)))
    assert not page.is_visible("#sentence")


def test_the_address_keeps_what_is_chosen(opened):
    page = opened(sentences())
    here = page.url

    def reloaded():
        page.reload()
        page.locator("html[data-ready]").wait_for(state="attached")
        settle(page)

    page.click("button[data-head='4']")
    page.click("button[data-head='2']", modifiers=["Control"])
    assert page.url == f"{here}#heads=1.1,0.2"
    reloaded()
    assert chosen(page) == [2, 4]
    assert page.locator("#legend li").all_inner_texts() == ["layer 1, head 1", "layer 0, head 2"]
    page.select_option("#sentence", "1")
    page.check("input[value=heat-map]")
    page.locator("#keys bdi", has_text="the").wait_for(state="attached")
    settle(page)
    assert page.url == f"{here}#sentence=1&heads=0.2&show=heat-map"
    reloaded()
    assert page.inner_text("#chosen") == "Head 2" and page.is_visible("#heat-maps")
    page.evaluate("location.hash = 'heads=1.2'")
    page.locator("#title", has_text="The cat").wait_for()
    settle(page)
    assert chosen(page) == [5] and page.is_checked("input[value=lines]")
    page.click("button[data-head='0']")
    assert page.url == here


@pytest.mark.parametrize("words", [
    "#heads=9.9", "#heads=,x.y,-1.0", "#sentence=7", "#sentence=-1&show=x", "#sentence=1e9",
    "#%", "#heads=0.0,0.0&sentence=0.5", "#" + "1." * 5000])
def test_an_address_that_means_nothing_shows_the_first(opened, words):
    page = opened(sentences())
    page.evaluate("words => { location.hash = words; }", words)
    page.reload()
    page.locator("html[data-ready]").wait_for(state="attached")
    settle(page)
    assert page.inner_text("#title") == "The cat sat down" and chosen(page) == [0]


def test_more_heads_behind_a_scroll_are_named(opened):
    page = opened(mha.view.model(random_weights(30, 24, 3, 3), WORDS[:3]))
    page.set_viewport_size({"width": 1000, "height": 700})
    settle(page)

    def hint(x, y):
        page.evaluate("([x, y]) => document.querySelector('.scroll').scrollTo(x, y)", [x, y])
        settle(page)
        settle(page)
        return page.inner_text("#more-heads")

    assert hint(0, 0) == "More heads to the right and below: scroll."
    assert hint(100, 0) == "More heads to the right and to the left and below: scroll."
    assert hint(9999, 9999) == "More heads to the left and above: scroll."
    few = opened(mha.view.heads(random_weights(4, 3, 3)))
    assert not few.is_visible("#more-heads")
