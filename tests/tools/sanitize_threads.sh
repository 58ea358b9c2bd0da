#!/usr/bin/env bash
# The thread sanitizer: the pool's C tests, then the parts of the Python suite that use threads, on
# an extension that is built with it. Run by `make sanitize-threads`.
set -euo pipefail
cd "$(dirname "$0")/../.."
fixed=(setarch "$(uname -m)" --addr-no-randomize) # its shadow memory has fixed places

# A report ends the process; a child of a fork may start threads, as the pool does.
export TSAN_OPTIONS="halt_on_error=1 exitcode=66 ignore_noninstrumented_modules=1 \
report_signal_unsafe=0 die_after_fork=0"
make --no-print-directory --jobs "$(getconf _NPROCESSORS_ONLN)" -C tests/c SANITIZE=thread \
    EMULATOR="${fixed[*]}"

. tests/tools/build_apart.sh
build=.venv-sanitize/thread
build_apart "$build" MHA_SANITIZE=thread

# Python and NumPy are not built with it, so its runtime is loaded first.
export PYTHONPATH="$build/package" PYTHONSAFEPATH=1 OPENBLAS_NUM_THREADS=1 MHA_NUM_THREADS=4
preload=$(gcc -print-file-name=libtsan.so)
python() { "${fixed[@]}" env LD_PRELOAD="$preload" .venv/bin/python "$@"; }
python -c 'import mha; assert "thread" in mha.__file__, mha.__file__'
# It delays signals until a thread calls something of the C library, so interrupts are not tested.
python -m pytest -q --timeout 1800 -k "not ctrl_c and not fork_inside_a_call and not handler_that_forks" \
    tests/package/test_threads.py tests/layer/test_layer.py tests/functions/test_multi_head_attention_vjp.py "$@"
echo "sanitize-threads: passed"
