/* Step 3 of the figure: softmax(query key^T * scale) value. A task is some blocks of queries of one
 * head; the kernel goes through the keys. Memory beyond the output does not grow with the length.
 */
#include "core/attention/attention_rows.h"
#include "core/attention/few_queries.h"
#include "core/attention/known_blocks.h"
#include "core/attention/varlen.h"
#include "core/base/run.h"
#include "threads/partition.h"

#include <stdlib.h>

typedef struct attention_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t query_blocks;                 /* of one head, of whole_vectors each; ... */
    int64_t whole_vectors, with_one_more; /* ... the first so many blocks have one more */
    int joint_blocks;                     /* of them, that go through the keys together */
    int64_t query_tiles_of_a_head, query_tiles_of_a_task;
    int64_t batch_heads;
    int threads;
    bool prefetches;          /* what the next query tile needs */
    bool heads_take_turns;    /* all heads of one query tile, then those of the next */
    int64_t key_heads_before; /* of a ragged batch: those of the sequences before */
    bool copies_heads;        /* each worker copies the key head that it is at, side by side */
    mha_known_visibility known;
    mha_pieces scratch, keys, values; /* of each worker: the kernel's, and its copy */
    size_t scratch_size, keys_size, values_size;
} attention_job;

/* Which key head a worker has copied; its rows of key lie behind. */
typedef struct head_copy {
    _Alignas(64) int64_t number; /* among all batch items and sequences; -1: none yet */
} head_copy;

/* Blocks of a head are whole vectors of queries, as equal as can be: the kernel is at its best with
 * blocks of two or three, and 16 vectors are taken as 3 + 3 + 3 + 3 + 2 + 2. */
static int64_t first_query_of(const attention_job *job, int64_t query_len, int64_t query_block) {
    const int64_t first =
        job->whole_vectors * query_block + mha_smaller(query_block, job->with_one_more);
    return mha_smaller(first * job->kernels->attention->query_lanes, query_len);
}

/* A block of queries of (batch, head), numbered over both, that the worker has in this slot. */
static void fill_block(const attention_job *job, int64_t batch_head, int64_t query_block,
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

static head_copy *copy_of(const attention_job *job, int worker) {
    return mha_piece(&job->keys, worker);
}

/* Lets the blocks read their keys and values from the worker's copy. */
static void read_from_copy(const attention_job *job, int64_t batch_head, const mha_worker *worker,
                           mha_attention_block *blocks, int count) {
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
    }
}

/* A query tile: some consecutive blocks of one head. The last blocks of a head come first, since
 * with a causal mask they are the longest. */
static int64_t first_block_of(const attention_job *job, int64_t query_tile) {
    return (job->query_tiles_of_a_head - 1 - query_tile % job->query_tiles_of_a_head) *
           job->joint_blocks;
}

static int64_t end_block_of(const attention_job *job, int64_t query_tile) {
    return mha_smaller(first_block_of(job, query_tile) + job->joint_blocks, job->query_blocks);
}

/* The query tile whose turn comes n-th. */
static int64_t query_tile_in_turn(const attention_job *job, int64_t n) {
    if (!job->heads_take_turns) {
        return n;
    }
    const int64_t heads = mha_extent(&job->attention->query, 3), tiles = job->query_tiles_of_a_head;
    const int64_t batch = n / (heads * tiles), tile = n / heads % tiles, head = n % heads;
    return (batch * heads + head) * tiles + tile;
}

/* What the first blocks of keys write of a query tile's weights. */
static mha_prefetch_rows weights_to_come(const attention_job *job, int64_t query_tile) {
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
static int choose_prefetch(const attention_job *job, int64_t query_tile, int64_t next_query_tile,
                           int64_t next_task, mha_prefetch_rows prefetch[MOST_PREFETCH_ROWS]) {
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

static void attend_query_tile(const attention_job *job, int64_t query_tile, int64_t next_query_tile,
                              int64_t next_task, bool brings_values, mha_worker *worker) {
    mha_attention_block blocks[MHA_MAX_JOINT_BLOCKS];
    mha_key_ranges visible[MHA_MAX_JOINT_BLOCKS];
    mha_prefetch_rows prefetch[MOST_PREFETCH_ROWS];
    const int64_t batch_head = query_tile / job->query_tiles_of_a_head;
    const int64_t first = first_block_of(job, query_tile);
    const int count = (int)mha_smaller(job->query_blocks - first, job->joint_blocks);
    for (int i = 0; i < count; i++) {
        fill_block(job, batch_head, first + i, worker, i, &visible[i], &blocks[i]);
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
static bool is_first_of_head(const attention_job *job, int64_t task) {
    const int64_t of_task = job->query_tiles_of_a_task, query_tiles = job->query_tiles_of_a_head;
    return task < job->threads ||
           (task - job->threads) * of_task / query_tiles != task * of_task / query_tiles;
}

/* Task: one query tile, or all of a head. One head after the other, so that its keys and values
 * stay in the cache; or head by head of a query tile, so that its rows of a bias or mask do. */
static void attend_query_blocks(void *context, int64_t task, mha_worker *worker) {
    const attention_job *job = context;
    const int64_t query_tiles = job->query_tiles_of_a_task, next_task = task + job->threads;
    for (int64_t i = 0; i < query_tiles; i++) {
        const int64_t query_tile = query_tile_in_turn(job, task * query_tiles + i);
        attend_query_tile(job, query_tile,
                          i + 1 < query_tiles ? query_tile + 1 : next_task * query_tiles, next_task,
                          job->heads_take_turns || (i == 0 && is_first_of_head(job, task)), worker);
    }
}

/* Where the keys and values of a head do not fit the second cache, blocks of queries share the
 * reading of them: as many as leave enough tasks for several threads. */
static int joint_blocks_of(const attention_job *job, int num_threads) {
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
 * enough queries read them to repay it (docs/journal.md); at most MOST_COPIED bytes. */
static void plan_scratch(attention_job *job) {
    enum { MOST_COPIED = 2 << 20, FEWEST = 512 };
    const mha_attention *a = job->attention;
    const int64_t head_dim = mha_extent(&a->key, 1), value_head_dim = mha_extent(&a->value, 1);
    const double column = (double)mha_extent(&a->key, 2) * (double)mha_dtype_size(a->dtype);
    const double bytes = column * ((double)head_dim + (double)value_head_dim);
    job->scratch_size =
        job->kernels->attention->scratch_size(head_dim, value_head_dim, job->joint_blocks);
    job->copies_heads =
        (mha_rows_lie_apart(&a->key, a->dtype) || mha_rows_lie_apart(&a->value, a->dtype)) &&
        !job->heads_take_turns && a->options->window_left == MHA_UNLIMITED &&
        bytes <= MOST_COPIED &&
        mha_smaller(mha_extent(&a->query, 2), mha_extent(&a->key, 2)) >= FEWEST;
    if (job->copies_heads) {
        job->keys_size = sizeof(head_copy) + (size_t)(column * (double)head_dim);
        job->values_size = (size_t)(column * (double)value_head_dim);
    }
}

/* Whether the numbers of a bias or mask for all heads of a pair stand side by side, so that each
 * head reads the lines of memory that the others read, and the third cache holds those of a query
 * tile. */
static bool heads_share_lines(const attention_job *job, const mha_tensor *option) {
    enum { THIRD_CACHE = 16 << 20 };
    if (option->data == NULL) {
        return false;
    }
    const int64_t head = llabs(mha_stride(option, 3)), key = llabs(mha_stride(option, 1));
    const double bytes = (double)job->joint_blocks * job->kernels->attention->query_block *
                         (double)mha_extent(&job->attention->key, 2) * (double)key;
    return head != 0 && head < key && head < llabs(mha_stride(option, 2)) && bytes <= THIRD_CACHE;
}

/* A task is a whole head where there are so many for each thread that none waits long for the last.
 */
static void plan_tasks(attention_job *job, int threads, int64_t *num_tasks) {
    enum { HEADS_A_THREAD = 16 };
    const bool whole = threads == 1 || job->batch_heads >= (int64_t)HEADS_A_THREAD * threads;
    job->query_tiles_of_a_task = whole ? job->query_tiles_of_a_head : 1;
    *num_tasks = whole ? job->batch_heads : *num_tasks;
    job->threads = threads;
    const mha_attention_options *options = job->attention->options;
    job->heads_take_turns =
        heads_share_lines(job, &options->bias) || heads_share_lines(job, &options->mask);
    job->prefetches =
        !job->heads_take_turns && mha_comes_from_afar(job->attention, job->batch_heads);
}

static mha_status plan(const mha_attention *attention, int num_threads, attention_job *job,
                       int64_t *num_tasks, int *threads) {
    int64_t batch;
    *job = (attention_job){.attention = attention, .kernels = mha_kernels_for(attention->dtype)};
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
    job->query_tiles_of_a_head = mha_divide_up(job->query_blocks, job->joint_blocks);
    if (__builtin_mul_overflow(job->batch_heads, job->query_tiles_of_a_head, num_tasks)) {
        return MHA_SIZE_OVERFLOW;
    }
    const double operations = mha_attention_operations(attention, job->batch_heads);
    *threads = mha_threads_for(*num_tasks, operations, num_threads);
    plan_tasks(job, *threads, num_tasks);
    plan_scratch(job);
    return MHA_OK;
}

/* No queries, or an output without columns and nothing else asked for, however many rows it has. */
static bool nothing_to_compute(const mha_attention *attention) {
    return mha_has_no_rows(&attention->query) ||
           (mha_extent(&attention->value, 1) == 0 && attention->weights == NULL &&
            attention->lse == NULL && attention->maximum == NULL);
}

/* Each worker's own. */
static mha_status take_memory(attention_job *job, int threads, mha_workspace *workspace) {
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
    return MHA_OK;
}

mha_status mha_scaled_dot_product_attention_forward(const mha_attention *attention,
                                                    mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    attention_job job;
    int64_t num_tasks;
    int threads;
    if (nothing_to_compute(attention)) {
        return MHA_OK;
    }
    if (mha_has_few_queries(attention)) {
        return mha_few_queries_forward(attention, execution);
    }
    MHA_TRY(plan(attention, execution->num_threads, &job, &num_tasks, &threads));
    MHA_TRY(take_memory(&job, threads, &execution->workspace));
    MHA_TRY(mha_take_known_blocks(attention, job.query_blocks, MHA_KEY_BLOCK, threads,
                                  job.joint_blocks, &execution->workspace, &job.known));
    const mha_status status =
        mha_run_tasks(execution, num_tasks, threads, attend_query_blocks, &job);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

MHA_DEFINE_WORKSPACE(scaled_dot_product_attention, mha_attention,
                     mha_scaled_dot_product_attention_forward)

/* A ragged batch: the tasks of all sequences, one sequence after the other. */
typedef struct ragged_job {
    const mha_varlen_attention *varlen;
    attention_job *sequences; /* (sequences,), without attention and pieces */
    int64_t *first_task;      /* (sequences + 1,) */
    attention_job all;        /* the largest sizes, and the pieces of that size */
    size_t few_scratch_size;  /* of the kernel for few queries */
    mha_pieces few_scratch;
    mha_pieces places; /* of each worker: the sequence that it is at */
    int64_t num_tasks;
    double operations;
} ragged_job;

/* Task: some consecutive blocks of one head of one sequence; or of few queries, a key head of it.
 */
static void attend_sequence(void *context, int64_t task, mha_worker *worker) {
    const ragged_job *job = context;
    mha_sequence *sequence = mha_piece(&job->places, worker->number);
    const int64_t number = mha_sequence_of_task(job->first_task, job->varlen->sequences, task);
    const int64_t own_task = task - job->first_task[number];
    mha_move_to_sequence(job->varlen, number, sequence);
    if (mha_has_few_queries(&sequence->attention)) {
        mha_run_few_task(&sequence->attention, own_task, &job->few_scratch, &job->all.scratch,
                         worker);
        return;
    }
    attention_job own = job->sequences[number];
    own.attention = &sequence->attention;
    own.key_heads_before = number * mha_extent(&own.attention->key, 3);
    own.scratch = job->all.scratch;
    own.keys = job->all.keys;
    own.values = job->all.values;
    attend_query_blocks(&own, own_task, worker);
}

static void keep_larger(size_t *largest, size_t size) {
    *largest = size > *largest ? size : *largest;
}

/* Plans a sequence as if it were alone, and adds it to what all take. */
static mha_status plan_sequence(ragged_job *job, const mha_attention *sequence, int num_threads,
                                attention_job *own, int64_t *num_tasks) {
    mha_few_tasks few;
    int threads;
    if (mha_has_few_queries(sequence)) {
        MHA_TRY(mha_plan_few_tasks(sequence, &few));
        *num_tasks = few.count;
        job->operations += few.operations;
        keep_larger(&job->few_scratch_size, few.scratch_size);
        keep_larger(&job->all.scratch_size, few.block_scratch_size);
        *own = (attention_job){.attention = NULL};
        return MHA_OK;
    }
    MHA_TRY(plan(sequence, num_threads, own, num_tasks, &threads));
    job->operations += mha_attention_operations(sequence, own->batch_heads);
    keep_larger(&job->all.scratch_size, own->scratch_size);
    keep_larger(&job->all.keys_size, own->keys_size);
    keep_larger(&job->all.values_size, own->values_size);
    job->all.copies_heads |= own->copies_heads;
    return MHA_OK;
}

/* Nothing is written where the call only measures. */
static mha_status plan_sequences(ragged_job *job, const mha_execution *execution) {
    const bool writes = !execution->workspace.measures;
    mha_sequence sequence;
    attention_job own;
    int64_t tasks;
    mha_begin_sequences(job->varlen, &sequence);
    for (int64_t number = 0; number < job->varlen->sequences; number++) {
        mha_move_to_sequence(job->varlen, number, &sequence);
        MHA_TRY(plan_sequence(job, &sequence.attention, execution->num_threads, &own, &tasks));
        if (writes) {
            job->sequences[number] = own;
            job->first_task[number] = job->num_tasks;
        }
        if (__builtin_add_overflow(job->num_tasks, tasks, &job->num_tasks)) {
            return MHA_SIZE_OVERFLOW;
        }
    }
    if (writes) {
        job->first_task[job->varlen->sequences] = job->num_tasks;
    }
    return MHA_OK;
}

static mha_status run_sequences(ragged_job *job, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    void *sequences, *first_task;
    MHA_TRY(mha_take_for_sequences(job->varlen, sizeof *job->sequences, workspace, &sequences));
    MHA_TRY(mha_take_for_sequences(job->varlen, sizeof *job->first_task, workspace, &first_task));
    job->sequences = sequences;
    job->first_task = first_task;
    MHA_TRY(plan_sequences(job, execution));
    const int threads = mha_threads_for(job->num_tasks, job->operations, execution->num_threads);
    MHA_TRY(take_memory(&job->all, threads, workspace));
    MHA_TRY(mha_workspace_take_pieces(workspace, job->few_scratch_size, (size_t)threads,
                                      &job->few_scratch));
    MHA_TRY(
        mha_workspace_take_pieces(workspace, sizeof(mha_sequence), (size_t)threads, &job->places));
    for (int worker = 0; worker < threads && !workspace->measures; worker++) {
        mha_begin_sequences(job->varlen, mha_piece(&job->places, worker));
    }
    return mha_run_tasks(execution, job->num_tasks, threads, attend_sequence, job);
}

mha_status mha_scaled_dot_product_attention_varlen_forward(const mha_varlen_attention *varlen,
                                                           mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    ragged_job job = {.varlen = varlen};
    if (nothing_to_compute(&varlen->all)) {
        return MHA_OK;
    }
    const mha_status status = run_sequences(&job, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

MHA_DEFINE_WORKSPACE(scaled_dot_product_attention_varlen, mha_varlen_attention,
                     mha_scaled_dot_product_attention_varlen_forward)
