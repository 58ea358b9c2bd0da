/* A call of scaled_dot_product_attention, as its backward pass finds it again. */
#ifndef MHA_PY_SCALED_DOT_PRODUCT_ATTENTION_H
#define MHA_PY_SCALED_DOT_PRODUCT_ATTENTION_H

#include "python/call/gradient.h"
#include "python/call/inputs.h"

typedef struct attention_call {
    attention_inputs inputs;
    converted_options options;
    attention_results results;
    PyArrayObject *head_gate; /* or NULL: of a layer's cache, and never in the backward pass */
    PyArrayObject *exact_lse; /* or NULL: instead of lse */
    bool sees_part;           /* the results that it keeps are of more keys */
    mha_attention attention;  /* the problem */
} attention_call;

/* Takes the pointers. */
bool mha_fill_attention_call(void *call);

#endif
