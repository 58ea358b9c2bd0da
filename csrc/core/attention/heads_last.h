/* Masks and biases whose heads lie last: (batch..., query, key, heads), turned around by the
 * caller. Every head would read all lines of their memory. So they are copied, heads first. */
#ifndef MHA_HEADS_LAST_H
#define MHA_HEADS_LAST_H

#include "kernels/kernels.h"
#include "threads/pool.h"

/* A copy (heads, query, key) of `heads` heads and so many queries: keys side by side, rows bytes
 * apart. */
typedef struct mha_heads_first {
    const mha_tensor *option; /* what is copied, or NULL */
    int64_t item;             /* bytes of a number */
    int64_t heads, query_stride, head_stride;
    size_t bytes;
    mha_put_heads_first *put;
} mha_heads_first;

/* Where the heads do not lie last, or there is no such option: without option, of 0 bytes; as well
 * where the copy would be larger than `most` bytes. */
mha_heads_first mha_heads_first_of_mask(const mha_attention *attention, int64_t heads,
                                        int64_t queries, double most);
mha_heads_first mha_heads_first_of_bias(const mha_attention *attention, int64_t heads,
                                        int64_t queries, double most);

/* Copies the rows of `count` heads and of the queries first..end of a batch item, of the keys
 * that some of the queries see by their position; zeros elsewhere. */
void mha_copy_heads_first(const mha_heads_first *copy, const mha_attention *attention,
                          int64_t batch, int64_t head, int64_t count, int64_t first, int64_t end,
                          char *to, mha_checkpoint *checkpoint);

/* A call with such a mask or bias, for a pass that comes to all of it head by head: with copies of
 * both, where they are small enough. */
typedef struct mha_call_heads_first {
    mha_attention attention;
    mha_attention_options options;
} mha_call_heads_first;
mha_status mha_put_call_heads_first(const mha_attention *attention, mha_execution *execution,
                                    mha_call_heads_first *call) MHA_MUST_CHECK;

#endif
