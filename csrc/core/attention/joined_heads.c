/* Few queries of a head leave lanes of its last vector empty. Where heads share a key head, all of
 * their queries are one head's instead, with the bits that each has alone. Where no single stride
 * leads from query to query and from head to head, as in arrays (len, heads, columns), queries and
 * output are copied. */
#include "core/attention/joined_heads.h"

#include <string.h>

#include "core/attention/attention_rows.h"
#include "core/attention/scores.h"
#include "core/base/run.h"
#include "kernels/kernels.h"

/* Whether no option tells heads apart, or queries but by which keys their positions see. */
static bool takes_heads_alike(const mha_attention *a) {
    return mha_has_plain_scores(a) && a->options->mask.data == NULL &&
           a->options->bias.data == NULL && a->result_rows == 0;
}

/* From a query to the next one: of a single query to that of the next head. */
static int64_t query_stride(const mha_tensor *tensor) {
    return mha_stride(tensor, mha_extent(tensor, 2) == 1 ? 3 : 2);
}

static bool axes_can_join(const mha_tensor *tensor) {
    return mha_stride(tensor, 3) == mha_extent(tensor, 2) * query_stride(tensor);
}

/* Heads that share a key head. */
static int64_t group_of(const mha_attention *a) {
    const int64_t kv_heads = mha_extent(&a->key, 3);
    return kv_heads == 0 ? 0 : mha_extent(&a->query, 3) / kv_heads;
}

/* From how many keys on copies of so many queries are worth it: few queries have a kernel for few
 * keys. */
static int64_t fewest_keys_of_copies(int64_t queries, int64_t query_len) {
    return queries < 8 ? 32 : queries < 16 && query_len == 2 ? 8 : 1;
}

/* Not above a block of queries, where causal blocks that nobody sees are left out; not if threads
 * would want tasks. */
static bool is_worth_it(const mha_attention *a, int64_t batch, int num_threads) {
    const int64_t kv_heads = mha_extent(&a->key, 3), query_len = mha_extent(&a->query, 2);
    const int64_t group = group_of(a);
    int64_t queries;
    if (group <= 1 || __builtin_mul_overflow(group, query_len, &queries)) {
        return false;
    }
    const mha_attention_kernels *kernels = mha_kernels_for_lanes(a->dtype, queries)->attention;
    return query_len < kernels->query_block && takes_heads_alike(a) &&
           mha_divide_up(queries, kernels->query_lanes) <
               group * mha_divide_up(query_len, kernels->query_lanes) &&
           (num_threads == 1 || batch >= mha_divide_up(num_threads, kv_heads)) &&
           ((axes_can_join(&a->query) && axes_can_join(&a->output)) ||
            mha_extent(&a->key, 2) >= fewest_keys_of_copies(queries, query_len));
}

bool mha_joined_heads_are_ahead(const mha_attention *a, int num_threads) {
    enum {
        MOST_BYTES = 4 << 20,
        MOST_KEYS = 256,
        FEWEST_KEYS_OF_SIX = 8,
        MOST_KEYS_OF_SIX = 200,
        MOST_KEYS_OF_HALF_A_VECTOR = 48
    };
    const int64_t group = group_of(a);
    int64_t batch;
    if (group <= 1 || !mha_has_plain_rows(a) || mha_some_lie_by_columns(a) ||
        mha_count_elements(a->query.shape, a->batch_axes, &batch) != MHA_OK ||
        !is_worth_it(a, batch, num_threads)) {
        return false;
    }
    /* is_worth_it has seen that the product is a number. */
    const int64_t rows = group * mha_extent(&a->query, 2), keys = mha_extent(&a->key, 2);
    const int64_t lanes = mha_kernels_for_lanes(a->dtype, rows)->attention->query_lanes;
    if (rows >= 16 && 4 * rows >= 3 * lanes) {
        return mha_bytes_of_key_head(a) <= MOST_BYTES;
    }
    if (4 * rows >= 3 * lanes) {
        return rows != 6 ? keys <= MOST_KEYS
                         : keys >= FEWEST_KEYS_OF_SIX && keys <= MOST_KEYS_OF_SIX;
    }
    return lanes >= 16 && 2 * rows >= lanes && a->key.storage == MHA_AS_COMPUTED &&
           keys <= MOST_KEYS_OF_HALF_A_VECTOR;
}

/* The tensor gets a piece of the workspace, where it lies without gaps. */
static mha_status move_to_workspace(mha_dtype dtype, mha_workspace *workspace, mha_tensor *tensor) {
    int64_t rows;
    size_t bytes;
    MHA_TRY(mha_count_elements(tensor->shape, tensor->axes - 1, &rows));
    MHA_TRY(mha_multiply_sizes((size_t)rows, (size_t)mha_row_bytes(tensor, dtype), &bytes));
    mha_set_contiguous_strides(tensor, dtype);
    return mha_workspace_take(workspace, bytes, &tensor->data);
}

/* The rows of a head, between the array that was given and its copy. */
static void copy_rows(const mha_attention *a, const mha_tensor *tensor, char *copy,
                      int64_t batch_head, bool is_output) {
    const int64_t heads = mha_extent(&a->query, 3), rows = mha_extent(tensor, 2);
    const size_t width = (size_t)mha_row_bytes(tensor, a->dtype);
    for (int64_t row = 0; row < rows; row++) {
        char *given =
            mha_at_row(tensor, a->batch_axes, batch_head / heads, batch_head % heads, row);
        char *own = copy + (size_t)(batch_head * rows + row) * width;
        memcpy(is_output ? given : own, is_output ? own : given, width);
    }
}

/* Task: a head. */
static void gather_queries(void *context, int64_t task, mha_worker *worker) {
    const mha_joined_heads *joined = context;
    (void)worker;
    copy_rows(joined->given, &joined->given->query, joined->attention.query.data, task, false);
}

static void scatter_outputs(void *context, int64_t task, mha_worker *worker) {
    const mha_joined_heads *joined = context;
    (void)worker;
    copy_rows(joined->given, &joined->given->output, joined->attention.output.data, task, true);
}

static mha_status run_copies(const mha_attention *a, const mha_tensor *tensor,
                             mha_task_function copies, const mha_joined_heads *joined,
                             mha_execution *execution) {
    int64_t tasks;
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes + 1, &tasks));
    const double numbers = (double)tasks * (double)mha_extent(tensor, 2) *
                           (double)mha_extent(tensor, 1) * MHA_WORK_OF_MOVING;
    return mha_run_tasks(execution, tasks, mha_threads_for(tasks, numbers, execution->num_threads),
                         copies, (void *)joined);
}

/* (heads, len, columns) -> (heads / group, group * len, columns). */
static void join_axes(mha_tensor *tensor, int64_t group) {
    tensor->strides[tensor->axes - 2] = query_stride(tensor);
    tensor->shape[tensor->axes - 3] /= group;
    tensor->shape[tensor->axes - 2] *= group;
    tensor->strides[tensor->axes - 3] *= group;
}

mha_status mha_join_heads(const mha_attention *attention, mha_execution *execution,
                          mha_joined_heads *joined) {
    int64_t batch;
    *joined = (mha_joined_heads){.attention = *attention, .given = attention};
    MHA_TRY(mha_count_elements(attention->query.shape, attention->batch_axes, &batch));
    if (!is_worth_it(attention, batch, execution->num_threads)) {
        return MHA_OK;
    }
    mha_attention *a = &joined->attention;
    const int64_t group = group_of(a);
    if (!axes_can_join(&a->query)) {
        MHA_TRY(move_to_workspace(a->dtype, &execution->workspace, &a->query));
        MHA_TRY(run_copies(attention, &attention->query, gather_queries, joined, execution));
    }
    if (!axes_can_join(&a->output)) {
        MHA_TRY(move_to_workspace(a->dtype, &execution->workspace, &a->output));
    }
    a->queries_of_head = mha_extent(&a->query, 2);
    join_axes(&a->query, group);
    join_axes(&a->output, group);
    return MHA_OK;
}

mha_status mha_part_heads(const mha_joined_heads *joined, mha_execution *execution) {
    const mha_attention *given = joined->given;
    return joined->attention.output.data == given->output.data
               ? MHA_OK
               : run_copies(given, &given->output, scatter_outputs, joined, execution);
}
