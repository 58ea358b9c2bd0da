/* Arrays of another type than the arithmetic's: the attention kernel and packing once more,
 * compiled for bfloat16 arrays and float32 arithmetic, against float32 arrays of the same numbers.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MHA_REAL_IS_FLOAT32
#include "../../csrc/kernels/inline.h"
#include "../../csrc/kernels/simd_baseline.h"
#undef DTYPE
#define DTYPE bfloat16

/* In the place of storage.h. */
#define MHA_STORAGE_H
enum { STORAGE_IS_REAL = false };

typedef struct storage {
    uint16_t high; /* half of a float32 */
} storage;

INLINE real to_real(storage number) {
    const uint32_t pattern = (uint32_t)number.high << 16;
    real widened;
    memcpy(&widened, &pattern, sizeof widened);
    return widened;
}

/* To the nearest, ties to even. */
INLINE storage to_storage(real number) {
    uint32_t pattern;
    memcpy(&pattern, &number, sizeof pattern);
    const storage narrowed = {(uint16_t)((pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16)};
    return narrowed;
}

/* Of these kernels only attention's forward pass and packing read such arrays so far. */
#include "../../csrc/kernels/kernel_set.inc"

#include "check.h"

enum { QUERIES = 11, KEYS = 300, HEAD_DIM = 21, VALUE_HEAD_DIM = 9 };

static bool never(void *context) { return context != NULL; }

/* Numbers of bfloat16, in both types. */
static void fill(int64_t count, uint32_t seed, storage *narrow, float *wide) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        narrow[i] = to_storage((float)(int32_t)seed / 2147483648.0f);
        wide[i] = to_real(narrow[i]);
    }
}

static void test_attention(void) {
    static storage query[QUERIES * HEAD_DIM], key[KEYS * HEAD_DIM], value[KEYS * VALUE_HEAD_DIM];
    static storage output[QUERIES * VALUE_HEAD_DIM];
    static float wide_query[QUERIES * HEAD_DIM], wide_key[KEYS * HEAD_DIM];
    static float wide_value[KEYS * VALUE_HEAD_DIM], wide_output[QUERIES * VALUE_HEAD_DIM];
    mha_checkpoint checkpoint = {.should_stop = never};
    int64_t begin[QUERIES] = {0}, end[QUERIES];
    fill(QUERIES * HEAD_DIM, 1, query, wide_query);
    fill(KEYS * HEAD_DIM, 2, key, wide_key);
    fill(KEYS * VALUE_HEAD_DIM, 3, value, wide_value);
    for (int i = 0; i < QUERIES; i++) {
        end[i] = KEYS - 7 * i;
    }
    mha_attention_block block = {
        .checkpoint = &checkpoint,
        .query_len = QUERIES,
        .key_len = KEYS,
        .head_dim = HEAD_DIM,
        .value_head_dim = VALUE_HEAD_DIM,
        .query = query,
        .key = key,
        .value = value,
        .query_stride = HEAD_DIM,
        .key_stride = HEAD_DIM,
        .value_stride = VALUE_HEAD_DIM,
        .key_begin = begin,
        .key_end = end,
        .scores = {.scale = 0.3, .gate = 1},
        .output = output,
        .output_stride = VALUE_HEAD_DIM,
    };
    mha_attention_block wide = block;
    wide.query = wide_query;
    wide.key = wide_key;
    wide.value = wide_value;
    wide.output = wide_output;
    CHECK_OK(mha_choose_kernels("baseline"));
    const mha_attention_kernels *usual = mha_kernels_for(MHA_FLOAT32)->attention;
    void *memory = malloc(KERNEL(attention_scratch_size)(HEAD_DIM, VALUE_HEAD_DIM, 1));
    void *wide_memory = malloc(usual->scratch_size(HEAD_DIM, VALUE_HEAD_DIM, 1));
    KERNEL(attention)(&block, 1, memory);
    usual->forward(&wide, 1, wide_memory);
    for (int i = 0; i < QUERIES * VALUE_HEAD_DIM; i++) {
        CHECK(output[i].high == to_storage(wide_output[i]).high);
    }
    free(memory), free(wide_memory);
}

static void test_packing(void) {
    enum { IN = 30, OUT = 40 };
    static storage narrow[IN * OUT];
    static float wide[IN * OUT], first[IN * PANEL_COLUMNS], second[IN * PANEL_COLUMNS];
    mha_checkpoint checkpoint = {.should_stop = never};
    fill(IN * OUT, 4, narrow, wide);
    const mha_panel_format *usual = &mha_kernels_for(MHA_FLOAT32)->matmul->panels;
    for (int transposed = 0; transposed < 2; transposed++) {
        for (int64_t column = 0; column < OUT; column += PANEL_COLUMNS) {
            mha_weight weight = {.data = narrow,
                                 .in = IN,
                                 .out = OUT,
                                 .in_stride = transposed ? 2 : OUT * 2,
                                 .out_stride = transposed ? IN * 2 : 2};
            KERNEL(pack_panel)(&weight, column, first, &checkpoint);
            weight.data = wide;
            weight.in_stride *= 2;
            weight.out_stride *= 2;
            usual->pack(&weight, column, second, &checkpoint);
            CHECK(memcmp(first, second, sizeof first) == 0);
        }
    }
}

int main(void) {
    test_attention();
    test_packing();
    printf("test_storage: passed\n");
    return 0;
}
