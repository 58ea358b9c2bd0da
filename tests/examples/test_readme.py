"""What the README and the docs show runs, and what a newcomer meets first is said in words."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from code_of_pages import ROOT, blocks_of, names_of

import mha


def test_its_python_runs(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks, names = blocks_of("README.md"), names_of("README.md")
    printed = capsys.readouterr().out
    losses = re.search(r"# the loss: (.+)", text)[1].split(", ")
    shown = re.findall(r"^[\d.]+$", printed, re.MULTILINE)
    assert losses == [f"{float(line):.2f}" for line in shown]
    assert losses == sorted(losses, reverse=True)
    for comment in re.findall(r"^print.*?# (.+)$", "".join(blocks), re.MULTILINE):
        assert comment in printed
    assert len(blocks) >= 3 and len(text.splitlines()) <= 120
    assert names["gradients"].W_o.shape == names["layer"].W_o.shape
    assert np.isfinite(names["gradients"].W_o).all()


def test_its_packages_are_on_one_line():
    """Where tests/tools/fresh.sh reads what to install on a bare Debian."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    packages = re.findall(r"\(Debian: `apt install ([^`\n]+)`\)", text)
    assert len(packages) == 1 and "python3-venv" in packages[0]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_its_ten_lines_print_on_every_terminal(encoding):
    block = blocks_of("README.md")[0]
    run = subprocess.run([sys.executable, "-c", block], capture_output=True,
                         env={**os.environ, "PYTHONIOENCODING": encoding})
    assert run.returncode == 0, run.stderr
    assert "##100" in run.stdout.decode(encoding)


PAGES = ["index", "start", "masks", "viewing", "heads", "training", "decoding", "recipes",
         "rotary", "threads",
         *(f"steps/{page.stem}" for page in (ROOT / "docs/steps").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_and_prints_what_it_says(page, capsys):
    threads = mha.get_num_threads()
    names_of(f"docs/{page}.md")
    mha.set_num_threads(threads)
    printing = re.findall(r"^ *print\((.*)$", "".join(blocks_of(f"docs/{page}.md")), re.MULTILINE)
    wanted = [line.split("# ", 1)[1] for line in printing if "# " in line]
    printed = capsys.readouterr().out.splitlines()
    if len(wanted) == len(printing):
        assert printed == wanted
    else:  # pictures as text have no comment
        assert len(wanted) >= len(printing) - 1
        assert [line for line in printed if line in wanted] == wanted


def test_every_page_of_the_site_is_run_or_has_no_code():
    others = {"dask", "coming_from", "autodiff"}  # tests of their own; other libraries
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        if "_build" not in page and page not in {*PAGES, *others}:
            assert "```python" not in path.read_text(encoding="utf-8"), page


def copy_package(to, leave_out="*.so"):
    shutil.copytree(Path(mha.__file__).parent, to / "mha",
                    ignore=shutil.ignore_patterns(leave_out, "*.dylib", "__pycache__"))


def error_of_import(place):
    """The last line of what Python says. -S: setuptools' finder for editable packages would lend
    the extension of this one."""
    program = f"import sys; sys.path.insert(0, {str(place)!r}); import mha"
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "circular" not in run.stderr
    assert len(run.stderr.splitlines()) < 10
    return run.stderr.splitlines()[-1]


def test_an_unbuilt_clone_says_in_one_line_what_to_do(tmp_path):
    """Without the extension, as in a clone that hides the mha that is installed."""
    copy_package(tmp_path)
    last = error_of_import(tmp_path)
    assert last.startswith(f"ImportError: the mha in {tmp_path}/mha is not built for this Python")
    assert "pip install --editable ." in last


def test_what_another_python_has_built_says_so(tmp_path):
    copy_package(tmp_path)
    (tmp_path / "mha/_core.cpython-38-x86_64-linux-gnu.so").touch()
    last = error_of_import(tmp_path)
    assert "is not built for this Python, which loads _core." in last
    assert "but as _core.cpython-38-x86_64-linux-gnu.so: install it again" in last
    (tmp_path / "setup.py").touch()  # a clone
    last = error_of_import(tmp_path)
    assert "but as _core.cpython-38" in last and "pip install --editable ." in last


def test_an_archive_says_that_a_folder_is_needed(tmp_path):
    """A wheel on sys.path, or a program that zipapp packs: built, but not loaded from there."""
    copy_package(tmp_path, leave_out="")
    archive = shutil.make_archive(str(tmp_path / "mha-0"), "zip", tmp_path, "mha")
    last = error_of_import(archive)
    assert last == (f"ImportError: the mha in {archive}/mha cannot be imported from an archive, "
                    "since Python loads a C core from a folder only: install the wheel with pip, "
                    "or unpack the archive")


def test_code_of_the_site_is_not_cut_off():
    """Its theme shows 106 columns at most; 86 fit beside an editor, too."""
    for path in (ROOT / "docs").rglob("*.md"):
        if "_build" not in path.parts:
            blocks = re.findall(r"^```\w+\n(.*?)^```", path.read_text(encoding="utf-8"),
                                re.MULTILINE | re.DOTALL)
            assert [line for block in blocks for line in block.split("\n") if len(line) > 86] == []
