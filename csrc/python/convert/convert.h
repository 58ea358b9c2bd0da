/* From Python objects to arrays and numbers. Each function names the argument in its error: what
 * came, what was wanted. */
#ifndef MHA_CONVERT_H
#define MHA_CONVERT_H

#include <stdbool.h>

#include "python/base/binding.h"

/* PyErr_Format(exception, message, ...); -1. */
int mha_raise(PyObject *exception, const char *message, ...);

/* Whether the pending exception may be passed over: not Ctrl-C, nor memory that ran out. */
bool mha_error_is_ordinary(void);

/* np.asarray(object), or by DLPack where that is all it offers, or where it holds bfloat16, of
 * which NumPy knows nothing. A TypeError for what NumPy would take without what it means: sparse
 * and masked arrays, numbers with a unit, and PyTorch's tensors that mha/_base/torch_tensors.py
 * refuses. New reference. */
PyArrayObject *mha_as_array(PyObject *object, const char *name);

/* The same, and it takes the object's place, so that it is borrowed. */
static inline PyArrayObject *mha_array_argument(PyObject **argument, const char *name) {
    PyArrayObject *array = mha_as_array(*argument, name);
    if (array != NULL) {
        Py_SETREF(*argument, (PyObject *)array);
    }
    return array;
}

/* As mha_as_array, but that of objects, which are no numbers, is let through. */
PyArrayObject *mha_as_any_array(PyObject *object, const char *name);

/* Raises the pending exception again, with the argument's name in front and why there is no array:
 * a TypeError as such, as a ValueError what NumPy and DLPack raise otherwise. */
void mha_name_pending_error(PyObject *object, const char *name, const char *why);

/* A read-only view of what an object offers by DLPack, which keeps its memory. NULL with an
 * exception. */
PyArrayObject *mha_array_from_dlpack(PyObject *object, const char *name);

/* The same into *array of an object that offers bfloat16; NULL where it offers none. 0, or -1 with
 * the exception. */
int mha_bfloat16_from_dlpack(PyObject *object, const char *name, PyArrayObject **array);

/* *array, owned, becomes a view of itself that no other thread can reshape; 0, or -1 with the
 * exception. Only after all code that converting other arguments runs: it might resize the array,
 * and a view would keep the old address. */
int mha_make_private(PyObject **array);

/* The name of a packed weight's capsules. */
#define MHA_PACKED_WEIGHT "mha.packed_weight"

/* What a capsule of this module holds: by its name, and by the function that clears it away, since
 * anybody can make a capsule of that name. NULL, without an exception, for other objects. */
void *mha_own_capsule(PyObject *object, const char *name, PyCapsule_Destructor clear);

static inline void *mha_data_or_null(PyArrayObject *array) {
    return array == NULL ? NULL : PyArray_DATA(array);
}

/* A view of the array's memory from an address in it on, that owns a reference to the array;
 * `writeable` is NPY_ARRAY_WRITEABLE or 0. NULL with an exception. */
PyArrayObject *mha_new_view(PyArrayObject *array, void *data, int axes, const npy_intp *shape,
                            const npy_intp *strides, int writeable);

/* How an array's numbers lie: as float16, as bfloat16 (that of ml_dtypes, found by its name, or
 * what a KVCache holds of it), or else. Runs no other code. */
mha_storage mha_storage_of(PyArrayObject *array);

/* Whether it holds blocks of q8_0, as caches do: each element is one, of 32 numbers. */
bool mha_is_in_blocks(PyArrayObject *array);

/* 0 for float32, float64 and integers, and for bool, float16 and bfloat16, which are cast where
 * another array decides the type; else -1 with a TypeError. */
int mha_check_real(PyArrayObject *array, const char *name);

/* What mixes with bfloat16: itself, float32 and float64. 0, or -1 with a TypeError for all else. */
int mha_check_beside_bfloat16(PyArrayObject *array, const char *name);

/* The element type of a result over `count` arrays: result_type, integers become float64. */
int mha_result_dtype(PyArrayObject **arrays, const char *const *names, int count, mha_dtype *dtype);

/* The same for functions that read and write halves: where all arrays are one kind of them, the
 * arithmetic is float32 and the result theirs; else both are the same. */
int mha_result_types(PyArrayObject **arrays, const char *const *names, int count, mha_dtype *dtype,
                     int *result_typenum);

/* As mha_as_real, but where the arithmetic is float32 halves stay what they are. */
PyArrayObject *mha_as_stored(PyArrayObject *array, mha_dtype dtype, const char *name);

/* The same, but numbers of the arithmetic may also lie by columns: those of the axis before the
 * last one side by side. */
PyArrayObject *mha_as_stored_either_way(PyArrayObject *array, mha_dtype dtype, const char *name);

/* The same, C-contiguous as a whole. */
PyArrayObject *mha_as_contiguous_stored(PyArrayObject *array, mha_dtype dtype, const char *name);

/* The same, any strides, as mha_as_strided_real. */
PyArrayObject *mha_as_strided_stored(PyArrayObject *array, mha_dtype dtype, const char *name);

/* The array in the element type, aligned, its last axis contiguous: itself where it already is so.
 * New reference; `array` stays the caller's. */
PyArrayObject *mha_as_real(PyArrayObject *array, mha_dtype dtype, const char *name);

/* Whether the elements of the last axis lie side by side. */
bool mha_last_axis_is_contiguous(PyArrayObject *array);

/* As mha_as_real, and C-contiguous as a whole. */
PyArrayObject *mha_as_contiguous_real(PyArrayObject *array, mha_dtype dtype, const char *name);

/* As mha_as_real, any strides. */
PyArrayObject *mha_as_strided_real(PyArrayObject *array, mha_dtype dtype, const char *name);

/* An int64 array of its own from anything of integers; an empty list counts as integers. New
 * reference. */
PyArrayObject *mha_as_integers(PyObject *object, const char *name);

/* A contiguous (length,) in the element type; NULL, and 0, for None. */
int mha_optional_vector(PyObject **argument, mha_dtype dtype, int64_t length, const char *name,
                        PyArrayObject **vector);

int mha_typenum(mha_dtype dtype);

/* Whether it is that of float16 or bfloat16: that of ml_dtypes, or NPY_VOID where nobody has
 * imported it. */
bool mha_is_half_type(int typenum);

/* That of bfloat16, either. */
int mha_bfloat16_typenum(void);

/* The same type as NumPy can show it: NPY_VOID with an ImportError where it cannot. */
int mha_shown_typenum(int typenum, const char *name);

/* The element type that computes with numbers of a type of NumPy: float64 for integers; or float32
 * for halves. */
mha_dtype mha_dtype_of_typenum(int typenum);
mha_dtype mha_computing_dtype(int typenum);

/* Names the array whose size NumPy has just refused: by a ValueError where it overflows, by a
 * MemoryError where it cannot be had. Either becomes a MemoryError; other exceptions stay. */
void mha_name_missing_memory(const npy_intp *shape, int axes, const char *name);

/* A new array, uninitialised. A size that overflows or cannot be had is a MemoryError, bfloat16
 * that nothing shows an ImportError. */
PyArrayObject *mha_new_array(int axes, const npy_intp *shape, int typenum, const char *name);

/* "(2, 3)", into a buffer that is cut off if need be. */
enum { MHA_SHAPE_TEXT = 128 };
const char *mha_shape_text(const npy_intp *shape, int axes, char text[MHA_SHAPE_TEXT]);
const char *mha_array_shape_text(PyArrayObject *array, char text[MHA_SHAPE_TEXT]);

/* A TypeError that names the object's type and what was wanted; -1. */
int mha_wrong_type(PyObject *object, const char *name, const char *wanted);

/* The same of the type of an array's numbers. */
int mha_wrong_dtype(PyArrayObject *array, const char *name, const char *wanted);

/* A ValueError that names the array's shape and what was wanted, a format of PyUnicode_FromFormat;
 * -1. */
int mha_wrong_shape(PyArrayObject *array, const char *name, const char *wanted, ...);

/* 0 where it has this shape, else -1 with the exception. */
int mha_check_shape(PyArrayObject *array, const npy_intp *shape, int axes, const char *name);

/* 0 where both are the same; else -1 with a ValueError, whose message has a %lld for each. */
int mha_check_equal(int64_t got, int64_t wanted, const char *message);

/* The core's view of an array; valid as long as the array is. Absent where it is NULL. */
mha_tensor mha_tensor_of(PyArrayObject *array);

/* The same of what a cache holds, whose rows may be in blocks; and its columns. */
mha_tensor mha_tensor_of_cached(PyArrayObject *array);
int64_t mha_columns_of(PyArrayObject *array);

/* The same; 2-D and 3-D arrays get an axis of 1 before the last two: one head. */
mha_tensor mha_tensor_with_heads(PyArrayObject *array);

/* Numbers. -1 with an exception, else 0. */
int mha_convert_bool(PyObject *object, const char *name, bool *value);
int mha_convert_number(PyObject *object, const char *name, double *value);
bool mha_has_index(PyObject *object);                     /* as ints do; a bool does not count */
PyObject *mha_as_int(PyObject *object, const char *name); /* by __index__; new reference */
int mha_convert_seed(PyObject *object, uint64_t *seed);
int mha_convert_size(PyObject *object, const char *name, int64_t least, int64_t *value);
/* Clipped to +-MHA_FARTHEST, beyond which positions and numbers of threads mean the same. */
int mha_convert_int(PyObject *object, const char *name, int64_t least, int64_t *value);

#endif
