"""What wheels are made of: the kernels of their machine; and how a release is made."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/release.yml"

# setup.py beside a setuptools that keeps what it is told.
SET_UP = """
import os, sys, sysconfig, types
sysconfig.get_platform = lambda: os.environ["_PYTHON_HOST_PLATFORM"]  # on POSIX it is so by itself
built = {}
sys.modules["setuptools"] = types.SimpleNamespace(__name__="setuptools", __version__="77.0",
    setup=built.update, Extension=lambda name, **settings: settings)
sys.modules["setuptools.command"] = types.ModuleType("setuptools.command")
for name in ("build", "build_ext", "sdist"):
    command = type(name, (), {"sub_commands": []})
    sys.modules[f"setuptools.command.{name}"] = types.SimpleNamespace(**{name: command})
"""
SOURCES = """
exec(open("setup.py").read())
[extension] = built["ext_modules"]
print(*extension["sources"], sysconfig.get_platform(), os.environ.get("ARCHFLAGS"), sep="\\n")
"""


def set_up(program, host_platform=None, **environment):
    host_platform = host_platform or sysconfig.get_platform()
    environment = {**os.environ, "_PYTHON_HOST_PLATFORM": host_platform, **environment}
    return subprocess.run([sys.executable, "-c", SET_UP + program], cwd=ROOT, text=True,
                          capture_output=True, env=environment)


def chosen(host_platform, **environment):
    """(kernel sets that setup.py compiles, the wheel's platform, what ARCHFLAGS then says)."""
    done = set_up(SOURCES, host_platform, **environment)
    assert done.returncode == 0, done.stderr
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


@pytest.mark.parametrize(("change", "said"), [
    ("import numpy; numpy.__version__ = '1.25.2'",
     "mha: got numpy 1.25.2 to build with, wanted numpy>=1.26: pip install 'numpy>=1.26', or leave "
     "out --no-build-isolation"),
    ("sys.modules['setuptools'].__version__ = '66.1.1'",
     "mha: got setuptools 66.1.1 to build with, wanted setuptools>=77.0: pip install "
     "'setuptools>=77.0', or leave out --no-build-isolation"),
    ("sys.modules['numpy'] = None", "mha: missing NumPy to build with")])
def test_what_is_too_old_to_build_with_is_said_in_one_sentence(change, said):
    done = set_up(f"{change}\n{SOURCES}")
    assert done.returncode == 1 and done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


# A compiler that does not find what Debian has in a package of its own.
WITHOUT = """#!/bin/sh
echo 'x.c:1:10: fatal error: {header}: No such file or directory' >&2
exit 1
"""


@pytest.mark.skipif(os.name != "posix", reason="the compiler is a script of the shell")
@pytest.mark.parametrize(("header", "said"), [
    (None, "missing a C compiler: .*: No such file or directory (Debian: apt install gcc"),
    ("Python.h", "missing Python.h for Python 3.* (Debian: apt install python3-dev)"),
    ("stdlib.h", "the C compiler .* fails (Debian: apt install gcc libc6-dev): .*stdlib.h")])
def test_what_is_missing_to_compile_is_said_in_one_sentence(header, said, tmp_path):
    compiler = tmp_path / "cc"
    if header:
        compiler.write_text(WITHOUT.format(header=header))
        compiler.chmod(0o755)
    check = f"""{SOURCES}
builder = BuildWithInstructionSets()
builder.compiler = types.SimpleNamespace(compiler_so=[{str(compiler)!r}], include_dirs=["include"])
builder.check_compiler()
"""
    done = set_up(check)
    assert done.returncode == 1
    assert re.fullmatch("mha: " + re.sub(r"[()]", r"\\\g<0>", said) + ".*\n", done.stderr)


@pytest.mark.parametrize(("version", "wanted"), [
    ("1.26.4", "numpy>=1.26,<2"), ("2.0.0", "numpy>=1.26"), ("2.4.6", "numpy>=1.26")])
def test_what_is_built_beside_numpy_1_asks_for_it(version, wanted):
    """Since NumPy 2 cannot load it; the other way round it can be loaded."""
    done = set_up(f"import numpy; numpy.__version__ = {version!r}\n{SOURCES}"
                  "print(*built['install_requires'])")
    assert done.stdout.splitlines()[-1] == wanted


def test_a_function_that_no_header_declares_is_an_error():
    """Else it would be missing when the extension is loaded."""
    flags = set_up(SOURCES + "print(*extension['extra_compile_args'])").stdout.splitlines()[-1]
    assert "-Werror=implicit-function-declaration" in flags.split()
    assert " -Werror " in (ROOT / "csrc/objects.mk").read_text()  # the core, by make


def test_what_only_the_headers_of_numpy_2_have_is_defined_for_those_of_numpy_1():
    """So that the extension can be built beside NumPy 1.26."""
    headers = Path(np.get_include()) / "numpy"
    if not (headers / "npy_2_compat.h").exists():
        pytest.skip("this is NumPy 1: built beside it, the extension shows it by itself")
    text = (headers / "npy_2_compat.h").read_text()
    new = {f"PyDataType_{field}" for field in re.findall(r"^DESCR_ACCESSOR\((\w+)", text, re.M)}
    new |= set(re.findall(r"^ *# *define (Py\w+|NPY_[A-Z]\w+)", text, re.M))
    assert "PyDataType_ELSIZE" in new
    used, own = set(), set()
    for path in (ROOT / "csrc/python").rglob("*.[ch]"):
        own |= set(re.findall(r"#define (Py\w+)", path.read_text()))
        used |= set(re.findall(r"\b(?:Py|NPY_)\w+", path.read_text()))
    assert used & new <= own


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


def test_wheels_hold_every_package():
    """Those of a clone are found without being named; those of a wheel are not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "mha").rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == {
        ".".join(folder.parts) for folder in folders}
