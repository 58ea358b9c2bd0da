#!/usr/bin/env bash
# The sdist of HEAD: has the same bytes whoever makes it, holds every file of the project, builds
# and installs where there is no network, and some tests pass from it. Run by `make test-sdist`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_sdist() { # FOLDER UMASK
    umask "$2"
    git clone --quiet --no-local . "$work/$1"
    cd "$work/$1"
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) \
        "$python" -c 'from setuptools import build_meta; build_meta.build_sdist(".")'
}
for how in "clone 022" "other 077"; do
    # shellcheck disable=SC2086
    (make_sdist $how) >"$work/log" 2>&1 || { tail -20 "$work/log"; exit 1; }
done
cmp "$work"/clone/mha-*.tar.gz "$work"/other/mha-*.tar.gz || { echo "sdist: not the same bytes again"; exit 1; }

mkdir "$work/mha"
tar --extract --strip-components 1 --directory "$work/mha" --file "$work"/clone/mha-*.tar.gz
missing=$(git ls-files | while read -r file; do [ -e "$work/mha/$file" ] || echo "$file"; done)
[ -z "$missing" ] || { printf 'sdist: missing, see MANIFEST.in:\n%s\n' "$missing"; exit 1; }

cd "$work/mha"
unshare --map-root-user --net "$python" - <<'END'
import socket, sys
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError:
    sys.exit(0)
sys.exit("sdist: there is a network")
END
unshare --map-root-user --net "$python" -m pip install --quiet --disable-pip-version-check \
    --no-build-isolation --no-index --no-deps --target "$work/site" .
export PYTHONPATH=$work/site:$work/mha/tests/helpers PYTHONSAFEPATH=1
"$python" -c 'import sys, mha; sys.exit(not mha.__file__.startswith(sys.argv[1]))' "$work/site"
unshare --map-root-user --net "$python" -m pytest -q tests/functions/test_linear_projection.py \
    tests/functions/test_multi_head_attention.py tests/package/test_wheels.py tests/package/test_layering.py
echo "sdist: passed, $(wc -c <"$work"/clone/mha-*.tar.gz | sed ':a;s/\B[0-9]\{3\}\>/,&/;ta') bytes"
