#include "python/convert/pieces.h"

#include "python/base/call.h"
#include "python/base/results.h"
#include "python/convert/convert.h"

/* What the slowest cast does in a few milliseconds. */
enum { PIECE_BYTES = 1 << 20 };

/* The longest axis but those of one, by stride. */
static int outermost_axis(PyArrayObject *array) {
    int outermost = -1;
    npy_intp longest = -1;
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        const npy_intp length = Py_ABS(PyArray_STRIDE(array, axis));
        if (PyArray_DIM(array, axis) > 1 && length > longest) {
            outermost = axis;
            longest = length;
        }
    }
    return outermost;
}

/* array[..., begin:begin + count, ...], of that axis. */
static PyArrayObject *part_of(PyArrayObject *array, int axis, npy_intp begin, npy_intp count) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = PyArray_NDIM(array);
    memcpy(shape, PyArray_DIMS(array), (size_t)axes * sizeof *shape);
    shape[axis] = count;
    return mha_new_view(array, PyArray_BYTES(array) + begin * PyArray_STRIDE(array, axis), axes,
                        shape, PyArray_STRIDES(array), PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE);
}

static int copy_part(PyArrayObject *to, PyArrayObject *from, int axis, npy_intp begin,
                     npy_intp count) {
    PyArrayObject *to_part = part_of(to, axis, begin, count);
    PyArrayObject *from_part = to_part == NULL ? NULL : part_of(from, axis, begin, count);
    const int failed = from_part == NULL ? -1 : mha_copy_numbers(to_part, from_part);
    Py_XDECREF(to_part);
    Py_XDECREF(from_part);
    return failed;
}

/* Whether the address and all strides are multiples of a number's size, which is a power of two. */
static bool lies_in_steps_of_numbers(PyArrayObject *array) {
    const npy_intp item = PyArray_ITEMSIZE(array);
    uintptr_t all = (uintptr_t)PyArray_DATA(array);
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        all |= (uintptr_t)PyArray_STRIDE(array, axis);
    }
    return item > 0 && (item & (item - 1)) == 0 && all % (uintptr_t)item == 0;
}

/* The axis along which numbers of `from` lie side by side, and not those of `to`, whose last axis
 * they are; -1 where NumPy's own copy is as fast, or arrays hold what the core does not move. */
static int axis_to_transpose(PyArrayObject *to, PyArrayObject *from) {
    enum { FEWEST = 4 };
    const int last = PyArray_NDIM(to) - 1;
    const npy_intp item = PyArray_ITEMSIZE(from);
    if (last < 1 || last >= MHA_MAX_AXES || !PyArray_SAMESHAPE(to, from) ||
        PyArray_TYPE(to) != PyArray_TYPE(from) || PyArray_ITEMSIZE(to) != item ||
        item > (npy_intp)sizeof(double) || PyDataType_REFCHK(PyArray_DESCR(from)) ||
        !PyArray_ISNOTSWAPPED(from) || !lies_in_steps_of_numbers(from) ||
        !lies_in_steps_of_numbers(to) || PyArray_DIM(to, last) < FEWEST ||
        PyArray_STRIDE(to, last) != item) {
        return -1;
    }
    for (int axis = 0; axis < last; axis++) {
        if (PyArray_STRIDE(from, axis) == item && PyArray_DIM(from, axis) >= FEWEST) {
            return axis;
        }
    }
    return -1;
}

MHA_CORE_RUN(copy_transposing)

/* Not in pieces: the core asks for signals. Without the GIL if that is worth it, once, since
 * getting it again beside a busy thread takes milliseconds. */
static int transpose_numbers(PyArrayObject *to, PyArrayObject *from, int axis) {
    enum { FEWEST_BYTES_WITHOUT_GIL = 1 << 18 };
    const mha_transposing_copy copy = {
        .to = mha_tensor_of(to),
        .from = mha_tensor_of(from),
        .column_axis = axis,
        .item = (size_t)PyArray_ITEMSIZE(from),
    };
    if (PyArray_NBYTES(from) >= FEWEST_BYTES_WITHOUT_GIL) {
        const int num_threads = mha_call_threads();
        return num_threads == 0 ? -1
                                : mha_call_run(NULL, core_copy_transposing, &copy, num_threads);
    }
    mha_execution alone = {.num_threads = 1};
    if (mha_copy_transposing(&copy, &alone) != MHA_OK) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

int mha_copy_numbers(PyArrayObject *to, PyArrayObject *from) {
    const int column_axis = axis_to_transpose(to, from);
    if (column_axis >= 0) {
        return transpose_numbers(to, from, column_axis);
    }
    const npy_intp bytes = PyArray_SIZE(to) * Py_MAX(PyArray_ITEMSIZE(to), PyArray_ITEMSIZE(from));
    const int axis = bytes <= PIECE_BYTES ? -1 : outermost_axis(to);
    if (axis < 0) {
        return PyArray_CopyInto(to, from);
    }
    const npy_intp length = PyArray_DIM(to, axis), row = bytes / length;
    const npy_intp step = row < PIECE_BYTES ? PIECE_BYTES / row : 1;
    for (npy_intp begin = 0; begin < length; begin += step) {
        const npy_intp count = Py_MIN(length - begin, step);
        if (PyErr_CheckSignals() < 0 || copy_part(to, from, axis, begin, count) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A new array like this one, with its numbers; `type` is taken over. */
static PyArrayObject *copy_of(PyArrayObject *array, PyArray_Descr *type, NPY_ORDER order,
                              const char *name) {
    PyArrayObject *copy = (PyArrayObject *)PyArray_NewLikeArray(array, order, type, 0);
    if (copy == NULL) {
        mha_name_missing_memory(PyArray_DIMS(array), PyArray_NDIM(array), name);
    } else if (mha_copy_numbers(copy, array) < 0) {
        Py_CLEAR(copy);
    }
    return copy;
}

/* Whether numbers of both arrays, of one shape, lie in the same order. */
static bool lie_alike(PyArrayObject *a, PyArrayObject *b) {
    bool alike = true;
    for (int axis = 0; axis < PyArray_NDIM(a) && PyArray_SIZE(a) > 0; axis++) {
        alike &= PyArray_DIM(a, axis) == 1 || PyArray_STRIDE(a, axis) * PyArray_ITEMSIZE(b) ==
                                                  PyArray_STRIDE(b, axis) * PyArray_ITEMSIZE(a);
    }
    return alike;
}

/* float32 numbers of halves without gaps, in their order; NULL without an exception where there are
 * gaps. */
static PyArrayObject *widened_in_order(PyArrayObject *halves, const char *name) {
    PyArrayObject *numbers = mha_new_result_like(halves, NPY_FLOAT32);
    if (numbers == NULL) {
        mha_name_missing_memory(PyArray_DIMS(halves), PyArray_NDIM(halves), name);
    } else if (!lie_alike(numbers, halves) ||
               mha_widen_in_pieces(PyArray_DATA(halves), mha_storage_of(halves),
                                   PyArray_DATA(numbers), PyArray_SIZE(numbers)) < 0) {
        Py_CLEAR(numbers);
    }
    return numbers;
}

/* The same of any halves. NumPy, and the libraries that bring bfloat16 to it, widen one number at a
 * time, which takes twenty times as long. */
static PyArrayObject *widened(PyArrayObject *halves, NPY_ORDER order, const char *name) {
    PyArrayObject *numbers = NULL;
    if (PyArray_ISALIGNED(halves) && (order == NPY_KEEPORDER || PyArray_IS_C_CONTIGUOUS(halves))) {
        numbers = widened_in_order(halves, name);
    }
    if (numbers == NULL && !PyErr_Occurred()) {
        Py_INCREF(PyArray_DESCR(halves));
        /* A copy has no gaps. */
        PyArrayObject *dense = copy_of(halves, PyArray_DESCR(halves), order, name);
        numbers = dense == NULL ? NULL : widened_in_order(dense, name);
        Py_XDECREF(dense);
    }
    return numbers;
}

PyArrayObject *mha_cast(PyArrayObject *array, PyArray_Descr *type, int flags, const char *name) {
    const NPY_ORDER order = (flags & NPY_ARRAY_C_CONTIGUOUS) != 0 ? NPY_CORDER : NPY_KEEPORDER;
    if (type->type_num == NPY_FLOAT32 && PyArray_ISNOTSWAPPED(array) &&
        mha_storage_of(array) != MHA_AS_COMPUTED) {
        Py_DECREF(type);
        return widened(array, order, name);
    }
    const npy_intp item = Py_MAX(PyDataType_ELSIZE(type), PyArray_ITEMSIZE(array));
    const bool is_as_wanted = PyArray_EquivTypes(PyArray_DESCR(array), type) &&
                              PyArray_CHKFLAGS(array, flags & NPY_ARRAY_CARRAY) &&
                              (flags & NPY_ARRAY_ENSURECOPY) == 0;
    if (is_as_wanted || PyArray_SIZE(array) <= PIECE_BYTES / item) {
        PyArrayObject *cast =
            (PyArrayObject *)PyArray_FromArray(array, type, flags | NPY_ARRAY_FORCECAST);
        if (cast == NULL) {
            mha_name_missing_memory(PyArray_DIMS(array), PyArray_NDIM(array), name);
        }
        return cast;
    }
    return copy_of(array, type, order, name);
}

PyArrayObject *mha_contiguous_copy(PyArrayObject *array, const char *name) {
    Py_INCREF(PyArray_DESCR(array));
    return copy_of(array, PyArray_DESCR(array), NPY_CORDER, name);
}

PyArrayObject *mha_contiguous(PyArrayObject *array, const char *name) {
    return PyArray_IS_C_CONTIGUOUS(array) ? (PyArrayObject *)Py_NewRef((PyObject *)array)
                                          : mha_contiguous_copy(array, name);
}

int mha_round_in_pieces(const float *from, void *to, mha_storage storage, npy_intp count) {
    enum { NUMBERS = PIECE_BYTES / sizeof(float) };
    for (npy_intp i = 0; i < count; i += NUMBERS) {
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        char *at = (char *)to + (storage == MHA_Q8_0 ? i / MHA_QUANTISED_ROWS * MHA_Q8_0_BYTES
                                                     : i * (npy_intp)sizeof(uint16_t));
        mha_round_numbers(from + i, at, storage, count - i < NUMBERS ? count - i : NUMBERS);
    }
    return 0;
}

int mha_widen_in_pieces(const void *from, mha_storage storage, float *to, npy_intp count) {
    enum { NUMBERS = PIECE_BYTES / sizeof(float) };
    for (npy_intp i = 0; i < count; i += NUMBERS) {
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        mha_widen_numbers((const uint16_t *)from + i, storage, to + i,
                          count - i < NUMBERS ? count - i : NUMBERS);
    }
    return 0;
}
