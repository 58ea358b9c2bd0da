"""The programs of examples/, as modules."""

import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(*names):
    """The modules of these names; their folder is on Python's path for as long as that takes."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(EXAMPLES))
