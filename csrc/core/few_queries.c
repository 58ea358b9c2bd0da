/* Step 3 of the figure when queries are few: decoding, classification tokens. What counts is to
 * read key and value once and with all threads, so a task is one chunk of the keys of one key head,
 * for all queries of the heads that share it (Dao et al. 2023, Flash-Decoding); the chunks of a
 * query are then joined in order. How keys are cut depends on their number alone. */
#include "few_queries.h"

#include "../threads/partition.h"
#include "run.h"
#include "attention_rows.h"

enum { FEWEST_KEYS_OF_A_CHUNK = 512 };

typedef struct few_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t query_len, key_len, group; /* group: heads on one key head */
    int64_t rows, row_blocks;          /* of one key head: group * query_len, and blocks of them */
    int64_t chunks, chunk_keys;
    int64_t key_heads; /* of all batch items */
    /* Partial results (key head, row block, chunk) of part_size bytes: output (rows,
     * value_head_dim padded to MHA_FEW_PADDING), origin (rows,), denominator (rows,). */
    mha_pieces parts;
    size_t part_size;
    mha_pieces scratch; /* scratch_size bytes for each worker */
    size_t scratch_size;
    void *block_scratch; /* block_scratch_size bytes, for the kernel of blocks of queries */
    size_t block_scratch_size;
} few_job;

/* Where measured to be the faster kernel: docs/journal.md. */
static bool few_is_faster(int64_t query_len, int64_t key_len, int64_t head_dim) {
    return (query_len == 1 && key_len >= 32) ||
           (query_len <= 4 && key_len >= 32 && head_dim >= 32) ||
           (query_len <= 8 && key_len >= 1024 && head_dim >= 32);
}

bool mha_has_few_queries(const mha_attention *attention) {
    return few_is_faster(mha_extent(&attention->query, 2), mha_extent(&attention->key, 2),
                         mha_extent(&attention->query, 1)) &&
           attention->score_function == MHA_DOT_PRODUCT && !attention->options->uniform_empty_rows;
}

/* Columns of a partial output. */
static int64_t width_of(const mha_attention *attention) {
    return mha_divide_up(mha_extent(&attention->value, 1), MHA_FEW_PADDING) * MHA_FEW_PADDING;
}

static mha_status plan(const mha_attention *attention, few_job *job) {
    const int64_t item = (int64_t)mha_dtype_size(attention->dtype);
    const int64_t columns = mha_extent(&attention->value, 1);
    int64_t batch;
    job->attention = attention;
    job->kernels = mha_kernels_for(attention->dtype);
    job->query_len = mha_extent(&attention->query, 2);
    job->key_len = mha_extent(&attention->key, 2);
    const int64_t kv_heads = mha_extent(&attention->key, 3);
    job->group = kv_heads == 0 ? 0 : mha_extent(&attention->query, 3) / kv_heads;
    job->rows = job->group * job->query_len;
    job->row_blocks = mha_divide_up(job->rows, MHA_MAX_FEW_ROWS);
    job->chunk_keys =
        mha_divide_up(job->key_len, MHA_MAX_FEW_CHUNKS * MHA_KEY_CHAIN) * MHA_KEY_CHAIN;
    if (job->chunk_keys < FEWEST_KEYS_OF_A_CHUNK) {
        job->chunk_keys = FEWEST_KEYS_OF_A_CHUNK;
    }
    job->chunks = mha_divide_up(job->key_len, job->chunk_keys);
    MHA_TRY(mha_check_columns(attention));
    MHA_TRY(mha_count_elements(attention->query.shape, attention->batch_axes, &batch));
    if (__builtin_mul_overflow(batch, kv_heads, &job->key_heads)) {
        return MHA_SIZE_OVERFLOW;
    }
    MHA_TRY(mha_multiply_sizes((size_t)mha_smaller(job->rows, MHA_MAX_FEW_ROWS),
                               ((size_t)width_of(attention) + 2) * (size_t)item, &job->part_size));
    job->block_scratch_size =
        job->kernels->attention->scratch_size(mha_extent(&attention->query, 1), columns, 1);
    job->scratch_size =
        job->kernels->few_queries->scratch_size(mha_extent(&attention->query, 1), columns);
    return MHA_OK;
}

static mha_status count_tasks(const few_job *job, int num_threads, int64_t *num_tasks,
                              int *threads) {
    const int64_t shape[] = {job->key_heads, job->row_blocks, job->chunks};
    MHA_TRY(mha_count_elements(shape, 3, num_tasks));
    const double widths = (double)mha_extent(&job->attention->query, 1) +
                          (double)mha_extent(&job->attention->value, 1) + 16;
    /* Reading a key counts like multiplying it three times. */
    const double operations = (double)job->key_heads * (double)job->key_len *
                              ((double)job->rows + 3 * (double)job->row_blocks) * widths;
    *threads = mha_threads_for(*num_tasks, operations, num_threads);
    return MHA_OK;
}

/* The rows of a task: first_row.. of a key head's rows, and the keys that one of them may see. */
typedef struct few_rows {
    int64_t batch, kv_head, first_row, rows;
    int64_t begin, end; /* begin rounded down to a chain of keys */
} few_rows;

static int64_t head_of(const few_job *job, const few_rows *rows, int64_t row) {
    return rows->kv_head * job->group + (rows->first_row + row) / job->query_len;
}

static int64_t query_of(const few_job *job, const few_rows *rows, int64_t row) {
    return (rows->first_row + row) % job->query_len;
}

static few_rows rows_of(const few_job *job, int64_t row_block) {
    const int64_t kv_heads = mha_extent(&job->attention->key, 3);
    const int64_t key_head = row_block / job->row_blocks;
    few_rows rows = {.batch = key_head / kv_heads,
                     .kv_head = key_head % kv_heads,
                     .first_row = row_block % job->row_blocks * MHA_MAX_FEW_ROWS,
                     .begin = job->key_len};
    rows.rows = mha_smaller(job->rows - rows.first_row, MHA_MAX_FEW_ROWS);
    for (int64_t row = 0; row < rows.rows; row++) {
        int64_t begin, end;
        mha_visible_range(job->attention, rows.batch, query_of(job, &rows, row), &begin, &end);
        if (begin < end) {
            rows.begin = mha_smaller(rows.begin, begin - begin % MHA_KEY_CHAIN);
            rows.end = end > rows.end ? end : rows.end;
        }
    }
    rows.begin = mha_smaller(rows.begin, rows.end);
    return rows;
}

/* The row's `count` numbers of a result (batch..., heads, query_len, count), or NULL. */
static void *result_of(const few_job *job, const few_rows *rows, int64_t row, void *result,
                       int64_t count) {
    const int64_t heads = mha_extent(&job->attention->query, 3);
    const int64_t at =
        (rows->batch * heads + head_of(job, rows, row)) * job->query_len + query_of(job, rows, row);
    const int64_t item = (int64_t)mha_dtype_size(job->attention->dtype);
    return result == NULL ? NULL : (char *)result + at * count * item;
}

static mha_few_queries_row row_of(const few_job *job, const few_rows *rows, int64_t row) {
    const mha_attention *a = job->attention;
    const int64_t head = head_of(job, rows, row), query = query_of(job, rows, row);
    mha_few_queries_row r = {
        .query = mha_at_row(&a->query, a->batch_axes, rows->batch, head, query),
        .query_index = query,
        .weights = result_of(job, rows, row, a->weights, job->key_len),
        .scores = mha_scores_of_head(a, rows->batch, head),
    };
    mha_visible_range(a, rows->batch, query, &r.key_begin, &r.key_end);
    return r;
}

/* Task: the rows of a row block over one chunk of the keys. */
static void attend_chunk(void *context, int64_t task, mha_worker *worker) {
    const few_job *job = context;
    const mha_attention *a = job->attention;
    const int64_t item = (int64_t)mha_dtype_size(a->dtype);
    const few_rows rows = rows_of(job, task / job->chunks);
    const int64_t first_key = task % job->chunks * job->chunk_keys;
    const int64_t end_key = mha_smaller(first_key + job->chunk_keys, rows.end);
    char *part = mha_piece(&job->parts, task);
    mha_few_queries_block block = {
        .checkpoint = &worker->checkpoint,
        .rows = rows.rows,
        .head_dim = mha_extent(&a->query, 1),
        .value_head_dim = mha_extent(&a->value, 1),
        .first_key = first_key > rows.begin ? first_key : rows.begin,
        .end_key = end_key,
        .key = mha_at_row(&a->key, a->batch_axes, rows.batch, rows.kv_head, 0),
        .value = mha_at_row(&a->value, a->batch_axes, rows.batch, rows.kv_head, 0),
        .key_stride = mha_stride(&a->key, 2) / item,
        .value_stride = mha_stride(&a->value, 2) / item,
        .output = part,
    };
    block.origin = part + rows.rows * width_of(a) * item;
    block.denominator = (char *)block.origin + rows.rows * item;
    for (int64_t row = 0; row < rows.rows; row++) {
        block.row[row] = row_of(job, &rows, row);
    }
    job->kernels->few_queries->forward(&block, mha_piece(&job->scratch, worker->number));
}

/* An output that passed the largest number on its way, again by the kernel that knows better. */
static void average_again(const few_job *job, int64_t batch, int64_t head, int64_t query,
                          mha_worker *worker) {
    mha_key_ranges visible;
    mha_attention_block block;
    mha_fill_query_block(job->attention, batch, head, query, 1, &visible, &block);
    block.checkpoint = &worker->checkpoint;
    block.weights = block.lse = block.origin = NULL;
    job->kernels->attention->forward(&block, 1, job->block_scratch);
}

/* Task: the chunks of a row block become its rows of the output. */
static void join_chunks(void *context, int64_t task, mha_worker *worker) {
    const few_job *job = context;
    const mha_attention *a = job->attention;
    const int64_t item = (int64_t)mha_dtype_size(a->dtype);
    const int64_t columns = width_of(a);
    const few_rows rows = rows_of(job, task);
    const char *part = mha_piece(&job->parts, task * job->chunks);
    for (int64_t row = 0; row < rows.rows; row++) {
        const int64_t head = head_of(job, &rows, row), query = query_of(job, &rows, row);
        const char *origin = part + (rows.rows * columns + row) * item;
        const mha_few_queries_join join = {
            .checkpoint = &worker->checkpoint,
            .chunks = job->chunks,
            .chunk_stride = (int64_t)job->parts.apart,
            .value_head_dim = mha_extent(&a->value, 1),
            .outputs = part + row * columns * item,
            .origin = origin,
            .denominator = origin + rows.rows * item,
            .scores = mha_scores_of_head(a, rows.batch, head),
            .output = mha_at_row(&a->output, a->batch_axes, rows.batch, head, query),
            .begin = rows.begin,
            .end = rows.end,
            .key_len = job->key_len,
            .weights = result_of(job, &rows, row, a->weights, job->key_len),
            .lse = result_of(job, &rows, row, a->lse, 1),
            .row_origin = result_of(job, &rows, row, a->origin, 1),
            .row_denominator = result_of(job, &rows, row, a->denominator, 1),
        };
        if (!job->kernels->few_queries->join(&join)) {
            average_again(job, rows.batch, head, query, worker);
        }
    }
}

static mha_status run_tasks(few_job *job, mha_execution *execution) {
    int64_t num_tasks;
    int threads;
    MHA_TRY(plan(job->attention, job));
    MHA_TRY(count_tasks(job, execution->num_threads, &num_tasks, &threads));
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, job->part_size, (size_t)num_tasks,
                                      &job->parts));
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, job->scratch_size, (size_t)threads,
                                      &job->scratch));
    MHA_TRY(
        mha_workspace_take(&execution->workspace, job->block_scratch_size, &job->block_scratch));
    MHA_TRY(mha_run_tasks(execution, num_tasks, threads, attend_chunk, job));
    const int64_t row_blocks = job->key_heads * job->row_blocks;
    /* A few numbers for each row: less work than waking another thread. */
    return mha_run_tasks(execution, row_blocks, 1, join_chunks, job);
}

mha_status mha_few_queries_forward(const mha_attention *attention, mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    few_job job = {.attention = attention};
    const mha_status status = run_tasks(&job, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}
