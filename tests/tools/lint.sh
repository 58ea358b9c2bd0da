#!/usr/bin/env bash
# Style and types, Python and C. Run by `make lint`.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=.venv/bin

$bin/ruff check .
# Lines of prose, where no formatter looks: tables and pictures are wider, and pages that
# benchmarks write.
wide=$({ git ls-files '*.md' ':!benchmarks' | LC_ALL=C.UTF-8 xargs grep -HnP '^(?! *\||\[?!\[).{101}'
    git ls-files '*.sh' '*.mk' '*Makefile' .ci csrc/instruction_sets.txt |
    LC_ALL=C.UTF-8 xargs grep -HnP '^(?= *#).{101}'; } | cut -c 1-100 || true) # grep finds none
if [ -n "$wide" ]; then
    echo "$wide"
    echo "lint: lines wider than 100 columns"
    exit 1
fi
$bin/mypy
# What users write, under mypy and under pyright's strict rules, in a folder where mha is not: they
# find it as `pip install --editable` left it.
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
cp tests/helpers/typed_program.py "$objects/"
(cd "$objects" && "$OLDPWD/$bin/mypy" --strict --python-executable "$OLDPWD/$bin/python" typed_program.py &&
    "$OLDPWD/$bin/basedpyright" --level error --pythonpath "$OLDPWD/$bin/python" typed_program.py)
# The other modules are their own stubs, whose functions show their signatures without **unknown.
$bin/python -m mypy.stubtest --mypy-config-file pyproject.toml mha._core
git ls-files 'csrc/*.c' 'csrc/*.h' 'csrc/*.inc' 'tests/c/*.c' 'tests/c/*.h' \
    'benchmarks/*.c' 'benchmarks/*.h' |
    xargs $bin/clang-format --dry-run -Werror

# Warnings are errors: the extension from scratch. Those for other systems are compiled by their
# own tests.
MHA_WERROR=1 $bin/python setup.py --quiet build_ext --build-temp "$objects" --build-lib "$objects"
core=$(find "$objects" -name '_core*.so')
# Beside it, the wheel has 520 kB of Python. Growth by accident is to be seen. This is gcc's code;
# wheels are built by clang, whose code is smaller, and tests/tools/check_wheels.py has their limit.
packed=$(gzip --stdout "$core" | wc -c)
if [ "$packed" -gt 968000 ]; then
    echo "lint: the extension takes $packed bytes of the wheel, wanted less than 968,000"
    exit 1
fi
# No hot loop may keep its sums on the stack; the benchmark of the kernels has to build, too.
if [ "$(uname -m)" = x86_64 ]; then
    find "$objects" -name 'kernels_float*_avx*.o' -exec $bin/python benchmarks/spills.py {} + >"$objects/spills"
fi
make --quiet -C benchmarks/machine

# Systems other than Linux take the other branches; make test-windows compiles those of Windows.
for file in $(ls csrc/threads/*.c csrc/core/*/*.c | grep -v _windows); do
    gcc -std=c11 -fsyntax-only -U__linux__ -Wall -Wextra -Wshadow -Wvla -Werror -Icsrc/include -Icsrc "$file"
done

# The public headers are for C++ programs, too.
if command -v g++ >/dev/null; then
    echo '#include "mha/mha.h"' |
        g++ -std=c++17 -x c++ -fsyntax-only -Wall -Wextra -Werror -Icsrc/include -
fi

echo "lint: passed"
