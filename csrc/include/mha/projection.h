/* Steps 1 and 5 of the figure, the linear projections, forward and backward, and their weights as
 * they lie or packed. Shapes are the caller's duty, as in attention.h. */
#ifndef MHA_PROJECTION_H
#define MHA_PROJECTION_H

#include <stdbool.h>
#include <stdint.h>

#include "mha/execution.h"
#include "mha/tensor.h"

MHA_API_BEGIN

/* How a kernel set packs the weights of one element type. */
typedef struct mha_panel_format mha_panel_format;

/* A weight matrix (in, out): either strided as it lies, or packed by mha_pack_weight in the format
 * of the kernel set that was in use then. */
typedef struct mha_weight {
    const void *data;
    int64_t in, out;
    int64_t in_stride, out_stride;  /* bytes; unused when packed */
    mha_storage storage;            /* of its numbers, packed or not */
    const void *scales;             /* float16 (in / MHA_QUANTISED_ROWS, out), of what is packed as
                                       blocks from int8 numbers (in, out) alone, both contiguous */
    const mha_panel_format *format; /* NULL: not packed */
} mha_weight;

/* Bytes that packing writes, under the kernel set in use. */
mha_status mha_packed_weight_size(mha_dtype dtype, int64_t in, int64_t out,
                                  size_t *bytes) MHA_MUST_CHECK;
/* The same of this weight: halves stay halves. */
mha_status mha_packed_size_of(mha_dtype dtype, const mha_weight *weight,
                              size_t *bytes) MHA_MUST_CHECK;

typedef struct mha_weight_packing {
    mha_dtype dtype;
    mha_weight weight;
    void *packed;
} mha_weight_packing;

mha_status mha_pack_weight(const mha_weight_packing *packing,
                           mha_execution *execution) MHA_MUST_CHECK;

/* The way back: to (in, out), and of blocks scales, C-contiguous, as the weight had them before.
 * MHA_INVALID_ARGUMENT under another kernel set. */
typedef struct mha_weight_unpacking {
    mha_dtype dtype;
    mha_weight packed;
    void *to, *scales;
} mha_weight_unpacking;

mha_status mha_unpack_weight(const mha_weight_unpacking *unpacking,
                             mha_execution *execution) MHA_MUST_CHECK;

/* The packed weight, for calls in this element type under the same kernel set; others refuse it
 * with MHA_INVALID_ARGUMENT. */
mha_weight mha_packed_weight(const mha_weight_packing *packing);

/* Whether a call in this element type would take the weight: every weight that is not packed. */
bool mha_weight_fits(const mha_weight *weight, mha_dtype dtype);

/* output (rows, out) = x (rows, in) @ weight (in, out) + bias (out,) or NULL.
 * x and output have contiguous last axes; row strides are in bytes. With x_transposed x lies as
 * (in, rows), and x_stride is that between these; then it is the only projection of its call. With
 * head_columns, whole panels, only so many columns of output lie side by side, and the next ones
 * head_stride bytes further. */
typedef struct mha_linear_projection {
    mha_dtype dtype;
    int64_t rows;
    const void *x;
    int64_t x_stride;
    mha_storage x_storage;
    bool x_transposed;
    mha_weight weight;
    const void *bias;
    void *output;
    int64_t output_stride;
    mha_storage output_storage;        /* of halves: each number is rounded once */
    int64_t head_columns, head_stride; /* 0: all columns lie side by side */
    /* What is done to each block of rows and heads by the task that wrote it, while it is in the
     * cache; the columns of a head are whole panels then. NULL but inside the core. */
    const struct mha_prepare_heads *prepare;
} mha_linear_projection;

/* The projection of contiguous rows to contiguous rows. */
mha_linear_projection mha_contiguous_projection(mha_dtype dtype, const void *x, int64_t rows,
                                                const mha_weight *weight, const void *bias,
                                                void *output);

/* The same with rows of x that lie so. */
mha_linear_projection mha_with_stored_rows(mha_linear_projection projection, mha_storage storage);

/* `count` projections of one element type side by side. */
enum { MHA_MOST_PROJECTIONS = 4 };
mha_status mha_linear_projection_workspace(const mha_linear_projection *projections, int count,
                                           int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_linear_projection_forward(const mha_linear_projection *projections, int count,
                                         mha_execution *execution) MHA_MUST_CHECK;

/* Gradients of one linear projection, by the chain rule backwards from grad_output: (rows, out),
 * its last axis contiguous, as far apart as grad_output_stride bytes. `projection` is that of the
 * forward pass, of which output is not read and the weight is not packed. What is NULL is not
 * wanted.
 * grad_x = grad_output weight^T, contiguous (rows, in)
 * grad_weight = x^T grad_output, contiguous (in, out)
 * grad_bias = the sum of the rows of grad_output, (out,) */
typedef struct mha_linear_projection_gradients {
    const mha_linear_projection *projection;
    const void *grad_output;
    int64_t grad_output_stride;
    void *grad_x, *grad_weight, *grad_bias;
    bool skips_rows_without_gradient; /* where grad_weight is not finite: a NaN of padding, whose
                                         grad output is 0, does not reach it */
} mha_linear_projection_gradients;

mha_status
mha_linear_projection_backward_workspace(const mha_linear_projection_gradients *gradients,
                                         int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_linear_projection_backward(const mha_linear_projection_gradients *gradients,
                                          mha_execution *execution) MHA_MUST_CHECK;

MHA_API_END

#endif
