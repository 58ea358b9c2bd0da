/* A small pool: tasks from one atomic counter, workers that spin briefly and then park. Tasks run
 * in the default floating-point mode, whatever the caller's. */
#ifndef MHA_POOL_H
#define MHA_POOL_H

#include <stdint.h>

#include "mha/execution.h"

/* A thread that runs tasks: its number, in [0, num_threads), tells whose scratch memory to use. */
typedef struct mha_worker {
    int number;
    mha_checkpoint checkpoint;
} mha_worker;

/* Runs task number `task`. It asks mha_stop_after(&worker->checkpoint, work) at least every few
 * milliseconds, and returns at once where that is true, with its results undefined. */
typedef void (*mha_task_function)(void *context, int64_t task, mha_worker *worker);

/* Runs tasks 0..num_tasks-1, each once, begun in this order (so that a task may wait for those
 * before it), on up to num_threads threads, the caller's among them, and returns when all are done.
 * Runs inline when the pool serves another caller. MHA_CANCELLED when cancel->poll said so: tasks
 * are then left as they are. They may all run once more, in the child of a signal handler that
 * forks. */
mha_status mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                        void *context, const mha_cancel *cancel) MHA_MUST_CHECK;

#endif
