/* Asked here, not by __builtin_cpu_supports: what it reads is in the compiler's library, and Zig's
 * says no to everything. */
#include "processor.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Bits of XCR0: the registers that the operating system keeps for each thread, of 16 and 32 bytes,
 * or those of 64 and masks, too. */
enum { REGISTERS_OF_AVX = 0x06, REGISTERS_OF_AVX512 = 0xE6 };

static bool has_registers(unsigned wanted) {
    unsigned a, b, c = 0, d, kept, unused;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) {
        return false;
    }
    __asm__ volatile("xgetbv" : "=a"(kept), "=d"(unused) : "c"(0));
    return (kept & wanted) == wanted;
}

static bool has_instructions(unsigned of_leaf_1, unsigned of_leaf_7) {
    unsigned a, b = 0, c = 0, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & of_leaf_1) != of_leaf_1) {
        return false;
    }
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & of_leaf_7) == of_leaf_7;
}
#endif

bool mha_processor_runs(const char *kernel_set) {
#if defined(__x86_64__)
    if (strcmp(kernel_set, "avx2") == 0) {
        return has_registers(REGISTERS_OF_AVX) && has_instructions(bit_FMA | bit_F16C, bit_AVX2);
    }
    if (strcmp(kernel_set, "avx512") == 0) {
        return has_registers(REGISTERS_OF_AVX512) &&
               has_instructions(bit_FMA, bit_AVX512F | bit_AVX512DQ);
    }
#endif
    return strcmp(kernel_set, "baseline") == 0 || strcmp(kernel_set, "neon") == 0;
}
