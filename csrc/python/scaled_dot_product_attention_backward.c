/* scaled_dot_product_attention_backward: the gradients of step 3 of the figure. */
#include "call.h"
#include "inputs.h"
#include "results.h"

enum argument {
    GRAD_OUTPUT,
    GRAD_LSE,
    OUTPUT,
    STATISTICS,
    WRT,
    ADDITIVE_W,
    QUERY,
    KEY,
    VALUE,
    OPTIONS, /* NUM_OPTIONS arguments */
    NUM_ARGUMENTS = OPTIONS + NUM_OPTIONS
};

/* How each argument is settled; the others are taken as they are. */
static const argument_form FORMS[NUM_ARGUMENTS] = {
    [GRAD_OUTPUT] = {"grad_output", AS_REAL},
    [GRAD_LSE] = {"grad_lse", AS_REAL},
    [ADDITIVE_W] = {"additive_w", AS_REAL},
    [QUERY] = {"query", AS_REAL},
    [KEY] = {"key", AS_REAL},
    [VALUE] = {"value", AS_REAL},
    MHA_OPTION_FORMS(OPTIONS),
};

/* query, key, value, bias, additive_w: bit i of wrt asks for gradient i. That of additive_w comes
 * as what each query adds to it, shaped as query. */
enum gradient { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_ADDITIVE_W, NUM_GRADIENTS };
static const char *const GRADIENT_NAMES[] = {"grad_query", "grad_key", "grad_value", "grad_bias",
                                             "grad_additive_w"};

/* Everything of a call that owns memory; cleared in one place. */
typedef struct backward_arguments {
    attention_inputs inputs;
    converted_options options;
    PyArrayObject *grad_output, *grad_lse, *additive_w;
    PyArrayObject *gradients[NUM_GRADIENTS];
} backward_arguments;

static void clear(backward_arguments *a) {
    mha_clear_inputs(&a->inputs);
    mha_clear_options(&a->options);
    Py_CLEAR(a->grad_output);
    Py_CLEAR(a->grad_lse);
    Py_CLEAR(a->additive_w);
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        Py_CLEAR(a->gradients[i]);
    }
}

/* How the gradient of a result is converted: mha_as_real or mha_as_contiguous_real. */
typedef PyArrayObject *(*conversion)(PyArrayObject *array, mha_dtype dtype, const char *name);

/* The gradient of a result of this shape, in the element type; NULL with an exception. */
static PyArrayObject *convert_gradient(PyObject *object, conversion as_wanted, mha_dtype dtype,
                                       const npy_intp *shape, int axes, const char *name) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    PyArrayObject *array = mha_as_array(object, name), *converted = NULL;
    if (array == NULL) {
        return NULL;
    }
    if (PyArray_NDIM(array) != axes || !PyArray_CompareLists(PyArray_DIMS(array), shape, axes)) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted %s", name,
                     mha_array_shape_text(array, got), mha_shape_text(shape, axes, wanted));
    } else {
        converted = as_wanted(array, dtype, name);
    }
    Py_DECREF(array);
    return converted;
}

/* 0 if the array is a forward pass's output of this shape, else -1 with the exception. */
static int check_output(PyObject *object, mha_dtype dtype, const npy_intp *shape, int axes) {
    PyArrayObject *output = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(output) != mha_typenum(dtype) ||
        !PyArray_ISALIGNED(output) || !PyArray_ISNOTSWAPPED(output) ||
        PyArray_NDIM(output) != axes || !PyArray_CompareLists(PyArray_DIMS(output), shape, axes) ||
        (PyArray_SIZE(output) > 0 && !mha_last_axis_is_contiguous(output))) {
        PyErr_SetString(PyExc_ValueError,
                        "output: wanted that which the same call's forward pass returned");
        return -1;
    }
    return 0;
}

static int convert(PyObject *const *args, backward_arguments *a) {
    npy_intp shape[NPY_MAXDIMS];
    if (mha_convert_inputs(args[QUERY], args[KEY], args[VALUE], false, &a->inputs) < 0 ||
        mha_convert_options(args + OPTIONS, a->inputs.dtype, &a->inputs.scores, &a->options) < 0 ||
        mha_optional_vector(args[ADDITIVE_W], a->inputs.dtype, a->inputs.scores.head_dim,
                            "additive_w", &a->additive_w) < 0 ||
        mha_check_statistics(args[STATISTICS], a->inputs.dtype, &a->inputs.scores) < 0) {
        return -1;
    }
    const mha_dtype dtype = a->inputs.dtype;
    const int axes = mha_output_shape(&a->inputs, shape);
    if (check_output(args[OUTPUT], dtype, shape, axes) < 0) {
        return -1;
    }
    a->grad_output =
        convert_gradient(args[GRAD_OUTPUT], mha_as_real, dtype, shape, axes, "grad_output");
    if (a->grad_output == NULL) {
        return -1;
    }
    if (args[GRAD_LSE] != Py_None) {
        a->grad_lse = convert_gradient(args[GRAD_LSE], mha_as_contiguous_real, dtype, shape,
                                       axes - 1, "grad_lse");
        return a->grad_lse == NULL ? -1 : 0;
    }
    return 0;
}

/* A new array for the gradient of `like`: in its memory order, so that heads that are a view of
 * merged columns give such a view; in plain order where another axis would come last. */
static PyArrayObject *new_gradient(PyArrayObject *like, const char *name) {
    PyArrayObject *gradient = mha_new_result_like(like);
    if (gradient == NULL) {
        mha_name_missing_memory(PyArray_DIMS(like), PyArray_NDIM(like), name);
    } else if (!mha_last_axis_is_contiguous(gradient)) {
        Py_SETREF(gradient,
                  mha_new_array(PyArray_NDIM(like), PyArray_DIMS(like), PyArray_TYPE(like), name));
    }
    return gradient;
}

static bool has_no_scores(const score_shape *scores) {
    return scores->heads == 0 || scores->query_len == 0 || scores->key_len == 0 ||
           PyArray_MultiplyList(scores->batch, scores->batch_axes) == 0;
}

/* New arrays for the gradients that are wanted; zeros for bias where there are no scores, and so
 * nothing writes it. */
static int new_gradients(int64_t wrt, backward_arguments *a) {
    PyArrayObject *const like[] = {a->inputs.query, a->inputs.key, a->inputs.value, a->options.bias,
                                   a->additive_w == NULL ? NULL : a->inputs.query};
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        if ((wrt >> i & 1) == 0 || like[i] == NULL) {
            continue;
        }
        a->gradients[i] = new_gradient(like[i], GRADIENT_NAMES[i]);
        if (a->gradients[i] == NULL) {
            return -1;
        }
    }
    PyArrayObject *bias = a->gradients[GRAD_BIAS];
    if (bias != NULL && has_no_scores(&a->inputs.scores)) {
        memset(PyArray_DATA(bias), 0, (size_t)PyArray_NBYTES(bias));
    }
    return 0;
}

static void point(backward_arguments *a, PyObject *const *args, mha_attention_options *options,
                  mha_attention *attention, mha_attention_gradients *gradients) {
    mha_tensor *const wanted[] = {&gradients->grad_query, &gradients->grad_key,
                                  &gradients->grad_value, &gradients->grad_bias,
                                  &gradients->grad_additive_w};
    const attention_results results = {.output = (PyArrayObject *)args[OUTPUT],
                                       .statistics = (PyArrayObject *)args[STATISTICS]};
    mha_point_attention(&a->inputs, &a->options, &results, options, attention);
    attention->additive_w = mha_data_or_null(a->additive_w);
    gradients->attention = attention;
    mha_tensor_with_heads(a->grad_output, &gradients->grad_output);
    gradients->grad_lse = mha_data_or_null(a->grad_lse);
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        wanted[i]->data = NULL;
        if (a->gradients[i] != NULL && i == GRAD_BIAS) {
            mha_broadcast_to_scores(a->gradients[i], &a->inputs.scores, wanted[i]);
        } else if (a->gradients[i] != NULL) {
            mha_tensor_with_heads(a->gradients[i], wanted[i]);
        }
    }
}

static PyObject *pack_gradients(const backward_arguments *a) {
    PyObject *packed = PyTuple_New(NUM_GRADIENTS);
    for (int i = 0; packed != NULL && i < NUM_GRADIENTS; i++) {
        PyObject *gradient = (PyObject *)a->gradients[i];
        PyTuple_SET_ITEM(packed, i, Py_NewRef(gradient == NULL ? Py_None : gradient));
    }
    return packed;
}

static mha_status workspace_of(const void *gradients, int num_threads, size_t *bytes) {
    return mha_scaled_dot_product_attention_backward_workspace(gradients, num_threads, bytes);
}

static mha_status backward(const void *gradients, mha_execution *execution) {
    return mha_scaled_dot_product_attention_backward(gradients, execution);
}

PyObject *mha_py_scaled_dot_product_attention_backward(PyObject *module,
                                                       PyObject *const *given_args,
                                                       Py_ssize_t nargs) {
    PyObject *args[NUM_ARGUMENTS] = {NULL};
    backward_arguments arguments = {0};
    PyObject *result = NULL;
    mha_attention_options options;
    mha_attention attention;
    mha_attention_gradients gradients;
    int64_t wrt;
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
    if (mha_settle(FORMS, NUM_ARGUMENTS, given_args, args) < 0 || convert(args, &arguments) < 0 ||
        mha_convert_int(args[WRT], "wrt", 0, &wrt) < 0 || new_gradients(wrt, &arguments) < 0) {
        goto cleanup;
    }
    /* 2. Take the pointers, 3. compute. */
    point(&arguments, args, &options, &attention, &gradients);
    if (mha_call_run(workspace_of, backward, &gradients, num_threads) < 0) {
        goto cleanup;
    }
    result = pack_gradients(&arguments);
cleanup:
    mha_clear_settled(NUM_ARGUMENTS, args);
    clear(&arguments);
    return result;
}
