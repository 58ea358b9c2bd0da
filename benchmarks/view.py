"""What an interaction with the page of mha.view costs the browser's script: 12 layers x 12 heads x
128 tokens, in a headless Chromium, by its own counter of script time.

    make bench-view
"""

import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

import mha

LAYERS, HEADS, TOKENS = 12, 12, 128
TIMES = 15  # of each interaction


def main():
    view = mha.view.model(some_weights(), [f"token{i}" for i in range(TOKENS)])
    empty = mha.view.heads(np.ones((1, 1)), ["a"])
    print(f"the page: {len(view.html) / 1e6:.2f} MB, of which {len(empty.html) / 1e3:.0f} KB are"
          " not its data")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "view.html"
        view.save(path)
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        page.locator("html[data-ready]").wait_for(state="attached")
        page.wait_for_timeout(2000)  # the thumbnails
        counter = page.context.new_cdp_session(page)
        counter.send("Performance.enable")
        print(f"\n{'interaction':<44}{'median':>9}{'largest':>10}  (script time)")
        for name, interact in interactions(page):
            times = [script_milliseconds(page, counter, interact, turn) for turn in range(TIMES)]
            print(f"{name:<44}{statistics.median(times):>6.2f} ms{max(times):>7.2f} ms")
        browser.close()


def some_weights():
    """Some that look about, some that look at their neighbours; (layers, heads, len, len)."""
    random = np.random.default_rng(0)
    scores = 2 * random.standard_normal((LAYERS, HEADS, TOKENS, TOKENS), np.float32)
    distance = np.abs(np.arange(TOKENS)[:, None] - np.arange(TOKENS))
    scores -= random.exponential(0.2, (LAYERS, HEADS, 1, 1)) * distance
    weights = np.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)


def interactions(page):
    """(name, what is done) in turn; each starts from what the one before left."""
    def click_head(turn):
        page.click(f"button[data-head='{7 * turn % (LAYERS * HEADS)}']")

    def hover(turn):
        page.hover(f"#queries button >> nth={2 + turn}")

    def move_threshold(turn):
        page.locator("#threshold").fill(str(20 + 4 * turn))

    def click_layer(turn):
        page.get_by_role("button", name=f"all heads of layer {turn % LAYERS}", exact=True).click()

    def point(turn):
        page.hover("#heat-maps canvas >> nth=0", position={"x": 100 + 12 * turn, "y": 150})

    def press(turn):
        page.keyboard.press("ArrowDown")

    def switch(turn):
        page.check(f"input[value={('heat-map', 'lines')[turn % 2]}]")

    yield "click a head: its lines", click_head
    yield "hover a token, one head", hover
    yield "move the threshold, one head", move_threshold
    page.focus("#queries button >> nth=0")
    yield "arrow key to the next token", press
    page.keyboard.press("Escape")
    yield "click a layer: lines of 12 heads", click_layer
    yield "hover a token, 12 heads", hover
    yield "move the threshold, 12 heads", move_threshold
    yield "lines to heat map and back, 12 heads", switch
    yield "point at a cell, 12 heat maps", point
    yield "click a layer: 12 heat maps", click_layer
    page.click("button[data-head='5']")
    yield "point at a cell, one large heat map", point
    yield "click a head: its heat map", click_head


def script_milliseconds(page, counter, interact, turn):
    """Of handlers and the drawing that they ask for, up to the second frame after."""
    before = script_seconds(counter)
    interact(turn)
    page.evaluate("() => new Promise(done => requestAnimationFrame("
                  "() => requestAnimationFrame(done)))")
    return 1000 * (script_seconds(counter) - before)


def script_seconds(counter):
    metrics = counter.send("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "ScriptDuration")


if __name__ == "__main__":
    main()
