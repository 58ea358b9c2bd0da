#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0602 /* Windows 8 and later */
#endif
#define WIN32_LEAN_AND_MEAN
#include "threads/system.h"

#include <windows.h>

_Static_assert(sizeof(mha_system_mutex) == sizeof(SRWLOCK) &&
                   sizeof(mha_system_condition) == sizeof(CONDITION_VARIABLE),
               "system_windows.h has the room of what it stands for");

static SRWLOCK *lock_of(mha_system_mutex *mutex) { return (SRWLOCK *)mutex; }
static CONDITION_VARIABLE *variable_of(mha_system_condition *condition) {
    return (CONDITION_VARIABLE *)condition;
}

void mha_system_begin_mutex(mha_system_mutex *mutex) { InitializeSRWLock(lock_of(mutex)); }
void mha_system_begin_condition(mha_system_condition *condition) {
    InitializeConditionVariable(variable_of(condition));
}

void mha_system_lock(mha_system_mutex *mutex) { AcquireSRWLockExclusive(lock_of(mutex)); }
bool mha_system_try_lock(mha_system_mutex *mutex) {
    return TryAcquireSRWLockExclusive(lock_of(mutex)) != 0;
}
void mha_system_unlock(mha_system_mutex *mutex) { ReleaseSRWLockExclusive(lock_of(mutex)); }

void mha_system_wait(mha_system_condition *condition, mha_system_mutex *mutex) {
    (void)SleepConditionVariableSRW(variable_of(condition), lock_of(mutex), INFINITE, 0);
}

void mha_system_wait_for(mha_system_condition *condition, mha_system_mutex *mutex,
                         int64_t nanoseconds) {
    const DWORD milliseconds = (DWORD)(nanoseconds / 1000000);
    (void)SleepConditionVariableSRW(variable_of(condition), lock_of(mutex), milliseconds, 0);
}

void mha_system_wake_all(mha_system_condition *condition) {
    WakeAllConditionVariable(variable_of(condition));
}

void mha_system_wake_one(mha_system_condition *condition) {
    WakeConditionVariable(variable_of(condition));
}

mha_system_thread mha_system_this_thread(void) { return GetCurrentThreadId(); }
bool mha_system_is_this_thread(mha_system_thread thread) { return GetCurrentThreadId() == thread; }

static DWORD WINAPI run_thread(void *run) {
    ((void (*)(void))(uintptr_t)run)();
    return 0;
}

/* Threads without an end need their code for as long: its library is not unloaded any more. */
static bool keep_library(void (*code)(void)) {
    HMODULE library;
    return GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN |
                                  GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                              (LPCWSTR)(uintptr_t)code, &library) != 0;
}

bool mha_system_start_thread(void (*run)(void)) {
    if (!keep_library(run)) {
        return false;
    }
    const HANDLE thread = CreateThread(NULL, 0, run_thread, (void *)(uintptr_t)run, 0, NULL);
    if (thread == NULL) {
        return false;
    }
    (void)CloseHandle(thread); /* the thread goes on */
    return true;
}

/* Windows has no fork. */
bool mha_system_set_fork_handler(void (*start_over)(void)) {
    (void)start_over;
    return true;
}

/* Those of the machine. */
static int all_cpus(void) { return (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS); }

/* A process in several groups of processors has no mask: it may use all of them. */
static int affinity_cpus(void) {
    DWORD_PTR of_process = 0, of_group = 0;
    (void)GetProcessAffinityMask(GetCurrentProcess(), &of_process, &of_group);
    return of_process == 0 ? all_cpus() : __builtin_popcountll(of_process);
}

/* What the job object of a container leaves of all CPUs, rounded up; 0 where there is no limit. */
static int job_cpus(void) {
    enum { WHOLE_RATE = 10000 };
    const DWORD hard = JOB_OBJECT_CPU_RATE_CONTROL_ENABLE | JOB_OBJECT_CPU_RATE_CONTROL_HARD_CAP;
    JOBOBJECT_CPU_RATE_CONTROL_INFORMATION limit = {0};
    if (!QueryInformationJobObject(NULL, JobObjectCpuRateControlInformation, &limit, sizeof limit,
                                   NULL) ||
        (limit.ControlFlags & hard) != hard) {
        return 0;
    }
    return (int)(((int64_t)limit.CpuRate * all_cpus() + WHOLE_RATE - 1) / WHOLE_RATE);
}

int mha_system_usable_cpus(void) {
    const int cpus = affinity_cpus(), limit = job_cpus();
    const int least = limit > 0 && limit < cpus ? limit : cpus;
    return least < 1 ? 1 : least;
}

void mha_system_yield(void) { (void)SwitchToThread(); }

/* In two parts: a product of the whole count would overflow in a day. */
int64_t mha_system_nanoseconds(void) {
    LARGE_INTEGER a_second, now;
    if (!QueryPerformanceFrequency(&a_second) || !QueryPerformanceCounter(&now)) {
        return 0;
    }
    const int64_t seconds = now.QuadPart / a_second.QuadPart;
    const int64_t rest = now.QuadPart % a_second.QuadPart;
    return seconds * 1000000000 + rest * 1000000000 / a_second.QuadPart;
}
