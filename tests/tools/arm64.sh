#!/usr/bin/env bash
# The Python suite on AArch64, in an emulator: a Debian for that machine in .arm64, its Python,
# wheels of what the tests need, and the commit's mha compiled for it by a compiler that runs here.
# Some hours. What each test gave stays in .arm64, so that a run that was stopped goes on with the
# others, of the commit that it began with: `rm -r .arm64/*/suite` begins anew. Run by `make
# test-arm64`; needs root; exits with 75 where it cannot run.
#   tests/tools/arm64.sh [FILE ...]          without any: all of them
#   ARM64_WHEEL=file                   this wheel instead of what gcc compiles
#   ARM64_RELEASE=bookworm ARM64_JOBS=2
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/debian.sh
release=${ARM64_RELEASE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-}")}
here=$PWD/.arm64/$release
root=$here/debian
run=$here/$([ -z "${ARM64_WHEEL:-}" ] && echo suite || echo wheel)
results=$run/results
python=$PWD/.venv/bin/python

cannot() { echo "arm64: cannot run here: $1"; exit 75; }

# No script of a package has to run for Python to: packages are only unpacked.
make_system() {
    mkdir -p "$here"
    # shellcheck disable=SC2046
    debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,python3-dev,binutils \
        "$release" "$root" $(mirror) >"$here/debootstrap.log" 2>&1 ||
        { tail -5 "$here/debootstrap.log"; return 1; }
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar --extract --keep-directory-symlink --directory "$root"
        rm "$package"
    done
    rm -f "$root/proc"
    mkdir -p "$root"/{proc,dev,tmp,project}
    touch "$root/ready"
}

install_packages() { # into $site, what runs on Python $1
    local platforms=(--platform any) pip glibc
    for glibc in 2_28 2_27 2_26 2_24 2_17; do
        platforms+=(--platform "manylinux_${glibc}_aarch64")
    done
    pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$site"
        --only-binary=:all: --implementation cp --python-version "$1"
        --abi "cp${1/./}" --abi abi3 --abi none "${platforms[@]}")
    mapfile -t wanted < <(.venv/bin/python -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"], sep="\n")')
    "${pip[@]}" numpy "${wanted[@]}"
    "${pip[@]}" --upgrade --no-deps -r examples/requirements.txt
    touch "$site/ready"
}

# The headers of Debian's own Python come before those of the one that runs setup.py.
build_extension() { # into $1, for Python $2
    local headers="-I$root/usr/include/python$2 -idirafter $root/usr/include"
    (cd "$run/source" && CC=aarch64-linux-gnu-gcc LDSHARED="aarch64-linux-gnu-gcc -shared" \
        CFLAGS="-I$site/numpy/_core/include $headers" _PYTHON_HOST_PLATFORM=linux-aarch64 \
        SETUPTOOLS_EXT_SUFFIX=".cpython-${2/./}-aarch64-linux-gnu.so" \
        "$python" setup.py --quiet build_ext --build-temp "$run/objects" --build-lib "$1")
    cp -r "$run/source/mha/." "$1/mha"
}

prepare() {
    [ -e "$root/ready" ] || { rm -rf --one-file-system "$root"; make_system || exit 75; }
    local version
    version=$(basename "$(readlink "$root/usr/bin/python3")")
    version=${version#python}
    site=$here/site
    [ -e "$site/ready" ] || { rm -rf "$site"; install_packages "$version"; }
    [ -z "${ARM64_WHEEL:-}" ] || cmp --silent "$ARM64_WHEEL" "$run/wheel" || rm -rf "$run"
    if [ ! -e "$run/ready" ]; then
        rm -rf "$run"
        git clone --quiet --no-local . "$run/source"
        if [ -n "${ARM64_WHEEL:-}" ]; then
            python3 -m zipfile --extract "$ARM64_WHEEL" "$run/lib"
            cp "$ARM64_WHEEL" "$run/wheel"
        else
            build_extension "$run/lib" "$version"
        fi
        mkdir -p "$results"
        touch "$run/ready"
    fi
    echo "arm64: commit $(git -C "$run/source" rev-parse --short HEAD), of $(git rev-parse --short HEAD) here"
}

# Programs for AArch64 are started by the emulator, in this namespace alone: Linux 6.7 has that for
# each namespace of users; where the machine knows the emulator already, nothing is to do. The first
# eighteen bytes say "a 64-bit little-endian program or library for AArch64".
register_emulator() {
    local formats=/proc/sys/fs/binfmt_misc zeros='\x00\x00\x00\x00\x00\x00\x00\x00'
    [ ! -e "$formats/qemu-aarch64" ] || return 0
    mount -t binfmt_misc none "$formats" || return 1
    printf '%s' ":qemu-aarch64:M::\\x7fELF\\x02\\x01\\x01\\x00$zeros\\x02\\x00\\xb7\\x00:" \
        '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:' \
        "$(command -v qemu-aarch64-static qemu-aarch64 | sed 1q):F" >"$formats/register"
}

inside() {
    chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 PYTHONSAFEPATH=1 \
        PYTHONPATH=/project/lib:/project/site:/project/source/tests/helpers:/project/source/examples \
        bash -c "cd /project/source && $1" </dev/null
}

# Each test's outcome is a line of $results/<file>.jsonl when it has ended
# (tests/helpers/resume.py), and those that have one are not run again. BLAS has one thread: those
# of two would wait for each other in loops, which the emulator makes long.
run_shard() {
    local name status=0
    name=$(basename "$1" .py)
    rm -f "$results/$name.status"
    inside "OPENBLAS_NUM_THREADS=1 SLOWER=20 RESUME_FILE=/project/results/$name.jsonl python3 -m pytest -q --all -p resume -o timeout=0 $1" \
        >>"$results/$name.log" 2>&1 || status=$?
    echo "$name $status: $(tail -1 "$results/$name.log")" | tee "$results/$name.status"
    [ "$status" = 0 ]
}

run_suite() {
    register_emulator || cannot "this system lets nobody register an emulator (Debian: apt install binfmt-support)"
    mkdir -p "$root"/project/{lib,site,source,results}
    mount --rbind /proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --bind "$run/lib" "$root/project/lib"
    mount --bind "$here/site" "$root/project/site"
    mount --bind "$run/source" "$root/project/source"
    mount --bind "$results" "$root/project/results"
    echo "arm64: $(inside '. /etc/os-release && echo "$PRETTY_NAME, $(uname -m), $(python3 --version)"')," \
        "$(inside 'python3 -c "import mha; print(mha.instruction_set(), mha.__file__)"')"
    export -f run_shard inside
    export root results
    local failed=0
    printf '%s\n' "$@" | xargs -P "${ARM64_JOBS:-2}" -I{} bash -c 'run_shard {}' || failed=1
    python3 - "$results"/*.jsonl <<'END'
import json, pathlib, sys
passed, failed, seconds = 0, [], 0
for path in map(pathlib.Path, sys.argv[1:]):
    tests = {test[0]: test for test in map(json.loads, path.read_text().splitlines())}.values()
    print(f"| {path.stem} | {len(tests)} | {sum(test[2] for test in tests):.0f} |")
    status = path.with_suffix(".status")
    said = status.read_text().split(":")[0].split()[1] if status.exists() else "nothing: was it stopped?"
    failed += [f"{path.stem}: pytest ended with {said}"] * (said != "0")
    passed += sum(test[1] == "passed" for test in tests)
    failed += [f"{name}: {outcome}" for name, outcome, _ in tests if outcome != "passed"]
    seconds += sum(test[2] for test in tests)
print(f"arm64: {passed} tests passed in {seconds / 60:.0f} minutes of one processor", *failed, sep="\narm64: ")
END
    return "$failed"
}

if [ -n "${ARM64_NAMESPACE:-}" ]; then # see below
    run_suite "$@"
    exit
fi

[ "$(id -u)" = 0 ] || cannot "it needs root"
for program in debootstrap aarch64-linux-gnu-gcc; do
    command -v "$program" >/dev/null || cannot "$program is missing (Debian: apt install debootstrap gcc-aarch64-linux-gnu libc6-dev-arm64-cross)"
done
command -v qemu-aarch64-static qemu-aarch64 >/dev/null || cannot "qemu-aarch64 is missing (Debian: apt install qemu-user-static)"
unshare --user --map-root-user --mount true 2>/dev/null || cannot "this root may make no namespaces"
prepare
# Longest first, as far as the files' sizes tell.
# shellcheck disable=SC2046
[ $# -gt 0 ] || set -- $(ls -S tests/{functions,layer,compat,dask,testing,plot,parameters,package,examples}/test_*.py)
ARM64_NAMESPACE=1 unshare --user --map-root-user --mount --propagation private \
    tests/tools/arm64.sh "$@"
