#include "core/attention/known_blocks.h"

#include <string.h>

/* An option (batch..., heads, query_len, key_len) has pairs of its own for each (batch, head), but
 * where an axis is repeated (stride 0). Returns the number of this head's pairs, counted from 0,
 * and how many there are. */
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

/* Whether it has a number for each pair, so that looking at it takes time. */
static bool has_pairs(const mha_tensor *option) {
    return option->data != NULL && !mha_is_empty(option->shape, option->axes) &&
           mha_stride(option, 2) != 0 && mha_stride(option, 1) != 0;
}

static mha_status take_shared(const mha_attention *a, const mha_tensor *option,
                              const mha_known_visibility *known, mha_workspace *workspace,
                              _Atomic uint8_t **bytes) {
    int64_t groups, count;
    void *piece;
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

static mha_status take(const mha_attention *a, const mha_tensor *option,
                       const mha_known_visibility *known, int threads, mha_workspace *workspace,
                       mha_known_option *found) {
    found->is_there = has_pairs(option);
    found->shared = NULL;
    if (!found->is_there) {
        return MHA_OK;
    }
    if (mha_heads_share(option, a->batch_axes) && !found->is_copied) {
        return take_shared(a, option, known, workspace, &found->shared);
    }
    return mha_workspace_take_pieces(workspace, (size_t)known->slots * (size_t)known->key_blocks,
                                     (size_t)threads, &found->own);
}

mha_status mha_take_known_blocks(const mha_attention *attention, int threads,
                                 mha_workspace *workspace, mha_known_visibility *known) {
    const mha_attention_options *options = attention->options;
    known->key_blocks = mha_divide_up(mha_extent(&attention->key, 2), known->keys);
    MHA_TRY(take(attention, &options->mask, known, threads, workspace, &known->mask));
    return take(attention, &options->bias, known, threads, workspace, &known->bias);
}

mha_known_blocks mha_known_blocks_of(const mha_known_visibility *known,
                                     const mha_attention *attention, int64_t batch, int64_t head,
                                     int64_t query_block, int worker, int slot) {
    const mha_known_option *const options[] = {&known->mask, &known->bias};
    const mha_tensor *const tensors[] = {&attention->options->mask, &attention->options->bias};
    _Atomic uint8_t *bytes[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        if (options[i]->shared != NULL) {
            int64_t groups;
            const int64_t group = group_of(tensors[i], attention->batch_axes, batch, head, &groups);
            bytes[i] = options[i]->shared +
                       (group * known->query_blocks + query_block) * known->key_blocks;
        } else if (options[i]->is_there && slot < known->slots) {
            char *own = mha_piece(&options[i]->own, worker);
            own += slot * known->key_blocks;
            memset(own, MHA_UNKNOWN_VISIBILITY, (size_t)known->key_blocks);
            bytes[i] = (_Atomic uint8_t *)own;
        }
    }
    return (mha_known_blocks){.mask = bytes[0],
                              .bias = bytes[1],
                              .keys = known->keys,
                              .end = mha_extent(&attention->key, 2)};
}
