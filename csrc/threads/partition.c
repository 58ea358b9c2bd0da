#include "partition.h"

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

int64_t mha_rows_of_a_task(int64_t numbers_of_a_row) {
    enum { NUMBERS_OF_A_TASK = 1 << 16 };
    return numbers_of_a_row >= NUMBERS_OF_A_TASK || numbers_of_a_row < 1
               ? 1
               : NUMBERS_OF_A_TASK / numbers_of_a_row;
}
