/* Step 3 of the figure where keys are few and heads many: sets of some elements, small windows, the
 * first tokens of many sequences. A head has few multiply-adds, so its fixed cost counts. A task is
 * a block of queries of as many heads as fill it. */
#include "core/attention/few_keys.h"

#include "core/attention/few_keys_job.h"
#include "core/base/run.h"
#include "threads/partition.h"

/* A query of a key head: which batch item, head and query. */
typedef struct query_place {
    int64_t batch, kv_head, head, query;
} query_place;

static query_place place_of(const mha_few_keys_job *job, int64_t key_head, int64_t number) {
    query_place place = {.batch = key_head / job->kv_heads, .kv_head = key_head % job->kv_heads};
    place.head = place.kv_head * job->group + number / job->query_len;
    place.query = number % job->query_len;
    return place;
}

/* Some rows of a block: those of different heads. */
typedef struct rows_of_heads {
    int64_t first, apart, count;
} rows_of_heads;

/* Where row number `row` of a task comes from. False: it is padding, and *place is some other row.
 */
static bool find_row(const mha_few_keys_job *job, int64_t task, int64_t row, query_place *place) {
    if (job->by_heads) {
        const int64_t key_head = task * job->heads_of_task + row / job->queries;
        *place = place_of(job, mha_smaller(key_head, job->key_heads - 1), row % job->queries);
        return key_head < job->key_heads && row / job->queries < job->heads_of_task;
    }
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
static int64_t key_heads_from(const mha_few_keys_job *job, const query_place *place) {
    return job->key_heads - place->batch * job->kv_heads - place->kv_head;
}

/* The same query of the next key head, maybe of the next batch item's first one. */
static void move_place(const mha_few_keys_job *job, query_place *place) {
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

static void fill_row(const mha_few_keys_job *job, const query_place *p, bool is_there,
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
static void *move_lane(const mha_few_keys_job *job, const void *from, const mha_tensor *tensor,
                       int64_t heads) {
    if (from == NULL) { /* the tensor may have no axes */
        return NULL;
    }
    const int64_t bytes = job->kv_heads > 1 ? heads * mha_stride(tensor, 3) : mha_stride(tensor, 4);
    return (char *)from + bytes;
}

/* From that of the head before: without statistics, everything is a stride away. */
static void fill_from_head_before(const mha_few_keys_job *job, const query_place *p,
                                  const mha_few_keys_row *before, mha_few_keys_block *block,
                                  mha_few_keys_row *row) {
    const mha_attention *a = job->attention;
    *row = *before;
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

/* The next query of the same head. */
static void fill_from_query_before(const mha_few_keys_job *job, const query_place *p,
                                   mha_few_keys_block *block, mha_few_keys_row *row) {
    const mha_attention *a = job->attention;
    *row = row[-1];
    row->query = (const char *)row->query + mha_stride(&a->query, 2);
    row->output = (char *)row->output + mha_stride(&a->output, 2);
    if (row->mask != NULL) {
        row->mask += mha_stride(&a->options->mask, 2);
    }
    if (row->bias != NULL) {
        row->bias = (const char *)row->bias + mha_stride(&a->options->bias, 2);
    }
    find_visible_keys(a, p, block, row);
}

/* Whether a row's pointers are all a stride away from those of the head before. */
static bool fills_each_row(const mha_few_keys_job *job) {
    const mha_attention *a = job->attention;
    return (job->kv_heads == 1 && a->batch_axes > 1) || a->lse != NULL || a->maximum != NULL;
}

/* A task by heads: rows behind the last one are like it, without results. */
static void fill_heads(const mha_few_keys_job *job, int64_t task, mha_few_keys_block *block) {
    const bool fills_each = fills_each_row(job);
    mha_few_keys_row *row = block->row;
    query_place place = place_of(job, task * job->heads_of_task, 0);
    for (int head = 0; head < block->heads; head++, move_place(job, &place)) {
        if (head == 0 || fills_each || (place.kv_head == 0 && job->kv_heads > 1)) {
            fill_row(job, &place, true, block, row);
        } else {
            fill_from_head_before(job, &place, row - job->queries, block, row);
        }
        row++;
        for (int64_t number = 1; number < job->queries; number++, row++) {
            query_place p = place;
            p.head += number / job->query_len;
            p.query = number % job->query_len;
            if (p.query == 0 || fills_each) {
                fill_row(job, &p, true, block, row);
            } else {
                fill_from_query_before(job, &p, block, row);
            }
        }
    }
    for (; row < block->row + block->vectors * job->lanes; row++) {
        *row = row[-1];
        row->output = row->lse = row->maximum = row->denominator = NULL;
    }
}

/* A vector of a task: lanes behind the last key head are like the last one, without results. */
static void fill_vector(const mha_few_keys_job *job, int64_t task, int64_t vector,
                        mha_few_keys_block *block) {
    const bool fills_each = fills_each_row(job);
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
            fill_from_head_before(job, &place, row - 1, block, row);
        }
    }
}

/* The keys of the thread's next task, which are prefetched. */
static void fill_next_keys(const mha_few_keys_job *job, int64_t task, rows_of_heads rows,
                           mha_few_keys_block *block) {
    query_place place;
    if (!find_row(job, task, rows.first, &place)) {
        return;
    }
    const int64_t count = mha_smaller(key_heads_from(job, &place), rows.count);
    for (int64_t i = 0; i < count; i++) {
        block->row[rows.first + i * rows.apart].next_key = key_of(job->attention, &place);
        move_place(job, &place);
    }
}

static int64_t key_stride_of_option(const mha_tensor *option) {
    return option->data == NULL ? 0 : mha_stride(option, 1);
}

/* How many rows a task has, and of how many heads if it is by heads. */
static void count_rows(const mha_few_keys_job *job, int64_t task, mha_few_keys_block *block) {
    if (job->by_heads) {
        block->heads =
            (int)mha_smaller(job->key_heads - task * job->heads_of_task, job->heads_of_task);
        block->shared = (int)job->queries;
        block->vectors = (int)mha_divide_up(block->heads * job->queries, job->lanes);
        return;
    }
    const int64_t all_head_blocks = mha_divide_up(job->key_heads, job->lanes);
    const int64_t left = all_head_blocks - task / job->query_tasks * job->head_blocks;
    block->heads = 0;
    block->shared = (int)job->shared;
    block->vectors = (int)(mha_smaller(left, job->head_blocks) * job->shared);
}

static void fill_rows(const mha_few_keys_job *job, int64_t task, mha_few_keys_block *block) {
    const int64_t next = task + job->threads;
    if (job->by_heads) {
        fill_heads(job, task, block);
        if (job->from_memory) {
            fill_next_keys(job, next, (rows_of_heads){0, job->queries, block->heads}, block);
        }
        return;
    }
    for (int64_t vector = 0; vector < block->vectors; vector++) {
        fill_vector(job, task, vector, block);
        if (job->from_memory) {
            fill_next_keys(job, next, (rows_of_heads){vector * job->lanes, 1, job->lanes}, block);
        }
    }
}

static void fill_block(const mha_few_keys_job *job, int64_t task, mha_worker *worker,
                       mha_few_keys_block *block) {
    const mha_attention *a = job->attention;
    block->checkpoint = &worker->checkpoint;
    count_rows(job, task, block);
    block->key_len = mha_extent(&a->key, 2);
    MHA_FILL_ROWS(a, block);
    block->mask_key_stride = key_stride_of_option(&a->options->mask);
    block->bias_key_stride =
        key_stride_of_option(&a->options->bias) / (int64_t)mha_dtype_size(a->dtype);
    block->sees_all_keys = true;
    block->from_memory = job->from_memory;
    mha_fill_scores(a, 0, 0, &block->scores);
    fill_rows(job, task, block);
}

/* Rows whose result is not finite are computed again. */
static void attend_again(const mha_few_keys_job *job, int64_t task, const mha_few_keys_block *done,
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
    const mha_few_keys_job *job = context;
    mha_few_keys_block block;
    fill_block(job, task, worker, &block);
    job->kernels->attention->few_keys(&block, mha_piece(&job->scratch, worker->number));
    if (!block.is_finite) {
        attend_again(job, task, &block, worker);
    }
}

/* As many tasks as threads, if that is possible: by fewer heads a task, and vectors of half the
 * size. */
static void divide_heads(mha_few_keys_job *job, int threads) {
    if (job->by_heads) {
        const int64_t most = mha_divide_up(job->key_heads, threads);
        job->heads_of_task = mha_smaller(job->heads_of_task, most);
        return;
    }
    const int64_t wanted = mha_divide_up(threads, job->query_tasks);
    if (mha_divide_up(job->key_heads, job->lanes) < wanted) {
        mha_take_few_keys_kernels(job, 1);
    }
    const int64_t most = mha_divide_up(mha_divide_up(job->key_heads, job->lanes), wanted);
    job->head_blocks = mha_smaller(job->head_blocks, most);
}

mha_status mha_few_keys_forward(const mha_attention *a, mha_execution *execution) {
    mha_few_keys_job job;
    int64_t batch_heads, tasks;
    MHA_TRY(mha_check_columns(a));
    MHA_TRY(mha_describe_few_keys(a, &job));
    if (__builtin_mul_overflow(job.key_heads, job.group, &batch_heads)) {
        return MHA_SIZE_OVERFLOW;
    }
    const double operations = mha_attention_operations(a, batch_heads);
    divide_heads(&job, mha_threads_for(INT64_MAX, operations, execution->num_threads));
    const int64_t head_tasks =
        job.by_heads ? mha_divide_up(job.key_heads, job.heads_of_task)
                     : mha_divide_up(mha_divide_up(job.key_heads, job.lanes), job.head_blocks);
    if (__builtin_mul_overflow(head_tasks, job.query_tasks, &tasks)) {
        return MHA_SIZE_OVERFLOW;
    }
    job.threads = mha_threads_for(tasks, operations, execution->num_threads);
    job.from_memory = mha_few_keys_are_from_memory(&job);
    const size_t bytes = job.kernels->attention->few_keys_scratch_size(
        mha_extent(&a->key, 2), mha_extent(&a->query, 1), mha_extent(&a->value, 1));
    MHA_TRY(
        mha_workspace_take_pieces(&execution->workspace, bytes, (size_t)job.threads, &job.scratch));
    return mha_run_tasks(execution, tasks, job.threads, attend_lanes, &job);
}
