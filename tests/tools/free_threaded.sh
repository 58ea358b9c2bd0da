#!/usr/bin/env bash
# Python without GIL: the suite on it, and eight threads at once under the thread sanitizer. Run by
# `make test-free-threaded`. FREE_THREADED_PYTHON names the interpreter; without it one is built
# from Debian's source package in .free-threaded/python (some minutes, once). The sanitizer watches
# the extension, and what it calls of the C library; not Python and NumPy among themselves.
#   free_threaded.sh [SECONDS of the eight threads] [pytest's arguments for the suite]
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/debian.sh
seconds=${1:-60}
shift $(($# > 0))
here=$PWD/.free-threaded
mkdir -p "$here"

# Without pip and its libraries: packages are put beside it by the pip of .venv.
build_python() {
    fetch_source "$here/debian" trixie python3.13
    mkdir -p "$here/build"
    cd "$here/build"
    ../debian/python3.13/configure --quiet --disable-gil --without-ensurepip --disable-test-modules \
        --prefix="$here/python"
    make --silent --jobs "$(getconf _NPROCESSORS_ONLN)"
    make --silent install
}

python=${FREE_THREADED_PYTHON:-$here/python/bin/python3.13t}
if [ ! -x "$python" ]; then
    logged "$here/build.log" build_python
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
abi=cp${version/./}t
site=$here/site-$abi
platforms=()
for glibc in 2_28 2_27 2_17; do
    platforms+=(--platform "manylinux_${glibc}_$(uname -m)")
done
# Later versions of hypothesis have an extension that pip takes, but that needs a Python with GIL.
if [ ! -d "$site/numpy" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$site" \
        --only-binary=:all: --implementation cp --python-version "$version" --abi "$abi" --abi none \
        "${platforms[@]}" --platform any numpy 'setuptools>=77' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100,<6.156' matplotlib tqdm ml_dtypes
fi
# gguf, which quantised numbers are compared with, reads YAML: of that there is no wheel, but it
# runs without its extension.
if [ ! -d "$site/gguf" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$site" --no-deps \
        --no-binary pyyaml pyyaml gguf
fi

# The extension twice: sanitized for the threads, plain for the suite.
build_extension() { # into folder $1, with MHA_SANITIZE=$2
    MHA_SANITIZE=$2 PYTHONPATH="$site" "$python" setup.py --quiet build_ext \
        --build-temp "$1/objects" --build-lib "$1/lib"
    cp -r mha/. "$1/lib/mha"
    find "$1/lib/mha" -name '_core*.so' -not -name "_core.cpython-${version/./}t-*" -delete
}
build_extension "$here/sanitized-$abi" thread
build_extension "$here/plain-$abi" ""

# The sanitizer wants its addresses where they are without randomisation.
PYTHONPATH="$here/sanitized-$abi/lib:$site" PYTHONSAFEPATH=1 \
    TSAN_OPTIONS="exitcode=66:ignore_noninstrumented_modules=1:report_signal_unsafe=0" \
    setarch -R env LD_PRELOAD="$(gcc -print-file-name=libtsan.so)" \
    "$python" tests/tools/free_threaded.py "$seconds"

# With the tests, which a safe path leaves out where one of them starts another.
export PYTHONPATH="$here/plain-$abi/lib:$site:$PWD/tests/helpers" PYTHONSAFEPATH=1
"$python" -c 'import sys, mha; assert not sys._is_gil_enabled() and "free-threaded" in mha.__file__'
"$python" tests/tools/free_threaded.py "$seconds"
"$python" -m pytest -q "$@"
echo "free-threaded Python $version: passed"
