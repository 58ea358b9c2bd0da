#!/usr/bin/env bash
# The Python suite on every kernel set of ours, and the comparisons with peers on every kernel set of
# theirs: no outcome may depend on the machine. Run by `make test-kernels`; arguments go to pytest
# where our kernels alone are meant.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0

run() { # VARIABLE=VALUE ... PYTHON ARGUMENT ...
    local settings=()
    while [[ $1 == *=* ]]; do settings+=("$1"); shift; done
    echo "kernels: ${settings[*]}"
    if ! env "${settings[@]}" "$@"; then
        echo "kernels: ${settings[*]} FAILED"
        failed=1
    fi
}

# The names of a machine of SSE, of AVX2 and of AVX-512, ours and the peers'; a set that this machine
# lacks would be an illegal instruction.
levels=(1)
if grep -qsw avx2 /proc/cpuinfo; then levels+=(2); fi
if grep -qsw avx512dq /proc/cpuinfo; then levels+=(3); fi
ours=(- baseline avx2 avx512)
pytorch=(- default avx2 avx512) mkl=(- SSE4_2 AVX2 AVX512) openblas=(- Nehalem Haswell SkylakeX)

for set in $(.venv/bin/python -c 'from mha import _core; print(*_core.instruction_sets())'); do
    run MHA_ISA="$set" .venv/bin/python -m pytest -q -n auto "$@"
done
for level in "${levels[@]}"; do
    # Plain NumPy is what the gates of accuracy compare with.
    run OPENBLAS_CORETYPE="${openblas[$level]}" .venv/bin/python -m pytest -q -n auto "$@"
    # The peers as they are on a machine of this level.
    run MHA_ISA="${ours[$level]}" OPENBLAS_CORETYPE="${openblas[$level]}" \
        ATEN_CPU_CAPABILITY="${pytorch[$level]}" MKL_ENABLE_INSTRUCTIONS="${mkl[$level]}" \
        PYTHONSAFEPATH=1 .venv-peers/bin/python -m pytest -q -n auto tests/peers
done
[ $failed = 0 ] && echo "kernels: passed"
