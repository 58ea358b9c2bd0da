"""docs/run_notebooks.py: a failure is one sentence that names the notebook and the cell."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "run_notebooks.py"
LONG = "import time\ntime.sleep(1000)"


@pytest.fixture
def run_notebooks(tmp_path, monkeypatch):
    """The module, with a folder of the test as the repository."""
    spec = importlib.util.spec_from_file_location("run_notebooks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for folder in ("examples", "docs"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("IPYTHONDIR", "")  # what main sets is undone
    return module


def plant(folder, *cells):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_markdown_cell("# Title"),
                      *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(notebook, folder / "examples" / "planted.ipynb")


@pytest.mark.thorough
@pytest.mark.parametrize(("cell", "sentence"), [
    ("\n1 / 0", "planted.ipynb, code cell 2, which begins `1 / 0`: ZeroDivisionError: division by"
     " zero."),
    (LONG, "planted.ipynb, code cell 2, which begins `import time`: it took longer than 2 seconds."
     " The variable MHA_CELL_SECONDS gives it more: MHA_CELL_SECONDS=8 make docs."),
    ("import os\nos._exit(1)", "planted.ipynb, code cell 2, which begins `import os`: its Python"
     " ended, as it does when the memory is used up."),
])
def test_a_cell_that_fails_is_named_in_one_sentence(run_notebooks, tmp_path, monkeypatch, cell,
                                                    sentence):
    plant(tmp_path, "x = 1", cell, "x = 2")
    monkeypatch.setenv("MHA_CELL_SECONDS", "2" if cell == LONG else "60")
    with pytest.raises(SystemExit) as failed:
        run_notebooks.main()
    assert str(failed.value) == f"docs: {sentence}"
    assert not (tmp_path / "docs" / "notebooks" / "planted.ipynb").exists()


def test_a_copy_is_made_again_when_its_notebook_has_changed(run_notebooks, tmp_path, capsys):
    copy = tmp_path / "docs" / "notebooks" / "planted.ipynb"
    for cell, output in (("6 * 7", "42"), ("6 * 8", "48")):
        plant(tmp_path, cell)
        run_notebooks.main()
        assert "running planted.ipynb" in capsys.readouterr().out
        assert nbformat.read(copy, 4).cells[1].outputs[0]["data"]["text/plain"] == output
        run_notebooks.main()
        assert capsys.readouterr().out == ""
    (tmp_path / "examples" / "planted.ipynb").unlink()
    run_notebooks.main()
    assert not copy.exists()


@pytest.mark.parametrize("seconds", ["ten", "0", "-1", "1.5", ""])
def test_a_limit_that_is_no_number_of_seconds_is_named(run_notebooks, monkeypatch, seconds):
    monkeypatch.setenv("MHA_CELL_SECONDS", seconds)
    with pytest.raises(SystemExit, match=f"^docs: MHA_CELL_SECONDS: got '{seconds}', wanted a"):
        run_notebooks.main()
