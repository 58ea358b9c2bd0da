/* Panels of weights that are quantised: the same for all kernel sets but for their width. */
#ifndef MHA_QUANTISED_H
#define MHA_QUANTISED_H

#include "kernels/kernels.h"

/* A panel of `columns` columns of the weight, from first_column on, zeros behind the last; and the
 * way back to the numbers and scales that it was packed from. */
void mha_pack_quantised(const mha_weight *weight, int64_t first_column, int64_t columns,
                        void *panel, mha_checkpoint *checkpoint);
void mha_unpack_quantised(const mha_weight_unpacking *unpacking, int64_t first_column,
                          int64_t columns, const void *panel, mha_checkpoint *checkpoint);

#endif
