"""Layers point one way: mha -> csrc/python -> csrc/core -> {threads, kernels}; and inside mha."""

import ast
import re
import subprocess
from pathlib import Path

import mha

ROOT = Path(__file__).parents[2]
C_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h", ".inc"))
# Folders of csrc, lowest first: each may include those of the lines before it of its own layer, and
# of other layers what MAY_INCLUDE says.
FOLDERS = [
    {"core/base"}, {"core/heads"}, {"core/projection", "core/attention"}, {"core/layer"},
    {"python/base"}, {"python/convert"}, {"python/call"}, {"python/steps"}, {"python"},
    {"kernels/simd"}, {"kernels/elementwise"}, {"kernels/products"}, {"kernels/attention"},
    {"kernels"},
]
RANKS_OF_FOLDERS = {folder: rank for rank, folders in enumerate(FOLDERS) for folder in folders}
MAY_INCLUDE = {
    "include": {"include"},
    "threads": {"threads", "include"},
    "kernels": {"kernels", "include"},
    "core": {"core", "threads", "kernels", "include"},
    "python": {"python", "include"},
}


# Parts of the package, lowest first: each may import those of the lines before it.
PARTS = [
    {"_core", "_version"}, {"_base"}, {"_functions", "plot", "importance"},
    {"parameters", "masks"}, {"view"}, {"_layer"}, {"dask", "reference"}, {"compat", "testing"},
    {"__init__"}, {"__main__"},
]
RANKS = {part: rank for rank, parts in enumerate(PARTS) for part in parts}


def layer_of(path):
    return path.relative_to(ROOT / "csrc").parts[0]


def included(path):
    """What a file includes: (layer, folder) of each, `include` for the public headers."""
    for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        if name.startswith("mha/"):
            yield name, "include", "include"
        else:
            target = ROOT / "csrc" / name
            assert target.exists(), f"{path}: {name} is no path from csrc"
            yield name, layer_of(target), folder_of(target)


def folder_of(path):
    return path.relative_to(ROOT / "csrc").parent.as_posix()


def test_includes_point_one_way():
    for path in C_FILES:
        for name, layer, _ in included(path):
            assert layer in MAY_INCLUDE[layer_of(path)], f"{path}: {name}"


def test_includes_of_folders_point_one_way():
    """Kernels' shared header is for all of them."""
    for path in C_FILES:
        own = folder_of(path)
        for name, layer, folder in included(path):
            if layer == layer_of(path) and own in RANKS_OF_FOLDERS and folder != own:
                assert RANKS_OF_FOLDERS[folder] < RANKS_OF_FOLDERS[own], f"{path}: {name}"


def test_core_and_bindings_have_few_folders():
    for layer in ("core", "python"):
        folders = {folder_of(path) for path in C_FILES if layer_of(path) == layer} - {layer}
        assert folders == {folder for folder in RANKS_OF_FOLDERS if folder.startswith(layer + "/")}
        assert len(folders) <= 6


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


MOST_LINES = 500  # one class in one file may be longer
LONGER = {"mha/_layer/layer.py": 680, "mha/_layer/kv_cache.py": 600,
          "mha/_functions/block_mask.py": 650}


def test_no_file_is_long():
    files = [*C_FILES, *(ROOT / "mha").rglob("*.py"), *(ROOT / "tests").rglob("*.py"),
             *(ROOT / "tests/c").glob("*.c"), *(ROOT / "examples").glob("*.py")]
    for path in files:
        most = LONGER.get(path.relative_to(ROOT).as_posix(), MOST_LINES)
        assert len(path.read_text().splitlines()) <= most, path


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


def imported(path):
    """The modules of mha that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules():
    """Every module of mha by its name."""
    names = {path: "mha." + ".".join(path.relative_to(ROOT / "mha").with_suffix("").parts)
             for path in (ROOT / "mha").rglob("*.py") if path.parent.name != "_pyinstaller"}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def test_imports_point_one_way():
    """What another part offers comes by its own module: `mha` itself is for users."""
    for name, path in modules().items():
        own = [*name.split("."), "__init__"][1]
        for target in imported(path):
            if target == "mha":
                assert own == "__main__", f"{path} imports mha itself"
            elif target.startswith("mha.") and own != "__init__":
                part = target.split(".")[1]
                assert part == own or RANKS[part] < RANKS[own], f"{path} imports {target}"


def test_no_module_imports_itself_by_a_detour():
    files = modules()
    graph = {}
    for name, path in files.items():
        targets = {target if target in files else target.rpartition(".")[0]
                   for target in imported(path)}
        graph[name] = targets & files.keys() - {name, "mha"}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        for name in leaves:
            del graph[name]
    assert not graph, f"one of these imports itself by way of others: {sorted(graph)}"


def test_top_level_is_short():
    """An underscore is internal, all else is public."""
    entries = {path.name for path in (ROOT / "mha").iterdir()
               if not path.name.startswith(("_core.", "__pycache__")) and path.name != "py.typed"}
    assert entries == {*(part for part in RANKS if (ROOT / "mha" / part).is_dir()),
                       *(f"{part}.py" for part in RANKS if (ROOT / f"mha/{part}.py").exists()),
                       "_pyinstaller"}
    assert len(entries) < 18  # _core.pyi is one more


def test_arithmetic_stays_out_of_the_package():
    """Attention arithmetic stays out of mha/ but for reference/: no module computes softmax. In
    dask/ weights among a part's keys become those among all, by their log-sum-exps."""
    for path in (ROOT / "mha").rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                 and node.value.id in ("np", "numpy")}
        if path.parent.name not in ("reference", "_diagnosis", "dask"):
            assert not names & {"exp", "matmul", "einsum", "dot"}, path


def test_headers_and_package_have_one_version():
    text = (ROOT / "csrc/include/mha/runtime.h").read_text()
    numbers = [re.search(rf"MHA_VERSION_{part} (\d+)", text)[1]
               for part in ("MAJOR", "MINOR", "PATCH")]
    assert ".".join(numbers) == mha.__version__
