#!/usr/bin/env bash
# mha for Windows, run by `make test-windows`: the C tests under Wine, and the extension as setup.py
# compiles it there with GCC. No Python of Windows runs here: what the extension needs of others and
# what it shows them is looked at.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/debian.sh
here=$PWD/build/windows-extension
objdump=x86_64-w64-mingw32-objdump
mkdir -p "$here"

# Wine's folder has a link to the root of all files, so it lies where no tool of ours looks for any.
WINEPREFIX=$(mktemp -d)
export WINEPREFIX
trap 'rm -rf --one-file-system "$WINEPREFIX" || true' EXIT
make --no-print-directory --jobs "$(getconf _NPROCESSORS_ONLN)" -C tests/c WINDOWS=1

# The headers of Python and NumPy for Windows; all that matters of a wheel for another system.
fetch_headers() {
    fetch_source "$here" bookworm python3.11
    .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$here" \
        --only-binary=:all: --platform win_amd64 --python-version 3.11 --abi cp311 numpy
    .venv/bin/python - "$here"/numpy-*.whl "$here" <<'END'
import sys
from zipfile import ZipFile
wheel = ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if "/_core/include/" in name])
END
}

if [ ! -d "$here/numpy" ]; then
    fetch_headers >"$here/headers.log" 2>&1 || { tail -20 "$here/headers.log"; exit 1; }
fi
compiler="x86_64-w64-mingw32-gcc -I$here/python3.11/Include -I$here/python3.11/PC -I$here/numpy/_core/include"

# What python311.dll has is what Python.h imports.
echo '#include <Python.h>' | $compiler -DPY_SSIZE_T_CLEAN -x c -E - | .venv/bin/python -c '
import re, sys
print("LIBRARY python311.dll\nEXPORTS")
for name, after in re.findall(r"dllimport\)\)[^;(]*?\b(_?Py\w+)\s*([(\[;])", sys.stdin.read()):
    print(name, "" if after == "(" else "DATA")' >"$here/python311.def"
x86_64-w64-mingw32-dlltool --input-def "$here/python311.def" --output-lib "$here/libpython311.a"

CC=$compiler _PYTHON_HOST_PLATFORM=win-amd64 SETUPTOOLS_EXT_SUFFIX=.cp311-win_amd64.pyd MHA_WERROR=1 \
    .venv/bin/python setup.py --quiet build_ext --library-dirs "$here" --libraries python311 \
    --build-temp "$here/objects" --build-lib "$here/lib"
extension=$here/lib/mha/_core.cp311-win_amd64.pyd

expect() { # WHAT WANTED GOT
    if [ "$2" != "$3" ]; then
        echo "windows: $1: got $3, wanted $2"
        exit 1
    fi
}
expect "libraries it needs" "kernel32.dll msvcrt.dll python311.dll" \
    "$($objdump --private-headers "$extension" | sed -n 's/.*DLL Name: //p' | tr A-Z a-z | sort | xargs)"
expect "names it shows" "PyInit__core mha_extension_get_num_threads mha_extension_set_num_threads" \
    "$($objdump --private-headers "$extension" |
        awk '/Name Pointer. Table/ {inside = 1; next} NF == 0 {inside = 0} inside {print $NF}' | xargs)"
# An address on the stack is a multiple of 16 there, whatever GCC thinks (its bug 54412).
expect "vector moves that insist on aligned memory" 0 \
    "$($objdump --disassemble "$extension" | grep -cE '\svmov(ap[sd]|dqa(32|64)?)\s.*\(' || true)"
echo "windows: $(basename "$extension") has $(wc -c <"$extension") bytes"
echo "windows: passed"
