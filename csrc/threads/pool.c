/* One pool for the process. A job is published by one atomic word, which workers join by counting
 * themselves into it; they and the caller take task numbers from one atomic counter until it runs
 * out. Between two jobs in short succession no lock is taken: workers that find nothing new spin
 * for SPIN_NANOSECONDS and only then park on a condition. Where there are more threads than CPUs,
 * as many as would only take the others' time park at once. */
#include "threads/pool.h"

#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "mha/float_mode.h"
#include "mha/runtime.h"
#include "threads/system.h"

enum {
    MAX_WORKERS = MHA_MAX_THREADS - 1,
    SPIN_NANOSECONDS = 100000,
    SPINS_A_CLOCK_READ = 64,
    PARKED_CALLER_NANOSECONDS = 20000000 /* between two polls */
};

static struct pool {
    mha_system_mutex in_use; /* held by the caller whose job runs */
    int num_workers;         /* what follows, up to the atomics, is written under in_use, and
                                constant while a job runs */
    bool fork_handler_set;
    unsigned forks;              /* of the processes between the first and this one */
    _Atomic(mha_team) next_team; /* of the next job, whoever's thread asks for it and when */
    mha_team team;               /* NULL: workers of its own */
    mha_task_function function;
    void *context;
    int64_t num_tasks;

    /* generation of the job << 32 | workers that may join it << 16 | workers that did. */
    _Atomic uint64_t state;
    _Atomic int64_t next_task;
    atomic_int finished; /* of the workers that joined */
    atomic_int cpus;     /* that the process might use when the last worker was started */
    atomic_int spinning; /* workers */
    atomic_bool stopped; /* the tasks are to be left as they are */

    mha_system_mutex parking;
    mha_system_condition new_job;  /* workers park here */
    mha_system_condition job_done; /* the caller parks here */
    atomic_int parked_workers;
    atomic_int parked_callers; /* 0 or 1 */
} pool = {.in_use = MHA_SYSTEM_MUTEX,
          .parking = MHA_SYSTEM_MUTEX,
          .new_job = MHA_SYSTEM_CONDITION,
          .job_done = MHA_SYSTEM_CONDITION};

static const uint64_t WANTED_MASK = (uint64_t)0xffff << 16;
static uint32_t generation_of(uint64_t state) { return (uint32_t)(state >> 32); }
static int wanted_of(uint64_t state) { return (int)(state >> 16 & 0xffff); }
static int joined_of(uint64_t state) { return (int)(state & 0xffff); }

/* In the child of a fork only the forking thread lives: start over with an empty pool. */
static void start_over_in_child(void) {
    mha_system_begin_mutex(&pool.in_use);
    mha_system_begin_mutex(&pool.parking);
    mha_system_begin_condition(&pool.new_job);
    mha_system_begin_condition(&pool.job_done);
    pool.forks++;
    pool.num_workers = 0;
    atomic_store(&pool.next_team, NULL);
    atomic_store(&pool.state, 0);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.spinning, 0);
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
                       mha_system_condition *condition) {
    mha_system_lock(&pool.parking);
    atomic_fetch_add(parked, 1);
    while (!is_ready(of)) {
        mha_system_wait(condition, &pool.parking);
    }
    atomic_fetch_sub(parked, 1);
    mha_system_unlock(&pool.parking);
}

/* Wakes `wanted` of the parked, or all where there are no more. */
static void wake(atomic_int *parked, int wanted, mha_system_condition *condition) {
    if (atomic_load(parked) == 0) {
        return;
    }
    mha_system_lock(&pool.parking);
    if (atomic_load(parked) <= wanted) {
        mha_system_wake_all(condition);
    } else {
        for (int i = 0; i < wanted; i++) {
            mha_system_wake_one(condition);
        }
    }
    mha_system_unlock(&pool.parking);
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
    wake(&pool.parked_callers, 1, &pool.job_done);
}

/* A worker waits for another job: it spins first, unless as many as there are other CPUs do. */
static void wait_for_job(uint32_t seen) {
    const bool has_cpu = atomic_fetch_add(&pool.spinning, 1) < atomic_load(&pool.cpus) - 1;
    const bool is_there = has_cpu && spin_until(is_another_job, seen);
    atomic_fetch_sub(&pool.spinning, 1);
    if (!is_there) {
        park_until(is_another_job, seen, &pool.parked_workers, &pool.new_job);
    }
}

static void work(void) {
    uint32_t seen;
    int worker;
    mha_set_float_mode(MHA_DEFAULT_FLOAT_MODE); /* it began with that of its creator */
    for (;;) {
        if (join_job(&seen, &worker)) {
            run_tasks(worker);
            leave_job();
        }
        wait_for_job(seen);
    }
}

static void set_fork_handler(void) {
    if (!pool.fork_handler_set) {
        pool.fork_handler_set = mha_system_set_fork_handler(start_over_in_child);
    }
}

/* Starts workers until there are `wanted`, or the system gives no more. */
static void start_workers(int wanted) {
    if (pool.num_workers < wanted) {
        set_fork_handler();
        atomic_store(&pool.cpus, mha_system_usable_cpus());
    }
    while (pool.num_workers < wanted && mha_system_start_thread(work)) {
        pool.num_workers++;
    }
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

/* The caller polls before its first task, and then as its work goes on. */
static mha_worker worker_of(caller *c) { return (mha_worker){0, {0, false, should_stop, c}}; }

/* Counted for a task whatever it counts itself: a poll costs as much as the smallest of tasks. */
enum { WORK_OF_TASK = MHA_WORK_BETWEEN_CHECKPOINTS / 16 };

static void run_inline(int64_t num_tasks, mha_task_function function, void *context, caller *c) {
    c->of_pool = false;
    mha_worker worker = worker_of(c);
    for (int64_t task = 0; task < num_tasks; task++) {
        if (mha_stop_after(&worker.checkpoint, WORK_OF_TASK)) {
            return;
        }
        function(context, task, &worker);
    }
}

/* The caller's share of the tasks. */
static void run_as_caller(caller *c) {
    mha_worker worker = worker_of(c);
    while (!mha_stop_after(&worker.checkpoint, WORK_OF_TASK)) {
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
    mha_system_lock(&pool.parking);
    atomic_fetch_add(&pool.parked_callers, 1);
    if (!have_finished(joined)) {
        mha_system_wait_for(&pool.job_done, &pool.parking, PARKED_CALLER_NANOSECONDS);
    }
    atomic_fetch_sub(&pool.parked_callers, 1);
    mha_system_unlock(&pool.parking);
}

/* Closes the job to late workers and waits for those inside, polling on. */
static void wait_for_workers(caller *c) {
    const uint32_t joined = (uint32_t)joined_of(atomic_fetch_and(&pool.state, ~WANTED_MASK));
    const bool has_cpu = pool.team != NULL || (int)joined < atomic_load(&pool.cpus);
    if (has_cpu && spin_until(have_finished, joined)) {
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
    mha_system_thread thread;
    jmp_buf out_of_team;
} team_leader;

/* What each thread of a team runs. In the child of a signal handler that forked, the others are
 * gone and the team would wait for them forever: the caller leaves it by a jump. */
static void work_in_team(void *context) {
    team_leader *leader = context;
    uint32_t seen;
    int worker;
    if (mha_system_is_this_thread(leader->thread)) {
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
    leader.thread = mha_system_this_thread();
    if (setjmp(leader.out_of_team) == 0) {
        pool.team(work_in_team, &leader, 0, 0);
    }
}

/* Takes no lock: a signal handler may ask for it in the middle of a call, which holds the pool. */
void mha_use_team(mha_team team) { atomic_store(&pool.next_team, team); }

/* The team that the job is for, unless the child of a fork could not leave it. */
static void choose_team(void) {
    pool.team = atomic_load(&pool.next_team);
    if (pool.team != NULL) {
        set_fork_handler();
        pool.team = pool.fork_handler_set ? pool.team : NULL;
    }
}

/* Tasks for more threads than one, with the pool in use by this caller. */
static void run_pooled(int64_t num_tasks, int helpers, mha_task_function function, void *context,
                       caller *c) {
    choose_team();
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
        wake(&pool.parked_workers, helpers, &pool.new_job);
        lead_job(c);
    }
    if (!was_forked(c)) {
        mha_system_unlock(&pool.in_use);
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
    if (helpers < 1 || !mha_system_try_lock(&pool.in_use)) {
        run_inline(num_tasks, function, context, &c);
    } else {
        run_pooled(num_tasks, helpers, function, context, &c);
    }
    mha_leave_float_mode(c.float_mode);
    return c.cancelled ? MHA_CANCELLED : MHA_OK;
}
