"""The links of the built site: a broken internal one fails the build, external ones are listed."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page of HTML refers to, and the places in it that can be referred to."""

    def __init__(self, path):
        super().__init__()
        self.references, self.places = set(), {"", "top"}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "xlink:href", "src") and value:
                self.references.add(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def check(app, exception):
    """After a build of HTML; raises what is broken, writes external_links.txt."""
    if exception is None and app.builder.format == "html":
        folder = Path(app.outdir)
        broken, external = found(folder)
        (folder / "external_links.txt").write_text("".join(f"{one}\n" for one in sorted(external)))
        print(f"{len(external)} external links, not followed: {folder / 'external_links.txt'}")
        if broken:
            raise ValueError("broken links: " + "; ".join(sorted(broken)))


def found(folder):
    """(broken internal links, each with its page; external links) of all pages below."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    broken, external = set(), set()
    for path, page in pages.items():
        for reference in page.references:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                if parts.scheme in ("http", "https"):
                    external.add(reference)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (
                    target in pages and unquote(parts.fragment) not in pages[target].places):
                broken.add(f"{path.relative_to(folder.resolve())} -> {reference}")
    return broken, external
