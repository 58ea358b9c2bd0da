/* Weights that many blocks of rows read: packed as a whole before, unless they are huge. */
#ifndef MHA_PACKED_WEIGHTS_H
#define MHA_PACKED_WEIGHTS_H

#include "mha/attention.h"

typedef struct mha_packed_weights {
    const mha_linear_projection *projections; /* as they came */
    char *packed[MHA_MOST_PROJECTIONS];       /* their panels, or NULL */
    bool any;
} mha_packed_weights;

/* Rows of a task: few enough to stay in the second cache for all panels of a packed weight, but
 * many where each block packs the weight again. Both are multiples of the kernels' tiles. */
enum { MHA_PACKED_ROW_BLOCK = 96, MHA_UNPACKED_ROW_BLOCK = 384 };

/* Whether the kernel packs the weight itself, or reads it as it lies. */
bool mha_takes_unpacked(const mha_linear_projection *projection);

/* Whether the kernel packs an x that is transposed chain by chain, as it does the weight: where it
 * takes all columns at once, so that each chain is packed once. */
bool mha_packs_rows_by_chain(const mha_linear_projection *projection);

/* The projections with their weights to be packed into the workspace, where that repays. */
mha_status mha_with_packed_weights(const mha_linear_projection *projections, int count,
                                   mha_workspace *workspace, mha_linear_projection *with_packed,
                                   mha_packed_weights *weights) MHA_MUST_CHECK;

/* Packs the weights of mha_with_packed_weights. */
mha_status mha_pack_weights(mha_packed_weights *weights, int count, int num_threads,
                            mha_execution *execution) MHA_MUST_CHECK;

#endif
