/* A call of multi_head_attention, as its backward pass finds it again. */
#ifndef MHA_PY_MULTI_HEAD_ATTENTION_H
#define MHA_PY_MULTI_HEAD_ATTENTION_H

#include "python/call/gradient.h"
#include "python/call/inputs.h"
#include "python/call/weight.h"
#include "python/steps/layer_cache.h"
#include "python/steps/preparation.h"

#define MHA_KEPT_LAYER "multi_head_attention"

enum { NUM_VECTORS = 5 }; /* the biases and head_gate */

typedef struct layer_call {
    PyArrayObject *query, *key, *value; /* C-contiguous (batch..., len, dim), halves as they are */
    converted_weight W_q, W_k, W_v, W_o;
    PyArrayObject *b_q, *b_k, *b_v, *b_o, *head_gate; /* or NULL */
    mha_dtype dtype;
    int result_typenum;        /* of the output: halves too */
    int typenums[NUM_VECTORS]; /* of the biases and head_gate, as they were given */
    int64_t num_heads, num_kv_heads;
    score_shape scores;
    converted_options options;
    attention_results results;
    bool key_is_query, value_is_key, keeps;
    converted_preparation preparation;
    converted_cache cache;
    bool bias_has_batch_of_one; /* as it came: one axis more than the scores have */
    /* For the backward pass, or NULL: (batch..., len, heads * d), before and after head_gate. */
    PyArrayObject *projected_query, *projected_key, *projected_value, *attended, *merged;
    PyArrayObject *unprepared_query, *unprepared_key; /* before their norms */
    mha_multi_head_attention layer;                   /* the problem */
} layer_call;

/* Takes the pointers. */
bool mha_fill_layer(void *call);

#endif
