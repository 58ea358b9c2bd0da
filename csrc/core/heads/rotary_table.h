/* Cosines and sines of all positions of a call: computed once, for all heads. */
#ifndef MHA_ROTARY_TABLE_H
#define MHA_ROTARY_TABLE_H

#include "mha/rotary.h"

/* (batch or 1, length, 2, dims/2) numbers: each position's cosines, then its sines. */
typedef struct mha_rotary_table {
    const mha_rotary *rotary;
    int64_t pairs, length;
    int64_t row_bytes; /* from a position to the next */
    int64_t
        batch_bytes; /* from a batch item to the next; 0 where all stand at the same positions */
    char *rows;
} mha_rotary_table;

/* The table of `positions` (batch..., length), with an axis more where there are several position
 * axes, or of 0, 1, ... where that or its data is NULL, in a piece of the workspace; `back` rotates
 * the other way. */
mha_status mha_make_rotary_table(const mha_rotary *rotary, mha_dtype dtype,
                                 const mha_tensor *positions, int64_t length, bool back,
                                 mha_execution *execution, mha_rotary_table *table) MHA_MUST_CHECK;

/* Rotates one head's row in place. `item` is the batch item, `row` its token. */
void mha_rotate_row(const mha_rotary_table *table, mha_dtype dtype, int64_t item, int64_t row,
                    void *columns);

#endif
