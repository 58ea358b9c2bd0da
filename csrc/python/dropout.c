/* dropout_mask: which weights dropout keeps. */
#include "convert.h"
#include "options.h"

PyObject *mha_py_dropout_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    npy_intp shape[NPY_MAXDIMS];
    double p;
    (void)module;
    if (nargs != 3 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "dropout_mask takes shape, p and seed");
        return NULL;
    }
    const int axes = (int)PyTuple_GET_SIZE(args[0]);
    if (axes < 2 || axes > 32) {
        PyErr_Format(PyExc_ValueError, "shape: got %d axes, wanted 2 to 32", axes);
        return NULL;
    }
    for (int axis = 0; axis < axes; axis++) {
        int64_t size;
        if (mha_convert_int(PyTuple_GET_ITEM(args[0], axis), "shape", 0, &size) < 0) {
            return NULL;
        }
        shape[axis] = (npy_intp)size;
    }
    uint64_t seed;
    if (mha_convert_dropout(args[1], "p", &p) < 0 || mha_convert_seed(args[2], &seed) < 0) {
        return NULL;
    }
    PyArrayObject *kept = mha_new_array(axes, shape, NPY_BOOL, "shape");
    if (kept == NULL) {
        return NULL;
    }
    const int64_t heads = axes >= 4 ? shape[axes - 3] : 1;
    int64_t batch = 1;
    for (int axis = 0; axis < (axes >= 4 ? axes - 3 : axes - 2); axis++) {
        batch *= shape[axis];
    }
    if (PyArray_SIZE(kept) > 0) {
        uint8_t *data = PyArray_DATA(kept);
        Py_BEGIN_ALLOW_THREADS mha_dropout_mask(mha_dropout_threshold(p), seed, batch, heads,
                                                shape[axes - 2], shape[axes - 1], data);
        Py_END_ALLOW_THREADS
    }
    return (PyObject *)kept;
}
