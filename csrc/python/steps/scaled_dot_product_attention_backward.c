/* scaled_dot_product_attention_backward: the gradients of step 3 of the figure. */
#include <stddef.h>

#include "python/steps/scaled_dot_product_attention.h"

/* The gradient of bias= as the core sees it. */
#define OF_SCORES(gradient) mha_broadcast_to_scores(gradient, &saved->inputs.scores)
#define GRADIENTS(X)                                                                               \
    X(query, saved->inputs.query, mha_tensor_with_heads)                                           \
    X(key, saved->inputs.key, mha_tensor_with_heads)                                               \
    X(value, saved->inputs.value, mha_tensor_with_heads)                                           \
    X(bias, saved->options.bias, OF_SCORES)                                                        \
    X(alibi, saved->options.alibi, mha_by_head)                                                    \
    X(relative_bias, saved->options.relative_bias, mha_by_head)                                    \
    X(sinks, saved->options.sinks, mha_by_head)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct attention_backward_call {
    backward_call back;
    attention_call forward;
    mha_attention_gradients problem;
} attention_backward_call;

static int convert(void *given, PyObject **arguments) {
    attention_backward_call *call = given;
    const attention_call *saved = &call->forward;
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    if (mha_convert_grad_results(arguments, saved->inputs.result_typenum,
                                 saved->results.saved_output, &call->back) < 0 ||
        mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS, mha_new_dense_like,
                          &call->back) < 0) {
        return -1;
    }
    mha_clear_unwritten(&saved->inputs.scores, call->back.gradients + GRAD_bias,
                        NUM_GRADIENTS - GRAD_bias);
    return 0;
}

static bool fill_pointers(void *given) {
    attention_backward_call *call = given;
    const attention_call *saved = &call->forward;
    PyArrayObject *const *gradients = call->back.gradients;
    mha_fill_attention_call(&call->forward);
    call->problem =
        (mha_attention_gradients){.attention = &saved->attention,
                                  .grad_output = mha_tensor_with_heads(call->back.grad_output),
                                  .grad_lse = mha_data_or_null(call->back.grad_lse),
                                  GRADIENTS(MHA_GRADIENT_FIELD)};
    return true;
}

MHA_BACKWARD_FUNCTION(scaled_dot_product_attention, scaled_dot_product_attention,
                      attention_backward_call, problem, .convert = convert,
                      .fill_pointers = fill_pointers, .results = mha_pack_gradients)
