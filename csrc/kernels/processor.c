/* Asked here, not by __builtin_cpu_supports: what it reads is in the compiler's library, and Zig's
 * says no to everything. */
#ifdef __linux__
#define _DEFAULT_SOURCE /* syscall */
#endif

#include "kernels/processor.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef MHA_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Bits of XCR0: the registers that the operating system keeps for each thread, of 16 and 32 bytes,
 * or those of 64 and masks, too. */
enum { REGISTERS_OF_AVX = 0x06, REGISTERS_OF_AVX512 = 0xE6, REGISTERS_OF_AMX = 0x600E6 };

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

#ifdef MHA_HAS_AMX
/* Of arch_prctl: what can be asked for, and to be given it. Before a process asks, its threads have
 * no room for tiles, 8 KiB each; from then on a stack for signals has to hold them, too. */
enum { STATE_THAT_CAN_BE_ASKED_FOR = 0x1021, ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };

static bool has_tiles_of_bfloat16(void) {
    enum { BFLOAT16 = 1 << 22, TILES = 1 << 24 };
    unsigned a, b, c, d = 0;
    uint64_t state = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & BFLOAT16) != 0 &&
           (d & TILES) != 0 && has_registers(REGISTERS_OF_AMX) &&
           syscall(SYS_arch_prctl, STATE_THAT_CAN_BE_ASKED_FOR, &state) == 0 &&
           (state >> TILE_DATA & 1) != 0;
}
#endif
#endif

bool mha_processor_runs(const char *kernel_set) {
#if defined(__x86_64__)
    if (strcmp(kernel_set, "avx2") == 0) {
        return has_registers(REGISTERS_OF_AVX) && has_instructions(bit_FMA | bit_F16C, bit_AVX2);
    }
    if (strcmp(kernel_set, "avx512") == 0) {
        return mha_processor_runs("avx2") && has_registers(REGISTERS_OF_AVX512) &&
               has_instructions(bit_FMA, bit_AVX512F | bit_AVX512DQ);
    }
#ifdef MHA_HAS_AMX
    if (strcmp(kernel_set, "amx") == 0) {
        return mha_processor_runs("avx512") && has_tiles_of_bfloat16();
    }
#endif
#endif
    return strcmp(kernel_set, "baseline") == 0 || strcmp(kernel_set, "neon") == 0;
}

bool mha_processor_lends(const char *kernel_set) {
#ifdef MHA_HAS_AMX
    if (strcmp(kernel_set, "amx") == 0) {
        return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
    }
#endif
    (void)kernel_set;
    return true;
}
