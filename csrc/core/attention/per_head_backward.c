#include "core/attention/per_head_backward.h"

#include <string.h>

#include "core/base/run.h"

bool mha_wants_per_head(const mha_attention_gradients *gradients) {
    return gradients->grad_alibi.data != NULL || gradients->grad_relative_bias.data != NULL ||
           gradients->grad_sinks.data != NULL;
}

static int64_t farthest_of(const mha_attention_gradients *gradients) {
    const mha_head_numbers *table = &gradients->grad_relative_bias;
    return table->data == NULL ? 0 : (table->columns - 1) / 2;
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
    const int64_t farthest = farthest_of(job->gradients);
    const int64_t first = mha_larger(first_key - (query_len - 1) - offset, 1 - farthest);
    const int64_t end = mha_smaller(end_key - offset, farthest);
    return (diagonals){first, mha_larger(end - first, 0)};
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
    job->most_diagonals = mha_smaller(mha_larger(2 * farthest_of(job->gradients) - 1, 0),
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

/* A row's sum of gradients, without the part of its rounding that these have: the gradients of the
 * row's scores and its sink add up to grad lse where all of them are here. */
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
        const int64_t row = mha_result_row(job->attention, batch, head, i);
        const void *grad_lse = job->gradients->grad_lse;
        const double whole = grad_lse == NULL ? 0 : kernels->read(grad_lse, row);
        const bool is_whole = !job->attention->sees_part;
        const double rounding = is_whole ? whole - rows[i].total - rows[i].sink : 0;
        mha_add_compensated(&sums->distances, without_rounding(rows[i].distances, rounding));
        mha_add_compensated(&sums->before, without_rounding(rows[i].before, rounding));
        mha_add_compensated(&sums->behind, without_rounding(rows[i].behind, rounding));
        mha_add_compensated(&sums->sink, rows[i].sink);
    }
}

/* The pass: its jobs, and for each head sums of the distances between the table's ends. */
typedef struct per_head_pass {
    const mha_gradient_jobs *jobs;
    const mha_attention_gradients *gradients;
    int64_t heads, farthest;
    mha_pieces distances; /* 2 * farthest - 1 of each head, from 1 - farthest on */
} per_head_pass;

/* Adds what the diagonals of the heads first..end leave to the sums of their distances. */
static void add_diagonals(const per_head_pass *pass, const mha_gradient_job *job, int64_t first,
                          int64_t end, mha_compensated_sum *distances, mha_worker *worker) {
    for (int64_t batch = 0; batch < job->batch; batch++) {
        for (int64_t chunk = 0; chunk < job->chunks; chunk++) {
            const diagonals found = diagonals_of(job, batch, chunk);
            for (int64_t head = first; head < end && found.count > 0; head++) {
                mha_compensated_sum *to = distances + (found.first - (1 - pass->farthest));
                const mha_compensated_sum *from = sums_of_diagonals(job, batch, head, chunk);
                if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * found.count)) {
                    return;
                }
                for (int64_t i = 0; i < found.count; i++) {
                    mha_add_compensated(&to[i], mha_value_of(from[i]));
                }
            }
        }
    }
}

/* One row of the gradient of relative_bias: between its ends that of the diagonals of the heads
 * first..end, of every job. */
static void write_table(const per_head_pass *pass, int64_t first, int64_t end, head_sums sums,
                        mha_worker *worker) {
    const int64_t farthest = pass->farthest, row = first * (2 * farthest + 1);
    const mha_head_numbers *table = &pass->gradients->grad_relative_bias;
    const mha_elementwise_kernels *kernels = pass->jobs->kernels;
    const double before = mha_value_of(sums.before), behind = mha_value_of(sums.behind);
    mha_compensated_sum *distances = mha_piece(&pass->distances, first);
    const int64_t count = 2 * farthest - 1;
    if (farthest == 0) {
        kernels->write(table->data, row, before + behind);
        return;
    }
    if (mha_stop_after(&worker->checkpoint, 2 * MHA_WORK_OF_MOVING * count)) {
        return;
    }
    memset(distances, 0, (size_t)count * sizeof *distances);
    for (int64_t number = 0; number < pass->jobs->count; number++) {
        add_diagonals(pass, mha_gradient_job_at(pass->jobs, number, worker), first, end, distances,
                      worker);
    }
    kernels->write(table->data, row, before);
    for (int64_t i = 0; i < count; i++) {
        kernels->write(table->data, row + 1 + i, mha_value_of(distances[i]));
    }
    kernels->write(table->data, row + 2 * farthest, behind);
}

static void write_to(const per_head_pass *pass, const mha_head_numbers *gradient, int64_t head,
                     double number) {
    if (gradient->data != NULL) {
        pass->jobs->kernels->write(gradient->data, head, number);
    }
}

/* Task: a head; the first one does what all share. */
static void differentiate_head(void *context, int64_t head, mha_worker *worker) {
    const per_head_pass *pass = context;
    const mha_attention_gradients *g = pass->gradients;
    const mha_head_numbers *table = &g->grad_relative_bias;
    head_sums own = {{0, 0}, {0, 0}, {0, 0}, {0, 0}}, all = own;
    for (int64_t number = 0; number < pass->jobs->count; number++) {
        const mha_gradient_job *job = mha_gradient_job_at(pass->jobs, number, worker);
        for (int64_t batch = 0; batch < job->batch; batch++) {
            add_head(job, batch, head, &own, worker);
        }
    }
    write_to(pass, &g->grad_alibi, head, -mha_value_of(own.distances));
    write_to(pass, &g->grad_sinks, head, mha_value_of(own.sink));
    if (table->data == NULL) {
        return;
    }
    if (pass->heads == 1 || table->stride != 0) {
        write_table(pass, head, head + 1, own, worker);
        return;
    }
    if (head > 0) {
        return;
    }
    for (int64_t number = 0; number < pass->jobs->count; number++) {
        const mha_gradient_job *job = mha_gradient_job_at(pass->jobs, number, worker);
        for (int64_t item = 0; item < job->batch * pass->heads; item++) {
            add_head(job, item / pass->heads, item % pass->heads, &all, worker);
        }
    }
    write_table(pass, 0, pass->heads, all, worker);
}

double mha_sums_of_a_head(const mha_gradient_job *job) {
    const double diagonals_of_chunks = (double)job->chunks * (double)job->most_diagonals;
    const double rows = (double)mha_extent(&job->attention->query, 2);
    return (double)job->batch * (rows + diagonals_of_chunks);
}

mha_status mha_per_head_backward(const mha_gradient_jobs *jobs,
                                 const mha_attention_gradients *gradients,
                                 mha_execution *execution) {
    per_head_pass pass = {.jobs = jobs,
                          .gradients = gradients,
                          .heads = mha_extent(&gradients->attention->query, 3),
                          .farthest = farthest_of(gradients)};
    size_t bytes;
    if (!mha_wants_per_head(gradients)) {
        return MHA_OK;
    }
    MHA_TRY(mha_multiply_sizes(sizeof(mha_compensated_sum),
                               (size_t)mha_larger(2 * pass.farthest - 1, 0), &bytes));
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, bytes, (size_t)pass.heads,
                                      &pass.distances));
    const int threads = mha_threads_for(pass.heads, (double)pass.heads * 16 * jobs->sums_of_a_head,
                                        execution->num_threads);
    return mha_run_tasks(execution, pass.heads, threads, differentiate_head, &pass);
}
