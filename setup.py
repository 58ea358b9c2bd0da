"""Builds mha._core. Each kernel file gets the compiler flags of its own instruction set.

Switches, as environment variables:
  MHA_SANITIZE=1   address and undefined-behaviour sanitizers (run with ASan preloaded);
                   =thread: the thread sanitizer (with TSan preloaded, or a Python built with it)
  MHA_COVERAGE=1   gcov counters
  MHA_WERROR=1     warnings are errors
"""

import os
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# -g0: Python's own flags ask for debug information, which would triple the wheel. Nothing is thrown
# through C: tables for it would be 20 KB more.
COMMON_FLAGS = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off",
                "-fno-math-errno", "-fno-asynchronous-unwind-tables",
                "-Wall", "-Wextra", "-Wshadow", "-Wvla"]


def instruction_sets():
    """name -> compiler flags of the kernel sets of the machine that the wheel is for, which may be
    another than this one: csrc/instruction_sets.txt."""
    machine = sysconfig.get_platform().rsplit("-", 1)[-1]
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
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
    """Every C file, but for the kernels of other machines."""
    wanted = {None, *instruction_sets()}
    return sorted(str(path) for path in Path("csrc").rglob("*.c")
                  if instruction_set_of(path) in wanted)


class BuildWithInstructionSets(build_ext):
    """Adds the flags of its instruction set to each kernel file, and compiles on all cores."""

    def build_extensions(self):
        compile_one, compile_all = self.compiler._compile, self.compiler.compile

        def compile_with_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            flags = instruction_sets().get(instruction_set_of(src), [])
            if "csrc/python" in src:  # no loops that have to be fast
                flags = [*flags, "-Os"]
            elif "kernels" not in src:
                flags = [*flags, "-O2"]
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *flags], pp_opts)

        def compile_side_by_side(*args, **kwargs):
            started = []
            with ThreadPoolExecutor(os.cpu_count()) as cores:
                self.compiler._compile = lambda *file: started.append(
                    cores.submit(compile_with_flags, *file))
                objects = compile_all(*args, **kwargs)
            for file in started:
                file.result()  # raises what the compiler did
            return objects

        self.compiler.compile = compile_side_by_side
        super().build_extensions()


def compile_for_one_machine():
    """Pythons for macOS may compile for two processors at once, whose kernels are different files.
    Compiles for the one that ARCHFLAGS names, else for this machine's."""
    if sysconfig.get_platform().endswith("-universal2"):
        named = os.environ.get("ARCHFLAGS", "").split()
        machine = named[1] if len(named) == 2 else platform.machine()
        one = sysconfig.get_platform().replace("universal2", machine)
        os.environ.update(ARCHFLAGS=f"-arch {machine}", _PYTHON_HOST_PLATFORM=one)


def switched_flags():
    compile_flags, link_flags = [], []
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


compile_for_one_machine()
compile_flags, link_flags = switched_flags()
if sys.platform == "win32":
    sys.exit("mha needs a POSIX system (Linux or macOS): its thread pool is written for pthreads")

setup(
    ext_modules=[
        Extension(
            "mha._core",
            sources=core_sources(),
            include_dirs=["csrc/include", numpy.get_include()],
            depends=sorted(str(path) for pattern in ("*.h", "*.inc")
                           for path in Path("csrc").rglob(pattern)),
            extra_compile_args=COMMON_FLAGS + compile_flags,
            extra_link_args=["-pthread", *link_flags],
        )
    ],
    cmdclass={"build_ext": BuildWithInstructionSets},
)
