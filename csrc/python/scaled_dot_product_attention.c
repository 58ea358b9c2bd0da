/* scaled_dot_product_attention: step 3 of the figure. */
#include "call.h"
#include "inputs.h"

enum argument {
    QUERY,
    KEY,
    VALUE,
    OPTIONS, /* NUM_OPTIONS arguments */
    RETURN_WEIGHTS = OPTIONS + NUM_OPTIONS,
    RETURN_LSE,
    OUT,
    RETURN_STATISTICS,
    NUM_ARGUMENTS
};

/* How each argument is settled; the others are taken as they are. */
static const argument_form FORMS[NUM_ARGUMENTS] = {
    [QUERY] = {"query", AS_REAL},
    [KEY] = {"key", AS_REAL},
    [VALUE] = {"value", AS_REAL},
    MHA_OPTION_FORMS(OPTIONS),
};

/* Whether two indices may meet in one element: an axis steps less far than those with smaller
 * strides reach. */
static bool overlaps_itself(PyArrayObject *array) {
    const int axes = PyArray_NDIM(array);
    if (PyArray_SIZE(array) == 0) {
        return false;
    }
    for (int axis = 0; axis < axes; axis++) {
        npy_intp stride = Py_ABS(PyArray_STRIDE(array, axis));
        npy_intp reach = PyArray_ITEMSIZE(array);
        for (int other = 0; other < axes; other++) {
            const npy_intp step = Py_ABS(PyArray_STRIDE(array, other));
            if (other != axis && PyArray_DIM(array, other) > 1 &&
                (step < stride || (step == stride && other > axis))) {
                reach += step * (PyArray_DIM(array, other) - 1);
            }
        }
        if (PyArray_DIM(array, axis) > 1 && stride < reach) {
            return true;
        }
    }
    return false;
}

static int check_out_alone(PyArrayObject *out, PyObject *const *args) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *plain = numpy == NULL ? NULL : PyArray_View(out, NULL, &PyArray_Type);
    int failed = plain == NULL ? -1 : 0;
    for (int i = 0; !failed && i < NUM_ARGUMENTS; i++) {
        if (i == OUT || !PyArray_Check(args[i])) {
            continue;
        }
        PyObject *shared =
            PyObject_CallMethod(numpy, "shares_memory", "OOn", plain, args[i], (Py_ssize_t)100000);
        if (shared == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear(); /* too hard to decide: not worth the risk */
            shared = Py_NewRef(Py_True);
        }
        if (shared == NULL) {
            failed = -1;
        } else if (PyObject_IsTrue(shared)) {
            PyErr_Format(PyExc_ValueError, "out: got memory of %s, wanted an array of its own",
                         FORMS[i].name);
            failed = -1;
        }
        Py_XDECREF(shared);
    }
    Py_XDECREF(plain);
    Py_XDECREF(numpy);
    return failed;
}

static int check_out(PyObject *object, mha_dtype dtype, const npy_intp *shape, int axes) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "out: got %s, wanted a NumPy array",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyArrayObject *out = (PyArrayObject *)object;
    if (PyArray_TYPE(out) != mha_typenum(dtype) || !PyArray_ISNOTSWAPPED(out)) {
        PyErr_Format(PyExc_TypeError, "out: got an array of %S, wanted native %s",
                     (PyObject *)PyArray_DESCR(out), dtype == MHA_FLOAT32 ? "float32" : "float64");
        return -1;
    }
    if (PyArray_NDIM(out) != axes || !PyArray_CompareLists(PyArray_DIMS(out), shape, axes)) {
        PyErr_Format(PyExc_ValueError, "out: got shape %s, wanted %s",
                     mha_array_shape_text(out, got), mha_shape_text(shape, axes, wanted));
        return -1;
    }
    if (!PyArray_ISWRITEABLE(out)) {
        PyErr_SetString(PyExc_ValueError,
                        "out: got a read-only array, wanted one that can be written to");
        return -1;
    }
    if (!PyArray_ISALIGNED(out) || overlaps_itself(out) || !mha_last_axis_is_contiguous(out)) {
        PyErr_Format(PyExc_ValueError,
                     "out: got strides %s, wanted aligned memory with a contiguous last axis, each "
                     "element its own",
                     mha_shape_text(PyArray_STRIDES(out), axes, got));
        return -1;
    }
    return 0;
}

/* The output: `out` if given, else a new array. New reference. */
static PyArrayObject *output_array(PyObject *out, PyObject *const *args,
                                   const attention_inputs *inputs) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = mha_output_shape(inputs, shape);
    if (out == Py_None) {
        return mha_new_array(axes, shape, mha_typenum(inputs->dtype), "output");
    }
    /* First what may let other threads run: they could give `out` another shape. */
    if ((PyArray_Check(out) && check_out_alone((PyArrayObject *)out, args) < 0) ||
        check_out(out, inputs->dtype, shape, axes) < 0) {
        return NULL;
    }
    Py_INCREF(out);
    return (PyArrayObject *)out;
}

static mha_status workspace_of(const void *attention, int num_threads, size_t *bytes) {
    return mha_scaled_dot_product_attention_workspace(attention, num_threads, bytes);
}

static mha_status forward(const void *attention, mha_execution *execution) {
    return mha_scaled_dot_product_attention_forward(attention, execution);
}

PyObject *mha_py_scaled_dot_product_attention(PyObject *module, PyObject *const *given_args,
                                              Py_ssize_t nargs) {
    PyObject *args[NUM_ARGUMENTS] = {NULL};
    attention_inputs inputs = {0};
    converted_options options = {0};
    PyArrayObject *output = NULL, *weights = NULL, *lse = NULL, *statistics = NULL, *kept = NULL;
    PyObject *result = NULL;
    mha_attention_options pointed;
    mha_attention attention;
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
    if (mha_convert_inputs(args[QUERY], args[KEY], args[VALUE], false, &inputs) < 0 ||
        mha_convert_options(args + OPTIONS, inputs.dtype, &inputs.scores, &options) < 0) {
        goto cleanup;
    }
    output = output_array(args[OUT], args, &inputs);
    if (output == NULL || mha_new_extras(args[RETURN_WEIGHTS], args[RETURN_LSE], inputs.dtype,
                                         &inputs.scores, &weights, &lse) < 0) {
        goto cleanup;
    }
    if (args[RETURN_STATISTICS] == Py_True) {
        statistics = mha_new_statistics(inputs.dtype, &inputs.scores);
        kept = mha_new_array(PyArray_NDIM(output), PyArray_DIMS(output), PyArray_TYPE(output),
                             "output");
        if (statistics == NULL || kept == NULL) {
            goto cleanup;
        }
    }
    /* 2. Take the pointers. */
    const attention_results results = {output, weights, lse, statistics};
    mha_point_attention(&inputs, &options, &results, &pointed, &attention);
    /* 3. Compute. */
    if (mha_call_run(workspace_of, forward, &attention, num_threads) < 0) {
        goto cleanup;
    }
    if (kept != NULL && PyArray_CopyInto(kept, output) < 0) {
        goto cleanup;
    }
    result = mha_pack_results(output, weights, lse);
    output = weights = lse = NULL;
    if (statistics != NULL && result != NULL) { /* the caller may change the output */
        PyObject *all = PyTuple_Pack(3, result, (PyObject *)kept, (PyObject *)statistics);
        Py_SETREF(result, all);
    }
cleanup:
    mha_clear_settled(NUM_ARGUMENTS, args);
    mha_clear_inputs(&inputs);
    mha_clear_options(&options);
    Py_XDECREF(output);
    Py_XDECREF(weights);
    Py_XDECREF(lse);
    Py_XDECREF(statistics);
    Py_XDECREF(kept);
    return result;
}
