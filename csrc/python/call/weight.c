#include "python/call/weight.h"

#include <stdlib.h>

#include "python/base/system.h"
#include "python/call/call.h"

static const char CAPSULE_NAME[] = "mha.packed_weight";

/* What a capsule holds; freed with it. */
typedef struct packed_weight {
    mha_dtype dtype;
    int typenum; /* of what was packed */
    size_t bytes;
    void *panels;
    mha_weight weight; /* in the panels */
} packed_weight;

static void free_packed(PyObject *capsule) {
    packed_weight *packed = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    mha_system_free(packed->panels);
    free(packed);
}

/* NULL where the object is another one. */
static const packed_weight *packed_in(PyObject *object) {
    return mha_own_capsule(object, CAPSULE_NAME, free_packed);
}

PyObject *mha_packed_capsule(PyObject *object) {
    if (PyCapsule_CheckExact(object)) {
        return Py_NewRef(object);
    }
    if (PyArray_Check(object) || PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        return NULL;
    }
    PyObject *capsule = PyObject_GetAttrString(object, "_core_weight");
    if (capsule == NULL && mha_error_is_ordinary()) {
        PyErr_Clear();
    } else if (capsule != NULL && packed_in(capsule) == NULL) {
        Py_CLEAR(capsule);
    }
    return capsule;
}

static mha_status pack(const void *packing, mha_execution *execution) {
    return mha_pack_weight(packing, execution);
}

/* A capsule with the panels of a C array (in, out): the fast path of frozen layers. */
PyObject *mha_py_pack_weight(PyObject *module, PyObject *object) {
    PyArrayObject *array = NULL, *real = NULL;
    packed_weight *packed = NULL;
    PyObject *capsule = NULL;
    static const char *const names[] = {"weight"};
    (void)module;
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    array = mha_as_array(object, "weight");
    packed = calloc(1, sizeof *packed);
    if (packed == NULL) {
        PyErr_NoMemory();
        goto cleanup;
    }
    if (array == NULL || mha_make_private((PyObject **)&array) < 0 ||
        mha_result_types(&array, names, 1, &packed->dtype, &packed->typenum) < 0) {
        goto cleanup;
    }
    if (PyArray_NDIM(array) != 2) {
        char text[MHA_SHAPE_TEXT];
        PyErr_Format(PyExc_ValueError, "weight: got shape %s, wanted (in, out)",
                     mha_array_shape_text(array, text));
        goto cleanup;
    }
    real = mha_as_strided_stored(array, packed->dtype, "weight");
    if (real == NULL) {
        goto cleanup;
    }
    mha_weight_packing packing = {.dtype = packed->dtype,
                                  .weight = {.data = PyArray_DATA(real),
                                             .in = PyArray_DIM(real, 0),
                                             .out = PyArray_DIM(real, 1),
                                             .in_stride = PyArray_STRIDE(real, 0),
                                             .out_stride = PyArray_STRIDE(real, 1),
                                             .storage = mha_storage_of(real)}};
    if (mha_packed_size_of(packed->dtype, &packing.weight, &packed->bytes) == MHA_OK) {
        packed->panels = mha_system_allocate(packed->bytes > 0 ? packed->bytes : 1);
    }
    if (packed->panels == NULL) {
        PyErr_SetString(PyExc_MemoryError, "weight: no memory to pack it");
        goto cleanup;
    }
    packing.packed = packed->panels;
    packed->weight = mha_packed_weight(&packing);
    if (mha_call_run(NULL, pack, &packing, num_threads) < 0) {
        goto cleanup;
    }
    capsule = PyCapsule_New(packed, CAPSULE_NAME, free_packed);
    if (capsule != NULL) {
        packed = NULL;
    }
cleanup:
    if (packed != NULL) {
        mha_system_free(packed->panels);
        free(packed);
    }
    Py_XDECREF(array);
    Py_XDECREF(real);
    return capsule;
}

static mha_status unpack(const void *unpacking, mha_execution *execution) {
    return mha_unpack_weight(unpacking, execution);
}

/* 0, or -1 with the exception. */
static int check_kernels(const packed_weight *packed, const char *name) {
    if (!mha_weight_fits(&packed->weight, packed->dtype)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: got one packed for other kernels, wanted it packed anew", name);
        return -1;
    }
    return 0;
}

/* A new array (in, out) of the numbers, of the type that they had; NULL with the exception. */
static PyArrayObject *unpacked_array(const packed_weight *packed, const char *name) {
    const int num_threads = mha_call_threads();
    const npy_intp shape[] = {(npy_intp)packed->weight.in, (npy_intp)packed->weight.out};
    if (num_threads == 0 || check_kernels(packed, name) < 0) {
        return NULL;
    }
    PyArrayObject *array = mha_new_array(2, shape, packed->typenum, name);
    if (array == NULL) {
        return NULL;
    }
    const mha_weight_unpacking unpacking = {
        .dtype = packed->dtype, .packed = packed->weight, .to = PyArray_DATA(array)};
    if (PyArray_SIZE(array) > 0 && mha_call_run(NULL, unpack, &unpacking, num_threads) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

static const packed_weight *packed_or_error(PyObject *object) {
    const packed_weight *packed = packed_in(object);
    if (packed == NULL) {
        PyErr_SetString(PyExc_TypeError, "weight: wanted one that pack_weight made");
    }
    return packed;
}

PyObject *mha_py_unpack_weight(PyObject *module, PyObject *object) {
    const packed_weight *packed = packed_or_error(object);
    (void)module;
    return packed == NULL ? NULL : (PyObject *)unpacked_array(packed, "weight");
}

/* Bytes that the panels take. */
PyObject *mha_py_packed_bytes(PyObject *module, PyObject *object) {
    const packed_weight *packed = packed_or_error(object);
    (void)module;
    return packed == NULL ? NULL : PyLong_FromSize_t(packed->bytes);
}

static int check_in(const converted_weight *weight, int64_t wanted, const char *in_meaning,
                    const char *name) {
    if (weight->in != wanted) {
        char text[MHA_SHAPE_TEXT];
        const npy_intp shape[] = {(npy_intp)weight->in, (npy_intp)weight->out};
        const char *hint =
            weight->out == wanted ? "; stored as (out, in)? then pass its transpose, .T" : "";
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted %lld rows, %s%s", name,
                     mha_shape_text(shape, 2, text), (long long)wanted, in_meaning, hint);
        return -1;
    }
    return 0;
}

int64_t mha_rows_of_weight(PyObject *object) {
    const packed_weight *packed = packed_in(object);
    if (packed != NULL) {
        return packed->weight.in;
    }
    const bool is_matrix = PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) == 2;
    return is_matrix ? PyArray_DIM((PyArrayObject *)object, 0) : -1;
}

mha_storage mha_storage_of_given(PyObject *object) {
    const packed_weight *packed = packed_in(object);
    if (packed != NULL) {
        return packed->weight.storage;
    }
    return PyArray_Check(object) ? mha_storage_of((PyArrayObject *)object) : MHA_AS_COMPUTED;
}

/* As it is; in another element type its numbers, as of an array. */
static int convert_packed(PyObject *capsule, mha_dtype dtype, int64_t in, const char *in_meaning,
                          const char *name, converted_weight *weight) {
    const packed_weight *packed = packed_in(capsule);
    if (packed->dtype == dtype) {
        if (check_kernels(packed, name) < 0) {
            return -1;
        }
        weight->owner = Py_NewRef(capsule);
    } else {
        PyArrayObject *array = unpacked_array(packed, name);
        if (array == NULL) {
            return -1;
        }
        weight->owner = (PyObject *)mha_as_strided_stored(array, dtype, name);
        Py_DECREF(array);
        if (weight->owner == NULL) {
            return -1;
        }
    }
    weight->in = packed->weight.in;
    weight->out = packed->weight.out;
    return check_in(weight, in, in_meaning, name);
}

int mha_convert_weight(PyObject *object, mha_dtype dtype, int64_t in, const char *in_meaning,
                       const char *name, converted_weight *weight) {
    char text[MHA_SHAPE_TEXT];
    if (packed_in(object) != NULL) {
        return convert_packed(object, dtype, in, in_meaning, name, weight);
    }
    PyArrayObject *array = mha_as_array(object, name);
    if (array == NULL) {
        return -1;
    }
    if (PyArray_NDIM(array) != 2) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted (in, out)", name,
                     mha_array_shape_text(array, text));
        Py_DECREF(array);
        return -1;
    }
    weight->in = PyArray_DIM(array, 0);
    weight->out = PyArray_DIM(array, 1);
    if (check_in(weight, in, in_meaning, name) == 0) {
        weight->owner = (PyObject *)mha_as_strided_stored(array, dtype, name);
    }
    Py_DECREF(array);
    return weight->owner == NULL ? -1 : 0;
}

mha_weight mha_fill_weight(const converted_weight *converted) {
    mha_weight weight = {.in = converted->in, .out = converted->out};
    if (PyCapsule_CheckExact(converted->owner)) {
        return packed_in(converted->owner)->weight;
    }
    PyArrayObject *array = (PyArrayObject *)converted->owner;
    weight.data = PyArray_DATA(array);
    weight.in_stride = PyArray_STRIDE(array, 0);
    weight.out_stride = PyArray_STRIDE(array, 1);
    weight.storage = mha_storage_of(array);
    return weight;
}

int mha_refuse_packed(const converted_weight *weight, const char *name) {
    if (PyCapsule_CheckExact(weight->owner)) {
        PyErr_Format(PyExc_TypeError, "%s: got a packed weight, wanted an array", name);
        return -1;
    }
    return 0;
}
