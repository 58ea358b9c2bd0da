#include "core/attention/heads_last.h"

#include <string.h>

#include "core/attention/attention_rows.h"
#include "core/attention/scores.h"
#include "core/base/run.h"

/* What stands in the lanes `low` of b changes places with the lanes of a that are `bits` higher. */
static inline void exchange(uint64_t *a, uint64_t *b, int bits, uint64_t low) {
    const uint64_t differing = (*a >> bits ^ *b) & low;
    *a ^= differing << bits;
    *b ^= differing;
}

/* Rows and columns of a square of bytes change places: its quarters, the quarters of these, and of
 * those. */
enum { SIDE = 8 };
static inline void transpose_bytes(uint64_t rows[SIDE]) {
#pragma GCC unroll 4
    for (int i = 0; i < SIDE / 2; i++) {
        exchange(&rows[i], &rows[i + 4], 32, 0x00000000FFFFFFFF);
    }
#pragma GCC unroll 4
    for (int i = 0; i < SIDE / 2; i++) {
        exchange(&rows[i / 2 * 4 + i % 2], &rows[i / 2 * 4 + i % 2 + 2], 16, 0x0000FFFF0000FFFF);
    }
#pragma GCC unroll 4
    for (int i = 0; i < SIDE / 2; i++) {
        exchange(&rows[2 * i], &rows[2 * i + 1], 8, 0x00FF00FF00FF00FF);
    }
}

/* Up to SIDE bytes, zeros behind them. */
static inline uint64_t load_bytes(const uint8_t *from, int64_t count) {
    uint64_t bytes = 0;
    uint32_t half = 0;
    if (count >= SIDE) {
        memcpy(&bytes, from, SIDE);
        return bytes;
    }
    int64_t i = 0;
    if (count >= SIDE / 2) {
        memcpy(&half, from, SIDE / 2);
        bytes = half;
        i = SIDE / 2;
    }
    for (; i < count; i++) {
        bytes |= (uint64_t)from[i] << 8 * i;
    }
    return bytes;
}

/* As the kernels' transpose, of the bytes of a mask, in squares of eight keys and eight heads. Up
 * to four heads leave the upper half of each row to eight more keys. Whole squares are written: the
 * rows of `to` have room for them. */
static void put_bytes_heads_first(const void *from, int64_t key_stride, int64_t keys, int64_t heads,
                                  void *to, int64_t head_stride) {
    for (int64_t head = 0; head < heads; head += SIDE) {
        const int64_t width = mha_smaller(heads - head, SIDE);
        const int parts = width > SIDE / 2 ? 1 : 2;
        for (int64_t key = 0; key < keys; key += parts * SIDE) {
            uint64_t rows[SIDE];
            for (int i = 0; i < SIDE; i++) {
                const uint8_t *heads_of_key = (const uint8_t *)from + head;
                const int64_t first = key + i, second = first + SIDE;
                rows[i] = first < keys ? load_bytes(heads_of_key + first * key_stride, width) : 0;
                if (parts == 2 && second < keys) {
                    rows[i] |= load_bytes(heads_of_key + second * key_stride, width) << 32;
                }
            }
            transpose_bytes(rows);
            for (int i = 0; i < width; i++) {
                uint8_t *of_head = (uint8_t *)to + (head + i) * head_stride + key;
                memcpy(of_head, &rows[i], SIDE);
                if (parts == 2) {
                    memcpy(of_head + SIDE, &rows[i + SIDE / 2], SIDE);
                }
            }
        }
    }
}

enum { LINE = 64 }; /* bytes of a cache line */

/* Rows of a few lines are read as well where they lie, and would be padded to several times their
 * size. */
static bool heads_lie_last(const mha_tensor *option, int64_t item) {
    enum { FEWEST_LINES = 4 };
    return option->data != NULL && !mha_is_empty(option->shape, option->axes) &&
           mha_extent(option, 3) > 1 && mha_stride(option, 3) == item &&
           mha_stride(option, 1) >= mha_extent(option, 3) * item && mha_stride(option, 2) != 0 &&
           mha_extent(option, 1) >= FEWEST_LINES * LINE / item;
}

/* Rows and heads are an odd number of cache lines apart, so that they spread over all sets of a
 * cache. */
static mha_heads_copy plan_copy(const mha_tensor *option, int64_t item, mha_transpose *put,
                                int64_t heads, int64_t queries, double most) {
    const mha_heads_copy none = {.option = NULL};
    if (!heads_lie_last(option, item)) {
        return none;
    }
    const int64_t row = mha_packed_rows_stride(mha_extent(option, 1), item) * item;
    if ((double)heads * ((double)queries * (double)row + 2 * LINE) > most) {
        return none;
    }
    const int64_t head = (mha_divide_up(queries * row, LINE) | 1) * LINE;
    return (mha_heads_copy){option, item, heads, row, head, (size_t)(heads * head), put};
}

mha_heads_copy mha_plan_mask_copy(const mha_attention *attention, int64_t heads, int64_t queries,
                                  double most) {
    return plan_copy(&attention->options->mask, 1, put_bytes_heads_first, heads, queries, most);
}

mha_heads_copy mha_plan_bias_copy(const mha_attention *attention, int64_t heads, int64_t queries,
                                  double most) {
    return plan_copy(&attention->options->bias, (int64_t)mha_dtype_size(attention->dtype),
                     mha_kernels_for(attention->dtype)->attention->transpose, heads, queries, most);
}

/* The keys begin..end of one query and `count` heads. begin is the first key of a line of the copy:
 * whole vectors from there on stay in their row. */
static void copy_row(const mha_heads_copy *copy, const char *from, int64_t count, int64_t begin,
                     int64_t end, char *to) {
    const int64_t key_stride = mha_stride(copy->option, 1);
    copy->put(from + begin * key_stride, key_stride / copy->item, end - begin, count,
              to + begin * copy->item, copy->head_stride / copy->item);
}

void mha_copy_heads(const mha_heads_copy *copy, const mha_attention *attention, int64_t batch,
                    int64_t head, int64_t count, int64_t first, int64_t end, char *to,
                    mha_checkpoint *checkpoint) {
    const int64_t key_len = mha_extent(copy->option, 1);
    int64_t begin_key = key_len, end_key = 0;
    for (int64_t query = first; query < end; query++) {
        int64_t begin_of_query, end_of_query;
        mha_visible_ranges(attention, batch, query, 1, &begin_of_query, &end_of_query);
        begin_key = mha_smaller(begin_key, begin_of_query);
        end_key = mha_larger(end_key, end_of_query);
    }
    begin_key = mha_smaller(begin_key, end_key);
    begin_key -= begin_key % (LINE / copy->item);
    for (int64_t query = first; query < end; query++, to += copy->query_stride) {
        if (mha_stop_after(checkpoint, MHA_WORK_OF_MOVING * count * (key_len + 1))) {
            return;
        }
        copy_row(copy, mha_at_row(copy->option, attention->batch_axes, batch, head, query), count,
                 begin_key, end_key, to);
        for (int64_t i = 0; i < count; i++) {
            char *row = to + i * copy->head_stride;
            memset(row, 0, (size_t)(begin_key * copy->item));
            memset(row + end_key * copy->item, 0, (size_t)((key_len - end_key) * copy->item));
        }
    }
}

/* A whole mask or bias: each item of the batch that has numbers of its own. */
typedef struct whole_copy {
    mha_heads_copy rows;
    mha_tensor own_items; /* the option, with one item where an axis of the batch is repeated */
    int batch_axes;
    int64_t row_blocks; /* of an item */
    char *to;
} whole_copy;

enum { ROWS_OF_A_TASK = 16 };

/* Task: some queries of all heads of an item. */
static void copy_rows(void *context, int64_t task, mha_worker *worker) {
    const whole_copy *whole = context;
    const mha_heads_copy *rows = &whole->rows;
    const int64_t item = task / whole->row_blocks, key_len = mha_extent(rows->option, 1);
    const int64_t first = task % whole->row_blocks * ROWS_OF_A_TASK;
    const int64_t end = mha_smaller(first + ROWS_OF_A_TASK, mha_extent(rows->option, 2));
    for (int64_t query = first; query < end; query++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * rows->heads * key_len)) {
            return;
        }
        copy_row(rows, mha_at_row(&whole->own_items, whole->batch_axes, item, 0, query),
                 rows->heads, 0, key_len,
                 whole->to + item * (int64_t)rows->bytes + query * rows->query_stride);
    }
}

/* Lets the option be the copy. */
static void use_copy(const whole_copy *whole, mha_tensor *option) {
    const mha_heads_copy *rows = &whole->rows;
    int64_t items = (int64_t)rows->bytes;
    for (int axis = whole->batch_axes - 1; axis >= 0; axis--) {
        option->strides[axis] = option->strides[axis] == 0 ? 0 : items;
        items *= whole->own_items.shape[axis];
    }
    option->data = whole->to;
    option->strides[whole->batch_axes] = rows->head_stride;
    option->strides[whole->batch_axes + 1] = rows->query_stride;
    option->strides[whole->batch_axes + 2] = rows->item;
}

/* Lets the option be a copy, unless that takes more than is `left` of the bytes for copies. */
static mha_status copy_option(mha_heads_copy rows, int batch_axes, mha_execution *execution,
                              double *left, mha_tensor *option) {
    whole_copy whole = {.rows = rows, .batch_axes = batch_axes};
    int64_t items;
    void *to;
    if (rows.option == NULL) {
        return MHA_OK;
    }
    whole.own_items = *option;
    for (int axis = 0; axis < batch_axes; axis++) {
        whole.own_items.shape[axis] = option->strides[axis] == 0 ? 1 : option->shape[axis];
    }
    MHA_TRY(mha_count_elements(whole.own_items.shape, batch_axes, &items));
    const double bytes = (double)items * (double)rows.bytes;
    if (bytes > *left) {
        return MHA_OK;
    }
    *left -= bytes;
    MHA_TRY(mha_workspace_take(&execution->workspace, (size_t)items * rows.bytes, &to));
    whole.to = to;
    whole.row_blocks = mha_divide_up(mha_extent(option, 2), ROWS_OF_A_TASK);
    const int64_t tasks = items * whole.row_blocks;
    const double work = MHA_WORK_OF_MOVING * bytes / (double)rows.item;
    MHA_TRY(mha_run_tasks(execution, tasks, mha_threads_for(tasks, work, execution->num_threads),
                          copy_rows, &whole));
    use_copy(&whole, option);
    return MHA_OK;
}

mha_status mha_copy_heads_of_call(const mha_attention *attention, mha_execution *execution,
                                  mha_call_with_copies *call) {
    double left = 256 << 20; /* bytes of both copies */
    const int64_t heads = mha_extent(&attention->query, 3);
    const int64_t queries = mha_extent(&attention->query, 2);
    const mha_heads_copy mask = mha_plan_mask_copy(attention, heads, queries, left);
    const mha_heads_copy bias = mha_plan_bias_copy(attention, heads, queries, left);
    const int axes = attention->batch_axes;
    call->attention = *attention;
    call->options = *attention->options;
    call->attention.options = &call->options;
    MHA_TRY(copy_option(mask, axes, execution, &left, &call->options.mask));
    return copy_option(bias, axes, execution, &left, &call->options.bias);
}
