#!/usr/bin/env bash
# Which lines of csrc and mha `make test` runs, beside all that the whole Python suite runs. Run by
# `make coverage`: half an hour, since C is compiled without optimisation. The C tests of `make
# test` are left out: they run some lines more. So is the test of what is writable: gcov's counters.
set -euo pipefail
cd "$(dirname "$0")/../.."

. tests/tools/build_apart.sh
build=$PWD/.venv-coverage
build_apart "$build" MHA_COVERAGE=1

run() { # NAME ARGUMENT ...: the suite, and what it ran, in files of that name
    local name=$1
    shift
    find "$build/objects" -name "*.gcda" -delete
    PYTHONPATH="$build/package:$PWD/tests/helpers:$PWD/examples" PYTHONSAFEPATH=1 \
        COVERAGE_FILE="$build/$name.coverage" .venv/bin/python -m pytest -q -n auto --timeout 900 \
        --cov "$build/package/mha" --cov-report= -k "not is_writable" "$@" ||
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
