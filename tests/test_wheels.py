"""What wheels are made of: the kernels of their machine; and how a release is made."""

import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github/workflows/release.yml"

SOURCES = """
import os, sys, sysconfig, types
sysconfig.get_platform = lambda: os.environ["_PYTHON_HOST_PLATFORM"]  # on POSIX it is so by itself
built = {}
sys.modules["setuptools"] = types.SimpleNamespace(
    setup=built.update, Extension=lambda name, **settings: settings)
sys.modules["setuptools.command"] = types.ModuleType("setuptools.command")
sys.modules["setuptools.command.build_ext"] = types.SimpleNamespace(build_ext=object)
exec(open("setup.py").read())
[extension] = built["ext_modules"]
print(*extension["sources"], sysconfig.get_platform(), os.environ.get("ARCHFLAGS"), sep="\\n")
"""


def chosen(host_platform, **environment):
    """(kernel sets that setup.py compiles, the wheel's platform, what ARCHFLAGS then says)."""
    environment = {**os.environ, "_PYTHON_HOST_PLATFORM": host_platform, **environment}
    done = subprocess.run([sys.executable, "-c", SOURCES], cwd=ROOT, text=True, check=True,
                          capture_output=True, env=environment)
    *sources, target, flags = done.stdout.split("\n")[:-1]
    sets = {match[1] for match in (re.search(r"kernels_float32_(\w+)\.c", name)
                                   for name in sources) if match}
    return sets, target, flags


INTEL, ARM = {"baseline", "avx2", "avx512", "amx"}, {"baseline", "neon"}


@pytest.mark.parametrize(("target", "sets"), [
    ("linux-x86_64", INTEL), ("linux-aarch64", ARM), ("macosx-11.0-arm64", ARM),
    ("macosx-10.13-x86_64", INTEL), ("win-amd64", INTEL), ("win-arm64", ARM),
    ("linux-riscv64", {"baseline"})])
def test_kernels_are_those_of_the_machine_that_the_wheel_is_for(target, sets):
    assert chosen(target)[:2] == (sets, target)


@pytest.mark.parametrize(("machine", "sets"), [("arm64", ARM), ("x86_64", INTEL)])
def test_macos_compiles_for_one_machine(machine, sets):
    """Though its Python would compile for both."""
    named = chosen("macosx-11-universal2", ARCHFLAGS=f"-arch {machine}")
    assert named == (sets, f"macosx-11-{machine}", f"-arch {machine}")
    _, target, flags = chosen("macosx-11-universal2", ARCHFLAGS="-arch arm64 -arch x86_64")
    assert "universal2" not in target and flags == f"-arch {platform.machine()}"


def test_actions_are_pinned_and_only_tags_are_published():
    text = WORKFLOW.read_text()
    actions = re.findall(r"uses: (.+)", text)
    assert len(actions) >= 8
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"  # a tag may be moved
    assert all(re.fullmatch(pinned, action) for action in actions)
    before, publish = text.split("  publish:\n")
    assert "if: startsWith(github.ref, 'refs/tags/v')\n" in publish
    assert "write" not in before.split("jobs:")[1] and "gh-action-pypi-publish" not in before
    assert "secrets." not in text


def test_the_quick_part_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "@tests/quick.txt" in project["tool"]["cibuildwheel"]["test-command"]
    files = (ROOT / "tests/quick.txt").read_text().split()
    assert len(files) > 10 and all((ROOT / name).is_file() for name in files)
