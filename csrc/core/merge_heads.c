/* Step 4 of the figure. Inside multi_head_attention the attention step writes each head's columns
 * in place (the strides of split_heads), so that merging costs nothing; this is the step alone. */
#include <string.h>

#include "mha/attention.h"

mha_status mha_merge_heads_forward(mha_dtype dtype, const mha_tensor *heads, void *merged) {
    const int batch_axes = heads->axes - 3;
    const int64_t num_heads = mha_extent(heads, 3);
    const int64_t length = mha_extent(heads, 2);
    const int64_t width = mha_extent(heads, 1);
    const int64_t step = mha_stride(heads, 1);
    const size_t item = mha_dtype_size(dtype);
    int64_t batch;
    MHA_TRY(mha_count_elements(heads->shape, batch_axes, &batch));

    char *to = merged;
    for (int64_t b = 0; b < batch; b++) {
        const char *sequence = (const char *)heads->data + mha_leading_offset(heads, batch_axes, b);
        for (int64_t token = 0; token < length; token++) {
            for (int64_t head = 0; head < num_heads; head++) {
                const char *from =
                    sequence + head * mha_stride(heads, 3) + token * mha_stride(heads, 2);
                for (int64_t column = 0; column < width; column++) {
                    memcpy(to, from + column * step, item);
                    to += item;
                }
            }
        }
    }
    return MHA_OK;
}
