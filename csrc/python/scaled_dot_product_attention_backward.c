/* scaled_dot_product_attention_backward: the gradients of step 3 of the figure. */
#include "call.h"
#include "inputs.h"
#include "results.h"
#include "settle.h"

enum argument {
    GRAD_OUTPUT,
    GRAD_LSE,
    OUTPUT,
    STATISTICS,
    WRT,
    QUERY,
    KEY,
    VALUE,
    MASK,
    BIAS,
    KEY_LENGTHS,
    CAUSAL,
    QUERY_OFFSET,
    WINDOW,
    SCALE,
    SOFTCAP,
    EMPTY_ROWS,
    DROPOUT,
    SEED,
    NUM_ARGUMENTS
};

/* How each argument is settled; the others are taken as they are. */
static const argument_form FORMS[NUM_ARGUMENTS] = {
    [GRAD_OUTPUT] = {"grad_output", AS_REAL},
    [GRAD_LSE] = {"grad_lse", AS_REAL},
    [QUERY] = {"query", AS_REAL},
    [KEY] = {"key", AS_REAL},
    [VALUE] = {"value", AS_REAL},
    [MASK] = {"mask", AS_ARRAY},
    [BIAS] = {"bias", AS_REAL},
    [KEY_LENGTHS] = {"key_lengths", AS_ARRAY},
    [QUERY_OFFSET] = {"query_offset", AS_ARRAY},
    [WINDOW] = {"window", AS_PAIR},
    [SCALE] = {"scale", AS_NUMBER},
    [SOFTCAP] = {"softcap", AS_NUMBER},
    [DROPOUT] = {"dropout", AS_NUMBER},
};

/* query, key, value, bias: bit i of wrt asks for gradient i. */
enum { NUM_GRADIENTS = 4 };
static const char *const GRADIENT_NAMES[] = {"grad_query", "grad_key", "grad_value", "grad_bias"};

/* Everything of a call that owns memory; cleared in one place. */
typedef struct backward_arguments {
    attention_inputs inputs;
    converted_options options;
    PyArrayObject *grad_output, *grad_lse;
    PyArrayObject *gradients[NUM_GRADIENTS];
} backward_arguments;

static void clear(backward_arguments *a) {
    mha_clear_inputs(&a->inputs);
    mha_clear_options(&a->options);
    Py_CLEAR(a->grad_output);
    Py_CLEAR(a->grad_lse);
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        Py_CLEAR(a->gradients[i]);
    }
}

/* The gradient of a result of this shape, in the element type; NULL with an exception. */
static PyArrayObject *convert_gradient(PyObject *object, const attention_inputs *inputs,
                                       const npy_intp *shape, int axes, const char *name) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    PyArrayObject *array = mha_as_array(object, name), *converted = NULL;
    if (array == NULL) {
        return NULL;
    }
    if (PyArray_NDIM(array) != axes || !PyArray_CompareLists(PyArray_DIMS(array), shape, axes)) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted %s", name,
                     mha_array_shape_text(array, got), mha_shape_text(shape, axes, wanted));
    } else if (mha_check_real(array, name) == 0) {
        converted = axes == 0 || strcmp(name, "grad_lse") == 0
                        ? mha_as_contiguous_real(array, inputs->dtype, name)
                        : mha_as_real(array, inputs->dtype, name);
    }
    Py_DECREF(array);
    return converted;
}

static int convert(PyObject *const *args, backward_arguments *a) {
    npy_intp shape[NPY_MAXDIMS];
    const option_arguments given = {.mask = args[MASK],
                                    .bias = args[BIAS],
                                    .key_lengths = args[KEY_LENGTHS],
                                    .causal = args[CAUSAL],
                                    .query_offset = args[QUERY_OFFSET],
                                    .window = args[WINDOW],
                                    .scale = args[SCALE],
                                    .softcap = args[SOFTCAP],
                                    .empty_rows = args[EMPTY_ROWS],
                                    .dropout = args[DROPOUT],
                                    .seed = args[SEED],
                                    .return_weights = Py_False};
    if (mha_convert_inputs(args[QUERY], args[KEY], args[VALUE], false, &a->inputs) < 0 ||
        mha_convert_options(&given, a->inputs.dtype, &a->inputs.scores, &a->options) < 0 ||
        mha_check_statistics(args[STATISTICS], a->inputs.dtype, &a->inputs.scores) < 0) {
        return -1;
    }
    const int axes = mha_output_shape(&a->inputs, shape);
    PyArrayObject *output = (PyArrayObject *)args[OUTPUT];
    if (!PyArray_Check(args[OUTPUT]) || PyArray_TYPE(output) != mha_typenum(a->inputs.dtype) ||
        !PyArray_ISALIGNED(output) || !PyArray_ISNOTSWAPPED(output) ||
        PyArray_NDIM(output) != axes ||
        (PyArray_SIZE(output) > 0 && PyArray_DIM(output, axes - 1) > 1 &&
         PyArray_STRIDE(output, axes - 1) != PyArray_ITEMSIZE(output)) ||
        !PyArray_CompareLists(PyArray_DIMS(output), shape, axes)) {
        PyErr_SetString(PyExc_ValueError,
                        "output: wanted that which the same call's forward pass returned");
        return -1;
    }
    a->grad_output = convert_gradient(args[GRAD_OUTPUT], &a->inputs, shape, axes, "grad_output");
    if (a->grad_output == NULL) {
        return -1;
    }
    if (args[GRAD_LSE] != Py_None) {
        a->grad_lse = convert_gradient(args[GRAD_LSE], &a->inputs, shape, axes - 1, "grad_lse");
        return a->grad_lse == NULL ? -1 : 0;
    }
    return 0;
}

/* New arrays for the gradients that are wanted: in the memory order of query, key and value, so
 * that heads that are a view of merged columns give such a view; zeros for bias. */
static int new_gradients(int64_t wrt, backward_arguments *a) {
    PyArrayObject *const like[] = {a->inputs.query, a->inputs.key, a->inputs.value,
                                   a->options.bias};
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        if ((wrt >> i & 1) == 0 || like[i] == NULL) {
            continue;
        }
        PyArrayObject *gradient = mha_new_result_like(like[i]);
        if (gradient == NULL) {
            mha_name_missing_memory(PyArray_DIMS(like[i]), PyArray_NDIM(like[i]),
                                    GRADIENT_NAMES[i]);
            return -1;
        }
        a->gradients[i] = gradient;
        if (like[i] == a->options.bias) {
            memset(PyArray_DATA(gradient), 0, (size_t)PyArray_NBYTES(gradient));
        } else if (PyArray_NDIM(gradient) > 0 &&
                   PyArray_DIM(gradient, PyArray_NDIM(gradient) - 1) > 1 &&
                   PyArray_STRIDE(gradient, PyArray_NDIM(gradient) - 1) !=
                       PyArray_ITEMSIZE(gradient)) {
            /* KEEPORDER put another axis last: plain order then. */
            Py_SETREF(a->gradients[i],
                      mha_new_array(PyArray_NDIM(like[i]), PyArray_DIMS(like[i]),
                                    mha_typenum(a->inputs.dtype), GRADIENT_NAMES[i]));
            if (a->gradients[i] == NULL) {
                return -1;
            }
        }
    }
    return 0;
}

static void point(backward_arguments *a, PyObject *const *args, mha_attention *attention,
                  mha_attention_gradients *gradients) {
    mha_tensor *const wanted[] = {&gradients->grad_query, &gradients->grad_key,
                                  &gradients->grad_value};
    attention->dtype = a->inputs.dtype;
    attention->batch_axes = a->inputs.scores.batch_axes;
    attention->additive_w = attention->weights = attention->lse = NULL;
    mha_point_statistics((PyArrayObject *)args[STATISTICS], attention);
    mha_tensor_with_heads(a->inputs.query, &attention->query);
    mha_tensor_with_heads(a->inputs.key, &attention->key);
    mha_tensor_with_heads(a->inputs.value, &attention->value);
    mha_tensor_with_heads((PyArrayObject *)args[OUTPUT], &attention->output);
    mha_point_options(&a->options, &a->inputs.scores, &attention->options);
    gradients->attention = attention;
    mha_tensor_with_heads(a->grad_output, &gradients->grad_output);
    gradients->grad_lse = a->grad_lse == NULL ? NULL : PyArray_DATA(a->grad_lse);
    for (int i = 0; i < 3; i++) {
        wanted[i]->data = NULL;
        if (a->gradients[i] != NULL) {
            mha_tensor_with_heads(a->gradients[i], wanted[i]);
        }
    }
    gradients->grad_bias.data = NULL;
    if (a->gradients[3] != NULL) {
        mha_broadcast_to_scores(a->gradients[3], &a->inputs.scores, &gradients->grad_bias);
    }
}

static PyObject *pack_gradients(const backward_arguments *a) {
    PyObject *or_none[NUM_GRADIENTS];
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        or_none[i] = a->gradients[i] == NULL ? Py_None : (PyObject *)a->gradients[i];
    }
    return PyTuple_Pack(NUM_GRADIENTS, or_none[0], or_none[1], or_none[2], or_none[3]);
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
    point(&arguments, args, &attention, &gradients);
    if (mha_call_run(workspace_of, backward, &gradients, num_threads) < 0) {
        goto cleanup;
    }
    result = pack_gradients(&arguments);
cleanup:
    mha_clear_settled(NUM_ARGUMENTS, args);
    clear(&arguments);
    return result;
}
