/* round_numbers: what a cache of halves or blocks stores of float32 numbers. */
#include "python/convert/convert.h"
#include "python/convert/pieces.h"

/* round_numbers(x, out): float32, however it lies, into a C-contiguous array of float16 or bfloat16
 * of one size with it; or of blocks, of 32 numbers each. */
PyObject *mha_py_round_numbers(PyObject *Py_UNUSED(module), PyObject *const *args,
                               Py_ssize_t nargs) {
    if (nargs != 2 || !PyArray_Check(args[0]) || !PyArray_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "round_numbers: wanted two arrays");
        return NULL;
    }
    PyArrayObject *x = (PyArrayObject *)args[0], *out = (PyArrayObject *)args[1];
    const bool is_in_blocks = mha_is_in_blocks(out);
    const mha_storage storage = is_in_blocks ? MHA_Q8_0 : mha_storage_of(out);
    const npy_intp of_block = is_in_blocks ? MHA_QUANTISED_ROWS : 1;
    if (PyArray_TYPE(x) != NPY_FLOAT32 || storage == MHA_AS_COMPUTED) {
        PyErr_Format(PyExc_TypeError,
                     "round_numbers: got %S and %S, wanted float32, and halves or blocks",
                     (PyObject *)PyArray_DESCR(x), (PyObject *)PyArray_DESCR(out));
        return NULL;
    }
    if (!PyArray_ISCARRAY(out) || PyArray_SIZE(x) % of_block != 0 ||
        PyArray_SIZE(x) / of_block != PyArray_SIZE(out)) {
        PyErr_SetString(PyExc_ValueError,
                        "round_numbers: wanted arrays of one size, out contiguous to be written");
        return NULL;
    }
    PyArrayObject *numbers = mha_as_contiguous_real(x, MHA_FLOAT32, "x");
    if (numbers == NULL) {
        return NULL;
    }
    const int failed = mha_round_in_pieces(PyArray_DATA(numbers), PyArray_DATA(out), storage,
                                           PyArray_SIZE(numbers));
    Py_DECREF(numbers);
    if (failed < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
