#include "python/call/weight.h"

#include <stdlib.h>

#include "python/base/system.h"
#include "python/base/call.h"

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
    return mha_own_capsule(object, MHA_PACKED_WEIGHT, free_packed);
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

MHA_CORE_RUN(pack_weight)

/* A capsule with the panels of a weight, whose type the caller has set; NULL with the exception. */
static PyObject *new_packed(mha_dtype dtype, int typenum, const mha_weight *weight,
                            int num_threads) {
    packed_weight *packed = calloc(1, sizeof *packed);
    PyObject *capsule = NULL;
    if (packed == NULL) {
        return PyErr_NoMemory();
    }
    packed->dtype = dtype;
    packed->typenum = typenum;
    mha_weight_packing packing = {.dtype = dtype, .weight = *weight};
    if (mha_packed_size_of(dtype, weight, &packed->bytes) == MHA_OK) {
        packed->panels = mha_system_allocate(packed->bytes > 0 ? packed->bytes : 1);
    }
    if (packed->panels == NULL) {
        PyErr_SetString(PyExc_MemoryError, "weight: no memory to pack it");
        goto cleanup;
    }
    packing.packed = packed->panels;
    packed->weight = mha_packed_weight(&packing);
    if (mha_call_run(NULL, core_pack_weight, &packing, num_threads) < 0) {
        goto cleanup;
    }
    capsule = PyCapsule_New(packed, MHA_PACKED_WEIGHT, free_packed);
cleanup:
    if (capsule == NULL) {
        mha_system_free(packed->panels);
        free(packed);
    }
    return capsule;
}

/* A capsule with the panels of a C array (in, out): the fast path of frozen layers. */
PyObject *mha_py_pack_weight(PyObject *Py_UNUSED(module), PyObject *object) {
    PyArrayObject *array = NULL, *real = NULL;
    PyObject *capsule = NULL;
    mha_dtype dtype;
    int typenum;
    static const char *const names[] = {"weight"};
    const int num_threads = mha_call_threads();
    if (num_threads == 0) {
        return NULL;
    }
    array = mha_as_array(object, "weight");
    if (array == NULL || mha_make_private((PyObject **)&array) < 0 ||
        mha_result_types(&array, names, 1, &dtype, &typenum) < 0) {
        goto cleanup;
    }
    if (PyArray_NDIM(array) != 2) {
        mha_wrong_shape(array, "weight", "(in, out)");
        goto cleanup;
    }
    real = mha_as_strided_stored(array, dtype, "weight");
    if (real != NULL) {
        const mha_weight weight = {.data = PyArray_DATA(real),
                                   .in = PyArray_DIM(real, 0),
                                   .out = PyArray_DIM(real, 1),
                                   .in_stride = PyArray_STRIDE(real, 0),
                                   .out_stride = PyArray_STRIDE(real, 1),
                                   .storage = mha_storage_of(real)};
        capsule = new_packed(dtype, typenum, &weight, num_threads);
    }
cleanup:
    Py_XDECREF(array);
    Py_XDECREF(real);
    return capsule;
}

/* A C-contiguous matrix of this type, which nobody else may write to; NULL with the exception. */
static PyArrayObject *matrix_of(PyObject *object, int typenum, const char *name) {
    if (!PyArray_Check(object) || PyArray_TYPE((PyArrayObject *)object) != typenum ||
        PyArray_NDIM((PyArrayObject *)object) != 2) {
        PyErr_Format(PyExc_TypeError, "%s: wanted a matrix of the type of blocks", name);
        return NULL;
    }
    return (PyArrayObject *)PyArray_FromArray((PyArrayObject *)object,
                                              PyArray_DescrFromType(typenum),
                                              NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY);
}

/* pack_blocks(numbers int8 (in, out), scales float16 (in / 32, out), bits): a capsule. */
PyObject *mha_py_pack_blocks(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    PyArrayObject *numbers = NULL, *scales = NULL;
    PyObject *capsule = NULL;
    const long bits = nargs == 3 && PyLong_Check(args[2]) ? PyLong_AsLong(args[2]) : 0;
    if (bits != 8 && bits != 4) {
        PyErr_Clear();
        PyErr_SetString(PyExc_TypeError, "pack_blocks: wanted numbers, scales, and 8 or 4 bits");
        return NULL;
    }
    const int num_threads = mha_call_threads();
    if (num_threads == 0 || (numbers = matrix_of(args[0], NPY_INT8, "numbers")) == NULL ||
        (scales = matrix_of(args[1], NPY_HALF, "scales")) == NULL) {
        goto cleanup;
    }
    const mha_weight weight = {.data = PyArray_DATA(numbers),
                               .in = PyArray_DIM(numbers, 0),
                               .out = PyArray_DIM(numbers, 1),
                               .storage = bits == 8 ? MHA_Q8_0 : MHA_Q4_0,
                               .scales = PyArray_DATA(scales)};
    if (weight.in % MHA_QUANTISED_ROWS != 0 ||
        PyArray_DIM(scales, 0) != weight.in / MHA_QUANTISED_ROWS ||
        PyArray_DIM(scales, 1) != weight.out) {
        PyErr_SetString(PyExc_ValueError, "scales: wanted one for 32 numbers of a column");
        goto cleanup;
    }
    capsule = new_packed(MHA_FLOAT32, NPY_FLOAT32, &weight, num_threads);
cleanup:
    Py_XDECREF(numbers);
    Py_XDECREF(scales);
    return capsule;
}

MHA_CORE_RUN(unpack_weight)

/* 0, or -1 with the exception. */
static int check_kernels(const packed_weight *packed, const char *name) {
    if (!mha_weight_fits(&packed->weight, packed->dtype)) {
        return mha_raise(PyExc_ValueError,
                         "%s: got one packed for other kernels, wanted it packed anew", name);
    }
    return 0;
}

/* A new array (in, out) of the numbers, of the type that they had; NULL with the exception. */
static PyArrayObject *unpacked_array(const packed_weight *packed, const char *name) {
    const int num_threads = mha_call_threads();
    if (mha_is_quantised(packed->weight.storage)) {
        PyErr_Format(PyExc_TypeError, "%s: got a quantised weight, wanted x in float32 or a half",
                     name);
        return NULL;
    }
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
    if (PyArray_SIZE(array) > 0 &&
        mha_call_run(NULL, core_unpack_weight, &unpacking, num_threads) < 0) {
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

PyObject *mha_py_unpack_weight(PyObject *Py_UNUSED(module), PyObject *object) {
    const packed_weight *packed = packed_or_error(object);
    return packed == NULL ? NULL : (PyObject *)unpacked_array(packed, "weight");
}

/* unpack_blocks(packed): (numbers, scales) as pack_blocks had them. */
PyObject *mha_py_unpack_blocks(PyObject *Py_UNUSED(module), PyObject *object) {
    PyArrayObject *numbers = NULL, *scales = NULL;
    PyObject *both = NULL;
    const packed_weight *packed = packed_or_error(object);
    if (packed == NULL) {
        return NULL;
    }
    if (!mha_is_quantised(packed->weight.storage)) {
        PyErr_SetString(PyExc_TypeError, "weight: wanted one that pack_blocks made");
        return NULL;
    }
    const int num_threads = mha_call_threads();
    const npy_intp shape[] = {(npy_intp)packed->weight.in, (npy_intp)packed->weight.out};
    const npy_intp of_scales[] = {shape[0] / MHA_QUANTISED_ROWS, shape[1]};
    if (num_threads == 0 || check_kernels(packed, "weight") < 0 ||
        (numbers = mha_new_array(2, shape, NPY_INT8, "weight")) == NULL ||
        (scales = mha_new_array(2, of_scales, NPY_HALF, "weight")) == NULL) {
        goto cleanup;
    }
    const mha_weight_unpacking unpacking = {.dtype = packed->dtype,
                                            .packed = packed->weight,
                                            .to = PyArray_DATA(numbers),
                                            .scales = PyArray_DATA(scales)};
    if (PyArray_SIZE(numbers) == 0 ||
        mha_call_run(NULL, core_unpack_weight, &unpacking, num_threads) == 0) {
        both = PyTuple_Pack(2, numbers, scales);
    }
cleanup:
    Py_XDECREF(numbers);
    Py_XDECREF(scales);
    return both;
}

/* Bytes that the panels take. */
PyObject *mha_py_packed_bytes(PyObject *Py_UNUSED(module), PyObject *object) {
    const packed_weight *packed = packed_or_error(object);
    return packed == NULL ? NULL : PyLong_FromSize_t(packed->bytes);
}

static int check_in(const converted_weight *weight, int64_t wanted, const char *in_meaning,
                    const char *name) {
    if (weight->in == wanted) {
        return 0;
    }
    char text[MHA_SHAPE_TEXT];
    const npy_intp shape[] = {(npy_intp)weight->in, (npy_intp)weight->out};
    const char *hint =
        weight->out == wanted ? "; stored as (out, in)? then pass its transpose, .T" : "";
    return mha_raise(PyExc_ValueError, "%s: got shape %s, wanted %lld rows, %s%s", name,
                     mha_shape_text(shape, 2, text), (long long)wanted, in_meaning, hint);
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

int mha_convert_weight(PyObject **argument, mha_dtype dtype, int64_t in, const char *in_meaning,
                       const char *name, converted_weight *weight) {
    if (packed_in(*argument) != NULL) {
        return convert_packed(*argument, dtype, in, in_meaning, name, weight);
    }
    PyArrayObject *array = mha_array_argument(argument, name);
    if (array == NULL) {
        return -1;
    }
    if (PyArray_NDIM(array) != 2) {
        return mha_wrong_shape(array, name, "(in, out)");
    }
    weight->in = PyArray_DIM(array, 0);
    weight->out = PyArray_DIM(array, 1);
    if (check_in(weight, in, in_meaning, name) < 0) {
        return -1;
    }
    weight->owner = (PyObject *)mha_as_strided_stored(array, dtype, name);
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
        return mha_raise(PyExc_TypeError,
                         "%s: got a packed weight, wanted an array: unpack() makes one of it",
                         name);
    }
    return 0;
}
