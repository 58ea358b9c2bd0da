/* Packing a weight (in, out) into panels: [panel][in][panel columns], each row 128 bytes, so that
 * the kernel reads it from front to back whatever the layout it came in. */
#include "matmul.h"

#include <string.h>

#include "../threads/partition.h"
#include "../threads/pool.h"

int64_t mha_panel_columns(mha_dtype dtype) {
    return (int64_t)(MHA_PANEL_BYTES / mha_dtype_size(dtype));
}

mha_status mha_packed_weight_size(mha_dtype dtype, int64_t in, int64_t out, size_t *bytes) {
    const int64_t columns = mha_panel_columns(dtype);
    const size_t panels = (size_t)mha_divide_up(out, columns);
    MHA_TRY(mha_multiply_sizes(panels, (size_t)in, bytes));
    return mha_multiply_sizes(*bytes, MHA_PANEL_BYTES, bytes);
}

/* Rows of a panel from numbers that do not lie side by side, in squares that read each cache line
 * of a transposed weight once. `item` is a constant. */
static inline void pack_strided(const mha_weight *weight, const char *from, int64_t columns,
                                const size_t item, char *to, mha_checkpoint *checkpoint) {
    enum { SQUARE = 16, WORK_OF_STRIDED = 4 * MHA_WORK_OF_MOVING };
    const int64_t in = weight->in, in_stride = weight->in_stride, out_stride = weight->out_stride;
    for (int64_t first = 0; first < in; first += SQUARE) {
        const int64_t rows = in - first < SQUARE ? in - first : SQUARE;
        if (mha_stop_after(checkpoint, WORK_OF_STRIDED * rows * columns)) {
            return;
        }
        for (int64_t column = 0; column < columns; column++) {
            const char *next = from + first * in_stride + column * out_stride;
            char *at = to + first * MHA_PANEL_BYTES + column * (int64_t)item;
            for (int64_t row = 0; row < rows; row++) {
                memcpy(at, next, item);
                at += MHA_PANEL_BYTES;
                next += in_stride;
            }
        }
    }
}

static void pack_contiguous(const mha_weight *weight, const char *from, size_t bytes, char *to,
                            mha_checkpoint *checkpoint) {
    for (int64_t row = 0; row < weight->in; row++) {
        if (mha_stop_after(checkpoint, MHA_PANEL_BYTES)) {
            return;
        }
        memcpy(to + row * MHA_PANEL_BYTES, from + row * weight->in_stride, bytes);
    }
}

void mha_pack_panel(mha_dtype dtype, const mha_weight *weight, int64_t first_column, void *panel,
                    mha_checkpoint *checkpoint) {
    const size_t item = mha_dtype_size(dtype);
    const int64_t width = mha_panel_columns(dtype);
    const int64_t left = weight->out - first_column;
    const int64_t columns = left < width ? left : width;
    const size_t used = (size_t)columns * item;
    const char *from = (const char *)weight->data + first_column * weight->out_stride;
    if (weight->out_stride == (int64_t)item) {
        pack_contiguous(weight, from, used, panel, checkpoint);
    } else if (item == sizeof(float)) {
        pack_strided(weight, from, columns, sizeof(float), panel, checkpoint);
    } else {
        pack_strided(weight, from, columns, sizeof(double), panel, checkpoint);
    }
    for (int64_t row = 0; columns < width && row < weight->in; row++) {
        if (mha_stop_after(checkpoint, MHA_PANEL_BYTES)) {
            return;
        }
        memset((char *)panel + row * MHA_PANEL_BYTES + used, 0, MHA_PANEL_BYTES - used);
    }
}

/* Task: one panel. */
static void pack_one_panel(void *context, int64_t task, mha_worker *worker) {
    const mha_weight_packing *packing = context;
    mha_pack_panel(packing->dtype, &packing->weight, task * mha_panel_columns(packing->dtype),
                   (char *)packing->packed + task * packing->weight.in * MHA_PANEL_BYTES,
                   &worker->checkpoint);
}

mha_status mha_pack_weight(const mha_weight_packing *packing, mha_execution *execution) {
    mha_weight_packing job = *packing;
    const int64_t panels = mha_divide_up(job.weight.out, mha_panel_columns(job.dtype));
    const double numbers = (double)job.weight.in * (double)job.weight.out;
    return mha_pool_run(panels, mha_threads_for(panels, numbers, execution->num_threads),
                        pack_one_panel, &job, &execution->cancel);
}

/* An odd number of cache lines, so that the rows of a chain spread over all sets. */
int64_t mha_packed_rows_stride(mha_dtype dtype, int64_t block_rows) {
    enum { CACHE_LINE = 64 };
    const int64_t of_a_line = CACHE_LINE / (int64_t)mha_dtype_size(dtype);
    return (mha_divide_up(block_rows, of_a_line) | 1) * of_a_line;
}

mha_status mha_packed_rows_size(const mha_transposed_rows *x, size_t *bytes) {
    const size_t blocks = (size_t)mha_divide_up(x->rows, x->block_rows);
    const size_t stride = (size_t)mha_packed_rows_stride(x->dtype, x->block_rows);
    MHA_TRY(mha_multiply_sizes(blocks, (size_t)x->depth, bytes));
    return mha_multiply_sizes(*bytes, stride * mha_dtype_size(x->dtype), bytes);
}

char *mha_packed_rows_block(const mha_transposed_rows *x, int64_t first_row) {
    const int64_t stride = mha_packed_rows_stride(x->dtype, x->block_rows);
    const int64_t block = first_row / x->block_rows;
    return (char *)x->blocks + block * x->depth * stride * (int64_t)mha_dtype_size(x->dtype);
}

void mha_pack_rows(const mha_transposed_rows *x, int64_t first, int64_t end,
                   mha_checkpoint *checkpoint) {
    const int64_t item = (int64_t)mha_dtype_size(x->dtype);
    const int64_t stride = mha_packed_rows_stride(x->dtype, x->block_rows);
    for (int64_t k = first; k < end; k++) {
        const char *from = (const char *)x->from + k * x->from_stride;
        for (int64_t row = 0; row < x->rows; row += x->block_rows) {
            const int64_t left = x->rows - row;
            const int64_t rows = left < x->block_rows ? left : x->block_rows;
            if (mha_stop_after(checkpoint, MHA_WORK_OF_MOVING * rows)) {
                return;
            }
            memcpy(mha_packed_rows_block(x, row) + k * stride * item, from + row * item,
                   (size_t)(rows * item));
        }
    }
}
