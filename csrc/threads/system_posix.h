/* The part of system.h that is POSIX's own: locks as they are. */
#ifndef MHA_SYSTEM_POSIX_H
#define MHA_SYSTEM_POSIX_H

#include <pthread.h>
#include <stddef.h>

typedef pthread_mutex_t mha_system_mutex;
typedef pthread_cond_t mha_system_condition;
typedef pthread_t mha_system_thread;

#define MHA_SYSTEM_MUTEX PTHREAD_MUTEX_INITIALIZER
#define MHA_SYSTEM_CONDITION PTHREAD_COND_INITIALIZER

/* Of default kind, neither can fail to start. */
static inline void mha_system_begin_mutex(mha_system_mutex *mutex) {
    (void)pthread_mutex_init(mutex, NULL);
}
static inline void mha_system_begin_condition(mha_system_condition *condition) {
    (void)pthread_cond_init(condition, NULL);
}

static inline void mha_system_lock(mha_system_mutex *mutex) { pthread_mutex_lock(mutex); }
static inline bool mha_system_try_lock(mha_system_mutex *mutex) {
    return pthread_mutex_trylock(mutex) == 0;
}
static inline void mha_system_unlock(mha_system_mutex *mutex) { pthread_mutex_unlock(mutex); }

static inline void mha_system_wait(mha_system_condition *condition, mha_system_mutex *mutex) {
    pthread_cond_wait(condition, mutex);
}
static inline void mha_system_wake_all(mha_system_condition *condition) {
    pthread_cond_broadcast(condition);
}
static inline void mha_system_wake_one(mha_system_condition *condition) {
    pthread_cond_signal(condition);
}

static inline mha_system_thread mha_system_this_thread(void) { return pthread_self(); }
static inline bool mha_system_is_this_thread(mha_system_thread thread) {
    return pthread_equal(pthread_self(), thread) != 0;
}

#endif
