/* What turns the dot product of a query and a key into a weight: the options of a call, as the
 * kernels read them for one head; and which keys a query sees by its position. */
#include "scores.h"

#include "attention_rows.h"
#include "head_gate.h"

/* The batch item's entry of an option (batch..., extra axes); `further` bytes into it. */
static int64_t option_of(const mha_tensor *option, int batch_axes, int64_t batch, int64_t further) {
    const char *at =
        (const char *)option->data + mha_leading_offset(option, batch_axes, batch) + further;
    return *(const int64_t *)at;
}

int64_t mha_query_offset(const mha_attention *attention, int64_t batch) {
    const mha_tensor *offset = &attention->options->query_offset;
    return offset->data == NULL ? 0 : option_of(offset, attention->batch_axes, batch, 0);
}

/* The head's part of an option that has no batch axes, or NULL. */
static const void *of_head(const mha_tensor *option, int heads_from_last, int64_t head) {
    return option->data == NULL
               ? NULL
               : (const char *)option->data + head * mha_stride(option, heads_from_last);
}

void mha_visible_range(const mha_attention *attention, int64_t batch, int64_t i, int64_t *begin,
                       int64_t *end) {
    const mha_attention_options *options = attention->options;
    const int axes = attention->batch_axes;
    const int64_t position = i + mha_query_offset(attention, batch);
    *begin = 0;
    *end = mha_extent(&attention->key, 2);
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
        *begin = mha_larger(*begin, position - options->window_left);
    }
    *end = mha_larger(*end, 0);
}

mha_scores mha_scores_of_head(const mha_attention *attention, int64_t batch, int64_t head) {
    const mha_attention_options *options = attention->options;
    const mha_tensor *mask = &options->mask, *bias = &options->bias;
    const int axes = attention->batch_axes;
    const int64_t item = (int64_t)mha_dtype_size(attention->dtype);
    mha_scores scores = {
        .function = attention->score_function,
        .w_v = attention->w_v,
        .scale = attention->score_function == MHA_ADDITIVE ? 1 : options->scale,
        .softcap = options->softcap,
        .query_offset = mha_query_offset(attention, batch),
        .uniform_empty_rows = options->uniform_empty_rows,
        .dropout = {options->dropout_threshold, options->dropout_seed, head,
                    attention->first_batch + batch},
        .gate = mha_gate_of(attention->dtype, attention->head_gate, head),
    };
    if (mask->data != NULL) {
        scores.mask = (const uint8_t *)mha_at_row(mask, axes, batch, head, 0);
        scores.mask_query_stride = mha_stride(mask, 2);
        scores.mask_key_stride = mha_stride(mask, 1);
    }
    if (bias->data != NULL) {
        scores.bias = mha_at_row(bias, axes, batch, head, 0);
        scores.bias_query_stride = mha_stride(bias, 2) / item;
        scores.bias_key_stride = mha_stride(bias, 1) / item;
    }
    scores.alibi = of_head(&options->alibi, 1, head);
    scores.relative_bias = of_head(&options->relative_bias, 2, head);
    if (scores.relative_bias != NULL) {
        scores.farthest = (mha_extent(&options->relative_bias, 1) - 1) / 2;
    }
    scores.sink = of_head(&options->sinks, 1, head);
    return scores;
}
