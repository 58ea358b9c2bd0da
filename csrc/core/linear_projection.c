/* Steps 1 and 5 of the figure: output = x @ weight + bias, by tasks of one weight panel times a
 * block of rows. A weight that is not packed yet is packed panel by panel into the worker's own
 * scratch; where few rows would not repay that, a full panel is read as it lies. */
#include "../threads/partition.h"
#include "../threads/pool.h"
#include "matmul.h"

enum { ROW_BLOCK = 384, FEW_ROWS = 8 };

typedef struct projection_job {
    const mha_linear_projection *projection;
    const mha_kernels *kernels;
    int64_t row_blocks;
    char *scratch; /* scratch_size bytes for each worker, or NULL when nothing is packed here */
    size_t scratch_size;
} projection_job;

static bool reads_in_place(const mha_linear_projection *projection) {
    return projection->rows <= FEW_ROWS &&
           projection->weight.out_stride == (int64_t)mha_dtype_size(projection->dtype);
}

static int64_t num_panels(const mha_linear_projection *projection) {
    return mha_divide_up(projection->weight.out, mha_panel_columns(projection->dtype));
}

static int threads_for(const mha_linear_projection *projection, int num_threads) {
    const int64_t row_blocks = mha_divide_up(projection->rows, ROW_BLOCK);
    const double operations =
        (double)projection->rows * (double)projection->weight.in * (double)projection->weight.out;
    return mha_threads_for(num_panels(projection) * row_blocks, operations, num_threads);
}

/* One panel for each worker, unless the weight comes packed. */
static mha_status scratch_size_of(const mha_linear_projection *projection, size_t *bytes) {
    *bytes = 0;
    if (projection->weight.packed) {
        return MHA_OK;
    }
    return mha_multiply_sizes((size_t)projection->weight.in, MHA_PANEL_BYTES, bytes);
}

mha_linear_projection mha_contiguous_projection(mha_dtype dtype, const void *x, int64_t rows,
                                                const mha_weight *weight, const void *bias,
                                                void *output) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    const mha_linear_projection projection = {
        .dtype = dtype,
        .rows = rows,
        .x = x,
        .x_stride = weight->in * item,
        .weight = *weight,
        .bias = bias,
        .output = output,
        .output_stride = weight->out * item,
    };
    return projection;
}

mha_status mha_linear_projection_workspace(const mha_linear_projection *projection, int num_threads,
                                           size_t *bytes) {
    size_t scratch_size;
    *bytes = 0;
    MHA_TRY(scratch_size_of(projection, &scratch_size));
    return mha_workspace_reserve(bytes, scratch_size, (size_t)threads_for(projection, num_threads));
}

/* Task: rows row_block * ROW_BLOCK.. of the output times one panel of its columns. */
static void project_panel(void *context, int64_t task, int worker) {
    const projection_job *job = context;
    const mha_linear_projection *p = job->projection;
    const int64_t item = (int64_t)mha_dtype_size(p->dtype);
    const int64_t width = mha_panel_columns(p->dtype);
    const int64_t panel = task / job->row_blocks;
    const int64_t first_row = task % job->row_blocks * ROW_BLOCK;
    const int64_t first_column = panel * width;
    const int64_t rows_left = p->rows - first_row;
    const int64_t columns_left = p->weight.out - first_column;

    mha_matmul_block block = {
        .rows = rows_left < ROW_BLOCK ? rows_left : ROW_BLOCK,
        .depth = p->weight.in,
        .columns = columns_left < width ? columns_left : width,
        .a = (const char *)p->x + first_row * p->x_stride,
        .a_stride = p->x_stride / item,
        .bias = p->bias == NULL ? NULL : (const char *)p->bias + first_column * item,
        .c = (char *)p->output + first_row * p->output_stride + first_column * item,
        .c_stride = p->output_stride / item,
        .panel_stride = width,
    };
    if (p->weight.packed) {
        block.panel = (const char *)p->weight.data + panel * p->weight.in * MHA_PANEL_BYTES;
    } else if (reads_in_place(p) && columns_left >= width) {
        block.panel = (const char *)p->weight.data + first_column * item;
        block.panel_stride = p->weight.in_stride / item;
    } else {
        char *scratch = job->scratch + (size_t)worker * job->scratch_size;
        mha_pack_panel(p->dtype, &p->weight, first_column, scratch);
        block.panel = scratch;
    }
    job->kernels->matmul(&block);
}

mha_status mha_linear_projection_forward(const mha_linear_projection *projection,
                                         mha_execution *execution) {
    const int num_threads = threads_for(projection, execution->num_threads);
    const size_t used_before = execution->workspace.used;
    projection_job job = {.projection = projection,
                          .kernels = mha_kernels_for(projection->dtype),
                          .row_blocks = mha_divide_up(projection->rows, ROW_BLOCK)};
    size_t all;
    void *scratch;
    MHA_TRY(scratch_size_of(projection, &job.scratch_size));
    MHA_TRY(mha_workspace_piece_size(job.scratch_size, &job.scratch_size));
    MHA_TRY(mha_multiply_sizes(job.scratch_size, (size_t)num_threads, &all));
    MHA_TRY(mha_workspace_take(&execution->workspace, all, &scratch));
    job.scratch = scratch;
    const mha_status status = mha_pool_run(num_panels(projection) * job.row_blocks, num_threads,
                                           project_panel, &job, &execution->cancel);
    execution->workspace.used = used_before;
    return status;
}
