/* Rotary embeddings and positions as Python gives them. */
#ifndef MHA_PY_ROTARY_H
#define MHA_PY_ROTARY_H

#include "python/convert/convert.h"

/* Of the record (frequencies, interleaved, magnitude) that mha.Rotary makes: the first are the
 * bytes of float64 numbers. */
typedef struct converted_rotary {
    PyObject *frequencies; /* owned; NULL: none was given */
    mha_rotary rotary;     /* the frequencies only once pointers are taken */
} converted_rotary;

/* None converts to none. 0, or -1 with the exception; `converted` must be zeroed before and
 * cleared after, either way. */
int mha_convert_rotary(PyObject *record, int64_t head_dim, converted_rotary *converted);

/* Takes the pointer; NULL for none. Valid as long as `converted` stays where it is. */
const mha_rotary *mha_fill_rotary(converted_rotary *converted);

/* int64 of shape (length,) or batch + (length,). NULL with the exception. */
PyArrayObject *mha_convert_positions(PyObject *object, const npy_intp *batch, int batch_axes,
                                     int64_t length, const char *name);

/* (batch..., length), repeated over the batch where they have no batch axes; absent where NULL. */
mha_tensor mha_fill_positions(PyArrayObject *positions, const npy_intp *batch, int batch_axes);

#endif
