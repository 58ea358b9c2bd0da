/* Joining attention over parts of the keys, by their log-sum-exps (Flash-Decoding, 2023). A task is
 * some of the rows. */
#include "../kernels/kernels.h"
#include "../threads/partition.h"
#include "run.h"
#include "attention_rows.h"

typedef struct merge_job {
    const mha_merge_attention *merge;
    const mha_kernels *kernels;
    int64_t rows_of_a_task, num_tasks;
    int threads;
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
    job->rows_of_a_task = mha_rows_of_a_task(numbers_of_a_row);
    job->num_tasks = mha_divide_up(merge->rows, job->rows_of_a_task);
    job->threads = mha_threads_for(job->num_tasks, (double)merge->rows * (double)numbers_of_a_row,
                                   num_threads);
    return mha_multiply_sizes((size_t)merge->parts, mha_dtype_size(merge->dtype),
                              &job->shares_size);
}

static void merge_rows(void *context, int64_t task, mha_worker *worker) {
    const merge_job *job = context;
    const mha_merge_attention *merge = job->merge;
    const int64_t first = task * job->rows_of_a_task;
    const mha_merge_block block = {
        .checkpoint = &worker->checkpoint,
        .parts = merge->parts,
        .first_row = first,
        .end_row = mha_smaller(first + job->rows_of_a_task, merge->rows),
        .width = merge->width,
        .outputs = merge->outputs,
        .lses = merge->lses,
        .output = merge->output,
        .lse = merge->lse,
        .shares = mha_piece(&job->shares, worker->number),
    };
    job->kernels->few_queries->merge(&block);
}

mha_status mha_merge_attention_forward(const mha_merge_attention *merge, mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    merge_job job;
    MHA_TRY(plan(merge, execution->num_threads, &job));
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, job.shares_size, (size_t)job.threads,
                                      &job.shares));
    const mha_status status =
        mha_run_tasks(execution, job.num_tasks, job.threads, merge_rows, &job);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

MHA_DEFINE_WORKSPACE(merge_attention, mha_merge_attention, mha_merge_attention_forward)
