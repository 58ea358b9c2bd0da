"""What PyInstaller has to know of mha: the entry point `pyinstaller40` leads it here."""

from pathlib import Path


def hook_dirs() -> list[str]:
    """The folders with hooks, which PyInstaller reads where a program imports what they name."""
    return [str(Path(__file__).parent)]
