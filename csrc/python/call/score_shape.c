/* How arrays fit the scores, and how the core sees them then. */
#include "python/call/options.h"

int mha_user_shape(const score_shape *scores, npy_intp *shape) {
    int axes = 0;
    for (int axis = 0; axis < scores->batch_axes; axis++) {
        shape[axes++] = scores->batch[axis];
    }
    if (scores->has_heads) {
        shape[axes++] = (npy_intp)scores->heads;
    }
    shape[axes++] = (npy_intp)scores->query_len;
    shape[axes++] = (npy_intp)scores->key_len;
    return axes;
}

int mha_check_broadcasts(PyArrayObject *array, const score_shape *scores, const char *name) {
    npy_intp shape[NPY_MAXDIMS];
    char wanted[MHA_SHAPE_TEXT];
    const int axes = mha_user_shape(scores, shape);
    const int extra = axes - PyArray_NDIM(array);
    bool fits = extra >= 0;
    for (int axis = 0; fits && axis < PyArray_NDIM(array); axis++) {
        const npy_intp size = PyArray_DIM(array, axis);
        fits = size == 1 || size == shape[axis + extra];
    }
    if (!fits) {
        const bool padding = PyArray_NDIM(array) == 2 && scores->batch_axes == 1 &&
                             PyArray_DIM(array, 0) == shape[0] &&
                             PyArray_DIM(array, 1) == shape[axes - 1];
        const char *hint = !padding            ? ""
                           : scores->has_heads ? "; for padding write it [:, None, None, :]"
                                               : "; for padding write it [:, None, :]";
        return mha_wrong_shape(array, name, "one that broadcasts to the scores %s%s",
                               mha_shape_text(shape, axes, wanted), hint);
    }
    return 0;
}

/* An array checked to broadcast to the scores -> (batch..., heads, query_len, key_len), strides 0
 * where it is repeated. */
mha_tensor mha_broadcast_to_scores(PyArrayObject *array, const score_shape *scores) {
    npy_intp shape[NPY_MAXDIMS];
    mha_tensor tensor = {.data = mha_data_or_null(array)};
    if (array == NULL) {
        return tensor;
    }
    const int axes = mha_user_shape(scores, shape);
    const int extra = axes - PyArray_NDIM(array);
    for (int axis = 0; axis < axes; axis++) {
        if (!scores->has_heads && axis == scores->batch_axes) {
            tensor.shape[tensor.axes] = 1;
            tensor.strides[tensor.axes++] = 0;
        }
        const bool repeated = axis < extra || PyArray_DIM(array, axis - extra) == 1;
        tensor.shape[tensor.axes] = shape[axis];
        tensor.strides[tensor.axes++] = repeated ? 0 : PyArray_STRIDE(array, axis - extra);
    }
    return tensor;
}

mha_head_numbers mha_by_head(PyArrayObject *array) {
    mha_head_numbers numbers = {.data = NULL};
    if (array != NULL) {
        numbers.data = PyArray_DATA(array);
        numbers.columns = PyArray_NDIM(array) == 1 ? 1 : PyArray_DIM(array, 1);
        numbers.stride = PyArray_DIM(array, 0) == 1 ? 0 : PyArray_STRIDE(array, 0);
    }
    return numbers;
}
