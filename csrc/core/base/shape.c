/* Element types, and the shapes and strides of tensors. */
#include "mha/tensor.h"

#include <float.h>

static const mha_element_type element_types[MHA_NUM_DTYPES] = {
    [MHA_FLOAT32] = {"float32", FLT_MAX},
    [MHA_FLOAT64] = {"float64", DBL_MAX},
};

const mha_element_type *mha_element_type_of(mha_dtype dtype) { return &element_types[dtype]; }

bool mha_is_empty(const int64_t *shape, int axes) {
    for (int axis = 0; axis < axes; axis++) {
        if (shape[axis] == 0) {
            return true;
        }
    }
    return false;
}

mha_status mha_count_elements(const int64_t *shape, int axes, int64_t *count) {
    int64_t product = 1;
    if (mha_is_empty(shape, axes)) {
        *count = 0;
        return MHA_OK;
    }
    for (int axis = 0; axis < axes; axis++) {
        if (__builtin_mul_overflow(product, shape[axis], &product)) {
            return MHA_SIZE_OVERFLOW;
        }
    }
    *count = product;
    return MHA_OK;
}

bool mha_is_shared(const mha_tensor *tensor, int from_last) {
    return !mha_is_empty(tensor->shape, tensor->axes) &&
           (mha_extent(tensor, from_last) == 1 || mha_stride(tensor, from_last) == 0);
}

bool mha_heads_share(const mha_tensor *tensor, int batch_axes) {
    for (int axis = 0; axis <= batch_axes; axis++) {
        if (tensor->shape[axis] > 1 && mha_is_shared(tensor, tensor->axes - axis)) {
            return true;
        }
    }
    return false;
}

static void set_strides(mha_tensor *tensor, size_t item, int64_t row_bytes) {
    const bool empty = mha_is_empty(tensor->shape, tensor->axes);
    int64_t stride = empty ? 0 : row_bytes;
    tensor->strides[tensor->axes - 1] = empty ? 0 : (int64_t)item;
    for (int axis = tensor->axes - 2; axis >= 0; axis--) {
        tensor->strides[axis] = stride;
        stride *= tensor->shape[axis];
    }
}

void mha_set_row_strides(mha_tensor *tensor, mha_dtype dtype, int64_t row_bytes) {
    set_strides(tensor, mha_dtype_size(dtype), row_bytes);
}

void mha_set_contiguous_strides(mha_tensor *tensor, mha_dtype dtype) {
    const int64_t width = mha_is_empty(tensor->shape, tensor->axes) ? 0 : mha_extent(tensor, 1);
    const size_t item = mha_storage_size(dtype, tensor->storage);
    set_strides(tensor, item, width * (int64_t)item);
}
