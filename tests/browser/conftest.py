"""A headless Chromium, cut off from the network; what a page logs or throws fails its test."""

import shutil

import pytest
from pages import and_settle, settle
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="session")
def chromium():
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(view, **settings of the browser): its page, ready."""
    contexts, complaints = [], []

    def open_page(view, html=None, **settings):
        path = tmp_path / f"page_{len(contexts)}.html"
        if html is None:
            view.save(path)
        else:
            path.write_text(html)
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True,
                                       **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: request.url == path.as_uri()
                or request.url.startswith("about:") or complaints.append(request.url))
        page.goto(path.as_uri())
        shown = page if html is None else page.frame_locator("iframe")
        shown.locator("html[data-ready]").wait_for(state="attached")
        settle(page)
        for owner, names in ((page, "click hover check emulate_media set_viewport_size"),
                             (page.keyboard, "press"), (page.mouse, "move click wheel")):
            for name in names.split():
                setattr(owner, name, and_settle(page, getattr(owner, name)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints, complaints
