/* scaled_dot_product_attention_backward: the gradients of step 3 of the figure. */
#include <stddef.h>

#include "scaled_dot_product_attention.h"

enum { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, NUM_GRADIENTS };
static const char *const GRADIENTS[] = {"query", "key", "value", "bias"};

typedef struct attention_backward_call {
    PyObject *kept; /* owns what `forward` refers to */
    attention_call forward;
    PyArrayObject *grad_output, *grad_lse;
    PyArrayObject *gradients[NUM_GRADIENTS];
    mha_attention_gradients problem;
} attention_backward_call;

static void clear(void *given) {
    attention_backward_call *call = given;
    Py_CLEAR(call->kept);
    Py_CLEAR(call->grad_output);
    Py_CLEAR(call->grad_lse);
    mha_clear_gradients(call->gradients, NUM_GRADIENTS);
}

static int convert(void *given, PyObject **arguments) {
    attention_backward_call *call = given;
    const attention_call *kept = mha_kept_call(arguments[MHA_KEPT], MHA_KEPT_ATTENTION);
    if (kept == NULL) {
        return -1;
    }
    call->kept = Py_NewRef(arguments[MHA_KEPT]);
    call->forward = *kept;
    const mha_dtype dtype = kept->inputs.dtype;
    const npy_intp *shape = PyArray_DIMS(kept->kept_output);
    const int axes = PyArray_NDIM(kept->kept_output);
    call->grad_output =
        mha_convert_gradient(arguments[MHA_GRAD_OUTPUT], false, dtype, shape, axes, "grad_output");
    PyArrayObject *const like[] = {kept->inputs.query, kept->inputs.key, kept->inputs.value,
                                   kept->options.bias};
    if (call->grad_output == NULL ||
        mha_convert_grad_lse(arguments[MHA_GRAD_LSE], dtype, shape, axes - 1, &call->grad_lse) <
            0 ||
        mha_new_gradients(arguments[MHA_WANTED], GRADIENTS, like, NUM_GRADIENTS, mha_new_dense_like,
                          call->gradients) < 0) {
        return -1;
    }
    mha_clear_unwritten(&kept->inputs.scores, call->gradients[GRAD_BIAS]);
    return 0;
}

static mha_tensor gradient_with_heads(PyArrayObject *gradient) {
    const mha_tensor absent = {.data = NULL};
    return gradient == NULL ? absent : mha_tensor_with_heads(gradient);
}

static bool point(void *given) {
    attention_backward_call *call = given;
    attention_call *forward = &call->forward;
    PyArrayObject *bias = call->gradients[GRAD_BIAS];
    const mha_tensor absent = {.data = NULL};
    const attention_results results = {.output = forward->kept_output,
                                       .statistics = forward->results.statistics};
    forward->pointed = mha_point_options(&forward->options, &forward->inputs.scores);
    forward->attention = mha_point_attention(&forward->inputs, &results, &forward->pointed);
    const mha_attention_gradients problem = {
        .attention = &forward->attention,
        .grad_output = mha_tensor_with_heads(call->grad_output),
        .grad_lse = mha_data_or_null(call->grad_lse),
        .grad_query = gradient_with_heads(call->gradients[GRAD_QUERY]),
        .grad_key = gradient_with_heads(call->gradients[GRAD_KEY]),
        .grad_value = gradient_with_heads(call->gradients[GRAD_VALUE]),
        .grad_bias = bias == NULL ? absent : mha_broadcast_to_scores(bias, &forward->inputs.scores),
    };
    call->problem = problem;
    return true;
}

static PyObject *results(void *given) {
    attention_backward_call *call = given;
    return mha_pack_gradients(GRADIENTS, call->gradients, NUM_GRADIENTS);
}

MHA_CORE_WORKSPACE(scaled_dot_product_attention_backward_workspace, mha_attention_gradients)
MHA_CORE_RUN(scaled_dot_product_attention_backward, mha_attention_gradients)

MHA_MODULE_FUNCTION(scaled_dot_product_attention_backward, attention_backward_call,
                    MHA_BACKWARD_ARGUMENTS, .convert = convert, .point = point,
                    .workspace = core_scaled_dot_product_attention_backward_workspace,
                    .forward = core_scaled_dot_product_attention_backward,
                    .problem = offsetof(attention_backward_call, problem), .results = results,
                    .clear = clear)
