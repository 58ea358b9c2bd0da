/* split_heads and merge_heads: steps 2 and 4 of the figure. */
#include "call.h"
#include "convert.h"

PyObject *mha_py_split_heads(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    PyArrayObject *x = NULL;
    PyObject *heads = NULL;
    mha_tensor whole, split;
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    int64_t num_heads;
    (void)module;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "split_heads takes x and num_heads");
        return NULL;
    }
    x = mha_as_array(args[0], "x");
    if (x == NULL || mha_convert_size(args[1], "num_heads", 1, &num_heads) < 0) {
        goto cleanup;
    }
    const int axes = PyArray_NDIM(x);
    char text[MHA_SHAPE_TEXT];
    if (axes < 2 || axes > MHA_MOST_INPUT_AXES - 1) {
        PyErr_Format(PyExc_ValueError, "x: got shape %s, wanted (..., len, num_heads * d)",
                     mha_array_shape_text(x, text));
        goto cleanup;
    }
    if (PyArray_DIM(x, axes - 1) % num_heads != 0) {
        PyErr_Format(PyExc_ValueError,
                     "num_heads: got %lld, wanted a divisor of the last axis of x %s",
                     (long long)num_heads, mha_array_shape_text(x, text));
        goto cleanup;
    }
    mha_tensor_of(x, &whole);
    mha_split_heads(&whole, num_heads, &split);
    for (int axis = 0; axis < split.axes; axis++) {
        shape[axis] = (npy_intp)split.shape[axis];
        strides[axis] = (npy_intp)split.strides[axis];
    }
    heads = (PyObject *)mha_new_view(x, split.axes, shape, strides,
                                     PyArray_FLAGS(x) & NPY_ARRAY_WRITEABLE);
    if (heads == NULL) { /* of nothing each, but too many */
        mha_name_missing_memory(shape, split.axes, "num_heads");
    }
cleanup:
    Py_XDECREF(x);
    return heads;
}

static mha_status forward(const void *merge, mha_execution *execution) {
    return mha_merge_heads_forward(merge, execution);
}

PyObject *mha_py_merge_heads(PyObject *module, PyObject *x_object) {
    PyArrayObject *x = NULL, *real = NULL, *merged = NULL;
    PyObject *result = NULL;
    mha_merge_heads merge;
    npy_intp shape[NPY_MAXDIMS];
    static const char *const names[] = {"x"};
    (void)module;
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    x = mha_as_array(x_object, "x");
    if (x == NULL || mha_make_private((PyObject **)&x) < 0 ||
        mha_result_dtype(&x, names, 1, &merge.dtype) < 0) {
        goto cleanup;
    }
    const int axes = PyArray_NDIM(x);
    char text[MHA_SHAPE_TEXT];
    if (axes < 3 || axes > MHA_MOST_INPUT_AXES) {
        PyErr_Format(PyExc_ValueError, "x: got shape %s, wanted (..., heads, len, d)",
                     mha_array_shape_text(x, text));
        goto cleanup;
    }
    real = mha_as_strided_real(x, merge.dtype, "x");
    if (real == NULL) {
        goto cleanup;
    }
    for (int axis = 0; axis < axes - 3; axis++) {
        shape[axis] = PyArray_DIM(real, axis);
    }
    shape[axes - 3] = PyArray_DIM(real, axes - 2);
    shape[axes - 2] = PyArray_DIM(real, axes - 3) * PyArray_DIM(real, axes - 1);
    merged = mha_new_array(axes - 1, shape, mha_typenum(merge.dtype), "output");
    if (merged == NULL) {
        goto cleanup;
    }
    mha_tensor_of(real, &merge.heads);
    merge.merged = PyArray_DATA(merged);
    if (PyArray_SIZE(merged) == 0 || mha_call_run(NULL, forward, &merge, num_threads) == 0) {
        result = Py_NewRef((PyObject *)merged);
    }
cleanup:
    Py_XDECREF(x);
    Py_XDECREF(real);
    Py_XDECREF(merged);
    return result;
}
