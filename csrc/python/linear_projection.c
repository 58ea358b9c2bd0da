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

/* Owned arrays, and what they say. */
typedef struct linear_arguments {
    PyArrayObject *rows; /* x in the element type */
    PyArrayObject *bias, *output;
    converted_weight weight;
    mha_dtype dtype;
    bool x_transposed;
} linear_arguments;

static void clear(linear_arguments *a) {
    Py_XDECREF(a->rows);
    Py_XDECREF(a->bias);
    Py_XDECREF(a->weight.owner);
    Py_XDECREF(a->output);
}

static int convert(PyArrayObject *x, PyObject *const *args, linear_arguments *a) {
    static const char *const names[] = {"x"};
    npy_intp shape[NPY_MAXDIMS];
    char text[MHA_SHAPE_TEXT];
    const int axes = PyArray_NDIM(x);
    if (mha_result_dtype(&x, names, 1, &a->dtype) < 0) {
        return -1;
    }
    if (axes < 1 || axes > MHA_MOST_INPUT_AXES) {
        PyErr_Format(PyExc_ValueError, "x: got shape %s, wanted (..., in)",
                     mha_array_shape_text(x, text));
        return -1;
    }
    if (mha_convert_weight(args[1], a->dtype, PyArray_DIM(x, axes - 1), "the last axis of x",
                           "weight", &a->weight) < 0 ||
        mha_optional_vector(args[2], a->dtype, a->weight.out, "bias", &a->bias) < 0) {
        return -1;
    }
    a->x_transposed = is_transposed(x, a->dtype);
    a->rows = a->x_transposed ? (PyArrayObject *)Py_NewRef((PyObject *)x)
              : axes == 2     ? mha_as_real(x, a->dtype, "x")
                              : mha_as_contiguous_real(x, a->dtype, "x");
    if (a->rows == NULL) {
        return -1;
    }
    memcpy(shape, PyArray_DIMS(x), (size_t)axes * sizeof *shape);
    shape[axes - 1] = (npy_intp)a->weight.out;
    a->output = mha_new_array(axes, shape, mha_typenum(a->dtype), "output");
    return a->output == NULL ? -1 : 0;
}

static mha_linear_projection point(const linear_arguments *a) {
    const int64_t item = (int64_t)mha_dtype_size(a->dtype);
    const int axes = PyArray_NDIM(a->rows);
    mha_linear_projection projection = {
        .dtype = a->dtype,
        .rows = PyArray_MultiplyList(PyArray_DIMS(a->rows), axes - 1),
        .x = PyArray_DATA(a->rows),
        .x_stride =
            axes == 2 ? PyArray_STRIDE(a->rows, a->x_transposed ? 1 : 0) : a->weight.in * item,
        .x_transposed = a->x_transposed,
        .bias = mha_data_or_null(a->bias),
        .output = PyArray_DATA(a->output),
        .output_stride = a->weight.out * item,
    };
    mha_point_weight(&a->weight, &projection.weight);
    return projection;
}

PyObject *mha_py_linear(PyObject *module, PyObject *const *given_args, Py_ssize_t nargs) {
    PyObject *args[3] = {NULL}, *result = NULL;
    PyArrayObject *x = NULL;
    linear_arguments a = {0};
    (void)module;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "linear takes x, weight and bias");
        return NULL;
    }
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    /* 1. Convert and check every argument. */
    if (mha_settle(FORMS, 3, given_args, args) < 0) {
        goto cleanup;
    }
    x = mha_as_array(args[0], "x");
    if (x == NULL || convert(x, args, &a) < 0) {
        goto cleanup;
    }
    /* 2. Take the pointers, 3. compute. */
    const mha_linear_projection projection = point(&a);
    if (PyArray_SIZE(a.output) == 0 ||
        mha_call_run(workspace_of, forward, &projection, num_threads) == 0) {
        result = Py_NewRef((PyObject *)a.output);
    }
cleanup:
    mha_clear_settled(3, args);
    Py_XDECREF(x);
    clear(&a);
    return result;
}
