/* What the C tests share: a failing CHECK names its place and ends the program with status 1. */
#ifndef CHECK_H
#define CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <malloc.h>
#endif

#include "mha/mha.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s is false (%s)\n", __FILE__, __LINE__, #condition,                    \
                   mha_instruction_set());                                                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_OK(call) CHECK((call) == MHA_OK)

/* Memory for a workspace of `bytes`, NaN throughout: nobody may read what was not written. That of
 * Windows has functions of its own. */
static inline char *new_workspace(size_t bytes) {
    const size_t size = (bytes / MHA_WORKSPACE_ALIGNMENT + 1) * MHA_WORKSPACE_ALIGNMENT;
#ifdef _WIN32
    char *memory = _aligned_malloc(size, MHA_WORKSPACE_ALIGNMENT);
#else
    char *memory = aligned_alloc(MHA_WORKSPACE_ALIGNMENT, size);
#endif
    CHECK(memory != NULL);
    memset(memory, 0xFF, size);
    return memory;
}

static inline void free_workspace(char *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}

/* An execution with a workspace of `bytes`; free_workspace(execution.workspace.base) after use. */
static inline mha_execution execution_of(size_t bytes, int num_threads) {
    const mha_execution execution = {.num_threads = num_threads,
                                     .workspace = {.base = new_workspace(bytes), .size = bytes}};
    return execution;
}

static inline void project_together(const mha_linear_projection *projections, int count,
                                    int num_threads) {
    size_t bytes;
    CHECK_OK(mha_linear_projection_workspace(projections, count, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_linear_projection_forward(projections, count, &execution));
    free_workspace(execution.workspace.base);
}

static inline void project(const mha_linear_projection *projection, int num_threads) {
    project_together(projection, 1, num_threads);
}

/* Runs `test` on every kernel set of this machine. */
static inline void on_every_instruction_set(void (*test)(void)) {
    const char *name;
    for (int i = 0; (name = mha_available_instruction_set(i)) != NULL; i++) {
        CHECK_OK(mha_choose_kernels(name));
        test();
    }
}

/* Uniform in [-1, 1), the same sequence every time (Marsaglia's xorshift). */
static inline double next_random(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(int64_t)state / 9223372036854775808.0;
}

static inline void fill_random(void *data, int64_t count, mha_dtype dtype) {
    for (int64_t i = 0; i < count; i++) {
        const double value = next_random();
        if (dtype == MHA_FLOAT32) {
            ((float *)data)[i] = (float)value;
        } else {
            ((double *)data)[i] = value;
        }
    }
}

static inline double element(const void *data, int64_t index, mha_dtype dtype) {
    return dtype == MHA_FLOAT32 ? (double)((const float *)data)[index]
                                : ((const double *)data)[index];
}

#endif
