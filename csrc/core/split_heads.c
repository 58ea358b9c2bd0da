/* Step 2 of the figure. Splitting into heads moves no data: it is a matter of strides. */
#include "mha/attention.h"

void mha_split_heads(const mha_tensor *x, int64_t num_heads, mha_tensor *heads) {
    const int last = x->axes - 1;
    const int64_t width = x->shape[last] / num_heads;
    mha_tensor split = *x;

    /* (..., len, num_heads * d) -> (..., num_heads, len, d) */
    split.axes = x->axes + 1;
    split.shape[last - 1] = num_heads;
    split.strides[last - 1] = width * x->strides[last];
    split.shape[last] = x->shape[last - 1];
    split.strides[last] = x->strides[last - 1];
    split.shape[last + 1] = width;
    split.strides[last + 1] = x->strides[last];
    *heads = split;
}
