/* Step 3 of the figure: softmax(query key^T * scale) value. A task is some blocks of queries of one
 * head; the kernel goes through the keys. Memory beyond the output does not grow with the length,
 * but for copies of at most 16 MB a worker. */
#include "core/attention/attention_job.h"
#include "core/attention/attention_rows.h"
#include "core/attention/few_keys.h"
#include "core/attention/few_queries.h"
#include "core/attention/joined_heads.h"
#include "core/attention/one_key.h"
#include "core/base/run.h"

/* Which key head a worker has copied; its rows of key lie behind. */
typedef struct head_copy {
    _Alignas(64) int64_t number; /* among all batch items and sequences; -1: none yet */
} head_copy;

/* Blocks of a head are whole vectors of queries, as equal as can be: the kernel is at its best with
 * blocks of two or three, and 16 vectors are taken as 3 + 3 + 3 + 3 + 2 + 2. */
static int64_t first_query_of(const mha_attention_job *job, int64_t query_len,
                              int64_t query_block) {
    const int64_t first =
        job->whole_vectors * query_block + mha_smaller(query_block, job->with_one_more);
    return mha_smaller(first * job->kernels->attention->query_lanes, query_len);
}

/* A block of queries of (batch, head), numbered over both, that the worker has in this slot. */
static void fill_block(const mha_attention_job *job, int64_t batch_head, int64_t query_block,
                       mha_worker *worker, int slot, mha_key_ranges *visible,
                       mha_attention_block *block) {
    const int64_t heads = mha_extent(&job->attention->query, 3);
    const int64_t batch = batch_head / heads, head = batch_head % heads;
    const int64_t query_len = mha_extent(&job->attention->query, 2);
    const int64_t first = first_query_of(job, query_len, query_block);
    const int64_t count = first_query_of(job, query_len, query_block + 1) - first;
    mha_fill_query_block(job->attention, batch, head, first, count, visible, block);
    block->checkpoint = &worker->checkpoint;
    if (mha_knows_blocks(&job->known)) {
        block->known = mha_known_blocks_of(&job->known, job->attention, batch, head, query_block,
                                           worker->number, slot);
    }
}

/* Lets a block of a query tile read from the worker's copies of mask and bias. */
static void read_copied_options(const mha_attention_job *job, int64_t batch_head,
                                int64_t first_query, int worker, mha_scores *scores) {
    const mha_heads_copy *mask = &job->mask, *bias = &job->bias;
    const int64_t number = batch_head % mha_extent(&job->attention->query, 3) % job->joint_heads;
    if (mask->option != NULL) {
        const char *copy = mha_piece(&job->masks, worker);
        scores->mask = (const uint8_t *)copy + number * mask->head_stride;
        scores->mask_first_query = first_query;
        scores->mask_query_stride = mask->query_stride;
        scores->mask_key_stride = 1;
    }
    if (bias->option != NULL) {
        const char *copy = mha_piece(&job->biases, worker);
        scores->bias = copy + number * bias->head_stride;
        scores->bias_first_query = first_query;
        scores->bias_query_stride = bias->query_stride / bias->item;
        scores->bias_key_stride = 1;
    }
}

static head_copy *copy_of(const mha_attention_job *job, int worker) {
    return mha_piece(&job->keys, worker);
}

/* Lets the blocks read their keys and values from the worker's copy. */
static void read_from_copy(const mha_attention_job *job, int64_t batch_head,
                           const mha_worker *worker, mha_attention_block *blocks, int count) {
    const mha_attention *a = job->attention;
    const int64_t kv_heads = mha_extent(&a->key, 3), key_len = mha_extent(&a->key, 2);
    const int64_t batch_kv_head = batch_head / (mha_extent(&a->query, 3) / kv_heads);
    const int64_t batch = batch_kv_head / kv_heads, kv_head = batch_kv_head % kv_heads;
    head_copy *copy = copy_of(job, worker->number);
    char *key = (char *)(copy + 1);
    char *value = mha_piece(&job->values, worker->number);
    if (copy->number != job->key_heads_before + batch_kv_head) {
        mha_gather_rows(a, &a->key, batch, kv_head, 0, key_len, key);
        mha_gather_rows(a, &a->value, batch, kv_head, 0, key_len, value);
        copy->number = job->key_heads_before + batch_kv_head;
    }
    for (int i = 0; i < count; i++) {
        blocks[i].key = key;
        blocks[i].value = value;
        blocks[i].key_stride = blocks[i].head_dim;
        blocks[i].value_stride = blocks[i].value_head_dim;
        blocks[i].key_storage = blocks[i].value_storage = MHA_AS_COMPUTED;
        blocks[i].key_by_columns = blocks[i].value_by_columns = false;
    }
}

/* A query tile: some consecutive blocks of one head. The last blocks of a head come first, since
 * with a causal mask they are the longest. */
static int64_t first_block_of(const mha_attention_job *job, int64_t query_tile) {
    return (job->query_tiles_of_a_head - 1 - query_tile % job->query_tiles_of_a_head) *
           job->joint_blocks;
}

static int64_t end_block_of(const mha_attention_job *job, int64_t query_tile) {
    return mha_smaller(first_block_of(job, query_tile) + job->joint_blocks, job->query_blocks);
}

/* What the first blocks of keys write of a query tile's weights. */
static mha_prefetch_rows weights_to_come(const mha_attention_job *job, int64_t query_tile) {
    const mha_attention *a = job->attention;
    const int64_t heads = mha_extent(&a->query, 3), query_len = mha_extent(&a->query, 2);
    const int64_t head = query_tile / job->query_tiles_of_a_head,
                  item = (int64_t)mha_dtype_size(a->dtype);
    const int64_t first = first_query_of(job, query_len, first_block_of(job, query_tile));
    const int64_t key_len = mha_extent(&a->key, 2);
    return (mha_prefetch_rows){
        .first = (const char *)a->weights +
                 mha_result_row(a, head / heads, head % heads, first) * key_len * item,
        .count = first_query_of(job, query_len, first_block_of(job, query_tile) + 1) - first,
        .stride = key_len * item,
        .width = mha_smaller(key_len, 2 * MHA_KEY_BLOCK) * item,
    };
}

/* What the end of a query tile writes, and what its worker's next query tile reads, if there is
 * one: its queries, and a share of the next head's keys; and writes of weights. No processor
 * foresees them, since they lie in other arrays, or behind other rows. Returns how many. */
enum { MOST_PREFETCH_ROWS = 4 };
static int choose_prefetch(const mha_attention_job *job, int64_t query_tile,
                           int64_t next_query_tile, int64_t next_task,
                           mha_prefetch_rows prefetch[MOST_PREFETCH_ROWS]) {
    const mha_attention *a = job->attention;
    const int64_t heads = mha_extent(&a->query, 3), query_len = mha_extent(&a->query, 2);
    const int64_t key_len = mha_smaller(mha_extent(&a->key, 2), 2 * MHA_KEY_BLOCK);
    const int64_t query_tiles = job->query_tiles_of_a_head, of_task = job->query_tiles_of_a_task;
    int64_t head = query_tile / query_tiles;
    const int64_t last = end_block_of(job, query_tile) - 1;
    prefetch[0] = mha_rows_to_come(a, &a->output, head / heads, head % heads,
                                   first_query_of(job, query_len, last),
                                   first_query_of(job, query_len, last + 1));
    head = next_query_tile / query_tiles;
    if (head >= job->batch_heads) {
        return 1;
    }
    prefetch[1] =
        mha_rows_to_come(a, &a->query, head / heads, head % heads,
                         first_query_of(job, query_len, first_block_of(job, next_query_tile)),
                         first_query_of(job, query_len, end_block_of(job, next_query_tile)));
    int count = 2;
    if (a->weights != NULL) {
        prefetch[count++] = weights_to_come(job, next_query_tile);
    }
    head = next_task * of_task / query_tiles;
    if (head >= job->batch_heads || head == query_tile / query_tiles || job->copies_heads) {
        return count;
    }
    const int64_t share = query_tile % of_task;
    prefetch[count] =
        mha_rows_to_come(a, &a->key, head / heads, head % heads / (heads / mha_extent(&a->key, 3)),
                         key_len * share / of_task, key_len * (share + 1) / of_task);
    return count + 1;
}

static void attend_query_tile(const mha_attention_job *job, int64_t query_tile,
                              int64_t next_query_tile, int64_t next_task, bool brings_values,
                              mha_worker *worker) {
    mha_attention_block blocks[MHA_MAX_JOINT_BLOCKS];
    mha_key_ranges visible[MHA_MAX_JOINT_BLOCKS];
    mha_prefetch_rows prefetch[MOST_PREFETCH_ROWS];
    const int64_t batch_head = query_tile / job->query_tiles_of_a_head;
    const int64_t first = first_block_of(job, query_tile);
    const int count = (int)mha_smaller(job->query_blocks - first, job->joint_blocks);
    for (int i = 0; i < count; i++) {
        fill_block(job, batch_head, first + i, worker, i, &visible[i], &blocks[i]);
        if (job->joint_heads > 0) {
            read_copied_options(job, batch_head, blocks[0].first_query, worker->number,
                                &blocks[i].scores);
        }
    }
    if (job->copies_heads) {
        read_from_copy(job, batch_head, worker, blocks, count);
    }
    blocks[0].brings_values = brings_values;
    if (job->prefetches) {
        blocks[count - 1].prefetch = prefetch;
        blocks[count - 1].prefetch_count =
            choose_prefetch(job, query_tile, next_query_tile, next_task, prefetch);
    }
    job->kernels->attention->forward(blocks, count, mha_piece(&job->scratch, worker->number));
}

/* Whether the task before that the worker has most likely had is of another head. */
static bool is_first_of_head(const mha_attention_job *job, int64_t task) {
    const int64_t of_task = job->query_tiles_of_a_task, query_tiles = job->query_tiles_of_a_head;
    return task < job->threads ||
           (task - job->threads) * of_task / query_tiles != task * of_task / query_tiles;
}

void mha_attend_query_blocks(void *context, int64_t task, mha_worker *worker) {
    const mha_attention_job *job = context;
    const int64_t query_tiles = job->query_tiles_of_a_task, next_task = task + job->threads;
    for (int64_t i = 0; i < query_tiles; i++) {
        const int64_t query_tile = task * query_tiles + i;
        attend_query_tile(job, query_tile,
                          i + 1 < query_tiles ? query_tile + 1 : next_task * query_tiles, next_task,
                          i == 0 && is_first_of_head(job, task), worker);
    }
}

/* Task: one query tile of some heads, whose mask and bias are copied first; numbered by batch item,
 * query tile and part of the heads, the last one fastest. */
static void attend_joint_heads(void *context, int64_t task, mha_worker *worker) {
    const mha_attention_job *job = context;
    const mha_attention *a = job->attention;
    const int64_t heads = mha_extent(&a->query, 3), tiles = job->query_tiles_of_a_head;
    const int64_t parts = mha_divide_up(heads, job->joint_heads);
    const int64_t batch = task / (tiles * parts), tile = task / parts % tiles;
    const int64_t head = task % parts * job->joint_heads;
    const int64_t count = mha_smaller(job->joint_heads, heads - head);
    const int64_t query_len = mha_extent(&a->query, 2);
    const int64_t first = first_query_of(job, query_len, first_block_of(job, tile));
    const int64_t end = first_query_of(job, query_len, end_block_of(job, tile));
    const mha_heads_copy *const options[] = {&job->mask, &job->bias};
    const mha_pieces *const copies[] = {&job->masks, &job->biases};
    for (int i = 0; i < 2; i++) {
        if (options[i]->option != NULL) {
            mha_copy_heads(options[i], a, batch, head, count, first, end,
                           mha_piece(copies[i], worker->number), &worker->checkpoint);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t query_tile = (batch * heads + head + i) * tiles + tile;
        attend_query_tile(job, query_tile, query_tile + tiles, query_tile + tiles, true, worker);
    }
}

/* Where the keys and values of a head do not fit the second cache, blocks of queries share the
 * reading of them: as many as leave enough tasks for several threads. */
static int joint_blocks_of(const mha_attention_job *job, int num_threads) {
    enum { SECOND_CACHE = 512 * 1024, TASKS_A_THREAD = 2 };
    const mha_attention *a = job->attention;
    const double widths = (double)mha_extent(&a->key, 1) + (double)mha_extent(&a->value, 1);
    const double bytes = (double)mha_extent(&a->key, 2) * widths * (double)mha_dtype_size(a->dtype);
    const double blocks = (double)job->batch_heads * (double)job->query_blocks;
    const double tasks = num_threads == 1 ? 1 : (double)TASKS_A_THREAD * (double)num_threads;
    int joint = 1;
    while (bytes >= SECOND_CACHE && joint < MHA_MAX_JOINT_BLOCKS && joint * tasks < blocks) {
        joint++;
    }
    return joint;
}

/* The kernel's scratch, and the copy of a head's keys and values, where their rows lie apart and
 * enough queries read them to repay it (docs/journal.md); at most so many bytes. Rows by columns
 * would be transposed for each query tile. */
static void plan_scratch(mha_attention_job *job) {
    const mha_attention *a = job->attention;
    const bool by_columns = mha_some_lie_by_columns(a);
    const int64_t of_a_tile = job->joint_blocks * job->kernels->attention->query_block;
    const double most = by_columns ? 16 << 20 : 2 << 20;
    const int64_t fewest_queries = by_columns ? of_a_tile + 1 : 512;
    const int64_t fewest_keys = by_columns ? 1 : 512;
    const int64_t head_dim = mha_extent(&a->key, 1), value_head_dim = mha_extent(&a->value, 1);
    const double column = (double)mha_extent(&a->key, 2) * (double)mha_dtype_size(a->dtype);
    const double bytes = column * ((double)head_dim + (double)value_head_dim);
    job->scratch_size =
        job->kernels->attention->scratch_size(head_dim, value_head_dim, job->joint_blocks);
    job->copies_heads =
        (mha_rows_lie_apart(&a->key, a->dtype) || mha_rows_lie_apart(&a->value, a->dtype)) &&
        a->pages.table == NULL && job->joint_heads == 0 &&
        a->options->window_left == MHA_UNLIMITED && bytes <= most &&
        mha_extent(&a->query, 2) >= fewest_queries && mha_extent(&a->key, 2) >= fewest_keys;
    if (job->copies_heads) {
        job->keys_size = sizeof(head_copy) + (size_t)(column * (double)head_dim);
        job->values_size = (size_t)(column * (double)value_head_dim);
    }
}

/* Where the heads of a mask or bias lie last: how many of them a task takes, those of a line of
 * memory at most, and how many blocks of queries, so that caches hold the copies and there are
 * enough tasks. */
static void plan_joint_heads(mha_attention_job *job, int num_threads) {
    enum { MOST_HEADS = 16, FEW_HEADS = 4, TASKS_A_THREAD = 5 };
    enum { NEAR_BYTES = 2 << 20, MOST_BYTES = 16 << 20 }; /* of a worker's copies */
    const mha_attention *a = job->attention;
    const int64_t all = mha_extent(&a->query, 3), queries = job->kernels->attention->query_block;
    /* Of one head and one block of queries. */
    const double bytes = (double)mha_plan_mask_copy(a, 1, queries, MOST_BYTES).bytes +
                         (double)mha_plan_bias_copy(a, 1, queries, MOST_BYTES).bytes;
    const double blocks = (double)job->batch_heads / (double)all * (double)job->query_blocks;
    const double tasks = num_threads == 1 ? 1 : (double)TASKS_A_THREAD * (double)num_threads;
    int64_t heads = mha_smaller(all, MOST_HEADS);
    int joint = job->joint_blocks;
    if (bytes == 0) {
        return;
    }
    while (joint > 1 && ((double)heads * joint * bytes > NEAR_BYTES ||
                         joint * tasks > blocks * (double)mha_divide_up(all, heads))) {
        joint--;
    }
    while (heads > FEW_HEADS && ((double)heads * joint * bytes > MOST_BYTES ||
                                 joint * tasks > blocks * (double)mha_divide_up(all, heads))) {
        heads = mha_divide_up(heads, 2);
    }
    job->mask = mha_plan_mask_copy(a, heads, joint * queries, MOST_BYTES);
    job->bias = mha_plan_bias_copy(a, heads, joint * queries, MOST_BYTES - (double)job->mask.bytes);
    if (job->mask.option != NULL || job->bias.option != NULL) {
        job->joint_blocks = joint;
        job->joint_heads = heads;
    }
}

/* A task is a whole head where there are so many for each thread that none waits long for the last.
 */
static void plan_tasks(mha_attention_job *job, int threads, int64_t *num_tasks) {
    enum { HEADS_A_THREAD = 16 };
    const bool whole = job->joint_heads == 0 &&
                       (threads == 1 || job->batch_heads >= (int64_t)HEADS_A_THREAD * threads);
    job->query_tiles_of_a_task = whole ? job->query_tiles_of_a_head : 1;
    *num_tasks = whole ? job->batch_heads : *num_tasks;
    job->threads = threads;
    job->prefetches = job->attention->pages.table == NULL &&
                      mha_bytes_of_heads(job->attention, job->batch_heads) > MHA_NEAR_BYTES;
}

mha_status mha_plan_attention(const mha_attention *attention, int num_threads,
                              mha_attention_job *job, int64_t *num_tasks, int *threads) {
    int64_t batch;
    *job = (mha_attention_job){
        .attention = attention,
        .kernels = mha_kernels_for_lanes(attention->dtype, mha_extent(&attention->query, 2))};
    MHA_TRY(mha_check_columns(attention));
    MHA_TRY(mha_count_elements(attention->query.shape, attention->batch_axes, &batch));
    if (__builtin_mul_overflow(batch, mha_extent(&attention->query, 3), &job->batch_heads)) {
        return MHA_SIZE_OVERFLOW;
    }
    job->query_blocks =
        mha_divide_up(mha_extent(&attention->query, 2), job->kernels->attention->query_block);
    const int64_t vectors =
        mha_divide_up(mha_extent(&attention->query, 2), job->kernels->attention->query_lanes);
    const int64_t blocks = mha_larger(job->query_blocks, 1);
    job->whole_vectors = vectors / blocks;
    job->with_one_more = vectors % blocks;
    job->joint_blocks = joint_blocks_of(job, num_threads);
    plan_joint_heads(job, num_threads);
    job->query_tiles_of_a_head = mha_divide_up(job->query_blocks, job->joint_blocks);
    const int64_t heads_or_parts =
        job->joint_heads == 0
            ? job->batch_heads
            : batch * mha_divide_up(mha_extent(&attention->query, 3), job->joint_heads);
    if (__builtin_mul_overflow(heads_or_parts, job->query_tiles_of_a_head, num_tasks)) {
        return MHA_SIZE_OVERFLOW;
    }
    const double operations = mha_attention_operations(attention, job->batch_heads);
    *threads = mha_threads_for(*num_tasks, operations, num_threads);
    plan_tasks(job, *threads, num_tasks);
    plan_scratch(job);
    return MHA_OK;
}

bool mha_nothing_to_attend(const mha_attention *attention) {
    return mha_has_no_rows(&attention->query) ||
           (mha_extent(&attention->value, 1) == 0 && attention->weights == NULL &&
            attention->lse == NULL && attention->maximum == NULL);
}

mha_status mha_take_attention_memory(mha_attention_job *job, int threads,
                                     mha_workspace *workspace) {
    MHA_TRY(
        mha_workspace_take_pieces(workspace, job->scratch_size, (size_t)threads, &job->scratch));
    if (job->copies_heads) {
        MHA_TRY(mha_workspace_take_pieces(workspace, job->keys_size, (size_t)threads, &job->keys));
        MHA_TRY(
            mha_workspace_take_pieces(workspace, job->values_size, (size_t)threads, &job->values));
        for (int worker = 0; worker < threads && !workspace->measures; worker++) {
            copy_of(job, worker)->number = -1;
        }
    }
    MHA_TRY(mha_workspace_take_pieces(workspace, job->mask.bytes, (size_t)threads, &job->masks));
    return mha_workspace_take_pieces(workspace, job->bias.bytes, (size_t)threads, &job->biases);
}

static mha_status run_blocks(const mha_attention *attention, mha_execution *execution) {
    mha_attention_job job;
    int64_t num_tasks;
    int threads;
    MHA_TRY(mha_plan_attention(attention, execution->num_threads, &job, &num_tasks, &threads));
    MHA_TRY(mha_take_attention_memory(&job, threads, &execution->workspace));
    job.known = (mha_known_visibility){
        .mask.is_copied = job.mask.option != NULL,
        .bias.is_copied = job.bias.option != NULL,
        .query_blocks = job.query_blocks,
        .keys = MHA_KEY_BLOCK,
        .slots = job.joint_blocks,
    };
    MHA_TRY(mha_take_known_blocks(attention, threads, &execution->workspace, &job.known));
    return mha_run_tasks(execution, num_tasks, threads,
                         job.joint_heads > 0 ? attend_joint_heads : mha_attend_query_blocks, &job);
}

static mha_status run_steps(const mha_attention *attention, mha_execution *execution) {
    if (mha_nothing_to_attend(attention)) {
        return MHA_OK;
    }
    if (mha_has_one_key(attention)) {
        return mha_one_key_forward(attention, execution);
    }
    const bool joins_heads = mha_joined_heads_are_ahead(attention, execution->num_threads);
    if (!joins_heads && mha_has_few_keys(attention)) {
        return mha_few_keys_forward(attention, execution);
    }
    if (!joins_heads && mha_has_few_queries(attention)) {
        return mha_few_queries_forward(attention, execution);
    }
    mha_joined_heads joined;
    MHA_TRY(mha_join_heads(attention, execution, &joined));
    MHA_TRY(run_blocks(&joined.attention, execution));
    return mha_part_heads(&joined, execution);
}

MHA_DEFINE_FORWARD(scaled_dot_product_attention, mha_attention, run_steps)
