#include "per_head_backward.h"

#include <string.h>

#include "run.h"

bool mha_wants_per_head(const mha_attention_gradients *gradients) {
    return gradients->grad_alibi.data != NULL || gradients->grad_relative_bias.data != NULL ||
           gradients->grad_sinks.data != NULL;
}

static int64_t farthest_of(const mha_gradient_job *job) {
    const mha_tensor *table = &job->gradients->grad_relative_bias;
    return table->data == NULL ? 0 : (mha_extent(table, 1) - 1) / 2;
}

/* The distances, key - query - query_offset, within the table's ends that a chunk meets. */
typedef struct diagonals {
    int64_t first, count;
} diagonals;

static diagonals diagonals_of(const mha_gradient_job *job, int64_t batch, int64_t chunk) {
    const int64_t offset = mha_query_offset(job->attention, batch);
    const int64_t key_len = mha_extent(&job->attention->key, 2);
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const int64_t first_key = chunk * job->chunk_keys;
    const int64_t end_key = mha_smaller(first_key + job->chunk_keys, key_len);
    const int64_t first = mha_larger(first_key - (query_len - 1) - offset, 1 - farthest_of(job));
    const int64_t end = mha_smaller(end_key - offset, farthest_of(job));
    const diagonals found = {first, mha_larger(end - first, 0)};
    return found;
}

mha_status mha_take_per_head(mha_gradient_job *job, mha_workspace *workspace) {
    const mha_attention *a = job->attention;
    const int64_t shape[] = {job->batch, job->heads, mha_extent(&a->query, 2)};
    int64_t rows, pieces;
    size_t bytes;
    void *piece;
    if (!mha_wants_per_head(job->gradients)) {
        return MHA_OK;
    }
    MHA_TRY(mha_count_elements(shape, 3, &rows));
    MHA_TRY(mha_multiply_sizes(sizeof *job->row_sums, (size_t)rows, &bytes));
    MHA_TRY(mha_workspace_take(workspace, bytes, &piece));
    job->row_sums = piece;
    if (job->gradients->grad_relative_bias.data == NULL) {
        return MHA_OK;
    }
    /* As many as the table has between its ends, or as a chunk meets. */
    job->most_diagonals = mha_smaller(mha_larger(2 * farthest_of(job) - 1, 0),
                                      job->chunk_keys + mha_extent(&a->query, 2));
    const int64_t of_chunks[] = {job->batch, job->heads, job->chunks};
    MHA_TRY(mha_count_elements(of_chunks, 3, &pieces));
    MHA_TRY(mha_multiply_sizes(sizeof(mha_compensated_sum), (size_t)job->most_diagonals, &bytes));
    return mha_workspace_take_pieces(workspace, bytes, (size_t)pieces, &job->diagonals);
}

static mha_compensated_sum *sums_of_diagonals(const mha_gradient_job *job, int64_t batch,
                                              int64_t head, int64_t chunk) {
    return mha_piece(&job->diagonals, (batch * job->heads + head) * job->chunks + chunk);
}

void mha_clear_diagonals(const mha_gradient_job *job, int64_t batch, int64_t head, int chunk,
                         mha_worker *worker) {
    if (job->gradients->grad_relative_bias.data != NULL &&
        !mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * job->most_diagonals)) {
        memset(sums_of_diagonals(job, batch, head, chunk), 0,
               (size_t)job->most_diagonals * sizeof(mha_compensated_sum));
    }
}

static mha_row_sums *sums_of_rows(const mha_gradient_job *job, int64_t batch, int64_t head) {
    return job->row_sums + (batch * job->heads + head) * mha_extent(&job->attention->query, 2);
}

void mha_want_per_head(const mha_gradient_job *job, int64_t batch, int64_t head, int chunk,
                       mha_attention_backward_block *block) {
    if (!mha_wants_per_head(job->gradients)) {
        return;
    }
    block->row_sums = sums_of_rows(job, batch, head) + block->attention.first_query;
    if (job->gradients->grad_relative_bias.data != NULL) {
        const diagonals found = diagonals_of(job, batch, chunk);
        block->diagonal_sums = sums_of_diagonals(job, batch, head, chunk);
        block->first_diagonal = found.first;
        block->diagonals = found.count;
    }
}

/* What is lost is NaN where the sum is no longer finite. */
static double value_of(mha_compensated_sum sum) {
    return sum.lost == sum.lost ? sum.sum + sum.lost : sum.sum;
}

static void add(mha_compensated_sum *to, double added) {
    const double total = to->sum + added, of_added = total - to->sum, of_sum = total - of_added;
    to->lost += (to->sum - of_sum) + (added - of_added);
    to->sum = total;
}

/* A row's sum of gradients, without the part of its rounding that these have: the gradients of the
 * row's scores and its sink add up to grad lse. */
static double without_rounding(mha_moments moments, double rounding) {
    return moments.weights == 0 ? moments.gradients
                                : moments.gradients + moments.weights * rounding;
}

/* Of the rows of one or more heads. */
typedef struct head_sums {
    mha_compensated_sum distances, before, behind, sink;
} head_sums;

static void add_head(const mha_gradient_job *job, int64_t batch, int64_t head, head_sums *sums,
                     mha_worker *worker) {
    const mha_elementwise_kernels *kernels = job->kernels->elementwise;
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const mha_row_sums *rows = sums_of_rows(job, batch, head);
    for (int64_t i = 0; i < query_len; i++) {
        if (mha_stop_after(&worker->checkpoint, 8 * MHA_WORK_OF_MOVING)) {
            return;
        }
        const int64_t row = (batch * job->heads + head) * query_len + i;
        const void *grad_lse = job->gradients->grad_lse;
        const double whole = grad_lse == NULL ? 0 : kernels->read(grad_lse, row);
        const double rounding = whole - rows[i].total - rows[i].sink;
        add(&sums->distances, without_rounding(rows[i].distances, rounding));
        add(&sums->before, without_rounding(rows[i].before, rounding));
        add(&sums->behind, without_rounding(rows[i].behind, rounding));
        add(&sums->sink, rows[i].sink);
    }
}

static void write_to(const mha_gradient_job *job, const mha_tensor *gradient, int64_t at,
                     double number) {
    if (gradient->data != NULL) {
        job->kernels->elementwise->write(gradient->data, at, number);
    }
}

/* Between its ends, the table's gradient is that of the diagonals: of the heads first..end. */
static double sum_of_diagonal(const mha_gradient_job *job, int64_t first, int64_t end,
                              int64_t distance) {
    mha_compensated_sum sum = {0, 0};
    for (int64_t batch = 0; batch < job->batch; batch++) {
        for (int64_t chunk = 0; chunk < job->chunks; chunk++) {
            const diagonals found = diagonals_of(job, batch, chunk);
            const int64_t at = distance - found.first;
            for (int64_t head = first; head < end && at >= 0 && at < found.count; head++) {
                add(&sum, value_of(sums_of_diagonals(job, batch, head, chunk)[at]));
            }
        }
    }
    return value_of(sum);
}

/* One row of the gradient of relative_bias. */
static void write_table(const mha_gradient_job *job, int64_t first, int64_t end, head_sums sums,
                        mha_worker *worker) {
    const mha_tensor *table = &job->gradients->grad_relative_bias;
    const int64_t farthest = farthest_of(job), row = first * (2 * farthest + 1);
    const double before = value_of(sums.before), behind = value_of(sums.behind);
    const int64_t work = job->batch * job->chunks * (end - first + 1);
    write_to(job, table, row, farthest == 0 ? before + behind : before);
    for (int64_t distance = 1 - farthest; distance < farthest; distance++) {
        if (mha_stop_after(&worker->checkpoint, 8 * work + 1)) {
            return;
        }
        write_to(job, table, row + farthest + distance, sum_of_diagonal(job, first, end, distance));
    }
    if (farthest > 0) {
        write_to(job, table, row + 2 * farthest, behind);
    }
}

/* Task: a head; the first one does what all share. */
static void differentiate_head(void *context, int64_t head, mha_worker *worker) {
    const mha_gradient_job *job = context;
    const mha_attention_gradients *g = job->gradients;
    const mha_tensor *table = &g->grad_relative_bias;
    head_sums own = {{0, 0}, {0, 0}, {0, 0}, {0, 0}}, all = own;
    for (int64_t batch = 0; batch < job->batch; batch++) {
        add_head(job, batch, head, &own, worker);
    }
    write_to(job, &g->grad_alibi, head, -value_of(own.distances));
    write_to(job, &g->grad_sinks, head, value_of(own.sink));
    if (table->data == NULL) {
        return;
    }
    if (job->heads == 1 || mha_stride(table, 2) != 0) {
        write_table(job, head, head + 1, own, worker);
        return;
    }
    if (head > 0) {
        return;
    }
    for (int64_t item = 0; item < job->batch * job->heads; item++) {
        add_head(job, item / job->heads, item % job->heads, &all, worker);
    }
    write_table(job, 0, job->heads, all, worker);
}

mha_status mha_per_head_backward(const mha_gradient_job *job, mha_execution *execution) {
    if (!mha_wants_per_head(job->gradients)) {
        return MHA_OK;
    }
    const double rows = (double)job->batch * (double)mha_extent(&job->attention->query, 2);
    const double entries = (double)job->batch * (double)job->chunks * (double)job->most_diagonals;
    const int threads = mha_threads_for(job->heads, (double)job->heads * 16 * (rows + entries),
                                        execution->num_threads);
    return mha_run_tasks(execution, job->heads, threads, differentiate_head, (void *)job);
}
