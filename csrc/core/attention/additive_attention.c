/* Attention with the scores w_v . tanh(query W_q + key W_k) (Bahdanau et al. 2015, A.1.2): two
 * projections to the hidden width, then the attention step with those scores. */
#include "mha/attention.h"

#include "core/base/run.h"

/* Points a (batch..., heads, len, any) tensor at its projected rows (batch..., heads, len, hidden).
 */
static void set_hidden(mha_dtype dtype, int64_t hidden, void *projected, mha_tensor *tensor) {
    tensor->data = projected;
    tensor->storage = MHA_AS_COMPUTED;
    tensor->shape[tensor->axes - 1] = hidden;
    mha_set_contiguous_strides(tensor, dtype);
}

static mha_attention attention_of(const mha_additive_attention *additive, void *projected_query,
                                  void *projected_key) {
    mha_attention attention = additive->attention;
    set_hidden(attention.dtype, additive->W_q.out, projected_query, &attention.query);
    set_hidden(attention.dtype, additive->W_k.out, projected_key, &attention.key);
    attention.score_function = MHA_ADDITIVE;
    attention.w_v = additive->w_v;
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
    projections[0] =
        mha_with_stored_rows(mha_contiguous_projection(dtype, additive->query, additive->query_rows,
                                                       &additive->W_q, NULL, projected_query),
                             additive->query_storage);
    projections[1] =
        mha_with_stored_rows(mha_contiguous_projection(dtype, additive->key, additive->key_rows,
                                                       &additive->W_k, NULL, projected_key),
                             additive->key_storage);
}

/* Room for projected rows: what is saved, or a piece of the workspace. */
static mha_status take_projected(const mha_additive_attention *additive, int64_t rows, void *saved,
                                 mha_execution *execution, void **projected) {
    size_t size;
    *projected = saved;
    if (saved != NULL) {
        return MHA_OK;
    }
    MHA_TRY(projected_size(additive, rows, &size));
    return mha_workspace_take(&execution->workspace, size, projected);
}

static mha_status run_steps(const mha_additive_attention *additive, mha_execution *execution) {
    void *projected_query, *projected_key;
    MHA_TRY(take_projected(additive, additive->query_rows, additive->saved_query, execution,
                           &projected_query));
    MHA_TRY(take_projected(additive, additive->key_rows, additive->saved_key, execution,
                           &projected_key));

    /* 1. Project to the hidden width: (..., heads, len, hidden). */
    mha_linear_projection projections[2];
    hidden_projections(additive, projected_query, projected_key, projections);
    MHA_TRY(mha_linear_projection_forward(projections, 2, execution));

    /* 2. Attend by scores w_v . tanh(projected query + projected key). */
    const mha_attention attention = attention_of(additive, projected_query, projected_key);
    return mha_scaled_dot_product_attention_forward(&attention, execution);
}

MHA_DEFINE_FORWARD(additive_attention, mha_additive_attention, run_steps)

/* Backwards: what the attention step gives, in the workspace. */
typedef struct additive_way_back {
    const mha_additive_attention_gradients *gradients;
    mha_attention attention; /* of the saved rows */
    bool wants_query, wants_key;
    void *grad_query, *grad_key; /* (..., heads, len, hidden) */
    void *w_v_by_query;          /* the same as grad_query: what each query adds to grad w_v */
    size_t query_size, key_size; /* their bytes */
} additive_way_back;

static mha_status plan_way_back(const mha_additive_attention_gradients *g, additive_way_back *w) {
    const mha_additive_attention *additive = g->additive;
    *w = (additive_way_back){
        .gradients = g,
        .attention = attention_of(additive, additive->saved_query, additive->saved_key),
        .wants_query = g->grad_query != NULL || g->grad_W_q != NULL,
        .wants_key = g->grad_key != NULL || g->grad_W_k != NULL,
    };
    MHA_TRY(projected_size(additive, additive->query_rows, &w->query_size));
    return projected_size(additive, additive->key_rows, &w->key_size);
}

/* A gradient of projected rows, shaped as these; absent where it has no address. */
static mha_tensor grad_of_rows(const mha_tensor *rows, void *gradient) {
    mha_tensor tensor = {.data = NULL};
    if (gradient != NULL) {
        tensor = *rows;
        tensor.data = gradient;
    }
    return tensor;
}

static mha_attention_gradients attention_gradients(const additive_way_back *w) {
    return (mha_attention_gradients){
        .attention = &w->attention,
        .grad_output = w->gradients->grad_output,
        .grad_lse = w->gradients->grad_lse,
        .grad_query = grad_of_rows(&w->attention.query, w->grad_query),
        .grad_key = grad_of_rows(&w->attention.key, w->grad_key),
        .grad_value = w->gradients->grad_value,
        .grad_w_v = grad_of_rows(&w->attention.query, w->w_v_by_query),
    };
}

/* One of the two projections to the hidden width, backwards. */
static mha_linear_projection_gradients hidden_gradients(const mha_linear_projection *projection,
                                                        const void *grad_output, void *grad_x,
                                                        void *grad_weight, void *grad_bias) {
    return (mha_linear_projection_gradients){
        .projection = projection,
        .grad_output = grad_output,
        .grad_output_stride = projection->output_stride,
        .grad_x = grad_x,
        .grad_weight = grad_weight,
        .grad_bias = grad_bias,
        .skips_rows_without_gradient = true,
    };
}

/* Of query, key and w_v: the last is the sum of the rows that the queries gave. */
enum { OF_QUERY, OF_KEY, OF_W_V, NUM_PROJECTED };

static void projected_gradients(const additive_way_back *w, mha_linear_projection projections[2],
                                mha_linear_projection_gradients to[NUM_PROJECTED]) {
    const mha_additive_attention_gradients *g = w->gradients;
    hidden_projections(g->additive, g->additive->saved_query, g->additive->saved_key, projections);
    to[OF_QUERY] =
        hidden_gradients(&projections[0], w->grad_query, g->grad_query, g->grad_W_q, NULL);
    to[OF_KEY] = hidden_gradients(&projections[1], w->grad_key, g->grad_key, g->grad_W_k, NULL);
    to[OF_W_V] = hidden_gradients(&projections[0], w->w_v_by_query, NULL, NULL, g->grad_w_v);
}

static mha_status take_if(bool is_wanted, mha_workspace *workspace, size_t bytes, void **piece) {
    *piece = NULL;
    return is_wanted ? mha_workspace_take(workspace, bytes, piece) : MHA_OK;
}

static mha_status run_steps_backward(const mha_additive_attention_gradients *gradients,
                                     mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    additive_way_back w;
    mha_linear_projection projections[2];
    mha_linear_projection_gradients projected[NUM_PROJECTED];
    MHA_TRY(plan_way_back(gradients, &w));
    MHA_TRY(take_if(w.wants_query, workspace, w.query_size, &w.grad_query));
    MHA_TRY(take_if(w.wants_key, workspace, w.key_size, &w.grad_key));
    MHA_TRY(take_if(gradients->grad_w_v != NULL, workspace, w.query_size, &w.w_v_by_query));

    /* 2. Attention with the scores w_v . tanh(projected query + projected key). */
    const mha_attention_gradients attention = attention_gradients(&w);
    MHA_TRY(mha_scaled_dot_product_attention_backward(&attention, execution));

    /* 1. Projections to the hidden width, and the sum that grad w_v is. */
    projected_gradients(&w, projections, projected);
    for (int i = 0; i < NUM_PROJECTED; i++) {
        MHA_TRY(mha_linear_projection_backward(&projected[i], execution));
    }
    return MHA_OK;
}

MHA_DEFINE_BACKWARD(additive_attention, mha_additive_attention_gradients, run_steps_backward)
