/* Loaded before all else (LD_PRELOAD), it lets memory run out: while a thread is armed, its
 * allocations that are reached from the extension (one of whose frames is on the stack) are
 * counted, and those fail that were asked for. It also remembers which of them still live. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *memory);

enum failing { ONE, ALL_FROM, AT_RANDOM };

static uintptr_t extension_begin, extension_end;

#define OF_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))
OF_THREAD bool is_armed, is_inside;
OF_THREAD enum failing how;
OF_THREAD int64_t first_failing, reached, failed;
OF_THREAD uint64_t random_state;

/* Addresses that live, by linear probing. */
enum { SLOTS = 1 << 20 };
static uintptr_t living[SLOTS];
static int64_t number_living;
static atomic_flag lock = ATOMIC_FLAG_INIT;

static void enter(void) {
    while (atomic_flag_test_and_set(&lock)) {
    }
}

static void leave(void) { atomic_flag_clear(&lock); }

static size_t home_of(uintptr_t address) {
    return (size_t)((address >> 4) * 0x9e3779b97f4a7c15u >> 44) % SLOTS;
}

static void remember(void *memory) {
    if (memory == NULL) {
        return;
    }
    enter();
    size_t slot = home_of((uintptr_t)memory);
    while (living[slot] != 0) {
        slot = (slot + 1) % SLOTS;
    }
    living[slot] = (uintptr_t)memory;
    number_living++;
    leave();
}

/* Closes the gap by moving up those that had to step over it. */
static void forget(void *memory) {
    if (memory == NULL || number_living == 0) {
        return;
    }
    enter();
    size_t slot = home_of((uintptr_t)memory);
    while (living[slot] != 0 && living[slot] != (uintptr_t)memory) {
        slot = (slot + 1) % SLOTS;
    }
    if (living[slot] != 0) {
        number_living--;
        size_t gap = slot;
        for (size_t next = (gap + 1) % SLOTS; living[next] != 0; next = (next + 1) % SLOTS) {
            const size_t distance = (next - home_of(living[next]) + SLOTS) % SLOTS;
            if (distance >= (next - gap + SLOTS) % SLOTS) {
                living[gap] = living[next];
                gap = next;
            }
        }
        living[gap] = 0;
    }
    leave();
}

static bool is_reached_from_extension(void) {
    void *frames[128];
    const int count = backtrace(frames, 128);
    for (int i = 0; i < count; i++) {
        const uintptr_t at = (uintptr_t)frames[i];
        if (at >= extension_begin && at < extension_end) {
            return true;
        }
    }
    return false;
}

/* xorshift64 (Marsaglia 2003): every eighth fails. */
static bool is_unlucky(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 61 == 0;
}

/* Whether this allocation counts, and then whether it fails. */
static bool counts(bool *fails) {
    *fails = false;
    if (!is_armed || is_inside) {
        return false;
    }
    is_inside = true;
    const bool counted = is_reached_from_extension();
    if (counted) {
        const int64_t number = reached++;
        *fails = how == ONE        ? number == first_failing
                 : how == ALL_FROM ? number >= first_failing
                                   : is_unlucky();
        failed += *fails;
    }
    is_inside = false;
    if (*fails) {
        errno = ENOMEM;
    }
    return counted;
}

void *malloc(size_t bytes) {
    bool fails;
    const bool counted = counts(&fails);
    void *memory = fails ? NULL : __libc_malloc(bytes);
    if (counted) {
        remember(memory);
    }
    return memory;
}

void *calloc(size_t count, size_t bytes) {
    bool fails;
    const bool counted = counts(&fails);
    void *memory = fails ? NULL : __libc_calloc(count, bytes);
    if (counted) {
        remember(memory);
    }
    return memory;
}

void *realloc(void *memory, size_t bytes) {
    bool fails;
    const bool counted = counts(&fails);
    if (fails) {
        return NULL;
    }
    forget(memory);
    void *moved = __libc_realloc(memory, bytes);
    if (counted) {
        remember(moved);
    }
    return moved;
}

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    bool fails;
    const bool counted = counts(&fails);
    void *found = fails ? NULL : __libc_memalign(alignment, bytes);
    if (found == NULL) {
        return ENOMEM;
    }
    if (counted) {
        remember(found);
    }
    *memory = found;
    return 0;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

void free(void *memory) {
    forget(memory);
    __libc_free(memory);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *argument) {
    static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    bool fails;
    (void)counts(&fails);
    if (create == NULL) {
        *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    }
    return fails ? EAGAIN : create(thread, attributes, start, argument);
}

/* The first backtrace loads a library, which allocates. */
__attribute__((constructor)) static void prepare(void) {
    void *frame;
    (void)backtrace(&frame, 1);
}

void failing_memory_of(uintptr_t begin, uintptr_t end) {
    extension_begin = begin;
    extension_end = end;
}

/* From now on allocation number `first` of this thread fails, or all from it on, or some. */
void failing_memory_arm(int which, int64_t first) {
    how = (enum failing)which;
    first_failing = first;
    reached = failed = 0;
    random_state = (uint64_t)first * 0x9e3779b97f4a7c15u + 1;
    is_armed = true;
}

/* The number of allocations that were reached. */
int64_t failing_memory_disarm(void) {
    is_armed = false;
    return reached;
}

int64_t failing_memory_failed(void) { return failed; }
int64_t failing_memory_living(void) { return number_living; }
