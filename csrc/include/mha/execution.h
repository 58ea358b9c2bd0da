/* How a call runs: threads, cancellation, workspace. */
#ifndef MHA_EXECUTION_H
#define MHA_EXECUTION_H

#include <stddef.h>

#include "mha/status.h"

/* Polled between the calling thread's own tasks; nonzero stops the call with MHA_CANCELLED. */
typedef struct mha_cancel {
    int (*poll)(void *context);
    void *context;
} mha_cancel;

/* An arena: the caller sizes it (mha_..._workspace) and owns `base`; the core only hands out
 * aligned pieces of it, in order, and never frees. */
typedef struct mha_workspace {
    char *base;
    size_t size;
    size_t used;
} mha_workspace;

enum { MHA_WORKSPACE_ALIGNMENT = 64 };

typedef struct mha_execution {
    int num_threads; /* at least 1 */
    mha_cancel cancel;
    mha_workspace workspace;
} mha_execution;

/* The next piece of the arena; MHA_OUT_OF_MEMORY where it was sized too small. */
mha_status mha_workspace_take(mha_workspace *workspace, size_t bytes, void **piece) MHA_MUST_CHECK;

/* `bytes` rounded up to the alignment: what a piece takes. */
mha_status mha_workspace_piece_size(size_t bytes, size_t *rounded) MHA_MUST_CHECK;

/* Adds `count` pieces of `bytes` (rounded up to the alignment) to a workspace size. */
mha_status mha_workspace_reserve(size_t *total, size_t bytes, size_t count) MHA_MUST_CHECK;

#endif
