#include "core/attention/varlen.h"

#include "core/attention/attention_rows.h"

void mha_move_to_rows(const mha_tensor *all, const int64_t *starts, int64_t number,
                      mha_tensor *rows) {
    const int row_axis = all->axes - 2;
    if (all->data != NULL) {
        rows->data = (char *)all->data + starts[number] * all->strides[row_axis];
        rows->shape[row_axis] = starts[number + 1] - starts[number];
    }
}

void mha_begin_sequences(const mha_varlen_attention *varlen, mha_sequence *sequence) {
    sequence->options = *varlen->all.options;
    sequence->options.query_offset = (mha_tensor){.axes = 0};
    sequence->attention = varlen->all;
    sequence->attention.options = &sequence->options;
    sequence->attention.result_rows = mha_extent(&varlen->all.query, 2);
}

/* The keys of a sequence, in pages. */
static void see_pages(const mha_varlen_attention *varlen, int64_t number, mha_attention *one) {
    const int64_t keys = varlen->key_starts[number + 1] - varlen->key_starts[number];
    one->key.shape[one->key.axes - 2] = keys;
    one->value.shape[one->value.axes - 2] = keys;
    one->pages.table = varlen->all.pages.table + number * varlen->page_tables_stride;
}

void mha_move_to_sequence(const mha_varlen_attention *varlen, int64_t number,
                          mha_sequence *sequence) {
    const mha_attention *all = &varlen->all;
    mha_attention *one = &sequence->attention;
    const int64_t first = varlen->query_starts[number];
    mha_move_to_rows(&all->query, varlen->query_starts, number, &one->query);
    mha_move_to_rows(&all->output, varlen->query_starts, number, &one->output);
    if (all->pages.table != NULL) {
        see_pages(varlen, number, one);
    } else {
        mha_move_to_rows(&all->key, varlen->key_starts, number, &one->key);
        mha_move_to_rows(&all->value, varlen->key_starts, number, &one->value);
    }
    one->lse = mha_result_at(all, all->lse, first, 1);
    one->maximum = mha_result_at(all, all->maximum, first, 1);
    one->denominator = mha_result_at(all, all->denominator, first, 1);
    one->first_batch = number;
    sequence->options.query_offset.data = (void *)&varlen->query_offset[number];
    sequence->options.dropped = varlen->dropped == NULL ? 0 : varlen->dropped[number];
}

int64_t mha_sequence_of_task(const int64_t *first_task, int64_t sequences, int64_t task) {
    int64_t first = 0, end = sequences; /* first_task[first] <= task < first_task[end] */
    while (end - first > 1) {
        const int64_t middle = first + (end - first) / 2;
        if (first_task[middle] <= task) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return first;
}

mha_status mha_take_for_sequences(const mha_varlen_attention *varlen, size_t bytes,
                                  mha_workspace *workspace, void **piece) {
    size_t all;
    MHA_TRY(mha_multiply_sizes(bytes, (size_t)varlen->sequences + 1, &all));
    return mha_workspace_take(workspace, all, piece);
}
