/* The pool: every task once, whoever calls, cancelled or forked. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "threads/partition.h"
#include "threads/pool.h"
#include "check.h"
#include "mha/runtime.h"

enum { TASKS = 1000, THREADS = 4 };

typedef struct counts {
    atomic_int runs[TASKS];
    atomic_int of_worker[THREADS];
} counts;

static const mha_cancel never = {NULL, NULL};

static void count_task(void *context, int64_t task, mha_worker *worker) {
    counts *c = context;
    CHECK(worker->number >= 0 && worker->number < THREADS);
    atomic_fetch_add(&c->runs[task], 1);
    atomic_fetch_add(&c->of_worker[worker->number], 1);
}

static void check_one_run(int64_t num_tasks) {
    counts c;
    memset(&c, 0, sizeof c);
    CHECK_OK(mha_pool_run(num_tasks, THREADS, count_task, &c, &never));
    for (int64_t task = 0; task < TASKS; task++) {
        CHECK(atomic_load(&c.runs[task]) == (task < num_tasks));
    }
}

static void test_every_task_once(void) {
    for (int round = 0; round < 300; round++) {
        check_one_run(round % 7 * 100);
    }
    check_one_run(TASKS);
}

static void *run_from_thread(void *unused) {
    (void)unused;
    for (int round = 0; round < 100; round++) {
        check_one_run(50);
    }
    return NULL;
}

static void test_many_callers(void) {
    pthread_t threads[6];
    for (int i = 0; i < 6; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_from_thread, NULL) == 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void run_nested(void *context, int64_t task, mha_worker *worker) {
    (void)context, (void)task, (void)worker;
    check_one_run(20);
}

static void test_nested_calls(void) {
    CHECK_OK(mha_pool_run(8, THREADS, run_nested, NULL, &never));
}

static int cancel_at_the_fourth(void *context) { return ++*(int *)context > 3; }

/* Workers are so slow that the caller cancels long before they have run all tasks. */
static void count_task_slowly(void *context, int64_t task, mha_worker *worker) {
    static const struct timespec millisecond = {.tv_nsec = 1000000};
    count_task(context, task, worker);
    if (worker->number != 0) {
        nanosleep(&millisecond, NULL);
    }
}

/* Counts as much as is done between two polls. */
static void count_task_of_a_poll(void *context, int64_t task, mha_worker *worker) {
    count_task_slowly(context, task, worker);
    mha_stop_after(&worker->checkpoint, MHA_WORK_BETWEEN_CHECKPOINTS);
}

/* Cancelled at the fourth poll: of the tasks that count work, one is run between two; of those that
 * count none, some. */
static void check_cancel(mha_task_function function, int num_threads, int of_caller) {
    static counts c;
    int polls = 0;
    const mha_cancel cancel = {cancel_at_the_fourth, &polls};
    memset(&c, 0, sizeof c);
    int64_t run = 0;
    CHECK(mha_pool_run(TASKS, num_threads, function, &c, &cancel) == MHA_CANCELLED);
    for (int64_t task = 0; task < TASKS; task++) {
        CHECK(atomic_load(&c.runs[task]) <= 1);
        run += atomic_load(&c.runs[task]);
    }
    CHECK(run < TASKS && atomic_load(&c.of_worker[0]) == of_caller);
    check_one_run(100);
}

static void test_cancel(void) {
    for (int num_threads = 1; num_threads <= 2; num_threads++) {
        check_cancel(count_task_of_a_poll, num_threads, 3);
        check_cancel(count_task_slowly, num_threads, 3 * 16);
    }
}

/* Flush-to-zero and rounding down, as a caller may have them. */
#if defined(__x86_64__)
static const uint64_t ODD_MODE = 0xBF80;
#elif defined(__aarch64__)
static const uint64_t ODD_MODE = (uint64_t)1 << 24 | (uint64_t)2 << 22;
#else
static const uint64_t ODD_MODE = 0;
#endif

static void check_mode(void *context, int64_t task, mha_worker *worker) {
    CHECK((mha_float_mode() & MHA_FLOAT_MODE_BITS) == MHA_DEFAULT_FLOAT_MODE);
    count_task_slowly(context, task, worker);
}

static int check_mode_of_caller(void *unused) {
    (void)unused;
    CHECK((mha_float_mode() & MHA_FLOAT_MODE_BITS) == ODD_MODE);
    return 0;
}

/* First of all tests, so that the workers are made in the odd mode, and then in the usual one. */
static void test_float_mode(void) {
    const mha_cancel cancel = {check_mode_of_caller, NULL};
    for (int num_threads = 1; num_threads <= THREADS; num_threads++) {
        static counts c;
        const uint64_t before = mha_float_mode();
        mha_set_float_mode(ODD_MODE);
        CHECK_OK(mha_pool_run(100, num_threads, check_mode, &c, &cancel));
        CHECK((mha_float_mode() & MHA_FLOAT_MODE_BITS) == ODD_MODE);
        mha_set_float_mode(before);
        CHECK_OK(mha_pool_run(100, num_threads, check_mode, &c, &never));
    }
}

/* A task that goes on until it is told to stop, as a worker or as the caller. */
static void run_until_stopped(void *context, int64_t task, mha_worker *worker) {
    static const struct timespec millisecond = {.tv_nsec = 1000000};
    (void)task;
    if (worker->number != *(const int *)context) {
        nanosleep(&millisecond, NULL); /* lets the other one in */
        return;
    }
    while (!mha_stop_after(&worker->checkpoint, MHA_WORK_BETWEEN_CHECKPOINTS / 16)) {
        nanosleep(&millisecond, NULL);
    }
}

static int cancel_later(void *context) { return ++*(int *)context > 20; }

/* In the middle of a task, of the caller's own or of a worker that it waits for. */
static void test_cancel_within_a_task(void) {
    for (int number = 0; number < 2; number++) {
        int polls = 0;
        const mha_cancel cancel = {cancel_later, &polls};
        /* So many tasks that a worker gets one, however busy the machine is. */
        CHECK(mha_pool_run(2000, 2, run_until_stopped, &number, &cancel) == MHA_CANCELLED);
        check_one_run(100);
    }
}

#ifdef _WIN32 /* has no fork */
static void test_fork(void) {}
static void test_fork_within_a_call(void) {}
#else
static void test_fork(void) {
    check_one_run(100);
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        check_one_run(TASKS);
        check_one_run(TASKS);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_one_run(TASKS);
}

/* Forks once, as a signal handler may. */
static int fork_in_poll(void *context) {
    pid_t *child = context;
    if (*child < 0) {
        *child = fork();
        alarm(*child == 0 ? 20 : 0);
    }
    return 0;
}

static void test_fork_within_a_call(void) {
    static counts c;
    pid_t child = -1;
    const pid_t parent = getpid();
    const mha_cancel cancel = {fork_in_poll, &child};
    memset(&c, 0, sizeof c);
    CHECK_OK(mha_pool_run(TASKS, THREADS, count_task_slowly, &c, &cancel));
    for (int64_t task = 0; task < TASKS; task++) { /* the child begins again */
        CHECK(atomic_load(&c.runs[task]) >= 1);
        CHECK(getpid() != parent || atomic_load(&c.runs[task]) == 1);
    }
    check_one_run(TASKS);
    if (child == 0) {
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif

typedef struct team {
    void (*work)(void *);
    void *data;
    atomic_int finished;
} team;

static void *join_team(void *context) {
    team *t = context;
    t->work(t->data);
    atomic_fetch_add(&t->finished, 1);
    return NULL;
}

/* Threads made for each job, fewer than are wanted, which meet at its end. */
static void run_team(void (*work)(void *), void *data, unsigned num_threads, unsigned flags) {
    pthread_t others[2];
    team t = {.work = work, .data = data};
    CHECK(num_threads == 0 && flags == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&others[i], NULL, join_team, &t) == 0);
    }
    work(data);
    while (atomic_load(&t.finished) < 2) {
        sched_yield();
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(others[i], NULL);
    }
}

static int use_team_in_poll(void *context) {
    mha_use_team(context == NULL ? NULL : run_team);
    return 0;
}

/* As a signal handler may, on the thread whose call holds the pool: the next call has it. */
static void test_team_chosen_within_a_call(void) {
    counts c;
    int on = 1;
    for (int round = 0; round < 4; round++) {
        const mha_cancel cancel = {use_team_in_poll, round % 2 == 0 ? &on : NULL};
        memset(&c, 0, sizeof c);
        CHECK_OK(mha_pool_run(TASKS, THREADS, count_task, &c, &cancel));
        for (int64_t task = 0; task < TASKS; task++) {
            CHECK(atomic_load(&c.runs[task]) == 1);
        }
        check_one_run(TASKS);
    }
}

static void test_all(void) {
    test_every_task_once();
    test_many_callers();
    test_nested_calls();
    test_cancel();
    test_cancel_within_a_task();
    test_fork();
    test_fork_within_a_call();
}

static void test_team(void) {
    mha_use_team(run_team);
    test_float_mode();
    test_all();
    mha_use_team(NULL);
    check_one_run(TASKS);
    test_team_chosen_within_a_call();
}

static void test_partition(void) {
    CHECK(mha_threads_for(100, 1e3, 8) == 1);
    CHECK(mha_threads_for(100, 1e9, 8) == 8);
    CHECK(mha_threads_for(3, 1e9, 8) == 3);
    CHECK(mha_threads_for(100, 5e5, 8) == 4);
    CHECK(mha_threads_for(0, 1e9, 8) == 1);
}

int main(void) {
    test_float_mode();
    test_partition();
    test_all();
    test_team();
    puts("test_pool: passed");
    return 0;
}
