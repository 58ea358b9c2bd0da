/* round_numbers: what a cache of halves stores of float32 numbers. */
#include "convert.h"

static bool is_plain(PyArrayObject *array) {
    return PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISALIGNED(array) &&
           PyArray_ISNOTSWAPPED(array);
}

/* round_numbers(x, out): float32 into float16 or bfloat16, both C-contiguous, of one size. */
PyObject *mha_py_round_numbers(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 2 || !PyArray_Check(args[0]) || !PyArray_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "round_numbers: wanted two arrays");
        return NULL;
    }
    PyArrayObject *x = (PyArrayObject *)args[0], *out = (PyArrayObject *)args[1];
    const mha_storage storage = mha_storage_of(out);
    if (PyArray_TYPE(x) != NPY_FLOAT32 || storage == MHA_AS_COMPUTED) {
        PyErr_Format(PyExc_TypeError, "round_numbers: got %S and %S, wanted float32 and halves",
                     (PyObject *)PyArray_DESCR(x), (PyObject *)PyArray_DESCR(out));
        return NULL;
    }
    if (!is_plain(x) || !is_plain(out) || !PyArray_ISWRITEABLE(out) ||
        PyArray_SIZE(x) != PyArray_SIZE(out)) {
        PyErr_SetString(PyExc_ValueError,
                        "round_numbers: wanted contiguous arrays of one size, out to be written");
        return NULL;
    }
    mha_round_numbers(PyArray_DATA(x), PyArray_DATA(out), storage, PyArray_SIZE(x));
    Py_RETURN_NONE;
}
