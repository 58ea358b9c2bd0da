/* Between steps 2 and 3 of the figure: norms of the heads of queries or keys, then their rotation.
 */
#ifndef MHA_PREPARE_HEADS_H
#define MHA_PREPARE_HEADS_H

#include "core/heads/rotary_table.h"
#include "mha/attention.h"

/* Where rows of heads lie: head h of token i stands i * row_bytes + h * head_bytes behind. */
typedef struct mha_head_rows {
    void *data;
    int64_t row_bytes, head_bytes;
} mha_head_rows;

/* All heads of all tokens, batch * length of them. `to` may be `from` itself. */
typedef struct mha_prepare_heads {
    mha_dtype dtype;
    int64_t batch, length, num_heads, head_dim;
    mha_head_norm norm;            /* weight NULL: none */
    const mha_rotary_table *table; /* NULL: no rotation */
    mha_head_rows from, to;
} mha_prepare_heads;

/* Whether anything is done at all, and whether to all heads of a token together. */
static inline bool mha_prepares(const mha_prepare_heads *prepare) {
    return prepare->norm.weight != NULL || prepare->table != NULL;
}
static inline bool mha_prepares_whole_rows(const mha_prepare_heads *prepare) {
    return prepare->norm.weight != NULL && prepare->norm.columns != prepare->head_dim;
}

/* Some heads of some tokens, for the task that wrote them: all heads where they go together. */
void mha_prepare_block(const mha_prepare_heads *prepare, int64_t first_row, int64_t end_row,
                       int64_t first_head, int64_t end_head, mha_checkpoint *checkpoint);

/* As a pass of its own, from `from` to `to`, which may not be the same: tasks may run twice. */
mha_status mha_prepare_heads_forward(const mha_prepare_heads *prepare,
                                     mha_execution *execution) MHA_MUST_CHECK;

/* The backward pass: `prepare` of the forward pass, with a table that rotates back, reads `from`,
 * the rows before the norm, where there is one. grad_to -> grad_from, each side by side;
 * grad_weight (of the norm) is NULL where it is not wanted. */
typedef struct mha_prepare_heads_gradients {
    const mha_prepare_heads *prepare;
    mha_head_rows grad_to, grad_from;
    void *grad_weight;
} mha_prepare_heads_gradients;

mha_status mha_prepare_heads_backward(const mha_prepare_heads_gradients *gradients,
                                      mha_execution *execution) MHA_MUST_CHECK;

/* The tables of a layer's queries and keys, one for both where their positions are the same array,
 * or none; `back` rotates the other way. */
typedef struct mha_layer_tables {
    mha_rotary_table query, key;
} mha_layer_tables;

mha_status mha_make_layer_tables(const mha_multi_head_attention *layer, bool back,
                                 mha_execution *execution, mha_layer_tables *tables) MHA_MUST_CHECK;

#endif
