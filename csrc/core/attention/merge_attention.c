/* Joining attention over parts of the keys, by their log-sum-exps (Flash-Decoding, 2023). A task is
 * some of the rows. */
#include "core/base/run.h"
#include "kernels/kernels.h"
#include "mha/attention.h"

typedef struct merge_job {
    const mha_merge_attention *merge;
    const mha_kernels *kernels;
    mha_row_tasks rows;
    mha_pieces shares; /* shares_size bytes for each worker: a number for each part */
    size_t shares_size;
} merge_job;

static mha_status plan(const mha_merge_attention *merge, int num_threads, merge_job *job) {
    int64_t numbers_of_a_row;
    job->merge = merge;
    job->kernels = mha_kernels_for(merge->dtype);
    if (__builtin_mul_overflow(merge->parts, merge->width, &numbers_of_a_row)) {
        return MHA_SIZE_OVERFLOW;
    }
    job->rows = mha_divide_rows(merge->rows, numbers_of_a_row, 1, num_threads);
    return mha_multiply_sizes((size_t)merge->parts, mha_dtype_size(merge->dtype),
                              &job->shares_size);
}

static void merge_rows(void *context, int64_t task, mha_worker *worker) {
    const merge_job *job = context;
    const mha_merge_attention *merge = job->merge;
    const mha_merge_block block = {
        .checkpoint = &worker->checkpoint,
        .parts = merge->parts,
        .first_row = mha_first_row(&job->rows, task),
        .end_row = mha_end_row(&job->rows, task),
        .width = merge->width,
        .outputs = merge->outputs,
        .lses = merge->lses,
        .output = merge->output,
        .lse = merge->lse,
        .outputs_storage = merge->outputs_storage,
        .output_storage = merge->output_storage,
        .shares = mha_piece(&job->shares, worker->number),
    };
    job->kernels->few_queries->merge(&block);
}

static mha_status run_steps(const mha_merge_attention *merge, mha_execution *execution) {
    merge_job job;
    MHA_TRY(plan(merge, execution->num_threads, &job));
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, job.shares_size,
                                      (size_t)job.rows.threads, &job.shares));
    return mha_run_row_tasks(execution, &job.rows, merge_rows, &job);
}

MHA_DEFINE_FORWARD(merge_attention, mha_merge_attention, run_steps)
