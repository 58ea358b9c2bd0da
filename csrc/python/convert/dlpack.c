/* Arrays that other libraries hand over by DLPack: those that offer nothing else, which NumPy would
 * take unchecked, and those of bfloat16, which it does not know. */
#include "python/convert/dlpack.h"

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

/* More bytes than any array has: user space ends at 2^56 at the latest. */
static const int64_t MOST_BYTES = (int64_t)1 << 56;

/* What the elements of a tensor cover: bytes before the first one's address and from there on. */
typedef struct extent {
    int64_t before, behind;
} extent;

/* The extent must be memory, as far as numbers tell. No library hands over misaligned elements. */
static int check_memory(const dl_tensor *tensor, extent e, int64_t item, const char *name) {
    const uintptr_t data = (uintptr_t)tensor->data, first = data + (uintptr_t)tensor->byte_offset;
    if (e.behind > 0 && tensor->data == NULL) {
        return mha_raise(PyExc_ValueError, "%s: got elements by DLPack at no address, wanted one",
                         name);
    }
    if (e.behind > 0 && (tensor->byte_offset > (uint64_t)MOST_BYTES || first < data ||
                         first < (uintptr_t)e.before || first + (uintptr_t)e.behind < first)) {
        return mha_raise(PyExc_ValueError,
                         "%s: got a byte_offset of %llu by DLPack, wanted one inside the array",
                         name, (unsigned long long)tensor->byte_offset);
    }
    if (e.behind > 0 && first % (uintptr_t)item != 0) {
        return mha_raise(
            PyExc_ValueError,
            "%s: got an address by DLPack that is %llu bytes past a multiple of %d, the "
            "size of an element, wanted a multiple",
            name, (unsigned long long)(first % (uintptr_t)item), (int)item);
    }
    return 0;
}

/* The shape, as NumPy has it, and the bytes of as many elements side by side. -1 with an exception,
 * also where these are more than any array has. */
static int convert_shape(const dl_tensor *tensor, int64_t item, npy_intp *shape, int64_t *bytes,
                         const char *name) {
    bool fits = true, is_empty = false;
    *bytes = item;
    for (int axis = 0; axis < tensor->axes; axis++) {
        const int64_t size = tensor->shape[axis];
        if (size < 0) {
            return mha_raise(PyExc_ValueError,
                             "%s: got an axis of %lld by DLPack, wanted at least 0", name,
                             (long long)size);
        }
        is_empty |= size == 0;
        shape[axis] = (npy_intp)size;
        fits = fits && !__builtin_mul_overflow(*bytes, size == 0 ? 1 : size, bytes) &&
               *bytes <= MOST_BYTES;
    }
    *bytes = is_empty ? 0 : *bytes;
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "%s: got sizes by DLPack beyond any memory", name);
    }
    return fits ? 0 : -1;
}

/* The strides of the tensor in bytes, and what its elements cover. */
static int convert_strides(const dl_tensor *tensor, int64_t item, npy_intp *strides, extent *e,
                           const char *name) {
    bool fits = true;
    *e = (extent){.before = 0, .behind = item};
    for (int axis = 0; fits && axis < tensor->axes; axis++) {
        int64_t bytes = 0, span = 0;
        int64_t *const side = tensor->strides[axis] < 0 ? &e->before : &e->behind;
        fits = !__builtin_mul_overflow(tensor->strides[axis], item, &bytes) &&
               !__builtin_mul_overflow(bytes, tensor->shape[axis] - 1, &span) &&
               span >= -MOST_BYTES && span <= MOST_BYTES;
        strides[axis] = (npy_intp)bytes;
        *side += fits ? (span < 0 ? -span : span) : 0;
        fits = fits && *side <= MOST_BYTES;
    }
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "%s: got strides by DLPack beyond any memory", name);
    }
    return fits ? 0 : -1;
}

/* The strides of elements side by side. */
static void fill_strides(int axes, const npy_intp *shape, int64_t item, npy_intp *strides) {
    for (int axis = axes - 1; axis >= 0; axis--) {
        strides[axis] = (npy_intp)item;
        item *= shape[axis] == 0 ? 1 : shape[axis];
    }
}

/* DLPack's types of memory that the CPU reads: its own, and what CUDA and ROCm share with it. */
static bool is_memory_of_cpu(int type) {
    enum { CUDA_HOST = 3, ROCM_HOST = 11, CUDA_MANAGED = 13 };
    return type == DEVICE_CPU || type == CUDA_HOST || type == ROCM_HOST || type == CUDA_MANAGED;
}

/* What a tensor says of its elements, checked, as NumPy has it: strides in bytes; no data where
 * there are no elements. */
typedef struct checked_tensor {
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    char *data;
} checked_tensor;

/* Checks every field but for the type before anybody reads an element, of `item` bytes; 0, or -1
 * with the exception. */
static int check_tensor(const dl_tensor *tensor, int64_t item, checked_tensor *to,
                        const char *name) {
    extent e = {0, 0};
    if (!is_memory_of_cpu(tensor->device.type)) {
        return mha_raise(PyExc_ValueError,
                         "%s: got memory of DLPack's device type %d, wanted that of the CPU (%d)",
                         name, (int)tensor->device.type, DEVICE_CPU);
    }
    if (tensor->axes < 0 || tensor->axes > MHA_MOST_INPUT_AXES ||
        (tensor->axes > 0 && tensor->shape == NULL)) {
        return mha_raise(PyExc_ValueError,
                         "%s: got %d axes by DLPack%s, wanted 0 to %d and a shape", name,
                         (int)tensor->axes, tensor->shape == NULL ? " without a shape" : "",
                         MHA_MOST_INPUT_AXES);
    }
    if (convert_shape(tensor, item, to->shape, &e.behind, name) < 0) {
        return -1;
    }
    fill_strides(tensor->axes, to->shape, item, to->strides);
    if (e.behind > 0 && tensor->strides != NULL &&
        convert_strides(tensor, item, to->strides, &e, name) < 0) {
        return -1;
    }
    if (check_memory(tensor, e, item, name) < 0) {
        return -1;
    }
    to->data = e.behind == 0 ? NULL : (char *)tensor->data + tensor->byte_offset;
    return 0;
}

/* DLPack's types that NumPy has, but for complex numbers, which no function takes. */
static const struct known_type {
    uint8_t code, bits;
    int typenum;
} KNOWN_TYPES[] = {
    {CODE_FLOAT, 32, NPY_FLOAT32}, {CODE_FLOAT, 64, NPY_FLOAT64}, {CODE_FLOAT, 16, NPY_FLOAT16},
    {CODE_BOOL, 8, NPY_BOOL},      {CODE_INT, 64, NPY_INT64},     {CODE_INT, 32, NPY_INT32},
    {CODE_INT, 16, NPY_INT16},     {CODE_INT, 8, NPY_INT8},       {CODE_UINT, 64, NPY_UINT64},
    {CODE_UINT, 32, NPY_UINT32},   {CODE_UINT, 16, NPY_UINT16},   {CODE_UINT, 8, NPY_UINT8},
};

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

bool mha_is_bfloat16_tensor(const dl_tensor *tensor) {
    return tensor->dtype.code == CODE_BFLOAT16 && tensor->dtype.bits == 16 &&
           tensor->dtype.lanes == 1;
}

PyArray_Descr *mha_type_of_tensor(const dl_tensor *tensor) {
    if (mha_is_bfloat16_tensor(tensor)) {
        return mha_type_of_bfloat16();
    }
    for (size_t i = 0; i < sizeof KNOWN_TYPES / sizeof KNOWN_TYPES[0]; i++) {
        const struct known_type *known = &KNOWN_TYPES[i];
        if (tensor->dtype.lanes == 1 && tensor->dtype.code == known->code &&
            tensor->dtype.bits == known->bits) {
            return PyArray_DescrFromType(known->typenum);
        }
    }
    return NULL;
}

PyArrayObject *mha_array_over_tensor(const dl_tensor *tensor, PyArray_Descr *type,
                                     const char *name) {
    checked_tensor checked;
    if (check_tensor(tensor, PyDataType_ELSIZE(type), &checked, name) < 0) {
        Py_DECREF(type);
        return NULL;
    }
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, type, tensor->axes, checked.shape,
                             checked.data == NULL ? NULL : checked.strides, checked.data, 0, NULL);
    if (array != NULL) { /* NumPy's own memory, where there are no elements, it could write to */
        PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    }
    return (PyArrayObject *)array;
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

/* Whether a capsule has a tensor that nobody took. */
static bool has_tensor(PyObject *capsule) {
    return PyCapsule_IsValid(capsule, PLAIN) || PyCapsule_IsValid(capsule, VERSIONED);
}

/* Its tensor; NULL with an exception where it is of a version that is laid out otherwise. */
static const dl_tensor *tensor_of_capsule(PyObject *capsule, const char *name) {
    if (PyCapsule_IsValid(capsule, PLAIN)) {
        return &((const managed *)PyCapsule_GetPointer(capsule, PLAIN))->tensor;
    }
    const managed_versioned *whole = PyCapsule_GetPointer(capsule, VERSIONED);
    if (whole->version.major != KNOWN_VERSION) {
        PyErr_Format(PyExc_ValueError, "%s: got a tensor of DLPack %u.%u, wanted %d", name,
                     (unsigned)whole->version.major, (unsigned)whole->version.minor, KNOWN_VERSION);
        return NULL;
    }
    return &whole->tensor;
}

/* An array over the tensor of a capsule, which it takes over; NULL with an exception. */
static PyArrayObject *array_of_capsule(PyObject *capsule, const char *name) {
    const dl_tensor *tensor = tensor_of_capsule(capsule, name);
    PyArray_Descr *type = tensor == NULL ? NULL : mha_type_of_tensor(tensor);
    if (tensor != NULL && type == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError,
                     "%s: got elements of DLPack's type %d of %d bits and %d lanes, wanted "
                     "float16, bfloat16, float32, float64, integers or bool",
                     name, (int)tensor->dtype.code, (int)tensor->dtype.bits,
                     (int)tensor->dtype.lanes);
    }
    PyArrayObject *array = type == NULL ? NULL : mha_array_over_tensor(tensor, type, name);
    const bool is_versioned = PyCapsule_IsValid(capsule, VERSIONED);
    return array == NULL ? NULL : mha_with_owner(array, take_over(capsule, is_versioned));
}

PyArrayObject *mha_array_from_dlpack(PyObject *object, const char *name) {
    PyObject *capsule = capsule_of(object);
    PyArrayObject *array = NULL;
    if (capsule == NULL) {
        mha_name_pending_error(object, name, "its __dlpack__ gave none");
    } else if (has_tensor(capsule)) {
        array = array_of_capsule(capsule, name);
    } else {
        PyErr_Format(PyExc_TypeError,
                     "%s: got %R from the __dlpack__ of %s, wanted a capsule named %s or %s", name,
                     capsule, Py_TYPE(object)->tp_name, PLAIN, VERSIONED);
    }
    Py_XDECREF(capsule);
    return array;
}

int mha_bfloat16_from_dlpack(PyObject *object, const char *name, PyArrayObject **array) {
    PyObject *capsule = capsule_of(object);
    *array = NULL;
    if (capsule == NULL && mha_error_is_ordinary()) {
        PyErr_Clear(); /* it has no tensor for us: what NumPy said is the better error */
    }
    if (capsule != NULL && has_tensor(capsule)) {
        const dl_tensor *tensor = tensor_of_capsule(capsule, name);
        *array = tensor != NULL && mha_is_bfloat16_tensor(tensor) ? array_of_capsule(capsule, name)
                                                                  : NULL;
    }
    Py_XDECREF(capsule);
    return PyErr_Occurred() ? -1 : 0;
}
