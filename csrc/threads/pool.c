/* One pool for the process. A job is published by one atomic word, which workers join by counting
 * themselves into it; they and the caller take task numbers from one atomic counter until it runs
 * out. Between two jobs in short succession no lock is taken: workers that find nothing new spin
 * for SPIN_NANOSECONDS and only then park on a condition. */
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "mha/float_mode.h"
#include "mha/runtime.h"
#include "system.h"

enum {
    MAX_WORKERS = MHA_MAX_THREADS - 1,
    SPIN_NANOSECONDS = 100000,
    SPINS_A_CLOCK_READ = 64,
    PARKED_CALLER_NANOSECONDS = 20000000 /* between two polls */
};

static struct pool {
    pthread_mutex_t in_use; /* held by the caller whose job runs */
    int num_workers;        /* what follows, up to the atomics, is written under in_use, and
                               constant while a job runs */
    bool fork_handler_set;
    unsigned forks; /* of the processes between the first and this one */
    mha_team team;  /* NULL: workers of its own */
    mha_task_function function;
    void *context;
    int64_t num_tasks;

    /* generation of the job << 32 | workers that may join it << 16 | workers that did. */
    _Atomic uint64_t state;
    _Atomic int64_t next_task;
    atomic_int finished; /* of the workers that joined */
    atomic_bool stopped; /* the tasks are to be left as they are */

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
    pool.team = NULL;
    atomic_store(&pool.state, 0);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.stopped, false);
    atomic_store(&pool.parked_workers, 0);
    atomic_store(&pool.parked_callers, 0);
}

static bool job_is_stopped(void *unused) {
    (void)unused;
    return atomic_load_explicit(&pool.stopped, memory_order_relaxed);
}

static void run_tasks(int number) {
    mha_worker worker = {number, {MHA_WORK_BETWEEN_CHECKPOINTS, false, job_is_stopped, NULL}};
    while (!job_is_stopped(NULL)) {
        const int64_t task = atomic_fetch_add(&pool.next_task, 1);
        if (task >= pool.num_tasks) {
            return;
        }
        pool.function(pool.context, task, &worker);
    }
}

/* Spins for a while until is_ready(of); whether it is. */
static bool spin_until(bool (*is_ready)(uint32_t of), uint32_t of) {
    const int64_t until = mha_system_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int spin = 0; spin < SPINS_A_CLOCK_READ; spin++) {
            if (is_ready(of)) {
                return true;
            }
            mha_system_pause();
        }
    } while (mha_system_nanoseconds() < until);
    return false;
}

/* Parks until is_ready(of). Whoever parks counts itself before it looks a last time, and whoever
 * makes it ready looks for the parked afterwards: one of the two sees the other. */
static void park_until(bool (*is_ready)(uint32_t of), uint32_t of, atomic_int *parked,
                       pthread_cond_t *condition) {
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
    mha_set_float_mode(MHA_DEFAULT_FLOAT_MODE); /* it began with that of its creator */
    for (;;) {
        if (!spin_until(is_another_job, seen)) {
            park_until(is_another_job, seen, &pool.parked_workers, &pool.new_job);
        }
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

static void set_fork_handler(void) {
    if (!pool.fork_handler_set) {
        pool.fork_handler_set = pthread_atfork(NULL, NULL, start_over_in_child) == 0;
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
    set_fork_handler();
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

/* The calling thread, which alone polls: in its own floating-point mode, since that runs the
 * program's signal handlers. */
typedef struct caller {
    const mha_cancel *cancel;
    uint64_t float_mode;
    unsigned forks; /* at the start: after a fork this is the child, and the job is gone */
    bool cancelled;
    bool of_pool; /* else it runs its tasks alone */
} caller;

static bool was_forked(const caller *c) { return c->of_pool && pool.forks != c->forks; }

/* Polls; whether the caller is to leave its tasks. */
static bool should_stop(void *context) {
    caller *c = context;
    if (c->cancel->poll == NULL) {
        return false;
    }
    mha_leave_float_mode(c->float_mode);
    c->cancelled = c->cancel->poll(c->cancel->context) != 0;
    c->float_mode = mha_enter_float_mode();
    if (c->cancelled && c->of_pool && !was_forked(c)) {
        atomic_store(&pool.stopped, true);
    }
    return c->cancelled || was_forked(c);
}

static mha_worker worker_of(caller *c) {
    const mha_worker worker = {0, {MHA_WORK_BETWEEN_CHECKPOINTS, false, should_stop, c}};
    return worker;
}

static void run_inline(int64_t num_tasks, mha_task_function function, void *context, caller *c) {
    c->of_pool = false;
    mha_worker worker = worker_of(c);
    for (int64_t task = 0; task < num_tasks && !worker.checkpoint.stopped; task++) {
        if (should_stop(c)) {
            return;
        }
        function(context, task, &worker);
    }
}

/* The caller's share of the tasks. */
static void run_as_caller(caller *c) {
    mha_worker worker = worker_of(c);
    while (!worker.checkpoint.stopped && !should_stop(c)) {
        const int64_t task = atomic_fetch_add(&pool.next_task, 1);
        if (task >= pool.num_tasks) {
            return;
        }
        pool.function(pool.context, task, &worker);
    }
}

static void publish_job(int helpers) {
    const uint64_t generation = generation_of(atomic_load(&pool.state)) + (uint64_t)1;
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.stopped, false);
    atomic_store(&pool.next_task, 0);
    atomic_store(&pool.state, generation << 32 | (uint64_t)helpers << 16);
}

/* Parks for as long as a signal may wait. */
static void park_caller(uint32_t joined) {
    struct timespec until;
    if (clock_gettime(CLOCK_REALTIME, &until) != 0) {
        return;
    }
    until.tv_nsec += PARKED_CALLER_NANOSECONDS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&pool.parking);
    atomic_fetch_add(&pool.parked_callers, 1);
    if (!have_finished(joined)) {
        (void)pthread_cond_timedwait(&pool.job_done, &pool.parking,
                                     &until); /* or looked at early */
    }
    atomic_fetch_sub(&pool.parked_callers, 1);
    pthread_mutex_unlock(&pool.parking);
}

/* Closes the job to late workers and waits for those inside, polling on. */
static void wait_for_workers(caller *c) {
    const uint32_t joined = (uint32_t)joined_of(atomic_fetch_and(&pool.state, ~WANTED_MASK));
    if (spin_until(have_finished, joined)) {
        return;
    }
    while (!have_finished(joined)) {
        park_caller(joined);
        if (!c->cancelled && should_stop(c) && was_forked(c)) {
            return;
        }
    }
}

/* The caller's part of a job: its tasks, and waiting for the others'. */
static void lead_job(caller *c) {
    run_as_caller(c);
    if (!was_forked(c)) {
        wait_for_workers(c);
    }
}

typedef struct team_leader {
    caller *caller;
    pthread_t thread;
    jmp_buf out_of_team;
} team_leader;

/* What each thread of a team runs. In the child of a signal handler that forked, the others are
 * gone and the team would wait for them forever: the caller leaves it by a jump. */
static void work_in_team(void *context) {
    team_leader *leader = context;
    uint32_t seen;
    int worker;
    if (pthread_equal(pthread_self(), leader->thread)) {
        lead_job(leader->caller);
        if (was_forked(leader->caller)) {
            longjmp(leader->out_of_team, 1);
        }
    } else if (join_job(&seen, &worker)) {
        const uint64_t float_mode = mha_enter_float_mode();
        run_tasks(worker);
        mha_leave_float_mode(float_mode);
        leave_job();
    }
}

static void lead_team(caller *c) {
    team_leader leader;
    leader.caller = c;
    leader.thread = pthread_self();
    if (setjmp(leader.out_of_team) == 0) {
        pool.team(work_in_team, &leader, 0, 0);
    }
}

void mha_use_team(mha_team team) {
    pthread_mutex_lock(&pool.in_use);
    set_fork_handler();
    pool.team = pool.fork_handler_set ? team : NULL;
    pthread_mutex_unlock(&pool.in_use);
}

/* Tasks for more threads than one, with the pool in use by this caller. */
static void run_pooled(int64_t num_tasks, int helpers, mha_task_function function, void *context,
                       caller *c) {
    if (pool.team == NULL) {
        start_workers(helpers);
    }
    pool.function = function;
    pool.context = context;
    pool.num_tasks = num_tasks;
    c->forks = pool.forks;
    c->of_pool = true;
    publish_job(helpers);
    if (pool.team != NULL) {
        lead_team(c);
    } else {
        wake(&pool.parked_workers, &pool.new_job);
        lead_job(c);
    }
    if (!was_forked(c)) {
        pthread_mutex_unlock(&pool.in_use);
    } else if (!c->cancelled) {
        /* A signal handler forked and this is the child: the workers, and the tasks that they were
         * at, are gone, and so is the job. All tasks again, unless the handler also raised; the
         * pool is as new. */
        run_inline(num_tasks, function, context, c);
    }
}

mha_status mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                        void *context, const mha_cancel *cancel) {
    caller c = {.cancel = cancel, .float_mode = mha_enter_float_mode()};
    int helpers = num_threads - 1;
    if (helpers > num_tasks - 1) {
        helpers = (int)(num_tasks - 1);
    }
    if (helpers > MAX_WORKERS) {
        helpers = MAX_WORKERS;
    }
    if (helpers < 1 || pthread_mutex_trylock(&pool.in_use) != 0) {
        run_inline(num_tasks, function, context, &c);
    } else {
        run_pooled(num_tasks, helpers, function, context, &c);
    }
    mha_leave_float_mode(c.float_mode);
    return c.cancelled ? MHA_CANCELLED : MHA_OK;
}
