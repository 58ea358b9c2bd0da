#include "attention_rows.h"

#include <string.h>

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

char *mha_at_row(const mha_tensor *tensor, int batch_axes, int64_t batch, int64_t head,
                 int64_t row) {
    return (char *)tensor->data + mha_leading_offset(tensor, batch_axes, batch) +
           head * mha_stride(tensor, 3) + row * mha_stride(tensor, 2);
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

bool mha_rows_lie_apart(const mha_tensor *tensor, mha_dtype dtype) {
    return mha_stride(tensor, 2) != mha_extent(tensor, 1) * (int64_t)mha_dtype_size(dtype);
}

void mha_gather_rows(const mha_attention *attention, const mha_tensor *tensor, int64_t batch,
                     int64_t head, int64_t first, int64_t end, char *own) {
    const size_t width = (size_t)mha_extent(tensor, 1) * mha_dtype_size(attention->dtype);
    for (int64_t row = first; row < end; row++, own += width) {
        memcpy(own, mha_at_row(tensor, attention->batch_axes, batch, head, row), width);
    }
}

void mha_scatter_rows(const mha_attention *attention, const mha_tensor *tensor, int64_t batch,
                      int64_t head, int64_t first, int64_t end, const char *own) {
    const size_t width = (size_t)mha_extent(tensor, 1) * mha_dtype_size(attention->dtype);
    for (int64_t row = first; row < end; row++, own += width) {
        memcpy(mha_at_row(tensor, attention->batch_axes, batch, head, row), own, width);
    }
}

/* The batch item's entry of an option (batch..., extra axes); `further` bytes into it. */
static int64_t option_of(const mha_tensor *option, int batch_axes, int64_t batch, int64_t further) {
    const char *at =
        (const char *)option->data + mha_leading_offset(option, batch_axes, batch) + further;
    return *(const int64_t *)at;
}

void mha_visible_range(const mha_attention *attention, int64_t batch, int64_t i, int64_t *begin,
                       int64_t *end) {
    const mha_attention_options *options = attention->options;
    const int axes = attention->batch_axes;
    int64_t position = i;
    *begin = 0;
    *end = mha_extent(&attention->key, 2);
    if (options->query_offset.data != NULL) {
        position += option_of(&options->query_offset, axes, batch, 0);
    }
    if (options->key_lengths.data != NULL) {
        const int64_t further = i * mha_stride(&options->key_lengths, 1);
        *end = mha_smaller(*end, option_of(&options->key_lengths, axes, batch, further));
    }
    if (options->causal) {
        *end = mha_smaller(*end, position + 1);
    }
    if (options->window_right < MHA_UNLIMITED) {
        *end = mha_smaller(*end, position + options->window_right + 1);
    }
    if (options->window_left < MHA_UNLIMITED) {
        *begin = larger(*begin, position - options->window_left);
    }
    *end = larger(*end, 0);
}

double mha_gate_of(const mha_attention *attention, int64_t head) {
    if (attention->head_gate == NULL) {
        return 1;
    }
    return attention->dtype == MHA_FLOAT32 ? (double)((const float *)attention->head_gate)[head]
                                           : ((const double *)attention->head_gate)[head];
}

/* Which keys the block's queries see: ranges, mask and bias. */
static void set_visibility(const mha_attention *attention, int64_t batch, int64_t head,
                           mha_key_ranges *visible, mha_attention_block *block) {
    const mha_tensor *mask = &attention->options->mask, *bias = &attention->options->bias;
    const int axes = attention->batch_axes;
    const int64_t item = (int64_t)mha_dtype_size(attention->dtype);
    for (int64_t i = 0; i < block->query_len; i++) {
        mha_visible_range(attention, batch, block->first_query + i, &visible->begin[i],
                          &visible->end[i]);
    }
    block->key_begin = visible->begin;
    block->key_end = visible->end;
    if (mask->data != NULL) {
        block->mask = (const uint8_t *)mha_at_row(mask, axes, batch, head, block->first_query);
        block->mask_query_stride = mha_stride(mask, 2);
        block->mask_key_stride = mha_stride(mask, 1);
    }
    if (bias->data != NULL) {
        block->bias = mha_at_row(bias, axes, batch, head, block->first_query);
        block->bias_query_stride = mha_stride(bias, 2) / item;
        block->bias_key_stride = mha_stride(bias, 1) / item;
    }
}

mha_attention_block mha_query_block(const mha_attention *a, int64_t batch, int64_t head,
                                    int64_t first, int64_t count, mha_key_ranges *visible) {
    const int64_t item = (int64_t)mha_dtype_size(a->dtype);
    const int64_t heads = mha_extent(&a->query, 3), key_len = mha_extent(&a->key, 2);
    const int64_t kv_head = head / (heads / mha_extent(&a->key, 3));
    const int64_t row = (batch * heads + head) * mha_extent(&a->query, 2) + first; /* of results */
    mha_attention_block block = {
        .query_len = count,
        .key_len = key_len,
        .head_dim = mha_extent(&a->query, 1),
        .value_head_dim = mha_extent(&a->value, 1),
        .first_query = first,
        .query = mha_at_row(&a->query, a->batch_axes, batch, head, first),
        .key = mha_at_row(&a->key, a->batch_axes, batch, kv_head, 0),
        .value = mha_at_row(&a->value, a->batch_axes, batch, kv_head, 0),
        .query_stride = mha_stride(&a->query, 2) / item,
        .key_stride = mha_stride(&a->key, 2) / item,
        .value_stride = mha_stride(&a->value, 2) / item,
        .additive_w = a->additive_w,
        .scale = a->additive_w == NULL ? a->options->scale : 1, /* additive scores have none */
        .softcap = a->options->softcap,
        .uniform_empty_rows = a->options->uniform_empty_rows,
        .dropout = {a->options->dropout_threshold, a->options->dropout_seed, head, batch},
        .gate = mha_gate_of(a, head),
        .output = mha_at_row(&a->output, a->batch_axes, batch, head, first),
        .output_stride = mha_stride(&a->output, 2) / item,
        .weights = a->weights == NULL ? NULL : (char *)a->weights + row * key_len * item,
        .lse = a->lse == NULL ? NULL : (char *)a->lse + row * item,
        .origin = a->origin == NULL ? NULL : (char *)a->origin + row * item,
        .denominator = a->origin == NULL ? NULL : (char *)a->denominator + row * item,
    };
    set_visibility(a, batch, head, visible, &block);
    return block;
}

double mha_attention_operations(const mha_attention *a, int64_t batch_heads) {
    const double widths = (double)mha_extent(&a->query, 1) + (double)mha_extent(&a->value, 1) + 16;
    return (double)batch_heads * (double)mha_extent(&a->query, 2) * (double)mha_extent(&a->key, 2) *
           widths;
}
