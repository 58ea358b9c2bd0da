/* The gradient of a bias: inside the other gradients' tasks, or in a pass of its own. */
#ifndef MHA_BIAS_BACKWARD_H
#define MHA_BIAS_BACKWARD_H

#include "core/attention/gradient_job.h"

/* Whether grad bias is to be written. Without scores it is not: the array may be empty then. */
bool mha_wants_bias(const mha_gradient_job *job);

/* Whether tasks would add to the same numbers of grad bias, in any order. */
bool mha_bias_is_shared(const mha_gradient_job *job);

/* Lets a block of queries from first_query on add to grad bias, where that is wanted. */
void mha_want_bias(const mha_gradient_job *job, int64_t batch, int64_t head, int64_t first_query,
                   mha_attention_backward_block *block);

/* Zeros in a head's grad bias, before its tasks add to it. */
void mha_clear_bias(const mha_gradient_job *job, int64_t batch, int64_t head, mha_worker *worker);

/* The pass. */
mha_status mha_bias_backward(const mha_gradient_job *job, mha_execution *execution) MHA_MUST_CHECK;

#endif
