/* Copies of arrays that lie the other way around. */
#ifndef MHA_TRANSPOSE_H
#define MHA_TRANSPOSE_H

#include "mha/execution.h"
#include "mha/tensor.h"

MHA_API_BEGIN

/* to[...] = from[...], of one shape, of numbers of 1, 2, 4 or 8 bytes: `item`, of which addresses
 * and strides are multiples. Numbers of `to` lie side by side along its last axis, those of `from`
 * along axis `column_axis`. The tensors' storage is not looked at. */
typedef struct mha_transposing_copy {
    mha_tensor to, from;
    int column_axis; /* not the last */
    size_t item;     /* bytes of a number */
} mha_transposing_copy;

/* Needs no workspace. */
mha_status mha_copy_transposing(const mha_transposing_copy *copy,
                                mha_execution *execution) MHA_MUST_CHECK;

MHA_API_END

#endif
