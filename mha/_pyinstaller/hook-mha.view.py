"""The files of the page, which no import names, go into a frozen program too."""  # noqa: N999

from pathlib import Path

VIEW = Path(__file__).parent.parent / "view"
datas = [(str(path), "mha/view") for path in sorted(VIEW.iterdir())
         if path.suffix in (".html", ".css", ".js")]
