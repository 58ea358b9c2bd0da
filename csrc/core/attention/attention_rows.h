/* Where the rows of an attention problem lie, and which keys they may see. */
#ifndef MHA_ATTENTION_ROWS_H
#define MHA_ATTENTION_ROWS_H

#include "core/attention/scores.h"
#include "kernels/kernels.h"
#include "mha/attention.h"

/* Whether the columns of query, key and value are so few that no scratch size overflows. */
mha_status mha_check_columns(const mha_attention *attention) MHA_MUST_CHECK;

/* Whether a tensor (batch..., heads, rows, columns) has no rows at all. */
bool mha_has_no_rows(const mha_tensor *tensor);

/* The address of (batch, head, row) in a tensor (batch..., heads, rows, columns). */
char *mha_at_row(const mha_tensor *tensor, int batch_axes, int64_t batch, int64_t head,
                 int64_t row);

/* The place of (batch, head, row) in lse, maximum and denominator. */
int64_t mha_result_row(const mha_attention *attention, int64_t batch, int64_t head, int64_t row);

/* The `count` numbers of such a row in a result (batch..., heads, query_len, count), or NULL. */
void *mha_result_at(const mha_attention *attention, void *result, int64_t result_row,
                    int64_t count);

/* The queries first..first+count of a head, with everything that the problem says of them. Fills
 * `visible`, which the block points to. In place: a block is 350 bytes, and a small task's work
 * little more than copying it. */
void mha_fill_query_block(const mha_attention *attention, int64_t batch, int64_t head,
                          int64_t first, int64_t count, mha_key_ranges *visible,
                          mha_attention_block *block);

/* One query by the block kernel, which has a way for sums that overflow, NaN and infinity.
 * `scratch` is for one block of these kernels. */
void mha_attend_query(const mha_kernels *kernels, const mha_attention *attention, int64_t batch,
                      int64_t head, int64_t query, mha_checkpoint *checkpoint, void *scratch);

/* Fills what the blocks of all kernels have by the same names; a macro, since their structs have no
 * part in common. */
#define MHA_FILL_ROWS(a, block)                                                                    \
    do {                                                                                           \
        (block)->head_dim = mha_extent(&(a)->query, 1);                                            \
        (block)->value_head_dim = mha_extent(&(a)->value, 1);                                      \
        (block)->key_by_columns = mha_lies_by_columns(&(a)->key, (a)->dtype);                      \
        (block)->value_by_columns = mha_lies_by_columns(&(a)->value, (a)->dtype);                  \
        (block)->key_stride = mha_key_stride(&(a)->key, (a)->dtype);                               \
        (block)->value_stride = mha_key_stride(&(a)->value, (a)->dtype);                           \
        (block)->query_storage = (a)->query.storage;                                               \
        (block)->key_storage = (a)->key.storage;                                                   \
        (block)->value_storage = (a)->value.storage;                                               \
        (block)->output_storage = (a)->output.storage;                                             \
    } while (0)

/* The rows first..end of (batch, head), to be prefetched. */
mha_prefetch_rows mha_rows_to_come(const mha_attention *attention, const mha_tensor *tensor,
                                   int64_t batch, int64_t head, int64_t first, int64_t end);

/* Bytes that so many heads read and write. Above MHA_NEAR_BYTES they are more than a processor's
 * own caches hold, so that prefetching is worth the effort. */
enum { MHA_NEAR_BYTES = 2 << 20 };
double mha_bytes_of_heads(const mha_attention *attention, int64_t batch_heads);

/* Whether it is stored (columns, rows), as key and value in caches of some libraries are. */
bool mha_lies_by_columns(const mha_tensor *tensor, mha_dtype dtype);

/* Whether key or value of a call is; and whether both are neither paged nor in blocks. */
bool mha_some_lie_by_columns(const mha_attention *attention);
bool mha_has_plain_rows(const mha_attention *attention);

/* Elements between two rows. */
int64_t mha_row_stride(const mha_tensor *tensor, mha_dtype dtype);

/* The same of key or value; between two columns where these lie by columns. */
int64_t mha_key_stride(const mha_tensor *tensor, mha_dtype dtype);

/* Of a row, without what lies between two; and whether something does. */
int64_t mha_row_bytes(const mha_tensor *tensor, mha_dtype dtype);
bool mha_has_gaps(const mha_tensor *tensor, mha_dtype dtype);

/* Of the keys and values of a head, as they are stored. */
double mha_bytes_of_key_head(const mha_attention *attention);

/* Whether rows are better copied where they are read often: something else lies between two, as
 * where all heads lie side by side: then the rows of one head are pages apart, and reading them
 * again and again is slow. */
bool mha_rows_lie_apart(const mha_tensor *tensor, mha_dtype dtype);

/* Copies the rows first..end of (batch, head) to `own`, side by side, as the arithmetic has them.
 */
void mha_gather_rows(const mha_attention *attention, const mha_tensor *tensor, int64_t batch,
                     int64_t head, int64_t first, int64_t end, char *own);

/* Multiply-adds of the forward pass over so many heads of all batch items. */
double mha_attention_operations(const mha_attention *attention, int64_t batch_heads);

#endif
