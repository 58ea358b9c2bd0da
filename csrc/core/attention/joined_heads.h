/* Heads that share a key head, as more queries of one head: step 3 where queries are few. */
#ifndef MHA_JOINED_HEADS_H
#define MHA_JOINED_HEADS_H

#include "mha/attention.h"

typedef struct mha_joined_heads {
    mha_attention attention; /* to be computed in place of the one given: of copies, maybe */
    const mha_attention *given;
} mha_joined_heads;

/* Whether this is ahead of the kernels for few keys and few queries, where it is measured
 * (docs/journal.md): the queries of a key head fill most of a vector, or half of one of 16 lanes,
 * and each thread gets a task. */
bool mha_joined_heads_are_ahead(const mha_attention *a, int num_threads);

/* Where nothing is won, joined->attention is the given one. Takes what it copies to of the
 * workspace. */
mha_status mha_join_heads(const mha_attention *attention, mha_execution *execution,
                          mha_joined_heads *joined) MHA_MUST_CHECK;

/* Afterwards: outputs that were copied go where they belong. */
mha_status mha_part_heads(const mha_joined_heads *joined, mha_execution *execution) MHA_MUST_CHECK;

#endif
