"""A page of lines: printed as they come, and written."""

import platform
from pathlib import Path

from tqdm import tqdm


def machine_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def show(lines, name, write):
    """Prints the lines beside tqdm's bar; with `write` the page is `name`, in this folder."""
    shown = []
    for line in lines:
        tqdm.write(line)
        shown.append(line)
    if write:
        (Path(__file__).parent / name).write_text("\n".join(shown) + "\n")
