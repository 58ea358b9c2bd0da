/* Scaled dot-product attention over a single key. */
#ifndef MHA_ONE_KEY_H
#define MHA_ONE_KEY_H

#include "mha/attention.h"

/* Whether there is one key, which every query sees, and nothing but the output is wanted. */
bool mha_has_one_key(const mha_attention *attention);

/* The caller gives back what it takes of the workspace. */
mha_status mha_one_key_forward(const mha_attention *attention,
                               mha_execution *execution) MHA_MUST_CHECK;

#endif
