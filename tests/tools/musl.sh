#!/usr/bin/env bash
# A wheel for musl, run: Debian has musl's loader, but no Python for it, so that one is compiled
# here from Debian's source by the clang of ziglang (some minutes, once, in .musl); NumPy and what
# tests need are the wheels for musl. Then the quick part of the suite. After `make wheels`; needs
# x86-64.
#   tests/tools/musl.sh WHEEL [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/debian.sh
wheel=$1
shift
[ $# -gt 0 ] || set -- @tests/quick.txt
bin=$PWD/.venv-wheels/bin
version=$("$bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
here=$PWD/.musl/$version
python=$here/python/bin/python$version
loader=$here/musl/usr/lib/x86_64-linux-musl/libc.so

cannot() { echo "musl: cannot run here: $1"; exit 75; }
[ "$(uname -m)" = x86_64 ] || cannot "it needs x86-64"
case $version in 3.11) release=bookworm ;; 3.13) release=trixie ;;
*) cannot "no Debian has the source of Python $version" ;; esac

# The musl of bookworm, 1.2.3, cannot load what NumPy's wheel brings; that of zig is 1.2.5, too.
fetch_loader() {
    apt_of_release "$here/packages" trixie deb download musl
    dpkg-deb --extract "$here"/packages/musl_*.deb "$here/musl"
}

# Of this machine's libraries, which are glibc's, pkg-config would find zlib: it is compiled, too.
# Extensions are looked for by the names that musl's wheels give them.
build_python() {
    export CC="$bin/python -m ziglang cc -target x86_64-linux-musl -dynamic" PKG_CONFIG=false
    local cores zlib=$here/debian/zlib
    cores=$(getconf _NPROCESSORS_ONLN)
    fetch_source "$here/debian" "$release" zlib
    (cd "$zlib" && CFLAGS="-O2 -fPIC" ./configure --static && make --silent --jobs "$cores" libz.a)
    fetch_source "$here/debian" "$release" "python$version"
    mkdir -p "$here/build"
    cd "$here/build"
    "../debian/python$version/configure" --quiet --without-ensurepip --disable-test-modules \
        --prefix="$here/python" CFLAGS="-O1 -Wno-date-time" LDFLAGS="-Wl,--dynamic-linker=$loader" \
        ZLIB_CFLAGS="-I$zlib" ZLIB_LIBS="$zlib/libz.a"
    sed -i 's/x86_64-linux-gnu/x86_64-linux-musl/g' Makefile
    make --silent --jobs "$cores"
    make --silent install
    "$python" -c 'import zlib, binascii' && touch "$here/ready"
}

install_packages() {
    rm -rf "$here/site"
    "$bin/python" -m pip install --quiet --disable-pip-version-check --target "$here/site" \
        --only-binary=:all: --implementation cp --python-version "$version" \
        --abi "cp${version/./}" --abi abi3 --abi none \
        --platform musllinux_1_2_x86_64 --platform musllinux_1_1_x86_64 --platform any \
        numpy 'pytest>=8.2' 'pytest-timeout>=2.3' 'hypothesis>=6.100' "$wheel"
}

mkdir -p "$here"
[ -e "$loader" ] || fetch_loader
if [ ! -e "$here/ready" ]; then
    logged "$here/build.log" build_python
fi
install_packages
export PYTHONPATH="$here/site:$PWD/tests/helpers" PYTHONSAFEPATH=1
"$python" -c 'import mha, sys; print("musl:", sys.version, mha.__file__, mha.instruction_set())'
"$python" -m pytest -q "$@"
echo "musl: passed"
