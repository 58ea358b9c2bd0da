/* The gradients of step 3 of the figure. A task is one key head of a batch item: all queries of the
 * heads that share it pass by in order, and add to the gradients of its keys and values, which are
 * thus summed in one order whatever the threads. */
#include <string.h>

#include "../threads/partition.h"
#include "../threads/pool.h"
#include "attention_rows.h"

typedef struct gradient_job {
    const mha_attention_gradients *gradients;
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t batch, heads, kv_heads, group; /* group: heads on one key head */
    int64_t query_blocks;
    bool bias_has_own_pass; /* repeated over batch items or heads */
    char *scratch;          /* scratch_size bytes for each worker */
    size_t scratch_size;
} gradient_job;

static bool is_repeated_over_heads(const mha_tensor *bias, int batch_axes) {
    for (int axis = 0; axis <= batch_axes; axis++) {
        if (bias->strides[axis] == 0 && bias->shape[axis] > 1) {
            return true;
        }
    }
    return false;
}

/* The rows of a head in a gradient, or NULL where it is not wanted; *stride counts elements. */
static void *rows_of(const gradient_job *job, const mha_tensor *gradient, int64_t batch,
                     int64_t head, int64_t row, int64_t *stride) {
    if (gradient->data == NULL) {
        return NULL;
    }
    *stride = mha_stride(gradient, 2) / (int64_t)mha_dtype_size(job->attention->dtype);
    return mha_at_row(gradient, job->attention->batch_axes, batch, head, row);
}

/* One block of queries of one head, without any gradient. */
static mha_attention_backward_block block_of(const gradient_job *job, int64_t batch, int64_t head,
                                             int64_t query_block) {
    const mha_attention *a = job->attention;
    const int64_t item = (int64_t)mha_dtype_size(a->dtype);
    const int64_t query_len = mha_extent(&a->query, 2);
    const int64_t first = query_block * MHA_QUERY_CHAIN;
    const int64_t row = (batch * job->heads + head) * query_len + first;
    const int64_t kv_head = head / job->group;
    mha_attention_backward_block block = {
        .attention =
            {
                .query_len = mha_smaller(query_len - first, MHA_QUERY_CHAIN),
                .key_len = mha_extent(&a->key, 2),
                .head_dim = mha_extent(&a->query, 1),
                .value_head_dim = mha_extent(&a->value, 1),
                .first_query = first,
                .query = mha_at_row(&a->query, a->batch_axes, batch, head, first),
                .key = mha_at_row(&a->key, a->batch_axes, batch, kv_head, 0),
                .value = mha_at_row(&a->value, a->batch_axes, batch, kv_head, 0),
                .query_stride = mha_stride(&a->query, 2) / item,
                .key_stride = mha_stride(&a->key, 2) / item,
                .value_stride = mha_stride(&a->value, 2) / item,
                .scale = a->options.scale,
                .softcap = a->options.softcap,
                .uniform_empty_rows = a->options.uniform_empty_rows,
                .dropout = {a->options.dropout_threshold, a->options.dropout_seed, head, batch},
                .gate = 1,
                .output = mha_at_row(&a->output, a->batch_axes, batch, head, first),
                .output_stride = mha_stride(&a->output, 2) / item,
                .largest = (char *)a->largest + row * item,
                .denominator = (char *)a->denominator + row * item,
            },
        .grad_lse = job->gradients->grad_lse == NULL
                        ? NULL
                        : (const char *)job->gradients->grad_lse + row * item,
    };
    block.grad_output =
        rows_of(job, &job->gradients->grad_output, batch, head, first, &block.grad_output_stride);
    mha_set_visibility(a, batch, head, &block.attention);
    return block;
}

static void want_bias(const gradient_job *job, int64_t batch, int64_t head, int64_t first_query,
                      mha_attention_backward_block *block) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    block->grad_bias = rows_of(job, bias, batch, head, first_query, &block->grad_bias_query_stride);
    block->grad_bias_key_stride = block->grad_bias == NULL ? 0 : mha_stride(bias, 1) / item;
}

static void clear_rows(const gradient_job *job, const mha_tensor *gradient, void *rows) {
    if (rows == NULL) {
        return;
    }
    const size_t width = (size_t)mha_extent(gradient, 1) * mha_dtype_size(job->attention->dtype);
    for (int64_t row = 0; row < mha_extent(gradient, 2); row++) {
        memset((char *)rows + row * mha_stride(gradient, 2), 0, width);
    }
}

/* Task: one key head of one batch item, with all heads that share it. */
static void differentiate_key_head(void *context, int64_t task, int worker) {
    const gradient_job *job = context;
    const mha_attention_gradients *g = job->gradients;
    const int64_t batch = task / job->kv_heads, kv_head = task % job->kv_heads;
    int64_t key_stride = 0, value_stride = 0;
    void *grad_key = rows_of(job, &g->grad_key, batch, kv_head, 0, &key_stride);
    void *grad_value = rows_of(job, &g->grad_value, batch, kv_head, 0, &value_stride);
    clear_rows(job, &g->grad_key, grad_key);
    clear_rows(job, &g->grad_value, grad_value);
    for (int64_t head = kv_head * job->group; head < (kv_head + 1) * job->group; head++) {
        for (int64_t query_block = 0; query_block < job->query_blocks; query_block++) {
            mha_attention_backward_block block = block_of(job, batch, head, query_block);
            const int64_t first = block.attention.first_query;
            block.grad_key = grad_key;
            block.grad_key_stride = key_stride;
            block.grad_value = grad_value;
            block.grad_value_stride = value_stride;
            block.grad_query =
                rows_of(job, &g->grad_query, batch, head, first, &block.grad_query_stride);
            if (!job->bias_has_own_pass) {
                want_bias(job, batch, head, first, &block);
            }
            job->kernels->attention_backward(&block,
                                             job->scratch + (size_t)worker * job->scratch_size);
        }
    }
}

static bool bias_is_shared_by_queries(const gradient_job *job) {
    return mha_stride(&job->gradients->grad_bias, 2) == 0;
}

/* Task: the gradient of a bias that heads or batch items share, for one block of queries, or for
 * all of them where these share it too. Heads add to it in order. */
static void differentiate_bias(void *context, int64_t task, int worker) {
    const gradient_job *job = context;
    const bool all = bias_is_shared_by_queries(job);
    const int64_t first = all ? 0 : task, end = all ? job->query_blocks : task + 1;
    for (int64_t batch = 0; batch < job->batch; batch++) {
        for (int64_t head = 0; head < job->heads; head++) {
            for (int64_t query_block = first; query_block < end; query_block++) {
                mha_attention_backward_block block = block_of(job, batch, head, query_block);
                want_bias(job, batch, head, block.attention.first_query, &block);
                job->kernels->attention_backward(&block,
                                                 job->scratch + (size_t)worker * job->scratch_size);
            }
        }
    }
}

static mha_status plan(const mha_attention_gradients *gradients, gradient_job *job) {
    const mha_attention *a = gradients->attention;
    job->gradients = gradients;
    job->attention = a;
    job->kernels = mha_kernels_for(a->dtype);
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes, &job->batch));
    job->heads = mha_extent(&a->query, 3);
    job->kv_heads = mha_extent(&a->key, 3);
    job->group = job->kv_heads == 0 ? 0 : job->heads / job->kv_heads;
    job->query_blocks = mha_divide_up(mha_extent(&a->query, 2), MHA_QUERY_CHAIN);
    job->bias_has_own_pass = gradients->grad_bias.data != NULL &&
                             is_repeated_over_heads(&gradients->grad_bias, a->batch_axes);
    return mha_workspace_piece_size(job->kernels->attention_backward_scratch_size(
                                        mha_extent(&a->query, 1), mha_extent(&a->value, 1)),
                                    &job->scratch_size);
}

/* A multiply-add of the forward pass is two and a half here. */
static int threads_of(const gradient_job *job, int64_t num_tasks, int num_threads) {
    const mha_attention *a = job->attention;
    const double widths = (double)mha_extent(&a->query, 1) + (double)mha_extent(&a->value, 1) + 16;
    const double operations = 2.5 * (double)job->batch * (double)job->heads *
                              (double)mha_extent(&a->query, 2) * (double)mha_extent(&a->key, 2) *
                              widths;
    return mha_threads_for(num_tasks, operations, num_threads);
}

static mha_status count_key_heads(const gradient_job *job, int64_t *count) {
    const int64_t shape[] = {job->batch, job->kv_heads};
    return mha_count_elements(shape, 2, count);
}

mha_status
mha_scaled_dot_product_attention_backward_workspace(const mha_attention_gradients *gradients,
                                                    int num_threads, size_t *bytes) {
    gradient_job job;
    *bytes = 0;
    MHA_TRY(plan(gradients, &job));
    return mha_workspace_reserve(bytes, job.scratch_size,
                                 (size_t)threads_of(&job, INT64_MAX, num_threads));
}

static bool wants_more_than_bias(const gradient_job *job) {
    const mha_attention_gradients *g = job->gradients;
    return g->grad_query.data != NULL || g->grad_key.data != NULL || g->grad_value.data != NULL ||
           (g->grad_bias.data != NULL && !job->bias_has_own_pass);
}

static mha_status run_passes(gradient_job *job, mha_execution *execution) {
    int64_t key_heads;
    size_t all;
    void *scratch;
    const int most = threads_of(job, INT64_MAX, execution->num_threads);
    MHA_TRY(count_key_heads(job, &key_heads));
    MHA_TRY(mha_multiply_sizes(job->scratch_size, (size_t)most, &all));
    MHA_TRY(mha_workspace_take(&execution->workspace, all, &scratch));
    job->scratch = scratch;
    if (wants_more_than_bias(job)) {
        MHA_TRY(mha_pool_run(key_heads, threads_of(job, key_heads, execution->num_threads),
                             differentiate_key_head, job, &execution->cancel));
    }
    if (!job->bias_has_own_pass) {
        return MHA_OK;
    }
    const int64_t tasks =
        job->query_blocks == 0 || !bias_is_shared_by_queries(job) ? job->query_blocks : 1;
    return mha_pool_run(tasks, threads_of(job, tasks, execution->num_threads), differentiate_bias,
                        job, &execution->cancel);
}

mha_status mha_scaled_dot_product_attention_backward(const mha_attention_gradients *gradients,
                                                     mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    gradient_job job;
    MHA_TRY(plan(gradients, &job));
    const mha_status status = run_passes(&job, execution);
    execution->workspace.used = used_before;
    return status;
}
