/* The version, and the number of threads of the process. */
#include "mha/runtime.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "threads/system.h"

const char *mha_version(void) { return MHA_VERSION; }

/* 0: not yet known; negative: that of the CPUs, since nobody asked for another. */
static atomic_int process_num_threads;

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

/* The child of a fork may have other CPUs than its parent. */
static void forget_cpus(void) {
    if (atomic_load(&process_num_threads) < 0) {
        atomic_store(&process_num_threads, 0);
    }
}

static void forget_cpus_in_children(void) {
    static atomic_flag forks_are_handled = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&forks_are_handled)) {
        (void)mha_system_set_fork_handler(forget_cpus); /* or children have the parent's number */
    }
}

/* As process_num_threads has it. */
static int first_number(void) {
    int number = number_in("MHA_NUM_THREADS");
    if (number == 0) {
        number = number_in("OMP_NUM_THREADS");
    }
    if (number == 0) {
        forget_cpus_in_children();
        number = -clamped(mha_usable_cpus());
    }
    return number;
}

int mha_get_num_threads(void) {
    int number = atomic_load(&process_num_threads);
    if (number == 0) {
        const int first = first_number();
        /* Unless another thread set it meanwhile, which `number` then is. */
        if (atomic_compare_exchange_strong(&process_num_threads, &number, first)) {
            number = first;
        }
    }
    return number < 0 ? -number : number;
}

void mha_set_num_threads(int num_threads) {
    atomic_store(&process_num_threads, clamped(num_threads));
}
