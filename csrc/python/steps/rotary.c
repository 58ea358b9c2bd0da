/* rotary and its backward pass, and what the layer shares with them: the record of mha.Rotary, and
 * positions. */
#include "python/steps/rotary.h"

#include "python/call/gradient.h"
#include "python/convert/pieces.h"

/* An axis a pair, each one of position_axes; none where there is one. */
static int check_axes(PyObject *axes, int64_t pairs, int64_t position_axes) {
    const Py_ssize_t wanted = position_axes == 1 ? 0 : (Py_ssize_t)(pairs * sizeof(int64_t));
    bool fits = position_axes >= 1 && PyBytes_GET_SIZE(axes) == wanted;
    for (Py_ssize_t at = 0; fits && at < wanted; at += (Py_ssize_t)sizeof(int64_t)) {
        int64_t axis;
        memcpy(&axis, PyBytes_AS_STRING(axes) + at, sizeof axis);
        fits = axis >= 0 && axis < position_axes;
    }
    if (!fits) {
        return mha_raise(PyExc_ValueError, "rotary: got axes that are no axis of positions a pair,"
                                           " wanted those of an mha.Rotary");
    }
    return 0;
}

int mha_convert_rotary(PyObject *record, int64_t head_dim, converted_rotary *converted) {
    PyObject *frequencies, *axes;
    int interleaved;
    long long position_axes;
    mha_rotary *rotary = &converted->rotary;
    if (record == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(record)) {
        return mha_wrong_type(record, "rotary", "an mha.Rotary");
    }
    if (!PyArg_ParseTuple(record,
                          "SpdSL;rotary: wanted (frequencies, interleaved, magnitude, axes,"
                          " position_axes)",
                          &frequencies, &interleaved, &rotary->magnitude, &axes, &position_axes)) {
        return -1;
    }
    rotary->dims = 2 * (PyBytes_GET_SIZE(frequencies) / (Py_ssize_t)sizeof(double));
    rotary->interleaved = interleaved != 0;
    if (rotary->dims > head_dim) {
        return mha_raise(PyExc_ValueError, "rotary: got %lld dims, wanted at most head_dim (%lld)",
                         (long long)rotary->dims, (long long)head_dim);
    }
    if (check_axes(axes, rotary->dims / 2, position_axes) < 0) {
        return -1;
    }
    converted->position_axes = position_axes;
    converted->frequencies = Py_NewRef(frequencies);
    converted->axes = Py_NewRef(axes);
    return 0;
}

void mha_clear_rotary(converted_rotary *converted) {
    Py_CLEAR(converted->frequencies);
    Py_CLEAR(converted->axes);
}

const mha_rotary *mha_fill_rotary(converted_rotary *converted) {
    if (converted->frequencies == NULL) {
        return NULL;
    }
    converted->rotary.frequencies = (const void *)PyBytes_AS_STRING(converted->frequencies);
    if (converted->position_axes > 1) {
        converted->rotary.axes = (const void *)PyBytes_AS_STRING(converted->axes);
    }
    return &converted->rotary;
}

/* Refuses numbers of uint64 that int64 does not have. */
static int check_range(PyArrayObject *positions, PyArrayObject *int64_positions, const char *name) {
    const bool may_wrap =
        PyArray_TYPE(positions) == NPY_UINT64 || PyArray_TYPE(positions) == NPY_ULONGLONG;
    if (!may_wrap) {
        return 0;
    }
    const int64_t *values = PyArray_DATA(int64_positions);
    for (npy_intp i = 0; i < PyArray_SIZE(int64_positions); i++) {
        if (values[i] < 0) {
            return mha_raise(PyExc_ValueError, "%s: got %llu, wanted at most %lld", name,
                             (unsigned long long)values[i], (long long)INT64_MAX);
        }
    }
    return 0;
}

static PyArrayObject *as_int64(PyArrayObject *array, const char *name) {
    if (!PyArray_ISINTEGER(array) && PyArray_SIZE(array) > 0) {
        mha_wrong_dtype(array, name, "integers");
        return NULL;
    }
    PyArrayObject *integers =
        mha_cast(array, PyArray_DescrFromType(NPY_INT64), NPY_ARRAY_CARRAY_RO, name);
    if (integers != NULL && check_range(array, integers, name) < 0) {
        Py_CLEAR(integers);
    }
    return integers;
}

/* Whether the shape is (length,) or batch + (length,), behind an axis of `more` where that is
 * not 0. */
static bool fits_rows(PyArrayObject *array, int64_t more, const npy_intp *shape, int batch_axes) {
    const npy_intp *got = PyArray_DIMS(array);
    int axes = PyArray_NDIM(array);
    if (more > 0) {
        if (axes == 0 || *got++ != more) {
            return false;
        }
        axes--;
    }
    return (axes == 1 || axes == batch_axes + 1) &&
           PyArray_CompareLists(got, shape + batch_axes + 1 - axes, axes);
}

static int wrong_positions(PyArrayObject *array, int64_t more, npy_intp *shape, int batch_axes,
                           const char *name) {
    char alone[MHA_SHAPE_TEXT], whole[MHA_SHAPE_TEXT];
    mha_shape_text(shape + batch_axes, 1, alone);
    mha_shape_text(shape, batch_axes + 1, whole);
    const char *or = batch_axes > 0 ? " or " : "", *batched = batch_axes > 0 ? whole : "";
    return more == 0
               ? mha_wrong_shape(array, name, "%s%s%s", alone, or, batched)
               : mha_wrong_shape(
                     array, name,
                     "%s%s%s, or the %lld position axes of the rotary's sections in front of that",
                     alone, or, batched, (long long)more);
}

int mha_convert_positions(PyObject **argument, const converted_rotary *rotary,
                          const npy_intp *batch, int batch_axes, int64_t length, const char *name,
                          PyArrayObject **positions) {
    npy_intp shape[NPY_MAXDIMS];
    char got[MHA_SHAPE_TEXT], whole[MHA_SHAPE_TEXT];
    if (*argument == Py_None) {
        return 0;
    }
    PyArrayObject *array = mha_array_argument(argument, name);
    if (array == NULL) {
        return -1;
    }
    const int64_t more = rotary->position_axes > 1 ? rotary->position_axes : 0;
    memcpy(shape, batch, (size_t)batch_axes * sizeof *shape);
    shape[batch_axes] = (npy_intp)length;
    const bool alike = fits_rows(array, 0, shape, batch_axes);
    const bool by_axis = more > 0 && fits_rows(array, more, shape, batch_axes);
    if (alike && by_axis) {
        mha_shape_text(shape, batch_axes + 1, whole);
        return mha_raise(
            PyExc_ValueError,
            "%s: got shape %s, which may be %lld position axes or %lld sequences, wanted"
            " all axes: %lld in front of %s",
            name, mha_array_shape_text(array, got), (long long)more, (long long)more,
            (long long)more, whole);
    }
    if (!alike && !by_axis) {
        return wrong_positions(array, more, shape, batch_axes, name);
    }
    *positions = as_int64(array, name);
    return *positions == NULL ? -1 : 0;
}

mha_tensor mha_fill_positions(PyArrayObject *positions, const converted_rotary *rotary,
                              const npy_intp *batch, int batch_axes) {
    mha_tensor tensor = {.data = NULL};
    if (positions == NULL) {
        return tensor;
    }
    const int last = PyArray_NDIM(positions) - 1;
    const npy_intp more = (npy_intp)rotary->position_axes;
    /* Both readings of two axes were refused. */
    const bool by_axis =
        more > 1 && (last == batch_axes + 1 || (last == 1 && PyArray_DIM(positions, 0) == more));
    tensor.data = PyArray_DATA(positions);
    tensor.axes = batch_axes + 1;
    for (int axis = 0; axis < batch_axes; axis++) {
        tensor.shape[axis] = batch[axis];
        tensor.strides[axis] = last == by_axis ? 0 : PyArray_STRIDE(positions, by_axis + axis);
    }
    tensor.shape[batch_axes] = PyArray_DIM(positions, last);
    tensor.strides[batch_axes] = PyArray_STRIDE(positions, last);
    if (more > 1) {
        tensor.shape[tensor.axes] = more;
        tensor.strides[tensor.axes] = by_axis ? PyArray_STRIDE(positions, 0) : 0;
        tensor.axes++;
    }
    return tensor;
}

#define ARGUMENTS(X)                                                                               \
    X(x, AS_REAL)                                                                                  \
    X(rotary, AS_IT_IS)                                                                            \
    X(positions, AS_ARRAY)                                                                         \
    X(save, AS_FLAG)
MHA_ARGUMENTS(ARGUMENTS)

/* What comes in is only referred to for its shape once the call is saved. */
typedef struct rotary_call {
    PyArrayObject *x, *positions, *output;
    converted_rotary rotary;
    mha_dtype dtype;
    int result_typenum; /* halves where x is */
    int axes, batch_axes;
    npy_intp shape[NPY_MAXDIMS]; /* of x; its first axes are those of the batch */
    mha_rotation rotation;
} rotary_call;

static void clear(void *given) {
    rotary_call *call = given;
    Py_CLEAR(call->x);
    Py_CLEAR(call->positions);
    Py_CLEAR(call->output);
    mha_clear_rotary(&call->rotary);
}

static int convert(void *given, PyObject **arguments) {
    static const char *const names[] = {"x"};
    rotary_call *call = given;
    PyArrayObject *x = mha_array_argument(&arguments[ARG_x], "x");
    if (x == NULL || mha_result_types(&x, names, 1, &call->dtype, &call->result_typenum) < 0) {
        return -1;
    }
    const int axes = PyArray_NDIM(x);
    if (axes < 2 || axes > MHA_MOST_INPUT_AXES) {
        return mha_wrong_shape(x, "x",
                               "2-D (len, dim), 3-D (batch, len, dim) or (..., heads, len, dim)");
    }
    call->axes = axes;
    call->batch_axes = axes >= 4 ? axes - 3 : axes - 2;
    memcpy(call->shape, PyArray_DIMS(x), (size_t)axes * sizeof *call->shape);
    if (mha_convert_rotary(arguments[ARG_rotary], call->shape[axes - 1], &call->rotary) < 0) {
        return -1;
    }
    if (call->rotary.frequencies == NULL) {
        return mha_raise(PyExc_TypeError, "rotary: got None, wanted an mha.Rotary");
    }
    if (mha_convert_positions(arguments + ARG_positions, &call->rotary, call->shape,
                              call->batch_axes, call->shape[axes - 2], "positions",
                              &call->positions) < 0) {
        return -1;
    }
    call->x = mha_as_stored(x, call->dtype, "x");
    if (call->x == NULL) {
        return -1;
    }
    call->output = mha_new_array(axes, call->shape, call->result_typenum, "output");
    return call->output == NULL ? -1 : 0;
}

static void fill_rotation(rotary_call *call, PyArrayObject *x, PyArrayObject *output) {
    call->rotation = (mha_rotation){
        .dtype = call->dtype,
        .rotary = mha_fill_rotary(&call->rotary),
        .x = mha_tensor_with_heads(x),
        .positions =
            mha_fill_positions(call->positions, &call->rotary, call->shape, call->batch_axes),
        .output = PyArray_DATA(output),
        .output_storage = mha_storage_of(output),
    };
}

static bool fill_pointers(void *given) {
    rotary_call *call = given;
    fill_rotation(call, call->x, call->output);
    return PyArray_SIZE(call->output) > 0;
}

/* The gradient does not depend on x. */
static PyObject *results(void *given) {
    rotary_call *call = given;
    PyObject *output = (PyObject *)call->output;
    call->output = NULL;
    Py_CLEAR(call->x);
    return output;
}

MHA_FORWARD_FUNCTION(rotary, rotary, rotary_call, rotation, .by_position = ARG_save,
                     .options = NO_OPTIONS, .save = ARG_save, .fill_pointers = fill_pointers)

typedef struct rotary_backward_call {
    backward_call back;
    rotary_call forward;
} rotary_backward_call;

static int convert_backward(void *given, PyObject **arguments) {
    static const char *const names[] = {"x"};
    rotary_backward_call *call = given;
    const rotary_call *saved = &call->forward;
    call->back.grad_output =
        mha_convert_gradient(arguments + MHA_GRAD_OUTPUT, false, saved->result_typenum,
                             saved->shape, saved->axes, "grad_output");
    if (call->back.grad_output == NULL ||
        mha_new_gradients(arguments[MHA_WANTED], names, &call->back.grad_output, 1,
                          mha_new_contiguous_like, &call->back) < 0) {
        return -1;
    }
    mha_round_gradient(&call->back, 0, saved->result_typenum);
    return 0;
}

static bool fill_backward(void *given) {
    rotary_backward_call *call = given;
    PyArrayObject *grad_x = call->back.gradients[0];
    if (grad_x == NULL || PyArray_SIZE(grad_x) == 0) {
        return false;
    }
    fill_rotation(&call->forward, call->back.grad_output, grad_x);
    return true;
}

MHA_BACKWARD_FUNCTION(rotary, rotary, rotary_backward_call, forward.rotation,
                      .convert = convert_backward, .fill_pointers = fill_backward,
                      .results = mha_pack_gradients)
