#define _GNU_SOURCE
#include "threads/system.h"

#include <sched.h>
#include <signal.h>
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

void mha_system_yield(void) { sched_yield(); }

int64_t mha_system_nanoseconds(void) {
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) {
        return 0;
    }
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void mha_system_wait_for(mha_system_condition *condition, mha_system_mutex *mutex,
                         int64_t nanoseconds) {
    struct timespec until;
    if (clock_gettime(CLOCK_REALTIME, &until) != 0) {
        return;
    }
    nanoseconds += until.tv_nsec;
    until.tv_sec += (time_t)(nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    (void)pthread_cond_timedwait(condition, mutex, &until); /* looked at early, if it fails */
}

/* A pointer to a function does not fit one to an object by C's rules, but by those of POSIX. */
static void *run_thread(void *run) {
    ((void (*)(void))(uintptr_t)run)();
    return NULL;
}

/* Blocked, a fault of a thread's own would be undefined. */
static void choose_blocked_signals(sigset_t *blocked) {
    sigfillset(blocked);
    sigdelset(blocked, SIGSEGV);
    sigdelset(blocked, SIGBUS);
    sigdelset(blocked, SIGFPE);
    sigdelset(blocked, SIGILL);
}

bool mha_system_start_thread(void (*run)(void)) {
    sigset_t blocked, before;
    pthread_attr_t detached;
    pthread_t thread;
    bool is_started = false;
    if (pthread_attr_init(&detached) != 0) {
        return false;
    }
    choose_blocked_signals(&blocked);
    if (pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED) == 0 &&
        pthread_sigmask(SIG_SETMASK, &blocked, &before) == 0) {
        is_started = pthread_create(&thread, &detached, run_thread, (void *)(uintptr_t)run) == 0;
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* of a valid set: cannot fail */
    }
    (void)pthread_attr_destroy(&detached);
    return is_started;
}

bool mha_system_set_fork_handler(void (*start_over)(void)) {
    return pthread_atfork(NULL, NULL, start_over) == 0;
}
