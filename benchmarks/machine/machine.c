#define _POSIX_C_SOURCE 200809L
#include "machine.h"

#include <string.h>
#include <time.h>

double machine_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Twelve independent chains of sum = sum * a + b: enough to hide the latency of an FMA. Each
 * function gets its instruction set by attribute, so that this file needs no flags. */
#define DEFINE_FMA_CHAINS(name, target_attribute, real, bytes)                                     \
    target_attribute static double name(long steps) {                                              \
        typedef real vector __attribute__((vector_size(bytes)));                                   \
        enum { LANES = bytes / sizeof(real) };                                                     \
        const vector a = (vector){} + (real)0.999, b = (vector){} + (real)0.001;                   \
        vector sums[12];                                                                           \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) { sums[i] = a * (real)i; }           \
        for (long step = 0; step < steps; step++) {                                                \
            _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) { sums[i] = sums[i] * a + b; }   \
        }                                                                                          \
        vector total = sums[0];                                                                    \
        _Pragma("GCC unroll 12") for (int i = 1; i < 12; i++) { total += sums[i]; }                \
        volatile real keep = total[0];                                                             \
        (void)keep;                                                                                \
        return (double)steps * 12 * LANES * 2;                                                     \
    }

#ifdef __x86_64__
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,prefer-vector-width=512")))
DEFINE_FMA_CHAINS(fma_float32_avx2, AVX2, float, 32)
DEFINE_FMA_CHAINS(fma_float64_avx2, AVX2, double, 32)
DEFINE_FMA_CHAINS(fma_float32_avx512, AVX512, float, 64)
DEFINE_FMA_CHAINS(fma_float64_avx512, AVX512, double, 64)
#endif
DEFINE_FMA_CHAINS(fma_float32_baseline, , float, 16)
DEFINE_FMA_CHAINS(fma_float64_baseline, , double, 16)

typedef double (*fma_chains)(long);

static fma_chains chains_for(const char *isa, int is_float64) {
#ifdef __x86_64__
    if (strcmp(isa, "avx512") == 0) {
        return is_float64 ? fma_float64_avx512 : fma_float32_avx512;
    }
    if (strcmp(isa, "avx2") == 0) {
        return is_float64 ? fma_float64_avx2 : fma_float32_avx2;
    }
#endif
    (void)isa;
    return is_float64 ? fma_float64_baseline : fma_float32_baseline;
}

double machine_fma_rate(const char *isa, int is_float64, double seconds) {
    const fma_chains run = chains_for(isa, is_float64);
    const double begin = machine_now();
    double operations = 0, elapsed = 0;
    do {
        operations += run(20000);
        elapsed = machine_now() - begin;
    } while (elapsed < seconds);
    return operations / elapsed;
}

typedef unsigned long long words __attribute__((vector_size(32), aligned(8)));

#ifdef __x86_64__
__attribute__((target("avx2")))
#endif
static unsigned long long read_once(const void *buffer, size_t bytes) {
    const words *from = buffer;
    words sums[8] = {{0}};
    for (size_t i = 0; i + 8 <= bytes / sizeof(words); i += 8) {
#pragma GCC unroll 8
        for (int part = 0; part < 8; part++) {
            sums[part] ^= from[i + (size_t)part];
        }
    }
    for (int part = 1; part < 8; part++) {
        sums[0] ^= sums[part];
    }
    return sums[0][0] ^ sums[0][1] ^ sums[0][2] ^ sums[0][3];
}

double machine_read_rate(const void *buffer, size_t bytes, double seconds) {
    volatile unsigned long long keep = read_once(buffer, bytes);
    const double begin = machine_now();
    double total = 0, elapsed = 0;
    do {
        keep ^= read_once(buffer, bytes);
        total += (double)bytes;
        elapsed = machine_now() - begin;
    } while (elapsed < seconds);
    return total / elapsed;
}
