/* multi_head_attention_backward: the gradients of the whole figure. */
#include "python/steps/multi_head_attention.h"

/* The gradient of bias= as the core sees it. */
#define OF_SCORES(gradient) mha_broadcast_to_scores(gradient, &saved->scores)
#define GRADIENTS(X)                                                                               \
    X(query, saved->query, mha_data_or_null)                                                       \
    X(key, saved->key_is_query ? NULL : saved->key, mha_data_or_null)                              \
    X(value, saved->value_is_key ? NULL : saved->value, mha_data_or_null)                          \
    X(W_q, (PyArrayObject *)saved->W_q.owner, mha_data_or_null)                                    \
    X(W_k, (PyArrayObject *)saved->W_k.owner, mha_data_or_null)                                    \
    X(W_v, (PyArrayObject *)saved->W_v.owner, mha_data_or_null)                                    \
    X(W_o, (PyArrayObject *)saved->W_o.owner, mha_data_or_null)                                    \
    X(W_g, (PyArrayObject *)saved->W_g.owner, mha_data_or_null)                                    \
    X(b_q, saved->b_q, mha_data_or_null)                                                           \
    X(b_k, saved->b_k, mha_data_or_null)                                                           \
    X(b_v, saved->b_v, mha_data_or_null)                                                           \
    X(b_o, saved->b_o, mha_data_or_null)                                                           \
    X(b_g, saved->b_g, mha_data_or_null)                                                           \
    X(q_norm, saved->preparation.q_norm, mha_data_or_null)                                         \
    X(k_norm, saved->preparation.k_norm, mha_data_or_null)                                         \
    X(head_gate, saved->head_gate, mha_data_or_null)                                               \
    X(bias, saved->options.bias, OF_SCORES)                                                        \
    X(alibi, saved->options.alibi, mha_by_head)                                                    \
    X(relative_bias, saved->options.relative_bias, mha_by_head)                                    \
    X(sinks, saved->options.sinks, mha_by_head)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct layer_backward_call {
    backward_call back;
    layer_call forward;
    mha_multi_head_attention_gradients problem;
} layer_backward_call;

static int convert_results(PyObject **arguments, layer_backward_call *call) {
    const layer_call *forward = &call->forward;
    npy_intp shape[NPY_MAXDIMS];
    const int axes = forward->scores.batch_axes;
    memcpy(shape, forward->scores.batch, (size_t)axes * sizeof *shape);
    shape[axes] = (npy_intp)forward->scores.query_len;
    shape[axes + 1] = (npy_intp)forward->W_o.out;
    call->back.grad_output = mha_convert_gradient(
        arguments + MHA_GRAD_OUTPUT, true, forward->result_typenum, shape, axes + 2, "grad_output");
    shape[axes] = (npy_intp)forward->scores.heads;
    shape[axes + 1] = (npy_intp)forward->scores.query_len;
    return call->back.grad_output == NULL
               ? -1
               : mha_convert_grad_lse(arguments + MHA_GRAD_LSE, forward->result_typenum, shape,
                                      axes + 2, &call->back);
}

static int convert(void *given, PyObject **arguments) {
    layer_backward_call *call = given;
    const layer_call *saved = &call->forward;
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    if (convert_results(arguments, call) < 0 ||
        mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS,
                          mha_new_contiguous_like, &call->back) < 0) {
        return -1;
    }
    static const enum gradient sources[NUM_VECTORS] = {GRAD_b_q, GRAD_b_k, GRAD_b_v,
                                                       GRAD_b_o, GRAD_b_g, GRAD_head_gate};
    for (int i = 0; i < NUM_VECTORS; i++) {
        mha_round_gradient(&call->back, sources[i], saved->typenums[i]);
    }
    mha_clear_unwritten(&saved->scores, call->back.gradients + GRAD_bias,
                        NUM_GRADIENTS - GRAD_bias);
    return 0;
}

static bool fill_pointers(void *given) {
    layer_backward_call *call = given;
    const layer_call *saved = &call->forward;
    PyArrayObject *const *gradients = call->back.gradients;
    mha_fill_layer(&call->forward);
    call->problem =
        (mha_multi_head_attention_gradients){.layer = &saved->layer,
                                             .grad_output = PyArray_DATA(call->back.grad_output),
                                             .grad_lse = mha_data_or_null(call->back.grad_lse),
                                             .key_is_query = saved->key_is_query,
                                             .value_is_key = saved->value_is_key,
                                             GRADIENTS(MHA_GRADIENT_FIELD)};
    return true;
}

/* The gradient of a bias that came with a batch axis of 1, shaped as it was. */
static int add_batch_axis(PyArrayObject **bias) {
    npy_intp shape[NPY_MAXDIMS] = {1};
    PyArray_Dims dims = {shape, PyArray_NDIM(*bias) + 1};
    memcpy(shape + 1, PyArray_DIMS(*bias), (size_t)PyArray_NDIM(*bias) * sizeof *shape);
    PyObject *shaped = PyArray_Newshape(*bias, &dims, NPY_CORDER);
    if (shaped == NULL) {
        return -1;
    }
    Py_SETREF(*bias, (PyArrayObject *)shaped);
    return 0;
}

static PyObject *results(void *given) {
    layer_backward_call *call = given;
    PyArrayObject **bias = &call->back.gradients[GRAD_bias];
    if (call->forward.bias_has_batch_of_one && *bias != NULL && add_batch_axis(bias) < 0) {
        return NULL;
    }
    return mha_pack_gradients(call);
}

MHA_BACKWARD_FUNCTION(multi_head_attention, multi_head_attention, layer_backward_call, problem,
                      .convert = convert, .fill_pointers = fill_pointers, .results = results)
