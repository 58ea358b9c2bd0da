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
