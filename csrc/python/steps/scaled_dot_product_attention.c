/* scaled_dot_product_attention: step 3 of the figure. */
#include "python/steps/scaled_dot_product_attention.h"

#define ARGUMENTS(X)                                                                               \
    X(query, AS_REAL)                                                                              \
    X(key, AS_REAL)                                                                                \
    X(value, AS_REAL)                                                                              \
    MHA_OPTIONS(X)                                                                                 \
    X(return_weights, AS_FLAG)                                                                     \
    X(return_lse, AS_FLAG)                                                                         \
    X(out, AS_IT_IS)                                                                               \
    X(save, AS_FLAG)                                                                               \
    X(head_gate, AS_REAL)                                                                          \
    X(exact_lse, AS_FLAG)
MHA_ARGUMENTS(ARGUMENTS)

static void clear(void *given) {
    attention_call *call = given;
    mha_clear_inputs(&call->inputs);
    mha_clear_options(&call->options);
    mha_clear_results(&call->results);
    Py_CLEAR(call->head_gate);
    Py_CLEAR(call->exact_lse);
}

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

static int check_out_alone(PyArrayObject *out, PyObject *const *arguments) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *plain = numpy == NULL ? NULL : PyArray_View(out, NULL, &PyArray_Type);
    int failed = plain == NULL ? -1 : 0;
    for (int i = 0; !failed && i < NUM_ARGUMENTS; i++) {
        if (i == ARG_out || !PyArray_Check(arguments[i])) {
            continue;
        }
        PyObject *shared = PyObject_CallMethod(numpy, "shares_memory", "OOn", plain, arguments[i],
                                               (Py_ssize_t)100000);
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

static int check_out(PyObject *object, int typenum, const npy_intp *shape, int axes) {
    char got[MHA_SHAPE_TEXT];
    if (!PyArray_Check(object)) {
        return mha_wrong_type(object, "out", "a NumPy array");
    }
    PyArrayObject *out = (PyArrayObject *)object;
    if (mha_shown_typenum(typenum, "out") == NPY_VOID) {
        return -1;
    }
    if (PyArray_TYPE(out) != typenum || !PyArray_ISNOTSWAPPED(out)) {
        PyArray_Descr *wanted_type = PyArray_DescrFromType(typenum);
        PyErr_Format(PyExc_TypeError, "out: got an array of %S, wanted native %S",
                     (PyObject *)PyArray_DESCR(out), (PyObject *)wanted_type);
        Py_XDECREF(wanted_type);
        return -1;
    }
    if (mha_check_shape(out, shape, axes, "out") < 0) {
        return -1;
    }
    if (!PyArray_ISWRITEABLE(out)) {
        return mha_raise(PyExc_ValueError,
                         "out: got a read-only array, wanted one that can be written to");
    }
    if (!PyArray_ISALIGNED(out) || overlaps_itself(out) || !mha_last_axis_is_contiguous(out)) {
        return mha_raise(
            PyExc_ValueError,
            "out: got strides %s, wanted aligned memory with a contiguous last axis, each "
            "element its own",
            mha_shape_text(PyArray_STRIDES(out), axes, got));
    }
    return 0;
}

/* The output: `out` if given, else a new array. New reference. */
static PyArrayObject *output_array(PyObject *const *arguments, const attention_inputs *inputs) {
    PyObject *out = arguments[ARG_out];
    npy_intp shape[NPY_MAXDIMS];
    const int axes = mha_output_shape(inputs, shape);
    if (out == Py_None) {
        return mha_new_array(axes, shape, inputs->result_typenum, "output");
    }
    /* First what may let other threads run: they could give `out` another shape. */
    if ((PyArray_Check(out) && check_out_alone((PyArrayObject *)out, arguments) < 0) ||
        check_out(out, inputs->result_typenum, shape, axes) < 0) {
        return NULL;
    }
    Py_INCREF(out);
    return (PyArrayObject *)out;
}

/* lse in float64. */
static int want_exact_lse(attention_call *call) {
    const attention_inputs *inputs = &call->inputs;
    npy_intp shape[NPY_MAXDIMS];
    const int axes = mha_output_shape(inputs, shape);
    call->results.statistics = mha_new_statistics(inputs->dtype, &inputs->scores);
    call->exact_lse = mha_new_array(axes - 1, shape, NPY_FLOAT64, "lse");
    return call->results.statistics == NULL || call->exact_lse == NULL ? -1 : 0;
}

static int convert(void *given, PyObject **arguments) {
    attention_call *call = given;
    attention_inputs *inputs = &call->inputs;
    attention_results *results = &call->results;
    /* The gradients read rows, and so does the pass for an exact lse. */
    inputs->may_lie_by_columns =
        arguments[ARG_save] != Py_True && arguments[ARG_exact_lse] != Py_True;
    if (mha_convert_inputs(arguments + ARG_query, false, inputs) < 0 ||
        mha_convert_options(arguments + MHA_FIRST_OPTION, inputs->dtype, &inputs->scores,
                            &call->options) < 0) {
        return -1;
    }
    results->output = output_array(arguments, inputs);
    if (results->output == NULL ||
        mha_new_extras(arguments[ARG_return_weights], arguments[ARG_return_lse], inputs->dtype,
                       &inputs->scores, &results->weights, &results->lse) < 0 ||
        mha_optional_vector(arguments + ARG_head_gate, inputs->dtype, inputs->scores.heads,
                            "head_gate", &call->head_gate) < 0) {
        return -1;
    }
    if (arguments[ARG_save] == Py_True && call->head_gate != NULL) {
        return mha_raise(PyExc_ValueError, "head_gate: got gates with save, wanted none");
    }
    if (arguments[ARG_save] == Py_True) {
        results->statistics = mha_new_statistics(inputs->dtype, &inputs->scores);
        results->saved_output =
            mha_new_array(PyArray_NDIM(results->output), PyArray_DIMS(results->output),
                          mha_typenum(inputs->dtype), "output");
        return results->statistics == NULL || results->saved_output == NULL ? -1 : 0;
    }
    return arguments[ARG_exact_lse] == Py_True ? want_exact_lse(call) : 0;
}

bool mha_fill_attention_call(void *given) {
    attention_call *call = given;
    const mha_attention_options *options = mha_fill_options(&call->options, &call->inputs.scores);
    call->attention = mha_fill_attention(&call->inputs, &call->results, options);
    call->attention.head_gate = mha_data_or_null(call->head_gate);
    call->attention.sees_part = call->sees_part;
    return true;
}

static PyObject *results(void *given) {
    attention_call *call = given;
    if (call->exact_lse != NULL) {
        Py_XSETREF(call->results.lse, call->exact_lse);
        call->exact_lse = NULL;
    }
    return mha_pack_results(&call->results);
}

static mha_status workspace(const void *given, int num_threads, size_t *bytes) {
    const attention_call *call = given;
    return mha_scaled_dot_product_attention_workspace(&call->attention, num_threads, bytes);
}

static mha_status forward(const void *given, mha_execution *execution) {
    const attention_call *call = given;
    const mha_exact_lse exact = {&call->attention, (double *)mha_data_or_null(call->exact_lse)};
    const mha_status status = mha_scaled_dot_product_attention_forward(&call->attention, execution);
    return status != MHA_OK || exact.lse == NULL ? status
                                                 : mha_exact_lse_forward(&exact, execution);
}

MHA_MODULE_FUNCTION(scaled_dot_product_attention, attention_call, MHA_FORWARD_FIELDS,
                    .by_position = MHA_FIRST_OPTION + 1, .options = MHA_FIRST_OPTION,
                    .save = ARG_save, .fill_pointers = mha_fill_attention_call,
                    .workspace = workspace, .run = forward)
