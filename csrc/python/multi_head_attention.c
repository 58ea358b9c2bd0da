/* multi_head_attention: the whole figure. */
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
    W_O,
    B_Q,
    B_K,
    B_V,
    B_O,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_GATE,
    OPTIONS, /* NUM_OPTIONS arguments */
    RETURN_WEIGHTS = OPTIONS + NUM_OPTIONS,
    RETURN_LSE,
    DTYPE,
    KEEP_STEPS,
    NUM_ARGUMENTS
};

/* How each argument is settled; the others are taken as they are. */
static const argument_form FORMS[NUM_ARGUMENTS] = {
    [QUERY] = {"query", AS_REAL},
    [KEY] = {"key", AS_REAL},
    [VALUE] = {"value", AS_REAL},
    [W_Q] = {"W_q", AS_REAL},
    [W_K] = {"W_k", AS_REAL},
    [W_V] = {"W_v", AS_REAL},
    [W_O] = {"W_o", AS_REAL},
    [B_Q] = {"b_q", AS_REAL},
    [B_K] = {"b_k", AS_REAL},
    [B_V] = {"b_v", AS_REAL},
    [B_O] = {"b_o", AS_REAL},
    [NUM_HEADS] = {"num_heads", AS_INT},
    [NUM_KV_HEADS] = {"num_kv_heads", AS_INT},
    [HEAD_GATE] = {"head_gate", AS_REAL},
    MHA_OPTION_FORMS(OPTIONS),
};

/* What the gradients need of the forward pass. */
enum kept_step {
    PROJECTED_QUERY,
    PROJECTED_KEY,
    PROJECTED_VALUE,
    ATTENDED,
    MERGED,
    STATISTICS,
    NUM_KEPT
};

/* Everything of a call that owns memory; cleared in one place. */
typedef struct layer_arguments {
    PyArrayObject *sequences[3];  /* query, key, value: C-contiguous (batch..., len, dim) */
    converted_weight matrices[4]; /* W_q, W_k, W_v, W_o */
    PyArrayObject *biases[4];
    PyArrayObject *head_gate;
    mha_dtype dtype;
    int64_t num_heads, num_kv_heads;
    score_shape scores;
    converted_options options;
    PyArrayObject *kept[NUM_KEPT]; /* NULL: not kept */
} layer_arguments;

static const char *const SEQUENCE_NAMES[] = {"query", "key", "value"};

static void clear(layer_arguments *a) {
    for (int i = 0; i < 3; i++) {
        Py_CLEAR(a->sequences[i]);
    }
    for (int i = 0; i < 4; i++) {
        Py_CLEAR(a->matrices[i].owner);
        Py_CLEAR(a->biases[i]);
    }
    for (int i = 0; i < NUM_KEPT; i++) {
        Py_CLEAR(a->kept[i]);
    }
    Py_CLEAR(a->head_gate);
    mha_clear_options(&a->options);
}

/* (batch..., len, dim) with equal batch axes, and as many values as keys. */
static int check_sequences(PyArrayObject *const arrays[3]) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    const int axes = PyArray_NDIM(arrays[0]);
    for (int i = 0; i < 3; i++) {
        if (PyArray_NDIM(arrays[i]) < 2 || PyArray_NDIM(arrays[i]) > MHA_MOST_INPUT_AXES - 1 ||
            PyArray_NDIM(arrays[i]) != axes) {
            PyErr_Format(
                PyExc_ValueError,
                "%s: got shape %s, wanted (batch, len, dim) or (len, dim), the same number of "
                "axes for query, key and value",
                SEQUENCE_NAMES[i], mha_array_shape_text(arrays[i], got));
            return -1;
        }
        if (!PyArray_CompareLists(PyArray_DIMS(arrays[i]), PyArray_DIMS(arrays[0]), axes - 2)) {
            PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted the batch axes %s of query",
                         SEQUENCE_NAMES[i], mha_array_shape_text(arrays[i], got),
                         mha_shape_text(PyArray_DIMS(arrays[0]), axes - 2, wanted));
            return -1;
        }
    }
    if (PyArray_DIM(arrays[1], axes - 2) != PyArray_DIM(arrays[2], axes - 2)) {
        PyErr_Format(PyExc_ValueError, "value: got length %zd, wanted %zd as key has",
                     (Py_ssize_t)PyArray_DIM(arrays[2], axes - 2),
                     (Py_ssize_t)PyArray_DIM(arrays[1], axes - 2));
        return -1;
    }
    return 0;
}

/* `dtype_object` is the layer's dtype, or None: then the arrays decide. */
static int convert_sequences(PyObject *const *args, PyObject *dtype_object, layer_arguments *a) {
    PyArrayObject *arrays[3] = {NULL};
    mha_dtype common;
    int failed = mha_as_three_arrays(args[QUERY], args[KEY], args[VALUE], arrays);
    if (!failed) {
        failed = check_sequences(arrays);
    }
    if (!failed) {
        failed = mha_result_dtype(arrays, SEQUENCE_NAMES, 3, &common);
    }
    if (!failed) {
        a->dtype = common;
        if (PyArray_DescrCheck(dtype_object)) {
            const int typenum = ((PyArray_Descr *)dtype_object)->type_num;
            a->dtype = typenum == NPY_FLOAT32 ? MHA_FLOAT32 : MHA_FLOAT64;
        }
        for (int i = 0; i < 3 && !failed; i++) {
            a->sequences[i] = mha_as_contiguous_real(arrays[i], a->dtype, SEQUENCE_NAMES[i]);
            failed = a->sequences[i] == NULL ? -1 : 0;
        }
    }
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(arrays[i]);
    }
    return failed;
}

static int convert_heads(PyObject *const *args, layer_arguments *a) {
    if (mha_convert_size(args[NUM_HEADS], "num_heads", 1, &a->num_heads) < 0) {
        return -1;
    }
    a->num_kv_heads = a->num_heads;
    if (args[NUM_KV_HEADS] != Py_None &&
        mha_convert_size(args[NUM_KV_HEADS], "num_kv_heads", 1, &a->num_kv_heads) < 0) {
        return -1;
    }
    if (a->num_heads % a->num_kv_heads != 0) {
        PyErr_Format(PyExc_ValueError,
                     "num_kv_heads: got %lld, wanted a divisor of num_heads (%lld)",
                     (long long)a->num_kv_heads, (long long)a->num_heads);
        return -1;
    }
    return 0;
}

static int check_columns(const converted_weight *weight, int64_t heads, const char *heads_name,
                         const char *name) {
    if (weight->out % heads != 0) {
        PyErr_Format(PyExc_ValueError, "%s: got %lld columns, wanted a multiple of %s (%lld)", name,
                     (long long)weight->out, heads_name, (long long)heads);
        return -1;
    }
    return 0;
}

static int convert_parameters(PyObject *const *args, layer_arguments *a) {
    static const char *const weight_names[] = {"W_q", "W_k", "W_v", "W_o"};
    static const char *const bias_names[] = {"b_q", "b_k", "b_v", "b_o"};
    static const char *const meanings[] = {"the last axis of query", "the last axis of key",
                                           "the last axis of value", "num_heads * value_head_dim"};
    const char *kv_name = args[NUM_KV_HEADS] == Py_None ? "num_heads" : "num_kv_heads";
    converted_weight *w = a->matrices;
    for (int i = 0; i < 3; i++) {
        const int64_t in = PyArray_DIM(a->sequences[i], PyArray_NDIM(a->sequences[i]) - 1);
        if (mha_convert_weight(args[W_Q + i], a->dtype, in, meanings[i], weight_names[i], &w[i]) <
            0) {
            return -1;
        }
    }
    if (check_columns(&w[0], a->num_heads, "num_heads", "W_q") < 0 ||
        check_columns(&w[1], a->num_kv_heads, kv_name, "W_k") < 0 ||
        check_columns(&w[2], a->num_kv_heads, kv_name, "W_v") < 0) {
        return -1;
    }
    if (w[1].out / a->num_kv_heads != w[0].out / a->num_heads) {
        PyErr_Format(PyExc_ValueError, "W_k: got head_dim %lld, wanted %lld as W_q gives",
                     (long long)(w[1].out / a->num_kv_heads), (long long)(w[0].out / a->num_heads));
        return -1;
    }
    const int64_t value_head_dim = w[2].out / a->num_kv_heads;
    int64_t merged;
    if (__builtin_mul_overflow(value_head_dim, a->num_heads, &merged)) {
        PyErr_Format(PyExc_ValueError,
                     "num_heads: got %lld, wanted at most %lld with a value_head_dim of %lld",
                     (long long)a->num_heads, (long long)(INT64_MAX / value_head_dim),
                     (long long)value_head_dim);
        return -1;
    }
    if (mha_convert_weight(args[W_O], a->dtype, merged, meanings[3], weight_names[3], &w[3]) < 0) {
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        if (mha_optional_vector(args[B_Q + i], a->dtype, w[i].out, bias_names[i], &a->biases[i]) <
            0) {
            return -1;
        }
    }
    return mha_optional_vector(args[HEAD_GATE], a->dtype, a->num_heads, "head_gate", &a->head_gate);
}

static void set_scores(layer_arguments *a) {
    PyArrayObject *query = a->sequences[0];
    const int axes = PyArray_NDIM(query);
    a->scores.batch_axes = axes - 2;
    memcpy(a->scores.batch, PyArray_DIMS(query), (size_t)(axes - 2) * sizeof(npy_intp));
    a->scores.has_heads = true;
    a->scores.heads = a->num_heads;
    a->scores.query_len = PyArray_DIM(query, axes - 2);
    a->scores.key_len = PyArray_DIM(a->sequences[1], axes - 2);
    a->scores.head_dim = a->matrices[0].out / a->num_heads;
}

/* A mask or bias of 3 dimensions could mean one a head or one a batch item: it is refused. Where a
 * single sequence's has a batch axis of 1, it loses it, as the scores have none. */
static int settle_score_axes(PyObject **object, const char *name, bool of_layer, int batch_axes) {
    if (*object == Py_None) {
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)*object; /* or an int or bool, which settles as it is */
    const int axes = PyArray_Check(*object) ? PyArray_NDIM(array) : 0;
    if (axes == 3 || (of_layer && axes != 2 && axes != 4)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: got %d dimensions, wanted 2 (query_len, key_len) or 4 (batch, heads, "
                     "query_len, key_len); for one per batch item write %s[:, None]",
                     name, axes, name);
        return -1;
    }
    if (axes == 4 && batch_axes == 0 && PyArray_DIM(array, 0) == 1) {
        PyArrayObject *of_sequence =
            mha_new_view(array, 3, PyArray_DIMS(array) + 1, PyArray_STRIDES(array) + 1, 0);
        if (of_sequence == NULL) {
            return -1;
        }
        Py_SETREF(*object, (PyObject *)of_sequence);
    }
    return 0;
}

static int convert(PyObject **args, layer_arguments *a) {
    if (convert_sequences(args, args[DTYPE], a) < 0 || convert_heads(args, a) < 0 ||
        convert_parameters(args, a) < 0) {
        return -1;
    }
    set_scores(a);
    const bool of_layer = PyArray_DescrCheck(args[DTYPE]);
    const int batch_axes = a->scores.batch_axes;
    if (settle_score_axes(&args[OPTIONS + MASK], "mask", of_layer, batch_axes) < 0 ||
        settle_score_axes(&args[OPTIONS + BIAS], "bias", of_layer, batch_axes) < 0) {
        return -1;
    }
    return mha_convert_options(args + OPTIONS, a->dtype, &a->scores, &a->options);
}

/* (batch..., length, width), uninitialised. */
static PyArrayObject *new_step(const layer_arguments *a, int64_t length, int64_t width,
                               const char *name) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = a->scores.batch_axes;
    memcpy(shape, a->scores.batch, (size_t)axes * sizeof *shape);
    shape[axes] = (npy_intp)length;
    shape[axes + 1] = (npy_intp)width;
    return mha_new_array(axes + 2, shape, mha_typenum(a->dtype), name);
}

/* Without gates the merged heads are what attention wrote: one array for both. */
static int new_kept_steps(layer_arguments *a) {
    const int64_t query_len = a->scores.query_len, key_len = a->scores.key_len;
    const converted_weight *w = a->matrices;
    const struct {
        int64_t length, width;
        const char *name;
    } steps[] = {
        [PROJECTED_QUERY] = {query_len, w[0].out, "projected query"},
        [PROJECTED_KEY] = {key_len, w[1].out, "projected key"},
        [PROJECTED_VALUE] = {key_len, w[2].out, "projected value"},
        [ATTENDED] = {query_len, w[3].in, "attended values"},
        [MERGED] = {query_len, w[3].in, "merged heads"},
    };
    for (int i = 0; i < STATISTICS; i++) {
        a->kept[i] = i == MERGED && a->head_gate == NULL
                         ? (PyArrayObject *)Py_NewRef((PyObject *)a->kept[ATTENDED])
                         : new_step(a, steps[i].length, steps[i].width, steps[i].name);
        if (a->kept[i] == NULL) {
            return -1;
        }
    }
    a->kept[STATISTICS] = mha_new_statistics(a->dtype, &a->scores);
    return a->kept[STATISTICS] == NULL ? -1 : 0;
}

static void point(layer_arguments *a, PyArrayObject *output, PyArrayObject *weights,
                  PyArrayObject *lse, mha_attention_options *options,
                  mha_multi_head_attention *layer) {
    mha_weight *const to[] = {&layer->W_q, &layer->W_k, &layer->W_v, &layer->W_o};
    const void **const biases[] = {&layer->b_q, &layer->b_k, &layer->b_v, &layer->b_o};
    layer->attention.dtype = a->dtype;
    layer->attention.batch_axes = a->scores.batch_axes;
    layer->attention.additive_w = NULL;
    mha_point_statistics(a->kept[STATISTICS], &layer->attention);
    void **const steps[] = {&layer->kept.projected_query, &layer->kept.projected_key,
                            &layer->kept.projected_value, &layer->kept.attended,
                            &layer->kept.merged};
    for (int i = 0; i < STATISTICS; i++) {
        *steps[i] = mha_data_or_null(a->kept[i]);
    }
    layer->attention.weights = mha_data_or_null(weights);
    layer->attention.lse = mha_data_or_null(lse);
    mha_point_options(&a->options, &a->scores, options);
    layer->attention.options = options;
    layer->attention.head_gate = mha_data_or_null(a->head_gate);
    for (int axis = 0; axis < a->scores.batch_axes; axis++) {
        layer->batch_shape[axis] = a->scores.batch[axis];
    }
    layer->query_len = a->scores.query_len;
    layer->key_len = a->scores.key_len;
    layer->num_heads = a->num_heads;
    layer->num_kv_heads = a->num_kv_heads;
    layer->query = PyArray_DATA(a->sequences[0]);
    layer->key = PyArray_DATA(a->sequences[1]);
    layer->value = PyArray_DATA(a->sequences[2]);
    layer->output = PyArray_DATA(output);
    for (int i = 0; i < 4; i++) {
        mha_point_weight(&a->matrices[i], to[i]);
        *biases[i] = mha_data_or_null(a->biases[i]);
    }
}

static mha_status workspace_of(const void *layer, int num_threads, size_t *bytes) {
    return mha_multi_head_attention_workspace(layer, num_threads, bytes);
}

static mha_status forward(const void *layer, mha_execution *execution) {
    return mha_multi_head_attention_forward(layer, execution);
}

PyObject *mha_py_multi_head_attention(PyObject *module, PyObject *const *given_args,
                                      Py_ssize_t nargs) {
    PyObject *args[NUM_ARGUMENTS] = {NULL};
    layer_arguments arguments = {0};
    PyArrayObject *output = NULL, *weights = NULL, *lse = NULL;
    PyObject *result = NULL;
    npy_intp shape[NPY_MAXDIMS];
    mha_attention_options options;
    mha_multi_head_attention layer;
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
    if (mha_settle(FORMS, NUM_ARGUMENTS, given_args, args) < 0 || convert(args, &arguments) < 0) {
        goto cleanup;
    }
    const int axes = PyArray_NDIM(arguments.sequences[0]);
    memcpy(shape, PyArray_DIMS(arguments.sequences[0]), (size_t)axes * sizeof *shape);
    shape[axes - 1] = (npy_intp)arguments.matrices[3].out;
    output = mha_new_array(axes, shape, mha_typenum(arguments.dtype), "output");
    if (output == NULL || mha_new_extras(args[RETURN_WEIGHTS], args[RETURN_LSE], arguments.dtype,
                                         &arguments.scores, &weights, &lse) < 0) {
        goto cleanup;
    }
    if (args[KEEP_STEPS] == Py_True && new_kept_steps(&arguments) < 0) {
        goto cleanup;
    }
    /* 2. Take the pointers, 3. compute. */
    point(&arguments, output, weights, lse, &options, &layer);
    if (mha_call_run(workspace_of, forward, &layer, num_threads) < 0) {
        goto cleanup;
    }
    result = mha_pack_results(output, weights, lse);
    output = weights = lse = NULL;
    if (args[KEEP_STEPS] == Py_True && result != NULL) { /* (results, steps) */
        PyArrayObject *const *kept = arguments.kept;
        Py_SETREF(result, Py_BuildValue("O(OOOOOO)", result, kept[0], kept[1], kept[2], kept[3],
                                        kept[4], kept[5]));
    }
cleanup:
    mha_clear_settled(NUM_ARGUMENTS, args);
    clear(&arguments);
    Py_XDECREF(output);
    Py_XDECREF(weights);
    Py_XDECREF(lse);
    return result;
}
