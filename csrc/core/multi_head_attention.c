/* The whole figure, top-down:
 *
 *   query, key, value --linear projections--> split heads --scaled dot-product attention-->
 *   merge heads --output projection--> output
 *
 * The projected arrays live in the workspace. Splitting and merging heads are strides. */
#include "mha/attention.h"

#include "attention_rows.h"

/* The sizes that follow from the weights' shapes. */
typedef struct widths {
    int64_t query;  /* num_heads * head_dim */
    int64_t key;    /* num_kv_heads * head_dim */
    int64_t value;  /* num_kv_heads * value_head_dim */
    int64_t merged; /* num_heads * value_head_dim */
} widths;

static widths widths_of(const mha_multi_head_attention *layer) {
    const widths w = {layer->W_q.out, layer->W_k.out, layer->W_v.out, layer->W_o.in};
    return w;
}

typedef struct sizes {
    int64_t batch;                    /* sequences */
    size_t query, key, value, merged; /* bytes of the projected and the merged arrays */
} sizes;

/* Bytes of (batch, length, width) reals, checked. */
static mha_status matrix_size(mha_dtype dtype, int64_t batch, int64_t length, int64_t width,
                              size_t *bytes) {
    MHA_TRY(mha_multiply_sizes((size_t)batch, (size_t)length, bytes));
    if (*bytes > INT64_MAX) { /* rows are counted in int64_t */
        return MHA_SIZE_OVERFLOW;
    }
    MHA_TRY(mha_multiply_sizes(*bytes, (size_t)width, bytes));
    return mha_multiply_sizes(*bytes, mha_dtype_size(dtype), bytes);
}

static mha_status sizes_of(const mha_multi_head_attention *layer, sizes *s) {
    const mha_dtype dtype = layer->attention.dtype;
    const widths w = widths_of(layer);
    MHA_TRY(mha_count_elements(layer->batch_shape, layer->attention.batch_axes, &s->batch));
    MHA_TRY(matrix_size(dtype, s->batch, layer->query_len, w.query, &s->query));
    MHA_TRY(matrix_size(dtype, s->batch, layer->key_len, w.key, &s->key));
    MHA_TRY(matrix_size(dtype, s->batch, layer->key_len, w.value, &s->value));
    return matrix_size(dtype, s->batch, layer->query_len, w.merged, &s->merged);
}

/* A C-contiguous (batch..., length, width) split into heads: (batch..., heads, length, d). */
static void heads_of(const mha_multi_head_attention *layer, void *data, int64_t length,
                     int64_t width, int64_t num_heads, mha_tensor *heads) {
    const int batch_axes = layer->attention.batch_axes;
    mha_tensor sequence = {.data = data, .axes = batch_axes + 2};
    for (int axis = 0; axis < batch_axes; axis++) {
        sequence.shape[axis] = layer->batch_shape[axis];
    }
    sequence.shape[batch_axes] = length;
    sequence.shape[batch_axes + 1] = width;
    mha_set_contiguous_strides(&sequence, layer->attention.dtype);
    mha_split_heads(&sequence, num_heads, heads);
}

/* The attention step with its four tensors seen by head. */
static mha_attention attention_of(const mha_multi_head_attention *l, void *projected_query,
                                  void *projected_key, void *projected_value, void *merged) {
    const widths w = widths_of(l);
    mha_attention attention = l->attention;
    heads_of(l, projected_query, l->query_len, w.query, l->num_heads, &attention.query);
    heads_of(l, projected_key, l->key_len, w.key, l->num_kv_heads, &attention.key);
    heads_of(l, projected_value, l->key_len, w.value, l->num_kv_heads, &attention.value);
    heads_of(l, merged, l->query_len, w.merged, l->num_heads, &attention.output);
    return attention;
}

/* Step 1: query, key and value projected, side by side. */
static void input_projections(const mha_multi_head_attention *l, int64_t batch,
                              void *projected_query, void *projected_key, void *projected_value,
                              mha_linear_projection projections[3]) {
    const mha_dtype dtype = l->attention.dtype;
    const int64_t query_rows = batch * l->query_len, key_rows = batch * l->key_len;
    projections[0] =
        mha_contiguous_projection(dtype, l->query, query_rows, &l->W_q, l->b_q, projected_query);
    projections[1] =
        mha_contiguous_projection(dtype, l->key, key_rows, &l->W_k, l->b_k, projected_key);
    projections[2] =
        mha_contiguous_projection(dtype, l->value, key_rows, &l->W_v, l->b_v, projected_value);
}

/* Step 5. */
static mha_linear_projection output_projection(const mha_multi_head_attention *l, int64_t batch,
                                               const void *merged) {
    return mha_contiguous_projection(l->attention.dtype, merged, batch * l->query_len, &l->W_o,
                                     l->b_o, l->output);
}

mha_status mha_multi_head_attention_workspace(const mha_multi_head_attention *layer,
                                              int num_threads, size_t *bytes) {
    sizes s;
    size_t scratch, attention_scratch, output_scratch; /* of one step at a time: they share it */
    mha_linear_projection inputs[3];
    MHA_TRY(sizes_of(layer, &s));
    input_projections(layer, s.batch, NULL, NULL, NULL, inputs);
    const mha_linear_projection output = output_projection(layer, s.batch, NULL);
    const mha_attention attention = attention_of(layer, NULL, NULL, NULL, NULL);
    MHA_TRY(mha_linear_projection_workspace(inputs, 3, num_threads, &scratch));
    MHA_TRY(mha_linear_projection_workspace(&output, 1, num_threads, &output_scratch));
    MHA_TRY(
        mha_scaled_dot_product_attention_workspace(&attention, num_threads, &attention_scratch));
    scratch = attention_scratch > scratch ? attention_scratch : scratch;
    scratch = output_scratch > scratch ? output_scratch : scratch;

    *bytes = 0;
    MHA_TRY(mha_workspace_reserve(bytes, s.query, 1));
    MHA_TRY(mha_workspace_reserve(bytes, s.key, 1));
    MHA_TRY(mha_workspace_reserve(bytes, s.value, 1));
    MHA_TRY(mha_workspace_reserve(bytes, s.merged, 1));
    return mha_workspace_reserve(bytes, scratch, 1);
}

/* A kept array, or a piece of the workspace. */
static mha_status keep_or_take(void *kept, mha_workspace *workspace, size_t bytes, void **piece) {
    *piece = kept;
    return kept == NULL ? mha_workspace_take(workspace, bytes, piece) : MHA_OK;
}

/* merged (rows, heads * d) = attended * each head's gate. */
static void gate_heads(const mha_multi_head_attention *layer, int64_t rows, const void *attended,
                       void *merged) {
    const int64_t heads = layer->num_heads, width = layer->W_o.in / heads;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < heads; head++) {
            const double gate = mha_gate_of(&layer->attention, head);
            const int64_t first = (row * heads + head) * width;
            for (int64_t at = first; at < first + width; at++) {
                if (layer->attention.dtype == MHA_FLOAT32) {
                    ((float *)merged)[at] = ((const float *)attended)[at] * (float)gate;
                } else {
                    ((double *)merged)[at] = ((const double *)attended)[at] * gate;
                }
            }
        }
    }
}

static mha_status run_steps(const mha_multi_head_attention *layer, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    void *projected_query, *projected_key, *projected_value, *merged;
    sizes s;
    MHA_TRY(sizes_of(layer, &s));
    const mha_kept_steps *kept = &layer->kept;
    MHA_TRY(keep_or_take(kept->projected_query, workspace, s.query, &projected_query));
    MHA_TRY(keep_or_take(kept->projected_key, workspace, s.key, &projected_key));
    MHA_TRY(keep_or_take(kept->projected_value, workspace, s.value, &projected_value));
    MHA_TRY(keep_or_take(kept->merged, workspace, s.merged, &merged));
    const bool gates_apart = kept->attended != kept->merged;
    void *attended = gates_apart ? kept->attended : merged;

    /* 1. Linear projections: (batch, len, dim) -> (batch, len, heads * head_dim). */
    mha_linear_projection inputs[3];
    input_projections(layer, s.batch, projected_query, projected_key, projected_value, inputs);
    MHA_TRY(mha_linear_projection_forward(inputs, 3, execution));

    /* 2. Split heads: (batch, len, heads * head_dim) -> (batch, heads, len, head_dim), by strides.
     * 3. Scaled dot-product attention.
     * 4. Merge heads: each head's output goes straight to its columns of merged (batch, query_len,
     *    heads * value_head_dim). */
    mha_attention attention =
        attention_of(layer, projected_query, projected_key, projected_value, attended);
    if (gates_apart) {
        attention.options.head_gate = NULL;
    }
    MHA_TRY(mha_scaled_dot_product_attention_forward(&attention, execution));
    if (gates_apart) {
        gate_heads(layer, s.batch * layer->query_len, attended, merged);
    }

    /* 5. Output projection: (batch, query_len, output_dim). */
    const mha_linear_projection output = output_projection(layer, s.batch, merged);
    return mha_linear_projection_forward(&output, 1, execution);
}

mha_status mha_multi_head_attention_forward(const mha_multi_head_attention *layer,
                                            mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    const mha_status status = run_steps(layer, execution);
    execution->workspace.used = used_before;
    return status;
}
