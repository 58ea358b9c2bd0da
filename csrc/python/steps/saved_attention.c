/* saved_attention: what scaled_dot_product_attention keeps for its gradients, from its results: an
 * output and log-sum-exp that were joined of parts, or computed elsewhere. */
#include <stddef.h>

#include "python/steps/scaled_dot_product_attention.h"

#define ARGUMENTS(X)                                                                               \
    X(query, AS_REAL)                                                                              \
    X(key, AS_REAL)                                                                                \
    X(value, AS_REAL)                                                                              \
    X(output, AS_REAL)                                                                             \
    X(lse, AS_REAL)                                                                                \
    MHA_OPTIONS(X)
MHA_ARGUMENTS(ARGUMENTS)

typedef struct saved_attention_call {
    attention_call forward;
    PyArrayObject *lse; /* float64 */
    mha_attention_statistics problem;
} saved_attention_call;

static void clear_forward(void *given) {
    attention_call *forward = given;
    mha_clear_inputs(&forward->inputs);
    mha_clear_options(&forward->options);
    mha_clear_results(&forward->results);
}

static void clear(void *given) {
    saved_attention_call *call = given;
    clear_forward(&call->forward);
    Py_CLEAR(call->lse);
}

static int convert(void *given, PyObject **arguments) {
    saved_attention_call *call = given;
    attention_inputs *inputs = &call->forward.inputs;
    attention_results *results = &call->forward.results;
    npy_intp shape[NPY_MAXDIMS];
    call->forward.sees_part = true; /* for all that is known here */
    if (mha_convert_inputs(arguments + ARG_query, false, inputs) < 0 ||
        mha_convert_options(arguments + MHA_FIRST_OPTION, inputs->dtype, &inputs->scores,
                            &call->forward.options) < 0) {
        return -1;
    }
    const int axes = mha_output_shape(inputs, shape);
    results->saved_output = mha_convert_gradient(arguments + ARG_output, true,
                                                 mha_typenum(inputs->dtype), shape, axes, "output");
    if (results->saved_output == NULL) {
        return -1;
    }
    call->lse =
        mha_convert_gradient(arguments + ARG_lse, true, NPY_FLOAT64, shape, axes - 1, "lse");
    if (call->lse == NULL) {
        return -1;
    }
    results->statistics = mha_new_statistics(inputs->dtype, &inputs->scores);
    return results->statistics == NULL ? -1 : 0;
}

static bool fill_pointers(void *given) {
    saved_attention_call *call = given;
    PyArrayObject *statistics = call->forward.results.statistics;
    const mha_attention_options *options = &call->forward.options.values;
    call->problem = (mha_attention_statistics){
        .dtype = call->forward.inputs.dtype,
        .rows = PyArray_SIZE(call->lse),
        .lse = PyArray_DATA(call->lse),
        .scale = options->scale,
        .softcap = options->softcap,
        .maximum = mha_maximum_of(statistics),
        .denominator = mha_denominator_of(statistics),
    };
    return call->problem.rows > 0;
}

static PyObject *results(void *given) {
    saved_attention_call *call = given;
    return mha_save_call("scaled_dot_product_attention", &call->forward, sizeof call->forward,
                         clear_forward);
}

MHA_CORE_RUN(attention_statistics_forward)

MHA_MODULE_FUNCTION(saved_attention, saved_attention_call, MHA_FORWARD_FIELDS,
                    .by_position = MHA_FIRST_OPTION + 1, .options = MHA_FIRST_OPTION,
                    .fill_pointers = fill_pointers, .run = core_attention_statistics_forward,
                    .problem = offsetof(saved_attention_call, problem))
