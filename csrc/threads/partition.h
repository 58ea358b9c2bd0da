/* How many threads a piece of work deserves: a pure function, so that it can be tested alone. */
#ifndef MHA_PARTITION_H
#define MHA_PARTITION_H

#include <stdint.h>

/* At most one thread a task, and none that would get less than ~10 us of work: `operations` counts
 * multiply-adds. */
int mha_threads_for(int64_t num_tasks, double operations, int num_threads);

/* The rows of a task that does little more than read and write them: at least one. */
int64_t mha_rows_of_a_task(int64_t numbers_of_a_row);

#endif
