/* Matrix products over weight panels: what the projections are made of. */
#ifndef MHA_MATMUL_H
#define MHA_MATMUL_H

#include "../kernels/kernels.h"
#include "mha/attention.h"

/* Columns of one panel: MHA_PANEL_BYTES of them. */
int64_t mha_panel_columns(mha_dtype dtype);

/* Writes columns first_column.. of a strided weight as one panel (in, panel columns), padded with
 * zeros to the full width. */
void mha_pack_panel(mha_dtype dtype, const mha_weight *weight, int64_t first_column, void *panel);

#endif
