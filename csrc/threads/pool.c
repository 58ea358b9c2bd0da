/* One pool for the process. A job is published by one atomic word, which workers join by counting
 * themselves into it; they and the caller take task numbers from one atomic counter until it runs
 * out. Between two jobs in short succession no lock is taken: workers that find nothing new spin
 * for SPIN_NANOSECONDS and only then park on a condition. */
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "mha/runtime.h"
#include "system.h"

enum { MAX_WORKERS = MHA_MAX_THREADS - 1, SPIN_NANOSECONDS = 100000, SPINS_A_CLOCK_READ = 64 };

static struct pool {
    pthread_mutex_t in_use; /* held by the caller whose job runs */
    int num_workers;        /* what follows, up to the atomics, is written under in_use, and
                               constant while a job runs */
    bool fork_handler_set;
    unsigned forks; /* of the processes between the first and this one */
    mha_task_function function;
    void *context;
    int64_t num_tasks;

    /* generation of the job << 32 | workers that may join it << 16 | workers that did. */
    _Atomic uint64_t state;
    _Atomic int64_t next_task;
    atomic_int finished; /* of the workers that joined */
    atomic_bool stopped; /* no further task is to begin */

    pthread_mutex_t parking;
    pthread_cond_t new_job;  /* workers park here */
    pthread_cond_t job_done; /* the caller parks here */
    atomic_int parked_workers;
    atomic_int parked_callers; /* 0 or 1 */
} pool = {.in_use = PTHREAD_MUTEX_INITIALIZER,
          .parking = PTHREAD_MUTEX_INITIALIZER,
          .new_job = PTHREAD_COND_INITIALIZER,
          .job_done = PTHREAD_COND_INITIALIZER};

static const uint64_t WANTED_MASK = (uint64_t)0xffff << 16;
static uint32_t generation_of(uint64_t state) { return (uint32_t)(state >> 32); }
static int wanted_of(uint64_t state) { return (int)(state >> 16 & 0xffff); }
static int joined_of(uint64_t state) { return (int)(state & 0xffff); }

/* In the child of a fork only the forking thread lives: start over with an empty pool. Mutexes and
 * conditions of default kind cannot fail to start. */
static void start_over_in_child(void) {
    (void)pthread_mutex_init(&pool.in_use, NULL);
    (void)pthread_mutex_init(&pool.parking, NULL);
    (void)pthread_cond_init(&pool.new_job, NULL);
    (void)pthread_cond_init(&pool.job_done, NULL);
    pool.forks++;
    pool.num_workers = 0;
    atomic_store(&pool.state, 0);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.stopped, false);
    atomic_store(&pool.parked_workers, 0);
    atomic_store(&pool.parked_callers, 0);
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

/* Spins, then parks, until is_ready(of). Whoever parks counts itself before it looks a last time,
 * and whoever makes it ready looks for the parked afterwards: one of the two sees the other. */
static void wait_until(bool (*is_ready)(uint32_t of), uint32_t of, atomic_int *parked,
                       pthread_cond_t *condition) {
    const int64_t until = mha_system_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int spin = 0; spin < SPINS_A_CLOCK_READ; spin++) {
            if (is_ready(of)) {
                return;
            }
            mha_system_pause();
        }
    } while (mha_system_nanoseconds() < until);
    pthread_mutex_lock(&pool.parking);
    atomic_fetch_add(parked, 1);
    while (!is_ready(of)) {
        pthread_cond_wait(condition, &pool.parking);
    }
    atomic_fetch_sub(parked, 1);
    pthread_mutex_unlock(&pool.parking);
}

static void wake(atomic_int *parked, pthread_cond_t *condition) {
    if (atomic_load(parked) > 0) {
        pthread_mutex_lock(&pool.parking);
        pthread_cond_broadcast(condition);
        pthread_mutex_unlock(&pool.parking);
    }
}

static bool is_another_job(uint32_t seen) {
    return generation_of(atomic_load(&pool.state)) != seen;
}

static bool have_finished(uint32_t joined) {
    return (uint32_t)atomic_load(&pool.finished) >= joined;
}

/* Joins the job of the moment as *worker, unless it has enough workers or is closed. */
static bool join_job(uint32_t *seen, int *worker) {
    uint64_t state = atomic_load(&pool.state);
    do {
        *seen = generation_of(state);
        *worker = joined_of(state) + 1; /* the caller is worker 0 */
        if (joined_of(state) >= wanted_of(state)) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&pool.state, &state, state + 1));
    return true;
}

static void leave_job(void) {
    atomic_fetch_add(&pool.finished, 1);
    wake(&pool.parked_callers, &pool.job_done);
}

static void *work(void *argument) {
    uint32_t seen = (uint32_t)(uintptr_t)argument;
    int worker;
    for (;;) {
        wait_until(is_another_job, seen, &pool.parked_workers, &pool.new_job);
        if (join_job(&seen, &worker)) {
            run_tasks(worker);
            leave_job();
        }
    }
    return NULL;
}

static void create_workers(int wanted, const pthread_attr_t *detached) {
    while (pool.num_workers < wanted) {
        pthread_t thread;
        void *seen = (void *)(uintptr_t)generation_of(atomic_load(&pool.state));
        if (pthread_create(&thread, detached, work, seen) != 0) {
            return;
        }
        pool.num_workers++;
    }
}

/* Starts workers until there are `wanted`, or the system gives no more. Signals are left to the
 * threads of the program; but blocked, a fault of a worker's own would be undefined. */
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
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    if (pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED) == 0 &&
        pthread_sigmask(SIG_SETMASK, &all, &before) == 0) {
        create_workers(wanted, &detached);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* of a valid set: cannot fail */
    }
    (void)pthread_attr_destroy(&detached);
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
        if (cancelled) {
            atomic_store(&pool.stopped, true);
            return MHA_CANCELLED;
        }
        if (pool.forks != forks) {
            return MHA_OK;
        }
        const int64_t task = atomic_fetch_add(&pool.next_task, 1);
        if (task >= pool.num_tasks) {
            return MHA_OK;
        }
        pool.function(pool.context, task, 0);
    }
}

static void publish_job(int helpers) {
    const uint64_t generation = generation_of(atomic_load(&pool.state)) + (uint64_t)1;
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.stopped, false);
    atomic_store(&pool.next_task, 0);
    atomic_store(&pool.state, generation << 32 | (uint64_t)helpers << 16);
    wake(&pool.parked_workers, &pool.new_job);
}

/* Closes the job to late workers and waits for those inside. */
static void wait_for_workers(void) {
    const int joined = joined_of(atomic_fetch_and(&pool.state, ~WANTED_MASK));
    wait_until(have_finished, (uint32_t)joined, &pool.parked_callers, &pool.job_done);
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
    start_workers(helpers);
    pool.function = function;
    pool.context = context;
    pool.num_tasks = num_tasks;
    publish_job(helpers);

    const unsigned forks = pool.forks;
    const mha_status status = run_as_caller(cancel);
    if (pool.forks != forks) {
        /* A signal handler forked and this is the child: the workers, and the tasks that they were
         * at, are gone, and so is the job. All tasks again, unless the handler also raised; the
         * pool is as new. */
        return status == MHA_CANCELLED ? status : run_inline(num_tasks, function, context, cancel);
    }
    wait_for_workers();
    pthread_mutex_unlock(&pool.in_use);
    return status;
}
