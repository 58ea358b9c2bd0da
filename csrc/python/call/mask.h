/* mask=: a bool array, or the record of a mha.BlockMask, which nobody can change. */
#ifndef MHA_MASK_H
#define MHA_MASK_H

#include "python/call/options.h"

/* The record of a BlockMask, a tuple; NULL for what is none, with an exception where asking for it
 * failed. New reference. */
PyObject *mha_block_mask_record(PyObject *object);

/* What has been normalised, or None. 0, or -1 with the exception. */
int mha_convert_mask(PyObject *object, const score_shape *scores, converted_options *converted);

#endif
