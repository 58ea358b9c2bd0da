/* Scaled dot-product attention of few queries: decoding, classification tokens. */
#ifndef MHA_FEW_QUERIES_H
#define MHA_FEW_QUERIES_H

#include "mha/attention.h"

/* Whether the queries are so few that the kernel for them is the faster one. Both give the same
 * bits. */
bool mha_has_few_queries(const mha_attention *attention);

mha_status mha_few_queries_forward(const mha_attention *attention,
                                   mha_execution *execution) MHA_MUST_CHECK;

#endif
