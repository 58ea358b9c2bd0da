/* Masks and biases whose heads lie last: (batch..., query, key, heads), turned around by the
 * caller. Every head would read all lines of their memory. So they are copied, heads first. */
#ifndef MHA_HEADS_LAST_H
#define MHA_HEADS_LAST_H

#include "kernels/kernels.h"
#include "threads/pool.h"

/* The plan of a copy (heads, query, key) of some heads and queries: the keys of a row side by side,
 * rows and heads so many bytes apart. */
typedef struct mha_heads_copy {
    const mha_tensor *option; /* what is copied; NULL: nothing, of 0 bytes */
    int64_t item;             /* bytes of a number */
    int64_t heads, query_stride, head_stride;
    size_t bytes;
    mha_transpose *put;
} mha_heads_copy;

/* Of so many heads and queries. Nothing is copied where there is no such option, where its heads do
 * not lie last, where its rows are short, or where the copy would take more than `most` bytes. */
mha_heads_copy mha_plan_mask_copy(const mha_attention *attention, int64_t heads, int64_t queries,
                                  double most);
mha_heads_copy mha_plan_bias_copy(const mha_attention *attention, int64_t heads, int64_t queries,
                                  double most);

/* Copies the rows of the queries first..end of `count` heads of a batch item. Keys that none of
 * these queries sees by its position become 0: hidden by a mask, and not read of a bias. So what
 * is found out from the copy holds for this batch item alone. */
void mha_copy_heads(const mha_heads_copy *copy, const mha_attention *attention, int64_t batch,
                    int64_t head, int64_t count, int64_t first, int64_t end, char *to,
                    mha_checkpoint *checkpoint);

/* A call whose mask and bias are whole copies of those that have their heads last, for passes that
 * come to all of it head by head. Both copies together take at most 256 MB; what would take more
 * stays as it is. */
typedef struct mha_call_with_copies {
    mha_attention attention;
    mha_attention_options options;
} mha_call_with_copies;
mha_status mha_copy_heads_of_call(const mha_attention *attention, mha_execution *execution,
                                  mha_call_with_copies *call) MHA_MUST_CHECK;

#endif
