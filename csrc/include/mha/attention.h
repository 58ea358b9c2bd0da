/* The steps of multi-head attention, and attention backwards. Shapes are the caller's duty: each
 * comment states the contract, and the Python binding checks it. No function keeps a pointer after
 * it returns. */
#ifndef MHA_ATTENTION_H
#define MHA_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

#include "mha/execution.h"
#include "mha/projection.h"
#include "mha/rotary.h"
#include "mha/tensor.h"

MHA_API_BEGIN

/* Offsets and windows are clipped to this, far from overflow; an open window is beyond it. */
#define MHA_FARTHEST ((int64_t)1 << 60)
#define MHA_UNLIMITED ((int64_t)1 << 61)

/* Numbers of each head, contiguous, `stride` bytes behind those of the head before: 0 where one row
 * serves all heads. data NULL: absent. */
typedef struct mha_head_numbers {
    void *data;
    int64_t columns, stride;
} mha_head_numbers;

/* Which batch item, head, query and key dropout takes the first ones of a problem for, where it is
 * a part of a larger one: from 0 to MHA_MOST_DROPOUT_OFFSET. */
#define MHA_MOST_DROPOUT_OFFSET (((int64_t)1 << 32) - 1)
typedef struct mha_dropout_offsets {
    int64_t batch, head, query, key;
} mha_dropout_offsets;

/* A mask by blocks of MHA_MASK_BLOCK queries and keys from 0 on: mha.BlockMask. Row r of blocks of
 * group g, a head of a batch item, has the entries starts[g * rows + r]..starts[g * rows + r + 1];
 * a block without one is hidden. */
enum { MHA_MASK_BLOCK = 128, MHA_FULL_BLOCK = -1 };
typedef struct mha_block_mask {
    int64_t batch, heads;    /* 1, or those of the problem; batch items in C order */
    int64_t rows;            /* of blocks, of a group */
    int64_t first_batch;     /* which item batch item 0 of the problem is */
    const int64_t *starts;   /* (batch * heads * rows + 1,); NULL: absent */
    const int32_t *columns;  /* (entries,): of blocks, ascending in a row */
    const int32_t *contents; /* (entries,): MHA_FULL_BLOCK, or which of the patterns */
    const uint8_t *patterns; /* (count, MHA_MASK_BLOCK keys, MHA_MASK_BLOCK / 8): bit q % 8 of byte
                                q / 8 is query q; 1 = attend, 0 beyond the lengths */
} mha_block_mask;

/* The options of the scores. Tensors with data == NULL are absent; all others have the batch axes
 * of the problem in front (stride 0 where broadcast). */
typedef struct mha_attention_options {
    mha_tensor mask;           /* bool bytes, (batch..., heads, query_len, key_len), 1 = attend */
    mha_block_mask block_mask; /* or this */
    mha_tensor bias;           /* real,       (batch..., heads, query_len, key_len) */
    mha_tensor key_lengths;    /* int64,      (batch..., query_len) */
    mha_tensor query_offset;   /* int64,      (batch...) */
    mha_head_numbers alibi;    /* real, 1 column */
    mha_head_numbers relative_bias; /* real, 2 * farthest + 1 columns */
    mha_head_numbers sinks;         /* real, 1 column; not with uniform_empty_rows */
    bool causal;
    int64_t window_left;  /* MHA_UNLIMITED where open */
    int64_t window_right; /* MHA_UNLIMITED where open */
    int64_t keep_first;   /* keys in front of it are seen though the window has left them behind */
    int64_t dropped;      /* positions missing behind those; both are for the forward pass alone */
    double scale;         /* always there: 0 makes all scores 0 */
    double softcap;       /* 0: none */
    bool uniform_empty_rows;
    uint32_t dropout_threshold; /* a weight is kept iff its 16 random bits >= this; 0: no dropout */
    uint64_t dropout_seed;
    mha_dropout_offsets dropout_offsets;
} mha_attention_options;

/* What makes a score of a query and a key: query . key * scale, or w_v . tanh(query + key). */
typedef enum mha_score_function { MHA_DOT_PRODUCT, MHA_ADDITIVE } mha_score_function;

/* Where the keys and values of one sequence lie in pages of a pool. `key` and `value` are then
 * those of page 0, with the strides of a page; position k lies in page table[k / page_len], row k %
 * page_len. Strides are bytes from one page to the next. */
enum { MHA_PAGE_MULTIPLE = 128 }; /* of page_len */
typedef struct mha_pages {
    const int64_t *table; /* (pages of the sequence,); NULL: they lie in one piece */
    int64_t page_len, key_stride, value_stride;
} mha_pages;

/* query  (batch..., heads, query_len, head_dim)          last axis contiguous
 * key    (batch..., kv_heads, key_len, head_dim)         last axis contiguous; in the forward pass,
 * value  (batch..., kv_heads, key_len, value_head_dim)   of real, instead the axis before the last
 * output (batch..., heads, query_len, value_head_dim)    last axis contiguous
 * weights, if wanted: C-contiguous (batch..., heads, query_len, key_len)
 * lse,     if wanted: C-contiguous (batch..., heads, query_len)
 * maximum, denominator, if wanted, both: the same shape; what softmax subtracted from a row's
 * scores and divided its exponentials by, for the gradients
 * w_v, of additive scores: contiguous (head_dim,)
 * head_gate,  if given: contiguous (heads,): multiplies each head's output
 * result_rows, if not 0: from a head of lse, maximum and denominator to the next, instead of
 * query_len; first_batch: the index of batch item 0 for dropout
 * queries_of_head: the core's own, where heads that share a key head are more queries of one: query
 * i stands where query i % queries_of_head does; else 0
 * sees_part: in the backward pass, output, maximum and denominator count more keys than there are
 * here
 * pages: of key and value, in the forward pass, without batch axes */
typedef struct mha_attention {
    mha_dtype dtype;
    int batch_axes;
    mha_tensor query, key, value, output;
    void *weights;
    void *lse;
    void *maximum, *denominator;
    mha_score_function score_function;
    const void *w_v;
    const void *head_gate;
    int64_t result_rows, first_batch, queries_of_head;
    bool sees_part;
    mha_pages pages;
    const mha_attention_options *options;
} mha_attention;

mha_status mha_scaled_dot_product_attention_workspace(const mha_attention *attention,
                                                      int num_threads,
                                                      size_t *bytes) MHA_MUST_CHECK;
mha_status mha_scaled_dot_product_attention_forward(const mha_attention *attention,
                                                    mha_execution *execution) MHA_MUST_CHECK;

/* Gradients of scaled dot-product attention, by the chain rule backwards from grad_output and
 * grad_lse. `attention` is that of the forward pass, with its output, maximum and denominator, and
 * without head_gate. Tensors with data == NULL are not wanted.
 * grad_output (batch..., heads, query_len, value_head_dim), last axis contiguous
 * grad_lse    C-contiguous (batch..., heads, query_len), or NULL: zeros
 * grad_query, grad_key, grad_value  shaped as query, key, value, last axes contiguous; written
 * grad_bias   (batch..., heads, query_len, key_len), strides 0 where the bias is repeated; written
 *             where there are scores
 * grad_alibi, grad_relative_bias, grad_sinks  as the options; written where there are queries or
 *             keys
 * grad_w_v  shaped as query: what each query adds to the gradient; written */
typedef struct mha_attention_gradients {
    const mha_attention *attention;
    mha_tensor grad_output;
    const void *grad_lse;
    mha_tensor grad_query, grad_key, grad_value, grad_bias, grad_w_v;
    mha_head_numbers grad_alibi, grad_relative_bias, grad_sinks;
} mha_attention_gradients;

mha_status
mha_scaled_dot_product_attention_backward_workspace(const mha_attention_gradients *gradients,
                                                    int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_scaled_dot_product_attention_backward(const mha_attention_gradients *gradients,
                                                     mha_execution *execution) MHA_MUST_CHECK;

/* What a forward pass leaves for the gradients, from the log-sum-exp of its rows alone, where that
 * pass was another, over more keys: maximum and denominator, (rows,) as lse is, under this scale
 * and softcap. A row of -inf sees no key. */
typedef struct mha_attention_statistics {
    mha_dtype dtype; /* of maximum and denominator */
    int64_t rows;
    const double *lse;
    double scale, softcap;
    void *maximum, *denominator;
} mha_attention_statistics;

mha_status mha_attention_statistics_forward(const mha_attention_statistics *statistics,
                                            mha_execution *execution) MHA_MUST_CHECK;

/* The other way round: lse (batch..., heads, query_len) in double precision, of an attention after
 * its forward pass with maximum and denominator, which know it better than its element type can say
 * where scores are large. */
typedef struct mha_exact_lse {
    const mha_attention *attention;
    double *lse;
} mha_exact_lse;

mha_status mha_exact_lse_forward(const mha_exact_lse *exact,
                                 mha_execution *execution) MHA_MUST_CHECK;

/* A ragged batch: the rows of all sequences stand one behind the other, and each sequence is a
 * problem of its own, batch item s for dropout. `all` has no batch axes: query (heads,
 * total_query_len, head_dim), key and value (kv_heads, total_key_len, ...), lse, maximum and
 * denominator (heads, total_query_len), no weights, and options without mask, bias, key_lengths and
 * query_offset. Sequence s has the rows starts[s]..starts[s + 1]; starts (sequences + 1,) begin
 * with 0, never fall and end with the total. query_offset (sequences,). With all.pages the keys lie
 * in a pool, and all.pages.table is (sequences, page_tables_stride), a row a sequence; key_starts
 * then tell how many keys each has. */
typedef struct mha_varlen_attention {
    mha_attention all;
    int64_t sequences;
    const int64_t *query_starts, *key_starts;
    const int64_t *query_offset;
    int64_t page_tables_stride; /* elements */
    const int64_t *dropped;     /* (sequences,), as in the options; NULL: none */
} mha_varlen_attention;

mha_status mha_scaled_dot_product_attention_varlen_workspace(const mha_varlen_attention *varlen,
                                                             int num_threads,
                                                             size_t *bytes) MHA_MUST_CHECK;
mha_status mha_scaled_dot_product_attention_varlen_forward(const mha_varlen_attention *varlen,
                                                           mha_execution *execution) MHA_MUST_CHECK;

/* Its gradients; `all` has the rows of all sequences likewise, `all.attention` is that of `varlen`.
 * grad_alibi, grad_relative_bias and grad_sinks are sums over the sequences. */
typedef struct mha_varlen_gradients {
    const mha_varlen_attention *varlen;
    mha_attention_gradients all;
} mha_varlen_gradients;

mha_status mha_scaled_dot_product_attention_varlen_backward_workspace(
    const mha_varlen_gradients *gradients, int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status
mha_scaled_dot_product_attention_varlen_backward(const mha_varlen_gradients *gradients,
                                                 mha_execution *execution) MHA_MUST_CHECK;

/* (..., len, heads * d) seen as (..., heads, len, d): only shape and strides change. `heads` may be
 * x itself. */
void mha_split_heads(const mha_tensor *x, int64_t num_heads, mha_tensor *heads);

/* heads (..., heads, len, d), any strides -> merged, C-contiguous (..., len, heads * d). */
typedef struct mha_merge_heads {
    mha_dtype dtype;
    mha_tensor heads;
    void *merged;
} mha_merge_heads;

mha_status mha_merge_heads_forward(const mha_merge_heads *merge,
                                   mha_execution *execution) MHA_MUST_CHECK;

/* x / sqrt(mean(x^2) + eps) * (offset + weight) (Zhang & Sennrich 2019), of each head on its own
 * where there are head_dim columns, else of all heads of a token together. */
typedef struct mha_head_norm {
    const void *weight; /* real (columns,), or NULL: no norm */
    int64_t columns;    /* head_dim or heads * head_dim */
    double eps, offset; /* eps >= 0 */
} mha_head_norm;

/* What a layer does to projected queries or keys before attention, as a step alone: norm, then the
 * rotation. x and output are C-contiguous (batch, length, num_heads * head_dim), not the same. */
typedef struct mha_head_preparation {
    mha_dtype dtype;
    int64_t batch, length, num_heads, head_dim;
    const void *x;
    mha_head_norm norm;
    const mha_rotary *rotary; /* or NULL */
    const mha_tensor
        *positions; /* int64 (batch, length), strides 0 where repeated; NULL: 0, 1... */
    void *output;
} mha_head_preparation;

mha_status mha_head_preparation_workspace(const mha_head_preparation *preparation, int num_threads,
                                          size_t *bytes) MHA_MUST_CHECK;
mha_status mha_head_preparation_forward(const mha_head_preparation *preparation,
                                        mha_execution *execution) MHA_MUST_CHECK;

/* The backward pass: `forward` as it was, without its output, and x only where there is a norm. The
 * gradients lie as x does; that of the norm is (columns,). */
typedef struct mha_head_preparation_gradients {
    mha_head_preparation forward;
    const void *grad_output;
    void *grad_x;    /* never NULL */
    void *grad_norm; /* NULL where not wanted */
} mha_head_preparation_gradients;

mha_status mha_head_preparation_backward_workspace(const mha_head_preparation_gradients *gradients,
                                                   int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_head_preparation_backward(const mha_head_preparation_gradients *gradients,
                                         mha_execution *execution) MHA_MUST_CHECK;

/* The output gate as a step alone: gated = merged * sigmoid(logits). All are contiguous rows:
 * (rows, num_heads * columns), but for logits by head, (rows, num_heads). `gated` is none of the
 * others. */
typedef struct mha_output_gate {
    mha_dtype dtype;
    int64_t rows, num_heads, columns;
    bool by_head;
    const void *merged, *logits;
    void *gated;
} mha_output_gate;

mha_status mha_output_gate_forward(const mha_output_gate *gate,
                                   mha_execution *execution) MHA_MUST_CHECK;

/* The backward pass: `forward` without `gated`. The gradients lie as what they are of; NULL where
 * not wanted. */
typedef struct mha_output_gate_gradients {
    mha_output_gate forward;
    const void *grad_gated;
    void *grad_merged, *grad_logits;
} mha_output_gate_gradients;

mha_status mha_output_gate_backward(const mha_output_gate_gradients *gradients,
                                    mha_execution *execution) MHA_MUST_CHECK;

/* The intermediate results, C-contiguous (batch..., len, heads * d), saved for the gradients; NULL
 * for none. The projected ones are as attention reads them; with a norm, the unprepared ones are as
 * they were before it, else NULL. `attended` and `merged` are before and after the gates, the same
 * array without; `gate` is what the output gate takes the sigmoid of. */
typedef struct mha_saved_steps {
    void *projected_query, *projected_key, *projected_value, *attended, *merged;
    void *unprepared_query, *unprepared_key, *gate;
} mha_saved_steps;

/* A layer's call with a cache: attention reads key (batch..., kv_heads, cached_len, head_dim) and
 * value in place of the projected ones. Between projection and attention, append(context,
 * execution) puts the projected ones there, which the caller keeps in mha_saved_steps; it returns
 * 0, or stops the call with MHA_CANCELLED. NULL: it puts none. */
typedef struct mha_layer_cache {
    mha_tensor key, value; /* without axes: no cache */
    int (*append)(void *context, mha_execution *execution);
    void *context;
} mha_layer_cache;

/* The whole figure. query (batch..., query_len, query_dim), key (batch..., key_len, key_dim) and
 * value (batch..., key_len, value_dim) are C-contiguous; output (batch..., query_len, output_dim)
 * too; each may be halves. head_gate (num_heads,) or NULL; weights, lse, maximum and denominator as
 * in mha_attention. */
typedef struct mha_multi_head_attention {
    mha_dtype dtype;
    int batch_axes;
    int64_t batch_shape[MHA_MAX_AXES];
    int64_t query_len, key_len, num_heads, num_kv_heads;
    const void *query, *key, *value;
    mha_storage query_storage, key_storage, value_storage, output_storage;
    mha_weight W_q, W_k, W_v, W_o;
    const void *b_q, *b_k, *b_v, *b_o; /* real, one for each column, or NULL */
    const void *head_gate;
    /* The output gate, sigmoid(query W_g + b_g) times the merged heads: as many columns as W_o has
     * rows, or one a head. No gate where W_g has no columns. */
    mha_weight W_g;
    const void *b_g;
    /* Between projection and attention: norms, then the rotation by positions, int64 (batch...,
     * query_len) and (batch..., key_len), strides 0 where repeated; NULL: 0, 1, ... */
    mha_head_norm q_norm, k_norm;
    const mha_rotary *rotary; /* or NULL */
    const mha_tensor *positions, *key_positions;
    const mha_attention_options *options;
    void *output;
    void *weights, *lse, *maximum, *denominator;
    mha_saved_steps saved;
    mha_layer_cache cache;
} mha_multi_head_attention;

mha_status mha_multi_head_attention_workspace(const mha_multi_head_attention *layer,
                                              int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_multi_head_attention_forward(const mha_multi_head_attention *layer,
                                            mha_execution *execution) MHA_MUST_CHECK;

/* Gradients of the whole figure, backwards from grad_output (batch..., query_len, output_dim) and
 * grad_lse (batch..., heads, query_len) or NULL: zeros. All are C-contiguous; what is NULL is not
 * wanted. `layer` is that of the forward pass, with its saved steps, maximum and denominator, its
 * weights not packed. Each gradient is shaped as the argument; grad_bias (batch..., heads,
 * query_len, key_len) has strides 0 where the bias is repeated. Where key was query itself, or
 * value key, their gradients are added to query's or key's. */
typedef struct mha_multi_head_attention_gradients {
    const mha_multi_head_attention *layer;
    const void *grad_output, *grad_lse;
    void *grad_query, *grad_key, *grad_value;
    void *grad_W_q, *grad_W_k, *grad_W_v, *grad_W_o, *grad_W_g;
    void *grad_b_q, *grad_b_k, *grad_b_v, *grad_b_o, *grad_b_g;
    void *grad_q_norm, *grad_k_norm; /* as the norms' weights */
    void *grad_head_gate;            /* (num_heads,) */
    mha_tensor grad_bias;
    mha_head_numbers grad_alibi, grad_relative_bias, grad_sinks; /* as in mha_attention_gradients */
    bool key_is_query, value_is_key;
} mha_multi_head_attention_gradients;

mha_status
mha_multi_head_attention_backward_workspace(const mha_multi_head_attention_gradients *gradients,
                                            int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_multi_head_attention_backward(const mha_multi_head_attention_gradients *gradients,
                                             mha_execution *execution) MHA_MUST_CHECK;

/* w_v . tanh(query W_q + key W_k). query (batch..., heads, query_len, query_dim) and key (batch...,
 * kv_heads, key_len, key_dim) are C-contiguous; `attention` is as above, of its query
 * and key only axes and shape are read: (batch..., heads, len, any). saved_query and saved_key, if
 * given, receive the projected rows: C-contiguous (batch..., heads, len, hidden). */
typedef struct mha_additive_attention {
    mha_attention attention;
    const void *query, *key;
    mha_storage query_storage, key_storage;
    mha_weight W_q, W_k;
    const void *w_v; /* real (hidden,) */
    int64_t query_rows, key_rows;
    void *saved_query, *saved_key;
} mha_additive_attention;

mha_status mha_additive_attention_workspace(const mha_additive_attention *additive, int num_threads,
                                            size_t *bytes) MHA_MUST_CHECK;
mha_status mha_additive_attention_forward(const mha_additive_attention *additive,
                                          mha_execution *execution) MHA_MUST_CHECK;

/* Gradients of additive attention, backwards from grad_output (batch..., heads, query_len,
 * value_head_dim), its last axis contiguous, and grad_lse, C-contiguous, or NULL. `additive` is
 * that of the forward pass, with its saved rows, output, maximum and denominator, its weights not
 * packed. What is NULL is not wanted: grad_query, grad_key, grad_W_q, grad_W_k and grad_w_v are
 * contiguous and shaped as the arguments, grad_value is shaped as value with its last axis
 * contiguous. */
typedef struct mha_additive_attention_gradients {
    const mha_additive_attention *additive;
    mha_tensor grad_output;
    const void *grad_lse;
    void *grad_query, *grad_key;
    mha_tensor grad_value;
    void *grad_W_q, *grad_W_k, *grad_w_v;
} mha_additive_attention_gradients;

mha_status
mha_additive_attention_backward_workspace(const mha_additive_attention_gradients *gradients,
                                          int num_threads, size_t *bytes) MHA_MUST_CHECK;
mha_status mha_additive_attention_backward(const mha_additive_attention_gradients *gradients,
                                           mha_execution *execution) MHA_MUST_CHECK;

/* Joins attention over parts of the keys. outputs[part] (rows, width) and lses[part] (rows,) are
 * C-contiguous, as are output and lse. All outputs may be halves, and output too. */
typedef struct mha_merge_attention {
    mha_dtype dtype;
    int64_t parts, rows, width;
    const void *const *outputs;
    const void *const *lses;
    void *output;
    void *lse;
    mha_storage outputs_storage, output_storage;
} mha_merge_attention;

mha_status mha_merge_attention_workspace(const mha_merge_attention *merge, int num_threads,
                                         size_t *bytes) MHA_MUST_CHECK;
mha_status mha_merge_attention_forward(const mha_merge_attention *merge,
                                       mha_execution *execution) MHA_MUST_CHECK;

/* round(65536 p), what the 16 random bits of a weight are compared with. */
uint32_t mha_dropout_threshold(double p);

/* kept (batch, heads, query_len, key_len) is 1 where dropout with this threshold and seed keeps the
 * weight. */
typedef struct mha_dropout_mask {
    uint32_t threshold;
    uint64_t seed;
    mha_dropout_offsets offsets;
    int64_t batch, heads, query_len, key_len;
    uint8_t *kept;
} mha_dropout_mask;

mha_status mha_dropout_mask_forward(const mha_dropout_mask *mask,
                                    mha_execution *execution) MHA_MUST_CHECK;

MHA_API_END

#endif
