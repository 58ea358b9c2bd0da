"""The documentation site: `make docs`. Pages are Markdown (MyST), the reference comes from the
docstrings, the notebooks are those of examples/, run anew. Nothing of it asks the network."""

import os
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

# What notebooks import from their neighbours.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "examples"), os.environ.get("PYTHONPATH")]))

# Kernels warn of what concerns nobody here: that they talk to this process without encryption.
PROFILE = HERE / "_build/ipython/profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
(PROFILE / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(PROFILE.parent)

import docstrings  # noqa: E402
import formulas  # noqa: E402
import links  # noqa: E402

import mha  # noqa: E402

project = "mha"
author = copyright = "the authors of mha"
version = release = mha.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode", "myst_nb",
              "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "mha"
html_static_path = ["_static"]
html_css_files = ["mha.css"]
html_show_sphinx = False

autosummary_generate = False  # the tables alone

html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_merge_streams = True
nb_execution_mode = "cache"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True

autodoc_typehints = "none"  # the docstrings give shapes, which types do not
autodoc_member_order = "bysource"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


# Files outside of this folder that pages link to, as readers of the repository find them, and the
# pages that show them here.
SHOWN_BY = {"../CONTRIBUTING.md": "contributing.md",
            "../benchmarks/results_avx2_amd.md": "speed.md",
            "../benchmarks/results_avx512_amd.md": "speed.md",
            "../benchmarks/results_avx512_intel.md": "speed.md",
            "../benchmarks/grid.md": "speed.md", "../benchmarks/reshaping.md": "speed.md",
            "../benchmarks/dask_scaling.md": "speed.md", "../CHANGELOG.md": "changes.md"}


def lead_to_pages(app, name, source):
    for path, page in SHOWN_BY.items():
        source[0] = source[0].replace(f"]({path}", f"]({page}")
    source[0] = re.sub(r"\]\(\.\./examples/(\w+)\.ipynb", r"](notebooks/\1.ipynb", source[0])


def skip(app, what, name, member, skipped, options):
    """Settings, which the class's own docstring lists, and fields of tuples."""
    return skipped or type(member).__name__ in ("Setting", "_tuplegetter") or None


def name_types(app, what, name, obj, options, signature, annotation):
    return signature and re.sub(r"<class '([\w.]+)'>", r"\1", signature), annotation


def setup(app):
    notebooks = HERE / "notebooks"
    notebooks.mkdir(exist_ok=True)
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        copy = notebooks / notebook.name
        if not copy.exists() or copy.read_bytes() != notebook.read_bytes():
            shutil.copyfile(notebook, copy)
    app.add_html_math_renderer("mathml", (formulas.inline, None), (formulas.block, None))
    app.connect("autodoc-process-docstring", docstrings.as_restructured_text)
    app.connect("autodoc-process-signature", name_types)
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", lead_to_pages)
    app.connect("build-finished", links.check)
