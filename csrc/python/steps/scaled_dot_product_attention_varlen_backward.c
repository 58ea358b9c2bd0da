/* scaled_dot_product_attention_varlen_backward: the gradients of step 3 over a ragged batch. */
#include <stddef.h>

#include "python/steps/scaled_dot_product_attention_varlen.h"

#define GRADIENTS(X)                                                                               \
    X(query)                                                                                       \
    X(key)                                                                                         \
    X(value)                                                                                       \
    X(alibi)                                                                                       \
    X(relative_bias)                                                                               \
    X(sinks)
enum gradient { GRADIENTS(MHA_GRADIENT_PLACE) NUM_GRADIENTS };
static const char *const NAMES[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_NAME)};

typedef struct varlen_backward_call {
    backward_call back;
    varlen_call forward;
    mha_varlen_gradients problem;
} varlen_backward_call;

static int convert(void *given, PyObject **arguments) {
    varlen_backward_call *call = given;
    const varlen_call *saved = &call->forward;
    backward_call *back = &call->back;
    if (mha_begin_backward(arguments[MHA_KEPT], MHA_KEPT_VARLEN, &call->forward,
                           sizeof call->forward, back) < 0) {
        return -1;
    }
    PyArrayObject *const like[NUM_GRADIENTS] = {
        [GRAD_query] = saved->inputs.query,
        [GRAD_key] = saved->inputs.key,
        [GRAD_value] = saved->inputs.value,
        [GRAD_alibi] = saved->options.alibi,
        [GRAD_relative_bias] = saved->options.relative_bias,
        [GRAD_sinks] = saved->options.sinks,
    };
    const int typenum = saved->inputs.result_typenum;
    const score_shape *scores = &saved->inputs.scores;
    const npy_intp rows[] = {(npy_intp)scores->heads, (npy_intp)scores->query_len};
    PyArrayObject *output = saved->results.saved_output;
    back->grad_output = mha_convert_gradient(arguments[MHA_GRAD_OUTPUT], false, typenum,
                                             PyArray_DIMS(output), 3, "grad_output");
    if (back->grad_output == NULL ||
        mha_convert_grad_lse(arguments[MHA_GRAD_LSE], typenum, rows, 2, back) < 0 ||
        mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS, mha_new_dense_like,
                          back) < 0) {
        return -1;
    }
    mha_clear_unwritten(scores, back->gradients + GRAD_alibi, NUM_GRADIENTS - GRAD_alibi);
    return 0;
}

static bool fill_pointers(void *given) {
    varlen_backward_call *call = given;
    varlen_call *forward = &call->forward;
    PyArrayObject *const *gradients = call->back.gradients;
    mha_fill_varlen_call(forward);
    call->problem = (mha_varlen_gradients){
        .varlen = &forward->problem,
        .all =
            {
                .attention = &forward->problem.all,
                .grad_output = mha_tensor_by_head(call->back.grad_output),
                .grad_lse = mha_data_or_null(call->back.grad_lse),
                .grad_query = mha_tensor_by_head(gradients[GRAD_query]),
                .grad_key = mha_tensor_by_head(gradients[GRAD_key]),
                .grad_value = mha_tensor_by_head(gradients[GRAD_value]),
                .grad_alibi = mha_by_head(gradients[GRAD_alibi]),
                .grad_relative_bias = mha_by_head(gradients[GRAD_relative_bias]),
                .grad_sinks = mha_by_head(gradients[GRAD_sinks]),
            },
    };
    return true;
}

MHA_CORE_WORKSPACE(scaled_dot_product_attention_varlen_backward_workspace, mha_varlen_gradients)
MHA_CORE_RUN(scaled_dot_product_attention_varlen_backward, mha_varlen_gradients)

MHA_MODULE_FUNCTION(scaled_dot_product_attention_varlen_backward, varlen_backward_call,
                    MHA_BACKWARD_ARGUMENTS, .convert = convert, .fill_pointers = fill_pointers,
                    .workspace = core_scaled_dot_product_attention_varlen_backward_workspace,
                    .forward = core_scaled_dot_product_attention_varlen_backward,
                    .problem = offsetof(varlen_backward_call, problem),
                    .results = mha_pack_gradients, .clear = mha_clear_backward)
