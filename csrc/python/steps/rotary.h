/* Rotary embeddings and positions as Python gives them. */
#ifndef MHA_PY_ROTARY_H
#define MHA_PY_ROTARY_H

#include "python/convert/convert.h"

/* Of the record (frequencies, interleaved, magnitude, axes, position_axes) that mha.Rotary makes:
 * bytes of a float64 a pair, and of an int64 a pair, none where there is one position axis. */
typedef struct converted_rotary {
    PyObject *frequencies, *axes; /* owned; NULL: none was given */
    int64_t position_axes;
    mha_rotary rotary; /* frequencies and axes only once pointers are taken */
} converted_rotary;

/* None converts to none. 0, or -1 with the exception; `converted` must be zeroed before and
 * cleared after, either way. */
int mha_convert_rotary(PyObject *record, int64_t head_dim, converted_rotary *converted);
void mha_clear_rotary(converted_rotary *converted);

/* Takes the pointer; NULL for none. Valid as long as `converted` stays where it is. */
const mha_rotary *mha_fill_rotary(converted_rotary *converted);

/* Into *positions, unless they are None, as int64: (length,) or batch + (length,); or, with several
 * position axes, either behind an axis of them. 0, or -1 with the exception. */
int mha_convert_positions(PyObject **argument, const converted_rotary *rotary,
                          const npy_intp *batch, int batch_axes, int64_t length, const char *name,
                          PyArrayObject **positions);

/* (batch..., length), repeated over the batch where they have no batch axes; with several position
 * axes (batch..., length, position axes). Absent where NULL. */
mha_tensor mha_fill_positions(PyArrayObject *positions, const converted_rotary *rotary,
                              const npy_intp *batch, int batch_axes);

#endif
