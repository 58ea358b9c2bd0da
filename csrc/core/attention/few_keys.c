/* Step 3 of the figure where keys are few and heads many: sets of some elements, small windows, the
 * first tokens of many sequences. A head has few multiply-adds, so its fixed cost counts. A task is
 * a block of queries of as many heads as fill it. */
#include "core/attention/few_keys.h"

#include "core/attention/attention_rows.h"
#include "core/attention/few_queries.h"
#include "core/base/run.h"
#include "threads/partition.h"

/* Of the keys and values of a head, and of keys so few that they fill few vectors. */
enum { MOST_BYTES = 64 << 10, MOST_BYTES_OF_FEW_VECTORS = 512 << 10 };

typedef struct few_keys_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t lanes;
    int64_t heads, kv_heads, query_len, group; /* group: heads on one key head */
    int64_t key_heads;                         /* those of all batch items; a lane is one */
    int64_t queries;                           /* of a key head: those of all heads that share it */
    int64_t shared;      /* vectors of queries that a task takes of the same LANES key heads */
    int64_t head_blocks; /* how many times LANES key heads a task takes */
    int64_t query_tasks; /* tasks that take the queries of the same key heads */
    mha_pieces scratch;  /* of each worker */
    int threads;         /* a worker's next task is most likely so many further */
    bool from_memory;
} few_keys_job;

/* Keys and values of a head, as the arithmetic has them. */
static double bytes_of_head(const mha_attention *a) {
    const double columns = (double)mha_extent(&a->key, 1) + (double)mha_extent(&a->value, 1);
    return (double)mha_extent(&a->key, 2) * columns * (double)mha_dtype_size(a->dtype);
}

/* Keys and values of all heads, as they are stored. */
static double all_bytes(const few_keys_job *job) {
    return mha_bytes_of_key_head(job->attention) * (double)job->key_heads;
}

/* Whether the kernel for few queries would take the call, if not for this one. */
static bool is_beside_few_queries(const mha_attention *a) {
    const int64_t query_len = mha_extent(&a->query, 2);
    const int64_t fewest_keys = query_len == 1 ? 12 : query_len == 2 ? 16 : 32;
    return mha_extent(&a->key, 2) >= fewest_keys && mha_has_few_queries(a);
}

/* Whether the caches hold less than those beside queries and outputs, so that they are prefetched.
 */
static bool are_from_memory(const few_keys_job *job) {
    enum { BYTES_IN_CACHES = 16 << 20 };
    const mha_attention *a = job->attention;
    const double columns = (double)mha_extent(&a->query, 1) + (double)mha_extent(&a->value, 1);
    const double of_queries =
        (double)job->key_heads * (double)job->queries * columns * (double)mha_dtype_size(a->dtype);
    return all_bytes(job) + of_queries > BYTES_IN_CACHES;
}

/* Whether the keys of more heads than a set of the first cache has lines are read from one. */
static bool lanes_share_a_set(const few_keys_job *job) {
    const mha_attention *a = job->attention;
    const int from_last = job->kv_heads > 1 ? 3 : 4; /* the axis of the next lane */
    return job->lanes > MHA_WAYS_OF_CACHE && job->key_heads > 1 &&
           mha_rows_share_a_set(mha_stride(&a->key, from_last));
}

/* How many bytes of keys and values a head may have for this kernel to be the faster one, where
 * measured (docs/journal.md). */
static double most_bytes_of(const few_keys_job *job) {
    const int64_t vectors = job->query_len <= 2 ? 3 : 1;
    const bool fill_few_vectors = mha_extent(&job->attention->key, 2) <= vectors * job->lanes;
    return fill_few_vectors && !are_from_memory(job) ? MOST_BYTES_OF_FEW_VECTORS : MOST_BYTES;
}

/* Beside the kernel for few queries, which copies keys that fill no vector. Empty lanes cost as
 * much as others. */
static double most_bytes_beside_few_queries(const few_keys_job *job) {
    enum { FEWEST_COLUMNS = 64, MANY_BYTES = 20 << 20 };
    const mha_attention *a = job->attention;
    const bool are_halves =
        a->key.storage != MHA_AS_COMPUTED || a->value.storage != MHA_AS_COMPUTED;
    const bool takes_half_the_lanes = job->kernels != mha_kernels_for(a->dtype);
    const bool from_memory = are_from_memory(job), has_gaps = mha_has_gaps(&a->key, a->dtype);
    if (2 * job->key_heads <= job->lanes) {
        return 4 << 10;
    }
    if (mha_some_lie_by_columns(a)) {
        return lanes_share_a_set(job)                ? 8 << 10
               : takes_half_the_lanes || from_memory ? 20 << 10
                                                     : 40 << 10;
    }
    if (are_halves) {
        return job->query_len == 1 ? 12 << 10 : 16 << 10;
    }
    if (lanes_share_a_set(job)) {
        return job->query_len == 1                        ? 16 << 10
               : mha_extent(&a->key, 1) >= FEWEST_COLUMNS ? 32 << 10
                                                          : 8 << 10;
    }
    if (takes_half_the_lanes && !from_memory && mha_extent(&a->key, 2) < 2 * job->lanes) {
        return MOST_BYTES_OF_FEW_VECTORS;
    }
    if (takes_half_the_lanes && (has_gaps || job->key_heads < job->lanes)) {
        return 20 << 10;
    }
    if (from_memory && has_gaps) {
        return all_bytes(job) > MANY_BYTES ? 24 << 10 : 36 << 10;
    }
    if (takes_half_the_lanes && !from_memory && job->key_heads > job->lanes) {
        return 32 << 10;
    }
    return most_bytes_of(job);
}

/* Into how many tasks the queries of a key head may be divided, each of which transposes the keys:
 * where measured (docs/journal.md). */
static int64_t query_tasks_worth(const few_keys_job *job, bool beside_few_queries, double bytes) {
    enum { FEW_BYTES = 5 << 10, FEWEST_COLUMNS = 128, FEW_KEYS = 8 };
    const mha_attention *a = job->attention;
    const bool are_wide =
        mha_extent(&a->key, 1) >= FEWEST_COLUMNS && mha_extent(&a->key, 2) <= FEW_KEYS;
    if (job->key_heads < job->lanes || (beside_few_queries && lanes_share_a_set(job))) {
        return 1;
    }
    if (job->query_len == 1 && bytes <= FEW_BYTES) {
        return job->query_tasks;
    }
    if (job->lanes < 16 && job->queries > 4 && !are_wide) {
        return 1;
    }
    const double most_of_two = beside_few_queries       ? 8 << 10
                               : mha_has_few_queries(a) ? 24 << 10
                                                        : most_bytes_of(job);
    return bytes <= most_of_two ? 2 : 1;
}

static bool few_keys_are_faster(const few_keys_job *job) {
    const mha_attention *a = job->attention;
    const bool beside_few_queries = is_beside_few_queries(a);
    const double bytes = bytes_of_head(a);
    const double most_bytes =
        beside_few_queries ? most_bytes_beside_few_queries(job) : most_bytes_of(job);
    const int64_t of_heads = beside_few_queries ? 1 : job->group;
    return bytes <= most_bytes && 3 * job->key_heads >= job->lanes &&
           (job->query_tasks <= of_heads ||
            job->query_tasks <= query_tasks_worth(job, beside_few_queries, bytes));
}

static void take_kernels(few_keys_job *job, int64_t heads) {
    job->kernels = mha_kernels_for_lanes(job->attention->dtype, heads);
    job->lanes = job->kernels->attention->query_lanes;
}

/* Whether more heads than a set of the first cache holds share it, where that costs more than what
 * vectors of half the size do (docs/journal.md). */
static bool half_the_lanes_miss_less(const few_keys_job *job) {
    enum { MOST_QUERIES_FROM_MEMORY = 2, FEW_BYTES = 8 << 10, MANY_BYTES = 16 << 10 };
    enum { FEW_COLUMNS = 63 };
    const mha_attention *a = job->attention;
    const double bytes = bytes_of_head(a);
    if (!lanes_share_a_set(job)) {
        return false;
    }
    if (mha_some_lie_by_columns(a)) {
        return true;
    }
    if (are_from_memory(job)) {
        return job->query_len <= MOST_QUERIES_FROM_MEMORY && bytes > FEW_BYTES;
    }
    if (job->query_len > 1) {
        return job->key_heads > 2 * job->lanes && !is_beside_few_queries(a);
    }
    return bytes > MANY_BYTES || mha_extent(&a->key, 1) <= FEW_COLUMNS;
}

static mha_status describe(const mha_attention *a, few_keys_job *job) {
    const int64_t vectors = MHA_QUERY_VECTORS;
    int64_t batch;
    job->attention = a;
    job->heads = mha_extent(&a->query, 3);
    job->kv_heads = mha_extent(&a->key, 3);
    job->query_len = mha_extent(&a->query, 2);
    job->group = job->kv_heads == 0 ? 0 : job->heads / job->kv_heads;
    job->queries = job->group * job->query_len;
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes, &batch));
    if (__builtin_mul_overflow(batch, job->kv_heads, &job->key_heads)) {
        return MHA_SIZE_OVERFLOW;
    }
    take_kernels(job, job->key_heads);
    if (half_the_lanes_miss_less(job)) {
        take_kernels(job, 1);
    }
    job->query_tasks = mha_divide_up(job->queries, vectors);
    job->shared = job->queries == 0 ? 1 : mha_divide_up(job->queries, job->query_tasks);
    job->head_blocks = vectors / job->shared;
    return MHA_OK;
}

bool mha_has_few_keys(const mha_attention *a) {
    const int64_t key_len = mha_extent(&a->key, 2);
    few_keys_job job;
    return key_len > 0 && key_len <= MHA_KEY_CHAIN && mha_has_plain_scores(a) &&
           a->weights == NULL && a->options->softcap == 0 && mha_has_plain_rows(a) &&
           mha_extent(&a->query, 1) > 0 && mha_extent(&a->value, 1) > 0 &&
           describe(a, &job) == MHA_OK && job.queries > 0 && few_keys_are_faster(&job);
}

/* A query of a key head: which batch item, head and query. */
typedef struct query_place {
    int64_t batch, kv_head, head, query;
} query_place;

static query_place place_of(const few_keys_job *job, int64_t key_head, int64_t number) {
    query_place place = {.batch = key_head / job->kv_heads, .kv_head = key_head % job->kv_heads};
    place.head = place.kv_head * job->group + number / job->query_len;
    place.query = number % job->query_len;
    return place;
}

/* Where row number `row` of a task comes from. False: it is padding, and *place is some other row.
 */
static bool find_row(const few_keys_job *job, int64_t task, int64_t row, query_place *place) {
    const int64_t vector = row / job->lanes, lane = row % job->lanes;
    const int64_t head_block = task / job->query_tasks * job->head_blocks + vector / job->shared;
    const int64_t key_head = head_block * job->lanes + lane;
    const int64_t number = task % job->query_tasks * job->shared + vector % job->shared;
    *place = place_of(job, mha_smaller(key_head, job->key_heads - 1),
                      mha_smaller(number, job->queries - 1));
    return key_head < job->key_heads && number < job->queries;
}

/* A query's row of a mask or bias, or NULL. */
static const void *row_of_option(const mha_tensor *option, int batch_axes, const query_place *p) {
    return option->data == NULL ? NULL
                                : mha_at_row(option, batch_axes, p->batch, p->head, p->query);
}

/* How many key heads there are from a place on. */
static int64_t key_heads_from(const few_keys_job *job, const query_place *place) {
    return job->key_heads - place->batch * job->kv_heads - place->kv_head;
}

/* The same query of the next key head, maybe of the next batch item's first one. */
static void move_place(const few_keys_job *job, query_place *place) {
    place->kv_head++;
    place->head += job->group;
    if (place->kv_head == job->kv_heads) {
        place->batch++;
        place->kv_head = 0;
        place->head -= job->heads;
    }
}

static const void *key_of(const mha_attention *a, const query_place *p) {
    return mha_at_row(&a->key, a->batch_axes, p->batch, p->kv_head, 0);
}

static void find_visible_keys(const mha_attention *a, const query_place *p,
                              mha_few_keys_block *block, mha_few_keys_row *row) {
    block->sees_all_keys &=
        mha_visible_ranges(a, p->batch, p->query, 1, &row->key_begin, &row->key_end);
}

static void fill_row(const few_keys_job *job, const query_place *p, bool is_there,
                     mha_few_keys_block *block, mha_few_keys_row *row) {
    const mha_attention *a = job->attention;
    row->query = mha_at_row(&a->query, a->batch_axes, p->batch, p->head, p->query);
    row->key = key_of(a, p);
    row->value = mha_at_row(&a->value, a->batch_axes, p->batch, p->kv_head, 0);
    row->mask = row_of_option(&a->options->mask, a->batch_axes, p);
    row->bias = row_of_option(&a->options->bias, a->batch_axes, p);
    row->next_key = row->output = row->lse = row->maximum = row->denominator = NULL;
    row->is_finite = true;
    if (is_there) {
        const int64_t at = mha_result_row(a, p->batch, p->head, p->query);
        row->output = mha_at_row(&a->output, a->batch_axes, p->batch, p->head, p->query);
        row->lse = mha_result_at(a, a->lse, at, 1);
        row->maximum = mha_result_at(a, a->maximum, at, 1);
        row->denominator = mha_result_at(a, a->denominator, at, 1);
    }
    find_visible_keys(a, p, block, row);
}

/* A pointer moved to the next key head, or NULL: by so many heads, or to the next batch item where
 * each has one. */
static void *move_lane(const few_keys_job *job, const void *from, const mha_tensor *tensor,
                       int64_t heads) {
    if (from == NULL) { /* the tensor may have no axes */
        return NULL;
    }
    const int64_t bytes = job->kv_heads > 1 ? heads * mha_stride(tensor, 3) : mha_stride(tensor, 4);
    return (char *)from + bytes;
}

/* From the lane before: without statistics, everything is a stride away. */
static void fill_from_row_before(const few_keys_job *job, const query_place *p,
                                 mha_few_keys_block *block, mha_few_keys_row *row) {
    const mha_attention *a = job->attention;
    *row = row[-1];
    row->query = move_lane(job, row->query, &a->query, job->group);
    row->key = move_lane(job, row->key, &a->key, 1);
    row->value = move_lane(job, row->value, &a->value, 1);
    row->mask = move_lane(job, row->mask, &a->options->mask, job->group);
    row->bias = move_lane(job, row->bias, &a->options->bias, job->group);
    row->output = move_lane(job, row->output, &a->output, job->group);
    if (job->kv_heads == 1) {
        find_visible_keys(a, p, block, row);
    }
}

/* A vector of a task: lanes behind the last key head are like the last one, without results. */
static void fill_vector(const few_keys_job *job, int64_t task, int64_t vector,
                        mha_few_keys_block *block) {
    const mha_attention *a = job->attention;
    const bool is_far = job->kv_heads == 1 && a->batch_axes > 1;
    const bool fills_each = is_far || a->lse != NULL || a->maximum != NULL;
    mha_few_keys_row *row = &block->row[vector * job->lanes];
    query_place place;
    const bool is_there = find_row(job, task, vector * job->lanes, &place);
    const int64_t left = key_heads_from(job, &place);
    fill_row(job, &place, is_there, block, row);
    for (int64_t lane = 1; lane < job->lanes; lane++) {
        row++;
        if (lane >= left) {
            *row = row[-1];
            row->output = row->lse = row->maximum = row->denominator = NULL;
            continue;
        }
        move_place(job, &place);
        if (fills_each || (place.kv_head == 0 && job->kv_heads > 1)) {
            fill_row(job, &place, is_there, block, row);
        } else {
            fill_from_row_before(job, &place, block, row);
        }
    }
}

/* The keys of the thread's next task, which are prefetched. */
static void fill_next_keys(const few_keys_job *job, int64_t task, int64_t vector,
                           mha_few_keys_block *block) {
    mha_few_keys_row *row = &block->row[vector * job->lanes];
    query_place place;
    if (!find_row(job, task, vector * job->lanes, &place)) {
        return;
    }
    const int64_t left = key_heads_from(job, &place);
    for (int64_t lane = 0; lane < mha_smaller(left, job->lanes); lane++) {
        row[lane].next_key = key_of(job->attention, &place);
        move_place(job, &place);
    }
}

static int64_t key_stride_of_option(const mha_tensor *option) {
    return option->data == NULL ? 0 : mha_stride(option, 1);
}

static void fill_block(const few_keys_job *job, int64_t task, mha_worker *worker,
                       mha_few_keys_block *block) {
    const mha_attention *a = job->attention;
    const int64_t all_head_blocks = mha_divide_up(job->key_heads, job->lanes);
    const int64_t head_blocks_left = all_head_blocks - task / job->query_tasks * job->head_blocks;
    block->checkpoint = &worker->checkpoint;
    block->vectors = (int)(mha_smaller(head_blocks_left, job->head_blocks) * job->shared);
    block->shared = (int)job->shared;
    block->key_len = mha_extent(&a->key, 2);
    MHA_FILL_ROWS(a, block);
    block->mask_key_stride = key_stride_of_option(&a->options->mask);
    block->bias_key_stride =
        key_stride_of_option(&a->options->bias) / (int64_t)mha_dtype_size(a->dtype);
    block->sees_all_keys = true;
    block->from_memory = job->from_memory;
    mha_fill_scores(a, 0, 0, &block->scores);
    for (int64_t vector = 0; vector < block->vectors; vector++) {
        fill_vector(job, task, vector, block);
        if (job->from_memory) {
            fill_next_keys(job, task + job->threads, vector, block);
        }
    }
}

/* Rows whose result is not finite are computed again. */
static void attend_again(const few_keys_job *job, int64_t task, const mha_few_keys_block *done,
                         mha_worker *worker) {
    for (int64_t i = 0; i < done->vectors * job->lanes; i++) {
        query_place place;
        if (find_row(job, task, i, &place) && !done->row[i].is_finite) {
            mha_attend_query(job->kernels, job->attention, place.batch, place.head, place.query,
                             &worker->checkpoint, mha_piece(&job->scratch, worker->number));
        }
    }
}

/* Task: some queries of some key heads, a lane each. */
static void attend_lanes(void *context, int64_t task, mha_worker *worker) {
    const few_keys_job *job = context;
    mha_few_keys_block block;
    fill_block(job, task, worker, &block);
    job->kernels->attention->few_keys(&block, mha_piece(&job->scratch, worker->number));
    if (!block.is_finite) {
        attend_again(job, task, &block, worker);
    }
}

/* As many tasks as threads, if that is possible: by fewer heads a task, and vectors of half the
 * size. */
static void divide_heads(few_keys_job *job, int threads) {
    const int64_t wanted = mha_divide_up(threads, job->query_tasks);
    if (mha_divide_up(job->key_heads, job->lanes) < wanted) {
        take_kernels(job, 1);
    }
    const int64_t most = mha_divide_up(mha_divide_up(job->key_heads, job->lanes), wanted);
    job->head_blocks = mha_smaller(job->head_blocks, most);
}

mha_status mha_few_keys_forward(const mha_attention *a, mha_execution *execution) {
    few_keys_job job;
    int64_t batch_heads, tasks;
    MHA_TRY(mha_check_columns(a));
    MHA_TRY(describe(a, &job));
    if (__builtin_mul_overflow(job.key_heads, job.group, &batch_heads)) {
        return MHA_SIZE_OVERFLOW;
    }
    const double operations = mha_attention_operations(a, batch_heads);
    divide_heads(&job, mha_threads_for(INT64_MAX, operations, execution->num_threads));
    const int64_t head_tasks =
        mha_divide_up(mha_divide_up(job.key_heads, job.lanes), job.head_blocks);
    if (__builtin_mul_overflow(head_tasks, job.query_tasks, &tasks)) {
        return MHA_SIZE_OVERFLOW;
    }
    job.threads = mha_threads_for(tasks, operations, execution->num_threads);
    job.from_memory = are_from_memory(&job);
    const size_t bytes = job.kernels->attention->few_keys_scratch_size(
        mha_extent(&a->key, 2), mha_extent(&a->query, 1), mha_extent(&a->value, 1));
    MHA_TRY(
        mha_workspace_take_pieces(&execution->workspace, bytes, (size_t)job.threads, &job.scratch));
    return mha_run_tasks(execution, tasks, job.threads, attend_lanes, &job);
}
