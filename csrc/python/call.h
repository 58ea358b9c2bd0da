/* Running the core: workspace, threads, the GIL, Ctrl-C, and errors back to Python. */
#ifndef MHA_CALL_H
#define MHA_CALL_H

#include "binding.h"

/* Threads of this call: those of `mha.threads(n)` in this context, else the process's; 0 with an
 * exception. */
int mha_call_threads(void);

/* Fills `execution` for a call: a workspace of `bytes`, num_threads, and a cancel callback that
 * runs Python's signal handlers. -1 with a MemoryError. Every begin needs its end. */
int mha_call_begin(mha_execution *execution, size_t bytes, int num_threads);
void mha_call_end(mha_execution *execution);

/* 0 for MHA_OK, else -1 with the exception: MemoryError, or what a signal handler raised. */
int mha_call_check(mha_status status);

#endif
