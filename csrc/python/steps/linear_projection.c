/* linear and its backward pass: steps 1 and 5 of the figure. */
#include <stddef.h>

#include "python/call/function.h"
#include "python/call/gradient.h"
#include "python/call/weight.h"

#define ARGUMENTS(X)                                                                               \
    X(x, AS_REAL)                                                                                  \
    X(weight, AS_REAL)                                                                             \
    X(bias, AS_REAL)                                                                               \
    X(save, AS_FLAG)
MHA_ARGUMENTS(ARGUMENTS)

typedef struct linear_call {
    PyArrayObject *x; /* in the element type, or halves */
    PyArrayObject *bias, *output;
    converted_weight weight;
    mha_dtype dtype;
    int result_typenum; /* halves where x is */
    int bias_typenum;   /* as it was given */
    bool x_transposed;
    int axes; /* of the output, and its shape: the caller may give the array another one */
    npy_intp shape[NPY_MAXDIMS];
    mha_linear_projection projection;
} linear_call;

static void clear(void *given) {
    linear_call *call = given;
    Py_CLEAR(call->x);
    Py_CLEAR(call->bias);
    Py_CLEAR(call->weight.owner);
    Py_CLEAR(call->output);
}

/* Whether a matrix that can be read as it is is the transpose of one with a contiguous last axis.
 */
static bool is_transposed(PyArrayObject *x, mha_dtype dtype) {
    const bool is_read = PyArray_TYPE(x) == mha_typenum(dtype) ||
                         (dtype == MHA_FLOAT32 && mha_storage_of(x) != MHA_AS_COMPUTED);
    return PyArray_NDIM(x) == 2 && is_read && PyArray_ISALIGNED(x) && PyArray_ISNOTSWAPPED(x) &&
           !mha_last_axis_is_contiguous(x) && PyArray_STRIDE(x, 0) == PyArray_ITEMSIZE(x);
}

static int convert(void *given, PyObject **arguments) {
    static const char *const names[] = {"x"};
    linear_call *call = given;
    PyArrayObject *x = mha_array_argument(&arguments[ARG_x], "x");
    if (x == NULL || mha_result_types(&x, names, 1, &call->dtype, &call->result_typenum) < 0) {
        return -1;
    }
    const int axes = PyArray_NDIM(x);
    if (axes < 1) {
        return mha_wrong_shape(x, "x", "(..., in)");
    }
    if (mha_convert_weight(arguments + ARG_weight, call->dtype, PyArray_DIM(x, axes - 1),
                           "the last axis of x", "weight", &call->weight) < 0 ||
        mha_optional_vector(arguments + ARG_bias, call->dtype, call->weight.out, "bias",
                            &call->bias) < 0) {
        return -1;
    }
    call->bias_typenum =
        call->bias == NULL ? 0 : mha_given_typenum(arguments[ARG_bias], call->bias);
    call->x_transposed = is_transposed(x, call->dtype);
    call->x = call->x_transposed ? (PyArrayObject *)Py_NewRef((PyObject *)x)
              : axes == 2        ? mha_as_stored(x, call->dtype, "x")
                                 : mha_as_contiguous_stored(x, call->dtype, "x");
    if (call->x == NULL) {
        return -1;
    }
    call->axes = axes;
    memcpy(call->shape, PyArray_DIMS(x), (size_t)axes * sizeof *call->shape);
    call->shape[axes - 1] = (npy_intp)call->weight.out;
    call->output = mha_new_array(axes, call->shape, call->result_typenum, "output");
    if (call->output == NULL) {
        return -1;
    }
    return arguments[ARG_save] == Py_True ? mha_refuse_packed(&call->weight, "weight") : 0;
}

static mha_linear_projection projection_of(const linear_call *call) {
    const int axes = PyArray_NDIM(call->x);
    const mha_storage x_storage = mha_storage_of(call->x);
    const mha_storage output_storage =
        call->output == NULL ? MHA_AS_COMPUTED : mha_storage_of(call->output);
    const mha_linear_projection projection = {
        .dtype = call->dtype,
        .rows = PyArray_MultiplyList(PyArray_DIMS(call->x), axes - 1),
        .x = PyArray_DATA(call->x),
        .x_stride = axes == 2 ? PyArray_STRIDE(call->x, call->x_transposed ? 1 : 0)
                              : call->weight.in * PyArray_ITEMSIZE(call->x),
        .x_storage = x_storage,
        .x_transposed = call->x_transposed,
        .weight = mha_fill_weight(&call->weight),
        .bias = mha_data_or_null(call->bias),
        .output = mha_data_or_null(call->output),
        .output_stride = call->weight.out * (int64_t)mha_storage_size(call->dtype, output_storage),
        .output_storage = output_storage,
    };
    return projection;
}

static bool fill_pointers(void *given) {
    linear_call *call = given;
    call->projection = projection_of(call);
    return PyArray_SIZE(call->output) > 0;
}

static PyObject *results(void *given) {
    linear_call *call = given;
    PyObject *output = (PyObject *)call->output;
    call->output = NULL;
    return output;
}

static mha_status workspace_of(const void *projection, int num_threads, size_t *bytes) {
    return mha_linear_projection_workspace(projection, 1, num_threads, bytes);
}

static mha_status forward(const void *projection, mha_execution *execution) {
    return mha_linear_projection_forward(projection, 1, execution);
}

/* Not MHA_FORWARD_FUNCTION: the core takes several projections at once. */
MHA_MODULE_FUNCTION(linear, linear_call, MHA_FORWARD_FIELDS, .by_position = ARG_save,
                    .options = NO_OPTIONS, .save = ARG_save, .fill_pointers = fill_pointers,
                    .workspace = workspace_of, .run = forward,
                    .problem = offsetof(linear_call, projection))

#define GRADIENTS(X)                                                                               \
    X(x, saved->x, mha_data_or_null)                                                               \
    X(weight, (PyArrayObject *)saved->weight.owner, mha_data_or_null)                              \
    X(bias, saved->bias, mha_data_or_null)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct linear_backward_call {
    backward_call back;
    linear_call forward;
    bool skips_rows;
    mha_linear_projection_gradients problem;
} linear_backward_call;

/* In place of grad_lse, whether rows without a gradient are left out of weight's: by a layer, whose
 * padding may be NaN. */
enum { SKIPS_ROWS = MHA_GRAD_LSE };
static const argument_form BACKWARD_FORMS[MHA_NUM_BACKWARD_ARGUMENTS] = {
    [MHA_SAVED] = {"saved", AS_IT_IS},
    [MHA_GRAD_OUTPUT] = {"grad_output", AS_REAL},
    [SKIPS_ROWS] = {"skips_rows", AS_IT_IS},
    [MHA_WANTED] = {"wanted", AS_IT_IS},
};

static int convert_backward(void *given, PyObject **arguments) {
    linear_backward_call *call = given;
    const linear_call *saved = &call->forward;
    call->back.grad_output =
        mha_convert_gradient(arguments + MHA_GRAD_OUTPUT, true, saved->result_typenum, saved->shape,
                             saved->axes, "grad_output");
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    if (call->back.grad_output == NULL ||
        mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS,
                          mha_new_contiguous_like, &call->back) < 0) {
        return -1;
    }
    mha_round_gradient(&call->back, GRAD_bias, saved->bias_typenum);
    call->skips_rows = arguments[SKIPS_ROWS] == Py_True;
    return 0;
}

static bool fill_backward(void *given) {
    linear_backward_call *call = given;
    linear_call *forward_call = &call->forward;
    PyArrayObject *const *gradients = call->back.gradients;
    forward_call->projection = projection_of(forward_call);
    call->problem = (mha_linear_projection_gradients){
        .projection = &forward_call->projection,
        .grad_output = PyArray_DATA(call->back.grad_output),
        .grad_output_stride =
            forward_call->weight.out * (int64_t)mha_dtype_size(forward_call->dtype),
        .skips_rows_without_gradient = call->skips_rows,
        GRADIENTS(MHA_GRADIENT_FIELD)};
    return true;
}

MHA_CORE_WORKSPACE(linear_projection_backward_workspace)
MHA_CORE_RUN(linear_projection_backward)

/* Not MHA_BACKWARD_FUNCTION: skips_rows has the place of grad_lse. */
MHA_MODULE_FUNCTION(linear_backward, linear_backward_call,
                    MHA_BACKWARD_FIELDS(linear, linear_backward_call, BACKWARD_FORMS),
                    .convert = convert_backward, .fill_pointers = fill_backward,
                    .workspace = core_linear_projection_backward_workspace,
                    .run = core_linear_projection_backward,
                    .problem = offsetof(linear_backward_call, problem),
                    .results = mha_pack_gradients)
