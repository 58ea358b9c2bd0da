"""Layers point one way: mha -> csrc/python -> csrc/core -> {threads, kernels}."""

import ast
import re
import subprocess
from pathlib import Path

import mha

ROOT = Path(__file__).parent.parent
C_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h", ".inc"))
MAY_INCLUDE = {
    "include": {"include"},
    "threads": {"threads", "include"},
    "kernels": {"kernels", "include"},
    "core": {"core", "threads", "kernels", "include"},
    "python": {"python", "include"},
}


def layer_of(path):
    return path.relative_to(ROOT / "csrc").parts[0]


def included_layer(path, name):
    if name.startswith("mha/"):
        return "include"
    return layer_of((path.parent / name).resolve())


def test_includes_point_one_way():
    for path in C_FILES:
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            assert included_layer(path, name) in MAY_INCLUDE[layer_of(path)], f"{path}: {name}"


def test_python_and_intrinsics_stay_in_their_folders():
    for path in C_FILES:
        text = path.read_text()
        if layer_of(path) != "python":
            assert not re.search(r"Python\.h|numpy/", text), path
        if layer_of(path) != "kernels":
            assert not re.search(r"immintrin|arm_neon|_mm\d*_", text), path


def test_no_libm_in_kernels():
    for path in C_FILES:
        if layer_of(path) == "kernels":
            assert "<math.h>" not in path.read_text(), path


def test_no_file_is_long():
    files = [*C_FILES, *(ROOT / "mha").rglob("*.py"), *(ROOT / "tests").rglob("*.py"),
             *(ROOT / "tests/c").glob("*.c"), *(ROOT / "examples").glob("*.py")]
    for path in files:
        assert len(path.read_text().splitlines()) <= 500, path


WRITABLE = {
    "pool", "process_num_threads", "forks_are_handled",
    "chosen",  # the kernels in use
    "key", "key_works",  # each thread's workspace and last look at signals
    "spare", "functions", "handler",  # blocks of results for reuse, and how NumPy gives them back
    "num_threads_variable",  # of mha.threads
    "methods", "module_definition",  # Python's and NumPy's
    "mha_numpy_api", "mha_numpy_apiPyArray_RUNTIME_VERSION",
}


def test_only_the_pool_and_what_is_listed_is_writable():
    """No writable global or static variable, of a file or a function, but those of the list."""
    table = subprocess.run(["objdump", "--syms", mha._core.__file__], check=True,
                           capture_output=True, text=True).stdout
    found = re.findall(r"[O ] \.t?(?:data|bss)\t\w+ +(?:\.hidden )?(\w+)", table)
    ours = {name for name in found if not name.startswith("__") and name != "completed"}
    # Built beside NumPy 1, whose headers have no such variable.
    assert ours | {"mha_numpy_apiPyArray_RUNTIME_VERSION"} == WRITABLE


def test_every_library_in_use_is_linked():
    """The linker gives a version to what it found in a library; what has none is Python's, or is
    there only as long as the program happens to have loaded it."""
    table = subprocess.run(["objdump", "--dynamic-syms", mha._core.__file__], check=True,
                           capture_output=True, text=True).stdout
    wanted = re.findall(r"^\w+  +D?F? +\*UND\*\t\w+ +(\S+) +(\w+)$", table, re.M)
    assert len(wanted) > 100
    if any(version.startswith("(GLIBC") for version, _ in wanted):
        assert [name for version, name in wanted
                if version == "Base" and not name.startswith(("Py", "_Py", "__"))] == []


def test_imports_of_the_package():
    """Attention arithmetic stays out of mha/ but for reference/: no module computes softmax. In
    dask/ weights among a part's keys become those among all, by their log-sum-exps."""
    for path in (ROOT / "mha").rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                 and node.value.id in ("np", "numpy")}
        if path.parent.name not in ("reference", "diagnosis", "dask"):
            assert not names & {"exp", "matmul", "einsum", "dot"}, path


def test_headers_and_package_have_one_version():
    text = (ROOT / "csrc/include/mha/runtime.h").read_text()
    numbers = [re.search(rf"MHA_VERSION_{part} (\d+)", text)[1]
               for part in ("MAJOR", "MINOR", "PATCH")]
    assert ".".join(numbers) == mha.__version__
