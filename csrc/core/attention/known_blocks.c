#include "core/attention/known_blocks.h"

#include <string.h>

/* Which of the numbers over its batch and heads axes an option (batch..., heads, query_len,
 * key_len) has of its own for this head, counted from 0; and how many there are. */
static int64_t group_of(const mha_tensor *option, int batch_axes, int64_t batch, int64_t head,
                        int64_t *count) {
    int64_t group = 0;
    *count = 1;
    for (int axis = batch_axes; axis >= 0; axis--) {
        const int64_t size = option->shape[axis];
        const int64_t index = axis == batch_axes ? head : batch % size;
        if (axis < batch_axes) {
            batch /= size;
        }
        if (option->strides[axis] != 0) {
            group += index * *count;
            *count *= size; /* no overflow: the array has so many numbers */
        }
    }
    return group;
}

/* Whether looking once repays the bytes: several heads share it, and it is large, one number for
 * each pair. */
static bool is_worth_knowing(const mha_attention *a, const mha_tensor *option) {
    if (option->data == NULL || mha_is_empty(option->shape, option->axes) ||
        mha_stride(option, 2) == 0 || mha_stride(option, 1) == 0) {
        return false;
    }
    for (int axis = 0; axis <= a->batch_axes; axis++) {
        if (option->shape[axis] > 1 && option->strides[axis] == 0) {
            return true;
        }
    }
    return false;
}

static mha_status take(const mha_attention *a, const mha_tensor *option,
                       const mha_known_visibility *known, mha_workspace *workspace,
                       _Atomic uint8_t **bytes) {
    int64_t groups, count;
    void *piece;
    *bytes = NULL;
    if (!is_worth_knowing(a, option)) {
        return MHA_OK;
    }
    group_of(option, a->batch_axes, 0, 0, &groups);
    const int64_t shape[] = {groups, known->query_blocks, known->key_blocks};
    MHA_TRY(mha_count_elements(shape, 3, &count));
    MHA_TRY(mha_workspace_take(workspace, (size_t)count, &piece));
    if (!workspace->measures) {
        memset(piece, MHA_UNKNOWN_VISIBILITY, (size_t)count);
    }
    *bytes = piece;
    return MHA_OK;
}

mha_status mha_take_known_blocks(const mha_attention *attention, int64_t query_blocks, int64_t keys,
                                 mha_workspace *workspace, mha_known_visibility *known) {
    *known = (mha_known_visibility){
        .query_blocks = query_blocks,
        .key_blocks = mha_divide_up(mha_extent(&attention->key, 2), keys),
        .keys = keys,
    };
    MHA_TRY(take(attention, &attention->options->mask, known, workspace, &known->mask));
    return take(attention, &attention->options->bias, known, workspace, &known->bias);
}

static _Atomic uint8_t *of_block(_Atomic uint8_t *bytes, const mha_tensor *option,
                                 const mha_known_visibility *known, int batch_axes, int64_t batch,
                                 int64_t head, int64_t query_block) {
    int64_t groups;
    if (bytes == NULL) {
        return NULL;
    }
    const int64_t group = group_of(option, batch_axes, batch, head, &groups);
    return bytes + (group * known->query_blocks + query_block) * known->key_blocks;
}

mha_known_blocks mha_known_blocks_of(const mha_known_visibility *known,
                                     const mha_attention *attention, int64_t batch, int64_t head,
                                     int64_t query_block) {
    const mha_attention_options *options = attention->options;
    const int axes = attention->batch_axes;
    return (mha_known_blocks){
        .mask = of_block(known->mask, &options->mask, known, axes, batch, head, query_block),
        .bias = of_block(known->bias, &options->bias, known, axes, batch, head, query_block),
        .keys = known->keys,
    };
}
