/* The gradients of step 3 of the figure. A task is one chunk of the keys of one key head: all
 * queries of the heads that share it pass by in order, and add to the gradients of its keys and
 * values. What a block of queries gets from the chunks is added up in their order, too: the next
 * chunk takes a block when the one before is done with it. So every sum has one order, whatever the
 * threads, and no thread needs a gradient of its own. */
#include <stdatomic.h>
#include <string.h>

#include "../threads/partition.h"
#include "run.h"
#include "../threads/system.h"
#include "attention_rows.h"
#include "few_queries.h"
#include "gradient_tasks.h"

typedef struct gradient_job {
    const mha_attention_gradients *gradients;
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t batch, heads, kv_heads, group; /* group: heads on one key head */
    int64_t query_blocks;
    bool few_queries; /* as the forward pass went */
    int64_t chunks, chunk_keys;
    /* (batch, heads, query_blocks): bit c is set when chunk c is done with the block. */
    _Atomic uint64_t *done;
    bool bias_has_own_pass;  /* tasks share it */
    int64_t bias_keys;       /* of a task of that pass, where queries share it */
    bool copies_keys;        /* and values, and gathers their gradients side by side */
    mha_pieces scratch;      /* scratch_size bytes for each worker: the kernel's */
    mha_pieces keys, values; /* two for each worker: its copies, and their gradients */
    size_t scratch_size, keys_size, values_size;
} gradient_job;

/* What a task works on, first_key..end_key of one key head, and where it finds these keys and
 * values and adds up their gradients. Strides count elements. */
typedef struct key_chunk {
    int64_t batch, kv_head, first_key, end_key;
    int number;                                /* among the chunks of the head */
    int64_t stored_key;                        /* whose rows the pointers are to */
    void *key, *value, *grad_key, *grad_value; /* gradients: NULL where not wanted */
    int64_t key_stride, value_stride, grad_key_stride, grad_value_stride;
} key_chunk;

/* Of a block of queries that sees nothing: finding that out. */
enum { WORK_OF_BLOCK = 1 << 12 };

/* Queries and keys of a head. */
typedef struct score_area {
    int64_t first_query, end_query, first_key, end_key;
} score_area;

/* Whether tasks would add to the same numbers of grad bias, in any order. */
static bool is_shared_by_tasks(const mha_tensor *bias, int batch_axes, int64_t chunks) {
    if (chunks > 1 && mha_stride(bias, 2) == 0 && mha_stride(bias, 1) == 0) {
        return true;
    }
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

/* One block of queries of one head, over all keys, without any gradient. */
static mha_attention_backward_block block_of(const gradient_job *job, int64_t batch, int64_t head,
                                             int64_t query_block, mha_key_ranges *visible) {
    const mha_attention_gradients *g = job->gradients;
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const int64_t first = query_block * MHA_QUERY_CHAIN;
    const int64_t count = mha_smaller(query_len - first, MHA_QUERY_CHAIN);
    const int64_t row = (batch * job->heads + head) * query_len + first;
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    mha_attention_backward_block block = {
        .attention = mha_query_block(job->attention, batch, head, first, count, visible),
        .end_key = mha_extent(&job->attention->key, 2),
        .few_queries = job->few_queries,
        .grad_lse = g->grad_lse == NULL ? NULL : (const char *)g->grad_lse + row * item,
    };
    block.grad_output =
        rows_of(job, &g->grad_output, batch, head, first, &block.grad_output_stride);
    return block;
}

static void run_block(const gradient_job *job, mha_attention_backward_block *block,
                      mha_worker *worker) {
    block->attention.checkpoint = &worker->checkpoint;
    job->kernels->attention->backward(block, mha_piece(&job->scratch, worker->number));
}

static void want_bias(const gradient_job *job, int64_t batch, int64_t head, int64_t first_query,
                      mha_attention_backward_block *block) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    block->grad_bias = rows_of(job, bias, batch, head, first_query, &block->grad_bias_query_stride);
    block->grad_bias_key_stride = block->grad_bias == NULL ? 0 : mha_stride(bias, 1) / item;
}

static void clear_rows(const gradient_job *job, const mha_tensor *gradient, void *rows,
                       int64_t first, int64_t end, mha_worker *worker) {
    if (rows == NULL) {
        return;
    }
    const size_t width = (size_t)mha_extent(gradient, 1) * mha_dtype_size(job->attention->dtype);
    for (int64_t row = first; row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, mha_extent(gradient, 1) + 1)) {
            return;
        }
        memset((char *)rows + row * mha_stride(gradient, 2), 0, width);
    }
}

/* Zeros in a head's grad bias for some queries and keys. Tasks that add to it do so themselves: all
 * tasks may run again, in the child of a signal handler that forks. */
static void clear_bias(const gradient_job *job, int64_t batch, int64_t head, score_area area,
                       mha_worker *worker) {
    const mha_tensor *bias = &job->gradients->grad_bias;
    const size_t item = mha_dtype_size(job->attention->dtype);
    if (bias->data == NULL || mha_extent(bias, 1) == 0) {
        return; /* without scores the array may be empty */
    }
    const int64_t end_query = mha_stride(bias, 2) == 0
                                  ? mha_smaller(area.first_query + 1, area.end_query)
                                  : area.end_query;
    const int64_t end_key =
        mha_stride(bias, 1) == 0 ? mha_smaller(area.first_key + 1, area.end_key) : area.end_key;
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

/* Waits until the chunks before this one are done with a block of queries. They were begun before.
 */
static void await_turn(const _Atomic uint64_t *done, int chunk, mha_worker *worker) {
    enum { SPINS_BEFORE_YIELDING = 1000 };
    const uint64_t before = ((uint64_t)1 << chunk) - 1;
    for (int spin = 0; (atomic_load(done) & before) != before; spin++) {
        if (spin < SPINS_BEFORE_YIELDING) {
            mha_system_pause();
        } else if (mha_stop_after(&worker->checkpoint, MHA_WORK_BETWEEN_CHECKPOINTS)) {
            return;
        } else {
            mha_system_yield();
        }
    }
}

/* Whether a query of the block sees a key of the chunk, as far as ranges tell, or had the mean of
 * all values. */
static bool sees_chunk(const mha_attention_backward_block *block) {
    const mha_attention_block *a = &block->attention;
    for (int64_t i = 0; i < a->query_len; i++) {
        if (a->key_begin[i] < block->end_key && a->key_end[i] > block->first_key &&
            a->key_begin[i] < a->key_end[i]) {
            return true;
        }
    }
    /* The first one writes zeros. */
    return block->first_key == 0 || a->scores.uniform_empty_rows;
}

/* Rows as the arrays have them, gradients at 0. */
static void use_rows_in_place(const gradient_job *job, key_chunk *c, mha_worker *worker) {
    const mha_attention *a = job->attention;
    const mha_attention_gradients *g = job->gradients;
    c->stored_key = 0;
    c->key = rows_of(job, &a->key, c->batch, c->kv_head, 0, &c->key_stride);
    c->value = rows_of(job, &a->value, c->batch, c->kv_head, 0, &c->value_stride);
    c->grad_key = rows_of(job, &g->grad_key, c->batch, c->kv_head, 0, &c->grad_key_stride);
    c->grad_value = rows_of(job, &g->grad_value, c->batch, c->kv_head, 0, &c->grad_value_stride);
    clear_rows(job, &g->grad_key, c->grad_key, c->first_key, c->end_key, worker);
    clear_rows(job, &g->grad_value, c->grad_value, c->first_key, c->end_key, worker);
}

/* Rows of the chunk alone in the worker's own memory, gradients at 0. */
static void use_rows_of_own(const gradient_job *job, const mha_worker *worker, key_chunk *c) {
    const mha_attention *a = job->attention;
    const int64_t item = (int64_t)mha_dtype_size(a->dtype), keys = c->end_key - c->first_key;
    c->key_stride = c->grad_key_stride = mha_extent(&a->key, 1);
    c->value_stride = c->grad_value_stride = mha_extent(&a->value, 1);
    const int64_t key_bytes = keys * c->key_stride * item;
    const int64_t value_bytes = keys * c->value_stride * item;
    void *grad_key = mha_piece(&job->keys, 2 * worker->number + 1);
    void *grad_value = mha_piece(&job->values, 2 * worker->number + 1);
    c->stored_key = c->first_key;
    c->key = mha_piece(&job->keys, 2 * worker->number);
    c->value = mha_piece(&job->values, 2 * worker->number);
    c->grad_key = job->gradients->grad_key.data == NULL ? NULL : grad_key;
    c->grad_value = job->gradients->grad_value.data == NULL ? NULL : grad_value;
    mha_gather_rows(a, &a->key, c->batch, c->kv_head, c->first_key, c->end_key, c->key);
    mha_gather_rows(a, &a->value, c->batch, c->kv_head, c->first_key, c->end_key, c->value);
    memset(grad_key, 0, (size_t)key_bytes);
    memset(grad_value, 0, (size_t)value_bytes);
}

static void return_gradient(const gradient_job *job, const key_chunk *c, const mha_tensor *gradient,
                            const char *own) {
    if (own != NULL) {
        mha_scatter_rows(job->attention, gradient, c->batch, c->kv_head, c->first_key, c->end_key,
                         own);
    }
}

/* One block of queries of one head with a chunk of keys. */
static void differentiate_block(const gradient_job *job, const key_chunk *c, int64_t head,
                                int64_t query_block, mha_worker *worker) {
    const mha_attention_gradients *g = job->gradients;
    mha_key_ranges visible;
    mha_attention_backward_block block = block_of(job, c->batch, head, query_block, &visible);
    _Atomic uint64_t *done =
        job->done + (c->batch * job->heads + head) * job->query_blocks + query_block;
    const int64_t first = block.attention.first_query;
    block.attention.stored_key = c->stored_key;
    block.attention.key = c->key;
    block.attention.key_stride = c->key_stride;
    block.attention.value = c->value;
    block.attention.value_stride = c->value_stride;
    block.grad_key = c->grad_key;
    block.grad_key_stride = c->grad_key_stride;
    block.grad_value = c->grad_value;
    block.grad_value_stride = c->grad_value_stride;
    block.first_key = c->first_key;
    block.end_key = c->end_key;
    block.adds_to_query = c->number > 0;
    block.grad_query =
        rows_of(job, &g->grad_query, c->batch, head, first, &block.grad_query_stride);
    block.grad_w_v = rows_of(job, &g->grad_w_v, c->batch, head, first, &block.grad_w_v_stride);
    if (!job->bias_has_own_pass) {
        want_bias(job, c->batch, head, first, &block);
    }
    if (sees_chunk(&block)) {
        await_turn(done, c->number, worker);
        run_block(job, &block, worker);
    }
    atomic_fetch_or(done, (uint64_t)1 << c->number);
}

/* Task: one chunk of the keys of a key head of one batch item, with all heads that share it. The
 * last block of queries first: where the attention is causal all chunks have work there. */
static void differentiate_chunk(void *context, int64_t task, mha_worker *worker) {
    const gradient_job *job = context;
    const int64_t key_heads = job->batch * job->kv_heads;
    key_chunk c = {
        .number = (int)(task / key_heads), /* other heads lie between two of one head */
        .batch = task % key_heads / job->kv_heads,
        .kv_head = task % key_heads % job->kv_heads,
    };
    c.first_key = c.number * job->chunk_keys;
    c.end_key = mha_smaller(c.first_key + job->chunk_keys, mha_extent(&job->attention->key, 2));
    if (job->copies_keys) {
        use_rows_of_own(job, worker, &c);
    } else {
        use_rows_in_place(job, &c, worker);
    }
    for (int64_t head = c.kv_head * job->group; head < (c.kv_head + 1) * job->group; head++) {
        if (c.number == 0 && !job->bias_has_own_pass) {
            const score_area whole = {0, mha_extent(&job->attention->query, 2), 0,
                                      mha_extent(&job->attention->key, 2)};
            clear_bias(job, c.batch, head, whole, worker);
        }
        for (int64_t query_block = job->query_blocks - 1; query_block >= 0; query_block--) {
            if (mha_stop_after(&worker->checkpoint, WORK_OF_BLOCK)) {
                return;
            }
            differentiate_block(job, &c, head, query_block, worker);
        }
    }
    if (job->copies_keys) {
        return_gradient(job, &c, &job->gradients->grad_key, c.grad_key);
        return_gradient(job, &c, &job->gradients->grad_value, c.grad_value);
    }
}

/* Task: the gradient of a bias that heads or batch items share, for one block of queries, or where
 * these share it too for some keys. Heads add to it in order. */
static void differentiate_bias(void *context, int64_t task, mha_worker *worker) {
    const gradient_job *job = context;
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const int64_t key_len = mha_extent(&job->attention->key, 2);
    const bool of_keys = mha_stride(&job->gradients->grad_bias, 2) == 0;
    score_area area = {0, query_len, 0, key_len};
    if (of_keys) {
        area.first_key = task * job->bias_keys;
        area.end_key = mha_smaller(area.first_key + job->bias_keys, key_len);
    } else {
        area.first_query = task * MHA_QUERY_CHAIN;
        area.end_query = mha_smaller(area.first_query + MHA_QUERY_CHAIN, query_len);
    }
    for (int64_t item = 0; item < job->batch * job->heads; item++) {
        clear_bias(job, item / job->heads, item % job->heads, area, worker);
    }
    const int64_t first = of_keys ? 0 : task, end = of_keys ? job->query_blocks : task + 1;
    for (int64_t item = 0; item < job->batch * job->heads; item++) {
        const int64_t batch = item / job->heads, head = item % job->heads;
        for (int64_t query_block = first; query_block < end; query_block++) {
            if (mha_stop_after(&worker->checkpoint, WORK_OF_BLOCK)) {
                return;
            }
            mha_key_ranges visible;
            mha_attention_backward_block block = block_of(job, batch, head, query_block, &visible);
            block.first_key = area.first_key;
            block.end_key = area.end_key;
            want_bias(job, batch, head, block.attention.first_query, &block);
            run_block(job, &block, worker);
        }
    }
}

/* A chunk has a bit in job->done. */
static int64_t chunk_keys_of(const gradient_job *job) {
    enum { MOST_CHUNKS = 63 };
    const double query_len = (double)mha_extent(&job->attention->query, 2);
    return mha_keys_of_a_task(job->attention, (double)job->group * query_len, MOST_CHUNKS);
}

/* Keys of a task of differentiate_bias where queries share the bias; all, where keys do too. */
static int64_t bias_keys_of(const gradient_job *job) {
    const int64_t key_len = mha_extent(&job->attention->key, 2);
    const double queries =
        (double)job->batch * (double)job->heads * (double)mha_extent(&job->attention->query, 2);
    return mha_stride(&job->gradients->grad_bias, 1) == 0
               ? key_len
               : mha_keys_of_a_task(job->attention, queries, key_len > 0 ? key_len : 1);
}

static int64_t count_bias_tasks(const gradient_job *job) {
    const int64_t key_len = mha_extent(&job->attention->key, 2);
    return mha_stride(&job->gradients->grad_bias, 2) != 0 || job->query_blocks == 0
               ? job->query_blocks
               : mha_divide_up(key_len, job->bias_keys > 0 ? job->bias_keys : 1);
}

static bool has_rows_apart(const mha_tensor *tensor, mha_dtype dtype) {
    return tensor->data != NULL && mha_rows_lie_apart(tensor, dtype);
}

/* The kernel's scratch, and a chunk of key and value with their gradients, where their rows lie
 * apart: every block of queries reads them. At most MOST_COPIED bytes. */
static void plan_scratch(gradient_job *job) {
    enum { MOST_COPIED = 4 << 20 };
    const mha_attention *a = job->attention;
    const mha_attention_gradients *g = job->gradients;
    const int64_t head_dim = mha_extent(&a->key, 1), value_head_dim = mha_extent(&a->value, 1);
    const double column = (double)job->chunk_keys * (double)mha_dtype_size(a->dtype);
    const double bytes = 2.0 * column * ((double)head_dim + (double)value_head_dim);
    const bool apart = has_rows_apart(&a->key, a->dtype) || has_rows_apart(&a->value, a->dtype) ||
                       has_rows_apart(&g->grad_key, a->dtype) ||
                       has_rows_apart(&g->grad_value, a->dtype);
    job->copies_keys = apart && bytes <= MOST_COPIED && job->group * job->query_blocks > 1;
    job->scratch_size = job->kernels->attention->backward_scratch_size(head_dim, value_head_dim);
    if (job->copies_keys) {
        job->keys_size = (size_t)(column * (double)head_dim);
        job->values_size = (size_t)(column * (double)value_head_dim);
    }
}

static mha_status plan(const mha_attention_gradients *gradients, gradient_job *job) {
    const mha_attention *a = gradients->attention;
    job->gradients = gradients;
    job->attention = a;
    job->kernels = mha_kernels_for(a->dtype);
    MHA_TRY(mha_check_columns(a));
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes, &job->batch));
    job->heads = mha_extent(&a->query, 3);
    job->kv_heads = mha_extent(&a->key, 3);
    job->group = job->kv_heads == 0 ? 0 : job->heads / job->kv_heads;
    job->query_blocks = mha_divide_up(mha_extent(&a->query, 2), MHA_QUERY_CHAIN);
    job->few_queries = mha_has_few_queries(a);
    job->chunk_keys = chunk_keys_of(job);
    job->chunks = job->chunk_keys == 0 ? 1 : mha_divide_up(mha_extent(&a->key, 2), job->chunk_keys);
    job->bias_has_own_pass = gradients->grad_bias.data != NULL &&
                             is_shared_by_tasks(&gradients->grad_bias, a->batch_axes, job->chunks);
    job->bias_keys = job->bias_has_own_pass ? bias_keys_of(job) : 0;
    plan_scratch(job);
    return MHA_OK;
}

/* A multiply-add of the forward pass is two and a half here. */
static int threads_of(const gradient_job *job, int64_t num_tasks, int num_threads) {
    const double forward = mha_attention_operations(job->attention, job->batch * job->heads);
    return mha_threads_for(num_tasks, 2.5 * forward, num_threads);
}

static mha_status count_tasks(const gradient_job *job, int64_t *count) {
    const int64_t shape[] = {job->batch, job->kv_heads, job->chunks};
    return mha_count_elements(shape, 3, count);
}

static mha_status count_query_blocks(const gradient_job *job, int64_t *count) {
    const int64_t shape[] = {job->batch, job->heads, job->query_blocks};
    return mha_count_elements(shape, 3, count);
}

/* All gradients are empty. */
static bool nothing_to_compute(const mha_attention_gradients *gradients) {
    return mha_has_no_rows(&gradients->attention->query) &&
           mha_has_no_rows(&gradients->attention->key);
}

static bool wants_more_than_bias(const gradient_job *job) {
    const mha_attention_gradients *g = job->gradients;
    return g->grad_query.data != NULL || g->grad_key.data != NULL || g->grad_value.data != NULL ||
           g->grad_w_v.data != NULL || (g->grad_bias.data != NULL && !job->bias_has_own_pass);
}

static mha_status take_memory(gradient_job *job, mha_execution *execution) {
    const size_t threads = (size_t)threads_of(job, INT64_MAX, execution->num_threads);
    mha_workspace *workspace = &execution->workspace;
    int64_t query_blocks;
    size_t all;
    void *piece;
    MHA_TRY(count_query_blocks(job, &query_blocks));
    MHA_TRY(mha_multiply_sizes(sizeof *job->done, (size_t)query_blocks, &all));
    MHA_TRY(mha_workspace_take(workspace, all, &piece));
    job->done = piece;
    for (int64_t i = 0; i < query_blocks && !workspace->measures; i++) {
        atomic_init(&job->done[i], 0);
    }
    MHA_TRY(mha_workspace_take_pieces(workspace, job->scratch_size, threads, &job->scratch));
    if (job->copies_keys) {
        MHA_TRY(mha_workspace_take_pieces(workspace, job->keys_size, 2 * threads, &job->keys));
        MHA_TRY(mha_workspace_take_pieces(workspace, job->values_size, 2 * threads, &job->values));
    }
    return MHA_OK;
}

static mha_status run_passes(gradient_job *job, mha_execution *execution) {
    int64_t tasks;
    MHA_TRY(take_memory(job, execution));
    MHA_TRY(count_tasks(job, &tasks));
    if (wants_more_than_bias(job)) {
        MHA_TRY(mha_run_tasks(execution, tasks, threads_of(job, tasks, execution->num_threads),
                              differentiate_chunk, job));
    }
    if (!job->bias_has_own_pass) {
        return MHA_OK;
    }
    tasks = count_bias_tasks(job);
    return mha_run_tasks(execution, tasks, threads_of(job, tasks, execution->num_threads),
                         differentiate_bias, job);
}

mha_status mha_scaled_dot_product_attention_backward(const mha_attention_gradients *gradients,
                                                     mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    gradient_job job;
    if (nothing_to_compute(gradients)) {
        return MHA_OK;
    }
    MHA_TRY(plan(gradients, &job));
    const mha_status status = run_passes(&job, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

MHA_DEFINE_WORKSPACE(scaled_dot_product_attention_backward, mha_attention_gradients,
                     mha_scaled_dot_product_attention_backward)
