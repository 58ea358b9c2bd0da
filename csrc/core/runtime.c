/* The version, and the number of threads of the process. */
#include "mha/runtime.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "../threads/system.h"

const char *mha_version(void) { return MHA_VERSION; }

static atomic_int process_num_threads; /* 0: not yet asked for */

static int clamped(long number) {
    return number < 1 ? 1 : number > MHA_MAX_THREADS ? MHA_MAX_THREADS : (int)number;
}

/* A positive int, or 0. OMP_NUM_THREADS may be a list: its first number counts. */
static int number_in(const char *variable) {
    const char *text = getenv(variable);
    const long number = text == NULL ? 0 : strtol(text, NULL, 10);
    return number > 0 ? clamped(number) : 0;
}

int mha_usable_cpus(void) { return mha_system_usable_cpus(); }

int mha_get_num_threads(void) {
    int number = atomic_load(&process_num_threads);
    if (number == 0) {
        number = number_in("MHA_NUM_THREADS");
        if (number == 0) {
            number = number_in("OMP_NUM_THREADS");
        }
        if (number == 0) {
            number = mha_usable_cpus();
        }
        int not_asked_for = 0; /* or set by another thread meanwhile */
        if (!atomic_compare_exchange_strong(&process_num_threads, &not_asked_for, number)) {
            number = not_asked_for;
        }
    }
    return number;
}

void mha_set_num_threads(int num_threads) {
    atomic_store(&process_num_threads, clamped(num_threads));
}
