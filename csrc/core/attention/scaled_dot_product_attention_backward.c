/* The gradients of step 3 of the figure. A task is one chunk of the keys of one key head: all
 * queries of the heads that share it pass by in order, and add to the gradients of its keys and
 * values. What a block of queries gets from the chunks is added up in their order, too: the next
 * chunk takes a block when the one before is done with it. So every sum has one order, whatever the
 * threads, and no thread needs a gradient of its own. */
#include <string.h>

#include "core/attention/bias_backward.h"
#include "core/attention/gradient_job.h"
#include "core/attention/heads_last.h"
#include "core/attention/per_head_backward.h"
#include "core/base/run.h"
#include "threads/system.h"

/* What a task works on, first_key..end_key of one key head, and where it finds these keys and
 * values and adds up their gradients. Strides count elements. */
typedef struct key_chunk {
    int64_t task, batch, kv_head, first_key, end_key;
    int number;                                /* among the chunks of the head */
    void *key, *value, *grad_key, *grad_value; /* gradients: NULL where not wanted */
    int64_t key_stride, value_stride, grad_key_stride, grad_value_stride;
} key_chunk;

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

/* The rows of key or value: as the array has them, or copied side by side to `own`. */
static void *rows_of_chunk(const mha_gradient_job *job, const key_chunk *c,
                           const mha_tensor *tensor, void *own, int64_t *stride) {
    if (!job->copies_keys) {
        return mha_gradient_rows(job, tensor, c->batch, c->kv_head, c->first_key, stride);
    }
    mha_gather_rows(job->attention, tensor, c->batch, c->kv_head, c->first_key, c->end_key, own);
    *stride = mha_extent(tensor, 1);
    return own;
}

static bool has_sums_of_own(const mha_gradient_job *job) {
    return job->copies_keys || job->joins_sums;
}

static void clear_rows(void *begin, int64_t count, int64_t bytes, int64_t bytes_apart,
                       mha_worker *worker) {
    char *rows = begin;
    if (bytes == bytes_apart) {
        bytes *= count;
        count = 1;
    }
    for (int64_t row = 0; rows != NULL && bytes > 0 && row < count; row++, rows += bytes_apart) {
        if (mha_stop_after(&worker->checkpoint, bytes)) {
            return;
        }
        memset(rows, 0, (size_t)bytes);
    }
}

static void clear_sums(const mha_gradient_job *job, const key_chunk *c, mha_worker *worker) {
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    const int64_t keys = c->end_key - c->first_key;
    clear_rows(c->grad_key, keys, mha_extent(&job->attention->key, 1) * item,
               c->grad_key_stride * item, worker);
    clear_rows(c->grad_value, keys, mha_extent(&job->attention->value, 1) * item,
               c->grad_value_stride * item, worker);
}

/* Where a gradient of the chunk is added up: in the array, or side by side in `own`. */
static void *sums_of_chunk(const mha_gradient_job *job, const key_chunk *c,
                           const mha_tensor *gradient, void *own, int64_t *stride) {
    if (gradient->data == NULL) {
        return NULL;
    }
    if (has_sums_of_own(job)) {
        *stride = mha_extent(gradient, 1);
        return own;
    }
    return mha_gradient_rows(job, gradient, c->batch, c->kv_head, c->first_key, stride);
}

static void use_rows(const mha_gradient_job *job, const mha_worker *worker, key_chunk *c) {
    const mha_attention *a = job->attention;
    const mha_attention_gradients *g = job->gradients;
    const int n = worker->number;
    c->key = rows_of_chunk(job, c, &a->key, mha_piece(&job->keys, n), &c->key_stride);
    c->value = rows_of_chunk(job, c, &a->value, mha_piece(&job->values, n), &c->value_stride);
    c->grad_key =
        sums_of_chunk(job, c, &g->grad_key, mha_piece(&job->grad_keys, n), &c->grad_key_stride);
    c->grad_value = sums_of_chunk(job, c, &g->grad_value, mha_piece(&job->grad_values, n),
                                  &c->grad_value_stride);
}

/* The worker's sums go to the array, or are added to what it has; they begin again from 0 unless
 * they were the last. */
static void return_sums(const mha_gradient_job *job, const key_chunk *c, const mha_tensor *gradient,
                        char *own, bool adds, bool is_last, mha_worker *worker) {
    if (own == NULL) {
        return;
    }
    const int64_t columns = mha_extent(gradient, 1);
    const size_t width = (size_t)columns * mha_dtype_size(job->attention->dtype);
    for (int64_t key = c->first_key; key < c->end_key; key++, own += width) {
        char *to = mha_at_row(gradient, job->attention->batch_axes, c->batch, c->kv_head, key);
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (columns + 1))) {
            return;
        }
        if (adds) {
            job->kernels->elementwise->add(to, own, columns);
        } else {
            memcpy(to, own, width);
        }
        if (!is_last) {
            memset(own, 0, width);
        }
    }
}

/* After `blocks` blocks of queries. Sums over thousands of blocks are chains of chains, so that
 * their error grows with the root of both lengths alone. */
static void join_sums(const mha_gradient_job *job, const key_chunk *c, int64_t blocks,
                      mha_worker *worker) {
    const bool is_last = blocks == job->group * job->query_blocks;
    const bool joins = job->joins_sums && blocks % MHA_JOINED_BLOCKS == 0;
    const bool adds = job->joins_sums && blocks > MHA_JOINED_BLOCKS;
    if (has_sums_of_own(job) && (joins || is_last)) {
        return_sums(job, c, &job->gradients->grad_key, c->grad_key, adds, is_last, worker);
        return_sums(job, c, &job->gradients->grad_value, c->grad_value, adds, is_last, worker);
    }
}

/* Tasks in turns are the threads', so each thread has neighbouring heads: the rows of one position
 * may share a cache line, which only one thread writes at a time. */
static int64_t head_of_task(const mha_gradient_job *job, int64_t task, int64_t heads) {
    const int64_t thread = task % job->threads, turn = task / job->threads;
    return thread * (heads / job->threads) + mha_smaller(thread, heads % job->threads) + turn;
}

static key_chunk chunk_of_task(const mha_gradient_job *job, int64_t task) {
    const int64_t key_heads = job->batch * job->kv_heads;
    const int64_t head = head_of_task(job, task % key_heads, key_heads);
    key_chunk c = {
        .number = (int)(task / key_heads), /* other heads lie between two of one head */
        .batch = head / job->kv_heads,
        .kv_head = head % job->kv_heads,
        .task = task,
    };
    c.first_key = c.number * job->chunk_keys;
    c.end_key = mha_smaller(c.first_key + job->chunk_keys, mha_extent(&job->attention->key, 2));
    return c;
}

/* One of the blocks of queries that pass a chunk: those of the first head that shares its keys, the
 * last one first, then those of the next head. */
typedef struct passing_block {
    int64_t head, number, first, end; /* queries first..end, block `number` of the head */
} passing_block;

static passing_block block_that_passes(const mha_gradient_job *job, const key_chunk *c,
                                       int64_t number) {
    passing_block block = {
        .head = c->kv_head * job->group + number / job->query_blocks,
        .number = job->query_blocks - 1 - number % job->query_blocks,
    };
    block.first = block.number * MHA_QUERY_CHAIN;
    block.end = mha_smaller(block.first + MHA_QUERY_CHAIN, mha_extent(&job->attention->query, 2));
    return block;
}

static bool is_dense(const void *rows, int64_t stride, const mha_tensor *gradient) {
    return rows == NULL || stride == mha_extent(gradient, 1);
}

/* Sums of the chunk begin with this block: at 0, or where the kernel writes what it would add.
 * Where rows in memory have no gaps, zeros are faster: memset, other than stores, does not read
 * what it overwrites. */
static void begin_sums(const mha_gradient_job *job, const key_chunk *c,
                       mha_attention_backward_block *block, mha_worker *worker) {
    const mha_attention_gradients *g = job->gradients;
    const bool are_dense = is_dense(c->grad_key, c->grad_key_stride, &g->grad_key) &&
                           is_dense(c->grad_value, c->grad_value_stride, &g->grad_value);
    block->writes_keys = !(job->comes_from_memory && are_dense) && sees_chunk(block) &&
                         job->kernels->attention->backward_may_write_keys(block);
    if (!block->writes_keys) {
        clear_sums(job, c, worker);
    }
}

enum { MOST_PREFETCH_ROWS = 8 };
typedef struct rows_to_prefetch {
    mha_prefetch_rows rows[MOST_PREFETCH_ROWS];
    int count;
} rows_to_prefetch;

static void add_rows(rows_to_prefetch *prefetched, const mha_gradient_job *job,
                     const mha_tensor *tensor, int64_t batch, int64_t head, int64_t first,
                     int64_t end) {
    if (tensor->data != NULL) {
        prefetched->rows[prefetched->count++] =
            mha_rows_to_come(job->attention, tensor, batch, head, first, end);
    }
}

/* What the kernel prefetches while a block passes: the gradient that it will write, the rows of the
 * next block, and the block's share of the worker's next chunk. */
static void choose_prefetch(const mha_gradient_job *job, const key_chunk *c, int64_t number,
                            rows_to_prefetch *prefetched) {
    const mha_attention *a = job->attention;
    const mha_attention_gradients *g = job->gradients;
    const int64_t blocks = job->group * job->query_blocks;
    const key_chunk next = chunk_of_task(job, c->task + job->threads);
    const bool there_is_next = next.number < job->chunks, is_last = number + 1 == blocks;
    const passing_block now = block_that_passes(job, c, number);
    prefetched->count = 0;
    add_rows(prefetched, job, &g->grad_query, c->batch, now.head, now.first, now.end);
    if (!is_last || there_is_next) {
        const int64_t batch = is_last ? next.batch : c->batch;
        const passing_block then =
            is_last ? block_that_passes(job, &next, 0) : block_that_passes(job, c, number + 1);
        const mha_tensor *const of_queries[] = {&a->query, &a->output, &g->grad_output};
        for (int i = 0; i < 3; i++) {
            add_rows(prefetched, job, of_queries[i], batch, then.head, then.first, then.end);
        }
    }
    if (there_is_next && !job->copies_keys) {
        const int64_t keys = next.end_key - next.first_key;
        const int64_t first = next.first_key + keys * number / blocks;
        const int64_t end = next.first_key + keys * (number + 1) / blocks;
        const mha_tensor *const of_keys[] = {&a->key, &a->value, &g->grad_key, &g->grad_value};
        for (int i = 0; i < 4; i++) {
            add_rows(prefetched, job, of_keys[i], next.batch, next.kv_head, first, end);
        }
    }
}

/* One block of queries of one head with a chunk of keys. */
static void differentiate_block(const mha_gradient_job *job, const key_chunk *c, int64_t number,
                                mha_worker *worker) {
    const mha_attention_gradients *g = job->gradients;
    const passing_block passing = block_that_passes(job, c, number);
    const int64_t head = passing.head, first = passing.first;
    mha_key_ranges visible;
    mha_attention_backward_block block;
    rows_to_prefetch prefetched;
    mha_fill_gradient_block(job, c->batch, head, passing.number, &visible, &block);
    _Atomic uint64_t *done =
        job->done + (c->batch * job->heads + head) * job->query_blocks + passing.number;
    block.attention.stored_key = c->first_key;
    block.attention.key = c->key;
    block.attention.key_stride = c->key_stride;
    block.attention.value = c->value;
    block.attention.value_stride = c->value_stride;
    if (job->copies_keys) {
        block.attention.key_storage = block.attention.value_storage = MHA_AS_COMPUTED;
    }
    block.grad_key = c->grad_key;
    block.grad_key_stride = c->grad_key_stride;
    block.grad_value = c->grad_value;
    block.grad_value_stride = c->grad_value_stride;
    block.first_key = c->first_key;
    block.end_key = c->end_key;
    block.adds_to_query = c->number > 0;
    block.grad_query =
        mha_gradient_rows(job, &g->grad_query, c->batch, head, first, &block.grad_query_stride);
    block.grad_w_v =
        mha_gradient_rows(job, &g->grad_w_v, c->batch, head, first, &block.grad_w_v_stride);
    if (!job->bias_has_own_pass) {
        mha_want_bias(job, c->batch, head, first, &block);
    }
    mha_want_per_head(job, c->batch, head, c->number, &block);
    if (job->prefetches) {
        choose_prefetch(job, c, number, &prefetched);
        block.attention.prefetch = prefetched.rows;
        block.attention.prefetch_count = prefetched.count;
    }
    if (number == 0) {
        begin_sums(job, c, &block, worker);
    }
    if (sees_chunk(&block)) {
        await_turn(done, c->number, worker);
        mha_run_gradient_block(job, c->batch, head, &block, worker);
    }
    atomic_fetch_or(done, (uint64_t)1 << c->number);
}

void mha_differentiate_chunk(void *context, int64_t task, mha_worker *worker) {
    const mha_gradient_job *job = context;
    key_chunk c = chunk_of_task(job, task);
    use_rows(job, worker, &c);
    if (job->group * job->query_blocks == 0) {
        clear_sums(job, &c, worker);
    }
    int64_t number = 0;
    for (int64_t head = c.kv_head * job->group; head < (c.kv_head + 1) * job->group; head++) {
        if (c.number == 0 && !job->bias_has_own_pass) {
            mha_clear_bias(job, c.batch, head, worker);
        }
        mha_clear_diagonals(job, c.batch, head, c.number, worker);
        for (int64_t block = 0; block < job->query_blocks; block++, number++) {
            if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_BLOCK)) {
                return;
            }
            differentiate_block(job, &c, number, worker);
            join_sums(job, &c, number + 1, worker);
        }
    }
}

static bool has_rows_apart(const mha_tensor *tensor, mha_dtype dtype) {
    return tensor->data != NULL && mha_rows_lie_apart(tensor, dtype);
}

/* The kernel's scratch; a copy of a chunk of key and value, where their rows or those of their
 * gradients lie apart: every block of queries reads them, at most MOST_COPIED bytes; and the
 * worker's own sums, where the chunk is copied or its sums are long. */
static void plan_scratch(mha_gradient_job *job) {
    enum { MOST_COPIED = 2 << 20, MOST_SUMMED = 32 << 20 };
    const mha_attention *a = job->attention;
    const mha_attention_gradients *g = job->gradients;
    const int64_t head_dim = mha_extent(&a->key, 1), value_head_dim = mha_extent(&a->value, 1);
    const double column = (double)job->chunk_keys * (double)mha_dtype_size(a->dtype);
    const double bytes = column * ((double)head_dim + (double)value_head_dim);
    const bool apart = has_rows_apart(&a->key, a->dtype) || has_rows_apart(&a->value, a->dtype) ||
                       has_rows_apart(&g->grad_key, a->dtype) ||
                       has_rows_apart(&g->grad_value, a->dtype);
    job->copies_keys = apart && bytes <= MOST_COPIED && job->group * job->query_blocks > 1;
    job->joins_sums = bytes <= MOST_SUMMED && job->group * job->query_blocks > MHA_JOINED_BLOCKS;
    job->scratch_size = job->kernels->attention->backward_scratch_size(head_dim, value_head_dim);
    if (has_sums_of_own(job)) {
        job->keys_size = (size_t)(column * (double)head_dim);
        job->values_size = (size_t)(column * (double)value_head_dim);
    }
}

/* Vectors of half the size do less in vain for few queries, but not where the keys stand in the
 * lanes of whole ones alone. */
static const mha_kernels *kernels_of(mha_dtype dtype, int64_t queries) {
    const mha_kernels *whole = mha_kernels_for(dtype);
    const mha_kernels *half = mha_kernels_for_lanes(dtype, queries);
    return queries > half->attention->most_few_gradients &&
                   queries <= whole->attention->most_few_gradients
               ? whole
               : half;
}

mha_status mha_plan_gradients(mha_gradient_job *job) {
    enum { MOST_CHUNKS = 63 }; /* each has a bit in job->done */
    const mha_attention_gradients *gradients = job->gradients;
    const mha_attention *a = gradients->attention;
    job->attention = a;
    job->kernels = kernels_of(a->dtype, mha_extent(&a->query, 2));
    MHA_TRY(mha_check_columns(a));
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes, &job->batch));
    job->heads = mha_extent(&a->query, 3);
    job->kv_heads = mha_extent(&a->key, 3);
    job->group = job->kv_heads == 0 ? 0 : job->heads / job->kv_heads;
    const int64_t query_len = mha_extent(&a->query, 2);
    job->query_blocks = mha_divide_up(query_len, MHA_QUERY_CHAIN);
    job->chunk_keys = mha_keys_of_a_task(a, (double)job->group * (double)query_len, MOST_CHUNKS);
    job->chunks = job->chunk_keys == 0 ? 1 : mha_divide_up(mha_extent(&a->key, 2), job->chunk_keys);
    job->bias_has_own_pass = mha_bias_is_shared(job);
    job->threads = 1; /* until it is known how many there are */
    plan_scratch(job);
    return MHA_OK;
}

mha_status mha_count_gradient_tasks(const mha_gradient_job *job, int64_t *count) {
    const int64_t shape[] = {job->batch, job->kv_heads, job->chunks};
    return mha_count_elements(shape, 3, count);
}

bool mha_wants_more_than_bias(const mha_gradient_job *job) {
    const mha_attention_gradients *g = job->gradients;
    return g->grad_query.data != NULL || g->grad_key.data != NULL || g->grad_value.data != NULL ||
           g->grad_w_v.data != NULL || mha_wants_per_head(g) ||
           (mha_wants_bias(job) && !job->bias_has_own_pass);
}

/* What tasks leave for each other. */
mha_status mha_take_gradient_sums(mha_gradient_job *job, mha_workspace *workspace) {
    const int64_t shape[] = {job->batch, job->heads, job->query_blocks};
    int64_t query_blocks;
    size_t all;
    void *piece;
    MHA_TRY(mha_count_elements(shape, 3, &query_blocks));
    MHA_TRY(mha_multiply_sizes(sizeof *job->done, (size_t)query_blocks, &all));
    MHA_TRY(mha_workspace_take(workspace, all, &piece));
    job->done = piece;
    for (int64_t i = 0; i < query_blocks && !workspace->measures; i++) {
        atomic_init(&job->done[i], 0);
    }
    return mha_take_per_head(job, workspace);
}

/* Each worker's own. */
mha_status mha_take_gradient_scratch(mha_gradient_job *job, size_t threads,
                                     mha_workspace *workspace) {
    MHA_TRY(mha_workspace_take_pieces(workspace, job->scratch_size, threads, &job->scratch));
    if (job->copies_keys) {
        MHA_TRY(mha_workspace_take_pieces(workspace, job->keys_size, threads, &job->keys));
        MHA_TRY(mha_workspace_take_pieces(workspace, job->values_size, threads, &job->values));
    }
    if (has_sums_of_own(job)) {
        MHA_TRY(mha_workspace_take_pieces(workspace, job->keys_size, threads, &job->grad_keys));
        MHA_TRY(mha_workspace_take_pieces(workspace, job->values_size, threads, &job->grad_values));
    }
    return MHA_OK;
}

static const mha_gradient_job *the_only_job(const void *context, int64_t number,
                                            mha_worker *worker) {
    (void)number, (void)worker;
    return context;
}

static mha_status run_planned_passes(mha_gradient_job *job, mha_execution *execution) {
    const size_t threads = (size_t)mha_gradient_threads(job, INT64_MAX, execution->num_threads);
    int64_t tasks;
    MHA_TRY(mha_take_gradient_sums(job, &execution->workspace));
    MHA_TRY(mha_take_gradient_scratch(job, threads, &execution->workspace));
    job->known = (mha_known_visibility){
        .query_blocks = job->query_blocks, .keys = MHA_KEY_CHAIN, .slots = 1};
    MHA_TRY(
        mha_take_known_blocks(job->attention, (int)threads, &execution->workspace, &job->known));
    MHA_TRY(mha_count_gradient_tasks(job, &tasks));
    job->threads = mha_gradient_threads(job, tasks, execution->num_threads);
    const double bytes = mha_bytes_of_heads(job->attention, job->batch * job->heads);
    job->prefetches = bytes > MHA_NEAR_BYTES;
    job->comes_from_memory = bytes > 3.0 * MHA_NEAR_BYTES;
    if (mha_wants_more_than_bias(job)) {
        MHA_TRY(mha_run_tasks(execution, tasks, job->threads, mha_differentiate_chunk, job));
    }
    const mha_gradient_jobs jobs = {1, job->kernels->elementwise, mha_sums_of_a_head(job),
                                    the_only_job, job};
    MHA_TRY(mha_per_head_backward(&jobs, job->gradients, execution));
    return job->bias_has_own_pass ? mha_bias_backward(job, execution) : MHA_OK;
}

static mha_status run_steps(const mha_attention_gradients *gradients, mha_execution *execution) {
    mha_attention_gradients of_copies = *gradients;
    mha_call_with_copies call;
    mha_gradient_job job = {.gradients = &of_copies};
    if (mha_has_no_rows(&gradients->attention->query) &&
        mha_has_no_rows(&gradients->attention->key)) {
        return MHA_OK; /* all gradients are empty */
    }
    MHA_TRY(mha_copy_heads_of_call(gradients->attention, execution, &call));
    of_copies.attention = &call.attention;
    MHA_TRY(mha_plan_gradients(&job));
    return run_planned_passes(&job, execution);
}

MHA_DEFINE_BACKWARD(scaled_dot_product_attention, mha_attention_gradients, run_steps)
