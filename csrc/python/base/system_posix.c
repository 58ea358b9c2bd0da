#define _GNU_SOURCE
#include "python/base/system.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/syscall.h>
#endif

static pthread_key_t key;
static bool key_works;

int mha_system_start(void (*free_kept)(void *kept)) {
    key_works = key_works || pthread_key_create(&key, free_kept) == 0;
    return 0; /* without a key nothing is kept */
}

void *mha_system_kept(void) { return key_works ? pthread_getspecific(key) : NULL; }

bool mha_system_keep(void *kept) { return key_works && pthread_setspecific(key, kept) == 0; }

bool mha_system_is_main_thread(void) {
#ifdef __linux__
    return syscall(SYS_gettid) == getpid();
#elif defined(__APPLE__)
    return pthread_main_np() != 0;
#else
    return true;
#endif
}

#ifdef CLOCK_MONOTONIC_COARSE /* a few milliseconds coarse, and read in as many nanoseconds */
#define POLL_CLOCK CLOCK_MONOTONIC_COARSE
#else
#define POLL_CLOCK CLOCK_MONOTONIC
#endif

int64_t mha_system_coarse_nanoseconds(void) {
    struct timespec now;
    if (clock_gettime(POLL_CLOCK, &now) != 0) {
        return 0;
    }
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Weights and workspaces of megabytes in pages of 2 MB, where the system has them for those who
 * ask: of 4 KB, a megabyte is 256 entries in the table of pages, and how fast a weight is read
 * differs from process to process by where its pages fell. */
enum { HUGE_PAGE = 2 << 20 };

void *mha_system_allocate(size_t bytes) {
    const size_t alignment = bytes < HUGE_PAGE ? MHA_WORKSPACE_ALIGNMENT : HUGE_PAGE;
    void *memory = NULL;
    if (posix_memalign(&memory, alignment, bytes) != 0) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_PAGE) {
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* refused, it is as it was */
    }
#endif
    return memory;
}

void mha_system_free(void *memory) { free(memory); }

void *mha_system_allocate_zeros(size_t count, size_t bytes) { return calloc(count, bytes); }

void *mha_system_reallocate(void *memory, size_t bytes) { return realloc(memory, bytes); }
