"""Why the C core is not found, in one sentence: mha/__init__.py raises it."""

import os
import sysconfig


def why_no_core(folder: str) -> str:
    if not os.path.isdir(folder):  # Python imports from archives, but for what is compiled
        return (f"the mha in {folder} cannot be imported from an archive, since Python loads a C"
                " core from a folder only: install the wheel with pip, or unpack the archive")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    others = sorted(file for file in os.listdir(folder)
                    if file.startswith("_core.") and file.endswith((".so", ".pyd")))
    but = f", which loads _core{suffix}, but as {', '.join(others)}" if others else ""
    if others and not os.path.exists(os.path.join(os.path.dirname(folder), "setup.py")):
        return (f"the mha in {folder} is not built for this Python{but}: install it again with the"
                " pip of this Python")
    return (f"the mha in {folder} is not built for this Python{but}: run `make run` or"
            " `pip install --editable .` in its clone; a mha that is installed elsewhere"
            " is found from any other folder")
