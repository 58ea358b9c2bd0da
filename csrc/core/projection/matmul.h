/* Matrix products over weight panels: what the projections are made of. */
#ifndef MHA_MATMUL_H
#define MHA_MATMUL_H

#include "kernels/kernels.h"
#include "mha/attention.h"

/* The format of the kernel set in use, the panels of a weight with so many columns, the bytes of
 * one of them, and where one begins. */
const mha_panel_format *mha_panels_of(mha_dtype dtype);
int64_t mha_panel_count(const mha_panel_format *format, int64_t out);
mha_status mha_panel_size(mha_dtype dtype, const mha_weight *weight, size_t *bytes) MHA_MUST_CHECK;
size_t mha_panel_offset(mha_dtype dtype, const mha_weight *weight, int64_t panel);

/* A matrix (rows, depth) that lies as (depth, rows) is first copied to blocks of rows, each of them
 * (depth, rows of the block) with mha_packed_rows_stride elements between its rows. As it lies, a
 * large power of two between the rows would put them all into a few sets of the cache. */
typedef struct mha_transposed_rows {
    mha_dtype dtype;
    int64_t rows, depth, block_rows;
    const void *from;
    int64_t from_stride; /* bytes between two of depth */
    mha_storage storage; /* of what is copied; the copies are numbers */
    void *blocks;
} mha_transposed_rows;

mha_status mha_packed_rows_size(const mha_transposed_rows *x, size_t *bytes) MHA_MUST_CHECK;

/* The block that begins with this row. */
char *mha_packed_rows_block(const mha_transposed_rows *x, int64_t first_row);

/* Copies first..end of depth. */
void mha_pack_rows(const mha_transposed_rows *x, int64_t first, int64_t end,
                   mha_checkpoint *checkpoint);

#endif
