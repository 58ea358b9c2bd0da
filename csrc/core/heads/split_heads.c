/* Step 2 of the figure. Splitting into heads moves no data: it is a matter of strides. */
#include "mha/attention.h"

void mha_split_heads(const mha_tensor *x, int64_t num_heads, mha_tensor *heads) {
    const int last = x->axes - 1;
    const int64_t length = x->shape[last - 1], row_stride = x->strides[last - 1];
    const int64_t width = x->shape[last] / num_heads, column_stride = x->strides[last];

    /* (..., len, num_heads * d) -> (..., num_heads, len, d) */
    heads->data = x->data;
    heads->axes = x->axes + 1;
    for (int axis = 0; axis < last - 1; axis++) {
        heads->shape[axis] = x->shape[axis];
        heads->strides[axis] = x->strides[axis];
    }
    heads->shape[last - 1] = num_heads;
    heads->strides[last - 1] = width * column_stride;
    heads->shape[last] = length;
    heads->strides[last] = row_stride;
    heads->shape[last + 1] = width;
    heads->strides[last + 1] = column_stride;
}
