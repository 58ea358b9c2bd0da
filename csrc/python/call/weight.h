/* A projection's weight as Python gives it: an array, or what pack_weight made of one. */
#ifndef MHA_WEIGHT_H
#define MHA_WEIGHT_H

#include "python/convert/convert.h"

/* The capsule that a mha.PackedWeight has, or the object itself where it is one: a new reference.
 * NULL for all else, with the exception of an attribute that could not be read. */
PyObject *mha_packed_capsule(PyObject *object);

typedef struct converted_weight {
    PyObject *owner; /* the array or the capsule that holds the data */
    int64_t in, out;
} converted_weight;

/* Checks the shape (in, out). 0, or -1 with the exception. */
int mha_convert_weight(PyObject **argument, mha_dtype dtype, int64_t in, const char *in_meaning,
                       const char *name, converted_weight *weight);
mha_weight mha_fill_weight(const converted_weight *converted);

/* The rows of a weight that is not converted yet, or -1 where it is none. */
int64_t mha_rows_of_weight(PyObject *object);

/* How the numbers of an array or a packed weight lie; as computed for all else. */
mha_storage mha_storage_of_given(PyObject *object);

/* 0, or -1 with a TypeError where the weight is packed: gradients read weights as they are. */
int mha_refuse_packed(const converted_weight *weight, const char *name);

#endif
