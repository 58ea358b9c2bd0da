/* A small pool: tasks from one atomic counter, workers that spin briefly and then park. */
#ifndef MHA_POOL_H
#define MHA_POOL_H

#include <stdint.h>

#include "mha/execution.h"

/* Runs task number `task`; `worker` in [0, num_threads) tells whose scratch memory to use. */
typedef void (*mha_task_function)(void *context, int64_t task, int worker);

/* Runs tasks 0..num_tasks-1, each once, begun in this order (so that a task may wait for those
 * before it), on up to num_threads threads, the caller's among them, and returns when all are done.
 * Runs inline when the pool serves another caller. MHA_CANCELLED when cancel->poll said so: the
 * tasks not yet begun are then left out. */
mha_status mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                        void *context, const mha_cancel *cancel) MHA_MUST_CHECK;

#endif
