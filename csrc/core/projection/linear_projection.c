/* Steps 1 and 5 of the figure: output = x @ weight + bias, by tasks of some panels of the weight
 * times a block of rows. A weight that is not packed is packed first where many blocks of rows read
 * it. Else the kernel takes it as it lies: few rows read it once, more rows pack it chain by chain.
 * What the kernel cannot take so is packed into the worker's own scratch, panel by panel. */
#include <string.h>

#include "core/base/run.h"
#include "core/heads/prepare_heads.h"
#include "core/projection/matmul.h"
#include "core/projection/packed_weights.h"
#include "threads/partition.h"

enum { FEW_ROWS = 8 };

/* Projections that run side by side: tasks go row block by row block, and within one through the
 * panels of all weights, so that a block of rows that several share is read once. */
typedef struct projection_job {
    const mha_linear_projection *projections;
    int count;
    const mha_kernels *kernels;
    int num_threads; /* at most, as many as the work is worth */
    /* Panels that one task goes through, of each weight, how many such groups there are, and of all
     * weights. */
    int64_t panels_of_group[MHA_MOST_PROJECTIONS], groups_of[MHA_MOST_PROJECTIONS], groups;
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

static int64_t weight_item(const mha_linear_projection *projection) {
    return (int64_t)mha_storage_size(projection->dtype, projection->weight.storage);
}

/* Whether a weight of halves is read as it lies. */
static bool reads_in_place(const mha_linear_projection *p) {
    return p->rows <= FEW_ROWS && mha_panels_of(p->dtype)->is_plain &&
           p->weight.out_stride == weight_item(p);
}

static int64_t num_panels(const mha_linear_projection *projection) {
    return mha_panel_count(mha_panels_of(projection->dtype), projection->weight.out);
}

/* Whether a weight has so few panels that not each thread would get some. */
static bool is_narrow(const mha_linear_projection *p, int num_threads) {
    enum { FEWEST_OF_THREAD = 4 };
    return mha_takes_unpacked(p) && num_panels(p) < (int64_t)FEWEST_OF_THREAD * num_threads;
}

/* Whether each thread takes a share of the rows, else of the columns: the fewer are read twice. */
static bool takes_shares_of_rows(const mha_linear_projection *p) { return p->rows > p->weight.out; }

/* Rows of a task. A panel of halves is widened for every block of rows. */
static int64_t row_block_of(const mha_linear_projection *p, int num_threads) {
    enum { MULTIPLE = 12 };
    const int64_t most = MHA_UNPACKED_ROW_BLOCK;
    if (p->weight.format != NULL && p->weight.storage == MHA_AS_COMPUTED) {
        return MHA_PACKED_ROW_BLOCK;
    }
    if (is_narrow(p, num_threads) && takes_shares_of_rows(p)) {
        const int64_t shares = num_threads * mha_divide_up(p->rows, num_threads * most);
        return mha_divide_up(mha_divide_up(p->rows, shares), MULTIPLE) * MULTIPLE;
    }
    return most;
}

static int64_t row_blocks_of(const mha_linear_projection *p, int num_threads) {
    return mha_divide_up(p->rows, row_block_of(p, num_threads));
}

/* Whether all columns of the output lie side by side, as numbers. */
static bool output_is_plain(const mha_linear_projection *p) {
    return p->output_storage == MHA_AS_COMPUTED &&
           (p->head_columns == 0 ||
            p->head_stride == p->head_columns * (int64_t)mha_dtype_size(p->dtype));
}

/* The most panels of a weight that is not packed that a task takes. Few rows read it as it lies: a
 * wide part, from front to back. */
static int64_t most_unpacked_panels(const mha_linear_projection *p) {
    enum { MOST_OF_FEW_ROWS = 128, MOST_OF_ROWS = 64 };
    return p->prepare != NULL             ? p->head_columns / mha_panels_of(p->dtype)->columns
           : p->rows <= MHA_ROWS_IN_PLACE ? MOST_OF_FEW_ROWS
                                          : MOST_OF_ROWS;
}

/* Panels that the kernel takes in one go: of a packed weight of one row alone. */
static int64_t panels_in_one_go(const mha_linear_projection *p, int num_threads) {
    enum { FEWEST = 4, TASKS_OF_THREAD = 2 };
    const int64_t fewest = is_narrow(p, num_threads) && !takes_shares_of_rows(p) ? 1 : FEWEST;
    const bool is_packed = p->weight.format != NULL && p->weight.storage == MHA_AS_COMPUTED;
    if (mha_takes_unpacked(p) && output_is_plain(p)) {
        const int64_t tasks = num_threads > 1 ? (int64_t)TASKS_OF_THREAD * num_threads : 1;
        const int64_t count = mha_divide_up(num_panels(p) * row_blocks_of(p, num_threads), tasks);
        return mha_smaller(mha_larger(count, fewest), most_unpacked_panels(p));
    }
    return is_packed && p->rows == 1 && p->weight.in > 0 && p->x_storage == MHA_AS_COMPUTED &&
                   output_is_plain(p)
               ? mha_panels_of(p->dtype)->in_one_go
               : 1;
}

/* The most panels side by side that leave each thread as many tasks. The kernel prefetches the
 * panel behind the one at hand, which is another thread's where tasks are a panel each; of many
 * rows that does not matter. */
static int64_t neighbouring_panels(const mha_linear_projection *p, int num_threads) {
    enum { MOST = 4 };
    const bool is_read_once = p->weight.format != NULL && p->rows <= MHA_PACKED_ROW_BLOCK;
    int64_t count = is_read_once && num_threads > 1 ? MOST : 1;
    while (count > 1 && num_panels(p) % (count * num_threads) != 0) {
        count--;
    }
    return count;
}

/* The panels of a task; those of a head together where it is prepared in the same task. */
static int64_t panels_of_group(const mha_linear_projection *projection, int num_threads) {
    return projection->prepare == NULL
               ? mha_larger(panels_in_one_go(projection, num_threads),
                            neighbouring_panels(projection, num_threads))
               : projection->head_columns / mha_panels_of(projection->dtype)->columns;
}

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

/* Whether an x that is transposed stays in the first cache: then it is read as it lies. */
static bool is_small_transposed(const mha_linear_projection *p) {
    enum { MOST_BYTES = 16384 };
    return p->x_transposed && p->x_storage == MHA_AS_COMPUTED && p->x_stride >= 0 &&
           p->x_stride <= MOST_BYTES && p->weight.in * p->x_stride <= MOST_BYTES;
}

static mha_transposed_rows transposed_rows_of(const mha_linear_projection *p, int num_threads) {
    const int64_t rows = mha_smaller(p->rows, row_block_of(p, num_threads));
    const mha_transposed_rows x = {
        .dtype = p->dtype,
        .rows = p->rows,
        .depth = p->weight.in,
        .block_rows = rows > 0 ? rows : 1,
        .from = p->x,
        .from_stride = p->x_stride,
        .storage = p->x_storage,
    };
    return x;
}

/* Numbers of a block of rows and a panel, before they are rounded. */
static mha_status rounded_size(const mha_linear_projection *p, int num_threads, size_t *bytes) {
    const size_t row = (size_t)mha_panels_of(p->dtype)->columns * mha_dtype_size(p->dtype);
    *bytes = 0;
    return p->output_storage == MHA_AS_COMPUTED
               ? MHA_OK
               : mha_multiply_sizes((size_t)mha_smaller(p->rows, row_block_of(p, num_threads)), row,
                                    bytes);
}

/* At the start of a worker's piece: which block of rows follows, ARRANGED_AT bytes behind. */
typedef struct arranged_rows {
    const void *x; /* NULL: none yet */
    int64_t first_row, rows, columns, stride;
    mha_storage storage;
} arranged_rows;
enum { ARRANGED_AT = 64, MOST_ARRANGED_BYTES = 16 << 20 };
_Static_assert(sizeof(arranged_rows) <= ARRANGED_AT, "what follows begins behind");

/* Rows so far apart fall in the same sets of the first cache, which holds eight of them: those of a
 * tile would drive each other out. */
enum { BYTES_OF_A_WAY = 4096, BYTES_OF_A_LINE = 64 };

/* Whether rows are worth copying for that: a few panels would not repay it. */
static bool rows_collide(const mha_linear_projection *p) {
    enum { FEWEST_PANELS = 16 };
    return p->x_storage == MHA_AS_COMPUTED && !p->x_transposed && p->x_stride != 0 &&
           p->x_stride % BYTES_OF_A_WAY == 0 && num_panels(p) >= FEWEST_PANELS;
}

/* Of a block of rows as numbers, none of which collide. */
static mha_status arranged_row_bytes(const mha_linear_projection *p, size_t *bytes) {
    MHA_TRY(mha_multiply_sizes((size_t)p->weight.in, mha_dtype_size(p->dtype), bytes));
    return *bytes % BYTES_OF_A_WAY == 0 ? mha_add_sizes(*bytes, BYTES_OF_A_LINE, bytes) : MHA_OK;
}

/* Bytes of a block of rows as the kernels read it best: as numbers where they lie as halves,
 * elsewhere where they collide, or in a form of their own; 0 where the product reads them as they
 * lie: where they are few, or a block would not stay in a cache. */
static mha_status arranged_bytes(const mha_linear_projection *p, int num_threads, size_t *bytes) {
    const mha_row_format *format = &mha_kernels_for(p->dtype)->matmul->rows;
    size_t depth = (size_t)p->weight.in, row_bytes;
    size_t rows = (size_t)mha_smaller(p->rows, row_block_of(p, num_threads));
    *bytes = 0;
    if (p->rows <= FEW_ROWS || (format->arrange == NULL && !rows_collide(p) &&
                                (p->x_storage == MHA_AS_COMPUTED || p->x_transposed))) {
        return MHA_OK;
    }
    if (format->arrange != NULL) {
        const size_t multiple = (size_t)format->multiple;
        MHA_TRY(mha_add_sizes(depth, multiple - 1, &depth));
        depth = depth / multiple * multiple;
        rows = (rows + multiple - 1) / multiple * multiple;
        MHA_TRY(mha_multiply_sizes(depth, (size_t)format->item, &row_bytes));
    } else {
        MHA_TRY(arranged_row_bytes(p, &row_bytes));
    }
    MHA_TRY(mha_multiply_sizes(rows, row_bytes, bytes));
    *bytes = *bytes > MOST_ARRANGED_BYTES ? 0 : *bytes + ARRANGED_AT;
    return MHA_OK;
}

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

/* Whether the block is there already. That of another projection may begin at the same number and
 * have fewer rows: a query that is the start of key. */
static bool is_of_block(const arranged_rows *arranged, const mha_linear_projection *p,
                        int64_t first_row, const mha_matmul_block *block) {
    return arranged->x == p->x && arranged->first_row == first_row &&
           arranged->rows >= block->rows && arranged->columns == block->depth &&
           arranged->stride == p->x_stride && arranged->storage == p->x_storage;
}

/* The block's rows in the form that the kernels read best, arranged once for all panels that the
 * worker takes in a row. */
static void arrange_rows(const projection_job *job, const mha_linear_projection *p,
                         int64_t first_row, mha_worker *worker, mha_matmul_block *block) {
    const mha_row_format *format = &job->kernels->matmul->rows;
    size_t bytes, row_bytes;
    if (job->arranged_size == 0 || arranged_bytes(p, job->num_threads, &bytes) != MHA_OK ||
        bytes == 0 || arranged_row_bytes(p, &row_bytes) != MHA_OK) {
        return;
    }
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

static mha_status plan(const mha_linear_projection *projections, int count, int num_threads,
                       projection_job *job) {
    *job = (projection_job){.projections = projections, .count = count, .num_threads = num_threads};
    job->kernels = mha_kernels_for(projections[0].dtype);
    size_t most_rounded = 0;
    for (int i = 0; i < count; i++) {
        const mha_linear_projection *p = &projections[i];
        const int64_t row_blocks = row_blocks_of(p, num_threads);
        size_t panel_size = 0, rounded = 0, arranged = 0;
        job->panels_of_group[i] = panels_of_group(p, num_threads);
        job->groups_of[i] = mha_divide_up(num_panels(p), job->panels_of_group[i]);
        job->groups += job->groups_of[i];
        job->row_blocks = row_blocks > job->row_blocks ? row_blocks : job->row_blocks;
        if (!mha_weight_fits(&p->weight, p->dtype)) {
            return MHA_INVALID_ARGUMENT;
        }
        if (mha_takes_unpacked(p)) {
            panel_size = job->kernels->matmul->unpacked_scratch_size(
                mha_smaller(p->rows, row_block_of(p, num_threads)), p->weight.in,
                p->x_transposed && mha_packs_rows_by_chain(p) && !is_small_transposed(p));
        } else if (p->weight.format == NULL) {
            MHA_TRY(mha_panel_size(p->dtype, &p->weight, &panel_size));
        }
        MHA_TRY(rounded_size(p, num_threads, &rounded));
        MHA_TRY(arranged_bytes(p, num_threads, &arranged));
        job->arranged_size = arranged > job->arranged_size ? arranged : job->arranged_size;
        job->panel_size = panel_size > job->panel_size ? panel_size : job->panel_size;
        most_rounded = rounded > most_rounded ? rounded : most_rounded;
    }
    return mha_add_sizes(job->panel_size, most_rounded, &job->scratch_size);
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
static void project_panels(const projection_job *job, const mha_linear_projection *p, int64_t panel,
                           int64_t count, int64_t first_row, mha_worker *worker) {
    const int64_t item = (int64_t)mha_dtype_size(p->dtype);
    const mha_panel_format *format = &job->kernels->matmul->panels;
    const int64_t width = format->columns;
    const int64_t first_column = panel * width;
    const int64_t rows_left = p->rows - first_row;
    const int64_t columns_left = p->weight.out - first_column;
    char *scratch = job->scratch_size == 0 ? NULL : mha_piece(&job->scratch, worker->number);
    char *rounded = p->output_storage == MHA_AS_COMPUTED ? NULL : scratch + job->panel_size;

    mha_matmul_block block = {
        .checkpoint = &worker->checkpoint,
        .rows = mha_smaller(rows_left, row_block_of(p, job->num_threads)),
        .depth = p->weight.in,
        .columns = mha_smaller(columns_left, count * width),
        .bias = p->bias == NULL ? NULL : (const char *)p->bias + first_column * item,
        .c = rounded == NULL ? output_at(p, first_row, first_column) : rounded,
        .c_stride = rounded == NULL ? p->output_stride / item : width,
        .panel_storage = p->weight.storage,
        .panel_stride = width,
    };
    if (is_small_transposed(p) || mha_packs_rows_by_chain(p)) {
        const int64_t x_item = (int64_t)mha_storage_size(p->dtype, p->x_storage);
        block.a = (const char *)p->x + first_row * x_item;
        block.a_stride = p->x_stride / x_item;
        block.a_storage = p->x_storage;
        block.transposed = true;
        block.packs_rows = !is_small_transposed(p);
    } else if (p->x_transposed) {
        block.a = mha_packed_rows_block(&job->x_rows, first_row);
        block.a_stride = mha_packed_rows_stride(p->dtype, job->x_rows.block_rows);
        block.transposed = true;
    } else {
        block.a = (const char *)p->x + first_row * p->x_stride;
        block.a_stride = p->x_stride / (int64_t)mha_storage_size(p->dtype, p->x_storage);
        block.a_storage = p->x_storage;
    }
    arrange_rows(job, p, first_row, worker, &block);
    if (mha_takes_unpacked(p)) {
        block.panel = (const char *)p->weight.data + first_column * p->weight.out_stride;
        block.panel_stride = p->weight.in_stride / item;
        block.column_stride = p->weight.out_stride / item;
        block.unpacked = true;
        block.scratch = scratch;
    } else if (p->weight.format != NULL) {
        block.panel = (const char *)p->weight.data + mha_panel_offset(p->dtype, &p->weight, panel);
    } else if (reads_in_place(p) && columns_left >= width) {
        block.panel = (const char *)p->weight.data + first_column * weight_item(p);
        if (p->weight.in > 1) { /* that of a single row may be any number */
            block.panel_stride = p->weight.in_stride / weight_item(p);
        }
    } else {
        format->pack(&p->weight, first_column, scratch, &worker->checkpoint);
        block.panel = scratch;
    }
    job->kernels->matmul->multiply(&block);
    if (rounded != NULL) {
        round_block(p, rounded, first_row, first_column, &block);
    }
}

/* Task: one block of rows and one panel, or those of a head, of one of the weights. */
static void run_task(void *context, int64_t task, mha_worker *worker) {
    const projection_job *job = context;
    const mha_linear_projection *p = job->projections;
    int64_t group = task % job->groups;
    int number = 0;
    for (; group >= job->groups_of[number]; number++, p++) {
        group -= job->groups_of[number];
    }
    const int64_t first_row = task / job->groups * row_block_of(p, job->num_threads);
    const int64_t panels = job->panels_of_group[number];
    if (first_row >= p->rows) {
        return;
    }
    const int64_t in_one_go = panels_in_one_go(p, job->num_threads), end = (group + 1) * panels;
    for (int64_t panel = group * panels; panel < end; panel += in_one_go) {
        project_panels(job, p, panel, mha_smaller(in_one_go, end - panel), first_row, worker);
    }
    if (p->prepare != NULL) {
        mha_prepare_block(p->prepare, first_row,
                          mha_smaller(first_row + row_block_of(p, job->num_threads), p->rows),
                          group, group + 1, &worker->checkpoint);
    }
}

/* Task: one chain of depth of an x that is transposed. */
static void pack_rows_task(void *context, int64_t task, mha_worker *worker) {
    const projection_job *job = context;
    const int64_t first = task * MHA_DEPTH_CHAIN, left = job->x_rows.depth - first;
    mha_pack_rows(&job->x_rows, first, first + (left < MHA_DEPTH_CHAIN ? left : MHA_DEPTH_CHAIN),
                  &worker->checkpoint);
}

static mha_status pack_rows(projection_job *job, int num_threads, mha_execution *execution) {
    size_t size;
    job->x_rows = transposed_rows_of(&job->projections[0], job->num_threads);
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
    if (projections[0].x_transposed && !is_small_transposed(&projections[0]) &&
        !mha_packs_rows_by_chain(&with_packed[0])) {
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
