/* Steps 1 and 5 of the figure: output = x @ weight + bias, by tasks of some panels of the weight
 * times a block of rows. A weight comes to the kernel in one of four ways (project_panels):
 *   - packed: by the caller, or here as a whole where many blocks of rows read it;
 *   - unpacked: of numbers, as it lies. Few rows read it once, more rows pack it chain by chain;
 *   - of halves, as it lies: few rows read it once;
 *   - else each panel is packed into the worker's scratch. */
#include <string.h>

#include "core/base/run.h"
#include "core/heads/prepare_heads.h"
#include "core/projection/matmul.h"
#include "core/projection/packed_weights.h"
#include "core/projection/projection_plan.h"
#include "threads/partition.h"

static int64_t weight_item(const mha_linear_projection *projection) {
    return (int64_t)mha_storage_size(projection->dtype, projection->weight.storage);
}

/* Projections that run side by side: tasks go row block by row block, and within one through the
 * panels of all weights, so that a block of rows that several share is read once. */
typedef struct projection_job {
    const mha_linear_projection *projections;
    int count;
    const mha_kernels *kernels;
    int num_threads; /* at most, as many as the work is worth */
    mha_projection_plan plans[MHA_MOST_PROJECTIONS];
    int64_t groups;     /* of all weights */
    int64_t row_blocks; /* of the projection with the most */
    /* For each worker: a panel that is packed here, if any, or what the kernel needs for a weight
     * that is not, and behind it a block of the output that is rounded to halves, if any. */
    mha_pieces scratch;
    size_t scratch_size, panel_size;
    /* For each worker the block of rows that it is at, as kernels read it best; or none. */
    mha_pieces arranged;
    size_t arranged_size;
    mha_transposed_rows x_rows; /* of the only projection, where its x is transposed */
} projection_job;

/* Threads that the work of all projections is worth, at most num_threads. */
static int worthwhile_threads(const mha_linear_projection *projections, int count,
                              int num_threads) {
    double operations = 0;
    for (int i = 0; i < count; i++) {
        const mha_linear_projection *p = &projections[i];
        operations += (double)p->rows * (double)p->weight.in * (double)p->weight.out;
    }
    return mha_threads_for(num_threads, operations, num_threads);
}

/* At the start of a worker's piece: which block of rows follows, ARRANGED_AT bytes behind. */
typedef struct arranged_rows {
    const void *x; /* NULL: none yet */
    int64_t first_row, rows, columns, stride;
    mha_storage storage;
} arranged_rows;
enum { ARRANGED_AT = 64 };
_Static_assert(sizeof(arranged_rows) <= ARRANGED_AT, "what follows begins behind");

/* Whether all of it was arranged. */
static bool copy_rows(const projection_job *job, const mha_linear_projection *p, int64_t first_row,
                      const mha_matmul_block *block, char *to, size_t row_bytes) {
    const size_t bytes = (size_t)block->depth * mha_dtype_size(p->dtype);
    for (int64_t row = 0; row < block->rows; row++) {
        const void *from = (const char *)p->x + (first_row + row) * p->x_stride;
        if (mha_stop_after(block->checkpoint, MHA_WORK_OF_MOVING * block->depth)) {
            return false;
        }
        if (p->x_storage == MHA_AS_COMPUTED) {
            memcpy(to + (size_t)row * row_bytes, from, bytes);
        } else {
            job->kernels->elementwise->read_row(from, p->x_storage, to + (size_t)row * row_bytes,
                                                block->depth);
        }
    }
    return true;
}

/* Whether the block is there already. The x of another projection may begin at the same number and
 * have fewer rows: a query that is the start of key. */
static bool is_of_block(const arranged_rows *arranged, const mha_linear_projection *p,
                        int64_t first_row, const mha_matmul_block *block) {
    return arranged->x == p->x && arranged->first_row == first_row &&
           arranged->rows >= block->rows && arranged->columns == block->depth &&
           arranged->stride == p->x_stride && arranged->storage == p->x_storage;
}

/* The block's rows in the form that the kernels read best, arranged once for all panels that the
 * worker takes in a row. */
static void arrange_rows(const projection_job *job, int number, int64_t first_row,
                         mha_worker *worker, mha_matmul_block *block) {
    const mha_linear_projection *p = &job->projections[number];
    const mha_row_format *format = &job->kernels->matmul->rows;
    const size_t row_bytes = job->plans[number].arranged_row;
    arranged_rows *arranged = mha_piece(&job->arranged, worker->number);
    char *rows = (char *)arranged + ARRANGED_AT;
    if (!is_of_block(arranged, p, first_row, block)) {
        bool is_complete = true;
        if (format->arrange != NULL) {
            format->arrange(block, rows);
        } else {
            is_complete = copy_rows(job, p, first_row, block, rows, row_bytes);
        }
        *arranged = (arranged_rows){is_complete ? p->x : NULL,
                                    first_row,
                                    block->rows,
                                    block->depth,
                                    p->x_stride,
                                    p->x_storage};
    }
    if (format->arrange != NULL) {
        block->arranged = rows;
    } else {
        block->a = rows;
        block->a_stride = (int64_t)(row_bytes / mha_dtype_size(p->dtype));
        block->a_storage = MHA_AS_COMPUTED;
    }
}

static mha_status take_arranged(projection_job *job, int num_threads, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    if (job->arranged_size == 0) {
        return MHA_OK;
    }
    MHA_TRY(mha_workspace_take_pieces(workspace, job->arranged_size, (size_t)num_threads,
                                      &job->arranged));
    for (int i = 0; !workspace->measures && i < num_threads; i++) {
        *(arranged_rows *)mha_piece(&job->arranged, i) = (arranged_rows){.x = NULL};
    }
    return MHA_OK;
}

/* What a worker needs beside the output: for a panel, and for numbers that are then rounded. */
static mha_status scratch_of(const projection_job *job, int number, size_t *panel,
                             size_t *unrounded) {
    const mha_linear_projection *p = &job->projections[number];
    const mha_projection_plan *plan = &job->plans[number];
    const int64_t rows = mha_smaller(p->rows, plan->row_block);
    *panel = *unrounded = 0;
    if (mha_takes_unpacked(p)) {
        *panel = job->kernels->matmul->unpacked_scratch_size(rows, p->weight.in,
                                                             plan->x_packing == X_PACKED_BY_CHAIN);
    } else if (p->weight.format == NULL) {
        MHA_TRY(mha_panel_size(p->dtype, &p->weight, panel));
    }
    if (p->output_storage != MHA_AS_COMPUTED) {
        const int64_t columns = mha_panels_of(p->dtype)->columns;
        MHA_TRY(mha_multiply_sizes((size_t)rows, (size_t)columns * mha_dtype_size(p->dtype),
                                   unrounded));
    }
    return MHA_OK;
}

static mha_status plan(const mha_linear_projection *projections, int count, int num_threads,
                       projection_job *job) {
    *job = (projection_job){.projections = projections, .count = count, .num_threads = num_threads};
    job->kernels = mha_kernels_for(projections[0].dtype);
    size_t most_unrounded = 0;
    for (int i = 0; i < count; i++) {
        const mha_linear_projection *p = &projections[i];
        size_t panel, unrounded;
        if (!mha_weight_fits(&p->weight, p->dtype)) {
            return MHA_INVALID_ARGUMENT;
        }
        MHA_TRY(mha_plan_projection(p, num_threads, &job->plans[i]));
        MHA_TRY(scratch_of(job, i, &panel, &unrounded));
        const mha_projection_plan *plan = &job->plans[i];
        const size_t arranged = plan->arranged_bytes == 0 ? 0 : plan->arranged_bytes + ARRANGED_AT;
        job->groups += plan->groups;
        job->row_blocks = mha_larger(job->row_blocks, mha_divide_up(p->rows, plan->row_block));
        job->arranged_size = arranged > job->arranged_size ? arranged : job->arranged_size;
        job->panel_size = panel > job->panel_size ? panel : job->panel_size;
        most_unrounded = unrounded > most_unrounded ? unrounded : most_unrounded;
    }
    return mha_add_sizes(job->panel_size, most_unrounded, &job->scratch_size);
}

/* The output's element (row, column). */
static char *output_at(const mha_linear_projection *p, int64_t row, int64_t column) {
    const int64_t item = (int64_t)mha_storage_size(p->dtype, p->output_storage);
    const int64_t head = p->head_columns == 0 ? 0 : column / p->head_columns;
    return (char *)p->output + row * p->output_stride + head * p->head_stride +
           (column - head * p->head_columns) * item;
}

/* A block of rows and one panel of the output, from its numbers. */
static void round_block(const mha_linear_projection *p, const char *numbers, int64_t first_row,
                        int64_t first_column, const mha_matmul_block *block) {
    const mha_kernels *kernels = mha_kernels_for(p->dtype);
    const int64_t row_bytes = block->c_stride * (int64_t)mha_dtype_size(p->dtype);
    for (int64_t row = 0; row < block->rows; row++) {
        kernels->elementwise->write_row(numbers + row * row_bytes,
                                        output_at(p, first_row + row, first_column),
                                        p->output_storage, block->columns);
    }
}

/* A block of rows of the output times `count` panels of its columns. */
static void project_panels(const projection_job *job, int number, int64_t panel, int64_t count,
                           int64_t first_row, mha_worker *worker) {
    const mha_linear_projection *p = &job->projections[number];
    const mha_projection_plan *plan = &job->plans[number];
    const int64_t item = (int64_t)mha_dtype_size(p->dtype);
    const int64_t x_item = (int64_t)mha_storage_size(p->dtype, p->x_storage);
    const mha_panel_format *format = &job->kernels->matmul->panels;
    const int64_t width = format->columns;
    const int64_t first_column = panel * width;
    const int64_t rows_left = p->rows - first_row;
    const int64_t columns_left = p->weight.out - first_column;
    char *scratch = job->scratch_size == 0 ? NULL : mha_piece(&job->scratch, worker->number);
    char *unrounded = p->output_storage == MHA_AS_COMPUTED ? NULL : scratch + job->panel_size;

    mha_matmul_block block = {
        .checkpoint = &worker->checkpoint,
        .rows = mha_smaller(rows_left, plan->row_block),
        .depth = p->weight.in,
        .columns = mha_smaller(columns_left, count * width),
        .bias = p->bias == NULL ? NULL : (const char *)p->bias + first_column * item,
        .c = unrounded == NULL ? output_at(p, first_row, first_column) : unrounded,
        .c_stride = unrounded == NULL ? p->output_stride / item : width,
        .panel_storage = p->weight.storage,
        .panel_stride = width,
        .transposed = p->x_transposed,
        .packs_rows = plan->x_packing == X_PACKED_BY_CHAIN,
    };
    if (plan->x_packing == X_PACKED_BEFORE) {
        block.a = mha_packed_rows_block(&job->x_rows, first_row);
        block.a_stride = mha_packed_rows_stride(job->x_rows.block_rows, item);
    } else {
        block.a = (const char *)p->x + first_row * (p->x_transposed ? x_item : p->x_stride);
        block.a_stride = p->x_stride / x_item;
        block.a_storage = p->x_storage;
    }
    if (plan->arranged_bytes > 0) {
        arrange_rows(job, number, first_row, worker, &block);
    }
    if (mha_takes_unpacked(p)) {
        block.panel = (const char *)p->weight.data + first_column * p->weight.out_stride;
        block.panel_stride = p->weight.in_stride / item;
        block.column_stride = p->weight.out_stride / item;
        block.unpacked = true;
        block.scratch = scratch;
    } else if (p->weight.format != NULL) {
        block.panel = (const char *)p->weight.data + mha_panel_offset(p->dtype, &p->weight, panel);
    } else if (mha_reads_halves_in_place(p) && columns_left >= width) {
        block.panel = (const char *)p->weight.data + first_column * weight_item(p);
        if (p->weight.in > 1) { /* that of a single row may be any number */
            block.panel_stride = p->weight.in_stride / weight_item(p);
        }
    } else {
        format->pack(&p->weight, first_column, scratch, &worker->checkpoint);
        block.panel = scratch;
    }
    job->kernels->matmul->multiply(&block);
    if (unrounded != NULL) {
        round_block(p, unrounded, first_row, first_column, &block);
    }
}

/* Task: one block of rows times one group of panels of one of the weights. Where it is a head's,
 * the head is then prepared. */
static void run_task(void *context, int64_t task, mha_worker *worker) {
    const projection_job *job = context;
    int64_t group = task % job->groups; /* of this weight; of a weight that is prepared, its head */
    int number = 0;
    for (; group >= job->plans[number].groups; number++) {
        group -= job->plans[number].groups;
    }
    const mha_linear_projection *p = &job->projections[number];
    const mha_projection_plan *plan = &job->plans[number];
    const int64_t first_row = task / job->groups * plan->row_block;
    if (first_row >= p->rows) {
        return;
    }
    /* A group that is cut short at the last panel goes in one call, which looks at the columns. */
    const int64_t in_one_go = plan->panels_in_one_go, end = (group + 1) * plan->panels;
    for (int64_t panel = group * plan->panels; panel < end; panel += in_one_go) {
        project_panels(job, number, panel, mha_smaller(in_one_go, end - panel), first_row, worker);
    }
    if (p->prepare != NULL) {
        mha_prepare_block(p->prepare, first_row, mha_smaller(first_row + plan->row_block, p->rows),
                          group, group + 1, &worker->checkpoint);
    }
}

/* Task: one chain of depth of an x that is transposed. */
static void pack_rows_task(void *context, int64_t task, mha_worker *worker) {
    const projection_job *job = context;
    const int64_t first = task * MHA_DEPTH_CHAIN;
    mha_pack_rows(&job->x_rows, first, mha_smaller(first + MHA_DEPTH_CHAIN, job->x_rows.depth),
                  &worker->checkpoint);
}

static mha_status pack_rows(projection_job *job, int num_threads, mha_execution *execution) {
    const mha_linear_projection *p = &job->projections[0];
    const int64_t rows = mha_smaller(p->rows, job->plans[0].row_block);
    size_t size;
    job->x_rows = (mha_transposed_rows){
        .dtype = p->dtype,
        .rows = p->rows,
        .depth = p->weight.in,
        .block_rows = mha_larger(rows, 1),
        .from = p->x,
        .from_stride = p->x_stride,
        .storage = p->x_storage,
    };
    MHA_TRY(mha_packed_rows_size(&job->x_rows, &size));
    MHA_TRY(mha_workspace_take(&execution->workspace, size, &job->x_rows.blocks));
    return mha_run_tasks(execution, mha_divide_up(job->x_rows.depth, (int64_t)MHA_DEPTH_CHAIN),
                         num_threads, pack_rows_task, job);
}

static mha_status run_steps(const mha_linear_projection *projections, int count,
                            mha_execution *execution) {
    mha_linear_projection with_packed[MHA_MOST_PROJECTIONS] = {{.rows = 0}};
    mha_packed_weights weights;
    projection_job job;
    MHA_TRY(
        mha_with_packed_weights(projections, count, &execution->workspace, with_packed, &weights));
    MHA_TRY(plan(with_packed, count, worthwhile_threads(with_packed, count, execution->num_threads),
                 &job));
    const int64_t tasks = job.groups * job.row_blocks;
    const int num_threads = (int)mha_larger(mha_smaller(tasks, job.num_threads), 1);
    MHA_TRY(mha_pack_weights(&weights, count, num_threads, execution));
    if (job.plans[0].x_packing == X_PACKED_BEFORE) { /* whose projection is the only one */
        MHA_TRY(pack_rows(&job, num_threads, execution));
    }
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, job.scratch_size, (size_t)num_threads,
                                      &job.scratch));
    MHA_TRY(take_arranged(&job, num_threads, execution));
    return mha_run_tasks(execution, tasks, num_threads, run_task, &job);
}

mha_status mha_linear_projection_forward(const mha_linear_projection *projections, int count,
                                         mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    const mha_status status = run_steps(projections, count, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

mha_status mha_linear_projection_workspace(const mha_linear_projection *projections, int count,
                                           int num_threads, size_t *bytes) {
    mha_execution measuring = mha_measuring_execution(num_threads);
    MHA_TRY(mha_linear_projection_forward(projections, count, &measuring));
    *bytes = measuring.workspace.most;
    return MHA_OK;
}
