/* Rotary embeddings (Su et al. 2021): pairs of columns of queries and keys rotate by an angle that
 * grows with the position, so that their dot product depends on the distance alone. */
#ifndef MHA_ROTARY_H
#define MHA_ROTARY_H

#include <stdbool.h>
#include <stdint.h>

#include "mha/execution.h"
#include "mha/tensor.h"

MHA_API_BEGIN

/* Which columns of a head rotate, and how fast. */
typedef struct mha_rotary {
    int64_t dims;              /* the first columns rotate, the rest stay; even */
    bool interleaved;          /* column 2c rotates with 2c + 1; else c with c + dims/2 */
    const double *frequencies; /* (dims/2,), finite: radians a position */
    double magnitude;          /* multiplies cosine and sine */
    const int64_t *axes;       /* (dims/2,): by which of several position axes each pair turns, as
                                * multimodal models have it; NULL: there is one */
} mha_rotary;

/* x (batch..., heads, len, head_dim), its last axis contiguous, rotated to output, C-contiguous;
 * either may be halves, and each number is rounded once. positions are int64 (batch..., len),
 * strides 0 where repeated; (batch..., len, position axes) where the rotary has `axes`; 0, 1, ...
 * along all of them where data is NULL. */
typedef struct mha_rotation {
    mha_dtype dtype;
    const mha_rotary *rotary;
    mha_tensor x, positions;
    void *output;
    mha_storage output_storage;
} mha_rotation;

mha_status mha_rotary_workspace(const mha_rotation *rotation, int num_threads,
                                size_t *bytes) MHA_MUST_CHECK;
mha_status mha_rotary_forward(const mha_rotation *rotation,
                              mha_execution *execution) MHA_MUST_CHECK;

/* The gradient, backwards from x = grad output to output = grad x: the same rotation the other way.
 */
mha_status mha_rotary_backward_workspace(const mha_rotation *rotation, int num_threads,
                                         size_t *bytes) MHA_MUST_CHECK;
mha_status mha_rotary_backward(const mha_rotation *rotation,
                               mha_execution *execution) MHA_MUST_CHECK;

MHA_API_END

#endif
