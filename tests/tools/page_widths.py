"""Whether a page of the built site is wider than a screen of 1,280 or 420 pixels, or a table, a
picture or a frame in it wider than its text: python tests/tools/page_widths.py docs/_build/html

Names each and exits with 1. `make test-docs` builds the site and calls it.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = 1280, 420
TOO_WIDE = """() => {
    const edge = document.querySelector("article")?.getBoundingClientRect().right ?? innerWidth;
    const ofPage = "article :is(table, img, svg, iframe, .figure-of-attention)";
    const wide = [...document.querySelectorAll(ofPage)]
        .filter(one => one.parentElement.clientWidth // not that of a line's parts
                && one.scrollWidth > one.parentElement.clientWidth + 4
            || one.getBoundingClientRect().right > edge + 4)
        .map(one => `${one.tagName.toLowerCase()} "${one.textContent.trim().slice(0, 40)}"`);
    return document.documentElement.scrollWidth > innerWidth ? [...wide, "the page itself"] : wide;
}"""


def too_wide(browser, path):
    """Lines that name what is too wide."""
    for width in WIDTHS:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(path.as_uri())
        for what in page.evaluate(TOO_WIDE):
            yield f"{path.name} at {width} pixels: {' '.join(what.split())}"
        page.close()


def main():
    folder = Path(sys.argv[1]).resolve()
    pages = [path for path in sorted(folder.rglob("*.html"))
             if path.relative_to(folder).parts[0] not in ("_modules", "_static")]
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        found = [line for path in pages for line in too_wide(browser, path)]
        browser.close()
    if found or not pages:
        sys.exit("\n".join(found) or f"{folder}: got no pages, wanted those of make docs")
    print(f"page widths: {len(pages)} pages fit")


if __name__ == "__main__":
    main()
