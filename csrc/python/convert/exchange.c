/* Tensors of a library that exchanges them in C: by the table of functions that its type has as
 * __dlpack_c_exchange_api__ (DLPack 1.3), a capsule. That is a third of the time of its methods
 * where caches are cold, as between the layers of a model. */
#include <stdlib.h>

#include "python/convert/dlpack.h"

/* Each function returns 0, or -1 with a Python exception. No stream is waited for: this is the CPU.
 */
typedef struct exchange {
    struct {
        uint32_t major, minor;
    } version;
    struct exchange *previous; /* of an older version, or NULL */
    void *allocate, *take;
    int (*give)(managed_versioned *tensor, void **object); /* takes the tensor over */
    int (*lend)(void *object, dl_tensor *tensor);          /* as long as the object lives */
    void *stream;
} exchange;

static const exchange *exchange_of(PyObject *capsule) {
    const exchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table != NULL &&
        (table->version.major != KNOWN_VERSION || table->give == NULL || table->lend == NULL)) {
        PyErr_Format(PyExc_ValueError, "exchange: got DLPack %u.%u, wanted %d with functions",
                     (unsigned)table->version.major, (unsigned)table->version.minor, KNOWN_VERSION);
        return NULL;
    }
    return table;
}

/* A new reference; NULL, without an exception, where NumPy has no such type, or ml_dtypes, whose
 * bfloat16 it would be, is not imported. */
static PyArray_Descr *type_of_lent(const dl_tensor *tensor) {
    return mha_is_bfloat16_tensor(tensor) && mha_bfloat16_typenum() == NPY_VOID
               ? NULL
               : mha_type_of_tensor(tensor);
}

/* Functions of the library: of a tensor, whether it is read as the opposite of what its memory
 * holds, and its storage; of a storage, whose len() is in bytes, its address. */
enum { IS_NEGATED, STORAGE_OF, ADDRESS_OF, NUM_FUNCTIONS };

static int64_t number_of(PyObject *functions, int function, PyObject *object) {
    PyObject *returned = PyObject_CallOneArg(PyTuple_GET_ITEM(functions, function), object);
    const int64_t number = returned == NULL ? -1 : PyLong_AsLongLong(returned);
    Py_XDECREF(returned);
    return number;
}

/* Whether all of the array lies in the tensor's storage, which may have been resized, and has its
 * numbers, not the opposite ones. False with an exception or without. */
static bool has_its_numbers(PyObject *functions, PyObject *tensor, PyArrayObject *array) {
    int64_t first = 0, end = PyArray_ITEMSIZE(array);
    if (number_of(functions, IS_NEGATED, tensor) != 0) {
        return false;
    }
    if (PyArray_SIZE(array) == 0) {
        return true;
    }
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        const int64_t reach = (PyArray_DIM(array, axis) - 1) * PyArray_STRIDE(array, axis);
        *(reach < 0 ? &first : &end) += reach;
    }
    PyObject *storage = PyObject_CallOneArg(PyTuple_GET_ITEM(functions, STORAGE_OF), tensor);
    const int64_t bytes = storage == NULL ? -1 : PyObject_Size(storage);
    const int64_t address = bytes < 0 ? -1 : number_of(functions, ADDRESS_OF, storage);
    const int64_t begin = (int64_t)(intptr_t)PyArray_DATA(array) - address;
    Py_XDECREF(storage);
    return address >= 0 && begin + first >= 0 && begin + end <= bytes;
}

/* A read-only array over a tensor's memory; None where it has no such memory. */
static PyObject *array_of_tensor(const exchange *table, PyObject *functions, PyObject *tensor) {
    dl_tensor lent;
    PyArray_Descr *type = NULL;
    PyArrayObject *array = NULL;
    if (table->lend(tensor, &lent) == 0) {
        type = type_of_lent(&lent);
    }
    if (type != NULL) {
        array = mha_with_owner(mha_array_over_tensor(&lent, type, "tensor"), Py_NewRef(tensor));
    }
    if (array != NULL && !has_its_numbers(functions, tensor, array)) {
        Py_CLEAR(array);
    }
    if (array == NULL && PyErr_Occurred() && mha_error_is_ordinary()) {
        PyErr_Clear();
    }
    return array != NULL || PyErr_Occurred() ? (PyObject *)array : Py_NewRef(Py_None);
}

/* Whether the object is of one of the types, and of no class that inherits from them. */
static bool is_one_of(PyObject *types, PyObject *object) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++) {
        if ((PyObject *)Py_TYPE(object) == PyTuple_GET_ITEM(types, i)) {
            return true;
        }
    }
    return false;
}

/* arrays_of_tensors(types, exchange, functions, tensors): a list of arrays over the memory of a
 * tuple of tensors of those types, None for None; or None where one of them cannot be lent. */
PyObject *mha_py_arrays_of_tensors(PyObject *Py_UNUSED(module), PyObject *const *args,
                                   Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[3]) ||
        !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != NUM_FUNCTIONS) {
        PyErr_SetString(PyExc_TypeError, "arrays_of_tensors: wanted a tuple of types, their"
                                         " exchange, 3 functions and a tuple of tensors");
        return NULL;
    }
    const exchange *table = exchange_of(args[1]);
    PyObject *arrays = table == NULL ? NULL : PyList_New(PyTuple_GET_SIZE(args[3]));
    for (Py_ssize_t i = 0; arrays != NULL && i < PyTuple_GET_SIZE(args[3]); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(args[3], i), *array = Py_None;
        if (tensor == Py_None || !is_one_of(args[0], tensor)) {
            Py_INCREF(array);
        } else {
            array = array_of_tensor(table, args[2], tensor);
        }
        if (array == NULL || (array == Py_None && tensor != Py_None)) {
            Py_SETREF(arrays, array); /* NULL with the exception, or None */
            break;
        }
        PyList_SET_ITEM(arrays, i, array);
    }
    return arrays;
}

/* A tensor over an array's memory, with the shape and strides behind it in one allocation. */
typedef struct given {
    managed_versioned tensor;
    int64_t sizes[];
} given;

/* Called by the library from any thread; after the end of Python, the array's memory is lost. */
static void release_array(managed_versioned *tensor) {
    if (Py_IsInitialized()) {
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)tensor->context);
        PyGILState_Release(state);
    }
    free(tensor);
}

static given *tensor_over(PyArrayObject *array, bool by_token) {
    const int axes = PyArray_NDIM(array);
    const int item = (int)PyArray_ITEMSIZE(array);
    given *made = calloc(1, sizeof *made + 2 * (size_t)axes * sizeof *made->sizes);
    if (made == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int axis = 0; axis < axes; axis++) {
        const int from = by_token && (axis == 1 || axis == 2) ? 3 - axis : axis;
        made->sizes[axis] = PyArray_DIM(array, from);
        made->sizes[axes + axis] = PyArray_STRIDE(array, from) / item;
    }
    made->tensor.version.major = KNOWN_VERSION;
    made->tensor.context = Py_NewRef((PyObject *)array);
    made->tensor.deleter = release_array;
    made->tensor.tensor = (dl_tensor){.data = PyArray_DATA(array),
                                      .device.type = DEVICE_CPU,
                                      .axes = axes,
                                      .dtype.bits = (uint8_t)(8 * item),
                                      .dtype.lanes = 1,
                                      .shape = made->sizes,
                                      .strides = made->sizes + axes};
    made->tensor.tensor.dtype.code =
        mha_storage_of(array) == MHA_BFLOAT16 ? CODE_BFLOAT16 : CODE_FLOAT;
    return made;
}

static bool is_givable(PyArrayObject *array) {
    const int typenum = PyArray_TYPE(array);
    bool fits = PyArray_ISBEHAVED_RO(array) && (typenum == NPY_FLOAT32 || typenum == NPY_FLOAT64 ||
                                                mha_storage_of(array) != MHA_AS_COMPUTED);
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        fits = fits && PyArray_STRIDE(array, axis) >= 0 &&
               PyArray_STRIDE(array, axis) % PyArray_ITEMSIZE(array) == 0;
    }
    return fits;
}

/* tensor_of_array(exchange, array, by_token): a tensor over the memory of an array of
 * floating-point numbers; by_token: (batch, heads, query_len, head_dim) becomes (batch,
 * query_len, heads, head_dim). */
PyObject *mha_py_tensor_of_array(PyObject *Py_UNUSED(module), PyObject *const *args,
                                 Py_ssize_t nargs) {
    if (nargs != 3 || !PyArray_Check(args[1]) || !PyBool_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError,
                        "tensor_of_array: wanted an exchange, an array and a bool");
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)args[1];
    const bool by_token = args[2] == Py_True;
    if (!is_givable(array) || (by_token && PyArray_NDIM(array) < 3)) {
        PyErr_SetString(PyExc_TypeError,
                        "array: wanted aligned floating-point numbers, forwards, by_token in"
                        " at least 3 axes");
        return NULL;
    }
    const exchange *table = exchange_of(args[0]);
    given *made = table == NULL ? NULL : tensor_over(array, by_token);
    void *tensor = NULL;
    if (made != NULL && table->give(&made->tensor, &tensor) != 0) {
        tensor = NULL; /* who took the array over frees it */
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "exchange: a tensor was refused");
        }
    }
    return tensor;
}
