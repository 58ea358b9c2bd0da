/* The part of system.h that is Windows' own, without windows.h and its macros: an SRWLOCK and a
 * CONDITION_VARIABLE are a pointer each, zero at first. */
#ifndef MHA_SYSTEM_WINDOWS_H
#define MHA_SYSTEM_WINDOWS_H

typedef struct mha_system_mutex {
    void *state;
} mha_system_mutex;
typedef struct mha_system_condition {
    void *state;
} mha_system_condition;
typedef uint32_t mha_system_thread; /* its number */

#define MHA_SYSTEM_MUTEX {0}
#define MHA_SYSTEM_CONDITION {0}

void mha_system_begin_mutex(mha_system_mutex *mutex);
void mha_system_begin_condition(mha_system_condition *condition);

void mha_system_lock(mha_system_mutex *mutex);
bool mha_system_try_lock(mha_system_mutex *mutex);
void mha_system_unlock(mha_system_mutex *mutex);

void mha_system_wait(mha_system_condition *condition, mha_system_mutex *mutex);
void mha_system_wake_all(mha_system_condition *condition);
void mha_system_wake_one(mha_system_condition *condition);

mha_system_thread mha_system_this_thread(void);
bool mha_system_is_this_thread(mha_system_thread thread);

#endif
