/* What the figure's way there and its backward pass have in common. */
#ifndef MHA_CORE_MULTI_HEAD_ATTENTION_H
#define MHA_CORE_MULTI_HEAD_ATTENTION_H

#include "core/heads/head_gate.h"
#include "mha/attention.h"

/* Step 2: rows (batch..., length, num_heads * d), row_bytes apart, seen by head: (batch...,
 * num_heads, length, d). Absent where `rows` is NULL. Fills the axes that there are, and no more.
 */
void mha_see_heads(const mha_multi_head_attention *layer, void *rows, int64_t length, int64_t width,
                   int64_t num_heads, int64_t row_bytes, mha_tensor *heads);

/* Step 4: the gates over the layer's tokens, of heads and of the output. */
mha_head_gate mha_head_gate_of_layer(const mha_multi_head_attention *layer, int64_t batch);
mha_output_gate mha_output_gate_of_layer(const mha_multi_head_attention *layer, int64_t batch,
                                         const void *merged, const void *logits, void *gated);

static inline bool mha_has_output_gate(const mha_multi_head_attention *layer) {
    return layer->W_g.out > 0;
}

#endif
