/* Weights in panels, and rows that lie transposed in blocks: what the kernel of products reads. */
#include "core/projection/matmul.h"

#include "core/projection/quantised.h"

#include <string.h>

#include "threads/partition.h"
#include "threads/pool.h"

const mha_panel_format *mha_panels_of(mha_dtype dtype) {
    return &mha_kernels_for(dtype)->matmul->panels;
}

int64_t mha_panel_count(const mha_panel_format *format, int64_t out) {
    return mha_divide_up(out, format->columns);
}

mha_status mha_panel_size(mha_dtype dtype, const mha_weight *weight, size_t *bytes) {
    const mha_panel_format *format = mha_panels_of(dtype);
    if (mha_is_quantised(weight->storage)) {
        const size_t blocks = (size_t)(weight->in / MHA_QUANTISED_ROWS);
        return mha_multiply_sizes(
            blocks, (size_t)mha_quantised_block_bytes(weight->storage, format->columns), bytes);
    }
    size_t rows = (size_t)weight->in, row_bytes = (size_t)format->columns * sizeof(uint16_t);
    if (weight->storage == MHA_AS_COMPUTED) {
        const size_t multiple = (size_t)format->row_multiple;
        MHA_TRY(mha_add_sizes(rows, multiple - 1, &rows));
        rows = rows / multiple * multiple;
        row_bytes = (size_t)format->row_bytes;
    }
    return mha_multiply_sizes(rows, row_bytes, bytes);
}

size_t mha_panel_offset(mha_dtype dtype, const mha_weight *weight, int64_t panel) {
    size_t bytes = 0;
    /* Whoever has panels has prefetched their size. */
    return mha_panel_size(dtype, weight, &bytes) == MHA_OK ? (size_t)panel * bytes : 0;
}

mha_status mha_packed_size_of(mha_dtype dtype, const mha_weight *weight, size_t *bytes) {
    MHA_TRY(mha_panel_size(dtype, weight, bytes));
    return mha_multiply_sizes(*bytes, (size_t)mha_panel_count(mha_panels_of(dtype), weight->out),
                              bytes);
}

mha_status mha_packed_weight_size(mha_dtype dtype, int64_t in, int64_t out, size_t *bytes) {
    const mha_weight weight = {.in = in, .out = out};
    return mha_packed_size_of(dtype, &weight, bytes);
}

mha_weight mha_packed_weight(const mha_weight_packing *packing) {
    return (mha_weight){.data = packing->packed,
                        .in = packing->weight.in,
                        .out = packing->weight.out,
                        .storage = packing->weight.storage,
                        .format = mha_panels_of(packing->dtype)};
}

bool mha_weight_fits(const mha_weight *weight, mha_dtype dtype) {
    return weight->format == NULL || weight->format == mha_panels_of(dtype);
}

/* Task: one panel. */
static void pack_one_panel(void *context, int64_t task, mha_worker *worker) {
    const mha_weight_packing *packing = context;
    const mha_panel_format *format = mha_panels_of(packing->dtype);
    char *panel =
        (char *)packing->packed + mha_panel_offset(packing->dtype, &packing->weight, task);
    if (mha_is_quantised(packing->weight.storage)) {
        mha_pack_quantised(&packing->weight, task * format->columns, format->columns, panel,
                           &worker->checkpoint);
    } else {
        format->pack(&packing->weight, task * format->columns, panel, &worker->checkpoint);
    }
}

mha_status mha_pack_weight(const mha_weight_packing *packing, mha_execution *execution) {
    mha_weight_packing job = *packing;
    const int64_t panels = mha_panel_count(mha_panels_of(job.dtype), job.weight.out);
    const double numbers = (double)job.weight.in * (double)job.weight.out;
    if (numbers == 0) {
        return MHA_OK;
    }
    return mha_pool_run(panels, mha_threads_for(panels, numbers, execution->num_threads),
                        pack_one_panel, &job, &execution->cancel);
}

/* Task: one panel. */
static void unpack_one_panel(void *context, int64_t task, mha_worker *worker) {
    const mha_weight_unpacking *job = context;
    const mha_panel_format *format = mha_panels_of(job->dtype);
    const int64_t first = task * format->columns;
    const int64_t item = (int64_t)mha_storage_size(job->dtype, job->packed.storage);
    const char *panel =
        (const char *)job->packed.data + mha_panel_offset(job->dtype, &job->packed, task);
    if (mha_is_quantised(job->packed.storage)) {
        mha_unpack_quantised(job, first, format->columns, panel, &worker->checkpoint);
    } else {
        format->unpack(&job->packed, panel, mha_smaller(format->columns, job->packed.out - first),
                       (char *)job->to + first * item, job->packed.out * item, &worker->checkpoint);
    }
}

mha_status mha_unpack_weight(const mha_weight_unpacking *unpacking, mha_execution *execution) {
    mha_weight_unpacking job = *unpacking;
    if (job.packed.format == NULL || !mha_weight_fits(&job.packed, job.dtype)) {
        return MHA_INVALID_ARGUMENT;
    }
    const int64_t panels = mha_panel_count(job.packed.format, job.packed.out);
    const double numbers = (double)job.packed.in * (double)job.packed.out;
    return mha_pool_run(panels, mha_threads_for(panels, numbers, execution->num_threads),
                        unpack_one_panel, &job, &execution->cancel);
}

static int64_t stride_of(const mha_transposed_rows *x) {
    return mha_packed_rows_stride(x->block_rows, (int64_t)mha_dtype_size(x->dtype));
}

mha_status mha_packed_rows_size(const mha_transposed_rows *x, size_t *bytes) {
    const size_t blocks = (size_t)mha_divide_up(x->rows, x->block_rows);
    const size_t stride = (size_t)stride_of(x);
    MHA_TRY(mha_multiply_sizes(blocks, (size_t)x->depth, bytes));
    return mha_multiply_sizes(*bytes, stride * mha_dtype_size(x->dtype), bytes);
}

char *mha_packed_rows_block(const mha_transposed_rows *x, int64_t first_row) {
    const int64_t stride = stride_of(x);
    const int64_t block = first_row / x->block_rows;
    return (char *)x->blocks + block * x->depth * stride * (int64_t)mha_dtype_size(x->dtype);
}

void mha_pack_rows(const mha_transposed_rows *x, int64_t first, int64_t end,
                   mha_checkpoint *checkpoint) {
    const mha_kernels *kernels = mha_kernels_for(x->dtype);
    const int64_t item = (int64_t)mha_dtype_size(x->dtype);
    const int64_t from_item = (int64_t)mha_storage_size(x->dtype, x->storage);
    const int64_t stride = stride_of(x);
    for (int64_t k = first; k < end; k++) {
        const char *from = (const char *)x->from + k * x->from_stride;
        for (int64_t row = 0; row < x->rows; row += x->block_rows) {
            const int64_t rows = mha_smaller(x->rows - row, x->block_rows);
            if (mha_stop_after(checkpoint, MHA_WORK_OF_MOVING * rows)) {
                return;
            }
            kernels->elementwise->read_row(from + row * from_item, x->storage,
                                           mha_packed_rows_block(x, row) + k * stride * item, rows);
        }
    }
}
