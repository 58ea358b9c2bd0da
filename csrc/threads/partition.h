/* How many threads a piece of work deserves: a pure function, so that it can be tested alone. */
#ifndef MHA_PARTITION_H
#define MHA_PARTITION_H

#include <stdint.h>

/* At most one thread a task, and none that would get less than ~10 us of work: `operations` counts
 * multiply-adds. */
int mha_threads_for(int64_t num_tasks, double operations, int num_threads);

/* The rows of a step that does little more than read and write them, in tasks of some rows each. */
typedef struct mha_row_tasks {
    int64_t rows, rows_of_a_task, count;
    int threads;
} mha_row_tasks;

/* `work_of_a_number` in multiply-adds. */
mha_row_tasks mha_divide_rows(int64_t rows, int64_t numbers_of_a_row, double work_of_a_number,
                              int num_threads);

/* The rows of one task: first..end. */
static inline int64_t mha_first_row(const mha_row_tasks *tasks, int64_t task) {
    return task * tasks->rows_of_a_task;
}
static inline int64_t mha_end_row(const mha_row_tasks *tasks, int64_t task) {
    const int64_t end = mha_first_row(tasks, task) + tasks->rows_of_a_task;
    return end < tasks->rows ? end : tasks->rows;
}

#endif
