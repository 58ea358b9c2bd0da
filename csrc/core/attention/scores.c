/* What makes the dot product of a query and a key a weight: the options of a call, as the
 * kernels read them for one head; and which keys a query sees by its position. */
#include "core/attention/scores.h"

#include "core/attention/attention_rows.h"
#include "core/heads/head_gate.h"

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

/* The head's numbers, or NULL. */
static const void *of_head(const mha_head_numbers *option, int64_t head) {
    return option->data == NULL ? NULL : (const char *)option->data + head * option->stride;
}

/* Those that its position leaves, of the keys begin..end that a query may see. */
static void clip_to_position(const mha_attention_options *options, int64_t position, int64_t *begin,
                             int64_t *end) {
    if (options->causal) {
        *end = mha_smaller(*end, position + 1);
    }
    if (options->window_right < MHA_UNLIMITED) {
        *end = mha_smaller(*end, position + options->window_right + 1);
    }
    if (options->window_left < MHA_UNLIMITED && options->keep_first == 0) {
        *begin = mha_larger(*begin, position - options->window_left);
    }
}

/* Whether no option limits the keys by position. */
static bool sees_every_position(const mha_attention_options *options) {
    return !options->causal && options->key_lengths.data == NULL &&
           options->window_left >= MHA_UNLIMITED && options->window_right >= MHA_UNLIMITED;
}

bool mha_has_plain_scores(const mha_attention *a) {
    const mha_attention_options *o = a->options;
    return a->score_function == MHA_DOT_PRODUCT && a->head_gate == NULL &&
           o->block_mask.starts == NULL && o->alibi.data == NULL && o->relative_bias.data == NULL &&
           o->sinks.data == NULL && o->dropout_threshold == 0 && o->keep_first == 0 &&
           !o->uniform_empty_rows;
}

bool mha_visible_ranges(const mha_attention *attention, int64_t batch, int64_t first, int64_t count,
                        int64_t *begin, int64_t *end) {
    const mha_attention_options *options = attention->options;
    const int axes = attention->batch_axes;
    const int64_t key_len = mha_extent(&attention->key, 2);
    if (sees_every_position(options)) {
        for (int64_t i = 0; i < count; i++) {
            begin[i] = 0;
            end[i] = key_len;
        }
        return true;
    }
    const int64_t offset = mha_query_offset(attention, batch);
    const bool has_lengths = options->key_lengths.data != NULL;
    const int64_t further = has_lengths ? mha_stride(&options->key_lengths, 1) : 0;
    const int64_t of_head = attention->queries_of_head;
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = of_head > 0 ? (first + i) % of_head : first + i;
        begin[i] = 0;
        end[i] = key_len;
        if (has_lengths) {
            const int64_t length = option_of(&options->key_lengths, axes, batch, query * further);
            end[i] = mha_smaller(key_len, length);
        }
        clip_to_position(options, query + offset, &begin[i], &end[i]);
        end[i] = mha_larger(end[i], 0);
    }
    return false;
}

void mha_fill_scores(const mha_attention *attention, int64_t batch, int64_t head,
                     mha_scores *scores) {
    const mha_attention_options *options = attention->options;
    const mha_tensor *mask = &options->mask, *bias = &options->bias;
    const int axes = attention->batch_axes;
    const int64_t item = (int64_t)mha_dtype_size(attention->dtype);
    scores->function = attention->score_function;
    scores->w_v = attention->w_v;
    scores->scale = attention->score_function == MHA_ADDITIVE ? 1 : options->scale;
    scores->softcap = options->softcap;
    scores->mask = NULL;
    if (mask->data != NULL) {
        scores->mask = (const uint8_t *)mha_at_row(mask, axes, batch, head, 0);
        scores->mask_first_query = 0;
        scores->mask_query_stride = mha_stride(mask, 2);
        scores->mask_key_stride = mha_stride(mask, 1);
    }
    scores->block_mask = NULL;
    if (options->block_mask.starts != NULL) {
        const mha_block_mask *blocks = &options->block_mask;
        const int64_t number = blocks->batch == 1 ? 0 : blocks->first_batch + batch;
        scores->block_mask = blocks;
        scores->first_block_row =
            (number * blocks->heads + (blocks->heads == 1 ? 0 : head)) * blocks->rows;
    }
    scores->bias = NULL;
    if (bias->data != NULL) {
        scores->bias = mha_at_row(bias, axes, batch, head, 0);
        scores->bias_first_query = 0;
        scores->bias_query_stride = mha_stride(bias, 2) / item;
        scores->bias_key_stride = mha_stride(bias, 1) / item;
    }
    scores->query_offset = mha_query_offset(attention, batch);
    scores->keep_first = options->window_left < MHA_UNLIMITED ? options->keep_first : 0;
    scores->window_left = options->window_left;
    scores->dropped = options->dropped;
    scores->alibi = of_head(&options->alibi, head);
    scores->relative_bias = of_head(&options->relative_bias, head);
    scores->farthest = (options->relative_bias.columns - 1) / 2;
    scores->sink = of_head(&options->sinks, head);
    scores->uniform_empty_rows = options->uniform_empty_rows;
    scores->dropout.threshold = options->dropout_threshold;
    scores->dropout.seed = options->dropout_seed;
    scores->dropout.head = options->dropout_offsets.head + head;
    scores->dropout.batch = options->dropout_offsets.batch + attention->first_batch + batch;
    scores->dropout.first_query = options->dropout_offsets.query;
    scores->dropout.first_key = options->dropout_offsets.key;
    scores->gate = mha_gate_of(attention->dtype, attention->head_gate, head);
}
