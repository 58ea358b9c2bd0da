/* Angles are position * frequency, reduced exactly: the frequency is taken in turns, as a binary
 * fraction of 128 bits, and multiplied by the position modulo 1, so that position 10^15 is as exact
 * as 1. Cosine and sine are within 1 ulp of the exact product's, by plain double arithmetic: the
 * same bits on every machine. */
#include "core/heads/rotary_table.h"

#include <string.h>

#include "core/base/run.h"
#include "kernels/kernels.h"

typedef unsigned __int128 turns; /* a fraction of a whole turn, in units of 2^-128; wraps */

/* 1 / (2 pi), 64 bits a word from the binary point on: enough for any double. */
static const uint64_t INVERSE_TWO_PI[] = {
    0x28be60db9391054a, 0x7f09d5f47d4d3770, 0x36d8a5664f10e410, 0x7f9458eaf7aef158,
    0x6dc91b8e909374b8, 0x01924bba82746487, 0x3f877ac72c4a69cf, 0xba208d7d4baed121,
    0x3a671c09ad17df90, 0x4e64758e60d4ce7d, 0x272117e2ef7e4a0e, 0xc7fe25fff7816603,
    0xfbcbc462d6829b47, 0xdb4d9fb3c9f2c26d, 0xd3d18fd9a797fa8b, 0x5d49eeb1faf97c5e,
    0xcf41ce7de294a4ba, 0x9afed7ec47e35742, 0x1580cc11bf1edaea};
enum { WORDS = sizeof INVERSE_TWO_PI / sizeof *INVERSE_TWO_PI };

static uint64_t word_of_inverse(int64_t index) {
    return index < 0 || index >= WORDS ? 0 : INVERSE_TWO_PI[index];
}

/* 64 bits of 1 / (2 pi), the first of which weighs 2^-(bit + 1); before the point they are 0. */
static uint64_t bits_of_inverse(int64_t bit) {
    const int64_t index = (bit >= 0 ? bit : bit - 63) / 64, shift = bit - 64 * index;
    const uint64_t high = word_of_inverse(index), low = word_of_inverse(index + 1);
    return shift == 0 ? high : high << shift | low >> (64 - shift);
}

/* frequency / (2 pi) modulo 1, within 2^-128 (Payne & Hanek 1983). |frequency| = mantissa *
 * 2^exponent; bits of 1 / (2 pi) that make whole turns are left out. */
static turns turns_of(double frequency) {
    uint64_t bits;
    memcpy(&bits, &frequency, sizeof bits);
    const int64_t exponent = (int64_t)(bits >> 52 & 0x7ff) - 1075;
    if (exponent == -1075) { /* 0, or so small that no position turns it */
        return 0;
    }
    const uint64_t mantissa = (bits & 0xfffffffffffff) | 0x10000000000000;
    const turns low = (turns)mantissa * bits_of_inverse(exponent + 128);
    const turns middle = (turns)mantissa * bits_of_inverse(exponent + 64) + (uint64_t)(low >> 64);
    const uint64_t high = mantissa * bits_of_inverse(exponent) + (uint64_t)(middle >> 64);
    const turns product = (turns)high << 64 | (uint64_t)middle;
    return bits >> 63 ? -product : product;
}

/* 2 pi, and in two parts, the first of 25 bits. */
static const double TWO_PI = 0x1.921fb54442d18p+2;
static const double TWO_PI_HIGH = 0x1.921fb5p+2, TWO_PI_LOW = 0x1.110b4611a6263p-24;

/* Taylor's series up to pi/4, the first term left out is below 2^-59: sin x = x - x^3 * (1/3! -
 * x^2/5! + ...), cos x = 1 - x^2/2 + x^4 * (1/4! - x^2/6! + ...). */
static const double SINE[] = {
    1.0 / 6,        -1.0 / 120,        1.0 / 5040,          -1.0 / 362880,
    1.0 / 39916800, -1.0 / 6227020800, 1.0 / 1307674368000, -1.0 / 355687428096000};
static const double COSINE[] = {
    1.0 / 24,        -1.0 / 720,         1.0 / 40320,         -1.0 / 3628800,
    1.0 / 479001600, -1.0 / 87178291200, 1.0 / 20922789888000};

static inline double series(const double *coefficients, int count, double square) {
    double sum = coefficients[count - 1];
    for (int i = count - 2; i >= 0; i--) {
        sum = sum * square + coefficients[i];
    }
    return sum;
}

typedef struct point {
    double cosine, sine;
} point;

/* The point of the circle at this angle. */
static point point_at(turns angle) {
    /* 1. The nearest quarter turn, and what is left: up to 1/8 of a turn to either side. */
    const turns eighth = (turns)1 << 125;
    const unsigned quarter = (unsigned)((angle + eighth) >> 126) & 3;
    const turns rest = angle - ((turns)quarter << 126);
    const bool is_negative = rest >> 127 != 0;
    const turns left = is_negative ? -rest : rest;
    /* 2. In radians, x + lost. The first 30 bits times TWO_PI_HIGH are exact. */
    const double first = (double)(int64_t)(left >> 98) * 0x1p-30;
    const double second = (double)(int64_t)(left << 30 >> 66) * 0x1p-92;
    const double head = first * TWO_PI_HIGH, tail = first * TWO_PI_LOW + second * TWO_PI;
    const double x = head + tail, lost = (head - x) + tail;
    /* 3. Sine and cosine of that. */
    const double square = x * x, half = 0.5 * square, most = 1 - half;
    const double of_sine = series(SINE, sizeof SINE / sizeof *SINE, square);
    const double of_cosine = series(COSINE, sizeof COSINE / sizeof *COSINE, square);
    const double magnitude = x - (x * square * of_sine - lost * most);
    const double sine = is_negative ? -magnitude : magnitude;
    const double cosine = most + (((1 - most) - half) + (square * square * of_cosine - x * lost));
    /* 4. And the quarters. */
    switch (quarter) {
    case 0:
        return (point){cosine, sine};
    case 1:
        return (point){-sine, cosine};
    case 2:
        return (point){-cosine, -sine};
    default:
        return (point){sine, -cosine};
    }
}

typedef struct table_job {
    const mha_rotary_table *table;
    mha_dtype dtype;
    const mha_tensor *positions;
    bool back;
    turns *turns; /* (pairs,), of one position */
    mha_row_tasks rows;
} table_job;

static int batch_axes_of(const mha_rotary *rotary, const mha_tensor *positions) {
    if (positions == NULL || positions->data == NULL) {
        return 0;
    }
    return positions->axes - (rotary->axes == NULL ? 1 : 2);
}

/* Where a row of a batch item stands along a position axis. */
static int64_t position_of(const table_job *job, int64_t item, int64_t row, int64_t axis) {
    const mha_tensor *positions = job->positions;
    int64_t position;
    if (positions == NULL || positions->data == NULL) {
        return row;
    }
    const int batch_axes = batch_axes_of(job->table->rotary, positions);
    const char *of_row = (const char *)positions->data +
                         mha_leading_offset(positions, batch_axes, item) +
                         row * positions->strides[batch_axes];
    memcpy(&position, axis == 0 ? of_row : of_row + axis * mha_stride(positions, 1),
           sizeof position);
    return position;
}

/* Work of a cosine and a sine, in multiply-adds. */
enum { WORK_OF_POINT = 100 };

static void fill_rows(void *context, int64_t task, mha_worker *worker) {
    const table_job *job = context;
    const mha_rotary_table *table = job->table;
    const mha_elementwise_kernels *kernels = mha_kernels_for(job->dtype)->elementwise;
    const int64_t *axes = table->rotary->axes;
    const double magnitude = table->rotary->magnitude;
    const double sine_magnitude = job->back ? -magnitude : magnitude;
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t i = mha_first_row(&job->rows, task); i < end; i++) {
        const int64_t item = i / table->length, row = i % table->length;
        int64_t axis = 0, position = position_of(job, item, row, axis);
        char *to = table->rows + i * table->row_bytes;
        for (int64_t c = 0; c < table->pairs; c++) {
            if (mha_stop_after(&worker->checkpoint, WORK_OF_POINT)) {
                return;
            }
            if (axes != NULL && axes[c] != axis) {
                axis = axes[c];
                position = position_of(job, item, row, axis);
            }
            const point at = point_at((turns)(__int128)position * job->turns[c]);
            kernels->write(to, c, magnitude * at.cosine);
            kernels->write(to, table->pairs + c, sine_magnitude * at.sine);
        }
    }
}

/* Whether all items of a batch, of which there is one at least, stand at the same positions. */
static bool is_repeated(const mha_rotary *rotary, const mha_tensor *positions) {
    const int batch_axes = batch_axes_of(rotary, positions);
    for (int axis = 0; axis < batch_axes; axis++) {
        if (!mha_is_shared(positions, positions->axes - axis)) {
            return false;
        }
    }
    return true;
}

mha_status mha_make_rotary_table(const mha_rotary *rotary, mha_dtype dtype,
                                 const mha_tensor *positions, int64_t length, bool back,
                                 mha_execution *execution, mha_rotary_table *table) {
    const int64_t pairs = rotary->dims / 2;
    table_job job = {.table = table, .dtype = dtype, .positions = positions, .back = back};
    size_t turns_bytes, row_bytes, batch_bytes, bytes;
    int64_t batch = 1;
    void *pieces[2];
    const bool repeated = is_repeated(rotary, positions);
    if (!repeated) {
        MHA_TRY(mha_count_elements(positions->shape, batch_axes_of(rotary, positions), &batch));
    }
    MHA_TRY(mha_multiply_sizes((size_t)pairs, sizeof(turns), &turns_bytes));
    MHA_TRY(mha_multiply_sizes((size_t)pairs, 2 * mha_dtype_size(dtype), &row_bytes));
    MHA_TRY(mha_multiply_sizes(row_bytes, (size_t)length, &batch_bytes));
    MHA_TRY(mha_multiply_sizes(batch_bytes, (size_t)batch, &bytes));
    MHA_TRY(mha_workspace_take(&execution->workspace, turns_bytes, &pieces[0]));
    MHA_TRY(mha_workspace_take(&execution->workspace, bytes, &pieces[1]));
    *table = (mha_rotary_table){.rotary = rotary,
                                .pairs = pairs,
                                .length = length,
                                .row_bytes = (int64_t)row_bytes,
                                .batch_bytes = repeated ? 0 : (int64_t)batch_bytes,
                                .rows = pieces[1]};
    if (execution->workspace.measures) {
        return MHA_OK;
    }
    job.turns = pieces[0];
    for (int64_t c = 0; c < pairs; c++) {
        job.turns[c] = turns_of(rotary->frequencies[c]);
    }
    job.rows = mha_divide_rows(batch * length, pairs, WORK_OF_POINT, execution->num_threads);
    return mha_run_row_tasks(execution, &job.rows, fill_rows, &job);
}

void mha_rotate_row(const mha_rotary_table *table, mha_dtype dtype, int64_t item, int64_t row,
                    void *columns) {
    const char *cosines = table->rows + item * table->batch_bytes + row * table->row_bytes;
    mha_kernels_for(dtype)->heads->rotate(columns, cosines, cosines + table->row_bytes / 2,
                                          table->pairs, table->rotary->interleaved);
}
