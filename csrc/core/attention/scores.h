/* The options of a call as the kernels read them. */
#ifndef MHA_SCORES_H
#define MHA_SCORES_H

#include "kernels/kernels.h"
#include "mha/attention.h"

/* All that makes a head's weights of its dot products, into *scores: written where it stays, since
 * a copy right behind the writing of its fields would wait for them. */
void mha_fill_scores(const mha_attention *attention, int64_t batch, int64_t head,
                     mha_scores *scores);

/* The position of query 0 of the batch item among the keys. */
int64_t mha_query_offset(const mha_attention *attention, int64_t batch);

/* Whether the call has no options but mask, bias, softcap, scale, and which keys a row sees by its
 * position. */
bool mha_has_plain_scores(const mha_attention *attention);

/* Queries first + i, i < count, of the batch item see keys begin[i] <= j < end[i] that mask and
 * bias leave visible. Whether that is all keys for want of an option that says less. */
bool mha_visible_ranges(const mha_attention *attention, int64_t batch, int64_t first, int64_t count,
                        int64_t *begin, int64_t *end);

#endif
