/* Arrays of float16 and bfloat16, on every kernel set: all numbers of both types, roundings of
 * float32 around every one of them, and attention over halves against attention over float32 arrays
 * of the same numbers, which gives the same bits, rounded. */
#include <stdbool.h>
#include <string.h>

#include "kernels/kernels.h"
#include "check.h"

static const mha_storage HALVES[] = {MHA_FLOAT16, MHA_BFLOAT16};

static uint32_t pattern_of(float number) {
    uint32_t pattern;
    memcpy(&pattern, &number, sizeof pattern);
    return pattern;
}

static float number_of(uint32_t pattern) {
    float number;
    memcpy(&number, &pattern, sizeof number);
    return number;
}

static bool is_nan_of(mha_storage storage, uint16_t half) {
    return (half & 0x7FFF) > (storage == MHA_FLOAT16 ? 0x7C00 : 0x7F80);
}

/* The number that a pattern stands for, by the definition of IEEE 754: 5 or 8 bits of exponent. */
static double value_of(mha_storage storage, uint16_t half) {
    const int mantissa_bits = storage == MHA_FLOAT16 ? 10 : 7;
    const int bias = storage == MHA_FLOAT16 ? 15 : 127;
    const int exponent = (half & 0x7FFF) >> mantissa_bits;
    const double sign = half & 0x8000 ? -1 : 1, mantissa = half & ((1 << mantissa_bits) - 1);
    if (exponent == 2 * bias + 1) {
        return sign * INFINITY;
    }
    const double leading = exponent == 0 ? 0 : 1 << mantissa_bits;
    return sign * ldexp(mantissa + leading, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
}

/* The nearest one, of two that are as near the even one; where infinity is a step further than the
 * largest number. `low` is the next one towards zero, and the magnitudes follow each other. */
static uint16_t rounded(mha_storage storage, float number, uint16_t low) {
    const double size = fabs((double)number), below = value_of(storage, low & 0x7FFF);
    const uint16_t high = (uint16_t)(low + 1);
    double above = value_of(storage, high & 0x7FFF);
    if (isinf(above)) {
        above = storage == MHA_FLOAT16 ? 65536 : ldexp(1, 128);
    }
    const double from_below = size - below, to_above = above - size;
    return from_below < to_above ? low : from_below > to_above ? high : low & 1 ? high : low;
}

static void check_written(mha_storage storage, float number, uint16_t wanted) {
    enum { MOST = 37 };
    const mha_elementwise_kernels *kernels = mha_kernels_for(MHA_FLOAT32)->elementwise;
    float numbers[MOST];
    uint16_t halves[MOST];
    for (int count = 1; count <= MOST; count += MOST - 1) { /* alone, and in vectors */
        for (int i = 0; i < count; i++) {
            numbers[i] = number;
        }
        kernels->write_row(numbers, halves, storage, count);
        for (int i = 0; i < count; i++) {
            CHECK(halves[i] == wanted);
        }
    }
}

static void test_conversions(void) {
    const mha_elementwise_kernels *kernels = mha_kernels_for(MHA_FLOAT32)->elementwise;
    static uint16_t all[1 << 16], back[1 << 16];
    static float numbers[1 << 16];
    for (int i = 0; i < 1 << 16; i++) {
        all[i] = (uint16_t)i;
    }
    for (int type = 0; type < 2; type++) {
        const mha_storage storage = HALVES[type];
        const int quiet = storage == MHA_FLOAT16 ? 0x200 : 0x40;
        const int shift = storage == MHA_FLOAT16 ? 13 : 16;
        kernels->read_row(all, storage, numbers, 1 << 16);
        kernels->write_row(numbers, back, storage, 1 << 16);
        for (int i = 0; i < 1 << 16; i++) {
            const uint16_t half = (uint16_t)i;
            if (is_nan_of(storage, half)) {
                CHECK(isnan(numbers[i]) && back[i] == (half | quiet));
                continue;
            }
            CHECK((double)numbers[i] == value_of(storage, half) && back[i] == half);
            CHECK((signbit(numbers[i]) != 0) == (half >> 15 == 1));
            if (isinf(numbers[i])) {
                continue;
            }
            /* Between this number and the next one: around both, and around the middle. */
            const double next = value_of(storage, (uint16_t)(half + 1));
            const double middle = isinf(next) ? (storage == MHA_FLOAT16 ? 65520 : 0)
                                              : (value_of(storage, half) + next) / 2;
            const uint32_t around[] = {pattern_of(numbers[i]),
                                       isinf(next) && storage == MHA_BFLOAT16
                                           ? pattern_of(numbers[i]) + (1u << (shift - 1))
                                           : pattern_of((float)middle) | (uint32_t)(half >> 15)
                                                                             << 31};
            for (int place = 0; place < 2; place++) {
                for (int off = place == 0 ? 0 : -1; off <= 1; off++) {
                    const float number = number_of(around[place] + (uint32_t)off);
                    check_written(storage, number, rounded(storage, number, half));
                }
            }
        }
        check_written(storage, number_of(0x7F800001), storage == MHA_FLOAT16 ? 0x7E00 : 0x7FC0);
        check_written(storage, -INFINITY, storage == MHA_FLOAT16 ? 0xFC00 : 0xFF80);
        check_written(storage, -number_of(1), 0x8000);
    }
    check_written(MHA_FLOAT16, 3.4e38f, 0x7C00);
    check_written(MHA_BFLOAT16, number_of(0x7F7FFFFF), 0x7F80);
}

enum { KEYS = 1300, MOST_QUERIES = 60, HEAD_DIM = 45, VALUE_HEAD_DIM = 37 };
enum { HEADS = 4, KV_HEADS = 2, BATCH = 2 };

static mha_tensor tensor_of(void *data, mha_storage storage, int64_t heads, int64_t rows,
                            int64_t columns) {
    const int64_t item = (int64_t)mha_storage_size(MHA_FLOAT32, storage);
    const mha_tensor tensor = {
        .data = data,
        .storage = storage,
        .axes = 4,
        .shape = {BATCH, heads, rows, columns},
        .strides = {heads * rows * columns * item, rows * columns * item, columns * item, item}};
    return tensor;
}

static void attend(const mha_attention *attention, int num_threads) {
    size_t bytes;
    CHECK_OK(mha_scaled_dot_product_attention_workspace(attention, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_scaled_dot_product_attention_forward(attention, &execution));
    free_workspace(execution.workspace.base);
}

static void test_attention_of(mha_storage storage, int64_t query_len, bool query_is_half) {
    enum {
        QUERY = BATCH * HEADS * MOST_QUERIES * HEAD_DIM,
        KEY = BATCH * KV_HEADS * KEYS * HEAD_DIM
    };
    enum { VALUE = BATCH * KV_HEADS * KEYS * VALUE_HEAD_DIM };
    enum { OUTPUT = BATCH * HEADS * MOST_QUERIES * VALUE_HEAD_DIM };
    static float query[QUERY], key[KEY], value[VALUE], output[OUTPUT];
    static uint16_t half_query[QUERY], half_key[KEY], half_value[VALUE], half_output[OUTPUT];
    static uint16_t wanted[OUTPUT];
    static float lse[BATCH * HEADS * MOST_QUERIES], half_lse[BATCH * HEADS * MOST_QUERIES];
    const mha_elementwise_kernels *kernels = mha_kernels_for(MHA_FLOAT32)->elementwise;
    float *const numbers[] = {query, key, value};
    uint16_t *const halves[] = {half_query, half_key, half_value};
    const int64_t counts[] = {QUERY, KEY, VALUE};
    for (int i = 0; i < 3; i++) {
        fill_random(numbers[i], counts[i], MHA_FLOAT32);
        kernels->write_row(numbers[i], halves[i], storage, counts[i]);
        kernels->read_row(halves[i], storage, numbers[i], counts[i]);
    }
    const mha_attention_options options = {.scale = 0.3,
                                           .causal = true,
                                           .window_left = MHA_UNLIMITED,
                                           .window_right = MHA_UNLIMITED,
                                           .query_offset = {0}};
    const mha_storage of_query = query_is_half ? storage : MHA_AS_COMPUTED;
    int64_t offset = KEYS - query_len;
    mha_attention_options placed = options;
    placed.query_offset = (mha_tensor){.data = &offset, .axes = 1, .shape = {BATCH}};
    mha_attention attention = {
        .dtype = MHA_FLOAT32,
        .batch_axes = 1,
        .query = tensor_of(query, MHA_AS_COMPUTED, HEADS, query_len, HEAD_DIM),
        .key = tensor_of(key, MHA_AS_COMPUTED, KV_HEADS, KEYS, HEAD_DIM),
        .value = tensor_of(value, MHA_AS_COMPUTED, KV_HEADS, KEYS, VALUE_HEAD_DIM),
        .output = tensor_of(output, MHA_AS_COMPUTED, HEADS, query_len, VALUE_HEAD_DIM),
        .lse = lse,
        .options = &placed,
    };
    attend(&attention, 1);
    const int64_t count = BATCH * HEADS * query_len * VALUE_HEAD_DIM;
    kernels->write_row(output, wanted, of_query, count * (query_is_half ? 1 : 0));
    attention.key = tensor_of(half_key, storage, KV_HEADS, KEYS, HEAD_DIM);
    attention.value = tensor_of(half_value, storage, KV_HEADS, KEYS, VALUE_HEAD_DIM);
    attention.lse = half_lse;
    static float second[OUTPUT];
    attention.output.data = second;
    if (query_is_half) {
        attention.query = tensor_of(half_query, storage, HEADS, query_len, HEAD_DIM);
        attention.output = tensor_of(half_output, storage, HEADS, query_len, VALUE_HEAD_DIM);
    }
    for (int threads = 1; threads <= 3; threads++) {
        attend(&attention, threads);
        CHECK(memcmp(lse, half_lse, (size_t)(BATCH * HEADS * query_len) * sizeof *lse) == 0);
        CHECK(query_is_half ? memcmp(half_output, wanted, (size_t)count * sizeof *wanted) == 0
                            : memcmp(second, output, (size_t)count * sizeof *output) == 0);
    }
}

static void test_attention(void) {
    static const int64_t lengths[] = {1, 3, 8, 9, 60};
    for (int type = 0; type < 2; type++) {
        for (int i = 0; i < 5; i++) {
            test_attention_of(HALVES[type], lengths[i], true);
            test_attention_of(HALVES[type], lengths[i], false);
        }
    }
}

int main(void) {
    on_every_instruction_set(test_conversions);
    on_every_instruction_set(test_attention);
    printf("test_half: passed\n");
    return 0;
}
