/* Projections of rows that lie side by side, as most do: what the steps describe theirs by. */
#include "mha/attention.h"

mha_linear_projection mha_contiguous_projection(mha_dtype dtype, const void *x, int64_t rows,
                                                const mha_weight *weight, const void *bias,
                                                void *output) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    return (mha_linear_projection){
        .dtype = dtype,
        .rows = rows,
        .x = x,
        .x_stride = weight->in * item,
        .weight = *weight,
        .bias = bias,
        .output = output,
        .output_stride = weight->out * item,
    };
}

mha_linear_projection mha_with_stored_rows(mha_linear_projection projection, mha_storage storage) {
    projection.x_storage = storage;
    projection.x_stride =
        projection.weight.in * (int64_t)mha_storage_size(projection.dtype, storage);
    return projection;
}
