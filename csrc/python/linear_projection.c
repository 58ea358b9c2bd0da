/* linear: steps 1 and 5 of the figure. */
#include "call.h"
#include "settle.h"
#include "weight.h"

static const argument_form FORMS[] = {{"x", AS_REAL}, {"weight", AS_REAL}, {"bias", AS_REAL}};

static mha_status workspace_of(const void *projection, int num_threads, size_t *bytes) {
    return mha_linear_projection_workspace(projection, 1, num_threads, bytes);
}

static mha_status forward(const void *projection, mha_execution *execution) {
    return mha_linear_projection_forward(projection, 1, execution);
}

/* Whether a matrix in the element type is the transpose of one with a contiguous last axis. */
static bool is_transposed(PyArrayObject *x, mha_dtype dtype) {
    return PyArray_NDIM(x) == 2 && PyArray_TYPE(x) == mha_typenum(dtype) && PyArray_ISALIGNED(x) &&
           PyArray_ISNOTSWAPPED(x) && !mha_last_axis_is_contiguous(x) &&
           PyArray_STRIDE(x, 0) == PyArray_ITEMSIZE(x);
}

PyObject *mha_py_linear(PyObject *module, PyObject *const *given_args, Py_ssize_t nargs) {
    PyObject *args[3] = {NULL};
    PyArrayObject *x = NULL, *rows = NULL, *bias = NULL, *output = NULL;
    PyObject *result = NULL;
    converted_weight weight = {0};
    mha_dtype dtype;
    npy_intp shape[NPY_MAXDIMS];
    char text[MHA_SHAPE_TEXT];
    static const char *const names[] = {"x"};
    (void)module;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "linear takes x, weight and bias");
        return NULL;
    }
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    if (mha_settle(FORMS, 3, given_args, args) < 0) {
        goto cleanup;
    }
    x = mha_as_array(args[0], "x");
    if (x == NULL || mha_result_dtype(&x, names, 1, &dtype) < 0) {
        goto cleanup;
    }
    const int axes = PyArray_NDIM(x);
    if (axes < 1 || axes > 32) {
        PyErr_Format(PyExc_ValueError, "x: got shape %s, wanted (..., in)",
                     mha_array_shape_text(x, text));
        goto cleanup;
    }
    if (mha_convert_weight(args[1], dtype, PyArray_DIM(x, axes - 1), "the last axis of x", "weight",
                           &weight) < 0 ||
        mha_optional_vector(args[2], dtype, weight.out, "bias", &bias) < 0) {
        goto cleanup;
    }
    const bool transposed = is_transposed(x, dtype);
    rows = transposed  ? (PyArrayObject *)Py_NewRef((PyObject *)x)
           : axes == 2 ? mha_as_real(x, dtype, "x")
                       : mha_as_contiguous_real(x, dtype, "x");
    if (rows == NULL) {
        goto cleanup;
    }
    memcpy(shape, PyArray_DIMS(x), (size_t)axes * sizeof *shape);
    shape[axes - 1] = (npy_intp)weight.out;
    output = mha_new_array(axes, shape, mha_typenum(dtype), "output");
    if (output == NULL) {
        goto cleanup;
    }
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    mha_linear_projection projection = {
        .dtype = dtype,
        .rows = PyArray_MultiplyList(shape, axes - 1),
        .x = PyArray_DATA(rows),
        .x_stride = axes == 2 ? PyArray_STRIDE(rows, transposed ? 1 : 0) : weight.in * item,
        .x_transposed = transposed,
        .bias = bias == NULL ? NULL : PyArray_DATA(bias),
        .output = PyArray_DATA(output),
        .output_stride = weight.out * item,
    };
    mha_point_weight(&weight, &projection.weight);
    if (PyArray_SIZE(output) > 0 &&
        mha_call_run(workspace_of, forward, &projection, num_threads) < 0) {
        goto cleanup;
    }
    result = (PyObject *)output;
    output = NULL;
cleanup:
    mha_clear_settled(3, args);
    Py_XDECREF(x);
    Py_XDECREF(rows);
    Py_XDECREF(bias);
    Py_XDECREF(weight.owner);
    Py_XDECREF(output);
    return result;
}
