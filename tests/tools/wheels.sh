#!/usr/bin/env bash
# The sdist, and from it wheels for this Python on other systems, into wheelhouse/: compiled here by
# the clang of ziglang, which brings every system's C library, and checked as far as that can be
# without running them. Run by `make wheels`. Wheels that are published come from
# .github/workflows/release.yml.
#   tests/tools/wheels.sh [PLATFORM ...]    as wheels are named; without any: all of them
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv-wheels/bin
[ $# -gt 0 ] || set -- manylinux_2_28_{x86_64,aarch64} musllinux_1_2_{x86_64,aarch64} \
    macosx_11_0_arm64 macosx_10_13_x86_64
python_tag=cp$("$bin/python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ZIG_GLOBAL_CACHE_DIR=$work/zig PATH=$bin:$PATH

describe() { # PLATFORM: zig's name of it, Python's, and the end of an extension's name
    local machine=${1##*_}
    case $1 in
    manylinux_2_28_*) machine=${1#manylinux_2_28_}
        echo "$machine-linux-gnu.2.28 linux-$machine $machine-linux-gnu" ;;
    musllinux_1_2_*) machine=${1#musllinux_1_2_}
        echo "$machine-linux-musl linux-$machine $machine-linux-musl" ;;
    macosx_11_0_arm64) echo "aarch64-macos.11.0 macosx-11.0-arm64 darwin" ;;
    macosx_10_13_x86_64) echo "x86_64-macos.10.13 macosx-10.13-x86_64 darwin" ;;
    *) echo "wheels: no platform of ours: $1" >&2; return 1 ;;
    esac
}

# NumPy's headers differ from system to system; Python's are this Python's.
fetch_headers() { # PLATFORM
    local platforms=(--platform "$1")
    case $1 in manylinux_2_28_*) platforms+=(--platform "${1/28/27}" --platform "${1/28/17}") ;; esac
    python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        "${platforms[@]}" --dest "$work/$1" numpy
    python -m zipfile --extract "$work/$1"/numpy-*.whl "$work/$1"
}

# -s: no names but those that Python looks up. What Python itself has, macOS looks for when it
# loads.
build_wheel() { # PLATFORM
    local target host suffix compiler linker
    read -r target host suffix < <(describe "$1")
    compiler="$bin/python -m ziglang cc -target $target -s"
    linker="$compiler -shared"
    [ "$suffix" != darwin ] || linker+=" -Wl,-undefined,dynamic_lookup"
    rm -rf "$work/source/build"
    CC=$compiler LDSHARED=$linker CFLAGS="-I$work/$1/numpy/_core/include" MHA_WERROR=1 \
        _PYTHON_HOST_PLATFORM=$host SETUPTOOLS_EXT_SUFFIX=".cpython-${python_tag#cp}-$suffix.so" \
        python -m build --wheel --no-isolation --outdir "$work/$1" "$work/source" >"$work/log" 2>&1 ||
        { tail -20 "$work/log"; return 1; }
    python -m wheel tags --remove --platform-tag "$1" "$work/$1"/mha-*.whl >/dev/null
    case $1 in musllinux_*) name_musl "$work/$1" "${target%%-*}" ;; esac
    python tests/tools/pack_wheel.py "$work/$1"/mha-*.whl # zig's code is larger than GCC's
    case $1 in macosx_*) ;; *) # its objects are not ELF
        python tests/tools/wheel_contents.py "$work/$1"/mha-*.whl "$work"/source/build/temp*/csrc ;; esac
    mv "$work/$1"/mha-*.whl wheelhouse/
}

# Systems with musl call it by the machine, too; zig does not.
name_musl() { # FOLDER MACHINE
    python -m wheel unpack --dest "$1/unpacked" "$1"/mha-*.whl >/dev/null
    patchelf --replace-needed libc.so "libc.musl-$2.so.1" "$1"/unpacked/mha-*/mha/_core.*.so
    python -m wheel pack --dest-dir "$1" "$1"/unpacked/mha-* >/dev/null
}

rm -f wheelhouse/mha-*-"$python_tag"-*.whl wheelhouse/mha-*.tar.gz
python -m build --sdist --no-isolation --outdir wheelhouse . >"$work/log" 2>&1 || { tail -20 "$work/log"; exit 1; }
mkdir "$work/source"
tar --extract --strip-components 1 --directory "$work/source" --file wheelhouse/mha-*.tar.gz
for platform in "$@"; do
    describe "$platform" >/dev/null
    fetch_headers "$platform"
    build_wheel "$platform"
done

python -m twine check --strict wheelhouse/mha-*.tar.gz wheelhouse/mha-*-"$python_tag"-*.whl
# W004: the hook of PyInstaller has the name that PyInstaller asks for, which is no module's.
python -m check_wheel_contents --ignore W004 wheelhouse/mha-*-"$python_tag"-*.whl
python tests/tools/check_wheels.py wheelhouse/mha-*-"$python_tag"-*.whl
for wheel in wheelhouse/mha-*-"$python_tag"-*linux*.whl; do
    python -m auditwheel show --json "$wheel" >"$work/audit"
    python tests/tools/check_wheels.py --audit "$wheel" "$work/audit"
done

# Nothing but the kernel sets that are chosen needs more than the first processors of 64 bits with
# SSE4.2, which NumPy needs. Its OpenBLAS has to be told: on a machine of AMD's it takes the
# emulated processor for another one.
own=$(ls wheelhouse/mha-*-"$python_tag"-manylinux*_x86_64.whl 2>/dev/null || true)
emulator=$(command -v qemu-x86_64-static qemu-x86_64 | sed 1q || true)
if [ -n "$own" ] && [ -n "$emulator" ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
    python -m zipfile --extract "$own" "$work/own"
    PYTHONPATH=$work/own PYTHONSAFEPATH=1 OPENBLAS_CORETYPE=Nehalem "$emulator" -cpu Nehalem "$bin/python" -c "
import mha, numpy
x = numpy.ones((2, 40, 16), numpy.float32)
assert mha.instruction_set() == 'baseline' and (mha.scaled_dot_product_attention(x, x, x) == 1).all()"
    echo "$(basename "$own"): runs on an emulated Nehalem, without AVX"
fi

# What a release is made by can at least be read.
python -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
for system in linux macos windows; do
    python -m cibuildwheel --print-build-identifiers --platform "$system" . >"$work/identifiers"
    echo "cibuildwheel: $(wc -l <"$work/identifiers") wheels for $system"
done
echo "wheels: passed"
