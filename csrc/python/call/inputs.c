#include "python/call/inputs.h"

#include "python/convert/pieces.h"

static const char *const INPUT_NAMES[] = {"query", "key", "value"};

int mha_three_arrays(PyObject **arguments, PyArrayObject *arrays[3]) {
    for (int i = 0; i < 3; i++) {
        arrays[i] = mha_array_argument(&arguments[i], INPUT_NAMES[i]);
        if (arrays[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

static int check_axes(PyArrayObject *const arrays[3]) {
    const int axes = PyArray_NDIM(arrays[0]);
    for (int i = 0; i < 3; i++) {
        if (PyArray_NDIM(arrays[i]) < 2) {
            return mha_wrong_shape(
                arrays[i], INPUT_NAMES[i],
                "2-D (len, dim), 3-D (batch, len, dim) or (..., heads, len, dim)");
        }
        if (PyArray_NDIM(arrays[i]) != axes) {
            return mha_raise(PyExc_ValueError, "%s: got %d axes, wanted %d as query has",
                             INPUT_NAMES[i], PyArray_NDIM(arrays[i]), axes);
        }
    }
    return 0;
}

static int check_batch_axes(PyArrayObject *const arrays[3], int batch_axes) {
    char wanted[MHA_SHAPE_TEXT];
    for (int i = 1; i < 3; i++) {
        if (!PyArray_CompareLists(PyArray_DIMS(arrays[i]), PyArray_DIMS(arrays[0]), batch_axes)) {
            return mha_wrong_shape(arrays[i], INPUT_NAMES[i], "the batch axes %s of query",
                                   mha_shape_text(PyArray_DIMS(arrays[0]), batch_axes, wanted));
        }
    }
    return 0;
}

int mha_check_heads(int64_t heads, int64_t kv_heads, int64_t value_heads) {
    if (mha_check_equal(value_heads, kv_heads, "value: got %lld heads, wanted %lld as key has") <
        0) {
        return -1;
    }
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        return mha_raise(PyExc_ValueError, "key: got %lld heads, wanted a divisor of query's %lld",
                         (long long)kv_heads, (long long)heads);
    }
    return 0;
}

static int check_lengths_and_widths(PyArrayObject *const arrays[3], bool key_width_is_free) {
    const int axes = PyArray_NDIM(arrays[0]);
    const int64_t key_len = PyArray_DIM(arrays[1], axes - 2);
    const int64_t value_len = PyArray_DIM(arrays[2], axes - 2);
    const int64_t head_dim = PyArray_DIM(arrays[0], axes - 1);
    const int64_t key_dim = PyArray_DIM(arrays[1], axes - 1);
    if (mha_check_equal(value_len, key_len, "value: got length %lld, wanted %lld as key has") < 0) {
        return -1;
    }
    return key_width_is_free ? 0
                             : mha_check_equal(key_dim, head_dim,
                                               "key: got head_dim %lld, wanted %lld as query has");
}

int mha_convert_input_types(PyArrayObject *arrays[3], attention_inputs *inputs) {
    PyArrayObject **const converted[] = {&inputs->query, &inputs->key, &inputs->value};
    if (mha_result_types(arrays, INPUT_NAMES, 3, &inputs->dtype, &inputs->result_typenum) < 0) {
        return -1;
    }
    for (int i = 0; i < 3; i++) {
        *converted[i] = i > 0 && inputs->may_lie_by_columns
                            ? mha_as_stored_either_way(arrays[i], inputs->dtype, INPUT_NAMES[i])
                            : mha_as_stored(arrays[i], inputs->dtype, INPUT_NAMES[i]);
        if (*converted[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

int mha_convert_inputs(PyObject **arguments, bool key_width_is_free, attention_inputs *inputs) {
    score_shape *scores = &inputs->scores;
    PyArrayObject *arrays[3];
    if (mha_three_arrays(arguments, arrays) < 0 || check_axes(arrays) < 0) {
        return -1;
    }
    const int axes = PyArray_NDIM(arrays[0]);
    scores->has_heads = axes >= 4;
    scores->batch_axes = scores->has_heads ? axes - 3 : axes - 2;
    memcpy(scores->batch, PyArray_DIMS(arrays[0]), (size_t)scores->batch_axes * sizeof(npy_intp));
    scores->heads = scores->has_heads ? PyArray_DIM(arrays[0], axes - 3) : 1;
    scores->query_len = PyArray_DIM(arrays[0], axes - 2);
    scores->head_dim = PyArray_DIM(arrays[0], axes - 1);
    scores->key_len = PyArray_DIM(arrays[1], axes - 2);
    inputs->kv_heads = scores->has_heads ? PyArray_DIM(arrays[1], axes - 3) : 1;
    inputs->value_head_dim = PyArray_DIM(arrays[2], axes - 1);
    const int64_t value_heads = scores->has_heads ? PyArray_DIM(arrays[2], axes - 3) : 1;
    if (check_batch_axes(arrays, scores->batch_axes) < 0 ||
        mha_check_heads(scores->heads, inputs->kv_heads, value_heads) < 0 ||
        check_lengths_and_widths(arrays, key_width_is_free) < 0) {
        return -1;
    }
    return mha_convert_input_types(arrays, inputs);
}

void mha_clear_inputs(attention_inputs *inputs) {
    Py_CLEAR(inputs->query);
    Py_CLEAR(inputs->key);
    Py_CLEAR(inputs->value);
}

void mha_clear_results(attention_results *results) {
    Py_CLEAR(results->output);
    Py_CLEAR(results->weights);
    Py_CLEAR(results->lse);
    Py_CLEAR(results->statistics);
    Py_CLEAR(results->saved_output);
}

/* What the arithmetic wrote, the saved output, into the one that goes out, rounded if need be. */
static int copy_saved_output(const attention_results *results) {
    const mha_storage storage = mha_storage_of(results->output);
    return storage == MHA_AS_COMPUTED ? mha_copy_numbers(results->saved_output, results->output)
                                      : mha_round_in_pieces(PyArray_DATA(results->saved_output),
                                                            PyArray_DATA(results->output), storage,
                                                            PyArray_SIZE(results->output));
}

PyObject *mha_pack_results(attention_results *results) {
    if (results->saved_output != NULL && copy_saved_output(results) < 0) {
        return NULL;
    }
    PyArrayObject **const all[] = {&results->output, &results->weights, &results->lse};
    const Py_ssize_t count = 1 + (results->weights != NULL) + (results->lse != NULL);
    PyObject *packed = count == 1 ? (PyObject *)results->output : PyTuple_New(count);
    if (count == 1) {
        results->output = NULL;
        return packed;
    }
    for (int i = 0, at = 0; packed != NULL && i < 3; i++) {
        if (*all[i] != NULL) {
            PyTuple_SET_ITEM(packed, at++, (PyObject *)*all[i]);
            *all[i] = NULL;
        }
    }
    return packed;
}

PyArrayObject *mha_computed_output(const attention_results *results) {
    const bool is_rounded_later =
        results->saved_output != NULL && results->output != NULL &&
        PyArray_TYPE(results->saved_output) != PyArray_TYPE(results->output);
    return results->output == NULL || is_rounded_later ? results->saved_output : results->output;
}

mha_attention mha_fill_attention(const attention_inputs *inputs, const attention_results *results,
                                 const mha_attention_options *options) {
    const mha_attention attention = {
        .dtype = inputs->dtype,
        .batch_axes = inputs->scores.batch_axes,
        .query = mha_tensor_with_heads(inputs->query),
        .key = mha_tensor_with_heads(inputs->key),
        .value = mha_tensor_with_heads(inputs->value),
        .output = mha_tensor_with_heads(mha_computed_output(results)),
        .weights = mha_data_or_null(results->weights),
        .lse = mha_data_or_null(results->lse),
        .maximum = mha_maximum_of(results->statistics),
        .denominator = mha_denominator_of(results->statistics),
        .options = options,
    };
    return attention;
}

int mha_output_shape(const attention_inputs *inputs, npy_intp *shape) {
    const int axes = PyArray_NDIM(inputs->query);
    memcpy(shape, PyArray_DIMS(inputs->query), (size_t)axes * sizeof *shape);
    shape[axes - 1] = (npy_intp)inputs->value_head_dim;
    return axes;
}

int mha_new_extras(PyObject *return_weights, PyObject *return_lse, mha_dtype dtype,
                   const score_shape *scores, PyArrayObject **weights, PyArrayObject **lse) {
    npy_intp shape[NPY_MAXDIMS];
    bool wants_weights, wants_lse;
    const int axes = mha_user_shape(scores, shape);
    if (mha_convert_bool(return_weights, "return_weights", &wants_weights) < 0 ||
        mha_convert_bool(return_lse, "return_lse", &wants_lse) < 0) {
        return -1;
    }
    if (wants_weights) {
        *weights = mha_new_array(axes, shape, mha_typenum(dtype), "weights");
    }
    if (wants_lse) {
        *lse = mha_new_array(axes - 1, shape, mha_typenum(dtype), "lse");
    }
    return (wants_weights && *weights == NULL) || (wants_lse && *lse == NULL) ? -1 : 0;
}

PyArrayObject *mha_new_statistics(mha_dtype dtype, const score_shape *scores) {
    npy_intp shape[NPY_MAXDIMS + 1];
    shape[0] = 2;
    const int axes = mha_user_shape(scores, shape + 1); /* without key_len, with the 2 */
    return mha_new_array(axes, shape, mha_typenum(dtype), "statistics");
}

void *mha_maximum_of(PyArrayObject *statistics) { return mha_data_or_null(statistics); }

void *mha_denominator_of(PyArrayObject *statistics) {
    return statistics == NULL ? NULL
                              : (char *)PyArray_DATA(statistics) + PyArray_NBYTES(statistics) / 2;
}
