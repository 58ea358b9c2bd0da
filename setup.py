"""Builds mha._core. Each kernel file gets the compiler flags of its own instruction set.

Switches, as environment variables:
  MHA_SANITIZE=1   address and undefined-behaviour sanitizers (run with ASan preloaded);
                   =thread: the thread sanitizer (with TSan preloaded, or a Python built with it)
  MHA_COVERAGE=1   gcov counters
  MHA_WERROR=1     warnings are errors

On Windows the compiler is that of CC, else Zig's of PyPI's package ziglang (pyproject.toml asks for
it there), else gcc: all of them know GNU C, which Visual Studio's does not.

SOURCE_DATE_EPOCH=seconds since 1970: sdists and wheels of the same files have the same bytes.
"""

import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from gzip import GzipFile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

try:
    import numpy
except ImportError as error:
    sys.exit(f"mha: missing NumPy to build with ({error}): pip install numpy, or leave out "
             "--no-build-isolation")

# Not sys.platform, which is that of the machine that compiles.
ON_WINDOWS = sysconfig.get_platform().startswith(("win", "mingw"))

# -g0: Python's own flags ask for debug information, which would triple the wheel.
COMMON_FLAGS = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off",
                "-fno-math-errno", "-Wall", "-Wextra", "-Wshadow", "-Wvla",
                # A function that no header declares is missing when the extension is loaded.
                "-Werror=implicit-function-declaration"]
if not ON_WINDOWS:
    # Nothing is thrown through C: tables for it would be 20 KB more (zig asks for both kinds).
    # Windows wants them.
    COMMON_FLAGS += ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]


def check_versions():
    """Stops in one sentence where what builds is too old. pip fetches newer ones by itself, but
    for those who build without isolation."""
    for package, oldest in ((numpy, (1, 26)), (setuptools, (77, 0))):
        version = tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:2])
        if version < oldest:
            wanted = f"{package.__name__}>={oldest[0]}.{oldest[1]}"
            sys.exit(f"mha: got {package.__name__} {package.__version__} to build with, wanted "
                     f"{wanted}: pip install '{wanted}', or leave out --no-build-isolation")


def instruction_sets():
    """name -> compiler flags of the kernel sets of the machine that the wheel is for, which may be
    another than this one: csrc/instruction_sets.txt."""
    name = sysconfig.get_platform()
    machine = platform.machine() if name.startswith("mingw") else name.rsplit("-", 1)[-1]
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)
    found = {}
    for line in Path("csrc/instruction_sets.txt").read_text().splitlines():
        if not line.startswith("#"):
            has_it, name, *flags = line.split()
            if has_it in ("*", machine):
                found[name] = flags
    return found


def instruction_set_of(source):
    """kernels_float32_avx2.c -> avx2; None for files that are not kernels."""
    stem = Path(source).stem
    return stem.rsplit("_", 1)[1] if stem.startswith("kernels_float") else None


def core_sources():
    """Every C file, but for the kernels of other machines and what is of the other system."""
    wanted = {None, *instruction_sets()}
    other_system = "system_posix" if ON_WINDOWS else "system_windows"
    return sorted(str(path) for path in Path("csrc").rglob("*.c")
                  if instruction_set_of(path) in wanted and path.stem != other_system)


def compiler_of_windows():
    """The command of a compiler that knows GNU C."""
    if os.environ.get("CC"):
        return os.environ["CC"].replace("\\", "/")  # which setuptools would take for escapes
    if find_spec("ziglang"):
        machine = "aarch64" if sysconfig.get_platform() == "win-arm64" else "x86_64"
        # Named, since without a target Zig compiles for the processor that it runs on.
        return f'"{Path(sys.executable).as_posix()}" -m ziglang cc -target {machine}-windows-gnu'
    if shutil.which("gcc"):
        return "gcc"
    sys.exit("mha: missing a compiler of GNU C, which Visual Studio's is not: pip install ziglang, "
             "or put a gcc for Windows on the PATH (MSYS2, WinLibs), or name one in CC")


@cache  # asked for each file
def version_of(command):
    """What a compiler says of itself."""
    return subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True,
                          check=True).stdout


def is_gcc(command):
    return "Free Software Foundation" in version_of(command)


class BuildExtensionFirst(build):
    """What may be missing for it is said before the files of Python are listed."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


class BuildWithInstructionSets(build_ext):
    """Adds the flags of its instruction set to each kernel file, and compiles on all cores."""

    def finalize_options(self):
        super().finalize_options()
        if ON_WINDOWS:
            os.environ["CC"] = compiler_of_windows()  # where setuptools looks for it
            self.compiler = "mingw32"

    def flags_of(self, source):
        flags = instruction_sets().get(instruction_set_of(source), [])
        if ON_WINDOWS and is_gcc(os.environ["CC"]):
            # It takes the stack for aligned to 32 and 64 bytes, which that of Windows is not (its
            # bug 54412; Debian's and MSYS2's have a patch): moves of vectors must not insist on it.
            flags = [*flags, "-Wa,-muse-unaligned-vector-move"]
        layer = Path(source).parts[1]  # of csrc
        if layer == "python":  # no loops that have to be fast
            return [*flags, "-Os"]
        if layer == "kernels" and "clang" in version_of(shlex.join(self.compiler.compiler_so)):
            # What has to be inlined says so. 56 KB of the wheel and no time: docs/journal.md.
            flags = [*flags, "-mllvm", "-inline-threshold=50"]
        return flags if layer == "kernels" else [*flags, "-O2"]

    def check_compiler(self):
        """Stops in one sentence where there is no C compiler, or no headers for it."""
        name = self.compiler.compiler_so[0]
        folders = [f"-I{folder}" for folder in self.compiler.include_dirs]
        try:
            with TemporaryDirectory() as folder:
                source = Path(folder, "try.c")
                source.write_text("#include <Python.h>\n")
                command = [*self.compiler.compiler_so, *folders, "-c", str(source),
                           "-o", str(source.with_suffix(".o"))]
                tried = subprocess.run(command, text=True, errors="replace", capture_output=True)
        except OSError as error:
            sys.exit(f"mha: missing a C compiler: {name}: {error.strerror} (Debian: apt install "
                     "gcc libc6-dev; CC= names another one)")
        if tried.returncode == 0:
            return
        said = [line for line in tried.stderr.splitlines() if "error:" in line]
        said = (said or tried.stderr.splitlines() or ["without a word"])[0]
        if re.search(r"error: '?Python\.h", said):
            sys.exit(f"mha: missing Python.h for Python {platform.python_version()} in "
                     f"{sysconfig.get_path('include')} (Debian: apt install python3-dev)")
        sys.exit(f"mha: the C compiler {name} fails (Debian: apt install gcc libc6-dev): {said}")

    def wait_for(self, files):
        """Until all are compiled. Shows how far it is; pip, which hides that, turns its sign of
        life with each line."""
        done = ()
        while len(done) < len(files):
            done, _ = wait(files, timeout=5, return_when=FIRST_EXCEPTION)
            for file in done:
                file.result()  # raises what the compiler did
            self.announce(f"mha: {len(done)} of {len(files)} C files are compiled", logging.INFO)

    def build_extensions(self):
        self.check_compiler()
        compile_one, compile_all = self.compiler._compile, self.compiler.compile

        def compile_with_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            flags = [*extra_postargs, *self.flags_of(src)]
            command = shlex.join([*self.compiler.compiler_so, *cc_args, *pp_opts, *flags])
            if self.force or not is_compiled(Path(obj), Path(src), command):
                compile_one(obj, src, ext, cc_args, flags, pp_opts)
                Path(obj).with_suffix(".command").write_text(command)

        def compile_side_by_side(*args, **kwargs):
            started = []
            cores = ThreadPoolExecutor(os.cpu_count())
            try:
                self.compiler._compile = lambda *file: started.append(
                    cores.submit(compile_with_flags, *file))
                objects = compile_all(*args, **kwargs)
                self.wait_for(started)
            finally:
                cores.shutdown(cancel_futures=True)
            return objects

        self.compiler.compile = compile_side_by_side
        super().build_extensions()


def is_compiled(compiled, source, command):
    """Whether the object is there, by this command, and no older than its source and what that
    includes."""
    written = compiled.with_suffix(".command")
    if not compiled.exists() or not written.exists() or written.read_text() != command:
        return False
    changed = max(path.stat().st_mtime for path in (source, *included(source)))
    return compiled.stat().st_mtime > changed


@cache
def included(source):
    """What a file of csrc includes of csrc, and what these do; each path is from csrc or from
    csrc/include."""
    found = set()
    for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
        path = next((folder / name for folder in (Path("csrc"), Path("csrc/include"))
                     if (folder / name).exists()), None)
        if path is not None and path not in found:
            found |= {path, *included(path)}
    return frozenset(found)


class SdistOfSameBytes(sdist):
    """With SOURCE_DATE_EPOCH the archive says nothing of when, where and by whom it was made."""

    def make_archive(self, *args, **kwargs):
        archive = super().make_archive(*args, **kwargs)
        when = os.environ.get("SOURCE_DATE_EPOCH")
        if when and archive.endswith(".tar.gz"):
            write_again(Path(archive), int(when))
        return archive


def write_again(archive, when):
    """The same files in the order of their names, of one time and of no one."""
    again = archive.with_suffix(".new")
    with (tarfile.open(archive) as old, open(again, "wb") as file,
          GzipFile("", "wb", fileobj=file, mtime=when) as packed,
          tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = when, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member))
    again.replace(archive)


def compile_for_one_machine():
    """Pythons for macOS may compile for two processors at once, whose kernels are different files.
    Compiles for the one that ARCHFLAGS names, else for this machine's."""
    if sysconfig.get_platform().endswith("-universal2"):
        named = os.environ.get("ARCHFLAGS", "").split()
        machine = named[1] if len(named) == 2 else platform.machine()
        one = sysconfig.get_platform().replace("universal2", machine)
        os.environ.update(ARCHFLAGS=f"-arch {machine}", _PYTHON_HOST_PLATFORM=one)


def switched_flags():
    # GCC's library for Windows comes along, since users have none.
    compile_flags, link_flags = [], ["-static-libgcc" if ON_WINDOWS else "-pthread"]
    if os.environ.get("MHA_SANITIZE") == "1":
        # Python's flags may have -fwrapv, with which overflow of signed integers goes unseen.
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
                      "-fno-omit-frame-pointer", "-fno-wrapv", "-g1", "-O1"]
        compile_flags += sanitizers
        link_flags += sanitizers[:1]
    if os.environ.get("MHA_SANITIZE") == "thread":
        sanitizers = ["-fsanitize=thread", "-fno-omit-frame-pointer", "-g1", "-O1"]
        compile_flags += sanitizers
        link_flags += sanitizers[:1]
    if os.environ.get("MHA_COVERAGE") == "1":
        compile_flags += ["--coverage", "-O0"]
        link_flags += ["--coverage"]
    if os.environ.get("MHA_WERROR") == "1":
        compile_flags += ["-Werror"]
    return compile_flags, link_flags


check_versions()
BESIDE_NUMPY_1 = numpy.__version__.startswith("1.")
compile_for_one_machine()
compile_flags, link_flags = switched_flags()

setup(
    ext_modules=[
        Extension(
            "mha._core",
            sources=core_sources(),
            include_dirs=["csrc/include", "csrc", numpy.get_include()],
            libraries=[] if ON_WINDOWS else ["m"],  # sqrt and fmax
            depends=sorted(str(path) for pattern in ("*.h", "*.inc")
                           for path in Path("csrc").rglob(pattern)),
            # Whatever CFLAGS say: sums have an order, NaN and infinity a meaning.
            extra_compile_args=[*COMMON_FLAGS, *compile_flags, "-fno-fast-math"],
            extra_link_args=[*link_flags, "-fno-fast-math"],
        )
    ],
    cmdclass={"build": BuildExtensionFirst, "build_ext": BuildWithInstructionSets,
              "sdist": SdistOfSameBytes},
    # What is built beside NumPy 1 cannot be loaded beside NumPy 2, and lies where no build beside
    # NumPy 2 takes it for its own.
    install_requires=["numpy>=1.26,<2" if BESIDE_NUMPY_1 else "numpy>=1.26"],
    options={
        "build": {"build_base": "build/numpy1"} if BESIDE_NUMPY_1 else {},
        # A path, which type checkers and editors follow; by default it is a hook of imports.
        "editable_wheel": {"mode": "compat"},
    },
)
