/* The gradient of a bias: that of the scores, summed where the bias is repeated. Tasks over keys
 * add to it beside the other gradients, unless some of them would add to the same numbers: then it
 * has a pass of its own after theirs. */
#include "core/attention/bias_backward.h"

#include <string.h>

#include "core/base/run.h"

bool mha_wants_bias(const mha_gradient_job *job) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    return bias->data != NULL && !mha_is_empty(bias->shape, bias->axes);
}

bool mha_bias_is_shared(const mha_gradient_job *job) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    if (!mha_wants_bias(job)) {
        return false;
    }
    return (job->chunks > 1 && mha_is_shared(bias, 2) && mha_is_shared(bias, 1)) ||
           mha_heads_share(bias, job->attention->batch_axes);
}

void mha_want_bias(const mha_gradient_job *job, int64_t batch, int64_t head, int64_t first_query,
                   mha_attention_backward_block *block) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    if (mha_wants_bias(job)) {
        block->grad_bias =
            mha_gradient_rows(job, bias, batch, head, first_query, &block->grad_bias_query_stride);
        block->grad_bias_key_stride = mha_stride(bias, 1) / item;
    }
}

/* Queries and keys of a head. */
typedef struct score_area {
    int64_t first_query, end_query, first_key, end_key;
} score_area;

/* Zeros in a head's grad bias for some queries and keys. Tasks that add to it do so themselves: all
 * tasks may run again, in the child of a signal handler that forks. */
static void clear_area(const mha_gradient_job *job, int64_t batch, int64_t head, score_area area,
                       mha_worker *worker) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    const size_t item = mha_dtype_size(job->attention->dtype);
    if (!mha_wants_bias(job)) {
        return;
    }
    const int64_t end_query =
        mha_is_shared(bias, 2) ? mha_smaller(area.first_query + 1, area.end_query) : area.end_query;
    const int64_t end_key =
        mha_is_shared(bias, 1) ? mha_smaller(area.first_key + 1, area.end_key) : area.end_key;
    for (int64_t query = area.first_query; query < end_query; query++) {
        char *row = mha_at_row(bias, job->attention->batch_axes, batch, head, query);
        for (int64_t key = area.first_key; key < end_key; key++) {
            if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING)) {
                return;
            }
            memset(row + key * mha_stride(bias, 1), 0, item);
        }
    }
}

void mha_clear_bias(const mha_gradient_job *job, int64_t batch, int64_t head, mha_worker *worker) {
    const score_area whole = {0, mha_extent(&job->attention->query, 2), 0,
                              mha_extent(&job->attention->key, 2)};
    clear_area(job, batch, head, whole, worker);
}

/* Keys of a task of the pass where queries share the bias; all, where keys do too. */
static int64_t bias_keys_of(const mha_gradient_job *job) {
    const int64_t key_len = mha_extent(&job->attention->key, 2);
    const double queries =
        (double)job->batch * (double)job->heads * (double)mha_extent(&job->attention->query, 2);
    return mha_is_shared(&job->gradients->grad_bias, 1)
               ? key_len
               : mha_keys_of_a_task(job->attention, queries, key_len);
}

typedef struct bias_pass {
    const mha_gradient_job *job;
    int64_t keys; /* of a task, where queries share the bias */
} bias_pass;

/* Task: the gradient of a bias that heads or batch items share, for one block of queries, or where
 * these share it too for some keys. Heads add to it in order. */
static void differentiate_bias(void *context, int64_t task, mha_worker *worker) {
    const bias_pass *pass = context;
    const mha_gradient_job *job = pass->job;
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const int64_t key_len = mha_extent(&job->attention->key, 2);
    const bool of_keys = mha_is_shared(&job->gradients->grad_bias, 2);
    score_area area = {0, query_len, 0, key_len};
    if (of_keys) {
        area.first_key = task * pass->keys;
        area.end_key = mha_smaller(area.first_key + pass->keys, key_len);
    } else {
        area.first_query = task * MHA_QUERY_CHAIN;
        area.end_query = mha_smaller(area.first_query + MHA_QUERY_CHAIN, query_len);
    }
    for (int64_t item = 0; item < job->batch * job->heads; item++) {
        clear_area(job, item / job->heads, item % job->heads, area, worker);
    }
    const int64_t first = of_keys ? 0 : task, end = of_keys ? job->query_blocks : task + 1;
    for (int64_t item = 0; item < job->batch * job->heads; item++) {
        const int64_t batch = item / job->heads, head = item % job->heads;
        for (int64_t query_block = first; query_block < end; query_block++) {
            if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_BLOCK)) {
                return;
            }
            mha_key_ranges visible;
            mha_attention_backward_block block;
            mha_fill_gradient_block(job, batch, head, query_block, &visible, &block);
            block.first_key = area.first_key;
            block.end_key = area.end_key;
            mha_want_bias(job, batch, head, block.attention.first_query, &block);
            mha_run_gradient_block(job, batch, head, &block, worker);
        }
    }
}

mha_status mha_bias_backward(const mha_gradient_job *job, mha_execution *execution) {
    bias_pass pass = {.job = job, .keys = bias_keys_of(job)};
    const int64_t tasks = mha_is_shared(&job->gradients->grad_bias, 2)
                              ? mha_divide_up(mha_extent(&job->attention->key, 2), pass.keys)
                              : job->query_blocks;
    return mha_run_tasks(execution, tasks, mha_gradient_threads(job, tasks, execution->num_threads),
                         differentiate_bias, &pass);
}
