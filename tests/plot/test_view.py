"""mha.view in Python: what the page is made of, its arguments, the command. What the page does in a
browser: tests/browser."""

import base64
import html
import importlib
import io
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import mha
from mha.view import _command as command
from mha.view import _page as page

WORDS = ["The", "cat", "sat"]


def some_weights(*shape):
    weights = np.random.default_rng(0).random(shape)
    return weights / weights.sum(axis=-1, keepdims=True)


def data_of(view, sentence=0):
    """The JSON in the page, with the weights as floats (all heads, query_len, key_len)."""
    texts = re.findall(r'<script type="application/json" (?:id|class)="data">(.*?)</script>',
                       view.html, re.DOTALL)
    data = json.loads(texts[sentence])
    codes = np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), "<u2")
    weights = np.where(codes == 65535, np.nan, codes * data["scale"])
    keys = data["key_tokens"] or data["tokens"]
    return data, weights.reshape(sum(data["layers"]), len(data["tokens"]), len(keys))


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_page_holds_the_weights_of_one_batch_item(dtype):
    weights = some_weights(2, 4, 3, 5).astype(dtype)
    weights[1, 2, 0] = np.nan
    data, shown = data_of(mha.view.heads(weights, WORDS, list("abcde"), batch=1))
    closest = float(np.nanmax(weights[1])) / 65534 / 2
    np.testing.assert_allclose(shown, weights[1].astype(float), rtol=0, atol=1.001 * closest)
    assert (data["tokens"], data["key_tokens"]) == (WORDS, list("abcde"))
    assert data["layers"] == [4]


def test_a_model_has_a_row_for_each_layer_of_any_number_of_heads():
    layers = [some_weights(2, 3, 3), some_weights(5, 3, 3), some_weights(3, 3)]
    data, shown = data_of(mha.view.model(layers, WORDS, title="three"))
    assert (data["layers"], data["title"], data["key_tokens"]) == ([2, 5, 1], "three", None)
    assert shown.shape == (8, 3, 3)
    stacked = some_weights(4, 2, 3, 3)
    data, shown = data_of(mha.view.model(stacked, WORDS))
    assert data["layers"] == [2, 2, 2, 2]
    np.testing.assert_allclose(shown, stacked.reshape(8, 3, 3), rtol=0, atol=1e-5)
    of_batch, _ = data_of(mha.view.model([some_weights(6, 2, 3, 3)] * 2, WORDS, batch=-1))
    assert of_batch["layers"] == [2, 2]


def test_tokens_are_numbers_by_default():
    data, _ = data_of(mha.view.heads(some_weights(2, 3, 3)))
    assert (data["tokens"], data["key_tokens"]) == (["0", "1", "2"], None)
    data, _ = data_of(mha.view.model([some_weights(2, 3, 4)]))
    assert (data["tokens"], data["key_tokens"]) == (["0", "1", "2"], ["0", "1", "2", "3"])
    data, _ = data_of(mha.view.heads(some_weights(2, 3, 4), key_tokens=list("abcd")))
    assert (data["tokens"], data["key_tokens"]) == (["0", "1", "2"], list("abcd"))


def test_several_pages_become_one():
    first, second = some_weights(2, 3, 3), some_weights(4, 2, 5, 4)
    views = [mha.view.heads(first, WORDS, title="</script>one"),
             mha.view.model(second, title="two")]
    both = mha.view.several(views, title="both")
    assert "<title>both</title>" in both.html
    for sentence, (title, weights) in enumerate((("</script>one", first), ("two", second))):
        data, shown = data_of(both, sentence)
        assert data["title"] == title
        np.testing.assert_allclose(shown, weights.reshape(shown.shape), rtol=0, atol=1e-5)
    again = mha.view.several(iter([both, views[0]]))
    assert [data_of(again, sentence)[0]["title"] for sentence in range(3)] == [
        "</script>one", "two", "</script>one"]


def test_wrong_arguments_of_several(monkeypatch):
    with pytest.raises(ValueError, match="views: got none, wanted one view or more"):
        mha.view.several([])
    with pytest.raises(TypeError, match="views: got ndarray as number 1, wanted what"):
        mha.view.several([mha.view.heads(np.eye(3), WORDS), np.eye(3)])
    views = [mha.view.heads(some_weights(1, 10, 10)) for _ in range(2)]
    monkeypatch.setattr(mha.view, "MOST_WEIGHTS", 199)
    with pytest.raises(ValueError, match="got 200, wanted at most 199"):
        mha.view.several(views)


def test_zeros_and_nan_alone_can_be_shown():
    assert (data_of(mha.view.heads(np.zeros((2, 3, 3)), WORDS))[1] == 0).all()
    assert np.isnan(data_of(mha.view.heads(np.full((2, 3, 3), np.nan), WORDS))[1]).all()


def test_the_page_asks_for_nothing_and_is_small():
    view = mha.view.heads(np.eye(3), WORDS)
    assert len(view.html) < 60_000
    elements = Elements(view.html).found
    assert not [tag for tag, _ in elements if tag in ("link", "img", "iframe", "object", "base")]
    assert not [attributes for _, attributes in elements if {"src", "href"} & set(attributes)]
    assert [attributes for tag, attributes in elements if tag == "meta"
            and attributes.get("content", "").startswith("default-src 'none'")]
    assert "http" not in view.html.replace("http-equiv", "")


def test_a_frozen_program_gets_the_files_of_the_page():
    """`make test-frozen` runs PyInstaller itself."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    module, name = project["entry-points"]["pyinstaller40"]["hook-dirs"].split(":")
    [folder] = getattr(importlib.import_module(module), name)()
    hook = runpy.run_path(os.path.join(folder, "hook-mha.view.py"))
    assert {target for _, target in hook["datas"]} == {"mha/view"}
    packed = {os.path.basename(source) for source, _ in hook["datas"]}
    assert packed == {"page.html", "page.css", *page.SCRIPTS}


def test_no_word_becomes_markup():
    hostile = "</script><script>x</script><!--<script>"
    view = mha.view.heads(np.eye(2), [hostile, "\ud800\u2028"], title=f"</title>{hostile}\ud800")
    plain = mha.view.heads(np.eye(2), ["a", "b"], title="title")
    tags = [tag for tag, _ in Elements(view.html).found]
    assert tags == [tag for tag, _ in Elements(plain.html).found]
    assert data_of(view)[0]["tokens"] == [hostile, "\ud800\u2028"]
    view.html.encode()


def test_bfloat16_is_shown_without_its_package():
    weights = some_weights(2, 3, 3).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    _, shown = data_of(mha.view.heads(bits.view([("mha_bfloat16", np.uint16)]), WORDS))
    np.testing.assert_allclose(shown, weights, rtol=2**-7, atol=1e-4)


def test_subnormal_weights_keep_their_order():
    weights = np.array([[91747 * 5e-324, 0], [0, 45873 * 5e-324]])
    _, shown = data_of(mha.view.heads(weights, WORDS[:2]))
    assert shown[0, 0, 0] > shown[0, 1, 1] > 0


def test_words_that_look_like_the_pages_own_places_stay():
    names = ["{title}", "{data}", "{script}", "{style}"]
    view = mha.view.heads(np.eye(4), names, title="{data}{script}")
    assert data_of(view)[0]["tokens"] == names
    assert "<title>{data}{script}</title>" in view.html


def test_a_notebook_gets_a_frame_with_the_whole_page():
    view = mha.view.heads(np.eye(3), ['"', "'", "&quot;"])
    view.height = '1"><script>'
    assert '1"><script>' not in view._repr_html_()
    view.height = 321
    [(tag, attributes)] = Elements(view._repr_html_()).found
    assert tag == "iframe" and attributes["srcdoc"] == view.html
    assert attributes["height"] == "321" and "allow-same-origin" not in attributes["sandbox"]
    assert html.escape(view.html) in view._repr_html_()


def test_save_writes_the_page(tmp_path):
    view = mha.view.heads(np.eye(3), ["naïve", "猫", "𝕏"])
    view.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("utf-8") == view.html
    view.save(str(tmp_path / "again.html"))
    with pytest.raises(FileNotFoundError):
        view.save(tmp_path / "missing" / "page.html")
    with pytest.raises(ValueError, match="wanted a page"):
        view.save(tmp_path / "slide.png")


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((np.eye(3)[None, None, None], WORDS), ValueError, r"weights: got shape \(1, 1, 1, 3, 3\)"),
    ((np.zeros((0, 3, 3)), WORDS), ValueError, "weights: got shape"),
    ((np.eye(3), WORDS[:2]), ValueError, "tokens: got 2, wanted 3"),
    ((np.eye(3), itertools.count()), ValueError, "tokens: got 4, wanted 3"),
    ((np.eye(3), 3), TypeError, "tokens: got int, wanted a sequence of 3"),
    ((np.eye(3), "the"), TypeError, "tokens: got str, wanted a sequence of 3"),
    ((np.eye(3), WORDS, ["a"]), ValueError, "key_tokens: got 1, wanted 3"),
    ((np.eye(3)[:, :2], WORDS), ValueError, "key_tokens: got none, wanted 2"),
    ((-np.eye(3), WORDS), ValueError, "numbers below 0"),
    ((9 * np.ones((3, 3)), WORDS), ValueError, "rows that sum to"),
    ((np.array([[np.inf, 0.], [0, 1]]), WORDS[:2]), ValueError, "infinite"),
    (((np.eye(3), np.eye(3)), WORDS), TypeError, "got a tuple of 2 arrays"),
    ((np.array([["a"]]), ["a"]), TypeError, "wanted real numbers"),
])
def test_wrong_arguments_of_heads(arguments, error, message):
    with pytest.raises(error, match=message):
        mha.view.heads(*arguments)


def test_wrong_arguments_of_model():
    with pytest.raises(ValueError, match="weights_of_layers: got none"):
        mha.view.model([], WORDS)
    with pytest.raises(ValueError, match=r"got \(3, 2\) queries and keys in layer 1"):
        mha.view.model([np.eye(3), np.eye(3)[:, :2]], WORDS)
    with pytest.raises(ValueError, match=r"^layer 2: weights: got numbers below 0"):
        mha.view.model([np.eye(3), np.eye(3), -np.eye(3)], WORDS)
    with pytest.raises(ValueError, match=r"got shape \(3, 3\), wanted \(layers, heads"):
        mha.view.model(np.eye(3), WORDS)
    with pytest.raises(ValueError, match="batch: got 2"):
        mha.view.model(some_weights(1, 2, 4, 3, 3), WORDS, batch=2)
    with pytest.raises(ValueError, match="batch: got 1, wanted an index into 1 items"):
        mha.view.heads(some_weights(4, 3, 3), WORDS, batch=1)
    with pytest.raises(TypeError, match="batch: got float"):
        mha.view.heads(some_weights(4, 3, 3), WORDS, batch=0.0)
    with pytest.raises(TypeError, match="weights_of_layers: got int"):
        mha.view.model(5, WORDS)
    with pytest.raises(TypeError, match="masked"):
        mha.view.heads(np.ma.array(np.eye(3), mask=np.eye(3)), WORDS)


def test_more_than_a_browser_holds_is_refused(monkeypatch):
    monkeypatch.setattr(mha.view, "MOST_WEIGHTS", 100)
    mha.view.heads(some_weights(1, 10, 10), range(10))
    with pytest.raises(ValueError, match="got 200, wanted at most 100"):
        mha.view.heads(some_weights(2, 10, 10), range(10))


def run_command(*arguments, cwd):
    return subprocess.run([sys.executable, "-m", "mha", "view", *map(str, arguments)], cwd=cwd,
                          capture_output=True, text=True)


def page_at(path):
    view = mha.view.View(path.read_text("utf-8"), 0)
    return data_of(view)


def test_the_command_makes_a_page_of_a_file(tmp_path):
    np.savez(tmp_path / "weights.npz", weights=some_weights(2, 4, 3, 3), tokens=WORDS)
    done = run_command("weights.npz", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"weights.html: \d+ kB; open", done.stdout)
    data, _ = page_at(tmp_path / "weights.html")
    assert (data["layers"], data["tokens"], data["title"]) == ([4, 4], WORDS, "weights")


@pytest.mark.parametrize("arguments", [["weights.html"], ["weights.npz", "--output", "weights.npz"],
                                       ["link.npz"]])
def test_the_command_never_writes_over_the_weights(tmp_path, arguments):
    np.savez(tmp_path / "weights.npz", weights=some_weights(2, 4, 3, 3), tokens=WORDS)
    (tmp_path / "link.npz").write_bytes((tmp_path / "weights.npz").read_bytes())
    for link in ("weights.html", "link.html"):
        (tmp_path / link).hardlink_to(tmp_path / f"{link.removesuffix('.html')}.npz")
    before = (tmp_path / arguments[0]).read_bytes()
    done = run_command(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and "wanted another --output" in done.stderr
    assert (tmp_path / arguments[0]).read_bytes() == before


def test_the_command_prints_names_that_the_terminal_has_no_letters_for(tmp_path):
    np.savez(tmp_path / "猫.npz", weights=some_weights(2, 3, 3))
    done = subprocess.run([sys.executable, "-m", "mha", "view", "猫.npz", "--title", ""],
                          cwd=tmp_path, capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert page_at(tmp_path / "猫.html")[0]["title"] == ""


def test_the_command_takes_layers_by_name_and_other_options(tmp_path):
    layers = {f"layer_{i}": some_weights(2, i + 1, 3, 4) for i in (10, 2)}
    layers["²"] = layers["layer_10"][:, :1]
    np.savez(tmp_path / "weights.npz", **layers, tokens=WORDS, key_tokens=list("abcd"))
    done = run_command("weights.npz", "--output", "page.html", "--batch", 1, "--title", "<b>",
                       cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data, shown = page_at(tmp_path / "page.html")
    assert (data["layers"], data["title"], data["key_tokens"]) == ([3, 11, 1], "<b>", list("abcd"))
    np.testing.assert_allclose(shown[:3], layers["layer_2"][1], rtol=0, atol=1e-5)


def test_the_command_numbers_what_has_no_words(tmp_path):
    np.save(tmp_path / "weights.npy", some_weights(3, 5))
    assert run_command("weights.npy", cwd=tmp_path).returncode == 0
    data, _ = page_at(tmp_path / "weights.html")
    assert (data["tokens"], data["key_tokens"]) == (list("012"), list("01234"))


@pytest.mark.parametrize(("arrays", "message"), [
    (None, "No such file"),
    ({}, "got no weights"),
    ({"weights": np.eye(3), "tokens": WORDS[:1]}, "tokens: got 1, wanted 3"),
    ({"weights": np.arange(3)}, "got no matrix of weights"),
    ({"weights": np.array([{}], object)}, "pickled Python objects"),
])
def test_the_command_says_what_is_wrong(tmp_path, arrays, message):
    if arrays is not None:
        np.savez(tmp_path / "weights.npz", **arrays)
    done = run_command("weights.npz", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("weights.npz: ") and message in done.stderr
    assert not (tmp_path / "weights.html").exists()


def test_one_array_with_a_batch(tmp_path):
    weights = some_weights(2, 4, 3, 3)
    np.savez(tmp_path / "weights.npz", weights=weights, tokens=WORDS)
    assert run_command("weights.npz", "--batch", 1, cwd=tmp_path).returncode == 0
    data, shown = page_at(tmp_path / "weights.html")
    assert data["layers"] == [4]
    np.testing.assert_allclose(shown, weights[1], rtol=0, atol=1e-5)


def test_all_arrays_together_are_of_a_size_for_a_page(monkeypatch, tmp_path):
    np.savez(tmp_path / "weights.npz", **{f"layer_{i}": some_weights(2, 9, 9) for i in range(4)})
    monkeypatch.setattr(command, "MOST_BYTES", 8 * 2 * 81 * 4)
    assert len(command.read(tmp_path / "weights.npz", False)[0]) == 4
    monkeypatch.setattr(command, "MOST_BYTES", 8 * 2 * 81 * 4 - 1)
    with pytest.raises(ValueError, match=r"layer_3: got shape \(2, 9, 9\), with what"):
        command.read(tmp_path / "weights.npz", False)


def bomb():
    """An archive of some kilobytes with an array of 8 GB in it, of which nobody needs the data."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (1000, 1000, 1000)})
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.npy", header.getvalue() + b"\0" * 1000)
    return made.getvalue()


def damaged():
    made = io.BytesIO()
    np.savez_compressed(made, weights=some_weights(4, 9, 9))
    data = bytearray(made.getvalue())
    data[120:160] = bytes(40)
    return bytes(data)


@pytest.mark.parametrize(("data", "message"), [
    (b"", "got an empty file"), (b"PK\x03\x04 not a zip", "not a zip file"),
    (b"no array at all", "got a file of another kind, wanted what numpy.savez writes"),
    (b"version https://git-lfs.github.com/spec/v1\n", "got a pointer of Git LFS"),
    (b"<!DOCTYPE html>", "got a page of HTML"),
    (bomb(), "more than a page can show"), (damaged(), "got weights: .*wanted a file that fits")])
def test_the_command_refuses_files_of_another_kind(tmp_path, data, message):
    (tmp_path / "weights.npz").write_bytes(data)
    done = run_command("weights.npz", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_the_command_refuses_folders(tmp_path):
    for path in (".", "/"):
        done = run_command(path, cwd=tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr


def npy_of(descr, shape, data=b""):
    """An .npy file that says this of itself, whatever stands in it."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue() + data


SOME = npy_of("<f8", (1, 2, 2), np.full(4, 0.5).tobytes())


@pytest.mark.parametrize(("members", "message"), [
    ({"w": SOME, "tokens": npy_of("<U0", (2**27,))},
     r"got tokens: shape \(134217728,\) of <U0, which takes no bytes"),
    ({"w": SOME, "tokens": npy_of("|S1", (2000,), bytes(2000))},
     r"tokens: got shape \(2000,\), wanted a word for each of at most 2 queries or keys"),
    ({"w": npy_of("|b1", (1, 10**6), bytes(10**6))}, "wanted at most 100,000: more than a page"),
    ({"w": npy_of("|b1", (10**5, 1001, 1), b"")}, "more than a page can show"),
    ({"w\x1b[2J": npy_of("<f8", (2, 2), b"")}, r"got w\\x1b\[2J: 0 bytes for shape \(2, 2\)"),
    ({"\x1b[31m": npy_of("<f8", (10**9, 2, 2))}, r"\\x1b\[31m: got shape \(1000000000, 2, 2\)"),
])
def test_the_command_counts_before_it_reads(tmp_path, members, message):
    with zipfile.ZipFile(tmp_path / "weights.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name + ".npy", content)
    done = run_command("weights.npz", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(message, done.stderr) and "\x1b" not in done.stderr, done.stderr


def test_the_command_shows_no_name_that_a_terminal_would_obey(tmp_path):
    np.savez(tmp_path / "\x1b[2J.npz", weights=some_weights(2, 3, 3))
    done = run_command("\x1b[2J.npz", cwd=tmp_path)
    assert done.stdout.startswith(r"\x1b[2J.html: ") and (tmp_path / "\x1b[2J.html").exists()
    (tmp_path / "\x1b[2J.npz").write_bytes(b"no array")
    done = run_command("\x1b[2J.npz", cwd=tmp_path)
    assert done.stderr.startswith(r"\x1b[2J.npz: got a file of another kind")


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_the_command_reads_regular_files_alone(tmp_path, kind):
    path = tmp_path / "weights.npz"
    os.mkfifo(path) if kind == "a FIFO" else path.symlink_to("/dev/zero")
    done = subprocess.run([sys.executable, "-m", "mha", "view", path], cwd=tmp_path, timeout=60,
                          capture_output=True, text=True)
    assert done.stderr == f"{path}: got {kind}, wanted a regular file\n"
