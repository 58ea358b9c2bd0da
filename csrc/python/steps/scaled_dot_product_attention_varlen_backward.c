/* scaled_dot_product_attention_varlen_backward: the gradients of step 3 over a ragged batch. */
#include "python/steps/scaled_dot_product_attention_varlen.h"

#define GRADIENTS(X)                                                                               \
    X(query, saved->inputs.query, mha_tensor_by_head)                                              \
    X(key, saved->inputs.key, mha_tensor_by_head)                                                  \
    X(value, saved->inputs.value, mha_tensor_by_head)                                              \
    X(alibi, saved->options.alibi, mha_by_head)                                                    \
    X(relative_bias, saved->options.relative_bias, mha_by_head)                                    \
    X(sinks, saved->options.sinks, mha_by_head)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct varlen_backward_call {
    backward_call back;
    varlen_call forward;
    mha_varlen_gradients problem;
} varlen_backward_call;

static int convert(void *given, PyObject **arguments) {
    varlen_backward_call *call = given;
    const varlen_call *saved = &call->forward;
    backward_call *back = &call->back;
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    const int typenum = saved->inputs.result_typenum;
    const score_shape *scores = &saved->inputs.scores;
    const npy_intp rows[] = {(npy_intp)scores->heads, (npy_intp)scores->query_len};
    PyArrayObject *output = saved->results.saved_output;
    back->grad_output = mha_convert_gradient(arguments + MHA_GRAD_OUTPUT, false, typenum,
                                             PyArray_DIMS(output), 3, "grad_output");
    if (back->grad_output == NULL ||
        mha_convert_grad_lse(arguments + MHA_GRAD_LSE, typenum, rows, 2, back) < 0 ||
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
        .all = {.attention = &forward->problem.all,
                .grad_output = mha_tensor_by_head(call->back.grad_output),
                .grad_lse = mha_data_or_null(call->back.grad_lse),
                GRADIENTS(MHA_GRADIENT_FIELD)},
    };
    return true;
}

MHA_BACKWARD_FUNCTION(scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen,
                      varlen_backward_call, problem, .convert = convert,
                      .fill_pointers = fill_pointers, .results = mha_pack_gradients)
