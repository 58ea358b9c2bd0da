/* How a projection is divided into tasks: blocks of rows times groups of panels of the weight. */
#include "core/projection/projection_plan.h"

#include "core/projection/matmul.h"
#include "core/projection/packed_weights.h"

/* Up to so many rows, halves of a weight are read as they lie, and rows of x are not arranged. */
enum { FEW_ROWS = 8 };

bool mha_reads_halves_in_place(const mha_linear_projection *p) {
    return p->weight.format == NULL && p->weight.storage != MHA_AS_COMPUTED &&
           p->rows <= FEW_ROWS && mha_panels_of(p->dtype)->is_plain &&
           p->weight.out_stride == (int64_t)mha_storage_size(p->dtype, p->weight.storage);
}

static int64_t num_panels(const mha_linear_projection *projection) {
    return mha_panel_count(mha_panels_of(projection->dtype), projection->weight.out);
}

/* Whether a weight has so few panels that not each thread would get some. */
static bool has_few_panels(const mha_linear_projection *p, int num_threads) {
    enum { FEWEST_OF_THREAD = 4 };
    return mha_takes_unpacked(p) && num_panels(p) < (int64_t)FEWEST_OF_THREAD * num_threads;
}

/* Of a narrow weight: whether the rows are divided among threads, else the columns. Each thread
 * reads all of what is not divided, so the longer side is. */
static bool takes_shares_of_rows(const mha_linear_projection *p) { return p->rows > p->weight.out; }

/* Rows of a task: more of a weight of halves or blocks, whose panels are widened for each of them.
 */
static int64_t row_block_of(const mha_linear_projection *p, int num_threads) {
    enum { MULTIPLE = 12 }; /* the rows of the highest tile */
    const int64_t most = MHA_UNPACKED_ROW_BLOCK;
    if (p->weight.format != NULL && p->weight.storage == MHA_AS_COMPUTED) {
        return MHA_PACKED_ROW_BLOCK;
    }
    if (has_few_panels(p, num_threads) && takes_shares_of_rows(p)) {
        const int64_t shares = num_threads * mha_divide_up(p->rows, num_threads * most);
        return mha_divide_up(mha_divide_up(p->rows, shares), MULTIPLE) * MULTIPLE;
    }
    return most;
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

/* Of a quantised weight, one row: a thread's share, a multiple of in_one_go. The kernel prefetches
 * the panels behind those at hand, which should be the same thread's. At most 16, since one core
 * may be slower than another. */
static int64_t quantised_panels(const mha_linear_projection *p, int num_threads) {
    enum { MOST = 16 };
    const int64_t in_one_go = mha_panels_of(p->dtype)->in_one_go;
    if (in_one_go == 1) {
        return 1;
    }
    const int64_t share = mha_divide_up(num_panels(p), in_one_go * num_threads) * in_one_go;
    return mha_smaller(share, MOST);
}

/* The panels that one call of the kernel takes: some of a weight that is not packed; of a packed
 * one more than one only where x has a single row. */
static int64_t panels_in_one_go(const mha_linear_projection *p, int64_t row_block,
                                int num_threads) {
    enum { FEWEST = 4 };
    const int64_t fewest = has_few_panels(p, num_threads) && !takes_shares_of_rows(p) ? 1 : FEWEST;
    const mha_storage storage = p->weight.storage;
    const bool is_packed =
        p->weight.format != NULL && (storage == MHA_AS_COMPUTED || mha_is_quantised(storage));
    if (mha_takes_unpacked(p) && output_is_plain(p)) {
        /* Few rows are read for most of the time: the longer the pieces, the faster. */
        const int of_thread = num_threads > 1 && p->rows > FEW_ROWS ? 2 : 1;
        const int64_t tasks = (int64_t)of_thread * num_threads;
        const int64_t row_blocks = mha_divide_up(p->rows, row_block);
        const int64_t count = mha_divide_up(num_panels(p) * row_blocks, tasks);
        return mha_smaller(mha_larger(count, fewest), most_unpacked_panels(p));
    }
    const bool is_row = p->rows == 1 && !p->x_transposed && p->x_storage == MHA_AS_COMPUTED;
    if (!is_packed || !is_row || p->weight.in == 0 || !output_is_plain(p)) {
        return 1;
    }
    return mha_is_quantised(storage) ? quantised_panels(p, num_threads)
                                     : mha_panels_of(p->dtype)->in_one_go;
}

/* The largest group of panels, at most 4, that divides them evenly among threads. The kernel
 * prefetches the panel behind the one at hand, which is another thread's where tasks are a panel
 * each; of many rows that does not matter. */
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
static int64_t panels_of_task(const mha_linear_projection *p, int64_t in_one_go, int num_threads) {
    return p->prepare == NULL ? mha_larger(in_one_go, neighbouring_panels(p, num_threads))
                              : p->head_columns / mha_panels_of(p->dtype)->columns;
}

/* Whether an x that is transposed stays in the first cache: then it is read as it lies. */
static bool is_small_transposed(const mha_linear_projection *p) {
    enum { MOST_BYTES = 16384 };
    return p->x_transposed && p->x_storage == MHA_AS_COMPUTED && p->x_stride >= 0 &&
           p->x_stride <= MOST_BYTES && p->weight.in * p->x_stride <= MOST_BYTES;
}

/* Whether rows are worth copying because they share a set: a few panels would not repay it. */
static bool rows_collide(const mha_linear_projection *p) {
    enum { FEWEST_PANELS = 16 };
    return p->x_storage == MHA_AS_COMPUTED && !p->x_transposed && p->x_stride != 0 &&
           mha_rows_share_a_set(p->x_stride) && num_panels(p) >= FEWEST_PANELS;
}

/* Of a block of rows as numbers, none of which collide. */
static mha_status arranged_row_bytes(const mha_linear_projection *p, size_t *bytes) {
    enum { BYTES_OF_A_LINE = 64 };
    MHA_TRY(mha_multiply_sizes((size_t)p->weight.in, mha_dtype_size(p->dtype), bytes));
    return mha_rows_share_a_set((int64_t)*bytes) ? mha_add_sizes(*bytes, BYTES_OF_A_LINE, bytes)
                                                 : MHA_OK;
}

/* A block of rows is arranged as numbers where they lie as halves, elsewhere where they collide, or
 * in a form of the kernels' own; not where they are few, or a block would not stay in a cache. */
static mha_status plan_arranged_rows(const mha_linear_projection *p, mha_projection_plan *plan) {
    enum { MOST_ARRANGED_BYTES = 16 << 20 };
    const mha_row_format *format = &mha_kernels_for(p->dtype)->matmul->rows;
    size_t depth = (size_t)p->weight.in, bytes;
    size_t rows = (size_t)mha_smaller(p->rows, plan->row_block);
    if (p->rows <= FEW_ROWS || (format->arrange == NULL && !rows_collide(p) &&
                                (p->x_storage == MHA_AS_COMPUTED || p->x_transposed))) {
        return MHA_OK;
    }
    if (format->arrange != NULL) {
        const size_t multiple = (size_t)format->multiple;
        MHA_TRY(mha_add_sizes(depth, multiple - 1, &depth));
        depth = depth / multiple * multiple;
        rows = (rows + multiple - 1) / multiple * multiple;
        MHA_TRY(mha_multiply_sizes(depth, (size_t)format->item, &plan->arranged_row));
    } else {
        MHA_TRY(arranged_row_bytes(p, &plan->arranged_row));
    }
    MHA_TRY(mha_multiply_sizes(rows, plan->arranged_row, &bytes));
    plan->arranged_bytes = bytes > MOST_ARRANGED_BYTES ? 0 : bytes;
    return MHA_OK;
}

mha_status mha_plan_projection(const mha_linear_projection *p, int num_threads,
                               mha_projection_plan *plan) {
    *plan = (mha_projection_plan){.row_block = row_block_of(p, num_threads)};
    plan->panels_in_one_go = panels_in_one_go(p, plan->row_block, num_threads);
    plan->panels = panels_of_task(p, plan->panels_in_one_go, num_threads);
    plan->groups = mha_divide_up(num_panels(p), plan->panels);
    plan->x_packing = !p->x_transposed || is_small_transposed(p) ? X_AS_IT_LIES
                      : mha_packs_rows_by_chain(p)               ? X_PACKED_BY_CHAIN
                                                                 : X_PACKED_BEFORE;
    return plan_arranged_rows(p, plan);
}
