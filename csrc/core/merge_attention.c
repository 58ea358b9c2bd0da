/* Joining attention over parts of the keys, by their log-sum-exps (Flash-Decoding, 2023). */
#include "../kernels/kernels.h"
#include "mha/attention.h"

void mha_merge_attention_forward(const mha_merge_attention *merge) {
    const mha_merge_block block = {
        .parts = merge->parts,
        .rows = merge->rows,
        .width = merge->width,
        .outputs = merge->outputs,
        .lses = merge->lses,
        .output = merge->output,
        .lse = merge->lse,
        .shares = merge->shares,
    };
    mha_kernels_for(merge->dtype)->merge(&block);
}
