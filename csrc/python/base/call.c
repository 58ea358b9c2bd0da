#include "python/base/call.h"

#include <stdlib.h>

#include "python/base/system.h"

/* A workspace up to this size stays with its thread between calls. */
enum { MOST_CACHED_BYTES = 64 << 20 };

/* What is kept for a thread; not _Thread_local, whose memory comes at its first use, and the
 * program ends where there is none. */
typedef struct kept_for_thread {
    char *base;
    size_t size;
    bool in_use;       /* a signal handler that runs inside a call may call us again */
    int64_t last_poll; /* nanoseconds */
} kept_for_thread;

static void free_kept(void *memory) {
    kept_for_thread *kept = memory;
    mha_system_free(kept->base);
    free(kept);
}

int mha_start_calls(void) { return mha_system_start(free_kept); }

/* What is kept for this thread, or NULL when there is no memory for it. */
static kept_for_thread *kept_of_thread(void) {
    kept_for_thread *kept = mha_system_kept();
    if (kept == NULL) {
        kept = calloc(1, sizeof *kept);
        if (kept != NULL && !mha_system_keep(kept)) {
            free(kept);
            kept = NULL;
        }
    }
    return kept;
}

static char *allocate_aligned(size_t bytes) {
    return bytes > SIZE_MAX / 2 ? NULL : mha_system_allocate(bytes);
}

enum { NANOSECONDS_BETWEEN_POLLS = 20000000 };
typedef struct polling {
    PyThreadState *thread; /* which gave the GIL up */
    int64_t *last_poll;    /* of the thread */
} polling;

/* Asks Python for signals at most every 20 ms, since that takes the GIL. Only the main thread runs
 * Python's signal handlers. Another thread must not ask for the GIL in the middle of a job: while
 * Python shuts down that ends the thread, under the workers' feet. */
static int poll_signals(void *context) {
    polling *state = context;
    const int64_t nanoseconds = mha_system_coarse_nanoseconds();
    if (nanoseconds - *state->last_poll < NANOSECONDS_BETWEEN_POLLS) {
        return 0;
    }
    *state->last_poll = nanoseconds;
    if (!mha_system_is_main_thread()) {
        return 0;
    }
    PyEval_RestoreThread(state->thread);
    const int raised = PyErr_CheckSignals();
    state->thread = PyEval_SaveThread();
    return raised;
}

int mha_call_python(mha_execution *execution, int (*function)(void *context), void *context) {
    polling *state = execution->cancel.context;
    PyEval_RestoreThread(state->thread);
    const int failed = function(context);
    state->thread = PyEval_SaveThread();
    return failed;
}

/* Fills `execution` but for cancel; -1 with a MemoryError. Needs call_end after success. */
static int call_begin(mha_execution *execution, size_t bytes, int num_threads,
                      kept_for_thread *kept) {
    const size_t needed = bytes < MHA_WORKSPACE_ALIGNMENT ? MHA_WORKSPACE_ALIGNMENT : bytes;
    char *base;
    if (kept != NULL && needed <= MOST_CACHED_BYTES && !kept->in_use) {
        if (kept->size < needed) {
            mha_system_free(kept->base);
            kept->base = allocate_aligned(needed);
            kept->size = kept->base == NULL ? 0 : needed;
        }
        base = kept->base;
        kept->in_use = base != NULL;
    } else {
        base = allocate_aligned(needed);
    }
    if (base == NULL) {
        PyErr_Format(PyExc_MemoryError, "could not allocate a workspace of %zu bytes", needed);
        return -1;
    }
    mha_workspace_begin(&execution->workspace, base, needed);
    execution->num_threads = num_threads;
    return 0;
}

static void call_end(mha_execution *execution, kept_for_thread *kept) {
    char *base = execution->workspace.base;
    mha_workspace_end(&execution->workspace);
    if (kept != NULL && kept->base == base) {
        kept->in_use = false;
    } else {
        mha_system_free(base);
    }
}

/* 0 for MHA_OK, else -1 with the exception: MemoryError, or what a signal handler raised. */
static int call_check(mha_status status) {
    switch (status) {
    case MHA_OK:
        return 0;
    case MHA_CANCELLED:
        if (!PyErr_Occurred()) {
            PyErr_SetNone(PyExc_KeyboardInterrupt);
        }
        return -1;
    case MHA_OUT_OF_MEMORY:
    case MHA_SIZE_OVERFLOW:
        PyErr_Format(PyExc_MemoryError, "the arrays asked for: %s", mha_status_message(status));
        return -1;
    case MHA_INVALID_ARGUMENT:
        PyErr_SetString(PyExc_ValueError, mha_status_message(status));
        return -1;
    }
    PyErr_SetString(PyExc_SystemError, mha_status_message(status));
    return -1;
}

int mha_call_run(core_workspace *workspace, core_run *run, const void *problem, int num_threads) {
    mha_execution execution;
    kept_for_thread *kept = kept_of_thread();
    int64_t no_poll_yet = 0;
    size_t bytes = 0;
    if ((workspace != NULL && call_check(workspace(problem, num_threads, &bytes)) < 0) ||
        call_begin(&execution, bytes, num_threads, kept) < 0) {
        return -1;
    }
    polling state = {.last_poll = kept == NULL ? &no_poll_yet : &kept->last_poll};
    state.thread = PyEval_SaveThread();
    execution.cancel.poll = poll_signals;
    execution.cancel.context = &state;
    const mha_status status = run(problem, &execution);
    PyEval_RestoreThread(state.thread);
    call_end(&execution, kept);
    return call_check(status);
}
