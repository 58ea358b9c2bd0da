/* The floating-point control word of a thread: rounding mode, and whether denormal numbers count as
 * zero (as libraries built with -ffast-math set it for the whole process). Results must not depend
 * on the caller's, so it is the default while the core computes; whoever computes options for it
 * (a scale, numbers of another type) does so between enter and leave, too. */
#ifndef MHA_FLOAT_MODE_H
#define MHA_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
static inline uint64_t mha_float_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void mha_set_float_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
/* All exceptions masked; round to nearest, denormal numbers kept. The flags of what happened, the
 * lowest six bits, are no mode. */
static const uint64_t MHA_DEFAULT_FLOAT_MODE = 0x1F80, MHA_FLOAT_MODE_BITS = 0xFFC0;
#elif defined(__aarch64__)
static inline uint64_t mha_float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void mha_set_float_mode(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}
static const uint64_t MHA_DEFAULT_FLOAT_MODE = 0, MHA_FLOAT_MODE_BITS = 0x07FFFF07;
#else
static inline uint64_t mha_float_mode(void) { return 0; }
static inline void mha_set_float_mode(uint64_t mode) { (void)mode; }
static const uint64_t MHA_DEFAULT_FLOAT_MODE = 0, MHA_FLOAT_MODE_BITS = 0;
#endif

/* Sets the default, and returns what the mode was, for mha_leave_float_mode. */
static inline uint64_t mha_enter_float_mode(void) {
    const uint64_t mode = mha_float_mode();
    if ((mode & MHA_FLOAT_MODE_BITS) != MHA_DEFAULT_FLOAT_MODE) {
        mha_set_float_mode(MHA_DEFAULT_FLOAT_MODE);
    }
    return mode;
}

static inline void mha_leave_float_mode(uint64_t mode) {
    if ((mode & MHA_FLOAT_MODE_BITS) != MHA_DEFAULT_FLOAT_MODE) {
        mha_set_float_mode(mode);
    }
}

#endif
