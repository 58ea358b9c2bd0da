#include "partition.h"

/* About 50 us of work for one core at 10 to 20 multiply-adds a nanosecond. */
static const double OPERATIONS_A_THREAD = 5e5;

int mha_threads_for(int64_t num_tasks, double operations, int num_threads) {
    const double worth = operations / OPERATIONS_A_THREAD;
    int threads = num_tasks < num_threads ? (int)num_tasks : num_threads;
    if (worth < threads) {
        threads = (int)worth;
    }
    return threads < 1 ? 1 : threads;
}
