/* scaled_dot_product_attention_backward: the gradients of step 3 of the figure. */
#include <stddef.h>

#include "python/steps/scaled_dot_product_attention.h"

enum gradient {
    GRAD_QUERY,
    GRAD_KEY,
    GRAD_VALUE,
    GRAD_BIAS,
    GRAD_ALIBI,
    GRAD_RELATIVE_BIAS,
    GRAD_SINKS,
    NUM_GRADIENTS
};
static const char *const GRADIENTS[NUM_GRADIENTS] = {
    "query", "key", "value", "bias", "alibi", "relative_bias", "sinks",
};

typedef struct attention_backward_call {
    backward_call back;
    attention_call forward;
    mha_attention_gradients problem;
} attention_backward_call;

static int convert(void *given, PyObject **arguments) {
    attention_backward_call *call = given;
    const attention_call *saved = &call->forward;
    if (mha_begin_backward(arguments[MHA_KEPT], MHA_KEPT_ATTENTION, &call->forward,
                           sizeof call->forward, &call->back) < 0) {
        return -1;
    }
    PyArrayObject *const like[NUM_GRADIENTS] = {
        [GRAD_QUERY] = saved->inputs.query,  [GRAD_KEY] = saved->inputs.key,
        [GRAD_VALUE] = saved->inputs.value,  [GRAD_BIAS] = saved->options.bias,
        [GRAD_ALIBI] = saved->options.alibi, [GRAD_RELATIVE_BIAS] = saved->options.relative_bias,
        [GRAD_SINKS] = saved->options.sinks,
    };
    if (mha_convert_grad_results(arguments, saved->inputs.result_typenum,
                                 saved->results.saved_output, &call->back) < 0 ||
        mha_new_gradients(arguments[MHA_WANTED], GRADIENTS, like, NUM_GRADIENTS, mha_new_dense_like,
                          &call->back) < 0) {
        return -1;
    }
    mha_clear_unwritten(&saved->inputs.scores, call->back.gradients + GRAD_BIAS,
                        NUM_GRADIENTS - GRAD_BIAS);
    return 0;
}

static bool fill_pointers(void *given) {
    attention_backward_call *call = given;
    attention_call *forward = &call->forward;
    PyArrayObject *const *gradients = call->back.gradients;
    mha_fill_attention_call(forward);
    call->problem = (mha_attention_gradients){
        .attention = &forward->attention,
        .grad_output = mha_tensor_with_heads(call->back.grad_output),
        .grad_lse = mha_data_or_null(call->back.grad_lse),
        .grad_query = mha_tensor_with_heads(gradients[GRAD_QUERY]),
        .grad_key = mha_tensor_with_heads(gradients[GRAD_KEY]),
        .grad_value = mha_tensor_with_heads(gradients[GRAD_VALUE]),
        .grad_bias = mha_broadcast_to_scores(gradients[GRAD_BIAS], &forward->inputs.scores),
        .grad_alibi = mha_by_head(gradients[GRAD_ALIBI]),
        .grad_relative_bias = mha_by_head(gradients[GRAD_RELATIVE_BIAS]),
        .grad_sinks = mha_by_head(gradients[GRAD_SINKS]),
    };
    return true;
}

MHA_CORE_WORKSPACE(scaled_dot_product_attention_backward_workspace, mha_attention_gradients)
MHA_CORE_RUN(scaled_dot_product_attention_backward, mha_attention_gradients)

MHA_MODULE_FUNCTION(scaled_dot_product_attention_backward, attention_backward_call,
                    MHA_BACKWARD_ARGUMENTS, .convert = convert, .fill_pointers = fill_pointers,
                    .workspace = core_scaled_dot_product_attention_backward_workspace,
                    .forward = core_scaled_dot_product_attention_backward,
                    .problem = offsetof(attention_backward_call, problem),
                    .results = mha_pack_gradients, .clear = mha_clear_backward)
