/* The arena of a call. */
#include "mha/execution.h"
#include "mha/tensor.h"

mha_status mha_workspace_piece_size(size_t bytes, size_t *rounded) {
    MHA_TRY(mha_add_sizes(bytes, MHA_WORKSPACE_ALIGNMENT - 1, rounded));
    *rounded -= *rounded % MHA_WORKSPACE_ALIGNMENT;
    return MHA_OK;
}

mha_status mha_workspace_take(mha_workspace *workspace, size_t bytes, void **piece) {
    size_t rounded;
    MHA_TRY(mha_workspace_piece_size(bytes, &rounded));
    if (rounded > workspace->size - workspace->used) {
        return MHA_OUT_OF_MEMORY;
    }
    *piece = workspace->base + workspace->used;
    workspace->used += rounded;
    return MHA_OK;
}

mha_status mha_workspace_reserve(size_t *total, size_t bytes, size_t count) {
    size_t rounded, all;
    MHA_TRY(mha_workspace_piece_size(bytes, &rounded));
    MHA_TRY(mha_multiply_sizes(rounded, count, &all));
    return mha_add_sizes(*total, all, total);
}
