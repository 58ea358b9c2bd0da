#include "threads/partition.h"

#include "mha/tensor.h"

/* About 10 us of work for one core: a worker that still spins joins within one or two. */
static const double OPERATIONS_A_THREAD = 1.2e5;

int mha_threads_for(int64_t num_tasks, double operations, int num_threads) {
    const double worth = operations / OPERATIONS_A_THREAD;
    int threads = num_tasks < num_threads ? (int)num_tasks : num_threads;
    if (worth < threads) {
        threads = (int)worth;
    }
    return threads < 1 ? 1 : threads;
}

mha_row_tasks mha_divide_rows(int64_t rows, int64_t numbers_of_a_row, double work_of_a_number,
                              int num_threads) {
    enum { NUMBERS_OF_A_TASK = 1 << 16 };
    const bool is_one = numbers_of_a_row >= NUMBERS_OF_A_TASK || numbers_of_a_row < 1;
    const int64_t rows_of_a_task = is_one ? 1 : NUMBERS_OF_A_TASK / numbers_of_a_row;
    const int64_t count = mha_divide_up(rows, rows_of_a_task);
    const double work = (double)rows * (double)numbers_of_a_row * work_of_a_number;
    return (mha_row_tasks){rows, rows_of_a_task, count, mha_threads_for(count, work, num_threads)};
}
