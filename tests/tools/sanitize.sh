#!/usr/bin/env bash
# Address and undefined-behaviour sanitizers: the C tests, then the Python suite on an extension
# that is built with them. Run by `make sanitize`.
set -euo pipefail
cd "$(dirname "$0")/../.."

. tests/tools/build_apart.sh
build=.venv-sanitize
build_apart "$build" MHA_SANITIZE=1

# The C tests take the objects of the extension: sanitizers make the kernels slow to compile.
mkdir -p tests/c/build/sanitize
find "$build"/objects/csrc/{core,threads,kernels} -name "*.o" -exec cp -t tests/c/build/sanitize {} +
make --no-print-directory --jobs "$(getconf _NPROCESSORS_ONLN)" -C tests/c SANITIZE=address

# Python itself is not built with the sanitizer, so its runtime is loaded first; leaks of the
# interpreter are not ours. Left out are tests that look at rounding alone, that of the libraries
# linked, since the sanitizer takes the place of libc's functions, and what the arguments say: those
# that measure memory, which the sanitizer multiplies, or start processes of their own.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH="$build/package" PYTHONSAFEPATH=1 # not the mha of this folder
.venv/bin/python -c 'import mha; assert "sanitize" in mha.__file__, mha.__file__'
.venv/bin/python -m pytest -n auto --timeout 900 \
    -k "not accuracy_gate and not median_error and not same_bits_on_every and not every_library_in_use" "$@"
