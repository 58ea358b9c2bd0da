/* How a call runs: threads, cancellation, workspace. */
#ifndef MHA_EXECUTION_H
#define MHA_EXECUTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mha/status.h"

MHA_API_BEGIN

/* Polled by the calling thread again and again while it works or waits, in its own floating-point
 * mode; nonzero stops the call with MHA_CANCELLED. */
typedef struct mha_cancel {
    int (*poll)(void *context);
    void *context;
} mha_cancel;

/* What a thread asks in the middle of a task, however long the task: whether the call is stopped.
 * Then it leaves its work as it is. One for each thread. */
typedef struct mha_checkpoint {
    int64_t work_left; /* multiply-adds, about, until should_stop is asked */
    bool stopped;
    bool (*should_stop)(void *context);
    void *context;
} mha_checkpoint;

/* About 20 us of work with the widest vectors, and 1 ms without any. */
enum { MHA_WORK_BETWEEN_CHECKPOINTS = 1 << 20 };

/* Work, in multiply-adds, of a number that is read and written once, maybe for the first time. */
enum { MHA_WORK_OF_MOVING = 4 };

/* Apart from the counting, which stands in every loop. */
__attribute__((noinline, cold, unused)) static bool mha_ask_checkpoint(mha_checkpoint *checkpoint) {
    if (!checkpoint->stopped) {
        checkpoint->work_left = MHA_WORK_BETWEEN_CHECKPOINTS;
        checkpoint->stopped = checkpoint->should_stop(checkpoint->context);
    }
    if (checkpoint->stopped) {
        checkpoint->work_left = 0; /* so that it is asked each time from now on */
    }
    return checkpoint->stopped;
}

/* Counts work that was done or comes next; true where the call is stopped. */
static inline bool mha_stop_after(mha_checkpoint *checkpoint, int64_t work) {
    checkpoint->work_left -= work;
    return checkpoint->work_left <= 0 && mha_ask_checkpoint(checkpoint);
}

/* An arena: the caller sizes it (mha_..._workspace) and owns `base`; the core only hands out
 * aligned pieces of it, in order, and never frees. Built with the address sanitizer, what is not
 * handed out is poisoned, to be used only as a workspace again until it is freed or ended. */
typedef struct mha_workspace {
    char *base;
    size_t size;
    size_t used, most; /* now, and at most so far */
    bool measures;     /* nothing is handed out: how much it would be is counted */
} mha_workspace;

enum { MHA_WORKSPACE_ALIGNMENT = 64 };

/* Equal pieces of the arena: one for each worker or task. */
typedef struct mha_pieces {
    char *first;
    size_t apart; /* bytes from one to the next */
} mha_pieces;

static inline void *mha_piece(const mha_pieces *pieces, int64_t number) {
    return pieces->first + (size_t)number * pieces->apart;
}

typedef struct mha_execution {
    int num_threads; /* at least 1 */
    mha_cancel cancel;
    mha_workspace workspace;
} mha_execution;

/* An arena of `size` bytes from `base` on, with nothing taken; and its end: the memory is the
 * owner's again, to be freed or kept. */
void mha_workspace_begin(mha_workspace *workspace, char *base, size_t size);
void mha_workspace_end(mha_workspace *workspace);

/* The next piece of the arena, or the next `count` of `bytes` each; MHA_OUT_OF_MEMORY where it was
 * sized too small. */
mha_status mha_workspace_take(mha_workspace *workspace, size_t bytes, void **piece) MHA_MUST_CHECK;
mha_status mha_workspace_take_pieces(mha_workspace *workspace, size_t bytes, size_t count,
                                     mha_pieces *pieces) MHA_MUST_CHECK;

/* Gives back all pieces that were taken since `used` was `used_before`. */
void mha_workspace_give_back(mha_workspace *workspace, size_t used_before);

/* What a call runs in to find out the size of its workspace: its steps plan and take their pieces
 * as ever, but no task runs and no memory is touched. workspace.most is then the size. */
mha_execution mha_measuring_execution(int num_threads);

MHA_API_END

#endif
