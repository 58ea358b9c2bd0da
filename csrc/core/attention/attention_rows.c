#include "core/attention/attention_rows.h"

#include <string.h>

char *mha_at_row(const mha_tensor *tensor, int batch_axes, int64_t batch, int64_t head,
                 int64_t row) {
    return (char *)tensor->data + mha_leading_offset(tensor, batch_axes, batch) +
           head * mha_stride(tensor, 3) + row * mha_stride(tensor, 2);
}

int64_t mha_result_row(const mha_attention *attention, int64_t batch, int64_t head, int64_t row) {
    const int64_t query_len = mha_extent(&attention->query, 2);
    const int64_t apart = attention->result_rows > 0 ? attention->result_rows : query_len;
    return (batch * mha_extent(&attention->query, 3) + head) * apart + row;
}

void *mha_result_at(const mha_attention *attention, void *result, int64_t result_row,
                    int64_t count) {
    const int64_t item = (int64_t)mha_dtype_size(attention->dtype);
    return result == NULL ? NULL : (char *)result + result_row * count * item;
}

mha_status mha_check_columns(const mha_attention *attention) {
    return mha_extent(&attention->query, 1) > MHA_MOST_COLUMNS ||
                   mha_extent(&attention->value, 1) > MHA_MOST_COLUMNS
               ? MHA_SIZE_OVERFLOW
               : MHA_OK;
}

bool mha_has_no_rows(const mha_tensor *tensor) {
    return mha_is_empty(tensor->shape, tensor->axes - 1);
}

static int64_t item_size(const mha_tensor *tensor, mha_dtype dtype) {
    return (int64_t)mha_storage_size(dtype, tensor->storage);
}

bool mha_lies_by_columns(const mha_tensor *tensor, mha_dtype dtype) {
    return tensor->storage == MHA_AS_COMPUTED && mha_extent(tensor, 1) > 1 &&
           mha_stride(tensor, 1) != item_size(tensor, dtype);
}

bool mha_some_lie_by_columns(const mha_attention *a) {
    return mha_lies_by_columns(&a->key, a->dtype) || mha_lies_by_columns(&a->value, a->dtype);
}

bool mha_has_plain_rows(const mha_attention *a) {
    return a->pages.table == NULL && a->key.storage != MHA_Q8_0 && a->value.storage != MHA_Q8_0;
}

int64_t mha_row_stride(const mha_tensor *tensor, mha_dtype dtype) {
    return mha_stride(tensor, 2) / item_size(tensor, dtype);
}

int64_t mha_key_stride(const mha_tensor *tensor, mha_dtype dtype) {
    return mha_stride(tensor, mha_lies_by_columns(tensor, dtype) ? 1 : 2) /
           item_size(tensor, dtype);
}

int64_t mha_row_bytes(const mha_tensor *tensor, mha_dtype dtype) {
    const int64_t columns = mha_extent(tensor, 1);
    return tensor->storage == MHA_Q8_0 ? columns / MHA_QUANTISED_ROWS * MHA_Q8_0_BYTES
                                       : columns * item_size(tensor, dtype);
}

bool mha_has_gaps(const mha_tensor *tensor, mha_dtype dtype) {
    return mha_stride(tensor, 2) != mha_row_bytes(tensor, dtype);
}

double mha_bytes_of_key_head(const mha_attention *a) {
    const double key_size = (double)mha_storage_size(a->dtype, a->key.storage),
                 value_size = (double)mha_storage_size(a->dtype, a->value.storage);
    return (double)mha_extent(&a->key, 2) * ((double)mha_extent(&a->key, 1) * key_size +
                                             (double)mha_extent(&a->value, 1) * value_size);
}

bool mha_rows_lie_apart(const mha_tensor *tensor, mha_dtype dtype) {
    return tensor->storage != MHA_AS_COMPUTED || mha_has_gaps(tensor, dtype);
}

mha_prefetch_rows mha_rows_to_come(const mha_attention *attention, const mha_tensor *tensor,
                                   int64_t batch, int64_t head, int64_t first, int64_t end) {
    return (mha_prefetch_rows){
        .first = mha_at_row(tensor, attention->batch_axes, batch, head, first),
        .count = end - first,
        .stride = mha_stride(tensor, 2),
        .width = mha_row_bytes(tensor, attention->dtype),
    };
}

double mha_bytes_of_heads(const mha_attention *a, int64_t batch_heads) {
    const double rows = (double)mha_extent(&a->query, 2) + (double)mha_extent(&a->key, 2);
    const double columns = (double)mha_extent(&a->query, 1) + (double)mha_extent(&a->value, 1);
    return (double)batch_heads * rows * columns * (double)mha_dtype_size(a->dtype);
}

void mha_gather_rows(const mha_attention *attention, const mha_tensor *tensor, int64_t batch,
                     int64_t head, int64_t first, int64_t end, char *own) {
    const int64_t columns = mha_extent(tensor, 1);
    const size_t width = (size_t)columns * mha_dtype_size(attention->dtype);
    const mha_kernels *kernels = mha_kernels_for(attention->dtype);
    mha_read_row *read_row = kernels->elementwise->read_row;
    if (mha_lies_by_columns(tensor, attention->dtype)) {
        kernels->attention->transpose(mha_at_row(tensor, attention->batch_axes, batch, head, first),
                                      mha_key_stride(tensor, attention->dtype), columns,
                                      end - first, own, columns);
        return;
    }
    for (int64_t row = first; row < end; row++, own += width) {
        read_row(mha_at_row(tensor, attention->batch_axes, batch, head, row), tensor->storage, own,
                 columns);
    }
}

void mha_fill_query_block(const mha_attention *a, int64_t batch, int64_t head, int64_t first,
                          int64_t count, mha_key_ranges *visible, mha_attention_block *block) {
    const int64_t heads = mha_extent(&a->query, 3), key_len = mha_extent(&a->key, 2);
    const int64_t kv_head = head / (heads / mha_extent(&a->key, 3));
    const int64_t row = mha_result_row(a, batch, head, first);
    *block = (mha_attention_block){
        .query_len = count,
        .key_len = key_len,
        .first_query = first,
        .query = mha_at_row(&a->query, a->batch_axes, batch, head, first),
        .key = mha_at_row(&a->key, a->batch_axes, batch, kv_head, 0),
        .value = mha_at_row(&a->value, a->batch_axes, batch, kv_head, 0),
        .query_stride = mha_row_stride(&a->query, a->dtype),
        .pages = a->pages,
        .key_begin = visible->begin,
        .key_end = visible->end,
        .output = mha_at_row(&a->output, a->batch_axes, batch, head, first),
        .output_stride = mha_row_stride(&a->output, a->dtype),
        .weights = mha_result_at(a, a->weights, row, key_len),
        .lse = mha_result_at(a, a->lse, row, 1),
        .maximum = mha_result_at(a, a->maximum, row, 1),
        .denominator = mha_result_at(a, a->denominator, row, 1),
    };
    MHA_FILL_ROWS(a, block);
    mha_fill_scores(a, batch, head, &block->scores);
    block->sees_all_keys = mha_visible_ranges(a, batch, first, count, visible->begin, visible->end);
}

void mha_attend_query(const mha_kernels *kernels, const mha_attention *a, int64_t batch,
                      int64_t head, int64_t query, mha_checkpoint *checkpoint, void *scratch) {
    mha_key_ranges visible;
    mha_attention_block block;
    mha_fill_query_block(a, batch, head, query, 1, &visible, &block);
    block.checkpoint = checkpoint;
    kernels->attention->forward(&block, 1, scratch);
}

double mha_attention_operations(const mha_attention *a, int64_t batch_heads) {
    const double widths = (double)mha_extent(&a->query, 1) + (double)mha_extent(&a->value, 1) + 16;
    return (double)batch_heads * (double)mha_extent(&a->query, 2) * (double)mha_extent(&a->key, 2) *
           widths;
}
