/* Products of matrices on every kernel set, against sums in double: numbers of any size, infinity
 * and NaN, and a row that has the same bits alone and among others. */
#include <float.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"

typedef struct matrices {
    int64_t rows, in, out;
    float *x, *w, *bias, *output;
} matrices;

static float *new_numbers(int64_t count) {
    float *numbers = malloc((size_t)count * sizeof *numbers);
    CHECK(numbers != NULL);
    fill_random(numbers, count, MHA_FLOAT32);
    return numbers;
}

static matrices new_matrices(int64_t rows, int64_t in, int64_t out) {
    const matrices m = {rows,
                        in,
                        out,
                        new_numbers(rows * in),
                        new_numbers(in * out),
                        new_numbers(out),
                        new_numbers(rows * out)};
    return m;
}

static void free_matrices(matrices *m) { free(m->x), free(m->w), free(m->bias), free(m->output); }

static mha_linear_projection projection_of(const matrices *m) {
    const mha_weight weight = {.data = m->w,
                               .in = m->in,
                               .out = m->out,
                               .in_stride = m->out * (int64_t)sizeof(float),
                               .out_stride = (int64_t)sizeof(float)};
    return mha_contiguous_projection(MHA_FLOAT32, m->x, m->rows, &weight, m->bias, m->output);
}

static void scale(float *numbers, int64_t count, float by) {
    for (int64_t i = 0; i < count; i++) {
        numbers[i] *= by;
    }
}

/* Each number of the output, within a few roundings of the terms of its sum; what is not finite in
 * the loop is the same in the output. `smallest` is what the least numbers may be off by. */
static void check_output(const matrices *m, double smallest) {
    for (int64_t row = 0; row < m->rows; row++) {
        for (int64_t column = 0; column < m->out; column++) {
            double sum = m->bias[column], size = fabs(sum); /* of the finite terms */
            for (int64_t k = 0; k < m->in; k++) {
                const double term = (double)m->x[row * m->in + k] * m->w[k * m->out + column];
                sum += term;
                size += isfinite(term) ? fabs(term) : 0;
            }
            const float got = m->output[row * m->out + column];
            if (isnan(sum)) {
                CHECK(isnan(got));
            } else if (size > FLT_MAX) { /* its parts may be infinite, too */
                CHECK(!isfinite(got) || fabs(sum) <= FLT_MAX);
            } else if (isinf(sum)) {
                CHECK(isinf(got) && (got > 0) == (sum > 0));
            } else {
                CHECK(fabs(got - sum) <= 4 * FLT_EPSILON * size + smallest);
            }
        }
    }
}

static void test_numbers_of_any_size(void) {
    static const float of_x[] = {1, 1e-38f, 1e-30f, 1e30f, 1e-20f, 1, 1e5f, 1e38f},
                       of_w[] = {1, 1, 1e-6f, 1e6f, 1e-17f, 1e-38f, 1e-42f, 1e-38f};
    for (size_t i = 0; i < sizeof of_x / sizeof *of_x; i++) {
        matrices m = new_matrices(37, 150, 70);
        const mha_linear_projection projection = projection_of(&m);
        scale(m.x, 37 * 150, of_x[i]);
        scale(m.w, 150 * 70, of_w[i]);
        scale(m.bias, 70, of_x[i] * of_w[i]);
        project(&projection, 2);
        check_output(&m, 150 * FLT_TRUE_MIN);
        free_matrices(&m);
    }
}

/* What a row or a column has that is not finite stays in it, and zeros times it are NaN. The
 * largest number is finite in all its parts. */
static void test_numbers_that_are_not_finite(void) {
    const uint32_t nan_of_the_last_bit = 0x7F800001;
    matrices m = new_matrices(40, 130, 140);
    const mha_linear_projection projection = projection_of(&m);
    m.x[3 * 130 + 7] = INFINITY;
    m.x[4 * 130 + 129] = -INFINITY;
    m.x[5 * 130] = NAN;
    m.x[6 * 130 + 1] = INFINITY, m.x[6 * 130 + 2] = -INFINITY;
    m.x[7 * 130 + 3] = FLT_MAX, m.x[7 * 130 + 4] = FLT_MAX;
    scale(m.x + 8 * 130, 130, 0);
    m.w[9 * 140 + 20] = INFINITY;
    m.w[128 * 140 + 139] = NAN;
    memcpy(&m.w[11 * 140 + 31], &nan_of_the_last_bit, sizeof(float));
    m.w[10 * 140 + 30] = m.w[10 * 140 + 33] = FLT_MAX;
    project(&projection, 2);
    check_output(&m, 0);
    free_matrices(&m);
}

/* Alone, in blocks of any size, transposed, packed, and on 3 threads. */
static void test_bits_of_a_row(void) {
    static const int64_t shapes[][3] = {{70, 300, 140}, {33, 31, 128}, {130, 257, 17}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t rows = shapes[i][0], in = shapes[i][1], out = shapes[i][2];
        const size_t bytes = (size_t)(rows * out) * sizeof(float);
        matrices m = new_matrices(rows, in, out);
        float *whole = new_numbers(rows * out), *turned = new_numbers(rows * in);
        mha_linear_projection projection = projection_of(&m);
        project(&projection, 3);
        check_output(&m, 0);
        memcpy(whole, m.output, bytes);
        for (int64_t row = 0, count = 1; row < rows; row += count, count = count % 40 + 9) {
            projection.x = m.x + row * in;
            projection.rows = count < rows - row ? count : rows - row;
            project(&projection, 1);
            CHECK(memcmp(m.output, whole + row * out,
                         (size_t)(projection.rows * out) * sizeof(float)) == 0);
        }
        for (int64_t k = 0; k < rows * in; k++) {
            turned[k % in * rows + k / in] = m.x[k];
        }
        projection.x = turned;
        projection.rows = rows;
        projection.x_transposed = true;
        projection.x_stride = rows * (int64_t)sizeof(float);
        project(&projection, 2);
        CHECK(memcmp(m.output, whole, bytes) == 0);
        free_matrices(&m), free(whole), free(turned);
    }
}

/* A query that is the start of key, and a value that is key with a wider weight: each block of rows
 * is copied or turned by itself. Rows 4,096 bytes apart are copied; AMX turns all. */
static void test_blocks_that_begin_alike(void) {
    static const int64_t rows[] = {16, 70, 33};
    matrices m = new_matrices(70, 1024, 600);
    float *outputs[3], *alone = new_numbers(70 * 600);
    mha_linear_projection projections[3];
    for (int i = 0; i < 3; i++) {
        projections[i] = projection_of(&m);
        projections[i].rows = rows[i];
        projections[i].output = outputs[i] = new_numbers(rows[i] * 600);
    }
    for (int threads = 1; threads <= 2; threads++) {
        project_together(projections, 3, threads);
        for (int i = 0; i < 3; i++) {
            mha_linear_projection one = projections[i];
            one.output = alone;
            project(&one, 1);
            CHECK(memcmp(alone, outputs[i], (size_t)(rows[i] * 600) * sizeof(float)) == 0);
        }
    }
    free(outputs[0]), free(outputs[1]), free(outputs[2]), free(alone), free_matrices(&m);
}

/* Every bit of a packed weight comes back: zeros of either sign, the least and the largest numbers,
 * infinity and NaN; rows and columns that fill no panel. */
static void test_unpacking(void) {
    static const int64_t shapes[][2] = {{1, 1}, {32, 64}, {33, 31}, {150, 97}, {129, 256}, {7, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t in = shapes[i][0], out = shapes[i][1], count = in * out;
        size_t bytes;
        matrices m = new_matrices(1, in, out);
        float *unpacked = new_numbers(count);
        const float strange[] = {0,        -0.0f,     FLT_MIN, -1e-45f,  3e-42f, FLT_MAX,
                                 -FLT_MAX, -INFINITY, NAN,     1.5e-33f, 1e-38f, 16777217};
        for (int64_t k = 0; k < count; k += 5) {
            m.w[k] = strange[k / 5 % 12];
        }
        const mha_weight weight = projection_of(&m).weight;
        mha_execution execution = {.num_threads = 2};
        CHECK_OK(mha_packed_size_of(MHA_FLOAT32, &weight, &bytes));
        void *panels = malloc(bytes + 1);
        CHECK(panels != NULL);
        const mha_weight_packing packing = {MHA_FLOAT32, weight, panels};
        CHECK_OK(mha_pack_weight(&packing, &execution));
        const mha_weight_unpacking unpacking = {MHA_FLOAT32, mha_packed_weight(&packing), unpacked,
                                                NULL};
        CHECK_OK(mha_unpack_weight(&unpacking, &execution));
        CHECK(memcmp(unpacked, m.w, (size_t)count * sizeof(float)) == 0);
        const mha_weight_unpacking of_plain = {MHA_FLOAT32, weight, unpacked, NULL};
        CHECK(mha_unpack_weight(&of_plain, &execution) == MHA_INVALID_ARGUMENT);
        free(panels), free(unpacked), free_matrices(&m);
    }
}

/* The product with blocks has the bits of that with the numbers which they stand for, and the
 * blocks come back. Scales are powers of two here, as float16. */
static void test_quantised(void) {
    for (int bits = 8; bits >= 4; bits -= 4) {
        const int64_t in = 160, out = 150, rows = 41;
        matrices m = new_matrices(rows, in, out);
        int8_t *numbers = malloc((size_t)(in * out)), *again = malloc((size_t)(in * out));
        uint16_t scales[5 * 150], scales_again[5 * 150];
        size_t bytes;
        mha_execution execution = {.num_threads = 2};
        CHECK(numbers != NULL && again != NULL);
        for (int64_t i = 0; i < 5 * out; i++) {
            scales[i] = (uint16_t)((10 + i % 7) << 10 | (i % 3 == 0) << 15); /* 2^-5 to 2, -2^... */
        }
        for (int64_t i = 0; i < in * out; i++) {
            const int number = (int)(i * 7919 % 255) - 127;
            const int64_t at = i / out / 32 * out + i % out;
            numbers[i] = (int8_t)(bits == 8 ? number : (number & 15) - 8);
            m.w[i] = (float)numbers[i] * ldexpf(1, (int)(scales[at] >> 10 & 31) - 15) *
                     (scales[at] >> 15 ? -1 : 1);
        }
        mha_linear_projection projection = projection_of(&m);
        float *wanted = new_numbers(rows * out);
        projection.output = wanted;
        project(&projection, 1);
        const mha_weight weight = {.data = numbers,
                                   .in = in,
                                   .out = out,
                                   .storage = bits == 8 ? MHA_Q8_0 : MHA_Q4_0,
                                   .scales = scales};
        CHECK_OK(mha_packed_size_of(MHA_FLOAT32, &weight, &bytes));
        void *panels = malloc(bytes);
        CHECK(panels != NULL);
        const mha_weight_packing packing = {MHA_FLOAT32, weight, panels};
        CHECK_OK(mha_pack_weight(&packing, &execution));
        projection.weight = mha_packed_weight(&packing);
        projection.output = m.output;
        for (int threads = 1; threads <= 3; threads++) {
            project(&projection, threads);
            CHECK(memcmp(m.output, wanted, (size_t)(rows * out) * sizeof(float)) == 0);
        }
        const mha_weight_unpacking unpacking = {MHA_FLOAT32, projection.weight, again,
                                                scales_again};
        CHECK_OK(mha_unpack_weight(&unpacking, &execution));
        CHECK(memcmp(again, numbers, (size_t)(in * out)) == 0);
        CHECK(memcmp(scales_again, scales, sizeof scales) == 0);
        free(panels), free(wanted), free(numbers), free(again), free_matrices(&m);
    }
}

int main(void) {
    on_every_instruction_set(test_numbers_of_any_size);
    on_every_instruction_set(test_numbers_that_are_not_finite);
    on_every_instruction_set(test_bits_of_a_row);
    on_every_instruction_set(test_blocks_that_begin_alike);
    on_every_instruction_set(test_unpacking);
    on_every_instruction_set(test_quantised);
    puts("test_matmul: passed");
    return 0;
}
