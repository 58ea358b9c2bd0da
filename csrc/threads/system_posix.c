#define _GNU_SOURCE
#include "system.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
static int affinity_cpus(void) {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

/* quota / period, rounded up; 0 where there is no limit. Version 2 keeps both in one file. */
static int cgroup_cpus(void) {
    double quota = 0, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file != NULL) {
        if (fscanf(file, "%lf %lf", &quota, &period) != 2) {
            quota = 0; /* "max": no limit */
        }
        fclose(file);
    } else {
        FILE *quota_file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r");
        FILE *period_file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r");
        if (quota_file == NULL || period_file == NULL || fscanf(quota_file, "%lf", &quota) != 1 ||
            fscanf(period_file, "%lf", &period) != 1) {
            quota = 0;
        }
        if (quota_file != NULL) {
            fclose(quota_file);
        }
        if (period_file != NULL) {
            fclose(period_file);
        }
    }
    if (quota <= 0 || period <= 0) {
        return 0;
    }
    const double cpus = quota / period;
    return cpus > 1e6 ? 0 : (int)cpus + (cpus > (int)cpus);
}
#else
static int affinity_cpus(void) { return 0; }
static int cgroup_cpus(void) { return 0; }
#endif

int mha_system_usable_cpus(void) {
    int cpus = affinity_cpus();
    if (cpus < 1) {
        cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
    }
    const int limit = cgroup_cpus();
    if (limit > 0 && limit < cpus) {
        cpus = limit;
    }
    return cpus < 1 ? 1 : cpus;
}

void mha_system_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void mha_system_yield(void) { sched_yield(); }

int64_t mha_system_nanoseconds(void) {
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) {
        return 0;
    }
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
