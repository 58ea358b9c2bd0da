/* Scaled dot-product attention over few keys, of many heads. */
#ifndef MHA_FEW_KEYS_H
#define MHA_FEW_KEYS_H

#include "mha/attention.h"

/* Whether the keys are so few, and the heads so many, that the kernel for them is the faster one.
 * All kernels give the same bits. */
bool mha_has_few_keys(const mha_attention *attention);

/* The caller gives back what it takes of the workspace. */
mha_status mha_few_keys_forward(const mha_attention *attention,
                                mha_execution *execution) MHA_MUST_CHECK;

#endif
