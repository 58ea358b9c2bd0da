/* The gradients that are one row a head, alibi, relative_bias and sinks: tasks over keys leave sums
 * for each row and each diagonal, which a pass after theirs adds up. */
#ifndef MHA_PER_HEAD_BACKWARD_H
#define MHA_PER_HEAD_BACKWARD_H

#include "core/attention/gradient_job.h"

bool mha_wants_per_head(const mha_attention_gradients *gradients);

/* The sums, of what is wanted. */
mha_status mha_take_per_head(mha_gradient_job *job, mha_workspace *workspace) MHA_MUST_CHECK;

/* Zeros in a chunk's sums of diagonals, before its blocks of queries add to them. */
void mha_clear_diagonals(const mha_gradient_job *job, int64_t batch, int64_t head, int chunk,
                         mha_worker *worker);

/* Lets a block of queries with a chunk of keys add to the sums. */
void mha_want_per_head(const mha_gradient_job *job, int64_t batch, int64_t head, int chunk,
                       mha_attention_backward_block *block);

/* So many sums are left for a head. */
double mha_sums_of_a_head(const mha_gradient_job *job);

/* The pass, over one job or those of all sequences. */
mha_status mha_per_head_backward(const mha_gradient_jobs *jobs,
                                 const mha_attention_gradients *gradients,
                                 mha_execution *execution) MHA_MUST_CHECK;

#endif
