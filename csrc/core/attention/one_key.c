/* Step 3 of the figure where there is one key: all of a query's weight is on it, so that the output
 * is its value, whatever the score, as long as that is finite. */
#include "core/attention/one_key.h"

#include <string.h>

#include "core/attention/attention_rows.h"
#include "core/base/run.h"
#include "threads/partition.h"

typedef struct one_key_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t heads, query_len, group; /* group: heads on one key head */
    bool in_order;                   /* arrays have no gaps */
    mha_row_tasks tasks;             /* a row is a query */
    mha_pieces scratch;              /* of each worker, for the block kernel */
} one_key_job;

static bool has_numbers_in_rows(const mha_tensor *tensor, mha_dtype dtype) {
    return tensor->storage == MHA_AS_COMPUTED && !mha_lies_by_columns(tensor, dtype);
}

/* Whether all numbers lie one behind the other. */
static bool is_in_order(const mha_tensor *tensor, mha_dtype dtype) {
    mha_tensor contiguous = *tensor;
    bool in_order = true;
    mha_set_contiguous_strides(&contiguous, dtype);
    for (int axis = 0; axis < tensor->axes; axis++) {
        in_order &= tensor->shape[axis] == 1 || tensor->strides[axis] == contiguous.strides[axis];
    }
    return in_order;
}

static bool are_in_order(const mha_attention *a) {
    return is_in_order(&a->query, a->dtype) && is_in_order(&a->key, a->dtype) &&
           is_in_order(&a->value, a->dtype) && is_in_order(&a->output, a->dtype);
}

bool mha_has_one_key(const mha_attention *a) {
    /* The fewest where arrays have gaps, as measured: docs/journal.md. Of more than the most, a row
     * would keep Ctrl-C waiting. */
    enum { FEWEST_COLUMNS = 32, MOST_COLUMNS = 1 << 16 };
    const int64_t head_dim = mha_extent(&a->query, 1), value_head_dim = mha_extent(&a->value, 1);
    int64_t begin, end;
    return mha_extent(&a->key, 2) == 1 && mha_extent(&a->query, 2) > 0 &&
           mha_smaller(head_dim, value_head_dim) > 0 &&
           mha_larger(head_dim, value_head_dim) <= MOST_COLUMNS && mha_has_plain_scores(a) &&
           a->options->mask.data == NULL && a->options->bias.data == NULL &&
           a->options->softcap == 0 && a->weights == NULL && a->lse == NULL && a->maximum == NULL &&
           a->pages.table == NULL && has_numbers_in_rows(&a->query, a->dtype) &&
           has_numbers_in_rows(&a->key, a->dtype) && has_numbers_in_rows(&a->value, a->dtype) &&
           a->output.storage == MHA_AS_COMPUTED && mha_visible_ranges(a, 0, 0, 1, &begin, &end) &&
           (mha_smaller(head_dim, value_head_dim) >= FEWEST_COLUMNS || are_in_order(a));
}

/* Whether no sum of the dot product of two rows, nor that times scale, comes near the largest
 * number: by their sums of squares (Cauchy and Schwarz). False beside NaN. Squares below the
 * smallest number count as 0: no scale that a call may have makes more of them. */
static bool is_score_finite(double of_query, double of_key, double scale) {
    const double most = 1e30, product = of_query * of_key;
    return of_query < most && of_key < most && product * scale * scale < most * most;
}

/* The queries first..end of a head. */
static void attend_head(const one_key_job *job, int64_t batch, int64_t head, int64_t first,
                        int64_t end, mha_worker *worker) {
    const mha_attention *a = job->attention;
    const mha_elementwise_kernels *kernels = job->kernels->elementwise;
    const int64_t head_dim = mha_extent(&a->query, 1), value_head_dim = mha_extent(&a->value, 1);
    const int64_t query_stride = mha_stride(&a->query, 2),
                  output_stride = mha_stride(&a->output, 2);
    const char *query = mha_at_row(&a->query, a->batch_axes, batch, head, first);
    const char *key = mha_at_row(&a->key, a->batch_axes, batch, head / job->group, 0);
    const char *value = mha_at_row(&a->value, a->batch_axes, batch, head / job->group, 0);
    char *output = mha_at_row(&a->output, a->batch_axes, batch, head, first);
    const double of_key = kernels->rough_squares(key, head_dim);
    for (int64_t i = first; i < end; i++, query += query_stride, output += output_stride) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (head_dim + value_head_dim))) {
            return;
        }
        if (is_score_finite(kernels->rough_squares(query, head_dim), of_key, a->options->scale)) {
            memset(output, 0, (size_t)value_head_dim * mha_dtype_size(a->dtype));
            kernels->add(output, value, value_head_dim); /* no negative zero */
        } else {
            mha_attend_query(job->kernels, a, batch, head, i, &worker->checkpoint,
                             mha_piece(&job->scratch, worker->number));
        }
    }
}

/* The queries first..end of a task, of arrays in order, if no score of theirs may overflow:
 * together, since a call for each narrow row would take longer than the row. A task has so few
 * numbers that none is asked whether to stop. */
static bool attend_rows_in_order(const one_key_job *job, int64_t first, int64_t end) {
    const mha_attention *a = job->attention;
    const mha_elementwise_kernels *kernels = job->kernels->elementwise;
    const int64_t head_dim = mha_extent(&a->query, 1), value_head_dim = mha_extent(&a->value, 1);
    const int64_t item = (int64_t)mha_dtype_size(a->dtype),
                  rows_of_key = job->group * job->query_len;
    const int64_t first_key = first / rows_of_key, end_key = mha_divide_up(end, rows_of_key);
    const char *query = (const char *)a->query.data + first * head_dim * item;
    const char *key = (const char *)a->key.data + first_key * head_dim * item;
    const char *values = a->value.data;
    char *output = (char *)a->output.data + first * value_head_dim * item;
    if (!is_score_finite(kernels->rough_squares(query, (end - first) * head_dim),
                         kernels->rough_squares(key, (end_key - first_key) * head_dim),
                         a->options->scale)) {
        return false;
    }
    memset(output, 0, (size_t)((end - first) * value_head_dim * item));
    const int64_t at_once = rows_of_key == 1 ? end - first : 1;
    for (int64_t row = first; row < end; row += at_once) {
        kernels->add(output + (row - first) * value_head_dim * item,
                     values + row / rows_of_key * value_head_dim * item, at_once * value_head_dim);
    }
    return true;
}

/* Task: some queries, numbered over batch items, heads and queries, the last one fastest. */
static void attend_rows(void *context, int64_t task, mha_worker *worker) {
    const one_key_job *job = context;
    const int64_t first = mha_first_row(&job->tasks, task), end = mha_end_row(&job->tasks, task);
    if (job->in_order && attend_rows_in_order(job, first, end)) {
        return;
    }
    for (int64_t row = first, next; row < end; row = next) {
        const int64_t batch_head = row / job->query_len, before = batch_head * job->query_len;
        next = mha_smaller(before + job->query_len, end);
        attend_head(job, batch_head / job->heads, batch_head % job->heads, row - before,
                    next - before, worker);
    }
}

mha_status mha_one_key_forward(const mha_attention *a, mha_execution *execution) {
    one_key_job job = {
        .attention = a,
        .kernels = mha_kernels_for(a->dtype),
        .heads = mha_extent(&a->query, 3),
        .query_len = mha_extent(&a->query, 2),
        .in_order = are_in_order(a),
    };
    const int64_t head_dim = mha_extent(&a->query, 1), value_head_dim = mha_extent(&a->value, 1);
    int64_t batch, rows;
    MHA_TRY(mha_check_columns(a));
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes, &batch));
    const int64_t shape[] = {batch, job.heads, job.query_len};
    MHA_TRY(mha_count_elements(shape, 3, &rows));
    job.group = job.heads / mha_extent(&a->key, 3);
    job.tasks = mha_divide_rows(rows, head_dim + value_head_dim, 1, execution->num_threads);
    const size_t bytes = job.kernels->attention->scratch_size(head_dim, value_head_dim, 1);
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, bytes, (size_t)job.tasks.threads,
                                      &job.scratch));
    return mha_run_row_tasks(execution, &job.tasks, attend_rows, &job);
}
