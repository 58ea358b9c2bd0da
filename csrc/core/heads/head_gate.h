/* Inside step 4 of the figure: each head's columns times that head's gate. */
#ifndef MHA_HEAD_GATE_H
#define MHA_HEAD_GATE_H

#include "mha/execution.h"
#include "mha/tensor.h"

/* Contiguous rows (rows, num_heads * columns) by gates (num_heads,), or NULL: all are 1. */
typedef struct mha_head_gate {
    mha_dtype dtype;
    const void *gates;
    int64_t rows, num_heads, columns;
} mha_head_gate;

/* gated = attended * gate; the two may not overlap. */
mha_status mha_head_gate_forward(const mha_head_gate *gate, const void *attended, void *gated,
                                 mha_execution *execution) MHA_MUST_CHECK;

/* grad attended = grad gated * gate, and grad gates; what is NULL is not wanted. */
typedef struct mha_head_gate_gradients {
    const void *attended, *grad_gated;
    void *grad_attended, *grad_gates;
} mha_head_gate_gradients;

mha_status mha_head_gate_backward(const mha_head_gate *gate, const mha_head_gate_gradients *to,
                                  mha_execution *execution) MHA_MUST_CHECK;

/* One head's gate: 1 without gates. */
double mha_gate_of(mha_dtype dtype, const void *gates, int64_t head);

#endif
