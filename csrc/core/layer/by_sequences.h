/* A layer over many sequences, as tasks that are layers over some of them. */
#ifndef MHA_BY_SEQUENCES_H
#define MHA_BY_SEQUENCES_H

#include "mha/attention.h"

/* All steps of the figure, one after the other. */
typedef mha_status (*mha_layer_steps)(const mha_multi_head_attention *layer,
                                      mha_execution *execution);

/* Some sequences of a layer, those along its first axis, at a time. */
typedef struct mha_sequence_groups {
    int64_t sequences; /* of a group; the last one may have fewer */
    int64_t inner;     /* batch items of each sequence */
    int64_t count;     /* of groups; 0 where the layer is better taken step by step */
    int threads;
} mha_sequence_groups;

mha_sequence_groups mha_plan_sequence_groups(const mha_multi_head_attention *layer,
                                             int num_threads);

/* Each task takes one group through `steps`, on its own thread. */
mha_status mha_run_sequence_groups(const mha_multi_head_attention *layer,
                                   const mha_sequence_groups *groups, mha_layer_steps steps,
                                   mha_execution *execution) MHA_MUST_CHECK;

#endif
