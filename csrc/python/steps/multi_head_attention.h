/* A call of multi_head_attention, as its backward pass finds it again. */
#ifndef MHA_PY_MULTI_HEAD_ATTENTION_H
#define MHA_PY_MULTI_HEAD_ATTENTION_H

#include "python/call/gradient.h"
#include "python/call/inputs.h"
#include "python/call/weight.h"
#include "python/steps/layer_cache.h"
#include "python/steps/preparation.h"

enum { NUM_VECTORS = 6 }; /* the biases and head_gate */

typedef struct layer_call {
    PyArrayObject *query, *key, *value; /* C-contiguous (batch..., len, dim), halves as they are */
    converted_weight W_q, W_k, W_v, W_o, W_g; /* W_g is all zeros where there is none */
    PyArrayObject *b_q, *b_k, *b_v, *b_o, *b_g, *head_gate; /* or NULL */
    mha_dtype dtype;
    int result_typenum;        /* of the output: halves too */
    int typenums[NUM_VECTORS]; /* of the biases and head_gate, as they were given */
    int64_t num_heads, num_kv_heads;
    score_shape scores;
    converted_options options;
    attention_results results;
    bool key_is_query, value_is_key;
    converted_preparation preparation;
    converted_cache cache;
    bool bias_has_batch_of_one; /* as it came: one axis more than the scores have */
    /* For the backward pass, or NULL: (batch..., len, heads * d), before and after the gates. */
    PyArrayObject *projected_query, *projected_key, *projected_value, *attended, *merged;
    PyArrayObject *unprepared_query, *unprepared_key; /* before their norms */
    PyArrayObject *gate;                              /* the logits of the output gate */
    mha_multi_head_attention layer;                   /* the problem */
} layer_call;

/* A new array (batch..., length, width), uninitialised, or NULL with the exception; and the same of
 * a step, in the type that computes, into *step. 0, or -1 with the exception. */
PyArrayObject *mha_new_rows(const layer_call *call, int64_t length, int64_t width, int typenum,
                            const char *name);
int mha_new_step(const layer_call *call, PyArrayObject **step, int64_t length, int64_t width,
                 const char *name);

/* What the backward pass needs of the forward pass. 0, or -1 with the exception. */
int mha_new_saved_steps(layer_call *call);

/* Takes the pointers. */
bool mha_fill_layer(void *call);

#endif
