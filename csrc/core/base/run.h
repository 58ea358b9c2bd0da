/* Running the tasks of a step. */
#ifndef MHA_RUN_H
#define MHA_RUN_H

#include "threads/partition.h"
#include "threads/pool.h"

/* mha_pool_run, but nothing where the call only measures its workspace. */
static inline mha_status mha_run_tasks(mha_execution *execution, int64_t num_tasks, int num_threads,
                                       mha_task_function function, void *context) {
    return execution->workspace.measures
               ? MHA_OK
               : mha_pool_run(num_tasks, num_threads, function, context, &execution->cancel);
}

static inline mha_status mha_run_row_tasks(mha_execution *execution, const mha_row_tasks *tasks,
                                           mha_task_function function, void *context) {
    return mha_run_tasks(execution, tasks->count, tasks->threads, function, context);
}

/* Two functions of the interface. The first runs `steps`, and then gives back what they took of the
 * workspace, whether they succeeded or not; the second says how much that is, by the first. */
#define MHA_DEFINE_STEP(function, workspace_function, problem_type, steps)                         \
    mha_status function(const problem_type *problem, mha_execution *execution) {                   \
        const size_t used_before = execution->workspace.used;                                      \
        const mha_status status = steps(problem, execution);                                       \
        mha_workspace_give_back(&execution->workspace, used_before);                               \
        return status;                                                                             \
    }                                                                                              \
    mha_status workspace_function(const problem_type *problem, int num_threads, size_t *bytes) {   \
        mha_execution measuring = mha_measuring_execution(num_threads);                            \
        MHA_TRY(function(problem, &measuring));                                                    \
        *bytes = measuring.workspace.most;                                                         \
        return MHA_OK;                                                                             \
    }

/* mha_<step>_forward and mha_<step>_workspace; mha_<step>_backward and its workspace. */
#define MHA_DEFINE_FORWARD(step, problem_type, steps)                                              \
    MHA_DEFINE_STEP(mha_##step##_forward, mha_##step##_workspace, problem_type, steps)
#define MHA_DEFINE_BACKWARD(step, problem_type, steps)                                             \
    MHA_DEFINE_STEP(mha_##step##_backward, mha_##step##_backward_workspace, problem_type, steps)

#endif
