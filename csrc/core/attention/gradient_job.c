#include "core/attention/gradient_job.h"

#include "threads/partition.h"

/* What a pair of a query and a key costs, 1 up to 128 columns of key and of value; a column of
 * additive attention, a tanh there and back, costs 24 plain ones. */
static double cost_of_a_pair(const mha_attention *attention) {
    const double head_dim = (double)mha_extent(&attention->key, 1);
    const double columns = (attention->score_function == MHA_ADDITIVE ? 24 * head_dim : head_dim) +
                           (double)mha_extent(&attention->value, 1);
    return columns > 256 ? columns / 256 : 1;
}

int64_t mha_keys_of_a_task(const mha_attention *attention, double queries, int64_t most) {
    enum { PAIRS_OF_A_TASK = 4 << 20, LANES = 8, FEWEST_BLOCKS = 2 };
    const int64_t key_len = mha_extent(&attention->key, 2);
    const double keys =
        PAIRS_OF_A_TASK / (cost_of_a_pair(attention) * (queries < LANES ? LANES : queries) + 1);
    const int64_t fewest = mha_divide_up(key_len, most);
    int64_t wanted = FEWEST_BLOCKS * MHA_KEY_BLOCK;
    wanted = keys > (double)wanted ? (int64_t)keys : wanted;
    wanted = wanted > fewest ? wanted : fewest;
    const int64_t tasks = mha_divide_up(key_len, wanted);
    const int64_t equal = tasks == 0 ? 0 : mha_divide_up(key_len, tasks);
    return mha_divide_up(equal, MHA_KEY_BLOCK) * MHA_KEY_BLOCK;
}

void *mha_gradient_rows(const mha_gradient_job *job, const mha_tensor *gradient, int64_t batch,
                        int64_t head, int64_t row, int64_t *stride) {
    if (gradient->data == NULL) {
        return NULL;
    }
    *stride = mha_row_stride(gradient, job->attention->dtype);
    return mha_at_row(gradient, job->attention->batch_axes, batch, head, row);
}

void mha_fill_gradient_block(const mha_gradient_job *job, int64_t batch, int64_t head,
                             int64_t query_block, mha_key_ranges *visible,
                             mha_attention_backward_block *block) {
    const mha_attention_gradients *g = job->gradients;
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const int64_t first = query_block * MHA_QUERY_CHAIN;
    const int64_t count = mha_smaller(query_len - first, MHA_QUERY_CHAIN);
    const int64_t row = mha_result_row(job->attention, batch, head, first);
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    *block = (mha_attention_backward_block){
        .end_key = mha_extent(&job->attention->key, 2),
        .grad_lse = g->grad_lse == NULL ? NULL : (const char *)g->grad_lse + row * item,
    };
    mha_fill_query_block(job->attention, batch, head, first, count, visible, &block->attention);
    block->grad_output =
        mha_gradient_rows(job, &g->grad_output, batch, head, first, &block->grad_output_stride);
}

void mha_run_gradient_block(const mha_gradient_job *job, int64_t batch, int64_t head,
                            mha_attention_backward_block *block, mha_worker *worker) {
    const int64_t query_block = block->attention.first_query / MHA_QUERY_CHAIN;
    block->attention.checkpoint = &worker->checkpoint;
    if (mha_knows_blocks(&job->known)) {
        block->attention.known = mha_known_blocks_of(&job->known, job->attention, batch, head,
                                                     query_block, worker->number, 0);
        block->attention.known.end = block->end_key;
    }
    job->kernels->attention->backward(block, mha_piece(&job->scratch, worker->number));
}

int mha_gradient_threads(const mha_gradient_job *job, int64_t num_tasks, int num_threads) {
    const double forward = mha_attention_operations(job->attention, job->batch * job->heads);
    return mha_threads_for(num_tasks, 2.5 * forward, num_threads);
}
