/* A call of scaled_dot_product_attention_varlen, as its backward pass finds it again. */
#ifndef MHA_PY_SCALED_DOT_PRODUCT_ATTENTION_VARLEN_H
#define MHA_PY_SCALED_DOT_PRODUCT_ATTENTION_VARLEN_H

#include "python/call/gradient.h"
#include "python/call/inputs.h"

/* The batch axes of the scores are (sequences,), their lengths those of all sequences. */
typedef struct varlen_call {
    attention_inputs inputs;
    converted_options options;
    attention_results results;
    PyArrayObject *query_starts, *key_starts; /* int64 (sequences + 1,), the call's own */
    PyArrayObject *query_offset;              /* int64 (sequences,), likewise */
    PyArrayObject *head_gate;                 /* or NULL, and never in the backward pass */
    PyArrayObject *page_tables; /* likewise: int64 (sequences, most), the call's own */
    PyArrayObject *dropped;     /* likewise: int64 (sequences,) */
    mha_varlen_attention problem;
} varlen_call;

/* Takes the pointers. */
bool mha_fill_varlen_call(void *call);

/* (rows, heads, columns) as the core sees it: (heads, rows, columns). Absent where it is NULL. */
mha_tensor mha_tensor_by_head(PyArrayObject *array);

#endif
