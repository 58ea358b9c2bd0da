/* additive_attention and its backward pass: scores w_v . tanh(query W_q + key W_k). */
#include "python/call/gradient.h"
#include "python/call/inputs.h"
#include "python/call/weight.h"

#define ARGUMENTS(X)                                                                               \
    X(query, AS_REAL)                                                                              \
    X(key, AS_REAL)                                                                                \
    X(value, AS_REAL)                                                                              \
    X(W_q, AS_REAL)                                                                                \
    X(W_k, AS_REAL)                                                                                \
    X(w_v, AS_REAL)                                                                                \
    MHA_OPTIONS(X)                                                                                 \
    X(return_weights, AS_FLAG)                                                                     \
    X(save, AS_FLAG)
MHA_ARGUMENTS(ARGUMENTS)

typedef struct additive_call {
    attention_inputs inputs;
    converted_weight W_q, W_k;
    PyArrayObject *w_v;
    int w_v_typenum; /* as it was given */
    converted_options options;
    attention_results results;
    /* For the backward pass, or NULL: (..., len, hidden). */
    PyArrayObject *projected_query, *projected_key;
    mha_additive_attention additive; /* the problem */
} additive_call;

static void clear(void *given) {
    additive_call *call = given;
    mha_clear_inputs(&call->inputs);
    mha_clear_options(&call->options);
    mha_clear_results(&call->results);
    Py_CLEAR(call->W_q.owner);
    Py_CLEAR(call->W_k.owner);
    Py_CLEAR(call->w_v);
    Py_CLEAR(call->projected_query);
    Py_CLEAR(call->projected_key);
}

static int convert_weights(PyObject **arguments, additive_call *call) {
    const attention_inputs *inputs = &call->inputs;
    const int axes = PyArray_NDIM(inputs->query);
    if (mha_convert_weight(arguments + ARG_W_q, inputs->dtype, PyArray_DIM(inputs->query, axes - 1),
                           "the last axis of query", "W_q", &call->W_q) < 0 ||
        mha_convert_weight(arguments + ARG_W_k, inputs->dtype, PyArray_DIM(inputs->key, axes - 1),
                           "the last axis of key", "W_k", &call->W_k) < 0 ||
        mha_check_equal(call->W_k.out, call->W_q.out,
                        "W_k: got %lld columns, wanted %lld as W_q has") < 0) {
        return -1;
    }
    if (arguments[ARG_w_v] == Py_None) {
        return mha_raise(PyExc_TypeError, "w_v: got None, wanted an array");
    }
    if (mha_optional_vector(arguments + ARG_w_v, inputs->dtype, call->W_q.out, "w_v", &call->w_v) <
        0) {
        return -1;
    }
    call->w_v_typenum = mha_given_typenum(arguments[ARG_w_v], call->w_v);
    return 0;
}

static int make_contiguous(PyArrayObject **array, mha_dtype dtype, const char *name) {
    PyArrayObject *contiguous = mha_as_contiguous_stored(*array, dtype, name);
    if (contiguous == NULL) {
        return -1;
    }
    Py_SETREF(*array, contiguous);
    return 0;
}

static PyArrayObject *new_projected(PyArrayObject *rows, int64_t hidden, mha_dtype dtype,
                                    const char *name) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = PyArray_NDIM(rows);
    memcpy(shape, PyArray_DIMS(rows), (size_t)axes * sizeof *shape);
    shape[axes - 1] = (npy_intp)hidden;
    return mha_new_array(axes, shape, mha_typenum(dtype), name);
}

static int new_saved_steps(additive_call *call) {
    const attention_inputs *inputs = &call->inputs;
    if (mha_refuse_packed(&call->W_q, "W_q") < 0 || mha_refuse_packed(&call->W_k, "W_k") < 0) {
        return -1;
    }
    call->projected_query =
        new_projected(inputs->query, call->W_q.out, inputs->dtype, "projected query");
    if (call->projected_query == NULL) {
        return -1;
    }
    call->projected_key = new_projected(inputs->key, call->W_k.out, inputs->dtype, "projected key");
    if (call->projected_key == NULL) {
        return -1;
    }
    call->results.saved_output = mha_new_contiguous_like(call->results.output, "output");
    if (call->results.saved_output == NULL) {
        return -1;
    }
    call->results.statistics = mha_new_statistics(inputs->dtype, &inputs->scores);
    return call->results.statistics == NULL ? -1 : 0;
}

static int convert(void *given, PyObject **arguments) {
    additive_call *call = given;
    attention_inputs *inputs = &call->inputs;
    attention_results *results = &call->results;
    npy_intp shape[NPY_MAXDIMS];
    if (mha_convert_inputs(arguments + ARG_query, true, inputs) < 0 ||
        convert_weights(arguments, call) < 0 ||
        make_contiguous(&inputs->query, inputs->dtype, "query") < 0 ||
        make_contiguous(&inputs->key, inputs->dtype, "key") < 0 ||
        mha_convert_options(arguments + MHA_FIRST_OPTION, inputs->dtype, &inputs->scores,
                            &call->options) < 0) {
        return -1;
    }
    const int axes = mha_output_shape(inputs, shape);
    results->output = mha_new_array(axes, shape, inputs->result_typenum, "output");
    if (results->output == NULL ||
        mha_new_extras(arguments[ARG_return_weights], Py_False, inputs->dtype, &inputs->scores,
                       &results->weights, &results->lse) < 0) {
        return -1;
    }
    return arguments[ARG_save] == Py_True ? new_saved_steps(call) : 0;
}

static bool fill_pointers(void *given) {
    additive_call *call = given;
    PyArrayObject *query = call->inputs.query, *key = call->inputs.key;
    const int axes = PyArray_NDIM(query);
    const mha_attention_options *options = mha_fill_options(&call->options, &call->inputs.scores);
    call->additive = (mha_additive_attention){
        .attention = mha_fill_attention(&call->inputs, &call->results, options),
        .query = PyArray_DATA(query),
        .key = PyArray_DATA(key),
        .query_storage = mha_storage_of(query),
        .key_storage = mha_storage_of(key),
        .W_q = mha_fill_weight(&call->W_q),
        .W_k = mha_fill_weight(&call->W_k),
        .w_v = PyArray_DATA(call->w_v),
        .query_rows = PyArray_MultiplyList(PyArray_DIMS(query), axes - 1),
        .key_rows = PyArray_MultiplyList(PyArray_DIMS(key), axes - 1),
        .saved_query = mha_data_or_null(call->projected_query),
        .saved_key = mha_data_or_null(call->projected_key),
    };
    return true;
}

static PyObject *results(void *given) {
    additive_call *call = given;
    return mha_pack_results(&call->results);
}

MHA_FORWARD_FUNCTION(additive_attention, additive_attention, additive_call, additive,
                     .by_position = MHA_FIRST_OPTION + 1, .options = MHA_FIRST_OPTION,
                     .save = ARG_save, .fill_pointers = fill_pointers)

#define GRADIENTS(X)                                                                               \
    X(query, saved->inputs.query, mha_data_or_null)                                                \
    X(key, saved->inputs.key, mha_data_or_null)                                                    \
    X(value, saved->inputs.value, mha_tensor_with_heads)                                           \
    X(W_q, (PyArrayObject *)saved->W_q.owner, mha_data_or_null)                                    \
    X(W_k, (PyArrayObject *)saved->W_k.owner, mha_data_or_null)                                    \
    X(w_v, saved->w_v, mha_data_or_null)
MHA_GRADIENT_LISTS(GRADIENTS)

typedef struct additive_backward_call {
    backward_call back;
    additive_call forward;
    mha_additive_attention_gradients problem;
} additive_backward_call;

static int convert_backward(void *given, PyObject **arguments) {
    additive_backward_call *call = given;
    const additive_call *saved = &call->forward;
    PyArrayObject *const like[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_LIKE)};
    if (mha_convert_grad_results(arguments, saved->inputs.result_typenum,
                                 saved->results.saved_output, &call->back) < 0 ||
        mha_new_gradients(arguments[MHA_WANTED], NAMES, like, NUM_GRADIENTS,
                          mha_new_contiguous_like, &call->back) < 0) {
        return -1;
    }
    mha_round_gradient(&call->back, GRAD_w_v, saved->w_v_typenum);
    return 0;
}

static bool fill_backward(void *given) {
    additive_backward_call *call = given;
    PyArrayObject *const *gradients = call->back.gradients;
    fill_pointers(&call->forward);
    call->problem = (mha_additive_attention_gradients){
        .additive = &call->forward.additive,
        .grad_output = mha_tensor_with_heads(call->back.grad_output),
        .grad_lse = mha_data_or_null(call->back.grad_lse),
        GRADIENTS(MHA_GRADIENT_FIELD)};
    return true;
}

MHA_BACKWARD_FUNCTION(additive_attention, additive_attention, additive_backward_call, problem,
                      .convert = convert_backward, .fill_pointers = fill_backward,
                      .results = mha_pack_gradients)
