"""Runs the notebooks of examples/ for the site: copies of them with fresh outputs, in
docs/notebooks/. A copy whose notebook has not changed stays. `make docs` calls it before Sphinx.

    MHA_CELL_SECONDS=1200 python docs/run_notebooks.py

MHA_CELL_SECONDS is how long a cell may take: 600 by default, where the slowest takes less than 20
on a quiet machine.
"""

import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).parent.parent
CELL_SECONDS = 600


class NotebookError(Exception):
    """A notebook did not run; the message is one sentence that names the notebook and the cell."""


def run_all(folder, copies, cell_seconds):
    """Runs every notebook of a folder whose copy is missing or older, and removes other copies.

    A notebook that fails raises NotebookError; the copies of those before it stay.
    """
    copies.mkdir(exist_ok=True)
    for copy in copies.glob("*.ipynb"):
        if not (folder / copy.name).exists():
            copy.unlink()
    for notebook in sorted(folder.glob("*.ipynb")):
        source = hashlib.sha256(notebook.read_bytes()).hexdigest()
        copy = copies / notebook.name
        if copy.exists() and nbformat.read(copy, 4).metadata.get("source") == source:
            continue
        print(f"running {notebook.name}", end=" ", flush=True)
        start = time.monotonic()
        try:
            made = run(notebook, cell_seconds)
        except NotebookError:
            print()
            raise
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
        made.metadata["source"] = source
        nbformat.write(made, copy)


def run(path, cell_seconds):
    """The notebook with fresh outputs, run in its own folder."""
    notebook = nbformat.read(path, 4)
    client = NotebookClient(notebook, timeout=cell_seconds,
                            resources={"metadata": {"path": str(path.parent)}})
    number = 0
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            number += 1
            try:
                client.execute_cell(cell, index)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                begins = next((line for line in cell.source.splitlines() if line.strip()), "")
                raise NotebookError(
                    f"{path.name}, code cell {number}, which begins `{begins.strip()}`:"
                    f" {_reason(error, cell_seconds)}.") from error
        client.set_widgets_metadata()
    return notebook


def _reason(error, cell_seconds):
    """What happened to a cell, as the end of a sentence, in one line."""
    if isinstance(error, CellTimeoutError):
        return (f"it took longer than {cell_seconds} seconds. The variable MHA_CELL_SECONDS gives"
                f" it more: MHA_CELL_SECONDS={4 * cell_seconds} make docs")
    if isinstance(error, DeadKernelError):
        return "its Python ended, as it does when the memory is used up"
    text = re.sub(r"\x1b\[[\d;]*m", "", f"{error.ename}: {error.evalue}")
    return " ".join(text.split()).rstrip(".")


def cell_seconds():
    """What MHA_CELL_SECONDS says; NotebookError if it is no number of seconds."""
    text = os.environ.get("MHA_CELL_SECONDS", str(CELL_SECONDS))
    if not text.isdecimal() or int(text) == 0:
        raise NotebookError(f"MHA_CELL_SECONDS: got {text!r}, wanted a whole number of seconds.")
    return int(text)


def main():
    with tempfile.TemporaryDirectory() as profile:
        # Kernels warn of what concerns nobody here: that they talk to this process without
        # encryption.
        default = Path(profile, "profile_default")
        default.mkdir()
        (default / "ipython_kernel_config.py").write_text(
            "get_config().IPKernelApp.log_level = 40\n")
        os.environ["IPYTHONDIR"] = profile
        try:
            run_all(ROOT / "examples", ROOT / "docs" / "notebooks", cell_seconds())
        except NotebookError as error:
            sys.exit(f"docs: {error}")


if __name__ == "__main__":
    main()
