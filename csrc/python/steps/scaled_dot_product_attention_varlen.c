/* scaled_dot_product_attention_varlen: step 3 of the figure over a ragged batch. */
#include "python/steps/scaled_dot_product_attention_varlen.h"

#define ARGUMENTS(X)                                                                               \
    X(query, AS_REAL)                                                                              \
    X(key, AS_CACHED)                                                                              \
    X(value, AS_CACHED)                                                                            \
    X(query_starts, AS_ARRAY)                                                                      \
    X(key_starts, AS_ARRAY)                                                                        \
    MHA_OPTIONS(X)                                                                                 \
    X(return_lse, AS_FLAG)                                                                         \
    X(save, AS_FLAG)                                                                               \
    X(head_gate, AS_REAL)                                                                          \
    X(page_tables, AS_ARRAY)                                                                       \
    X(keep_first, AS_INT)                                                                          \
    X(dropped, AS_ARRAY)
MHA_ARGUMENTS(ARGUMENTS)

static void clear(void *given) {
    varlen_call *call = given;
    mha_clear_inputs(&call->inputs);
    mha_clear_options(&call->options);
    mha_clear_results(&call->results);
    Py_CLEAR(call->query_starts);
    Py_CLEAR(call->key_starts);
    Py_CLEAR(call->query_offset);
    Py_CLEAR(call->head_gate);
    Py_CLEAR(call->page_tables);
    Py_CLEAR(call->dropped);
}

/* Axis 1 counts heads, the last one columns, in all of them. */
static int check_heads_and_columns(PyArrayObject *const arrays[3]) {
    const npy_intp *query = PyArray_DIMS(arrays[0]), *key = PyArray_DIMS(arrays[1]);
    const npy_intp *value = PyArray_DIMS(arrays[2]);
    return mha_check_heads(query[1], key[1], value[1]) < 0
               ? -1
               : mha_check_equal(mha_columns_of(arrays[1]), query[2],
                                 "key: got head_dim %lld, wanted %lld as query has");
}

static int check_inputs(PyArrayObject *const arrays[3]) {
    for (int i = 0; i < 3; i++) {
        if (PyArray_NDIM(arrays[i]) != 3) {
            return mha_wrong_shape(arrays[i], FORMS[ARG_query + i].name, "(total_len, heads, dim)");
        }
    }
    return mha_check_equal(PyArray_DIM(arrays[2], 0), PyArray_DIM(arrays[1], 0),
                           "value: got %lld rows, wanted %lld as key has") < 0
               ? -1
               : check_heads_and_columns(arrays);
}

/* query (rows, heads, head_dim); key and value (pages, kv_heads, page_len, columns). */
static int check_pools(PyArrayObject *const arrays[3]) {
    for (int i = 0; i < 3; i++) {
        if (PyArray_NDIM(arrays[i]) != (i == 0 ? 3 : 4)) {
            return mha_wrong_shape(arrays[i], FORMS[ARG_query + i].name, "%s",
                                   i == 0 ? "(total_len, heads, dim)"
                                          : "(pages, kv_heads, page_len, dim)");
        }
    }
    const npy_intp *key = PyArray_DIMS(arrays[1]), *value = PyArray_DIMS(arrays[2]);
    if (value[0] != key[0] || value[2] != key[2] || key[2] == 0 ||
        key[2] % MHA_PAGE_MULTIPLE != 0) {
        return mha_raise(PyExc_ValueError,
                         "value: got %zd pages of %zd positions, wanted %zd of %zd as key has, a "
                         "multiple of %d",
                         value[0], value[2], key[0], key[2], MHA_PAGE_MULTIPLE);
    }
    return check_heads_and_columns(arrays);
}

/* Keys and values of a pool are read where they lie. */
static int convert_pool_types(PyArrayObject *arrays[3], attention_inputs *inputs) {
    PyArrayObject **const converted[] = {&inputs->key, &inputs->value};
    static const char *const name = "query";
    if (mha_result_types(arrays, &name, 1, &inputs->dtype, &inputs->result_typenum) < 0 ||
        (inputs->query = mha_as_stored(arrays[0], inputs->dtype, name)) == NULL) {
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        PyArrayObject *pool = arrays[1 + i];
        if (inputs->dtype == MHA_FLOAT32 && mha_is_in_blocks(pool) &&
            mha_last_axis_is_contiguous(pool)) {
            *converted[i] = (PyArrayObject *)Py_NewRef((PyObject *)pool);
        } else if (!mha_is_in_blocks(pool)) {
            *converted[i] = mha_as_stored(pool, inputs->dtype, FORMS[ARG_key + i].name);
            if (*converted[i] == NULL) {
                return -1;
            }
        }
        if (*converted[i] == NULL || PyArray_DATA(*converted[i]) != PyArray_DATA(pool)) {
            return mha_wrong_dtype(pool, FORMS[ARG_key + i].name,
                                   "one of a type that is read as it is beside query's");
        }
    }
    return 0;
}

/* Blocks are in pools alone. */
static int check_no_blocks(PyArrayObject *const arrays[3]) {
    for (int i = 1; i < 3; i++) {
        if (mha_is_in_blocks(arrays[i])) {
            return mha_check_real(arrays[i], FORMS[ARG_query + i].name);
        }
    }
    return 0;
}

static int convert_inputs(PyObject **arguments, attention_inputs *inputs) {
    PyArrayObject *arrays[3];
    score_shape *scores = &inputs->scores;
    const bool is_paged = arguments[ARG_page_tables] != Py_None;
    if (mha_three_arrays(arguments + ARG_query, arrays) < 0 ||
        (is_paged ? check_pools(arrays) < 0 || convert_pool_types(arrays, inputs) < 0
                  : check_no_blocks(arrays) < 0 || check_inputs(arrays) < 0 ||
                        mha_convert_input_types(arrays, inputs) < 0)) {
        return -1;
    }
    scores->has_heads = true;
    scores->batch_axes = 1;
    scores->query_len = PyArray_DIM(arrays[0], 0);
    scores->heads = PyArray_DIM(arrays[0], 1);
    scores->head_dim = PyArray_DIM(arrays[0], 2);
    scores->key_len = is_paged ? 0 : PyArray_DIM(arrays[1], 0);
    inputs->kv_heads = PyArray_DIM(arrays[1], 1);
    inputs->value_head_dim = mha_columns_of(arrays[2]);
    return 0;
}

/* From 0 to the total, never falling. */
static int check_starts(PyArrayObject *starts, const char *name, const char *rows_of,
                        int64_t total) {
    const int64_t *values = PyArray_DATA(starts);
    const npy_intp last = PyArray_DIM(starts, 0) - 1;
    if (values[0] != 0) {
        return mha_raise(PyExc_ValueError, "%s: got %lld at first, wanted 0", name,
                         (long long)values[0]);
    }
    for (npy_intp i = 1; i <= last; i++) {
        if (values[i] < values[i - 1]) {
            return mha_raise(PyExc_ValueError,
                             "%s: got %lld after %lld, wanted starts that never fall", name,
                             (long long)values[i], (long long)values[i - 1]);
        }
    }
    if (values[last] != total) {
        return mha_raise(
            PyExc_ValueError,
            "%s: got %lld at last, wanted %lld, the number of rows of %s (total_len, heads, "
            "head_dim)",
            name, (long long)values[last], (long long)total, rows_of);
    }
    return 0;
}

/* (sequences + 1,), an array of the call's own; so many as `like` has, where that is given. New
 * reference, or NULL with the exception. */
static PyArrayObject *convert_starts(PyObject *object, const char *name, const char *rows_of,
                                     int64_t total, PyArrayObject *like) {
    char wanted[MHA_SHAPE_TEXT];
    PyArrayObject *starts = mha_as_integers(object, name);
    if (starts == NULL) {
        return NULL;
    }
    if (PyArray_NDIM(starts) != 1 || PyArray_DIM(starts, 0) == 0) {
        mha_wrong_shape(starts, name, "(sequences + 1,)");
    } else if (like != NULL && PyArray_DIM(starts, 0) != PyArray_DIM(like, 0)) {
        mha_wrong_shape(starts, name, "%s as query_starts has", mha_array_shape_text(like, wanted));
    } else if (check_starts(starts, name, rows_of, total) == 0) {
        return starts;
    }
    Py_DECREF(starts);
    return NULL;
}

/* Each sequence has so many pages in its row that all of its keys are in the pool. */
static int check_page_tables(const varlen_call *call) {
    const int64_t *starts = PyArray_DATA(call->key_starts),
                  *tables = PyArray_DATA(call->page_tables);
    const int64_t pages = PyArray_DIM(call->inputs.key, 0);
    const int64_t page_len = PyArray_DIM(call->inputs.key, 2);
    const int64_t most = PyArray_DIM(call->page_tables, 1);
    for (npy_intp s = 0; s < PyArray_DIM(call->page_tables, 0); s++) {
        const int64_t needed = mha_divide_up(starts[s + 1] - starts[s], page_len);
        if (needed > most) {
            return mha_raise(PyExc_ValueError,
                             "page_tables: got %lld pages for sequence %zd, wanted %lld",
                             (long long)most, s, (long long)needed);
        }
        for (int64_t i = 0; i < needed; i++) {
            const int64_t page = tables[s * most + i];
            if (page < 0 || page >= pages) {
                return mha_raise(PyExc_ValueError,
                                 "page_tables: got %lld, wanted pages from 0 to %lld, those of key",
                                 (long long)page, (long long)pages - 1);
            }
        }
    }
    return 0;
}

/* page_tables (sequences, most), and key_starts, which say how many keys each sequence has. */
static int convert_pages(PyObject *const *arguments, varlen_call *call) {
    score_shape *scores = &call->inputs.scores;
    const npy_intp num_starts = scores->batch[0] + 1;
    call->page_tables = mha_as_integers(arguments[ARG_page_tables], "page_tables");
    call->key_starts = mha_as_integers(arguments[ARG_key_starts], "key_starts");
    if (call->page_tables == NULL || call->key_starts == NULL) {
        return -1;
    }
    if (PyArray_NDIM(call->page_tables) != 2 ||
        PyArray_DIM(call->page_tables, 0) != scores->batch[0]) {
        return mha_wrong_shape(call->page_tables, "page_tables", "(%lld, most)",
                               (long long)scores->batch[0]);
    }
    if (mha_check_shape(call->key_starts, &num_starts, 1, "key_starts") < 0) {
        return -1;
    }
    scores->key_len = ((const int64_t *)PyArray_DATA(call->key_starts))[scores->batch[0]];
    return check_starts(call->key_starts, "key_starts", "the pool", scores->key_len) < 0
               ? -1
               : check_page_tables(call);
}

/* What of a sequence's keys is kept though its window has left it behind: keep_first, and how many
 * positions behind it have no page any more. */
static int convert_kept(PyObject *const *arguments, varlen_call *call) {
    if (arguments[ARG_keep_first] == Py_None) {
        return 0;
    }
    call->dropped = mha_as_integers(arguments[ARG_dropped], "dropped");
    if (call->dropped == NULL || mha_convert_int(arguments[ARG_keep_first], "keep_first", 0,
                                                 &call->options.values.keep_first) < 0) {
        return -1;
    }
    return mha_check_shape(call->dropped, call->inputs.scores.batch, 1, "dropped");
}

static int convert_both_starts(PyObject *const *arguments, varlen_call *call) {
    score_shape *scores = &call->inputs.scores;
    call->query_starts = convert_starts(arguments[ARG_query_starts], "query_starts", "query",
                                        scores->query_len, NULL);
    if (call->query_starts == NULL) {
        return -1;
    }
    scores->batch[0] = PyArray_DIM(call->query_starts, 0) - 1;
    if (arguments[ARG_page_tables] != Py_None) {
        return convert_pages(arguments, call);
    }
    if (arguments[ARG_key_starts] != Py_None) {
        call->key_starts = convert_starts(arguments[ARG_key_starts], "key_starts", "key",
                                          scores->key_len, call->query_starts);
        return call->key_starts == NULL ? -1 : 0;
    }
    if (scores->key_len != scores->query_len) {
        return mha_raise(
            PyExc_ValueError,
            "key_starts: got None, wanted where the sequences begin among key's %lld rows,"
            " since query has %lld",
            (long long)scores->key_len, (long long)scores->query_len);
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
            return mha_raise(PyExc_ValueError, "%s: got one for a ragged batch, wanted none: %s",
                             others[i].name, others[i].instead);
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
        check_options_fit(arguments + MHA_FIRST_OPTION) < 0 ||
        mha_convert_options(arguments + MHA_FIRST_OPTION, inputs->dtype, &inputs->scores,
                            &call->options) < 0 ||
        convert_offsets(call) < 0 || convert_kept(arguments, call) < 0 ||
        make_results(arguments, call) < 0 ||
        mha_optional_vector(arguments + ARG_head_gate, inputs->dtype, inputs->scores.heads,
                            "head_gate", &call->head_gate) < 0) {
        return -1;
    }
    if (arguments[ARG_save] == Py_True && call->head_gate != NULL) {
        return mha_raise(PyExc_ValueError, "head_gate: got gates with save, wanted none");
    }
    if (arguments[ARG_save] == Py_True && (call->page_tables != NULL || call->dropped != NULL)) {
        return mha_raise(PyExc_ValueError, "page_tables: got some with save, wanted none");
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

/* Page 0 of a pool by head, and from one page to the next. */
static mha_tensor page_by_head(PyArrayObject *pool, int64_t keys, int64_t *page_stride) {
    mha_tensor tensor = mha_tensor_of_cached(pool);
    *page_stride = tensor.strides[0];
    tensor.axes = 3;
    for (int axis = 0; axis < 3; axis++) {
        tensor.shape[axis] = tensor.shape[axis + 1];
        tensor.strides[axis] = tensor.strides[axis + 1];
    }
    tensor.shape[1] = keys;
    return tensor;
}

static void see_pools(const varlen_call *call, mha_attention *all) {
    const int64_t keys = call->inputs.scores.key_len;
    all->key = page_by_head(call->inputs.key, keys, &all->pages.key_stride);
    all->value = page_by_head(call->inputs.value, keys, &all->pages.value_stride);
    all->pages.page_len = PyArray_DIM(call->inputs.key, 2);
    all->pages.table = PyArray_DATA(call->page_tables);
}

bool mha_fill_varlen_call(void *given) {
    varlen_call *call = given;
    const attention_inputs *inputs = &call->inputs;
    const mha_attention_options *options = mha_fill_options(&call->options, &inputs->scores);
    mha_attention *all = &call->problem.all;
    *all = mha_fill_attention(inputs, &call->results, options);
    all->batch_axes = 0;
    all->query = mha_tensor_by_head(inputs->query);
    if (call->page_tables != NULL) {
        see_pools(call, all);
        call->problem.page_tables_stride = PyArray_DIM(call->page_tables, 1);
    } else {
        all->key = mha_tensor_by_head(inputs->key);
        all->value = mha_tensor_by_head(inputs->value);
    }
    all->output = mha_tensor_by_head(mha_computed_output(&call->results));
    all->head_gate = mha_data_or_null(call->head_gate);
    call->problem.sequences = inputs->scores.batch[0];
    call->problem.query_starts = PyArray_DATA(call->query_starts);
    call->problem.key_starts = PyArray_DATA(call->key_starts);
    call->problem.query_offset = PyArray_DATA(call->query_offset);
    call->problem.dropped = mha_data_or_null(call->dropped);
    return true;
}

static PyObject *results(void *given) {
    varlen_call *call = given;
    return mha_pack_results(&call->results);
}

MHA_FORWARD_FUNCTION(scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen,
                     varlen_call, problem, .by_position = MHA_FIRST_OPTION + 1,
                     .options = MHA_FIRST_OPTION, .save = ARG_save,
                     .fill_pointers = mha_fill_varlen_call)
