/* Chooses the kernel set once, at run time. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "mha/runtime.h"
#include "kernels/processor.h"

#define DECLARE_KERNELS(isa)                                                                       \
    extern const mha_kernels mha_kernels_float32_##isa, mha_kernels_float64_##isa
#define KERNELS(isa)                                                                               \
    {[MHA_FLOAT32] = &mha_kernels_float32_##isa, [MHA_FLOAT64] = &mha_kernels_float64_##isa}

DECLARE_KERNELS(baseline);
#if defined(__x86_64__)
DECLARE_KERNELS(avx2);
DECLARE_KERNELS(avx512);
#ifdef MHA_HAS_AMX
extern const mha_kernels mha_kernels_float32_amx; /* tiles have no doubles */
#endif
#elif defined(__aarch64__)
DECLARE_KERNELS(neon);
#endif

/* Slowest first. */
static const mha_kernel_set kernel_sets[] = {
    {"baseline", KERNELS(baseline), {NULL}},
#if defined(__x86_64__)
    {"avx2", KERNELS(avx2), {NULL}},
    {"avx512", KERNELS(avx512), KERNELS(avx2)},
#ifdef MHA_HAS_AMX
    {"amx",
     {[MHA_FLOAT32] = &mha_kernels_float32_amx, [MHA_FLOAT64] = &mha_kernels_float64_avx512},
     {NULL}},
#endif
#elif defined(__aarch64__)
    {"neon", KERNELS(neon), {NULL}},
#endif
};
enum { NUM_KERNEL_SETS = sizeof kernel_sets / sizeof kernel_sets[0] };

static _Atomic(const mha_kernel_set *) chosen;

const char *mha_available_instruction_set(int index) {
    for (int i = 0; i < NUM_KERNEL_SETS; i++) {
        if (mha_processor_runs(kernel_sets[i].name) && index-- == 0) {
            return kernel_sets[i].name;
        }
    }
    return NULL;
}

void mha_use_kernel_set(const mha_kernel_set *set) { atomic_store(&chosen, set); }

/* Whether `given` is the name of a set, which is in small letters, whatever its case. */
static bool is_name(const char *name, const char *given) {
    for (; *name != '\0'; name++, given++) {
        const char small = *given >= 'A' && *given <= 'Z' ? (char)(*given - 'A' + 'a') : *given;
        if (small != *name) {
            return false;
        }
    }
    return *given == '\0';
}

/* Its sums differ from those of the other sets with FMA, so it is for those who ask for it. */
static bool is_asked_for(const mha_kernel_set *set, const char *name) {
    return name == NULL ? strcmp(set->name, "amx") != 0 : is_name(set->name, name);
}

mha_status mha_choose_kernels(const char *name) {
    const mha_kernel_set *best = NULL;
    for (int i = 0; i < NUM_KERNEL_SETS; i++) {
        if (mha_processor_runs(kernel_sets[i].name) && is_asked_for(&kernel_sets[i], name)) {
            best = &kernel_sets[i];
        }
    }
    if (best == NULL || !mha_processor_lends(best->name)) {
        return MHA_INVALID_ARGUMENT;
    }
    mha_use_kernel_set(best);
    return MHA_OK;
}

/* A C program that never chose gets the best set, or the one in MHA_ISA where that can run. */
static const mha_kernel_set *current(void) {
    const mha_kernel_set *set = atomic_load(&chosen);
    if (set == NULL) {
        if (mha_choose_kernels(getenv("MHA_ISA")) != MHA_OK && mha_choose_kernels(NULL) != MHA_OK) {
            return &kernel_sets[0];
        }
        set = atomic_load(&chosen);
    }
    return set;
}

const char *mha_instruction_set(void) { return current()->name; }

const mha_kernels *mha_kernels_for(mha_dtype dtype) { return current()->of[dtype]; }

const mha_kernels *mha_kernels_for_lanes(mha_dtype dtype, int64_t rows) {
    const mha_kernel_set *set = current();
    const mha_kernels *half = set->of_half_the_lanes[dtype];
    return half != NULL && rows <= half->attention->query_lanes ? half : set->of[dtype];
}
