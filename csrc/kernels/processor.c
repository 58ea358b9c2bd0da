/* Which kernel sets the processor can run. It is asked here: what __builtin_cpu_supports reads is
 * not filled in by every compiler's run-time library, and then the fast kernels would go unused. */
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* What the operating system keeps of the registers when it lets another thread run (XGETBV). */
enum {
    KEEPS_AVX = 1 << 1 | 1 << 2,
    KEEPS_AVX512 = KEEPS_AVX | 1 << 5 | 1 << 6 | 1 << 7,
};

/* All of these instructions (leaf 1 in ECX, leaf 7 in EBX), with their registers kept. */
static bool has(unsigned leaf1, unsigned leaf7, unsigned registers) {
    unsigned a, b, c, d, kept, upper;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (~c & (leaf1 | bit_OSXSAVE)) != 0) {
        return false;
    }
    __asm__ volatile("xgetbv" : "=a"(kept), "=d"(upper) : "c"(0));
    if ((~kept & registers) != 0) {
        return false;
    }
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (~b & leaf7) == 0;
}
#endif

bool mha_processor_runs(const char *set) {
#if defined(__x86_64__)
    if (strcmp(set, "avx2") == 0) {
        return has(bit_AVX | bit_FMA | bit_F16C, bit_AVX2, KEEPS_AVX);
    }
    if (strcmp(set, "avx512") == 0) {
        return has(bit_AVX | bit_FMA, bit_AVX512F | bit_AVX512DQ, KEEPS_AVX512);
    }
#endif
    return strcmp(set, "baseline") == 0 || strcmp(set, "neon") == 0;
}
