/* One pool for the process. A job is published under the mutex by a new generation number; workers
 * and the caller take task numbers from one atomic counter until it runs out. Workers that find
 * nothing new spin for SPIN_NANOSECONDS and then park on the condition. */
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "mha/runtime.h"
#include "system.h"

enum { MAX_WORKERS = MHA_MAX_THREADS - 1, SPIN_NANOSECONDS = 50000, SPINS_A_CLOCK_READ = 64 };

static struct pool {
    pthread_mutex_t in_use;  /* held by the caller whose job runs */
    pthread_mutex_t mutex;   /* what follows is written under it, and constant while a job runs, but
                                for the atomics */
    pthread_cond_t new_job;  /* workers park here */
    pthread_cond_t job_done; /* the caller parks here */
    int num_workers;
    bool fork_handler_set;
    unsigned forks; /* of the processes between the first and this one */

    mha_task_function function;
    void *context;
    int64_t num_tasks;
    int wanted;          /* workers that may join the job */
    int joined;          /* workers that did */
    atomic_int running;  /* of them, not yet finished */
    atomic_bool stopped; /* no further task is to begin */
    atomic_uint_fast64_t generation;
    _Atomic int64_t next_task;
} pool = {.in_use = PTHREAD_MUTEX_INITIALIZER,
          .mutex = PTHREAD_MUTEX_INITIALIZER,
          .new_job = PTHREAD_COND_INITIALIZER,
          .job_done = PTHREAD_COND_INITIALIZER};

/* In the child of a fork only the forking thread lives: start over with an empty pool. */
static void start_over_in_child(void) {
    pthread_mutex_init(&pool.in_use, NULL);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.new_job, NULL);
    pthread_cond_init(&pool.job_done, NULL);
    pool.forks++;
    pool.num_workers = 0;
    pool.wanted = pool.joined = 0;
    atomic_store(&pool.running, 0);
    atomic_store(&pool.stopped, false);
}

static void run_tasks(int worker) {
    while (!atomic_load_explicit(&pool.stopped, memory_order_relaxed)) {
        const int64_t task = atomic_fetch_add(&pool.next_task, 1);
        if (task >= pool.num_tasks) {
            return;
        }
        pool.function(pool.context, task, worker);
    }
}

static void spin_while_generation_is(uint_fast64_t seen) {
    const int64_t until = mha_system_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int spin = 0; spin < SPINS_A_CLOCK_READ; spin++) {
            if (atomic_load(&pool.generation) != seen) {
                return;
            }
            mha_system_pause();
        }
    } while (mha_system_nanoseconds() < until);
}

static void *work(void *argument) {
    uint_fast64_t seen = (uint_fast64_t)(uintptr_t)argument;
    for (;;) {
        spin_while_generation_is(seen);
        pthread_mutex_lock(&pool.mutex);
        while (atomic_load(&pool.generation) == seen) {
            pthread_cond_wait(&pool.new_job, &pool.mutex);
        }
        seen = atomic_load(&pool.generation);
        const bool join = pool.joined < pool.wanted;
        const int worker = join ? ++pool.joined : 0; /* the caller is worker 0 */
        if (join) {
            atomic_fetch_add(&pool.running, 1);
        }
        pthread_mutex_unlock(&pool.mutex);

        if (join) {
            run_tasks(worker);
            pthread_mutex_lock(&pool.mutex);
            if (atomic_fetch_sub(&pool.running, 1) == 1) {
                pthread_cond_signal(&pool.job_done);
            }
            pthread_mutex_unlock(&pool.mutex);
        }
    }
    return NULL;
}

/* Starts workers until there are `wanted`, or the system gives no more; holds pool.mutex. Signals
 * are left to the threads of the program. */
static void start_workers(int wanted) {
    sigset_t all, before;
    pthread_attr_t detached;
    if (pool.num_workers >= wanted || pthread_attr_init(&detached) != 0) {
        return;
    }
    if (!pool.fork_handler_set) {
        pool.fork_handler_set = pthread_atfork(NULL, NULL, start_over_in_child) == 0;
    }
    sigfillset(&all);
    /* Blocked, a fault of a worker's own would be undefined. */
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (pool.num_workers < wanted) {
        pthread_t thread;
        void *seen = (void *)(uintptr_t)atomic_load(&pool.generation);
        if (pthread_create(&thread, &detached, work, seen) != 0) {
            break;
        }
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

static bool is_cancelled(const mha_cancel *cancel) {
    return cancel->poll != NULL && cancel->poll(cancel->context) != 0;
}

static mha_status run_inline(int64_t num_tasks, mha_task_function function, void *context,
                             const mha_cancel *cancel) {
    for (int64_t task = 0; task < num_tasks; task++) {
        if (is_cancelled(cancel)) {
            return MHA_CANCELLED;
        }
        function(context, task, 0);
    }
    return MHA_OK;
}

/* The caller's share of the tasks, with the polling that only it may do. Polling may fork. */
static mha_status run_as_caller(const mha_cancel *cancel) {
    const unsigned forks = pool.forks;
    for (;;) {
        const bool cancelled = is_cancelled(cancel);
        if (pool.forks != forks) {
            return MHA_OK;
        }
        if (cancelled) {
            atomic_store(&pool.stopped, true);
            return MHA_CANCELLED;
        }
        const int64_t task = atomic_fetch_add(&pool.next_task, 1);
        if (task >= pool.num_tasks) {
            return MHA_OK;
        }
        pool.function(pool.context, task, 0);
    }
}

/* Closes the job to late workers and waits for those inside. */
static void wait_for_workers(void) {
    pthread_mutex_lock(&pool.mutex);
    pool.wanted = 0;
    pthread_mutex_unlock(&pool.mutex);
    for (int spin = 0; spin < 1000 && atomic_load(&pool.running) > 0; spin++) {
        mha_system_pause();
    }
    pthread_mutex_lock(&pool.mutex);
    while (atomic_load(&pool.running) > 0) {
        pthread_cond_wait(&pool.job_done, &pool.mutex);
    }
    pthread_mutex_unlock(&pool.mutex);
}

mha_status mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                        void *context, const mha_cancel *cancel) {
    int helpers = num_threads - 1;
    if (helpers > num_tasks - 1) {
        helpers = (int)(num_tasks - 1);
    }
    if (helpers > MAX_WORKERS) {
        helpers = MAX_WORKERS;
    }
    if (helpers < 1 || pthread_mutex_trylock(&pool.in_use) != 0) {
        return run_inline(num_tasks, function, context, cancel);
    }
    pthread_mutex_lock(&pool.mutex);
    start_workers(helpers);
    pool.function = function;
    pool.context = context;
    pool.num_tasks = num_tasks;
    pool.wanted = helpers;
    pool.joined = 0;
    atomic_store(&pool.stopped, false);
    atomic_store(&pool.next_task, 0);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.new_job);
    pthread_mutex_unlock(&pool.mutex);

    const unsigned forks = pool.forks;
    const mha_status status = run_as_caller(cancel);
    if (pool.forks != forks) {
        /* A signal handler forked and this is the child: the workers, and the tasks that they were
         * at, are gone, and so is the job. All tasks again; the pool is as new. */
        return run_inline(num_tasks, function, context, cancel);
    }
    wait_for_workers();
    pthread_mutex_unlock(&pool.in_use);
    return status;
}
