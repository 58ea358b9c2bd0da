/* scaled_dot_product_attention_varlen: step 3 of the figure over a ragged batch. */
#include "python/steps/scaled_dot_product_attention_varlen.h"

#include <stddef.h>

#define ARGUMENTS(X)                                                                               \
    X(query, AS_REAL)                                                                              \
    X(key, AS_REAL)                                                                                \
    X(value, AS_REAL)                                                                              \
    X(query_starts, AS_ARRAY)                                                                      \
    X(key_starts, AS_ARRAY)
#define MORE_ARGUMENTS(X)                                                                          \
    X(return_lse, AS_FLAG)                                                                         \
    X(save, AS_FLAG)                                                                               \
    X(head_gate, AS_REAL)
enum argument {
    ARGUMENTS(MHA_ARGUMENT_PLACE) OPTIONS,
    LAST_OPTION = OPTIONS + NUM_OPTIONS - 1,
    MORE_ARGUMENTS(MHA_ARGUMENT_PLACE) NUM_ARGUMENTS
};

static const argument_form FORMS[NUM_ARGUMENTS] = {
    ARGUMENTS(MHA_ARGUMENT_FORM) MHA_OPTION_FORMS MORE_ARGUMENTS(MHA_ARGUMENT_FORM)};

static void clear(void *given) {
    varlen_call *call = given;
    mha_clear_inputs(&call->inputs);
    mha_clear_options(&call->options);
    mha_clear_results(&call->results);
    Py_CLEAR(call->query_starts);
    Py_CLEAR(call->key_starts);
    Py_CLEAR(call->query_offset);
    Py_CLEAR(call->head_gate);
}

static int check_inputs(PyArrayObject *const arrays[3]) {
    char text[MHA_SHAPE_TEXT];
    for (int i = 0; i < 3; i++) {
        if (PyArray_NDIM(arrays[i]) != 3) {
            PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted (total_len, heads, dim)",
                         FORMS[ARG_query + i].name, mha_array_shape_text(arrays[i], text));
            return -1;
        }
    }
    const npy_intp *query = PyArray_DIMS(arrays[0]), *key = PyArray_DIMS(arrays[1]);
    const npy_intp *value = PyArray_DIMS(arrays[2]);
    if (mha_check_heads(query[1], key[1], value[1]) < 0) {
        return -1;
    }
    if (value[0] != key[0]) {
        PyErr_Format(PyExc_ValueError, "value: got %zd rows, wanted %zd as key has", value[0],
                     key[0]);
        return -1;
    }
    if (key[2] != query[2]) {
        PyErr_Format(PyExc_ValueError, "key: got head_dim %zd, wanted %zd as query has", key[2],
                     query[2]);
        return -1;
    }
    return 0;
}

static int convert_inputs(PyObject *const *arguments, attention_inputs *inputs) {
    PyArrayObject *arrays[3] = {NULL};
    score_shape *scores = &inputs->scores;
    int failed = mha_as_three_arrays(arguments[ARG_query], arguments[ARG_key], arguments[ARG_value],
                                     arrays) < 0 ||
                 check_inputs(arrays) < 0 || mha_convert_input_types(arrays, inputs) < 0;
    if (!failed) {
        scores->has_heads = true;
        scores->batch_axes = 1;
        scores->query_len = PyArray_DIM(arrays[0], 0);
        scores->heads = PyArray_DIM(arrays[0], 1);
        scores->head_dim = PyArray_DIM(arrays[0], 2);
        scores->key_len = PyArray_DIM(arrays[1], 0);
        inputs->kv_heads = PyArray_DIM(arrays[1], 1);
        inputs->value_head_dim = PyArray_DIM(arrays[2], 2);
    }
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(arrays[i]);
    }
    return failed ? -1 : 0;
}

/* From 0 to the total, never falling. */
static int check_starts(PyArrayObject *starts, const char *name, const char *rows_of,
                        int64_t total) {
    const int64_t *values = PyArray_DATA(starts);
    const npy_intp last = PyArray_DIM(starts, 0) - 1;
    if (values[0] != 0) {
        PyErr_Format(PyExc_ValueError, "%s: got %lld at first, wanted 0", name,
                     (long long)values[0]);
        return -1;
    }
    for (npy_intp i = 1; i <= last; i++) {
        if (values[i] < values[i - 1]) {
            PyErr_Format(PyExc_ValueError, "%s: got %lld after %lld, wanted starts that never fall",
                         name, (long long)values[i], (long long)values[i - 1]);
            return -1;
        }
    }
    if (values[last] != total) {
        PyErr_Format(
            PyExc_ValueError,
            "%s: got %lld at last, wanted %lld, the number of rows of %s (total_len, heads, "
            "head_dim)",
            name, (long long)values[last], (long long)total, rows_of);
        return -1;
    }
    return 0;
}

/* (sequences + 1,), an array of the call's own; so many as `like` has, where that is given. New
 * reference, or NULL with the exception. */
static PyArrayObject *convert_starts(PyObject *object, const char *name, const char *rows_of,
                                     int64_t total, PyArrayObject *like) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    PyArrayObject *starts = mha_as_integers(object, name);
    if (starts == NULL) {
        return NULL;
    }
    if (PyArray_NDIM(starts) != 1 || PyArray_DIM(starts, 0) == 0) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted (sequences + 1,)", name,
                     mha_array_shape_text(starts, got));
    } else if (like != NULL && PyArray_DIM(starts, 0) != PyArray_DIM(like, 0)) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted %s as query_starts has", name,
                     mha_array_shape_text(starts, got), mha_array_shape_text(like, wanted));
    } else if (check_starts(starts, name, rows_of, total) == 0) {
        return starts;
    }
    Py_DECREF(starts);
    return NULL;
}

static int convert_both_starts(PyObject *const *arguments, varlen_call *call) {
    score_shape *scores = &call->inputs.scores;
    call->query_starts = convert_starts(arguments[ARG_query_starts], "query_starts", "query",
                                        scores->query_len, NULL);
    if (call->query_starts == NULL) {
        return -1;
    }
    scores->batch[0] = PyArray_DIM(call->query_starts, 0) - 1;
    if (arguments[ARG_key_starts] != Py_None) {
        call->key_starts = convert_starts(arguments[ARG_key_starts], "key_starts", "key",
                                          scores->key_len, call->query_starts);
        return call->key_starts == NULL ? -1 : 0;
    }
    if (scores->key_len != scores->query_len) {
        PyErr_Format(PyExc_ValueError,
                     "key_starts: got None, wanted where the sequences begin among key's %lld rows,"
                     " since query has %lld",
                     (long long)scores->key_len, (long long)scores->query_len);
        return -1;
    }
    call->key_starts = (PyArrayObject *)Py_NewRef(call->query_starts);
    return 0;
}

static int check_options_fit(PyObject *const *options) {
    static const struct {
        int option;
        const char *name, *instead;
    } others[] = {
        {OPTION_mask, "mask", "causal, window or one call a sequence"},
        {OPTION_bias, "bias", "alibi, relative_bias or one call a sequence"},
        {OPTION_key_lengths, "key_lengths", "starts that leave out what is padding"},
    };
    for (int i = 0; i < 3; i++) {
        if (options[others[i].option] != Py_None) {
            PyErr_Format(PyExc_ValueError, "%s: got one for a ragged batch, wanted none: %s",
                         others[i].name, others[i].instead);
            return -1;
        }
    }
    return 0;
}

/* That of each sequence: key_len - query_len unless given. */
static int convert_offsets(varlen_call *call) {
    PyArrayObject *given = call->options.query_offset;
    const npy_intp sequences = call->inputs.scores.batch[0];
    call->query_offset = mha_new_array(1, &sequences, NPY_INT64, "query_offset");
    if (call->query_offset == NULL) {
        return -1;
    }
    const int64_t *query = PyArray_DATA(call->query_starts), *key = PyArray_DATA(call->key_starts);
    const int64_t *values = mha_data_or_null(given);
    const bool is_one = given != NULL && PyArray_NDIM(given) == 0;
    int64_t *offsets = PyArray_DATA(call->query_offset);
    for (npy_intp s = 0; s < sequences; s++) {
        offsets[s] = values == NULL ? (key[s + 1] - key[s]) - (query[s + 1] - query[s])
                                    : values[is_one ? 0 : s];
    }
    return 0;
}

/* The output (total_query_len, heads, value_head_dim), lse (heads, total_query_len) where asked
 * for, and with `save` what the backward pass needs. */
static int make_results(PyObject *const *arguments, varlen_call *call) {
    const attention_inputs *inputs = &call->inputs;
    attention_results *results = &call->results;
    const int typenum = mha_typenum(inputs->dtype);
    npy_intp shape[NPY_MAXDIMS];
    const npy_intp rows[] = {2, (npy_intp)inputs->scores.heads, (npy_intp)inputs->scores.query_len};
    bool wants_lse;
    if (mha_convert_bool(arguments[ARG_return_lse], "return_lse", &wants_lse) < 0) {
        return -1;
    }
    const int axes = mha_output_shape(inputs, shape);
    results->output = mha_new_array(axes, shape, inputs->result_typenum, "output");
    if (results->output == NULL) {
        return -1;
    }
    if (wants_lse) {
        results->lse = mha_new_array(2, rows + 1, typenum, "lse");
        if (results->lse == NULL) {
            return -1;
        }
    }
    if (arguments[ARG_save] == Py_True) {
        results->statistics = mha_new_array(3, rows, typenum, "statistics");
        results->saved_output = mha_new_array(axes, shape, typenum, "output");
        return results->statistics == NULL || results->saved_output == NULL ? -1 : 0;
    }
    return 0;
}

static int convert(void *given, PyObject **arguments) {
    varlen_call *call = given;
    attention_inputs *inputs = &call->inputs;
    if (convert_inputs(arguments, inputs) < 0 || convert_both_starts(arguments, call) < 0 ||
        check_options_fit(arguments + OPTIONS) < 0 ||
        mha_convert_options(arguments + OPTIONS, inputs->dtype, &inputs->scores, &call->options) <
            0 ||
        convert_offsets(call) < 0 || make_results(arguments, call) < 0 ||
        mha_optional_vector(arguments[ARG_head_gate], inputs->dtype, inputs->scores.heads,
                            "head_gate", &call->head_gate) < 0) {
        return -1;
    }
    if (arguments[ARG_save] == Py_True && call->head_gate != NULL) {
        PyErr_SetString(PyExc_ValueError, "head_gate: got gates with save, wanted none");
        return -1;
    }
    return 0;
}

mha_tensor mha_tensor_by_head(PyArrayObject *array) {
    mha_tensor tensor = mha_tensor_of(array);
    if (array != NULL) {
        tensor.shape[0] = PyArray_DIM(array, 1);
        tensor.shape[1] = PyArray_DIM(array, 0);
        tensor.strides[0] = PyArray_STRIDE(array, 1);
        tensor.strides[1] = PyArray_STRIDE(array, 0);
    }
    return tensor;
}

bool mha_fill_varlen_call(void *given) {
    varlen_call *call = given;
    const attention_inputs *inputs = &call->inputs;
    const mha_attention_options *options = mha_fill_options(&call->options, &inputs->scores);
    mha_attention *all = &call->problem.all;
    *all = mha_fill_attention(inputs, &call->results, options);
    all->batch_axes = 0;
    all->query = mha_tensor_by_head(inputs->query);
    all->key = mha_tensor_by_head(inputs->key);
    all->value = mha_tensor_by_head(inputs->value);
    all->output = mha_tensor_by_head(mha_computed_output(&call->results));
    all->head_gate = mha_data_or_null(call->head_gate);
    call->problem.sequences = inputs->scores.batch[0];
    call->problem.query_starts = PyArray_DATA(call->query_starts);
    call->problem.key_starts = PyArray_DATA(call->key_starts);
    call->problem.query_offset = PyArray_DATA(call->query_offset);
    return true;
}

static PyObject *results(void *given) {
    varlen_call *call = given;
    return mha_pack_or_keep(&call->results, MHA_KEPT_VARLEN, call, sizeof *call, clear);
}

MHA_CORE_WORKSPACE(scaled_dot_product_attention_varlen_workspace, mha_varlen_attention)
MHA_CORE_RUN(scaled_dot_product_attention_varlen_forward, mha_varlen_attention)

MHA_MODULE_FUNCTION(scaled_dot_product_attention_varlen, varlen_call, .forms = FORMS,
                    .count = NUM_ARGUMENTS, .by_position = OPTIONS + 1, .options = OPTIONS,
                    .convert = convert, .fill_pointers = mha_fill_varlen_call,
                    .workspace = core_scaled_dot_product_attention_varlen_workspace,
                    .forward = core_scaled_dot_product_attention_varlen_forward,
                    .problem = offsetof(varlen_call, problem), .results = results, .clear = clear)
