/* What the operating system is asked for: system_posix.c, or on Windows system_windows.c. */
#ifndef MHA_SYSTEM_H
#define MHA_SYSTEM_H

#include <stdbool.h>
#include <stdint.h>

/* The types mha_system_mutex, mha_system_condition and mha_system_thread, and what begins the first
 * two where they are static, MHA_SYSTEM_MUTEX and MHA_SYSTEM_CONDITION. Short functions of POSIX
 * are inline. */
#ifdef _WIN32
#include "threads/system_windows.h"
#else
#include "threads/system_posix.h"
#endif

/* CPUs in the affinity mask, bounded by the quota of the container; at least 1. */
int mha_system_usable_cpus(void);

/* Lets another thread have the CPU. */
void mha_system_yield(void);

/* Nanoseconds of a clock that never goes back; 0 where there is none. */
int64_t mha_system_nanoseconds(void);

/* As mha_system_wait, but for so long at most; or for less. */
void mha_system_wait_for(mha_system_condition *condition, mha_system_mutex *mutex,
                         int64_t nanoseconds);

/* Starts a thread that nobody waits for and that leaves signals to the threads of the program;
 * false where the system gives no more. */
bool mha_system_start_thread(void (*run)(void));

/* From now on the child of a fork begins with start_over; false where the system cannot promise
 * it. */
bool mha_system_set_fork_handler(void (*start_over)(void));

/* Tells the core that this is a spin loop. */
static inline void mha_system_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
