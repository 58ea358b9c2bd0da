/* The steps of the figure through the C API, against loops in double. */
#include <stdbool.h>
#include <string.h>

#include "check.h"

static void *random_array(int64_t count, mha_dtype dtype) {
    void *data = malloc((size_t)count * mha_dtype_size(dtype) + 1);
    CHECK(data != NULL);
    fill_random(data, count, dtype);
    return data;
}

static double tolerance(mha_dtype dtype) { return dtype == MHA_FLOAT32 ? 2e-6 : 1e-13; }

static mha_weight weight_of(const void *data, int64_t in, int64_t out, mha_dtype dtype) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    const mha_weight weight = {
        .data = data, .in = in, .out = out, .in_stride = out * item, .out_stride = item};
    return weight;
}

/* Strided, packed and threaded give the same bits, and all agree with the loop. */
static void check_projection(mha_dtype dtype, int64_t rows, int64_t in, int64_t out) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    void *x = random_array(rows * in, dtype), *w = random_array(in * out, dtype);
    void *bias = random_array(out, dtype), *first = random_array(rows * out, dtype);
    void *second = random_array(rows * out, dtype), *packed;
    size_t packed_size;
    mha_linear_projection projection = {.dtype = dtype,
                                        .rows = rows,
                                        .x = x,
                                        .x_stride = in * item,
                                        .weight = weight_of(w, in, out, dtype),
                                        .bias = bias,
                                        .output = first,
                                        .output_stride = out * item};
    project(&projection, 1);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t column = 0; column < out; column++) {
            double sum = element(bias, column, dtype);
            for (int64_t k = 0; k < in; k++) {
                sum += element(x, row * in + k, dtype) * element(w, k * out + column, dtype);
            }
            CHECK(fabs(element(first, row * out + column, dtype) - sum) <=
                  tolerance(dtype) * (1 + sqrt((double)in)));
        }
    }
    CHECK_OK(mha_packed_weight_size(dtype, in, out, &packed_size));
    packed = malloc(packed_size + 1);
    const mha_weight_packing packing = {dtype, projection.weight, packed};
    mha_execution three_threads = {.num_threads = 3};
    CHECK_OK(mha_pack_weight(&packing, &three_threads));
    projection.weight = mha_packed_weight(&packing);
    projection.output = second;
    project(&projection, 3);
    CHECK(memcmp(first, second, (size_t)(rows * out * item)) == 0);
    free(x), free(w), free(bias), free(first), free(second), free(packed);
}

/* Rows of halves give the numbers of float32, rounded once. */
static void check_projection_of_halves(mha_storage storage, int64_t rows, int64_t in, int64_t out) {
    float *x = random_array(rows * in, MHA_FLOAT32), *w = random_array(in * out, MHA_FLOAT32);
    float *numbers = random_array(rows * out, MHA_FLOAT32);
    uint16_t *halves = malloc((size_t)(rows * in + 1) * sizeof *halves);
    uint16_t *wanted = malloc((size_t)(rows * out + 1) * sizeof *wanted);
    uint16_t *got = malloc((size_t)(rows * out + 1) * sizeof *got);
    const mha_weight weight = weight_of(w, in, out, MHA_FLOAT32);
    mha_round_numbers(x, halves, storage, rows * in);
    mha_widen_numbers(halves, storage, x, rows * in);
    mha_linear_projection projection =
        mha_contiguous_projection(MHA_FLOAT32, x, rows, &weight, NULL, numbers);
    project(&projection, 1);
    mha_round_numbers(numbers, wanted, storage, rows * out);
    projection.x = halves;
    projection = mha_with_stored_rows(projection, storage);
    projection.output = got;
    projection.output_storage = storage;
    projection.output_stride = out * (int64_t)sizeof *got;
    project(&projection, 3);
    CHECK(memcmp(got, wanted, (size_t)(rows * out) * sizeof *got) == 0);
    free(x), free(w), free(numbers), free(halves), free(wanted), free(got);
}

static void test_linear_projection(void) {
    static const int64_t sizes[] = {1, 5, 12, 33, 100};
    for (mha_dtype dtype = MHA_FLOAT32; dtype <= MHA_FLOAT64; dtype++) {
        for (int i = 0; i < 5; i++) {
            check_projection(dtype, sizes[i], 300, sizes[4 - i]);
            check_projection(dtype, sizes[i], sizes[4 - i], 70);
        }
        check_projection(dtype, 400, 20, 40);
    }
    for (mha_storage storage = MHA_FLOAT16; storage <= MHA_BFLOAT16; storage++) {
        for (int i = 0; i < 5; i++) {
            check_projection_of_halves(storage, sizes[i], 300, sizes[4 - i]);
        }
        check_projection_of_halves(storage, 400, 20, 40);
    }
}

static void test_heads(void) {
    float x[2 * 3 * 8], merged[2 * 3 * 8];
    fill_random(x, 48, MHA_FLOAT32);
    const mha_tensor whole = {.data = x, .axes = 3, .shape = {2, 3, 8}, .strides = {96, 32, 4}};
    mha_tensor heads;
    mha_split_heads(&whole, 4, &heads);
    CHECK(heads.axes == 4 && heads.shape[1] == 4 && heads.shape[2] == 3 && heads.shape[3] == 2);
    CHECK(heads.strides[1] == 8 && heads.strides[2] == 32 && heads.strides[3] == 4);
    const mha_merge_heads merge = {MHA_FLOAT32, heads, merged};
    mha_execution one_thread = {.num_threads = 1};
    CHECK_OK(mha_merge_heads_forward(&merge, &one_thread));
    CHECK(memcmp(x, merged, sizeof x) == 0);
}

/* One head in double: scores, softmax over visible keys, weighted sum. */
static void attend_in_double(mha_dtype dtype, const void *query, const void *key, const void *value,
                             int64_t query_len, int64_t key_len, int64_t dim, bool causal,
                             double *output) {
    double weights[512];
    for (int64_t i = 0; i < query_len; i++) {
        const int64_t visible = causal ? i + 1 + key_len - query_len : key_len;
        double largest = -INFINITY, total = 0;
        for (int64_t j = 0; j < visible; j++) {
            weights[j] = 0;
            for (int64_t c = 0; c < dim; c++) {
                weights[j] += element(query, i * dim + c, dtype) * element(key, j * dim + c, dtype);
            }
            weights[j] /= sqrt((double)dim);
            largest = fmax(largest, weights[j]);
        }
        for (int64_t j = 0; j < visible; j++) {
            weights[j] = exp(weights[j] - largest);
            total += weights[j];
        }
        for (int64_t c = 0; c < dim; c++) {
            double sum = 0;
            for (int64_t j = 0; j < visible; j++) {
                sum += weights[j] * element(value, j * dim + c, dtype);
            }
            output[i * dim + c] = total == 0 ? 0 : sum / total;
        }
    }
}

static mha_tensor one_head(void *data, int64_t length, int64_t dim, mha_dtype dtype) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    const mha_tensor tensor = {.data = data,
                               .axes = 3,
                               .shape = {1, length, dim},
                               .strides = {length * dim * item, dim * item, item}};
    return tensor;
}

static void check_attention(mha_dtype dtype, int64_t query_len, int64_t key_len, int64_t dim,
                            bool causal) {
    void *query = random_array(query_len * dim, dtype), *key = random_array(key_len * dim, dtype);
    void *value = random_array(key_len * dim, dtype),
         *output = random_array(query_len * dim, dtype);
    double *expected = malloc((size_t)(query_len * dim) * sizeof *expected + 1);
    int64_t offset = key_len - query_len;
    size_t bytes;
    const mha_attention_options options = {.causal = causal,
                                           .window_left = MHA_UNLIMITED,
                                           .window_right = MHA_UNLIMITED,
                                           .scale = 1 / sqrt((double)dim),
                                           .query_offset = {.data = &offset, .axes = 0}};
    mha_attention attention = {.dtype = dtype,
                               .query = one_head(query, query_len, dim, dtype),
                               .key = one_head(key, key_len, dim, dtype),
                               .value = one_head(value, key_len, dim, dtype),
                               .output = one_head(output, query_len, dim, dtype),
                               .options = &options};
    CHECK_OK(mha_scaled_dot_product_attention_workspace(&attention, 2, &bytes));
    mha_execution execution = execution_of(bytes, 2);
    CHECK_OK(mha_scaled_dot_product_attention_forward(&attention, &execution));
    attend_in_double(dtype, query, key, value, query_len, key_len, dim, causal, expected);
    for (int64_t i = 0; i < query_len * dim; i++) {
        CHECK(fabs(element(output, i, dtype) - expected[i]) <= tolerance(dtype));
    }
    execution.workspace.size = bytes / 2;
    execution.workspace.used = 0;
    CHECK(mha_scaled_dot_product_attention_forward(&attention, &execution) == MHA_OUT_OF_MEMORY);
    free_workspace(execution.workspace.base);
    free(query), free(key), free(value), free(output), free(expected);
}

static void test_scaled_dot_product_attention(void) {
    static const int64_t lengths[] = {1, 7, 24, 65, 129, 300};
    for (mha_dtype dtype = MHA_FLOAT32; dtype <= MHA_FLOAT64; dtype++) {
        for (int i = 0; i < 6; i++) {
            for (int j = 0; j < 6; j++) {
                check_attention(dtype, lengths[i], lengths[j], 16, false);
                check_attention(dtype, lengths[i], lengths[j], 33, true);
            }
        }
    }
}

/* Many sequences with packed weights, which are taken in groups: each is as if alone, and the
 * workspace of more of them is no larger. */
static void check_sequences(mha_multi_head_attention layer, const double *x, int64_t numbers,
                            const double *expected) {
    enum { SEQUENCES = 43 };
    double *many = malloc((size_t)(SEQUENCES * numbers) * sizeof *many);
    double *output = malloc((size_t)(SEQUENCES * numbers) * sizeof *output);
    size_t packed_size, bytes, bytes_of_more;
    CHECK_OK(mha_packed_weight_size(MHA_FLOAT64, layer.W_q.in, layer.W_q.out, &packed_size));
    void *packed = malloc(packed_size);
    CHECK(many != NULL && output != NULL && packed != NULL);
    const mha_weight_packing packing = {MHA_FLOAT64, layer.W_q, packed};
    mha_execution one_thread = {.num_threads = 1};
    CHECK_OK(mha_pack_weight(&packing, &one_thread));
    for (int64_t i = 0; i < SEQUENCES * numbers; i++) {
        many[i] = x[i % numbers];
    }
    layer.W_q = layer.W_k = layer.W_v = layer.W_o = mha_packed_weight(&packing);
    layer.query = layer.key = layer.value = many;
    layer.output = output;
    layer.batch_shape[0] = 10 * SEQUENCES;
    CHECK_OK(mha_multi_head_attention_workspace(&layer, 1, &bytes_of_more));
    layer.batch_shape[0] = SEQUENCES;
    CHECK_OK(mha_multi_head_attention_workspace(&layer, 1, &bytes));
    CHECK(bytes == bytes_of_more);
    mha_execution execution = execution_of(bytes, 1);
    CHECK_OK(mha_multi_head_attention_forward(&layer, &execution));
    for (int64_t i = 0; i < SEQUENCES * numbers; i++) {
        CHECK(fabs(output[i] - expected[i % numbers]) < 1e-13);
    }
    free_workspace(execution.workspace.base);
    free(packed);
    free(output);
    free(many);
}

/* With identity weights and one head the whole figure is plain attention. */
static void test_multi_head_attention(void) {
    enum { LENGTH = 20, DIM = 8 };
    double x[LENGTH * DIM], identity[DIM * DIM] = {0}, output[LENGTH * DIM], expected[LENGTH * DIM];
    int64_t offset = 0;
    size_t bytes;
    fill_random(x, LENGTH * DIM, MHA_FLOAT64);
    for (int i = 0; i < DIM; i++) {
        identity[i * DIM + i] = 1;
    }
    const mha_weight weight = weight_of(identity, DIM, DIM, MHA_FLOAT64);
    const mha_attention_options options = {
        .window_left = MHA_UNLIMITED,
        .window_right = MHA_UNLIMITED,
        .scale = 1 / sqrt(DIM),
        .query_offset = {.data = &offset, .axes = 1, .shape = {1}}};
    const mha_multi_head_attention layer = {.dtype = MHA_FLOAT64,
                                            .batch_axes = 1,
                                            .batch_shape = {1},
                                            .query_len = LENGTH,
                                            .key_len = LENGTH,
                                            .num_heads = 1,
                                            .num_kv_heads = 1,
                                            .query = x,
                                            .key = x,
                                            .value = x,
                                            .W_q = weight,
                                            .W_k = weight,
                                            .W_v = weight,
                                            .W_o = weight,
                                            .options = &options,
                                            .output = output};
    CHECK_OK(mha_multi_head_attention_workspace(&layer, 1, &bytes));
    mha_execution execution = execution_of(bytes, 1);
    CHECK_OK(mha_multi_head_attention_forward(&layer, &execution));
    attend_in_double(MHA_FLOAT64, x, x, x, LENGTH, LENGTH, DIM, false, expected);
    for (int i = 0; i < LENGTH * DIM; i++) {
        CHECK(fabs(output[i] - expected[i]) < 1e-13);
    }
    free_workspace(execution.workspace.base);
    check_sequences(layer, x, LENGTH * DIM, expected);
}

static void test_sizes(void) {
    const int64_t huge[] = {INT64_MAX, 2}, empty[] = {INT64_MAX, 2, 0};
    int64_t count;
    size_t bytes;
    CHECK(mha_count_elements(huge, 2, &count) == MHA_SIZE_OVERFLOW);
    CHECK(mha_count_elements(empty, 3, &count) == MHA_OK && count == 0);
    CHECK(mha_packed_weight_size(MHA_FLOAT32, INT64_MAX, INT64_MAX, &bytes) == MHA_SIZE_OVERFLOW);
    mha_workspace counting = {.measures = true};
    void *piece;
    CHECK_OK(mha_workspace_take(&counting, SIZE_MAX - 1000, &piece));
    CHECK(mha_workspace_take(&counting, 2000, &piece) == MHA_SIZE_OVERFLOW);
    CHECK(mha_choose_kernels("abacus") == MHA_INVALID_ARGUMENT);
}

int main(void) {
    test_sizes();
    test_heads();
    on_every_instruction_set(test_linear_projection);
    on_every_instruction_set(test_scaled_dot_product_attention);
    on_every_instruction_set(test_multi_head_attention);
    puts("test_steps: passed");
    return 0;
}
