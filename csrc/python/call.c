#include "call.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "convert.h"

/* A workspace up to this size stays with its thread between calls. */
enum { KEPT_BYTES = 8 << 20 };

typedef struct kept_workspace {
    char *base;
    size_t size;
    bool in_use; /* a signal handler that runs inside a call may call us again */
} kept_workspace;

static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool key_works;

static void free_kept(void *memory) {
    kept_workspace *kept = memory;
    free(kept->base);
    free(kept);
}

static void create_key(void) { key_works = pthread_key_create(&key, free_kept) == 0; }

/* This thread's kept workspace, or NULL when there is none to be had. */
static kept_workspace *kept_of_thread(void) {
    pthread_once(&key_once, create_key);
    if (!key_works) {
        return NULL;
    }
    kept_workspace *kept = pthread_getspecific(key);
    if (kept == NULL) {
        kept = calloc(1, sizeof *kept);
        if (kept != NULL && pthread_setspecific(key, kept) != 0) {
            free(kept);
            kept = NULL;
        }
    }
    return kept;
}

static char *allocate_aligned(size_t bytes) {
    void *memory = NULL;
    if (bytes > SIZE_MAX / 2 || posix_memalign(&memory, MHA_WORKSPACE_ALIGNMENT, bytes) != 0) {
        return NULL;
    }
    return memory;
}

enum { NANOSECONDS_BETWEEN_POLLS = 20000000 };

/* Asks Python for signals at most every 20 ms, since that takes the GIL. */
static int poll_signals(void *context) {
    static _Thread_local int64_t last_poll;
    struct timespec now;
    (void)context;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t nanoseconds = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (nanoseconds - last_poll < NANOSECONDS_BETWEEN_POLLS) {
        return 0;
    }
    last_poll = nanoseconds;
    const PyGILState_STATE state = PyGILState_Ensure();
    const int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised;
}

int mha_call_begin(mha_execution *execution, size_t bytes, int num_threads) {
    const size_t needed = bytes < MHA_WORKSPACE_ALIGNMENT ? MHA_WORKSPACE_ALIGNMENT : bytes;
    kept_workspace *kept = needed <= KEPT_BYTES ? kept_of_thread() : NULL;
    mha_workspace workspace = {.size = needed};
    if (kept != NULL && !kept->in_use) {
        if (kept->size < needed) {
            free(kept->base);
            kept->base = allocate_aligned(needed);
            kept->size = kept->base == NULL ? 0 : needed;
        }
        workspace.base = kept->base;
        kept->in_use = kept->base != NULL;
    } else {
        workspace.base = allocate_aligned(needed);
    }
    if (workspace.base == NULL) {
        PyErr_Format(PyExc_MemoryError, "could not allocate a workspace of %zu bytes", needed);
        return -1;
    }
    execution->workspace = workspace;
    execution->num_threads = num_threads;
    execution->cancel.poll = poll_signals;
    execution->cancel.context = NULL;
    return 0;
}

void mha_call_end(mha_execution *execution) {
    kept_workspace *kept = key_works ? pthread_getspecific(key) : NULL;
    if (kept != NULL && kept->base == execution->workspace.base) {
        kept->in_use = false;
    } else {
        free(execution->workspace.base);
    }
    execution->workspace.base = NULL;
}

int mha_call_check(mha_status status) {
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
