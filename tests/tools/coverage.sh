#!/usr/bin/env bash
# Which lines of csrc and mha `make test` runs, beside all that the whole Python suite runs. Run by
# `make coverage`: half an hour, since C is compiled without optimisation. The C tests of `make
# test` are left out: they run some lines more. So is the test of what is writable: gcov's counters.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=$PWD/.venv-coverage
mkdir -p "$build"
MHA_COVERAGE=1 .venv/bin/python setup.py --quiet build_ext --build-temp "$build/objects" \
    --build-lib "$build/lib"
cp -r mha/. "$build/lib/mha.new"
rm -f "$build"/lib/mha.new/_core*.so
cp "$build"/lib/mha/_core*.so "$build/lib/mha.new/"
rm -rf "$build/lib/mha"
mv "$build/lib/mha.new" "$build/lib/mha"

run() { # NAME ARGUMENT ...: the suite, and what it ran, in files of that name
    local name=$1
    shift
    find "$build/objects" -name "*.gcda" -delete
    PYTHONPATH="$build/lib:$PWD/tests/helpers:$PWD/examples" PYTHONSAFEPATH=1 \
        COVERAGE_FILE="$build/$name.coverage" .venv/bin/python -m pytest -q -n auto --timeout 900 \
        --cov "$build/lib/mha" --cov-report= -k "not is_writable" "$@" ||
        echo "coverage: some tests failed"
    COVERAGE_FILE="$build/$name.coverage" .venv/bin/python -m coverage json -q -o "$build/$name.json"
    rm -rf "$build/$name.gcov"
    mkdir "$build/$name.gcov"
    (cd "$build/$name.gcov" && find "$build/objects" -name "*.gcda" -exec \
        gcov --json-format --preserve-paths {} + >/dev/null)
}

run quick
run all --all
.venv/bin/python tests/tools/coverage_share.py "$build"
