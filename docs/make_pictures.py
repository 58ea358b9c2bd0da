"""The pictures of the gallery and of the viewer, made anew: python docs/make_pictures.py

Needs what `make test-browser` installs, and notebooks that have been run.
"""

import base64
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
WHICH = {  # of a notebook's pictures, the one for the gallery
    "multi_head_attention": 1, "masks": 1, "masks_of_long_sequences": 0, "training": 2,
    "decoding": 0, "heads_that_matter": 2, "long_sequences": 0, "d2l": 2}
SENTENCE = "The cat sat on the mat because it was warm, and a kitten rested on the rug."

sys.path.insert(0, str(ROOT / "examples"))


def of_notebooks():
    for name, which in WHICH.items():
        cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text("utf-8"))["cells"]
        images = [output["data"]["image/png"] for cell in cells
                  for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
        path = PICTURES / f"{name}.png"
        path.write_bytes(base64.b64decode(images[which]))
        image = Image.open(path).convert("RGB")
        image.thumbnail((640, 360))
        page = Image.new("RGB", (640, 360), "white")  # all cards are alike
        page.paste(image, ((640 - image.width) // 2, (360 - image.height) // 2))
        page.quantize(128).save(path, optimize=True)


def of_viewer():
    from minilm import MiniLM

    import mha

    model = MiniLM()
    ids, lengths, tokens = model.tokenize([SENTENCE])
    view = mha.view.model(model.encode(ids, lengths).weights, tokens[0], title=SENTENCE)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "view.html"
        view.save(path)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"])
        for name, scheme in itertools.product(("lines", "heat_maps"), ("light", "dark")):
            page = browser.new_page(viewport={"width": 1100, "height": 640}, color_scheme=scheme)
            page.goto(path.as_uri())
            page.locator("html[data-ready]").wait_for(state="attached")
            page.click("button[data-head='20']")
            if name == "lines":
                page.click("button[data-head='30']", modifiers=["Control"])
                page.hover("#queries button >> nth=9")
            else:
                page.check("input[value=heat-map]")
                page.hover("#heat-maps canvas", position={"x": 200, "y": 200})
            page.wait_for_timeout(1000)
            shot = PICTURES / f"view_{name}_{scheme}.png"
            page.screenshot(path=shot)
            Image.open(shot).convert("RGB").quantize(128).save(shot, optimize=True)
        browser.close()


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    of_notebooks()
    of_viewer()
