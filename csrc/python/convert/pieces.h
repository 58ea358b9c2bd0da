/* Copies and casts of arrays of any size in pieces: between two of them Python runs signal
 * handlers, so that Ctrl-C acts in the middle. mha/_base/pieces.py does it on the Python side. */
#ifndef MHA_PIECES_H
#define MHA_PIECES_H

#include "python/base/binding.h"

/* As PyArray_CopyInto, of arrays of one shape that share no memory: 0, or -1 with the exception,
 * also that of a signal handler. */
int mha_copy_numbers(PyArrayObject *to, PyArrayObject *from);

/* As PyArray_FromArray with FORCECAST, of a type that is taken over: the array itself, new
 * reference, where it is as it should be. `name` is named where there is no memory. */
PyArrayObject *mha_cast(PyArrayObject *array, PyArray_Descr *type, int flags, const char *name);

/* A copy in C order; and the array itself where it lies so. New references. */
PyArrayObject *mha_contiguous_copy(PyArrayObject *array, const char *name);
PyArrayObject *mha_contiguous(PyArrayObject *array, const char *name);

/* As mha_round_numbers and mha_widen_numbers: 0, or -1 with the exception. */
int mha_round_in_pieces(const float *from, void *to, mha_storage storage, npy_intp count);
int mha_widen_in_pieces(const void *from, mha_storage storage, float *to, npy_intp count);

#endif
