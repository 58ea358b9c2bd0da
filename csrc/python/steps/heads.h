/* Step 2 of the figure on arrays of NumPy. */
#ifndef MHA_PY_HEADS_H
#define MHA_PY_HEADS_H

#include "python/convert/convert.h"

/* x (..., len, heads * d) seen by head, (..., heads, len, d): a view; `writeable` as that of
 * mha_new_view. New reference, or NULL with the exception. */
PyArrayObject *mha_view_by_head(PyArrayObject *x, int64_t heads, int writeable);

#endif
