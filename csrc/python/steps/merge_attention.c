/* merge_attention: attention over parts of the keys, joined. */
#include "python/call/function.h"

#define ARGUMENTS(X)                                                                               \
    X(outputs, AS_IT_IS)                                                                           \
    X(lses, AS_IT_IS)
MHA_ARGUMENTS(ARGUMENTS)

typedef struct parts {
    Py_ssize_t count;
    PyArrayObject **outputs, **lses; /* owned arrays of one part each */
    const void **pointers;           /* to all outputs, then to all lses */
    PyArrayObject *output, *lse;
    mha_dtype dtype;
    int result_typenum;          /* of the output */
    mha_storage outputs_storage; /* halves where all outputs are of one kind */
    mha_merge_attention merge;
} parts;

static void clear(void *given) {
    parts *p = given;
    for (Py_ssize_t i = 0; i < p->count; i++) {
        Py_XDECREF(p->outputs[i]);
        Py_XDECREF(p->lses[i]);
    }
    PyMem_Free(p->outputs);
    PyMem_Free(p->lses);
    PyMem_Free(p->pointers);
    Py_CLEAR(p->output);
    Py_CLEAR(p->lse);
}

static PyObject *as_tuple(PyObject *object, const char *name) {
    PyObject *tuple = PySequence_Tuple(object);
    if (tuple == NULL && (PyErr_ExceptionMatches(PyExc_TypeError) ||
                          PyErr_ExceptionMatches(PyExc_NotImplementedError))) {
        mha_wrong_type(object, name, "a sequence of arrays");
    }
    return tuple;
}

static int check_shapes(const parts *p) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    PyArrayObject *first = p->outputs[0];
    const int axes = PyArray_NDIM(first);
    if (axes < 2) {
        return mha_wrong_shape(first, "outputs", "(..., query_len, value_head_dim)");
    }
    for (Py_ssize_t i = 0; i < p->count; i++) {
        if (PyArray_NDIM(p->outputs[i]) != axes ||
            !PyArray_CompareLists(PyArray_DIMS(p->outputs[i]), PyArray_DIMS(first), axes)) {
            return mha_raise(
                PyExc_ValueError, "outputs: got shape %s at %zd, wanted %s as the first has",
                mha_array_shape_text(p->outputs[i], got), i, mha_array_shape_text(first, wanted));
        }
        if (PyArray_NDIM(p->lses[i]) != axes - 1 ||
            !PyArray_CompareLists(PyArray_DIMS(p->lses[i]), PyArray_DIMS(first), axes - 1)) {
            return mha_raise(PyExc_ValueError, "lses: got shape %s at %zd, wanted %s",
                             mha_array_shape_text(p->lses[i], got), i,
                             mha_shape_text(PyArray_DIMS(first), axes - 1, wanted));
        }
    }
    return 0;
}

static mha_storage common_storage(const parts *p) {
    const mha_storage first = mha_storage_of(p->outputs[0]);
    for (Py_ssize_t i = 1; i < p->count; i++) {
        if (mha_storage_of(p->outputs[i]) != first) {
            return MHA_AS_COMPUTED;
        }
    }
    return first;
}

/* The common type of all outputs, and with all lses, which leave outputs of halves what they are
 * unless they are wider than float32. */
static int convert_types(parts *p) {
    static const char *const names[] = {"outputs", "lses"};
    const int count = (int)(2 * p->count);
    PyArrayObject **arrays = PyMem_Calloc((size_t)count, sizeof *arrays);
    const char **array_names = PyMem_Calloc((size_t)count, sizeof *array_names);
    int failed = -1, of_outputs, of_all;
    if (arrays == NULL || array_names == NULL) {
        PyErr_NoMemory();
    } else {
        for (int i = 0; i < count; i++) {
            arrays[i] = i < p->count ? p->outputs[i] : p->lses[i - p->count];
            array_names[i] = names[i < p->count ? 0 : 1];
        }
        failed = mha_result_types(arrays, array_names, (int)p->count, &p->dtype, &of_outputs);
        failed = failed ? failed : mha_result_types(arrays, array_names, count, &p->dtype, &of_all);
    }
    if (!failed) {
        const bool halves = p->dtype == MHA_FLOAT32 && mha_is_half_type(of_outputs);
        p->result_typenum = halves ? of_outputs : mha_typenum(p->dtype);
        p->outputs_storage = halves ? common_storage(p) : MHA_AS_COMPUTED;
    }
    PyMem_Free(arrays);
    PyMem_Free(array_names);
    return failed;
}

static PyArrayObject *convert_output(const parts *p, PyArrayObject *output) {
    return p->outputs_storage == MHA_AS_COMPUTED
               ? mha_as_contiguous_real(output, p->dtype, "outputs")
               : mha_as_contiguous_stored(output, p->dtype, "outputs");
}

/* Both sequences as arrays of one element type, C-contiguous. */
static int convert_arrays(PyObject *outputs, PyObject *lses, parts *p) {
    for (Py_ssize_t i = 0; i < p->count; i++) {
        p->outputs[i] = mha_as_array(PyTuple_GET_ITEM(outputs, i), "outputs");
        p->lses[i] = p->outputs[i] == NULL ? NULL : mha_as_array(PyTuple_GET_ITEM(lses, i), "lses");
        if (p->lses[i] == NULL) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < p->count; i++) {
        if (mha_make_private((PyObject **)&p->outputs[i]) < 0 ||
            mha_make_private((PyObject **)&p->lses[i]) < 0) {
            return -1;
        }
    }
    if (convert_types(p) < 0) {
        return -1;
    }
    if (check_shapes(p) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < p->count; i++) {
        /* Copies of many parts take long. */
        PyArrayObject *output = PyErr_CheckSignals() < 0 ? NULL : convert_output(p, p->outputs[i]);
        if (output == NULL) {
            return -1;
        }
        Py_SETREF(p->outputs[i], output);
        PyArrayObject *lse = mha_as_contiguous_real(p->lses[i], p->dtype, "lses");
        if (lse == NULL) {
            return -1;
        }
        Py_SETREF(p->lses[i], lse);
    }
    return 0;
}

static int allocate(Py_ssize_t count, parts *p) {
    p->outputs = PyMem_Calloc((size_t)count, sizeof *p->outputs);
    p->lses = PyMem_Calloc((size_t)count, sizeof *p->lses);
    p->pointers = PyMem_Calloc((size_t)count, 2 * sizeof *p->pointers);
    if (p->outputs == NULL || p->lses == NULL || p->pointers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->count = count;
    return 0;
}

static int convert_sequences(PyObject *outputs, PyObject *lses, parts *p) {
    const Py_ssize_t count = PyTuple_GET_SIZE(outputs);
    if (count == 0 || PyTuple_GET_SIZE(lses) != count) {
        return mha_raise(PyExc_ValueError,
                         "lses: got %zd for %zd outputs, wanted one for each, at least one",
                         PyTuple_GET_SIZE(lses), count);
    }
    if (allocate(count, p) < 0 || convert_arrays(outputs, lses, p) < 0) {
        return -1;
    }
    const int axes = PyArray_NDIM(p->outputs[0]);
    const npy_intp *shape = PyArray_DIMS(p->outputs[0]);
    p->output = mha_new_array(axes, shape, p->result_typenum, "output");
    if (p->output == NULL) {
        return -1;
    }
    p->lse = mha_new_array(axes - 1, shape, mha_typenum(p->dtype), "lse");
    return p->lse == NULL ? -1 : 0;
}

static int convert(void *given, PyObject **arguments) {
    /* As tuples: making arrays of them may run Python code that changes the caller's lists. */
    PyObject *outputs = as_tuple(arguments[ARG_outputs], "outputs");
    PyObject *lses = outputs == NULL ? NULL : as_tuple(arguments[ARG_lses], "lses");
    const int failed = lses == NULL ? -1 : convert_sequences(outputs, lses, given);
    Py_XDECREF(outputs);
    Py_XDECREF(lses);
    return failed;
}

static bool fill_pointers(void *given) {
    parts *p = given;
    for (Py_ssize_t i = 0; i < p->count; i++) {
        p->pointers[i] = PyArray_DATA(p->outputs[i]);
        p->pointers[p->count + i] = PyArray_DATA(p->lses[i]);
    }
    p->merge = (mha_merge_attention){
        .dtype = p->dtype,
        .parts = p->count,
        .rows = PyArray_SIZE(p->lse),
        .width = PyArray_DIM(p->output, PyArray_NDIM(p->output) - 1),
        .outputs = p->pointers,
        .lses = p->pointers + p->count,
        .output = PyArray_DATA(p->output),
        .lse = PyArray_DATA(p->lse),
        .outputs_storage = p->outputs_storage,
        .output_storage = mha_storage_of(p->output),
    };
    return true;
}

static PyObject *results(void *given) {
    const parts *p = given;
    return PyTuple_Pack(2, (PyObject *)p->output, (PyObject *)p->lse);
}

MHA_FORWARD_FUNCTION(merge_attention, merge_attention, parts, merge, .by_position = NUM_ARGUMENTS,
                     .options = NO_OPTIONS, .fill_pointers = fill_pointers)
