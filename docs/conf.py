"""The documentation site: `make docs`. Pages are Markdown (MyST), the reference comes from the
docstrings, the notebooks are those of examples/ as run_notebooks.py has run them. Nothing of it
asks the network."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import docstrings
import formulas
import links
import tables

import mha

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
nb_execution_mode = "off"

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
    app.add_html_math_renderer("mathml", (formulas.inline, None), (formulas.block, None))
    app.connect("autodoc-process-docstring", docstrings.as_restructured_text)
    app.connect("autodoc-process-signature", name_types)
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", lead_to_pages)
    app.connect("doctree-resolved", tables.fit)
    app.connect("build-finished", links.check)
