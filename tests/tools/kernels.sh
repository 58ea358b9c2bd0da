#!/usr/bin/env bash
# The Python suite on every kernel set of ours, and the comparisons with peers on every kernel set
# of theirs: no outcome may depend on the machine. Run by `make test-kernels`; arguments go to
# pytest where our kernels alone are meant. With `below` (`make test-below`): the C tests and the
# quick Python suite alone, as on a machine of the level below this one's.
set -euo pipefail
cd "$(dirname "$0")/../.."
failed=0

run() { # VARIABLE=VALUE ... COMMAND ARGUMENT ...
    local settings=()
    while [[ $1 == *=* ]]; do settings+=("$1"); shift; done
    echo "kernels: ${settings[*]}"
    if ! env "${settings[@]}" "$@"; then
        echo "kernels: ${settings[*]} FAILED"
        failed=1
    fi
}

# The names of a machine of SSE, of AVX2 and of AVX-512, ours and the peers'; a set that this
# machine lacks would be an illegal instruction.
levels=(1)
if grep -qsw avx2 /proc/cpuinfo; then levels+=(2); fi
if grep -qsw avx512dq /proc/cpuinfo; then levels+=(3); fi
ours=(- baseline avx2 avx512)
pytorch=(- default avx2 avx512) mkl=(- SSE4_2 AVX2 AVX512) openblas=(- Nehalem Haswell SkylakeX)

# The settings of a level, ours and the peers'. Plain NumPy, which computes with OpenBLAS, is what
# the gates of accuracy compare with.
settings_of() {
    echo "MHA_ISA=${ours[$1]} OPENBLAS_CORETYPE=${openblas[$1]}" \
        "ATEN_CPU_CAPABILITY=${pytorch[$1]} MKL_ENABLE_INSTRUCTIONS=${mkl[$1]}"
}

if [ "${1:-}" = below ]; then
    below=$((${#levels[@]} > 1 ? ${#levels[@]} - 1 : 1))
    # shellcheck disable=SC2046
    run $(settings_of $below) make --no-print-directory -C tests/c
    # shellcheck disable=SC2046
    run $(settings_of $below) .venv/bin/python -m pytest -q -n auto @tests/quick.txt
    [ $failed = 0 ] && echo "kernels: passed"
    exit $failed
fi

# Ours and the peers as they are on a machine of each level.
for level in "${levels[@]}"; do
    # shellcheck disable=SC2046
    run $(settings_of "$level") .venv/bin/python -m pytest -q -n auto --all "$@"
    # shellcheck disable=SC2046
    run $(settings_of "$level") PYTHONSAFEPATH=1 \
        .venv-peers/bin/python -m pytest -q -n auto --all tests/peers
done
# The sets that are no level's, such as amx.
for set in $(.venv/bin/python -c 'from mha import _core; print(*_core.instruction_sets())'); do
    [[ " ${ours[*]} " == *" $set "* ]] || run MHA_ISA="$set" .venv/bin/python -m pytest -q -n auto --all "$@"
done
[ $failed = 0 ] && echo "kernels: passed"
