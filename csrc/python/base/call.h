/* Running the core: workspace, threads, the GIL, Ctrl-C, and errors back to Python. */
#ifndef MHA_CALL_H
#define MHA_CALL_H

#include "python/base/binding.h"

/* To be called once, when the module is imported; -1 with an exception. */
int mha_start_calls(void);

/* Threads of this call: those of `mha.threads(n)` in this context, else the process's; 0 with an
 * exception. */
int mha_call_threads(void);

/* The two functions of a step, over a pointer to its struct; and those that call mha_<name> of the
 * core, as core_<name>. */
typedef mha_status core_workspace(const void *problem, int num_threads, size_t *bytes);
typedef mha_status core_run(const void *problem, mha_execution *execution);
#define MHA_CORE_WORKSPACE(name)                                                                   \
    static mha_status core_##name(const void *problem, int num_threads, size_t *bytes) {           \
        return mha_##name(problem, num_threads, bytes);                                            \
    }
#define MHA_CORE_RUN(name)                                                                         \
    static mha_status core_##name(const void *problem, mha_execution *execution) {                 \
        return mha_##name(problem, execution);                                                     \
    }

/* Runs a step with the GIL released, in a workspace of the size it asks for (NULL: it needs none);
 * Ctrl-C stops it. 0, or -1 with the exception: MemoryError, or what a signal handler raised. */
int mha_call_run(core_workspace *workspace, core_run *run, const void *problem, int num_threads);

/* function(context) with the GIL, for a step that runs so: 0, or -1 with the exception, for which
 * the step has to stop. */
int mha_call_python(mha_execution *execution, int (*function)(void *context), void *context);

#endif
