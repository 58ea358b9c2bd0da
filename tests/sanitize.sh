#!/usr/bin/env bash
# Address and undefined-behaviour sanitizers: the C tests, then the Python suite on an extension
# that is built with them. Run by `make sanitize`.
set -euo pipefail
cd "$(dirname "$0")/.."

make --no-print-directory --jobs "$(getconf _NPROCESSORS_ONLN)" -C tests/c SANITIZE=1

build=.venv-sanitize
mkdir -p "$build"
MHA_SANITIZE=1 .venv/bin/python setup.py --quiet build_ext --build-temp "$build/objects" \
    --build-lib "$build/lib"
cp -r mha/. "$build/lib/mha.new"
rm -f "$build"/lib/mha.new/_core*.so
cp "$build"/lib/mha/_core*.so "$build/lib/mha.new/"
rm -rf "$build/lib/mha"
mv "$build/lib/mha.new" "$build/lib/mha"

# Python itself is not built with the sanitizer, so its runtime is loaded first; leaks of the
# interpreter are not ours. The left-out tests measure memory, which the sanitizer multiplies, or
# start processes of their own.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH="$build/lib" PYTHONSAFEPATH=1 # not the mha of this folder
.venv/bin/python -c 'import mha; assert "sanitize" in mha.__file__, mha.__file__'
.venv/bin/python -m pytest -n auto --ignore tests/test_examples.py --ignore tests/test_memory.py \
    --ignore tests/test_threads.py --ignore tests/test_main.py --ignore tests/test_plot.py \
    --ignore tests/test_diagnose.py --timeout 900 "$@"
