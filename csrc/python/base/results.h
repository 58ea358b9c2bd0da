/* Memory of large results. A result of some MiB comes fresh from the system at every call and goes
 * back when the array dies; its first touch then costs a page fault every 4 KiB, a quarter of the
 * time of a training step at BERT's sizes. So the last few blocks that died are kept for results of
 * the same size, up to MHA_SPARE_BLOCK_BYTES. */
#ifndef MHA_RESULTS_H
#define MHA_RESULTS_H

#include "python/base/binding.h"

enum { MHA_SPARE_BLOCK_BYTES = 32 << 20 };

/* To be called once, when the module is imported; -1 with an exception. */
int mha_start_results(void);

/* A new uninitialised array, or NULL with NumPy's exception; `like` gives its shape and, as far as
 * they are dense, the order of its axes. */
PyArrayObject *mha_new_result(int axes, const npy_intp *shape, int typenum);
PyArrayObject *mha_new_result_like(PyArrayObject *like, int typenum);

#endif
