/* merge_attention: attention over parts of the keys, joined. */
#include "call.h"
#include "convert.h"

/* Owned arrays of one part each. */
typedef struct parts {
    Py_ssize_t count;
    PyArrayObject **outputs, **lses;
} parts;

static void clear(parts *p) {
    for (Py_ssize_t i = 0; i < p->count; i++) {
        Py_XDECREF(p->outputs[i]);
        Py_XDECREF(p->lses[i]);
    }
    PyMem_Free(p->outputs);
    PyMem_Free(p->lses);
}

static PyObject *as_tuple(PyObject *object, const char *name) {
    PyObject *tuple = PySequence_Tuple(object);
    if (tuple == NULL && (PyErr_ExceptionMatches(PyExc_TypeError) ||
                          PyErr_ExceptionMatches(PyExc_NotImplementedError))) {
        PyErr_Format(PyExc_TypeError, "%s: got %s, wanted a sequence of arrays", name,
                     Py_TYPE(object)->tp_name);
    }
    return tuple;
}

static int check_shapes(const parts *p) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    PyArrayObject *first = p->outputs[0];
    const int axes = PyArray_NDIM(first);
    if (axes < 2 || axes > MHA_MOST_INPUT_AXES) {
        PyErr_Format(PyExc_ValueError,
                     "outputs: got shape %s, wanted (..., query_len, value_head_dim)",
                     mha_array_shape_text(first, got));
        return -1;
    }
    for (Py_ssize_t i = 0; i < p->count; i++) {
        if (PyArray_NDIM(p->outputs[i]) != axes ||
            !PyArray_CompareLists(PyArray_DIMS(p->outputs[i]), PyArray_DIMS(first), axes)) {
            PyErr_Format(
                PyExc_ValueError, "outputs: got shape %s at %zd, wanted %s as the first has",
                mha_array_shape_text(p->outputs[i], got), i, mha_array_shape_text(first, wanted));
            return -1;
        }
        if (PyArray_NDIM(p->lses[i]) != axes - 1 ||
            !PyArray_CompareLists(PyArray_DIMS(p->lses[i]), PyArray_DIMS(first), axes - 1)) {
            PyErr_Format(PyExc_ValueError, "lses: got shape %s at %zd, wanted %s",
                         mha_array_shape_text(p->lses[i], got), i,
                         mha_shape_text(PyArray_DIMS(first), axes - 1, wanted));
            return -1;
        }
    }
    return 0;
}

/* The common type of all outputs, and with all lses. */
static int common_dtype(const parts *p, mha_dtype *dtype) {
    static const char *const names[] = {"outputs", "lses"};
    const int count = (int)(2 * p->count);
    PyArrayObject **arrays = PyMem_Calloc((size_t)count, sizeof *arrays);
    const char **array_names = PyMem_Calloc((size_t)count, sizeof *array_names);
    int failed = -1;
    if (arrays == NULL || array_names == NULL) {
        PyErr_NoMemory();
    } else {
        for (int i = 0; i < count; i++) {
            arrays[i] = i < p->count ? p->outputs[i] : p->lses[i - p->count];
            array_names[i] = names[i < p->count ? 0 : 1];
        }
        failed = mha_result_dtype(arrays, array_names, (int)p->count, dtype);
        failed = failed ? failed : mha_result_dtype(arrays, array_names, count, dtype);
    }
    PyMem_Free(arrays);
    PyMem_Free(array_names);
    return failed;
}

/* Both sequences as arrays of one element type, C-contiguous. */
static int convert_arrays(PyObject *outputs, PyObject *lses, parts *p, mha_dtype *dtype) {
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
    if (common_dtype(p, dtype) < 0) {
        return -1;
    }
    if (check_shapes(p) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < p->count; i++) {
        PyArrayObject *output = mha_as_contiguous_real(p->outputs[i], *dtype, "outputs");
        if (output == NULL) {
            return -1;
        }
        Py_SETREF(p->outputs[i], output);
        PyArrayObject *lse = mha_as_contiguous_real(p->lses[i], *dtype, "lses");
        if (lse == NULL) {
            return -1;
        }
        Py_SETREF(p->lses[i], lse);
    }
    return 0;
}

static mha_status workspace_of(const void *merge, int num_threads, size_t *bytes) {
    return mha_merge_attention_workspace(merge, num_threads, bytes);
}

static mha_status forward(const void *merge, mha_execution *execution) {
    return mha_merge_attention_forward(merge, execution);
}

static int compute(const parts *p, mha_dtype dtype, int num_threads, PyArrayObject *output,
                   PyArrayObject *lse) {
    const int axes = PyArray_NDIM(output);
    const void **pointers = PyMem_Calloc((size_t)p->count, 2 * sizeof *pointers);
    if (pointers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < p->count; i++) {
        pointers[i] = PyArray_DATA(p->outputs[i]);
        pointers[p->count + i] = PyArray_DATA(p->lses[i]);
    }
    const mha_merge_attention merge = {
        .dtype = dtype,
        .parts = p->count,
        .rows = PyArray_SIZE(lse),
        .width = PyArray_DIM(output, axes - 1),
        .outputs = pointers,
        .lses = pointers + p->count,
        .output = PyArray_DATA(output),
        .lse = PyArray_DATA(lse),
    };
    const int failed = mha_call_run(workspace_of, forward, &merge, num_threads);
    PyMem_Free(pointers);
    return failed;
}

PyObject *mha_py_merge_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *outputs = NULL, *lses = NULL, *result = NULL;
    PyArrayObject *output = NULL, *lse = NULL;
    parts p = {0};
    mha_dtype dtype;
    (void)module;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "merge_attention takes outputs and lses");
        return NULL;
    }
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    /* As tuples: making arrays of them may run Python code that changes the caller's lists. */
    outputs = as_tuple(args[0], "outputs");
    lses = outputs == NULL ? NULL : as_tuple(args[1], "lses");
    if (lses == NULL) {
        goto cleanup;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(outputs);
    if (count == 0 || PyTuple_GET_SIZE(lses) != count) {
        PyErr_Format(PyExc_ValueError,
                     "lses: got %zd for %zd outputs, wanted one for each, at least one",
                     PyTuple_GET_SIZE(lses), count);
        goto cleanup;
    }
    p.outputs = PyMem_Calloc((size_t)count, sizeof *p.outputs);
    p.lses = PyMem_Calloc((size_t)count, sizeof *p.lses);
    if (p.outputs == NULL || p.lses == NULL) {
        PyErr_NoMemory();
        goto cleanup;
    }
    p.count = count;
    if (convert_arrays(outputs, lses, &p, &dtype) < 0) {
        goto cleanup;
    }
    const int axes = PyArray_NDIM(p.outputs[0]);
    const npy_intp *shape = PyArray_DIMS(p.outputs[0]);
    output = mha_new_array(axes, shape, mha_typenum(dtype), "output");
    lse = output == NULL ? NULL : mha_new_array(axes - 1, shape, mha_typenum(dtype), "lse");
    if (lse == NULL || compute(&p, dtype, num_threads, output, lse) < 0) {
        goto cleanup;
    }
    result = PyTuple_Pack(2, (PyObject *)output, (PyObject *)lse);
cleanup:
    Py_XDECREF(outputs);
    Py_XDECREF(lses);
    Py_XDECREF(output);
    Py_XDECREF(lse);
    clear(&p);
    return result;
}
