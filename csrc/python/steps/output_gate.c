/* output_gate and its backward pass: the gate before a layer's output projection as a step alone,
 * for ragged batches and for tasks. */
#include <stddef.h>

#include "python/call/gradient.h"

#define ARGUMENTS(X)                                                                               \
    X(merged, AS_REAL)                                                                             \
    X(logits, AS_REAL)                                                                             \
    X(num_heads, AS_INT)                                                                           \
    X(save, AS_FLAG)
MHA_ARGUMENTS(ARGUMENTS)

typedef struct gate_call {
    PyArrayObject *merged, *logits, *gated;
    mha_dtype dtype;
    int64_t num_heads;
    mha_output_gate gate; /* the problem */
} gate_call;

static void clear(void *given) {
    gate_call *call = given;
    Py_CLEAR(call->merged);
    Py_CLEAR(call->logits);
    Py_CLEAR(call->gated);
}

/* merged (..., num_heads * columns), logits (..., num_heads * columns) or (..., num_heads). */
static int check_shapes(PyArrayObject *const arrays[2], int64_t num_heads) {
    char wanted[MHA_SHAPE_TEXT];
    const int axes = PyArray_NDIM(arrays[0]);
    if (axes == 0 || PyArray_DIM(arrays[0], axes - 1) % num_heads != 0) {
        return mha_wrong_shape(arrays[0], "merged", "(..., %lld * value_head_dim)",
                               (long long)num_heads);
    }
    if (PyArray_NDIM(arrays[1]) != axes ||
        !PyArray_CompareLists(PyArray_DIMS(arrays[0]), PyArray_DIMS(arrays[1]), axes - 1) ||
        (PyArray_DIM(arrays[1], axes - 1) != PyArray_DIM(arrays[0], axes - 1) &&
         PyArray_DIM(arrays[1], axes - 1) != num_heads)) {
        return mha_wrong_shape(arrays[1], "logits", "%s, or num_heads (%lld) last",
                               mha_array_shape_text(arrays[0], wanted), (long long)num_heads);
    }
    return 0;
}

static int convert(void *given, PyObject **arguments) {
    static const char *const names[] = {"merged", "logits"};
    gate_call *call = given;
    PyArrayObject *arrays[2];
    if (mha_convert_size(arguments[ARG_num_heads], "num_heads", 1, &call->num_heads) < 0) {
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        arrays[i] = mha_array_argument(&arguments[ARG_merged + i], names[i]);
        if (arrays[i] == NULL) {
            return -1;
        }
    }
    if (mha_result_dtype(arrays, names, 2, &call->dtype) < 0 ||
        check_shapes(arrays, call->num_heads) < 0) {
        return -1;
    }
    call->merged = mha_as_contiguous_real(arrays[0], call->dtype, names[0]);
    call->logits =
        call->merged == NULL ? NULL : mha_as_contiguous_real(arrays[1], call->dtype, names[1]);
    if (call->logits == NULL) {
        return -1;
    }
    call->gated = mha_new_array(PyArray_NDIM(call->merged), PyArray_DIMS(call->merged),
                                mha_typenum(call->dtype), "gated");
    return call->gated == NULL ? -1 : 0;
}

static mha_output_gate see_gate(const gate_call *call) {
    const int last = PyArray_NDIM(call->merged) - 1;
    const int64_t width = PyArray_DIM(call->merged, last);
    return (mha_output_gate){
        .dtype = call->dtype,
        .rows = PyArray_MultiplyList(PyArray_DIMS(call->merged), last),
        .num_heads = call->num_heads,
        .columns = width / call->num_heads,
        .by_head = PyArray_DIM(call->logits, last) != width,
        .merged = PyArray_DATA(call->merged),
        .logits = PyArray_DATA(call->logits),
        .gated = mha_data_or_null(call->gated),
    };
}

static bool fill_pointers(void *given) {
    gate_call *call = given;
    call->gate = see_gate(call);
    return PyArray_SIZE(call->gated) > 0;
}

static PyObject *results(void *given) {
    gate_call *call = given;
    PyObject *gated = (PyObject *)call->gated;
    call->gated = NULL;
    return gated;
}

MHA_CORE_RUN(output_gate_forward)

MHA_MODULE_FUNCTION(output_gate, gate_call, MHA_FORWARD_FIELDS, .by_position = ARG_save,
                    .options = NO_OPTIONS, .save = ARG_save, .fill_pointers = fill_pointers,
                    .run = core_output_gate_forward, .problem = offsetof(gate_call, gate))

#define GRADIENTS(X)                                                                               \
    X(merged, saved->merged, mha_data_or_null)                                                     \
    X(logits, saved->logits, mha_data_or_null)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct gate_backward_call {
    backward_call back;
    gate_call forward;
    mha_output_gate_gradients problem;
} gate_backward_call;

static int convert_backward(void *given, PyObject **arguments) {
    gate_backward_call *call = given;
    const gate_call *saved = &call->forward;
    call->back.grad_output = mha_convert_gradient(
        arguments + MHA_GRAD_OUTPUT, true, mha_typenum(saved->dtype), PyArray_DIMS(saved->merged),
        PyArray_NDIM(saved->merged), "grad_output");
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    return call->back.grad_output == NULL
               ? -1
               : mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS,
                                   mha_new_contiguous_like, &call->back);
}

static bool fill_backward(void *given) {
    gate_backward_call *call = given;
    PyArrayObject *const *gradients = call->back.gradients;
    call->problem = (mha_output_gate_gradients){.forward = see_gate(&call->forward),
                                                .grad_gated = PyArray_DATA(call->back.grad_output),
                                                GRADIENTS(MHA_GRADIENT_FIELD)};
    return true;
}

MHA_CORE_RUN(output_gate_backward)

MHA_MODULE_FUNCTION(output_gate_backward, gate_backward_call,
                    MHA_BACKWARD_FIELDS(output_gate, gate_backward_call, MHA_BACKWARD_FORMS),
                    .convert = convert_backward, .fill_pointers = fill_backward,
                    .run = core_output_gate_backward,
                    .problem = offsetof(gate_backward_call, problem), .results = mha_pack_gradients)
