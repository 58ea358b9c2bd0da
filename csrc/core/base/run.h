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

/* A function of the interface: the steps of a problem, and then given back what they took of the
 * workspace, whether they succeeded or not. */
#define MHA_DEFINE_RUN(function, problem_type, run_steps)                                          \
    mha_status function(const problem_type *problem, mha_execution *execution) {                   \
        const size_t used_before = execution->workspace.used;                                      \
        const mha_status status = run_steps(problem, execution);                                   \
        mha_workspace_give_back(&execution->workspace, used_before);                               \
        return status;                                                                             \
    }

/* The size of the workspace that `step` takes for a problem: by the step itself. */
#define MHA_DEFINE_WORKSPACE(step, problem_type, run)                                              \
    mha_status mha_##step##_workspace(const problem_type *problem, int num_threads,                \
                                      size_t *bytes) {                                             \
        mha_execution measuring = mha_measuring_execution(num_threads);                            \
        MHA_TRY(run(problem, &measuring));                                                         \
        *bytes = measuring.workspace.most;                                                         \
        return MHA_OK;                                                                             \
    }

#endif
