/* additive_attention: scores w_v . tanh(query W_q + key W_k). */
#include "call.h"
#include "inputs.h"
#include "weight.h"

enum argument {
    QUERY,
    KEY,
    VALUE,
    W_Q,
    W_K,
    W_V,
    OPTIONS, /* NUM_OPTIONS arguments */
    RETURN_WEIGHTS = OPTIONS + NUM_OPTIONS,
    KEEP_STEPS,
    NUM_ARGUMENTS
};

/* How each argument is settled; the others are taken as they are. */
static const argument_form FORMS[NUM_ARGUMENTS] = {
    [QUERY] = {"query", AS_REAL}, [KEY] = {"key", AS_REAL}, [VALUE] = {"value", AS_REAL},
    [W_Q] = {"W_q", AS_REAL},     [W_K] = {"W_k", AS_REAL}, [W_V] = {"w_v", AS_REAL},
    MHA_OPTION_FORMS(OPTIONS),
};

static mha_status workspace_of(const void *additive, int num_threads, size_t *bytes) {
    return mha_additive_attention_workspace(additive, num_threads, bytes);
}

static mha_status forward(const void *additive, mha_execution *execution) {
    return mha_additive_attention_forward(additive, execution);
}

static int convert_weights(PyObject *const *args, const attention_inputs *inputs,
                           converted_weight *W_q, converted_weight *W_k, PyArrayObject **w_v) {
    const int axes = PyArray_NDIM(inputs->query);
    if (mha_convert_weight(args[W_Q], inputs->dtype, PyArray_DIM(inputs->query, axes - 1),
                           "the last axis of query", "W_q", W_q) < 0 ||
        mha_convert_weight(args[W_K], inputs->dtype, PyArray_DIM(inputs->key, axes - 1),
                           "the last axis of key", "W_k", W_k) < 0) {
        return -1;
    }
    if (W_k->out != W_q->out) {
        PyErr_Format(PyExc_ValueError, "W_k: got %lld columns, wanted %lld as W_q has",
                     (long long)W_k->out, (long long)W_q->out);
        return -1;
    }
    if (args[W_V] == Py_None) {
        PyErr_SetString(PyExc_TypeError, "w_v: got None, wanted an array");
        return -1;
    }
    return mha_optional_vector(args[W_V], inputs->dtype, W_q->out, "w_v", w_v);
}

static int make_contiguous(PyArrayObject **array, mha_dtype dtype, const char *name) {
    PyArrayObject *contiguous = mha_as_contiguous_real(*array, dtype, name);
    if (contiguous == NULL) {
        return -1;
    }
    Py_SETREF(*array, contiguous);
    return 0;
}

/* What the gradients need: the projected rows (..., len, hidden) and the softmax's statistics. */
typedef struct kept_steps {
    PyArrayObject *projected_query, *projected_key, *statistics;
} kept_steps;

static PyArrayObject *new_projected(PyArrayObject *rows, int64_t hidden, const char *name) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = PyArray_NDIM(rows);
    memcpy(shape, PyArray_DIMS(rows), (size_t)axes * sizeof *shape);
    shape[axes - 1] = (npy_intp)hidden;
    return mha_new_array(axes, shape, PyArray_TYPE(rows), name);
}

static int new_kept_steps(const attention_inputs *inputs, int64_t hidden, kept_steps *kept) {
    kept->projected_query = new_projected(inputs->query, hidden, "projected query");
    if (kept->projected_query == NULL) {
        return -1;
    }
    kept->projected_key = new_projected(inputs->key, hidden, "projected key");
    if (kept->projected_key == NULL) {
        return -1;
    }
    kept->statistics = mha_new_statistics(inputs->dtype, &inputs->scores);
    return kept->statistics == NULL ? -1 : 0;
}

PyObject *mha_py_additive_attention(PyObject *module, PyObject *const *given_args,
                                    Py_ssize_t nargs) {
    PyObject *args[NUM_ARGUMENTS] = {NULL};
    attention_inputs inputs = {0};
    converted_options options = {0};
    converted_weight W_q = {0}, W_k = {0};
    PyArrayObject *w_v = NULL, *output = NULL, *weights = NULL, *lse = NULL;
    kept_steps kept = {NULL};
    PyObject *result = NULL;
    npy_intp shape[NPY_MAXDIMS];
    mha_additive_attention additive;
    mha_attention_options pointed;
    (void)module;
    if (nargs != NUM_ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "got %zd arguments, wanted %d", nargs, NUM_ARGUMENTS);
        return NULL;
    }
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    /* 1. Convert and check every argument. */
    if (mha_settle(FORMS, NUM_ARGUMENTS, given_args, args) < 0) {
        goto cleanup;
    }
    if (mha_convert_inputs(args[QUERY], args[KEY], args[VALUE], true, &inputs) < 0 ||
        convert_weights(args, &inputs, &W_q, &W_k, &w_v) < 0 ||
        make_contiguous(&inputs.query, inputs.dtype, "query") < 0 ||
        make_contiguous(&inputs.key, inputs.dtype, "key") < 0 ||
        mha_convert_options(args + OPTIONS, inputs.dtype, &inputs.scores, &options) < 0) {
        goto cleanup;
    }
    const int axes = mha_output_shape(&inputs, shape);
    output = mha_new_array(axes, shape, mha_typenum(inputs.dtype), "output");
    if (output == NULL || mha_new_extras(args[RETURN_WEIGHTS], Py_False, inputs.dtype,
                                         &inputs.scores, &weights, &lse) < 0) {
        goto cleanup;
    }
    if (args[KEEP_STEPS] == Py_True && new_kept_steps(&inputs, W_q.out, &kept) < 0) {
        goto cleanup;
    }
    /* 2. Take the pointers. */
    const attention_results results = {output, weights, NULL, kept.statistics};
    mha_point_attention(&inputs, &options, &results, &pointed, &additive.attention);
    additive.query = PyArray_DATA(inputs.query);
    additive.key = PyArray_DATA(inputs.key);
    additive.w_v = PyArray_DATA(w_v);
    additive.query_rows = PyArray_MultiplyList(PyArray_DIMS(inputs.query), axes - 1);
    additive.key_rows = PyArray_MultiplyList(PyArray_DIMS(inputs.key), axes - 1);
    additive.kept_query = kept.statistics == NULL ? NULL : PyArray_DATA(kept.projected_query);
    additive.kept_key = kept.statistics == NULL ? NULL : PyArray_DATA(kept.projected_key);
    mha_point_weight(&W_q, &additive.W_q);
    mha_point_weight(&W_k, &additive.W_k);
    /* 3. Compute. */
    if (mha_call_run(workspace_of, forward, &additive, num_threads) < 0) {
        goto cleanup;
    }
    result = mha_pack_results(output, weights, NULL);
    output = weights = NULL;
    if (kept.statistics != NULL && result != NULL) { /* (results, steps) */
        Py_SETREF(result, Py_BuildValue("O(OOO)", result, kept.projected_query, kept.projected_key,
                                        kept.statistics));
    }
cleanup:
    mha_clear_settled(NUM_ARGUMENTS, args);
    mha_clear_inputs(&inputs);
    mha_clear_options(&options);
    Py_XDECREF(W_q.owner);
    Py_XDECREF(W_k.owner);
    Py_XDECREF(w_v);
    Py_XDECREF(kept.projected_query);
    Py_XDECREF(kept.projected_key);
    Py_XDECREF(kept.statistics);
    Py_XDECREF(output);
    Py_XDECREF(weights);
    Py_XDECREF(lse);
    return result;
}
