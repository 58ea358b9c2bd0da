/* Attention with the scores w_v . tanh(query W_q + key W_k) (Bahdanau et al. 2015, A.1.2): two
 * projections to the hidden width, then the attention step with those scores. */
#include "mha/attention.h"

/* Points a (batch..., heads, len, any) tensor at its projected rows (batch..., heads, len, hidden).
 */
static void set_hidden(mha_dtype dtype, int64_t hidden, void *projected, mha_tensor *tensor) {
    tensor->data = projected;
    tensor->shape[tensor->axes - 1] = hidden;
    mha_set_contiguous_strides(tensor, dtype);
}

static mha_attention attention_of(const mha_additive_attention *additive, void *projected_query,
                                  void *projected_key) {
    mha_attention attention = additive->attention;
    set_hidden(attention.dtype, additive->W_q.out, projected_query, &attention.query);
    set_hidden(attention.dtype, additive->W_k.out, projected_key, &attention.key);
    attention.additive_w = additive->w_v;
    return attention;
}

static mha_status projected_size(const mha_additive_attention *additive, int64_t rows,
                                 size_t *bytes) {
    MHA_TRY(mha_multiply_sizes((size_t)rows, (size_t)additive->W_q.out, bytes));
    return mha_multiply_sizes(*bytes, mha_dtype_size(additive->attention.dtype), bytes);
}

static void hidden_projections(const mha_additive_attention *additive, void *projected_query,
                               void *projected_key, mha_linear_projection projections[2]) {
    const mha_dtype dtype = additive->attention.dtype;
    projections[0] = mha_contiguous_projection(dtype, additive->query, additive->query_rows,
                                               &additive->W_q, NULL, projected_query);
    projections[1] = mha_contiguous_projection(dtype, additive->key, additive->key_rows,
                                               &additive->W_k, NULL, projected_key);
}

mha_status mha_additive_attention_workspace(const mha_additive_attention *additive, int num_threads,
                                            size_t *bytes) {
    const mha_attention attention = attention_of(additive, NULL, NULL);
    mha_linear_projection projections[2];
    size_t size, scratch, projection_scratch;
    hidden_projections(additive, NULL, NULL, projections);
    MHA_TRY(mha_linear_projection_workspace(projections, 2, num_threads, &projection_scratch));
    MHA_TRY(mha_scaled_dot_product_attention_workspace(&attention, num_threads, &scratch));
    scratch = projection_scratch > scratch ? projection_scratch : scratch;
    *bytes = 0;
    MHA_TRY(projected_size(additive, additive->query_rows, &size));
    MHA_TRY(mha_workspace_reserve(bytes, additive->kept_query == NULL ? size : 0, 1));
    MHA_TRY(projected_size(additive, additive->key_rows, &size));
    MHA_TRY(mha_workspace_reserve(bytes, additive->kept_key == NULL ? size : 0, 1));
    return mha_workspace_reserve(bytes, scratch, 1);
}

/* Room for projected rows: what is kept, or a piece of the workspace. */
static mha_status take_projected(const mha_additive_attention *additive, int64_t rows, void *kept,
                                 mha_execution *execution, void **projected) {
    size_t size;
    *projected = kept;
    if (kept != NULL) {
        return MHA_OK;
    }
    MHA_TRY(projected_size(additive, rows, &size));
    return mha_workspace_take(&execution->workspace, size, projected);
}

static mha_status run_steps(const mha_additive_attention *additive, mha_execution *execution) {
    void *projected_query, *projected_key;
    MHA_TRY(take_projected(additive, additive->query_rows, additive->kept_query, execution,
                           &projected_query));
    MHA_TRY(take_projected(additive, additive->key_rows, additive->kept_key, execution,
                           &projected_key));

    /* 1. Project to the hidden width: (..., heads, len, hidden). */
    mha_linear_projection projections[2];
    hidden_projections(additive, projected_query, projected_key, projections);
    MHA_TRY(mha_linear_projection_forward(projections, 2, execution));

    /* 2. Attend by scores w_v . tanh(projected query + projected key). */
    const mha_attention attention = attention_of(additive, projected_query, projected_key);
    return mha_scaled_dot_product_attention_forward(&attention, execution);
}

mha_status mha_additive_attention_forward(const mha_additive_attention *additive,
                                          mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    const mha_status status = run_steps(additive, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}
