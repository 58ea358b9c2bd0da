/* Keys that are seen though the window has left them behind, on every kernel set: the bits of a
 * mask that says the same, and of an array that lacks the keys between. */
#include <stdbool.h>

#include "check.h"

enum {
    HEADS = 4,
    KV_HEADS = 2,
    KEYS = 900,
    HEAD_DIM = 20,
    VALUE_HEAD_DIM = 7,
    MOST_QUERIES = 60,
    KEEP_FIRST = 5,
    KEPT = 128,
    LEFT = 150
};

static double query[HEADS * MOST_QUERIES * HEAD_DIM], key[KV_HEADS * KEYS * HEAD_DIM];
static double value[KV_HEADS * KEYS * VALUE_HEAD_DIM], slopes[HEADS];
static double wanted[HEADS * MOST_QUERIES * VALUE_HEAD_DIM];
static double output[HEADS * MOST_QUERIES * VALUE_HEAD_DIM];
static uint8_t mask[MOST_QUERIES * KEYS];

/* (heads, rows, columns), of which `data` has `stored` rows a head. */
static mha_tensor tensor_of(void *data, int64_t heads, int64_t rows, int64_t stored,
                            int64_t columns, mha_dtype dtype) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    return (mha_tensor){.data = data,
                        .axes = 3,
                        .shape = {heads, rows, columns},
                        .strides = {stored * columns * item, columns * item, item}};
}

static void attend(const mha_attention *attention, int num_threads) {
    size_t bytes;
    CHECK_OK(mha_scaled_dot_product_attention_workspace(attention, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_scaled_dot_product_attention_forward(attention, &execution));
    free_workspace(execution.workspace.base);
}

/* Moves the keys from first_key on right behind the kept ones. */
static void drop(void *data, int64_t columns, int64_t first_key, mha_dtype dtype) {
    const int64_t row = columns * (int64_t)mha_dtype_size(dtype);
    for (int64_t head = 0; head < KV_HEADS; head++) {
        char *of_head = (char *)data + head * KEYS * row;
        memmove(of_head + KEPT * row, of_head + first_key * row,
                (size_t)((KEYS - first_key) * row));
    }
}

static void test_rows(mha_dtype dtype, int64_t query_len, bool has_slopes) {
    int64_t offset = KEYS - query_len;
    mha_attention_options options = {.causal = true,
                                     .window_left = MHA_UNLIMITED,
                                     .window_right = MHA_UNLIMITED,
                                     .scale = 0.3,
                                     .query_offset = {.data = &offset}};
    mha_attention attention = {
        .dtype = dtype,
        .query = tensor_of(query, HEADS, query_len, query_len, HEAD_DIM, dtype),
        .key = tensor_of(key, KV_HEADS, KEYS, KEYS, HEAD_DIM, dtype),
        .value = tensor_of(value, KV_HEADS, KEYS, KEYS, VALUE_HEAD_DIM, dtype),
        .output = tensor_of(wanted, HEADS, query_len, query_len, VALUE_HEAD_DIM, dtype),
        .options = &options};
    fill_random(query, HEADS * query_len * HEAD_DIM, dtype);
    fill_random(key, KV_HEADS * KEYS * HEAD_DIM, dtype);
    fill_random(value, KV_HEADS * KEYS * VALUE_HEAD_DIM, dtype);
    fill_random(slopes, HEADS, dtype);
    for (int64_t i = 0; i < query_len; i++) {
        for (int64_t j = 0; j < KEYS; j++) {
            mask[i * KEYS + j] = j < KEEP_FIRST || j >= i + offset - LEFT;
        }
    }
    if (has_slopes) {
        options.alibi = (mha_head_numbers){slopes, 1, (int64_t)mha_dtype_size(dtype)};
    }
    options.mask = (mha_tensor){
        .data = mask, .axes = 3, .shape = {HEADS, query_len, KEYS}, .strides = {0, KEYS, 1}};
    attend(&attention, 1);
    const size_t bytes = (size_t)(HEADS * query_len * VALUE_HEAD_DIM) * mha_dtype_size(dtype);
    options.mask = (mha_tensor){.data = NULL};
    options.window_left = LEFT;
    options.keep_first = KEEP_FIRST;
    attention.output.data = output;
    for (int threads = 1; threads <= 3; threads++) {
        attend(&attention, threads);
        CHECK(memcmp(output, wanted, bytes) == 0);
    }
    const int64_t first_key = (offset - LEFT) / 128 * 128;
    drop(key, HEAD_DIM, first_key, dtype);
    drop(value, VALUE_HEAD_DIM, first_key, dtype);
    options.dropped = first_key - KEPT;
    offset -= options.dropped;
    attention.key = tensor_of(key, KV_HEADS, KEYS - options.dropped, KEYS, HEAD_DIM, dtype);
    attention.value =
        tensor_of(value, KV_HEADS, KEYS - options.dropped, KEYS, VALUE_HEAD_DIM, dtype);
    for (int threads = 1; threads <= 3; threads++) {
        attend(&attention, threads);
        CHECK(memcmp(output, wanted, bytes) == 0);
    }
}

static void test_all(void) {
    static const int64_t lengths[] = {1, 3, 8, 9, MOST_QUERIES};
    for (int i = 0; i < 5; i++) {
        test_rows(MHA_FLOAT32, lengths[i], i % 2 == 0);
        test_rows(MHA_FLOAT32, lengths[i], i % 2 == 1);
        test_rows(MHA_FLOAT64, lengths[i], true);
    }
}

int main(void) {
    on_every_instruction_set(test_all);
    printf("test_keep_first: passed\n");
    return 0;
}
