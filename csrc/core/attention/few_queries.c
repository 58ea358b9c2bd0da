/* Step 3 of the figure when queries are few: decoding, classification tokens. What counts is to
 * read key and value once, so a task is a key head with all queries of the heads that share it.
 * Where that makes too few tasks for all threads, the keys are cut too (Dao et al. 2023,
 * Flash-Decoding): in rounds, each of three steps: scores; weights and weighted sums; joining
 * these. The bits do not depend on it: every block of keys has its sums, and they join in order. */
#include "core/attention/few_queries.h"

#include "core/attention/attention_rows.h"
#include "core/attention/known_blocks.h"
#include "core/base/run.h"
#include "threads/partition.h"

typedef void few_pass(const mha_few_queries_block *block, int64_t first, int64_t end,
                      void *scratch);

typedef struct few_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t query_len, key_len, group; /* group: heads on one key head */
    int64_t rows, row_blocks;          /* of one key head: group * query_len, and blocks of them */
    int64_t row_tasks;                 /* row blocks of all key heads of all batch items */
    bool from_memory;                  /* keys and values are more than caches hold */
    bool prefetches_tasks;             /* those of the next task, when one begins */
    int threads;
    int64_t cuts;                 /* of the keys of a row block: 1 where one task takes all */
    int64_t rounds, round_blocks; /* blocks of keys that such tasks take at a time */
    int64_t round;                /* at hand, and which of its steps over cuts */
    few_pass *pass;
    bool heads_mask_alike;             /* those on one key head */
    mha_known_visibility known;        /* of the blocks of keys, by all queries of a head */
    mha_pieces blocks, state;          /* what tasks and rounds leave, for each row block */
    mha_pieces scratch, block_scratch; /* for each worker, the second for the block kernel */
    size_t blocks_size, state_size, scratch_size, block_scratch_size;
} few_job;

/* Where measured to be the faster kernel: docs/journal.md. */
static bool few_is_faster(const mha_attention *attention) {
    const int64_t query_len = mha_extent(&attention->query, 2);
    const int64_t key_len = mha_extent(&attention->key, 2);
    const int64_t head_dim = mha_extent(&attention->query, 1);
    const bool are_rows_of_numbers = attention->key.storage == MHA_AS_COMPUTED &&
                                     attention->value.storage == MHA_AS_COMPUTED &&
                                     !mha_some_lie_by_columns(attention);
    static const struct {
        int most_queries, least_keys, least_head_dim, least_lanes;
        bool not_of_rows; /* of columns, or halves, alone */
    } calls[] = {{1, 1, 0, 0, false},     {2, 8, 128, 0, false},   {2, 8, 64, 16, false},
                 {2, 16, 0, 0, false},    {3, 16, 32, 8, false},   {3, 32, 0, 8, false},
                 {4, 16, 256, 0, false},  {4, 16, 128, 8, false},  {4, 32, 32, 0, false},
                 {4, 64, 0, 8, false},    {4, 128, 8, 0, false},   {5, 80, 64, 16, false},
                 {6, 80, 128, 16, false}, {6, 256, 0, 16, false},  {8, 112, 256, 16, false},
                 {8, 256, 64, 8, false},  {8, 1024, 32, 0, false}, {8, 64, 64, 16, true},
                 {8, 128, 32, 16, true},  {8, 256, 0, 16, true}};
    const int64_t lanes = mha_kernels_for(attention->dtype)->attention->query_lanes;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        if (query_len <= calls[i].most_queries && key_len >= calls[i].least_keys &&
            head_dim >= calls[i].least_head_dim && lanes >= calls[i].least_lanes &&
            (!are_rows_of_numbers || !calls[i].not_of_rows)) {
            return true;
        }
    }
    return false;
}

bool mha_has_few_queries(const mha_attention *attention) {
    return mha_extent(&attention->query, 2) > 0 && few_is_faster(attention) &&
           attention->score_function == MHA_DOT_PRODUCT && !attention->options->uniform_empty_rows;
}

/* Multiply-adds of a job: reading a key counts like multiplying it three times. */
static double operations_of(const few_job *job) {
    const double widths = (double)mha_extent(&job->attention->query, 1) +
                          (double)mha_extent(&job->attention->value, 1) + 16;
    return (double)job->row_tasks * (double)job->key_len *
           ((double)job->rows / (double)job->row_blocks + 3) * widths;
}

/* Of all keys and values of a job. */
static double bytes_of(const few_job *job) {
    return (double)job->row_tasks / (double)job->row_blocks * mha_bytes_of_key_head(job->attention);
}

/* In how many tasks the keys of a row block are taken: enough for all threads, none of them with
 * fewer than FEWEST_BLOCKS blocks. */
static int64_t cuts_of(const few_job *job, int threads) {
    enum { FEWEST_BLOCKS = 4, TASKS_A_THREAD = 4 };
    const int64_t blocks = mha_divide_up(job->key_len, MHA_KEY_BLOCK);
    if (threads == 1 || job->row_tasks >= TASKS_A_THREAD * threads ||
        job->row_tasks % threads == 0) {
        return 1;
    }
    const int64_t wanted = mha_divide_up(TASKS_A_THREAD * threads, job->row_tasks);
    return mha_larger(mha_smaller(wanted, blocks / FEWEST_BLOCKS), 1);
}

/* Rounds of so many blocks of keys that what is left of them stays in a cache. */
static void plan_rounds(few_job *job) {
    enum { MOST_BYTES = 4 << 20 };
    const mha_few_queries_kernels *kernels = job->kernels->few_queries;
    const int64_t rows = mha_smaller(job->rows, MHA_MAX_FEW_ROWS);
    const int64_t value_head_dim = mha_extent(&job->attention->value, 1);
    const int64_t blocks = mha_divide_up(job->key_len, MHA_KEY_BLOCK);
    const int64_t wanted = MOST_BYTES / (int64_t)kernels->blocks_size(rows, 1, value_head_dim);
    job->round_blocks = mha_smaller(mha_larger(wanted, job->cuts), blocks);
    job->rounds = mha_divide_up(blocks, job->round_blocks);
    job->blocks_size = kernels->blocks_size(rows, job->round_blocks, value_head_dim);
    job->state_size = kernels->state_size(rows, value_head_dim);
}

/* Whether heads on one key head have the same mask and bias. */
static bool heads_mask_alike(const few_job *job) {
    const mha_attention_options *options = job->attention->options;
    const mha_tensor *const tensors[] = {&options->mask, &options->bias};
    bool alike = options->block_mask.starts == NULL || options->block_mask.heads == 1;
    for (int i = 0; i < 2; i++) {
        alike = alike && (tensors[i]->data == NULL || mha_is_shared(tensors[i], 3));
    }
    return alike || job->group == 1;
}

/* The rows of a problem, and the scratch of their kernels. */
static void describe(const mha_attention *attention, few_job *job) {
    const int64_t head_dim = mha_extent(&attention->query, 1);
    const int64_t value_head_dim = mha_extent(&attention->value, 1);
    const int64_t kv_heads = mha_extent(&attention->key, 3);
    job->attention = attention;
    job->kernels = mha_kernels_for(attention->dtype);
    job->query_len = mha_extent(&attention->query, 2);
    job->key_len = mha_extent(&attention->key, 2);
    job->group = kv_heads == 0 ? 0 : mha_extent(&attention->query, 3) / kv_heads;
    job->rows = job->group * job->query_len;
    job->row_blocks = mha_divide_up(job->rows, MHA_MAX_FEW_ROWS);
    job->heads_mask_alike = heads_mask_alike(job);
    job->scratch_size = job->kernels->few_queries->scratch_size(head_dim, value_head_dim);
    job->block_scratch_size = job->kernels->attention->scratch_size(head_dim, value_head_dim, 1);
}

static mha_status count_row_tasks(few_job *job) {
    const mha_attention *attention = job->attention;
    int64_t batch;
    MHA_TRY(mha_count_elements(attention->query.shape, attention->batch_axes, &batch));
    const int64_t shape[] = {batch, mha_extent(&attention->key, 3), job->row_blocks};
    return mha_count_elements(shape, 3, &job->row_tasks);
}

/* Whether the keys and values of the next task are prefetched into the second cache: a burst of
 * many lines is faster than what the kernel prefetches within a head. Of heads side by side, as
 * long as the cache holds them. Of heads one behind the other, the kernel's own prefetching goes on
 * into the next head, unless this one is short. */
static bool prefetches_tasks(const few_job *job) {
    enum { MOST_OF_HEADS_SIDE_BY_SIDE = 1 << 20, MOST_OF_HEADS_IN_A_ROW = 24 << 10 };
    const mha_attention *a = job->attention;
    const bool side_by_side = mha_has_gaps(&a->key, a->dtype) && mha_has_gaps(&a->value, a->dtype);
    const double bytes = bytes_of(job) / (double)mha_larger(job->row_tasks / job->row_blocks, 1);
    return bytes_of(job) > MHA_BYTES_IN_CACHES && job->row_blocks == 1 && a->pages.table == NULL &&
           !mha_some_lie_by_columns(a) &&
           bytes <= (side_by_side ? MOST_OF_HEADS_SIDE_BY_SIDE : MOST_OF_HEADS_IN_A_ROW);
}

/* Rows of up to three lines with other heads' between them are prefetched from half as many bytes
 * on: where measured (docs/journal.md). */
static double most_bytes_in_caches(const mha_attention *a) {
    enum { FEW_BYTES = 192 };
    const bool lie_apart = mha_has_gaps(&a->key, a->dtype) && !mha_some_lie_by_columns(a);
    return lie_apart && mha_row_bytes(&a->key, a->dtype) <= FEW_BYTES ? MHA_BYTES_IN_CACHES / 2
                                                                      : MHA_BYTES_IN_CACHES;
}

static mha_status plan(const mha_attention *attention, int num_threads, few_job *job) {
    MHA_TRY(mha_check_columns(attention));
    describe(attention, job);
    MHA_TRY(count_row_tasks(job));
    job->from_memory = bytes_of(job) > most_bytes_in_caches(attention);
    const int all_threads = mha_threads_for(INT64_MAX, operations_of(job), num_threads);
    job->cuts = cuts_of(job, all_threads);
    job->threads = (int)mha_smaller(all_threads, mha_larger(job->row_tasks, 1) * job->cuts);
    job->prefetches_tasks = prefetches_tasks(job);
    if (job->cuts > 1) {
        plan_rounds(job);
    }
    return MHA_OK;
}

static void fill_row(const few_job *job, int64_t batch, int64_t head, int64_t query,
                     mha_few_queries_row *row) {
    const mha_attention *a = job->attention;
    const int64_t at = mha_result_row(a, batch, head, query);
    *row = (mha_few_queries_row){
        .query = mha_at_row(&a->query, a->batch_axes, batch, head, query),
        .query_index = query,
        .output = mha_at_row(&a->output, a->batch_axes, batch, head, query),
        .weights = mha_result_at(a, a->weights, at, job->key_len),
        .lse = mha_result_at(a, a->lse, at, 1),
        .maximum = mha_result_at(a, a->maximum, at, 1),
        .denominator = mha_result_at(a, a->denominator, at, 1),
    };
    mha_visible_ranges(a, batch, query, 1, &row->key_begin, &row->key_end);
}

/* Where row number `row` of a row block comes from. */
typedef struct row_place {
    int64_t batch, kv_head, head, query;
} row_place;

static row_place place_of(const few_job *job, int64_t row_task, int64_t row) {
    const int64_t kv_heads = mha_extent(&job->attention->key, 3);
    const int64_t key_head = row_task / job->row_blocks;
    const int64_t of_head = row_task % job->row_blocks * MHA_MAX_FEW_ROWS + row;
    row_place place = {.batch = key_head / kv_heads, .kv_head = key_head % kv_heads};
    place.head = place.kv_head * job->group + of_head / job->query_len;
    place.query = of_head % job->query_len;
    return place;
}

/* What a mask or bias hides from the queries of a head, where those of the row block agree on it.
 */
static void fill_queries(const few_job *job, const row_place *place, mha_few_queries_block *block) {
    block->heads_mask_alike = job->heads_mask_alike;
    if (!job->heads_mask_alike || !mha_may_hide_blocks(&block->row[0].scores)) {
        return;
    }
    block->queries = (mha_attention_block){
        .query_len = job->query_len,
        .key_len = job->key_len,
        .scores = block->row[0].scores,
        .known = mha_known_blocks_of(&job->known, job->attention, place->batch, place->head, 0, 0,
                                     MHA_NO_SLOTS),
    };
}

/* A row block, and the keys that one of its rows may see: whole blocks from first_key on. */
static void fill_block(const few_job *job, int64_t row_task, mha_worker *worker,
                       mha_few_queries_block *block) {
    const mha_attention *a = job->attention;
    const row_place first = place_of(job, row_task, 0);
    block->checkpoint = &worker->checkpoint;
    block->rows =
        mha_smaller(job->rows - row_task % job->row_blocks * MHA_MAX_FEW_ROWS, MHA_MAX_FEW_ROWS);
    block->key_len = job->key_len;
    block->from_memory = job->from_memory;
    block->first_key = job->key_len;
    block->end_key = 0;
    block->key = mha_at_row(&a->key, a->batch_axes, first.batch, first.kv_head, 0);
    block->value = mha_at_row(&a->value, a->batch_axes, first.batch, first.kv_head, 0);
    MHA_FILL_ROWS(a, block);
    block->pages = a->pages;
    for (int64_t row = 0; row < block->rows; row++) {
        const row_place place = place_of(job, row_task, row);
        mha_few_queries_row *r = &block->row[row];
        fill_row(job, place.batch, place.head, place.query, r);
        if (row > 0 && place.head == first.head) {
            r->scores = block->row[0].scores;
        } else {
            mha_fill_scores(a, place.batch, place.head, &r->scores);
        }
        if (r->key_begin < r->key_end) {
            const int64_t begin = r->key_begin - r->key_begin % MHA_KEY_BLOCK;
            block->first_key = mha_smaller(block->first_key, begin);
            block->end_key = mha_larger(block->end_key, r->key_end);
        }
    }
    if (block->end_key == 0) {
        block->first_key = 0;
    }
    fill_queries(job, &first, block);
}

/* The same for the round at hand. */
static void fill_round(const few_job *job, int64_t row_task, mha_worker *worker,
                       mha_few_queries_block *block) {
    fill_block(job, row_task, worker, block);
    const int64_t first = block->first_key / MHA_KEY_BLOCK;
    const int64_t end = mha_divide_up(block->end_key, MHA_KEY_BLOCK);
    block->first_block = mha_smaller(first + job->round * job->round_blocks, end);
    block->end_block = mha_smaller(block->first_block + job->round_blocks, end);
    block->blocks = mha_piece(&job->blocks, row_task);
    block->state = mha_piece(&job->state, row_task);
}

/* Outputs that passed the largest number on their way, again by the kernel that knows better. */
static void average_again(const few_job *job, int64_t row_task, const mha_few_queries_block *done,
                          mha_worker *worker) {
    for (int64_t row = 0; row < done->rows; row++) {
        const row_place place = place_of(job, row_task, row);
        if (!done->row[row].is_finite) {
            mha_attention output_alone = *job->attention;
            output_alone.weights = output_alone.lse = output_alone.maximum = NULL;
            mha_attend_query(job->kernels, &output_alone, place.batch, place.head, place.query,
                             &worker->checkpoint, mha_piece(&job->block_scratch, worker->number));
        }
    }
}

static void prefetch_rows(const mha_attention *a, const mha_tensor *tensor, const row_place *place,
                          int64_t first, int64_t end) {
    enum { LINE = 64 };
    const mha_prefetch_rows rows =
        mha_rows_to_come(a, tensor, place->batch, place->kv_head, first, end);
    for (int64_t row = 0; row < rows.count; row++) {
        const char *numbers = (const char *)rows.first + row * rows.stride;
        for (int64_t at = 0; at < rows.width; at += LINE) {
            __builtin_prefetch(numbers + at, 0, 2);
        }
    }
}

/* What the first and the last of a task's queries may see. Workers take tasks in order, so this is
 * most likely the worker's next one. */
static void prefetch_task(const few_job *job, int64_t task) {
    int64_t first, end, unused;
    if (!job->prefetches_tasks || task >= job->row_tasks) {
        return;
    }
    const row_place place = place_of(job, task, 0);
    mha_visible_ranges(job->attention, place.batch, 0, 1, &first, &unused);
    mha_visible_ranges(job->attention, place.batch, job->query_len - 1, 1, &unused, &end);
    if (first < end) { /* else `first` may be anywhere */
        prefetch_rows(job->attention, &job->attention->key, &place, first, end);
        prefetch_rows(job->attention, &job->attention->value, &place, first, end);
    }
}

/* Task: a row block over all keys. */
static void attend(void *context, int64_t task, mha_worker *worker) {
    const few_job *job = context;
    mha_few_queries_block block;
    fill_block(job, task, worker, &block);
    prefetch_task(job, task + job->threads);
    job->kernels->few_queries->forward(&block, mha_piece(&job->scratch, worker->number));
    average_again(job, task, &block, worker);
}

/* Task of scoring and of weighing: a cut of the keys of a round. */
static void take_cut(void *context, int64_t task, mha_worker *worker) {
    const few_job *job = context;
    const int64_t cut = task % job->cuts;
    mha_few_queries_block block;
    fill_round(job, task / job->cuts, worker, &block);
    const int64_t blocks = block.end_block - block.first_block;
    const int64_t first = blocks * cut / job->cuts, end = blocks * (cut + 1) / job->cuts;
    if (first < end) {
        job->pass(&block, block.first_block + first, block.first_block + end,
                  mha_piece(&job->scratch, worker->number));
    }
}

/* Task of joining: what a row block's sums add up to. */
static void join_cuts(void *context, int64_t task, mha_worker *worker) {
    const few_job *job = context;
    mha_few_queries_block block;
    const bool is_last = job->round == job->rounds - 1;
    fill_round(job, task, worker, &block);
    job->kernels->few_queries->join(&block, is_last, mha_piece(&job->scratch, worker->number));
    if (is_last) {
        average_again(job, task, &block, worker);
    }
}

mha_status mha_few_queries_forward(const mha_attention *attention, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    few_job job = {.attention = attention};
    int64_t tasks;
    MHA_TRY(plan(attention, execution->num_threads, &job));
    const int threads = job.threads;
    job.known =
        (mha_known_visibility){.query_blocks = 1, .keys = MHA_KEY_BLOCK, .slots = MHA_NO_SLOTS};
    MHA_TRY(mha_take_known_blocks(attention, 1, workspace, &job.known));
    MHA_TRY(mha_workspace_take_pieces(workspace, job.scratch_size, (size_t)threads, &job.scratch));
    MHA_TRY(mha_workspace_take_pieces(workspace, job.block_scratch_size, (size_t)threads,
                                      &job.block_scratch));
    if (job.cuts == 1) {
        return mha_run_tasks(execution, job.row_tasks, threads, attend, &job);
    }
    if (__builtin_mul_overflow(job.row_tasks, job.cuts, &tasks)) {
        return MHA_SIZE_OVERFLOW;
    }
    MHA_TRY(
        mha_workspace_take_pieces(workspace, job.blocks_size, (size_t)job.row_tasks, &job.blocks));
    MHA_TRY(
        mha_workspace_take_pieces(workspace, job.state_size, (size_t)job.row_tasks, &job.state));
    for (job.round = 0; job.round < job.rounds; job.round++) {
        /* Scores. */
        job.pass = job.kernels->few_queries->score;
        MHA_TRY(mha_run_tasks(execution, tasks, threads, take_cut, &job));
        /* Weights, and the weighted sums of blocks of values. */
        job.pass = job.kernels->few_queries->weigh;
        MHA_TRY(mha_run_tasks(execution, tasks, threads, take_cut, &job));
        /* What these add up to. */
        MHA_TRY(mha_run_tasks(execution, job.row_tasks, threads, join_cuts, &job));
    }
    return MHA_OK;
}

mha_status mha_plan_few_tasks(const mha_attention *attention, mha_few_tasks *tasks) {
    few_job job = {.attention = attention};
    MHA_TRY(mha_check_columns(attention));
    describe(attention, &job);
    MHA_TRY(count_row_tasks(&job));
    *tasks = (mha_few_tasks){job.row_tasks, operations_of(&job), job.scratch_size,
                             job.block_scratch_size};
    return MHA_OK;
}

void mha_run_few_task(const mha_attention *attention, int64_t task, const mha_pieces *scratch,
                      const mha_pieces *block_scratch, mha_worker *worker) {
    few_job job = {.scratch = *scratch, .block_scratch = *block_scratch};
    describe(attention, &job);
    attend(&job, task, worker);
}
