/* What the operating system is asked for. */
#ifndef MHA_SYSTEM_H
#define MHA_SYSTEM_H

#include <stdint.h>

/* CPUs in the affinity mask, bounded by the quota of the container's cgroup; at least 1. */
int mha_system_usable_cpus(void);

/* Tells the core that this is a spin loop. */
void mha_system_pause(void);

/* Lets another thread have the CPU. */
void mha_system_yield(void);

/* Nanoseconds of a clock that never goes back; 0 where there is none. */
int64_t mha_system_nanoseconds(void);

#endif
