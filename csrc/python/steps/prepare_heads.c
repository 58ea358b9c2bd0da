/* prepare_heads and its backward pass: what a layer does to projected queries or keys before
 * attention, as a step alone, for rows that a cache takes in between and for those of a ragged
 * batch. */
#include "python/call/gradient.h"
#include "python/steps/preparation.h"

#define ARGUMENTS(X)                                                                               \
    X(x, AS_REAL)                                                                                  \
    X(num_heads, AS_INT)                                                                           \
    X(rotary, AS_IT_IS)                                                                            \
    X(positions, AS_ARRAY)                                                                         \
    X(norm, AS_REAL)                                                                               \
    X(norm_eps, AS_NUMBER)                                                                         \
    X(norm_offset, AS_NUMBER)                                                                      \
    X(save, AS_FLAG)
MHA_ARGUMENTS(ARGUMENTS)

typedef struct prepare_call {
    PyArrayObject *x, *norm, *positions, *output;
    converted_rotary rotary;
    mha_tensor rows; /* of the positions, once pointers are taken */
    mha_dtype dtype;
    int64_t num_heads, head_dim;
    double norm_eps, norm_offset;
    mha_head_preparation preparation;
} prepare_call;

static void clear(void *given) {
    prepare_call *call = given;
    Py_CLEAR(call->x);
    Py_CLEAR(call->norm);
    Py_CLEAR(call->positions);
    Py_CLEAR(call->output);
    mha_clear_rotary(&call->rotary);
}

static int convert_x(PyObject **arguments, prepare_call *call) {
    static const char *const names[] = {"x"};
    PyArrayObject *x = mha_array_argument(&arguments[ARG_x], "x");
    if (x == NULL || mha_result_dtype(&x, names, 1, &call->dtype) < 0 ||
        mha_convert_size(arguments[ARG_num_heads], "num_heads", 1, &call->num_heads) < 0) {
        return -1;
    }
    if (PyArray_NDIM(x) != 3 || PyArray_DIM(x, 2) % call->num_heads != 0) {
        return mha_wrong_shape(x, "x", "(batch, len, %lld * head_dim)", (long long)call->num_heads);
    }
    call->head_dim = PyArray_DIM(x, 2) / call->num_heads;
    call->x = mha_as_contiguous_real(x, call->dtype, "x");
    return call->x == NULL ? -1 : 0;
}

static int convert(void *given, PyObject **arguments) {
    prepare_call *call = given;
    if (convert_x(arguments, call) < 0 ||
        mha_convert_norm(arguments + ARG_norm, "norm", call->num_heads, call->head_dim, call->dtype,
                         &call->norm) < 0 ||
        mha_convert_norm_numbers(arguments[ARG_norm_eps], arguments[ARG_norm_offset],
                                 &call->norm_eps, &call->norm_offset) < 0 ||
        mha_convert_rotary(arguments[ARG_rotary], call->head_dim, &call->rotary) < 0) {
        return -1;
    }
    const npy_intp *shape = PyArray_DIMS(call->x);
    if (mha_convert_positions(arguments + ARG_positions, &call->rotary, shape, 1, shape[1],
                              "positions", &call->positions) < 0) {
        return -1;
    }
    call->output = mha_new_array(3, shape, mha_typenum(call->dtype), "output");
    return call->output == NULL ? -1 : 0;
}

static mha_head_preparation see_preparation(prepare_call *call) {
    const npy_intp *shape = PyArray_DIMS(call->x);
    call->rows = mha_fill_positions(call->positions, &call->rotary, shape, 1);
    return (mha_head_preparation){
        .dtype = call->dtype,
        .batch = shape[0],
        .length = shape[1],
        .num_heads = call->num_heads,
        .head_dim = call->head_dim,
        .x = PyArray_DATA(call->x),
        .norm = mha_fill_norm(call->norm, call->norm_eps, call->norm_offset),
        .rotary = mha_fill_rotary(&call->rotary),
        .positions = call->positions == NULL ? NULL : &call->rows,
        .output = mha_data_or_null(call->output),
    };
}

static bool fill_pointers(void *given) {
    prepare_call *call = given;
    call->preparation = see_preparation(call);
    return PyArray_SIZE(call->output) > 0;
}

static PyObject *results(void *given) {
    prepare_call *call = given;
    PyObject *output = (PyObject *)call->output;
    call->output = NULL;
    return output;
}

MHA_FORWARD_FUNCTION(prepare_heads, head_preparation, prepare_call, preparation,
                     .by_position = ARG_save, .options = NO_OPTIONS, .save = ARG_save,
                     .fill_pointers = fill_pointers)

#define GRADIENTS(X)                                                                               \
    X(x, saved->x, mha_data_or_null)                                                               \
    X(norm, saved->norm, mha_data_or_null)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct prepare_backward_call {
    backward_call back;
    prepare_call forward;
    mha_head_preparation_gradients problem;
} prepare_backward_call;

static int convert_backward(void *given, PyObject **arguments) {
    prepare_backward_call *call = given;
    const prepare_call *saved = &call->forward;
    call->back.grad_output =
        mha_convert_gradient(arguments + MHA_GRAD_OUTPUT, true, mha_typenum(saved->dtype),
                             PyArray_DIMS(saved->x), 3, "grad_output");
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    if (call->back.grad_output == NULL ||
        mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS,
                          mha_new_contiguous_like, &call->back) < 0) {
        return -1;
    }
    if (call->back.gradients[GRAD_x] == NULL) { /* through which that of the norm is computed */
        return mha_raise(PyExc_ValueError, "wanted: got none for x, wanted it among them");
    }
    return 0;
}

static bool fill_backward(void *given) {
    prepare_backward_call *call = given;
    PyArrayObject *const *gradients = call->back.gradients;
    call->problem =
        (mha_head_preparation_gradients){.forward = see_preparation(&call->forward),
                                         .grad_output = PyArray_DATA(call->back.grad_output),
                                         GRADIENTS(MHA_GRADIENT_FIELD)};
    return call->problem.grad_x != NULL;
}

MHA_BACKWARD_FUNCTION(prepare_heads, head_preparation, prepare_backward_call, problem,
                      .convert = convert_backward, .fill_pointers = fill_backward,
                      .results = mha_pack_gradients)
