#include "python/convert/convert.h"

#include "python/base/results.h"
#include "python/convert/pieces.h"

#include <stdio.h>

int mha_make_private(PyObject **array) {
    PyObject *view = PyArray_View((PyArrayObject *)*array, NULL, NULL);
    if (view == NULL) {
        return -1;
    }
    Py_SETREF(*array, view);
    return 0;
}

void *mha_own_capsule(PyObject *object, const char *name, PyCapsule_Destructor clear) {
    return PyCapsule_IsValid(object, name) && PyCapsule_GetDestructor(object) == clear
               ? PyCapsule_GetPointer(object, name)
               : NULL;
}

void mha_name_missing_memory(const npy_intp *shape, int axes, const char *name) {
    char text[MHA_SHAPE_TEXT];
    if (PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Format(PyExc_MemoryError, "%s: got shape %s, wanted one that fits in memory", name,
                     mha_shape_text(shape, axes, text));
    }
}

PyArrayObject *mha_new_array(int axes, const npy_intp *shape, int typenum, const char *name) {
    const int shown = mha_shown_typenum(typenum, name);
    PyArrayObject *array = shown == NPY_VOID ? NULL : mha_new_result(axes, shape, shown);
    if (array == NULL) {
        mha_name_missing_memory(shape, axes, name);
    }
    return array;
}

enum { ALIGNED = NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED };

/* A new reference to the array in the element type, with `flags` of PyArray_FromArray. */
static PyArrayObject *as_real(PyArrayObject *array, mha_dtype dtype, const char *name, int flags) {
    if (mha_check_real(array, name) < 0) {
        return NULL;
    }
    /* NumPy does not know bfloat16. */
    PyArrayObject *known = PyArray_TYPE(array) == NPY_VOID
                               ? mha_cast(array, PyArray_DescrFromType(NPY_FLOAT32), flags, name)
                               : (PyArrayObject *)Py_NewRef((PyObject *)array);
    PyArrayObject *real = known == NULL ? NULL
                                        : mha_cast(known, PyArray_DescrFromType(mha_typenum(dtype)),
                                                   ALIGNED | flags, name);
    Py_XDECREF(known);
    return real;
}

PyArrayObject *mha_new_view(PyArrayObject *array, void *data, int axes, const npy_intp *shape,
                            const npy_intp *strides, int writeable) {
    Py_INCREF(PyArray_DESCR(array));
    PyObject *view = PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(array), axes, shape, strides,
                                          data, writeable, NULL);
    if (view != NULL) {
        Py_INCREF(array); /* the view takes it over */
        if (PyArray_SetBaseObject((PyArrayObject *)view, (PyObject *)array) < 0) {
            Py_CLEAR(view);
        }
    }
    return (PyArrayObject *)view;
}

/* A view of the same numbers: axes that repeat theirs are as long as `lengths` says, the others as
 * they are. */
static PyArrayObject *with_repeated_axes(PyArrayObject *array, PyArrayObject *repeating,
                                         const npy_intp *lengths) {
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    const int axes = PyArray_NDIM(array);
    for (int axis = 0; axis < axes; axis++) {
        const bool repeats = PyArray_STRIDE(repeating, axis) == 0;
        shape[axis] = repeats ? (lengths == NULL ? 1 : lengths[axis]) : PyArray_DIM(array, axis);
        strides[axis] = repeats ? 0 : PyArray_STRIDE(array, axis);
    }
    return mha_new_view(array, PyArray_DATA(array), axes, shape, strides, 0);
}

PyArrayObject *mha_as_strided_real(PyArrayObject *array, mha_dtype dtype, const char *name) {
    bool repeats = false;
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        repeats |= PyArray_STRIDE(array, axis) == 0 && PyArray_DIM(array, axis) > 1;
    }
    if (!repeats || PyArray_SIZE(array) == 0) {
        return as_real(array, dtype, name, 0);
    }
    /* Casting what is there once: what is only repeated may be as large as all scores. */
    PyArrayObject *once = with_repeated_axes(array, array, NULL), *result = NULL;
    PyArrayObject *real = once == NULL ? NULL : as_real(once, dtype, name, 0);
    if (real != NULL) {
        result = with_repeated_axes(real, array, PyArray_DIMS(array));
    }
    Py_XDECREF(once);
    Py_XDECREF(real);
    return result;
}

PyArrayObject *mha_as_contiguous_real(PyArrayObject *array, mha_dtype dtype, const char *name) {
    return as_real(array, dtype, name, NPY_ARRAY_C_CONTIGUOUS);
}

bool mha_last_axis_is_contiguous(PyArrayObject *array) {
    const int last = PyArray_NDIM(array) - 1;
    return last < 0 || PyArray_DIM(array, last) <= 1 || PyArray_SIZE(array) == 0 ||
           PyArray_STRIDE(array, last) == PyArray_ITEMSIZE(array);
}

/* `array`, taken over, if it lies as it should; else a C-contiguous copy of it. */
static PyArrayObject *or_copy(PyArrayObject *array, bool lies_well, const char *name) {
    if (array == NULL || lies_well) {
        return array;
    }
    PyArrayObject *copy = mha_contiguous_copy(array, name);
    Py_DECREF(array);
    return copy;
}

static PyArrayObject *with_contiguous_rows(PyArrayObject *array, const char *name) {
    return or_copy(array, array != NULL && mha_last_axis_is_contiguous(array), name);
}

PyArrayObject *mha_as_real(PyArrayObject *array, mha_dtype dtype, const char *name) {
    return with_contiguous_rows(as_real(array, dtype, name, 0), name);
}

PyArrayObject *mha_as_stored(PyArrayObject *array, mha_dtype dtype, const char *name) {
    if (dtype != MHA_FLOAT32 || mha_storage_of(array) == MHA_AS_COMPUTED) {
        return mha_as_real(array, dtype, name);
    }
    return with_contiguous_rows(mha_as_strided_stored(array, dtype, name), name);
}

static bool lies_by_columns(PyArrayObject *array, mha_dtype dtype) {
    enum { FEWEST_ROWS = 4 }; /* fewer are copied, all at once: docs/journal.md */
    const int rows = PyArray_NDIM(array) - 2;
    const npy_intp item = PyArray_ITEMSIZE(array);
    return rows >= 0 && PyArray_TYPE(array) == mha_typenum(dtype) &&
           PyArray_DIM(array, rows) >= FEWEST_ROWS && PyArray_STRIDE(array, rows) == item &&
           PyArray_STRIDE(array, rows + 1) % item == 0;
}

PyArrayObject *mha_as_stored_either_way(PyArrayObject *array, mha_dtype dtype, const char *name) {
    PyArrayObject *stored = mha_as_strided_stored(array, dtype, name);
    return or_copy(stored,
                   stored != NULL &&
                       (mha_last_axis_is_contiguous(stored) || lies_by_columns(stored, dtype)),
                   name);
}

PyArrayObject *mha_as_contiguous_stored(PyArrayObject *array, mha_dtype dtype, const char *name) {
    PyArrayObject *stored = mha_as_strided_stored(array, dtype, name);
    return or_copy(stored, stored != NULL && PyArray_IS_C_CONTIGUOUS(stored), name);
}

PyArrayObject *mha_as_strided_stored(PyArrayObject *array, mha_dtype dtype, const char *name) {
    if (dtype != MHA_FLOAT32 || mha_storage_of(array) == MHA_AS_COMPUTED) {
        return mha_as_strided_real(array, dtype, name);
    }
    if (PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array)) {
        return (PyArrayObject *)Py_NewRef((PyObject *)array);
    }
    PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(array), NPY_NATIVE);
    return native == NULL ? NULL : mha_cast(array, native, ALIGNED, name);
}

PyArrayObject *mha_as_integers(PyObject *object, const char *name) {
    PyArrayObject *array = mha_as_array(object, name);
    if (array == NULL) {
        return NULL;
    }
    const bool may_wrap = PyArray_TYPE(array) == NPY_UINT64 || PyArray_TYPE(array) == NPY_ULONGLONG;
    if (!PyArray_ISINTEGER(array) && PyArray_SIZE(array) > 0) {
        mha_wrong_dtype(array, name, "integers");
        Py_DECREF(array);
        return NULL;
    }
    PyArrayObject *integers = mha_cast(array, PyArray_DescrFromType(NPY_INT64),
                                       NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY, name);
    if (integers != NULL && may_wrap) { /* negative where the number is beyond int64 */
        int64_t *values = PyArray_DATA(integers);
        for (npy_intp i = 0; i < PyArray_SIZE(integers); i++) {
            values[i] = values[i] < 0 ? INT64_MAX : values[i];
        }
    }
    Py_DECREF(array);
    return integers;
}

int mha_optional_vector(PyObject **argument, mha_dtype dtype, int64_t length, const char *name,
                        PyArrayObject **vector) {
    *vector = NULL;
    if (*argument == Py_None) {
        return 0;
    }
    PyArrayObject *array = mha_array_argument(argument, name);
    if (array == NULL) {
        return -1;
    }
    if (PyArray_NDIM(array) != 1 || PyArray_DIM(array, 0) != length) {
        return mha_wrong_shape(array, name, "(%lld,)", (long long)length);
    }
    *vector = mha_as_contiguous_real(array, dtype, name);
    return *vector == NULL ? -1 : 0;
}

const char *mha_shape_text(const npy_intp *shape, int axes, char text[MHA_SHAPE_TEXT]) {
    int used = snprintf(text, MHA_SHAPE_TEXT, "(");
    for (int axis = 0; axis < axes && used < MHA_SHAPE_TEXT; axis++) {
        const char *after = axis + 1 < axes ? ", " : axes == 1 ? "," : "";
        used += snprintf(text + used, (size_t)(MHA_SHAPE_TEXT - used), "%lld%s",
                         (long long)shape[axis], after);
    }
    if (used < MHA_SHAPE_TEXT) {
        snprintf(text + used, (size_t)(MHA_SHAPE_TEXT - used), ")");
    }
    return text;
}

const char *mha_array_shape_text(PyArrayObject *array, char text[MHA_SHAPE_TEXT]) {
    return mha_shape_text(PyArray_DIMS(array), PyArray_NDIM(array), text);
}

int mha_raise(PyObject *exception, const char *message, ...) {
    va_list values;
    va_start(values, message);
    PyErr_FormatV(exception, message, values);
    va_end(values);
    return -1;
}

int mha_wrong_type(PyObject *object, const char *name, const char *wanted) {
    return mha_raise(PyExc_TypeError, "%s: got %s, wanted %s", name, Py_TYPE(object)->tp_name,
                     wanted);
}

int mha_wrong_shape(PyArrayObject *array, const char *name, const char *wanted, ...) {
    char got[MHA_SHAPE_TEXT];
    va_list values;
    va_start(values, wanted);
    PyObject *text = PyUnicode_FromFormatV(wanted, values);
    va_end(values);
    if (text != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted %U", name,
                     mha_array_shape_text(array, got), text);
        Py_DECREF(text);
    }
    return -1;
}

int mha_check_shape(PyArrayObject *array, const npy_intp *shape, int axes, const char *name) {
    char wanted[MHA_SHAPE_TEXT];
    const bool fits =
        PyArray_NDIM(array) == axes && PyArray_CompareLists(PyArray_DIMS(array), shape, axes);
    return fits ? 0 : mha_wrong_shape(array, name, "%s", mha_shape_text(shape, axes, wanted));
}

int mha_check_equal(int64_t got, int64_t wanted, const char *message) {
    if (got != wanted) {
        return mha_raise(PyExc_ValueError, message, (long long)got, (long long)wanted);
    }
    return 0;
}

mha_tensor mha_tensor_of(PyArrayObject *array) {
    mha_tensor tensor = {.data = NULL};
    if (array == NULL) {
        return tensor;
    }
    tensor.data = PyArray_DATA(array);
    tensor.storage = mha_storage_of(array);
    tensor.axes = PyArray_NDIM(array);
    for (int axis = 0; axis < tensor.axes; axis++) {
        tensor.shape[axis] = PyArray_DIM(array, axis);
        tensor.strides[axis] = PyArray_STRIDE(array, axis);
    }
    return tensor;
}

mha_tensor mha_tensor_of_cached(PyArrayObject *array) {
    mha_tensor tensor = mha_tensor_of(array);
    if (array != NULL && mha_is_in_blocks(array)) {
        tensor.storage = MHA_Q8_0;
        tensor.shape[tensor.axes - 1] *= MHA_QUANTISED_ROWS;
    }
    return tensor;
}

int64_t mha_columns_of(PyArrayObject *array) {
    const npy_intp last = PyArray_DIM(array, PyArray_NDIM(array) - 1);
    return mha_is_in_blocks(array) ? (int64_t)last * MHA_QUANTISED_ROWS : (int64_t)last;
}

mha_tensor mha_tensor_with_heads(PyArrayObject *array) {
    mha_tensor tensor = mha_tensor_of(array);
    if (array == NULL || tensor.axes >= 4) {
        return tensor;
    }
    const int heads = tensor.axes - 2;
    for (int axis = tensor.axes; axis > heads; axis--) {
        tensor.shape[axis] = tensor.shape[axis - 1];
        tensor.strides[axis] = tensor.strides[axis - 1];
    }
    tensor.shape[heads] = 1;
    tensor.strides[heads] = 0;
    tensor.axes++;
    return tensor;
}

int mha_convert_bool(PyObject *object, const char *name, bool *value) {
    if (PyBool_Check(object)) {
        *value = object == Py_True;
        return 0;
    }
    if (PyArray_IsScalar(object, Bool)) {
        *value = PyObject_IsTrue(object) == 1;
        return 0;
    }
    return mha_wrong_type(object, name, "True or False");
}

/* Whether float(object) would take what is no real number: "1", True, 1j, an array of one. */
static bool only_looks_like_number(PyObject *object) {
    if (PyArray_Check(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        return PyArray_NDIM(array) > 0 || !(PyArray_ISINTEGER(array) || PyArray_ISFLOAT(array));
    }
    return PyBool_Check(object) || PyArray_IsScalar(object, Bool) ||
           PyArray_IsScalar(object, ComplexFloating) || PyArray_IsScalar(object, Flexible);
}

int mha_convert_number(PyObject *object, const char *name, double *value) {
    if (only_looks_like_number(object)) {
        return mha_wrong_type(object, name, "a number");
    }
    *value = PyFloat_AsDouble(object);
    if (*value == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            mha_wrong_type(object, name, "a number");
        } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError,
                         "%s: got an int too large for a float, wanted a finite number", name);
        }
        return -1;
    }
    return 0;
}

bool mha_has_index(PyObject *object) {
    return PyIndex_Check(object) && !PyBool_Check(object) && !PyArray_IsScalar(object, Bool);
}

PyObject *mha_as_int(PyObject *object, const char *name) {
    PyObject *integer = PyNumber_Index(object);
    if (integer == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        mha_wrong_type(object, name, "an int");
    }
    return integer;
}

/* An int as int64; *overflow is its sign where it is beyond. */
static int convert_int64(PyObject *object, const char *name, int64_t *value, int *overflow) {
    if (!mha_has_index(object)) {
        return mha_wrong_type(object, name, "an int");
    }
    PyObject *integer = mha_as_int(object, name);
    if (integer == NULL) {
        return -1;
    }
    *value = PyLong_AsLongLongAndOverflow(integer, overflow);
    Py_DECREF(integer);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

int mha_convert_size(PyObject *object, const char *name, int64_t least, int64_t *value) {
    int overflow;
    if (convert_int64(object, name, value, &overflow) < 0) {
        return -1;
    }
    if (overflow < 0 || (overflow == 0 && *value < least)) {
        return mha_raise(PyExc_ValueError, "%s: got %S, wanted at least %lld", name, object,
                         (long long)least);
    }
    if (overflow > 0) {
        return mha_raise(PyExc_ValueError, "%s: got %S, wanted at most %lld", name, object,
                         (long long)INT64_MAX);
    }
    return 0;
}

int mha_convert_int(PyObject *object, const char *name, int64_t least, int64_t *value) {
    int64_t number;
    int overflow;
    if (convert_int64(object, name, &number, &overflow) < 0) {
        return -1;
    }
    if (overflow > 0 || number > MHA_FARTHEST) {
        number = MHA_FARTHEST;
    }
    if (overflow < 0 || number < -MHA_FARTHEST) {
        number = -MHA_FARTHEST;
    }
    if (number < least) {
        return mha_raise(PyExc_ValueError, "%s: got %S, wanted at least %lld", name, object,
                         (long long)least);
    }
    *value = number;
    return 0;
}

int mha_convert_seed(PyObject *object, uint64_t *seed) {
    *seed = PyLong_AsUnsignedLongLong(object);
    if (*seed == (uint64_t)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "seed: got %S, wanted an int in [0, 2**64)", object);
        }
        return -1;
    }
    return 0;
}
