/* multi_head_attention: the whole figure. */
#include "python/steps/multi_head_attention.h"

#define ARGUMENTS(X)                                                                               \
    X(query, AS_REAL)                                                                              \
    X(key, AS_REAL)                                                                                \
    X(value, AS_REAL)                                                                              \
    X(W_q, AS_REAL)                                                                                \
    X(W_k, AS_REAL)                                                                                \
    X(W_v, AS_REAL)                                                                                \
    X(W_o, AS_REAL)                                                                                \
    X(W_g, AS_REAL)                                                                                \
    X(b_q, AS_REAL)                                                                                \
    X(b_k, AS_REAL)                                                                                \
    X(b_v, AS_REAL)                                                                                \
    X(b_o, AS_REAL)                                                                                \
    X(b_g, AS_REAL)                                                                                \
    X(num_heads, AS_INT)                                                                           \
    X(num_kv_heads, AS_INT)                                                                        \
    X(head_gate, AS_REAL)                                                                          \
    MHA_OPTIONS(X)                                                                                 \
    X(return_weights, AS_FLAG)                                                                     \
    X(return_lse, AS_FLAG)                                                                         \
    X(dtype, AS_IT_IS)                                                                             \
    X(key_is_query, AS_FLAG)                                                                       \
    X(value_is_key, AS_FLAG)                                                                       \
    X(save, AS_FLAG)                                                                               \
    MHA_PREPARATION(X)                                                                             \
    MHA_CACHE(X)
MHA_ARGUMENTS(ARGUMENTS)
enum { PREPARATION = ARG_rotary, CACHE = ARG_cached_key };

static void clear(void *given) {
    layer_call *call = given;
    PyArrayObject **const arrays[] = {&call->query,
                                      &call->key,
                                      &call->value,
                                      &call->b_q,
                                      &call->b_k,
                                      &call->b_v,
                                      &call->b_o,
                                      &call->b_g,
                                      &call->head_gate,
                                      &call->projected_query,
                                      &call->projected_key,
                                      &call->projected_value,
                                      &call->attended,
                                      &call->merged,
                                      &call->unprepared_query,
                                      &call->unprepared_key,
                                      &call->gate};
    converted_weight *const weights[] = {&call->W_q, &call->W_k, &call->W_v, &call->W_o,
                                         &call->W_g};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        Py_CLEAR(*arrays[i]);
    }
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        Py_CLEAR(weights[i]->owner);
    }
    mha_clear_preparation(&call->preparation);
    mha_clear_cache(&call->cache);
    mha_clear_options(&call->options);
    mha_clear_results(&call->results);
}

static const char *const SEQUENCE_NAMES[] = {"query", "key", "value"};

/* (batch..., len, dim) with equal batch axes, and as many values as keys. */
static int check_sequences(PyArrayObject *const arrays[3]) {
    char wanted[MHA_SHAPE_TEXT];
    const int axes = PyArray_NDIM(arrays[0]);
    for (int i = 0; i < 3; i++) {
        if (PyArray_NDIM(arrays[i]) < 2 || PyArray_NDIM(arrays[i]) > MHA_MOST_INPUT_AXES - 1 ||
            PyArray_NDIM(arrays[i]) != axes) {
            return mha_wrong_shape(arrays[i], SEQUENCE_NAMES[i],
                                   "(batch, len, dim) or (len, dim), the same number of axes for "
                                   "query, key and value");
        }
        if (!PyArray_CompareLists(PyArray_DIMS(arrays[i]), PyArray_DIMS(arrays[0]), axes - 2)) {
            return mha_wrong_shape(arrays[i], SEQUENCE_NAMES[i], "the batch axes %s of query",
                                   mha_shape_text(PyArray_DIMS(arrays[0]), axes - 2, wanted));
        }
    }
    return mha_check_equal(PyArray_DIM(arrays[2], axes - 2), PyArray_DIM(arrays[1], axes - 2),
                           "value: got length %lld, wanted %lld as key has");
}

/* The layer's dtype decides, or where it is None the arrays. */
static int convert_sequences(PyObject **arguments, layer_call *call) {
    PyObject *dtype_object = arguments[ARG_dtype];
    PyArrayObject *arrays[3], **const to[] = {&call->query, &call->key, &call->value};
    if (mha_three_arrays(arguments + ARG_query, arrays) < 0 || check_sequences(arrays) < 0 ||
        mha_result_types(arrays, SEQUENCE_NAMES, 3, &call->dtype, &call->result_typenum) < 0) {
        return -1;
    }
    if (PyArray_DescrCheck(dtype_object)) {
        call->result_typenum = ((PyArray_Descr *)dtype_object)->type_num;
        call->dtype = mha_computing_dtype(call->result_typenum);
    }
    for (int i = 0; i < 3; i++) {
        *to[i] = mha_as_contiguous_stored(arrays[i], call->dtype, SEQUENCE_NAMES[i]);
        if (*to[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

static int convert_heads(PyObject *const *arguments, layer_call *call) {
    if (mha_convert_size(arguments[ARG_num_heads], "num_heads", 1, &call->num_heads) < 0) {
        return -1;
    }
    call->num_kv_heads = call->num_heads;
    if (arguments[ARG_num_kv_heads] != Py_None &&
        mha_convert_size(arguments[ARG_num_kv_heads], "num_kv_heads", 1, &call->num_kv_heads) < 0) {
        return -1;
    }
    if (call->num_heads % call->num_kv_heads != 0) {
        return mha_raise(PyExc_ValueError,
                         "num_kv_heads: got %lld, wanted a divisor of num_heads (%lld)",
                         (long long)call->num_kv_heads, (long long)call->num_heads);
    }
    return 0;
}

static int check_columns(const converted_weight *weight, int64_t heads, const char *heads_name,
                         const char *name) {
    if (weight->out % heads != 0) {
        return mha_raise(PyExc_ValueError, "%s: got %lld columns, wanted a multiple of %s (%lld)",
                         name, (long long)weight->out, heads_name, (long long)heads);
    }
    return 0;
}

static int64_t width_of(PyArrayObject *sequence) {
    return PyArray_DIM(sequence, PyArray_NDIM(sequence) - 1);
}

/* Whoever calls a layer did not give the weight: the error is about what was given. */
static int check_width_of_layer(PyArrayObject *sequence, const char *name, PyObject *weight) {
    const int64_t wanted = mha_rows_of_weight(weight), got = width_of(sequence);
    if (wanted < 0 || got == wanted) {
        return 0;
    }
    return mha_raise(PyExc_ValueError,
                     "%s: got a last axis of %lld, wanted %lld, the layer's %s_dim", name,
                     (long long)got, (long long)wanted, name);
}

static int check_widths_of_layer(PyObject *const *arguments, const layer_call *call) {
    return check_width_of_layer(call->query, "query", arguments[ARG_W_q]) < 0 ||
                   check_width_of_layer(call->key, "key", arguments[ARG_W_k]) < 0 ||
                   check_width_of_layer(call->value, "value", arguments[ARG_W_v]) < 0
               ? -1
               : 0;
}

/* The output gate: W_g has a column for each of the merged heads' columns, or for each head. */
static int convert_gate(PyObject **arguments, layer_call *call) {
    if (arguments[ARG_W_g] == Py_None) {
        if (arguments[ARG_b_g] != Py_None) {
            return mha_raise(PyExc_ValueError, "b_g: got one without W_g, wanted W_g= too");
        }
        return 0;
    }
    if (mha_convert_weight(arguments + ARG_W_g, call->dtype, width_of(call->query),
                           "the last axis of query", "W_g", &call->W_g) < 0) {
        return -1;
    }
    if (call->W_g.out != call->W_o.in && call->W_g.out != call->num_heads) {
        return mha_raise(
            PyExc_ValueError,
            "W_g: got %lld columns, wanted num_heads * value_head_dim (%lld), or num_heads"
            " (%lld)",
            (long long)call->W_g.out, (long long)call->W_o.in, (long long)call->num_heads);
    }
    return 0;
}

static int convert_weights(PyObject **arguments, layer_call *call) {
    const char *kv_name = arguments[ARG_num_kv_heads] == Py_None ? "num_heads" : "num_kv_heads";
    const mha_dtype dtype = call->dtype;
    if (PyArray_DescrCheck(arguments[ARG_dtype]) && check_widths_of_layer(arguments, call) < 0) {
        return -1;
    }
    if (mha_convert_weight(arguments + ARG_W_q, dtype, width_of(call->query),
                           "the last axis of query", "W_q", &call->W_q) < 0 ||
        mha_convert_weight(arguments + ARG_W_k, dtype, width_of(call->key), "the last axis of key",
                           "W_k", &call->W_k) < 0 ||
        mha_convert_weight(arguments + ARG_W_v, dtype, width_of(call->value),
                           "the last axis of value", "W_v", &call->W_v) < 0 ||
        check_columns(&call->W_q, call->num_heads, "num_heads", "W_q") < 0 ||
        check_columns(&call->W_k, call->num_kv_heads, kv_name, "W_k") < 0 ||
        check_columns(&call->W_v, call->num_kv_heads, kv_name, "W_v") < 0) {
        return -1;
    }
    if (mha_check_equal(call->W_k.out / call->num_kv_heads, call->W_q.out / call->num_heads,
                        "W_k: got head_dim %lld, wanted %lld as W_q gives") < 0) {
        return -1;
    }
    const int64_t value_head_dim = call->W_v.out / call->num_kv_heads;
    int64_t merged;
    if (__builtin_mul_overflow(value_head_dim, call->num_heads, &merged)) {
        return mha_raise(PyExc_ValueError,
                         "num_heads: got %lld, wanted at most %lld with a value_head_dim of %lld",
                         (long long)call->num_heads, (long long)(INT64_MAX / value_head_dim),
                         (long long)value_head_dim);
    }
    return mha_convert_weight(arguments + ARG_W_o, dtype, merged, "num_heads * value_head_dim",
                              "W_o", &call->W_o) < 0
               ? -1
               : convert_gate(arguments, call);
}

/* The biases and head_gate, and the types that they were given in. */
static int convert_vectors(PyObject **arguments, layer_call *call) {
    const struct {
        int argument;
        int64_t length;
        PyArrayObject **to;
    } vectors[] = {
        {ARG_b_q, call->W_q.out, &call->b_q}, {ARG_b_k, call->W_k.out, &call->b_k},
        {ARG_b_v, call->W_v.out, &call->b_v}, {ARG_b_o, call->W_o.out, &call->b_o},
        {ARG_b_g, call->W_g.out, &call->b_g}, {ARG_head_gate, call->num_heads, &call->head_gate}};
    for (int i = 0; i < NUM_VECTORS; i++) {
        PyObject **given = &arguments[vectors[i].argument];
        PyArrayObject **to = vectors[i].to;
        if (mha_optional_vector(given, call->dtype, vectors[i].length,
                                FORMS[vectors[i].argument].name, to) < 0) {
            return -1;
        }
        call->typenums[i] = *to == NULL ? 0 : mha_given_typenum(*given, *to);
    }
    return 0;
}

static void set_scores(layer_call *call) {
    score_shape *scores = &call->scores;
    const int axes = PyArray_NDIM(call->query);
    scores->batch_axes = axes - 2;
    memcpy(scores->batch, PyArray_DIMS(call->query), (size_t)(axes - 2) * sizeof(npy_intp));
    scores->has_heads = true;
    scores->heads = call->num_heads;
    scores->query_len = PyArray_DIM(call->query, axes - 2);
    scores->key_len = PyArray_DIM(call->key, axes - 2);
    scores->head_dim = call->W_q.out / call->num_heads;
}

/* A mask or bias of 3 dimensions could mean one a head or one a batch item: it is refused. Where a
 * single sequence's has a batch axis of 1, it loses it, as the scores have none. */
static int normalise_score_axes(PyObject **object, const char *name, bool of_layer,
                                int batch_axes) {
    if (*object == Py_None || PyTuple_Check(*object)) { /* a tuple: a BlockMask */
        return 0;
    }
    PyArrayObject *array =
        (PyArrayObject *)*object; /* or an int or bool, which normalises as it is */
    const int axes = PyArray_Check(*object) ? PyArray_NDIM(array) : 0;
    if (axes == 3 || (of_layer && axes != 2 && axes != 4)) {
        const char *wanted =
            axes == 3 ? "%s: got %d dimensions, wanted 2 (query_len, key_len) or 4 (batch, heads, "
                        "query_len, key_len); for one per batch item write %s[:, None], for one "
                        "per head %s[None]"
                      : "%s: got %d dimensions, wanted 2 (query_len, key_len) or 4 (batch, heads, "
                        "query_len, key_len); for one per key write %s[None], for documents "
                        "%s[:, None] == %s";
        return mha_raise(PyExc_ValueError, wanted, name, axes, name, name, name);
    }
    if (axes == 4 && batch_axes == 0 && PyArray_DIM(array, 0) == 1) {
        PyArrayObject *of_sequence = mha_new_view(
            array, PyArray_DATA(array), 3, PyArray_DIMS(array) + 1, PyArray_STRIDES(array) + 1, 0);
        if (of_sequence == NULL) {
            return -1;
        }
        Py_SETREF(*object, (PyObject *)of_sequence);
    }
    return 0;
}

/* The projected keys and values that join the cache, and the scores' length, that of the cache. */
static int convert_cache(PyObject **arguments, layer_call *call) {
    const int64_t value_head_dim = call->W_v.out / call->num_kv_heads;
    const int64_t key_len = call->scores.key_len;
    converted_cache *cache = &call->cache;
    if (mha_convert_cache(arguments + CACHE, call->dtype, &call->scores, call->num_kv_heads,
                          value_head_dim, cache) < 0) {
        return -1;
    }
    if (cache->key == NULL) {
        return 0;
    }
    if (mha_convert_kept(arguments + CACHE, &call->options.values) < 0) {
        return -1;
    }
    if (arguments[ARG_save] == Py_True) {
        return mha_raise(PyExc_ValueError, "cached_key: got one with save, wanted none");
    }
    call->scores.key_len = PyArray_DIM(cache->key, call->scores.batch_axes + 1);
    if (cache->append == NULL) {
        return 0;
    }
    return mha_new_step(call, &call->projected_key, key_len, call->W_k.out, "projected key") < 0 ||
                   mha_new_step(call, &call->projected_value, key_len, call->W_v.out,
                                "projected value") < 0 ||
                   mha_see_appended(call->projected_key, call->projected_value, call->num_kv_heads,
                                    cache) < 0
               ? -1
               : 0;
}

static int refuse_packed(const layer_call *call) {
    return mha_refuse_packed(&call->W_q, "W_q") < 0 || mha_refuse_packed(&call->W_k, "W_k") < 0 ||
                   mha_refuse_packed(&call->W_v, "W_v") < 0 ||
                   mha_refuse_packed(&call->W_o, "W_o") < 0 ||
                   (call->W_g.owner != NULL && mha_refuse_packed(&call->W_g, "W_g") < 0)
               ? -1
               : 0;
}

/* Whether two arrays are one for the gradients. Another thread may have changed a shape meanwhile.
 */
static int check_same(bool is_same, PyArrayObject *array, const char *name, PyArrayObject *other) {
    char wanted[MHA_SHAPE_TEXT];
    if (!is_same || PyArray_SAMESHAPE(array, other)) {
        return 0;
    }
    return mha_wrong_shape(array, name, "%s, that of the array it is said to be",
                           mha_array_shape_text(other, wanted));
}

static int convert_sameness(PyObject *const *arguments, layer_call *call) {
    call->key_is_query = arguments[ARG_key_is_query] == Py_True;
    call->value_is_key = arguments[ARG_value_is_key] == Py_True;
    return check_same(call->key_is_query, call->key, "key", call->query) < 0 ||
                   check_same(call->value_is_key, call->value, "value", call->key) < 0
               ? -1
               : 0;
}

static int convert(void *given, PyObject **arguments) {
    layer_call *call = given;
    attention_results *results = &call->results;
    if (convert_sequences(arguments, call) < 0 || convert_sameness(arguments, call) < 0 ||
        convert_heads(arguments, call) < 0 || convert_weights(arguments, call) < 0 ||
        convert_vectors(arguments, call) < 0) {
        return -1;
    }
    set_scores(call);
    if (mha_convert_preparation(arguments + PREPARATION, call->dtype, &call->scores,
                                call->num_kv_heads, &call->preparation) < 0 ||
        convert_cache(arguments, call) < 0) {
        return -1;
    }
    const PyObject *given_bias = arguments[ARG_bias];
    const bool of_layer = PyArray_DescrCheck(arguments[ARG_dtype]);
    const int batch_axes = call->scores.batch_axes;
    if (normalise_score_axes(&arguments[ARG_mask], "mask", of_layer, batch_axes) < 0 ||
        normalise_score_axes(&arguments[ARG_bias], "bias", of_layer, batch_axes) < 0 ||
        mha_convert_options(arguments + MHA_FIRST_OPTION, call->dtype, &call->scores,
                            &call->options) < 0) {
        return -1;
    }
    call->bias_has_batch_of_one = arguments[ARG_bias] != given_bias;
    results->output =
        mha_new_rows(call, call->scores.query_len, call->W_o.out, call->result_typenum, "output");
    if (results->output == NULL ||
        mha_new_extras(arguments[ARG_return_weights], arguments[ARG_return_lse], call->dtype,
                       &call->scores, &results->weights, &results->lse) < 0) {
        return -1;
    }
    return arguments[ARG_save] == Py_True &&
                   (refuse_packed(call) < 0 || mha_new_saved_steps(call) < 0)
               ? -1
               : 0;
}

bool mha_fill_layer(void *given) {
    layer_call *call = given;
    const attention_results *results = &call->results;
    call->layer = (mha_multi_head_attention){
        .dtype = call->dtype,
        .batch_axes = call->scores.batch_axes,
        .query_len = call->scores.query_len,
        .key_len = PyArray_DIM(call->key, PyArray_NDIM(call->key) - 2),
        .num_heads = call->num_heads,
        .num_kv_heads = call->num_kv_heads,
        .query = PyArray_DATA(call->query),
        .key = PyArray_DATA(call->key),
        .value = PyArray_DATA(call->value),
        .query_storage = mha_storage_of(call->query),
        .key_storage = mha_storage_of(call->key),
        .value_storage = mha_storage_of(call->value),
        .output_storage =
            results->output == NULL ? MHA_AS_COMPUTED : mha_storage_of(results->output),
        .W_q = mha_fill_weight(&call->W_q),
        .W_k = mha_fill_weight(&call->W_k),
        .W_v = mha_fill_weight(&call->W_v),
        .W_o = mha_fill_weight(&call->W_o),
        .b_q = mha_data_or_null(call->b_q),
        .b_k = mha_data_or_null(call->b_k),
        .b_v = mha_data_or_null(call->b_v),
        .b_o = mha_data_or_null(call->b_o),
        .b_g = mha_data_or_null(call->b_g),
        .head_gate = mha_data_or_null(call->head_gate),
        .options = mha_fill_options(&call->options, &call->scores),
        .output = mha_data_or_null(results->output),
        .weights = mha_data_or_null(results->weights),
        .lse = mha_data_or_null(results->lse),
        .maximum = mha_maximum_of(results->statistics),
        .denominator = mha_denominator_of(results->statistics),
        .saved = {.projected_query = mha_data_or_null(call->projected_query),
                  .projected_key = mha_data_or_null(call->projected_key),
                  .projected_value = mha_data_or_null(call->projected_value),
                  .attended = mha_data_or_null(call->attended),
                  .merged = mha_data_or_null(call->merged),
                  .unprepared_query = mha_data_or_null(call->unprepared_query),
                  .unprepared_key = mha_data_or_null(call->unprepared_key),
                  .gate = mha_data_or_null(call->gate)},
        .cache = mha_fill_cache(&call->cache),
    };
    if (call->W_g.owner != NULL) {
        call->layer.W_g = mha_fill_weight(&call->W_g);
    }
    mha_fill_preparation(&call->preparation, &call->scores, &call->layer);
    for (int axis = 0; axis < call->scores.batch_axes; axis++) {
        call->layer.batch_shape[axis] = call->scores.batch[axis];
    }
    return true;
}

static PyObject *results(void *given) {
    layer_call *call = given;
    return mha_pack_results(&call->results);
}

MHA_FORWARD_FUNCTION(multi_head_attention, multi_head_attention, layer_call, layer,
                     .by_position = MHA_FIRST_OPTION + 1, .options = MHA_FIRST_OPTION,
                     .save = ARG_save, .fill_pointers = mha_fill_layer)
