/* Anything that NumPy makes an array of, and what it should not. */
#include "python/convert/convert.h"

bool mha_error_is_ordinary(void) {
    return PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError);
}

void mha_name_pending_error(PyObject *object, const char *name, const char *why) {
    PyObject *const named[] = {PyExc_TypeError, PyExc_ValueError, PyExc_RuntimeError,
                               PyExc_BufferError};
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; type != NULL && i < sizeof named / sizeof *named; i++) {
        if (PyErr_GivenExceptionMatches(type, named[i])) {
            PyErr_Format(i == 0 ? PyExc_TypeError : PyExc_ValueError,
                         "%s: got %s, wanted an array, but %s: %S", name, Py_TYPE(object)->tp_name,
                         why, value == NULL ? Py_None : value);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
            return;
        }
    }
    PyErr_Restore(type, value, traceback);
}

/* 1 or 0, or -1 with the exception: a MemoryError, or what is no Exception. */
static int has_attribute(PyObject *object, const char *name) {
    PyObject *attribute = PyObject_GetAttrString(object, name);
    if (attribute == NULL && !mha_error_is_ordinary()) {
        return -1;
    }
    PyErr_Clear();
    Py_XDECREF(attribute);
    return attribute != NULL;
}

/* Arrays of which only a part would arrive, without what they mean: by two names that they have. */
static const struct other_kind {
    const char *names[2], *got, *wanted;
} OTHER_KINDS[] = {
    {{"nnz", "tocsr"}, "a sparse array", "a dense one: its .toarray()"},
    {{"mask", "filled"},
     "a masked array",
     "a plain one: its .filled(0), and mask= where it counts"},
    {{"unit", "to_value"}, "numbers with a unit", "plain ones: its .value"},
    {{"units", "magnitude"}, "numbers with a unit", "plain ones: its .magnitude"},
};

/* What NumPy makes arrays of objects of, in which no numbers are read. */
static const struct other_kind OBJECT_KINDS[] = {
    {{"to_numpy", "to_numpy"},
     "an array of object",
     "plain numbers: its .to_numpy(\"float32\"), of a mask .to_numpy(bool)"},
    {{"_core_weight", "unpack"}, "a packed weight", "an array: its .unpack()"},
    {{"_node", "_trace"},
     "numbers that autograd traces",
     "plain ones: make the function a primitive of autograd.extend, and give it its gradient by"
     " defvjp_argnums and mha's _vjp of the same name; there is no second derivative"},
};

/* -1 with a TypeError for what stands for an argument that was not given: it knows the call. */
static int refuse_missing(PyObject *object, const char *name) {
    PyObject *call = PyObject_GetAttrString(object, "_mha_missing_from");
    if (call == NULL) {
        if (!mha_error_is_ordinary()) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s: got nothing, wanted an array: the call is %S", name, call);
    Py_DECREF(call);
    return -1;
}

/* 0, or -1 with a TypeError. */
static int refuse_kinds(const struct other_kind *kinds, size_t count, PyObject *object,
                        const char *name) {
    for (size_t i = 0; i < count; i++) {
        int has = has_attribute(object, kinds[i].names[0]);
        has = has > 0 ? has_attribute(object, kinds[i].names[1]) : has;
        if (has > 0) {
            PyErr_Format(PyExc_TypeError, "%s: got %s (%s), wanted %s", name, kinds[i].got,
                         Py_TYPE(object)->tp_name, kinds[i].wanted);
        }
        if (has != 0) {
            return -1;
        }
    }
    return 0;
}

static int refuse_other_kinds(PyObject *object, const char *name) {
    return refuse_missing(object, name) < 0
               ? -1
               : refuse_kinds(OTHER_KINDS, sizeof OTHER_KINDS / sizeof *OTHER_KINDS, object, name);
}

static bool is_sequence(PyObject *object) {
    return PyList_CheckExact(object) || PyTuple_CheckExact(object);
}

static bool is_tensor(PyObject *object) {
    for (PyTypeObject *type = Py_TYPE(object); type != NULL; type = type->tp_base) {
        if (strcmp(type->tp_name, "torch._C.TensorBase") == 0) {
            return true;
        }
    }
    return false;
}

/* Whether it is a tensor of PyTorch, or a sequence that begins with one; runs no other code. */
static bool begins_with_tensor(PyObject *object) {
    PyObject *first = Py_NewRef(object);
    for (int depth = 0; depth < NPY_MAXDIMS && first != NULL && is_sequence(first); depth++) {
        Py_SETREF(first, PySequence_GetItem(first, 0));
    }
    if (first == NULL) { /* an empty sequence */
        PyErr_Clear();
        return false;
    }
    const bool begins = is_tensor(first);
    Py_DECREF(first);
    return begins;
}

/* The object, or what NumPy can read in its place without losing what it means: for PyTorch's
 * tensors mha/_base/torch_tensors.py says it. New reference, or NULL with an exception. */
static PyObject *readable(PyObject *object, const char *name) {
    if (PyArray_CheckExact(object) || PyFloat_CheckExact(object) || PyLong_CheckExact(object)) {
        return Py_NewRef(object);
    }
    if (begins_with_tensor(object)) {
        PyObject *tensors = PyImport_ImportModule("mha._base.torch_tensors");
        PyObject *plain =
            tensors == NULL ? NULL : PyObject_CallMethod(tensors, "plain", "Os", object, name);
        Py_XDECREF(tensors);
        return plain;
    }
    return !is_sequence(object) && refuse_other_kinds(object, name) < 0 ? NULL : Py_NewRef(object);
}

/* 1 or 0, or -1 with the exception. */
static int only_offers_dlpack(PyObject *object) {
    static const char *const others[] = {"__array__", "__array_interface__"};
    const int offers = has_attribute(object, "__dlpack__");
    if (offers <= 0 || PyObject_CheckBuffer(object)) {
        return offers < 0 ? -1 : 0;
    }
    for (int i = 0; i < 2; i++) {
        const int offers_other = has_attribute(object, others[i]);
        if (offers_other != 0) {
            return offers_other < 0 ? -1 : 0;
        }
    }
    return 1;
}

/* In place of the pending exception of NumPy: the bfloat16 that it did not know, or that exception
 * with the argument's name in front. */
static PyArrayObject *instead_of_error(PyObject *object, const char *name) {
    PyObject *type, *value, *traceback;
    PyArrayObject *array = NULL;
    if (!mha_error_is_ordinary()) {
        return NULL;
    }
    PyErr_Fetch(&type, &value, &traceback);
    const int offers = has_attribute(object, "__dlpack__");
    const int failed = offers > 0 ? mha_bfloat16_from_dlpack(object, name, &array) : offers;
    if (failed < 0 || array != NULL) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return array;
    }
    PyErr_Restore(type, value, traceback);
    mha_name_pending_error(object, name, "NumPy could not make one");
    return NULL;
}

static PyArrayObject *read_array(PyObject *object, const char *name) {
    const int is_dlpack = only_offers_dlpack(object);
    if (is_dlpack < 0) {
        return NULL;
    }
    if (is_dlpack) {
        return mha_array_from_dlpack(object, name);
    }
    PyObject *array = PyArray_FromAny(object, NULL, 0, 0, NPY_ARRAY_ENSUREARRAY, NULL);
    return array == NULL ? instead_of_error(object, name) : (PyArrayObject *)array;
}

PyArrayObject *mha_as_any_array(PyObject *object, const char *name) {
    if (PyArray_CheckExact(object)) {
        Py_INCREF(object);
        return (PyArrayObject *)object;
    }
    if (object == Py_None) {
        PyErr_Format(PyExc_TypeError, "%s: got None, wanted an array", name);
        return NULL;
    }
    PyObject *meant = readable(object, name);
    PyArrayObject *array = meant == NULL ? NULL : read_array(meant, name);
    Py_XDECREF(meant);
    return array;
}

PyArrayObject *mha_as_array(PyObject *object, const char *name) {
    if (PyCapsule_CheckExact(object)) {
        PyErr_Format(PyExc_TypeError, "%s: got %s, wanted an array", name,
                     PyCapsule_IsValid(object, MHA_PACKED_WEIGHT) ? "a packed weight"
                                                                  : "a capsule");
        return NULL;
    }
    PyArrayObject *array = mha_as_any_array(object, name);
    if (array != NULL && PyArray_Check(array) && PyArray_TYPE(array) == NPY_OBJECT &&
        refuse_kinds(OBJECT_KINDS, sizeof OBJECT_KINDS / sizeof *OBJECT_KINDS, object, name) < 0) {
        Py_CLEAR(array);
    }
    if (array != NULL && PyArray_NDIM(array) > MHA_MOST_INPUT_AXES) {
        PyErr_Format(PyExc_ValueError, "%s: got %d axes, wanted at most %d: reshape it", name,
                     PyArray_NDIM(array), MHA_MOST_INPUT_AXES);
        Py_CLEAR(array);
    }
    return array;
}

/* as_array(object, name): the same for Python. */
PyObject *mha_py_as_array(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    const char *name = nargs == 2 && PyUnicode_Check(args[1]) ? PyUnicode_AsUTF8(args[1]) : NULL;
    if (name == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "as_array: wanted an array and a name");
        }
        return NULL;
    }
    return (PyObject *)mha_as_array(args[0], name);
}
