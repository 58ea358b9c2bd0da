/* split_heads and merge_heads: steps 2 and 4 of the figure. */
#include "python/steps/heads.h"

#include <stddef.h>

#include "python/call/function.h"
#include "python/convert/pieces.h"

enum { X, NUM_HEADS, NUM_SPLIT_ARGUMENTS, NUM_MERGE_ARGUMENTS = NUM_HEADS };

static const argument_form FORMS[NUM_SPLIT_ARGUMENTS] = {
    [X] = {"x", AS_ANY_ARRAY},
    [NUM_HEADS] = {"num_heads", AS_INT},
};

/* Of either function. */
typedef struct heads_call {
    PyArrayObject *x, *result;
    mha_merge_heads merge;
} heads_call;

static void clear(void *given) {
    heads_call *call = given;
    Py_CLEAR(call->x);
    Py_CLEAR(call->result);
}

static PyObject *results(void *given) {
    const heads_call *call = given;
    return Py_NewRef((PyObject *)call->result);
}

/* An array whose type NumPy can show. */
static PyArrayObject *shown_array(PyObject *object) {
    PyArrayObject *x = mha_as_any_array(object, "x");
    const bool is_raw =
        x != NULL && PyArray_TYPE(x) == NPY_VOID && mha_storage_of(x) == MHA_BFLOAT16;
    if (is_raw && mha_shown_typenum(NPY_VOID, "x") == NPY_VOID) {
        Py_CLEAR(x);
    }
    return x;
}

PyArrayObject *mha_view_by_head(PyArrayObject *x, int64_t heads, int writeable) {
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    const mha_tensor whole = mha_tensor_of(x);
    mha_tensor split;
    mha_split_heads(&whole, heads, &split);
    for (int axis = 0; axis < split.axes; axis++) {
        shape[axis] = (npy_intp)split.shape[axis];
        strides[axis] = (npy_intp)split.strides[axis];
    }
    PyArrayObject *view = mha_new_view(x, PyArray_DATA(x), split.axes, shape, strides, writeable);
    if (view == NULL) { /* of nothing each, but too many */
        mha_name_missing_memory(shape, split.axes, "num_heads");
    }
    return view;
}

static int convert_split(void *given, PyObject **arguments) {
    heads_call *call = given;
    char text[MHA_SHAPE_TEXT];
    int64_t num_heads;
    call->x = shown_array(arguments[X]);
    if (call->x == NULL || mha_convert_size(arguments[NUM_HEADS], "num_heads", 1, &num_heads) < 0) {
        return -1;
    }
    const int axes = PyArray_NDIM(call->x);
    if (axes < 2 || axes > MHA_MOST_INPUT_AXES - 1) {
        return mha_wrong_shape(call->x, "x", "(..., len, num_heads * d)");
    }
    if (PyArray_DIM(call->x, axes - 1) % num_heads != 0) {
        return mha_raise(PyExc_ValueError,
                         "num_heads: got %lld, wanted a divisor of the last axis of x %s",
                         (long long)num_heads, mha_array_shape_text(call->x, text));
    }
    call->result =
        mha_view_by_head(call->x, num_heads, PyArray_FLAGS(call->x) & NPY_ARRAY_WRITEABLE);
    return call->result == NULL ? -1 : 0;
}

static bool nothing_to_compute(void *given) {
    (void)given;
    return false;
}

MHA_MODULE_FUNCTION(split_heads, heads_call, .forms = FORMS, .count = NUM_SPLIT_ARGUMENTS,
                    .by_position = NUM_SPLIT_ARGUMENTS, .options = NO_OPTIONS,
                    .convert = convert_split, .fill_pointers = nothing_to_compute,
                    .results = results, .clear = clear)

/* Whether elements are 4 or 8 bytes that mean the same wherever they lie. */
static bool moves_as_real(PyArrayObject *x) {
    const int typenum = PyArray_TYPE(x);
    const npy_intp item = PyArray_ITEMSIZE(x);
    return (PyTypeNum_ISINTEGER(typenum) || PyTypeNum_ISFLOAT(typenum)) &&
           PyArray_ISNOTSWAPPED(x) && (item == sizeof(float) || item == sizeof(double));
}

/* Any other type: copied by NumPy to `merged`, seen as (..., len, heads, d). */
static int merge_by_numpy(PyArrayObject *x, PyArrayObject *merged) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = PyArray_NDIM(x);
    memcpy(shape, PyArray_DIMS(x), (size_t)axes * sizeof *shape);
    shape[axes - 3] = PyArray_DIM(x, axes - 2);
    shape[axes - 2] = PyArray_DIM(x, axes - 3);
    PyArray_Dims dims = {shape, axes};
    PyObject *by_token = PyArray_SwapAxes(x, axes - 3, axes - 2);
    PyObject *to = PyArray_Newshape(merged, &dims, NPY_CORDER);
    const int failed = by_token == NULL || to == NULL
                           ? -1
                           : mha_copy_numbers((PyArrayObject *)to, (PyArrayObject *)by_token);
    Py_XDECREF(by_token);
    Py_XDECREF(to);
    return failed;
}

static int convert_merge(void *given, PyObject **arguments) {
    heads_call *call = given;
    npy_intp shape[NPY_MAXDIMS];
    call->x = shown_array(arguments[X]);
    if (call->x == NULL) {
        return -1;
    }
    PyArrayObject *x = call->x;
    const int axes = PyArray_NDIM(x);
    if (axes < 3 || axes > MHA_MOST_INPUT_AXES) {
        return mha_wrong_shape(x, "x", "(..., heads, len, d)");
    }
    memcpy(shape, PyArray_DIMS(x), (size_t)(axes - 3) * sizeof *shape);
    shape[axes - 3] = PyArray_DIM(x, axes - 2);
    shape[axes - 2] = PyArray_DIM(x, axes - 3) * PyArray_DIM(x, axes - 1);
    if (moves_as_real(x)) {
        call->result = mha_new_array(axes - 1, shape, PyArray_TYPE(x), "output");
        return call->result == NULL ? -1 : 0;
    }
    Py_INCREF(PyArray_DESCR(x));
    call->result = (PyArrayObject *)PyArray_Empty(axes - 1, shape, PyArray_DESCR(x), 0);
    if (call->result == NULL) {
        mha_name_missing_memory(shape, axes - 1, "output");
        return -1;
    }
    return merge_by_numpy(x, call->result);
}

static bool fill_merge(void *given) {
    heads_call *call = given;
    call->merge = (mha_merge_heads){
        .dtype = PyArray_ITEMSIZE(call->x) == sizeof(float) ? MHA_FLOAT32 : MHA_FLOAT64,
        .heads = mha_tensor_of(call->x),
        .merged = PyArray_DATA(call->result),
    };
    return moves_as_real(call->x) && PyArray_SIZE(call->result) > 0;
}

MHA_CORE_RUN(merge_heads_forward)

MHA_MODULE_FUNCTION(merge_heads, heads_call, .forms = FORMS, .count = NUM_MERGE_ARGUMENTS,
                    .by_position = NUM_MERGE_ARGUMENTS, .options = NO_OPTIONS,
                    .convert = convert_merge, .fill_pointers = fill_merge,
                    .run = core_merge_heads_forward, .problem = offsetof(heads_call, merge),
                    .results = results, .clear = clear)
