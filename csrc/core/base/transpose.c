/* Rows that become columns, outside of a step: copies of arrays that lie the other way around. */
#include "mha/transpose.h"

#include <string.h>

#include "core/base/run.h"
#include "kernels/kernels.h"

/* Rows a multiple of 512 bytes apart share few sets of the first cache, which cannot keep their
 * lines until all numbers have been used. So a tile of them is copied first. */
enum { TILE = 64, BYTES_OF_SETS = 512 };

/* Some rows and columns, one number after the other; item, 1 or 2 bytes, is a constant. */
static inline void move_numbers(const char *from, int64_t from_stride, int64_t rows,
                                int64_t columns, const size_t item, char *to, int64_t to_stride) {
    for (int64_t column = 0; column < columns; column++) {
        for (int64_t row = 0; row < rows; row++) {
            memcpy(to + column * to_stride + row * (int64_t)item,
                   from + row * from_stride + column * (int64_t)item, item);
        }
    }
}

enum { SIDE = 8 };
typedef uint16_t halves __attribute__((vector_size(SIDE * sizeof(uint16_t))));
#ifdef __clang__
#define CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOOSE(a, b, ...) __builtin_shuffle(a, b, (halves){__VA_ARGS__})
#endif

/* SIDE rows and columns of numbers of 2 bytes. Each round moves one bit of a number's row into its
 * column. */
static void move_square(const char *from, int64_t from_stride, char *to, int64_t to_stride) {
    halves rows[SIDE], zipped[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < SIDE; i++) {
        memcpy(&rows[i], from + i * from_stride, sizeof rows[i]);
    }
#pragma GCC unroll 8
    for (int round = 0; round < 3; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < SIDE / 2; i++) {
            const halves a = rows[i], b = rows[i + SIDE / 2];
            zipped[2 * i] = CHOOSE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            zipped[2 * i + 1] = CHOOSE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
        }
#pragma GCC unroll 8
        for (int i = 0; i < SIDE; i++) {
            rows[i] = zipped[i];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < SIDE; i++) {
        memcpy(to + i * to_stride, &rows[i], sizeof rows[i]);
    }
}

/* Numbers of 2 bytes, at least SIDE rows and columns: the last square begins earlier. */
static void move_squares(const char *from, int64_t from_stride, int64_t rows, int64_t columns,
                         char *to, int64_t to_stride) {
    enum { ITEM = sizeof(uint16_t) };
    for (int64_t column = 0; column < columns; column += SIDE) {
        const int64_t x = mha_smaller(column, columns - SIDE);
        for (int64_t row = 0; row < rows; row += SIDE) {
            const int64_t y = mha_smaller(row, rows - SIDE);
            move_square(from + y * from_stride + x * ITEM, from_stride,
                        to + x * to_stride + y * ITEM, to_stride);
        }
    }
}

/* Numbers of 4 and 8 bytes by the kernel. */
static void move_tile(const char *from, int64_t from_stride, int64_t rows, int64_t columns,
                      size_t item, char *to, int64_t to_stride) {
    const int64_t size = (int64_t)item;
    if (item == 1) {
        move_numbers(from, from_stride, rows, columns, 1, to, to_stride);
    } else if (item == 2 && rows >= SIDE && columns >= SIDE) {
        move_squares(from, from_stride, rows, columns, to, to_stride);
    } else if (item == 2) {
        move_numbers(from, from_stride, rows, columns, 2, to, to_stride);
    } else {
        const mha_dtype dtype = item == sizeof(float) ? MHA_FLOAT32 : MHA_FLOAT64;
        mha_kernels_for(dtype)->attention->transpose(from, from_stride / size, rows, columns, to,
                                                     to_stride / size);
    }
}

/* Some rows of TILE columns or fewer. */
static void move_columns(const char *from, int64_t from_stride, int64_t rows, int64_t columns,
                         size_t item, char *to, int64_t to_stride) {
    const int64_t size = (int64_t)item, stride = columns * size;
    _Alignas(64) char tile[TILE * TILE * sizeof(double)];
    for (int64_t row = 0; row < rows; row += TILE) {
        const int64_t height = mha_smaller(rows - row, TILE);
        const char *source = from + row * from_stride;
        int64_t source_stride = from_stride;
        if (from_stride % BYTES_OF_SETS == 0) {
            for (int64_t i = 0; i < height; i++) {
                memcpy(tile + i * stride, source + i * from_stride, (size_t)stride);
            }
            source = tile;
            source_stride = stride;
        }
        move_tile(source, source_stride, height, columns, item, to + row * size, to_stride);
    }
}

/* A piece is ROWS_OF_PIECE rows by TILE columns of a matrix of `from`, or fewer. */
enum { ROWS_OF_PIECE = 16 * TILE };

typedef struct copy_job {
    mha_tensor to, from;            /* without the two axes of the matrices */
    int64_t rows, row_stride;       /* of a matrix of `from` */
    int64_t columns, column_stride; /* its numbers, and where they go */
    int64_t across, down;           /* pieces of a matrix */
    size_t item;
    mha_row_tasks tasks; /* of pieces */
} copy_job;

static mha_tensor without_matrices(const mha_tensor *tensor, int column_axis) {
    mha_tensor others = {.data = tensor->data};
    for (int axis = 0; axis < tensor->axes - 1; axis++) {
        if (axis != column_axis) {
            others.shape[others.axes] = tensor->shape[axis];
            others.strides[others.axes++] = tensor->strides[axis];
        }
    }
    return others;
}

static void copy_piece(const copy_job *job, int64_t piece) {
    const int64_t matrix = piece / job->across / job->down;
    const int64_t row = piece / job->across % job->down * ROWS_OF_PIECE;
    const int64_t column = piece % job->across * TILE, item = (int64_t)job->item;
    const char *from = (const char *)job->from.data +
                       mha_leading_offset(&job->from, job->from.axes, matrix) +
                       row * job->row_stride + column * item;
    char *to = (char *)job->to.data + mha_leading_offset(&job->to, job->to.axes, matrix) +
               column * job->column_stride + row * item;
    move_columns(from, job->row_stride, mha_smaller(job->rows - row, ROWS_OF_PIECE),
                 mha_smaller(job->columns - column, TILE), job->item, to, job->column_stride);
}

static void copy_pieces(void *context, int64_t task, mha_worker *worker) {
    const copy_job *job = context;
    const int64_t end = mha_end_row(&job->tasks, task);
    for (int64_t piece = mha_first_row(&job->tasks, task); piece < end; piece++) {
        const int64_t most = mha_smaller(job->rows, ROWS_OF_PIECE) * TILE;
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * most)) {
            return;
        }
        copy_piece(job, piece);
    }
}

mha_status mha_copy_transposing(const mha_transposing_copy *copy, mha_execution *execution) {
    const mha_tensor *to = &copy->to, *from = &copy->from;
    copy_job job = {
        .to = without_matrices(to, copy->column_axis),
        .from = without_matrices(from, copy->column_axis),
        .rows = mha_extent(from, 1),
        .row_stride = mha_stride(from, 1),
        .columns = from->shape[copy->column_axis],
        .column_stride = to->strides[copy->column_axis],
        .item = copy->item,
    };
    int64_t matrices, pieces;
    job.across = mha_divide_up(job.columns, TILE);
    job.down = mha_divide_up(job.rows, ROWS_OF_PIECE);
    MHA_TRY(mha_count_elements(job.from.shape, job.from.axes, &matrices));
    const int64_t counts[] = {matrices, job.down, job.across};
    MHA_TRY(mha_count_elements(counts, 3, &pieces));
    job.tasks = mha_divide_rows(
        pieces, mha_smaller(job.rows, ROWS_OF_PIECE) * mha_smaller(job.columns, TILE),
        MHA_WORK_OF_MOVING, execution->num_threads);
    return mha_run_row_tasks(execution, &job.tasks, copy_pieces, &job);
}
