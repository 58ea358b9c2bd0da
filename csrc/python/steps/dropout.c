/* dropout_mask: which weights dropout keeps. */
#include "python/base/call.h"
#include "python/call/options.h"
#include "python/convert/convert.h"

MHA_CORE_RUN(dropout_mask_forward)

PyObject *mha_py_dropout_mask(PyObject *Py_UNUSED(module), PyObject *const *args,
                              Py_ssize_t nargs) {
    npy_intp shape[NPY_MAXDIMS];
    double p;
    if (nargs != 4 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "dropout_mask takes shape, p, seed and offsets");
        return NULL;
    }
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    const int axes = (int)PyTuple_GET_SIZE(args[0]);
    if (axes < 2 || axes > MHA_MOST_INPUT_AXES) {
        PyErr_Format(PyExc_ValueError, "shape: got %d axes, wanted 2 to %d", axes,
                     MHA_MOST_INPUT_AXES);
        return NULL;
    }
    for (int axis = 0; axis < axes; axis++) {
        int64_t size;
        if (mha_convert_size(PyTuple_GET_ITEM(args[0], axis), "shape", 0, &size) < 0) {
            return NULL;
        }
        shape[axis] = (npy_intp)size;
    }
    uint64_t seed;
    mha_dropout_offsets offsets = {0};
    if (mha_convert_dropout(args[1], "p", &p) < 0 || mha_convert_seed(args[2], &seed) < 0 ||
        mha_convert_dropout_offsets(args[3], "offsets", &offsets) < 0) {
        return NULL;
    }
    PyArrayObject *kept = mha_new_array(axes, shape, NPY_BOOL, "shape");
    if (kept == NULL) {
        return NULL;
    }
    mha_dropout_mask mask = {
        .threshold = mha_dropout_threshold(p),
        .seed = seed,
        .offsets = offsets,
        .batch = 1,
        .heads = axes >= 4 ? shape[axes - 3] : 1,
        .query_len = shape[axes - 2],
        .key_len = shape[axes - 1],
        .kept = PyArray_DATA(kept),
    };
    for (int axis = 0; axis < (axes >= 4 ? axes - 3 : axes - 2); axis++) {
        mask.batch *= shape[axis];
    }
    if (PyArray_SIZE(kept) > 0 &&
        mha_call_run(NULL, core_dropout_mask_forward, &mask, num_threads) < 0) {
        Py_CLEAR(kept);
    }
    return (PyObject *)kept;
}
