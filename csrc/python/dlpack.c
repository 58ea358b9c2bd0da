/* Arrays of bfloat16 that other libraries hand over by DLPack, whose types NumPy does not know. */
#include "dlpack.h"

/* What capsules held before version 1. */
typedef struct managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct managed *self); /* or NULL */
} managed;

static const char PLAIN[] = "dltensor", USED_PLAIN[] = "used_dltensor";
static const char VERSIONED[] = "dltensor_versioned", USED_VERSIONED[] = "used_dltensor_versioned";
static const char OWNED_PLAIN[] = "mha.dltensor", OWNED_VERSIONED[] = "mha.dltensor_versioned";

/* The end of an array's memory. The deleter may run Python code: what is raised meanwhile stays. */
static void release(PyObject *owner) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyCapsule_IsValid(owner, OWNED_PLAIN)) {
        managed *tensor = PyCapsule_GetPointer(owner, OWNED_PLAIN);
        if (tensor->deleter != NULL) {
            tensor->deleter(tensor);
        }
    } else {
        managed_versioned *tensor = PyCapsule_GetPointer(owner, OWNED_VERSIONED);
        if (tensor->deleter != NULL) {
            tensor->deleter(tensor);
        }
    }
    PyErr_Restore(type, value, traceback);
}

/* Takes the tensor over from its capsule, which then no longer frees it. */
static PyObject *take_over(PyObject *capsule, bool is_versioned) {
    void *tensor = PyCapsule_GetPointer(capsule, is_versioned ? VERSIONED : PLAIN);
    PyObject *owner = PyCapsule_New(tensor, is_versioned ? OWNED_VERSIONED : OWNED_PLAIN, release);
    if (owner != NULL &&
        PyCapsule_SetName(capsule, is_versioned ? USED_VERSIONED : USED_PLAIN) < 0) {
        (void)PyCapsule_SetDestructor(owner, NULL);
        Py_CLEAR(owner);
    }
    return owner;
}

static int check_memory(const dl_tensor *tensor, int64_t count, int64_t item, const char *name) {
    const uintptr_t address = (uintptr_t)tensor->data;
    if (count > 0 && tensor->data == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: got %lld elements by DLPack at no address, wanted one",
                     name, (long long)count);
        return -1;
    }
    if (count > 0 && (tensor->byte_offset > UINTPTR_MAX - address ||
                      (address + tensor->byte_offset) % (uint64_t)item != 0)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: got a byte_offset of %llu by DLPack, wanted an address that is a "
                     "multiple of %d",
                     name, (unsigned long long)tensor->byte_offset, (int)item);
        return -1;
    }
    return 0;
}

/* The tensor's shape and its strides in bytes, as NumPy has them; all sizes within int64. */
static int convert_shape(const dl_tensor *tensor, int64_t item, npy_intp *shape, npy_intp *strides,
                         const char *name) {
    int64_t count = 1, reach = 0;
    bool fits = true, is_empty = false;
    for (int axis = tensor->axes - 1; axis >= 0; axis--) {
        const int64_t size = tensor->shape[axis];
        if (size < 0) {
            PyErr_Format(PyExc_ValueError, "%s: got an axis of %lld by DLPack, wanted at least 0",
                         name, (long long)size);
            return -1;
        }
        is_empty |= size == 0;
        shape[axis] = (npy_intp)size;
        strides[axis] = fits ? (npy_intp)(count * item) : 0;
        fits = fits && !__builtin_mul_overflow(count, size == 0 ? 1 : size, &count) &&
               count <= NPY_MAX_INTP / item;
    }
    for (int axis = 0; fits && !is_empty && tensor->strides != NULL && axis < tensor->axes;
         axis++) {
        int64_t bytes, span;
        fits =
            !__builtin_mul_overflow(tensor->strides[axis], item, &bytes) && bytes != INT64_MIN &&
            !__builtin_mul_overflow(bytes < 0 ? -bytes : bytes, tensor->shape[axis] - 1, &span) &&
            !__builtin_add_overflow(reach, span, &reach);
        strides[axis] = (npy_intp)bytes;
    }
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "%s: got sizes or strides by DLPack beyond int64", name);
        return -1;
    }
    return check_memory(tensor, is_empty ? 0 : count, item, name);
}

static int check_tensor(const dl_tensor *tensor, const char *name) {
    if (tensor->device.type != DEVICE_CPU) {
        PyErr_Format(PyExc_ValueError,
                     "%s: got memory of DLPack's device type %d, wanted that of the CPU (%d)", name,
                     (int)tensor->device.type, DEVICE_CPU);
        return -1;
    }
    if (tensor->axes < 0 || tensor->axes > MHA_MOST_INPUT_AXES ||
        (tensor->axes > 0 && tensor->shape == NULL)) {
        PyErr_Format(PyExc_ValueError, "%s: got %d axes by DLPack%s, wanted 0 to %d and a shape",
                     name, (int)tensor->axes, tensor->shape == NULL ? " without a shape" : "",
                     MHA_MOST_INPUT_AXES);
        return -1;
    }
    return 0;
}

PyArray_Descr *mha_type_of_bfloat16(void) {
    const int typenum = mha_bfloat16_typenum();
    PyArray_Descr *type = NULL;
    if (typenum != NPY_VOID) {
        return PyArray_DescrFromType(typenum);
    }
    PyObject *fields = Py_BuildValue("[(ss)]", "mha_bfloat16", "=u2");
    if (fields != NULL && PyArray_DescrConverter(fields, &type) != NPY_SUCCEED) {
        type = NULL;
    }
    Py_XDECREF(fields);
    return type;
}

PyArrayObject *mha_array_over_tensor(const dl_tensor *tensor, PyArray_Descr *type,
                                     const char *name) {
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    const int64_t item = PyDataType_ELSIZE(type);
    if (check_tensor(tensor, name) < 0 || convert_shape(tensor, item, shape, strides, name) < 0) {
        Py_DECREF(type);
        return NULL;
    }
    char *data = tensor->data == NULL ? NULL : (char *)tensor->data + tensor->byte_offset;
    return (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, type, tensor->axes, shape,
                                                 data == NULL ? NULL : strides, data, 0, NULL);
}

PyArrayObject *mha_with_owner(PyArrayObject *array, PyObject *owner) {
    if (array == NULL || owner == NULL) {
        Py_XDECREF(owner);
        Py_CLEAR(array);
    } else if (PyArray_SetBaseObject(array, owner) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* An array of bfloat16 over the tensor of the capsule, which it takes over. */
static PyArrayObject *array_over(PyObject *capsule, bool is_versioned, const dl_tensor *tensor,
                                 const char *name) {
    PyArray_Descr *type = mha_type_of_bfloat16();
    PyArrayObject *array = type == NULL ? NULL : mha_array_over_tensor(tensor, type, name);
    return array == NULL ? NULL : mha_with_owner(array, take_over(capsule, is_versioned));
}

static bool is_bfloat16(const dl_tensor *tensor) {
    return tensor->dtype.code == CODE_BFLOAT16 && tensor->dtype.bits == 16 &&
           tensor->dtype.lanes == 1;
}

/* The capsule of an object that knows version 1 or not. */
static PyObject *capsule_of(PyObject *object) {
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *none = method == NULL ? NULL : PyTuple_New(0);
    PyObject *keywords =
        none == NULL ? NULL : Py_BuildValue("{s(ii)}", "max_version", KNOWN_VERSION, 0);
    PyObject *capsule = keywords == NULL ? NULL : PyObject_Call(method, none, keywords);
    if (capsule == NULL && keywords != NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = PyObject_Call(method, none, NULL);
    }
    Py_XDECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    return capsule;
}

static int from_capsule(PyObject *capsule, const char *name, PyArrayObject **array) {
    const dl_tensor *tensor = NULL;
    const bool is_versioned = PyCapsule_IsValid(capsule, VERSIONED);
    if (is_versioned) {
        const managed_versioned *whole = PyCapsule_GetPointer(capsule, VERSIONED);
        if (whole->version.major != KNOWN_VERSION) {
            PyErr_Format(PyExc_ValueError, "%s: got a tensor of DLPack %u.%u, wanted %d", name,
                         (unsigned)whole->version.major, (unsigned)whole->version.minor,
                         KNOWN_VERSION);
            return -1;
        }
        tensor = &whole->tensor;
    } else if (PyCapsule_IsValid(capsule, PLAIN)) {
        tensor = &((const managed *)PyCapsule_GetPointer(capsule, PLAIN))->tensor;
    }
    if (tensor == NULL || !is_bfloat16(tensor)) {
        return 0;
    }
    *array = array_over(capsule, is_versioned, tensor, name);
    return *array == NULL ? -1 : 0;
}

int mha_bfloat16_from_dlpack(PyObject *object, const char *name, PyArrayObject **array) {
    *array = NULL;
    PyObject *capsule = capsule_of(object);
    if (capsule == NULL) {
        const bool is_ordinary = mha_error_is_ordinary();
        if (is_ordinary) { /* it has no tensor for us: what NumPy said is the better error */
            PyErr_Clear();
        }
        return is_ordinary ? 0 : -1;
    }
    const int failed = from_capsule(capsule, name, array);
    Py_DECREF(capsule);
    return failed;
}

/* bfloat16_from_dlpack(object, name): an array, or None where the object has no bfloat16. */
PyObject *mha_py_bfloat16_from_dlpack(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    PyArrayObject *array;
    (void)module;
    const char *name = nargs == 2 && PyUnicode_Check(args[1]) ? PyUnicode_AsUTF8(args[1]) : NULL;
    if (name == NULL) {
        PyErr_SetString(PyExc_TypeError, "bfloat16_from_dlpack: wanted an object and a name");
        return NULL;
    }
    if (mha_bfloat16_from_dlpack(args[0], name, &array) < 0) {
        return NULL;
    }
    return array == NULL ? Py_NewRef(Py_None) : (PyObject *)array;
}
