/* The whole figure backwards, step by step as multi_head_attention.c goes forward:
 *
 *   output --output projection--> merge heads, gates --scaled dot-product attention--> split heads
 *   --linear projections--> query, key, value
 *
 * Gradients between the steps live in the workspace, C-contiguous (batch..., length, heads * d). */
#include <string.h>

#include "core/base/run.h"
#include "core/heads/prepare_heads.h"
#include "core/layer/multi_head_attention.h"
#include "kernels/kernels.h"

/* One of query, key and value, or the query at the output gate: its projection and what is wanted
 * of it. */
typedef struct input {
    const void *x;
    mha_storage storage; /* of x */
    const mha_weight *weight;
    void *projected; /* saved by the forward pass: (batch..., length, heads * d) */
    void *grad_x, *grad_weight, *grad_bias;
    int64_t length, num_heads;
    void *grad_projected; /* of the workspace, or NULL where nothing is wanted */
    /* Where the projection was prepared for attention: what that read, and its gradient. */
    mha_prepare_heads prepare;
    void *grad_norm;     /* of the norm's weight */
    void *grad_prepared; /* of the workspace; else the same as grad_projected */
} input;

/* Inputs that were one and the same: the gradient of that is the sum of theirs, in this order. */
typedef struct same_inputs {
    input *members[4];
    int count; /* 0 where there is nothing to sum up */
    void *grad_x;
} same_inputs;

typedef struct backward_call {
    const mha_multi_head_attention_gradients *gradients;
    const mha_multi_head_attention *layer;
    int64_t batch;
    input query, key, value, gate;
    same_inputs same[2]; /* as query, as key */
    mha_layer_tables tables;
    bool needs_attention; /* a gradient of something before step 5 is wanted */
    /* Of the workspace. The gradients are the same without gates; ungated, what the output gate
     * multiplies, is what attention wrote without head_gate. */
    void *grad_merged, *grad_ungated, *grad_attended, *ungated;
} backward_call;

static mha_status size_of(const backward_call *w, int64_t length, int64_t width, size_t *bytes) {
    MHA_TRY(mha_multiply_sizes((size_t)w->batch, (size_t)length, bytes));
    MHA_TRY(mha_multiply_sizes(*bytes, (size_t)width, bytes));
    return mha_multiply_sizes(*bytes, mha_dtype_size(w->layer->dtype), bytes);
}

static bool is_wanted(const input *in) {
    return in->grad_x != NULL || in->grad_weight != NULL || in->grad_bias != NULL ||
           in->grad_norm != NULL;
}

static void add_member(same_inputs *same, input *in) { same->members[same->count++] = in; }

/* Which inputs were one: query with value, key and the gate's, as far as they were; else value and
 * key. */
static void find_same(const mha_multi_head_attention_gradients *g, backward_call *w) {
    same_inputs *as_query = &w->same[0], *as_key = &w->same[1];
    as_query->grad_x = g->grad_query;
    as_key->grad_x = g->grad_key;
    add_member(as_query, &w->query);
    if (!g->key_is_query) {
        add_member(as_key, &w->key);
    }
    if (g->value_is_key) {
        add_member(g->key_is_query ? as_query : as_key, &w->value);
    }
    if (g->key_is_query) {
        add_member(as_query, &w->key);
    }
    if (mha_has_output_gate(g->layer)) {
        add_member(as_query, &w->gate);
    }
    for (int i = 0; i < 2; i++) {
        if (w->same[i].count < 2 || w->same[i].grad_x == NULL) {
            w->same[i].count = 0;
        }
    }
}

/* Each of them gets a piece of the workspace for its own gradient: tasks that add into what they
 * read could not run twice, as they may in the child of a signal handler that forks. */
static mha_status take_same(const backward_call *w, const same_inputs *same,
                            mha_workspace *workspace) {
    for (int i = 0; i < same->count; i++) {
        input *in = same->members[i];
        size_t bytes;
        MHA_TRY(size_of(w, in->length, in->weight->in, &bytes));
        MHA_TRY(mha_workspace_take(workspace, bytes, &in->grad_x));
    }
    return MHA_OK;
}

/* What the forward pass did to the projection, with tables that rotate back. */
static void plan_preparation(const backward_call *w, const mha_head_norm *norm,
                             const mha_rotary_table *table, void *unprepared, input *in) {
    const int64_t head_dim = in->weight->out / in->num_heads;
    const int64_t item = (int64_t)mha_dtype_size(w->layer->dtype);
    in->prepare = (mha_prepare_heads){
        .dtype = w->layer->dtype,
        .batch = w->batch,
        .length = in->length,
        .num_heads = in->num_heads,
        .head_dim = head_dim,
        .norm = *norm,
        .table = w->layer->rotary == NULL ? NULL : table,
        .from = {unprepared, in->weight->out * item, head_dim * item},
    };
}

static mha_status plan(const mha_multi_head_attention_gradients *g, backward_call *w) {
    const mha_multi_head_attention *l = g->layer;
    *w = (backward_call){
        .gradients = g,
        .layer = l,
        .query = {.x = l->query,
                  .storage = l->query_storage,
                  .weight = &l->W_q,
                  .projected = l->saved.projected_query,
                  .grad_x = g->grad_query,
                  .grad_weight = g->grad_W_q,
                  .grad_bias = g->grad_b_q,
                  .grad_norm = g->grad_q_norm,
                  .length = l->query_len,
                  .num_heads = l->num_heads},
        .key = {.x = l->key,
                .storage = l->key_storage,
                .weight = &l->W_k,
                .projected = l->saved.projected_key,
                .grad_x = g->grad_key,
                .grad_weight = g->grad_W_k,
                .grad_bias = g->grad_b_k,
                .grad_norm = g->grad_k_norm,
                .length = l->key_len,
                .num_heads = l->num_kv_heads},
        .value = {.x = l->value,
                  .storage = l->value_storage,
                  .weight = &l->W_v,
                  .projected = l->saved.projected_value,
                  .grad_x = g->grad_value,
                  .grad_weight = g->grad_W_v,
                  .grad_bias = g->grad_b_v,
                  .length = l->key_len,
                  .num_heads = l->num_kv_heads},
        .gate = {.x = l->query,
                 .storage = l->query_storage,
                 .weight = &l->W_g,
                 .grad_weight = g->grad_W_g,
                 .grad_bias = g->grad_b_g,
                 .length = l->query_len,
                 .num_heads = l->num_heads},
    };
    MHA_TRY(mha_count_elements(l->batch_shape, l->batch_axes, &w->batch));
    plan_preparation(w, &l->q_norm, &w->tables.query, l->saved.unprepared_query, &w->query);
    plan_preparation(w, &l->k_norm, &w->tables.key, l->saved.unprepared_key, &w->key);
    find_same(g, w);
    w->needs_attention = w->same[0].count > 0 || w->same[1].count > 0 || is_wanted(&w->query) ||
                         is_wanted(&w->key) || is_wanted(&w->value) || is_wanted(&w->gate) ||
                         g->grad_head_gate != NULL || g->grad_bias.data != NULL ||
                         g->grad_alibi.data != NULL || g->grad_relative_bias.data != NULL ||
                         g->grad_sinks.data != NULL;
    return MHA_OK;
}

/* Step 5 backwards. */
static mha_status project_output_back(const backward_call *w, mha_execution *execution) {
    const mha_multi_head_attention *l = w->layer;
    const mha_linear_projection projection = mha_contiguous_projection(
        l->dtype, l->saved.merged, w->batch * l->query_len, &l->W_o, NULL, NULL);
    const mha_linear_projection_gradients gradients = {
        .projection = &projection,
        .grad_output = w->gradients->grad_output,
        .grad_output_stride = projection.output_stride,
        .grad_x = w->grad_merged,
        .grad_weight = w->gradients->grad_W_o,
        .grad_bias = w->gradients->grad_b_o,
    };
    return mha_linear_projection_backward(&gradients, execution);
}

/* Step 1 backwards. */
static mha_status project_back(const backward_call *w, const input *in, mha_execution *execution) {
    if (!is_wanted(in)) {
        return MHA_OK;
    }
    const mha_linear_projection projection = mha_with_stored_rows(
        mha_contiguous_projection(w->layer->dtype, in->x, w->batch * in->length, in->weight, NULL,
                                  NULL),
        in->storage);
    const mha_linear_projection_gradients gradients = {
        .projection = &projection,
        .grad_output = in->grad_projected,
        .grad_output_stride = projection.output_stride,
        .grad_x = in->grad_x,
        .grad_weight = in->grad_weight,
        .grad_bias = in->grad_bias,
        .skips_rows_without_gradient = true,
    };
    return mha_linear_projection_backward(&gradients, execution);
}

/* Step 2: contiguous rows of all heads, seen by head; or absent. */
static void see_heads(const backward_call *w, void *rows, int64_t length, int64_t width,
                      int64_t num_heads, mha_tensor *heads) {
    const int64_t row_bytes = width * (int64_t)mha_dtype_size(w->layer->dtype);
    mha_see_heads(w->layer, rows, length, width, num_heads, row_bytes, heads);
}

static void see_input_heads(const backward_call *w, const input *in, void *rows,
                            mha_tensor *heads) {
    see_heads(w, rows, in->length, in->weight->out, in->num_heads, heads);
}

/* Step 3 backwards, on the steps that the forward pass saved. */
static void fill_attention(const backward_call *w, mha_attention *attention) {
    const mha_multi_head_attention *l = w->layer;
    *attention = (mha_attention){
        .dtype = l->dtype,
        .batch_axes = l->batch_axes,
        .maximum = l->maximum,
        .denominator = l->denominator,
        .options = l->options,
    };
    see_input_heads(w, &w->query, w->query.projected, &attention->query);
    see_input_heads(w, &w->key, w->key.projected, &attention->key);
    see_input_heads(w, &w->value, w->value.projected, &attention->value);
    see_heads(w, l->saved.attended, l->query_len, l->W_o.in, l->num_heads, &attention->output);
}

static void fill_attention_gradients(const backward_call *w, const mha_attention *attention,
                                     mha_attention_gradients *gradients) {
    const mha_multi_head_attention *l = w->layer;
    *gradients = (mha_attention_gradients){
        .attention = attention,
        .grad_lse = w->gradients->grad_lse,
        .grad_bias = w->gradients->grad_bias,
        .grad_alibi = w->gradients->grad_alibi,
        .grad_relative_bias = w->gradients->grad_relative_bias,
        .grad_sinks = w->gradients->grad_sinks,
    };
    see_heads(w, w->grad_attended, l->query_len, l->W_o.in, l->num_heads, &gradients->grad_output);
    see_input_heads(w, &w->query, w->query.grad_prepared, &gradients->grad_query);
    see_input_heads(w, &w->key, w->key.grad_prepared, &gradients->grad_key);
    see_input_heads(w, &w->value, w->value.grad_prepared, &gradients->grad_value);
}

/* Step 4 backwards: the output gate, where there is one. */
static mha_status output_gate_back(const backward_call *w, mha_execution *execution) {
    const mha_multi_head_attention *l = w->layer;
    if (!mha_has_output_gate(l)) {
        return MHA_OK;
    }
    const mha_head_gate heads = mha_head_gate_of_layer(l, w->batch);
    const mha_output_gate_gradients to = {
        .forward = mha_output_gate_of_layer(l, w->batch, w->ungated, l->saved.gate, NULL),
        .grad_gated = w->grad_merged,
        .grad_merged = w->grad_ungated,
        .grad_logits = w->gate.grad_projected,
    };
    if (l->head_gate != NULL) {
        MHA_TRY(mha_head_gate_forward(&heads, l->saved.attended, w->ungated, execution));
    }
    return mha_output_gate_backward(&to, execution);
}

/* Before that: the gates of heads, where there are any. */
static mha_status head_gate_back(const backward_call *w, mha_execution *execution) {
    const mha_multi_head_attention *l = w->layer;
    const mha_head_gate gate = mha_head_gate_of_layer(l, w->batch);
    const mha_head_gate_gradients to = {
        .attended = l->saved.attended,
        .grad_gated = w->grad_ungated,
        .grad_attended = l->head_gate == NULL ? NULL : w->grad_attended,
        .grad_gates = w->gradients->grad_head_gate,
    };
    return mha_head_gate_backward(&gate, &to, execution);
}

/* grad x = the members' gradients, added up. */
typedef struct sum_job {
    mha_dtype dtype;
    mha_row_tasks rows;
    int64_t width;
    int count;
    const void *from[4];
    void *to;
} sum_job;

static void add_rows(void *context, int64_t task, mha_worker *worker) {
    const sum_job *job = context;
    const mha_elementwise_kernels *kernels = mha_kernels_for(job->dtype)->elementwise;
    const int64_t row_bytes = job->width * (int64_t)mha_dtype_size(job->dtype);
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (job->width + 1))) {
            return;
        }
        char *to = (char *)job->to + row * row_bytes;
        memcpy(to, (const char *)job->from[0] + row * row_bytes, (size_t)row_bytes);
        for (int i = 1; i < job->count; i++) {
            kernels->add(to, (const char *)job->from[i] + row * row_bytes, job->width);
        }
    }
}

static mha_status add_same(const backward_call *w, const same_inputs *same,
                           mha_execution *execution) {
    if (same->count == 0) {
        return MHA_OK;
    }
    const input *first = same->members[0];
    const int64_t width = first->weight->in;
    sum_job job = {
        .dtype = w->layer->dtype,
        .rows = mha_divide_rows(w->batch * first->length, width, 1, execution->num_threads),
        .width = width,
        .count = same->count,
        .to = same->grad_x,
    };
    for (int i = 0; i < same->count; i++) {
        job.from[i] = same->members[i]->grad_x;
    }
    return mha_run_row_tasks(execution, &job.rows, add_rows, &job);
}

/* Between steps 3 and 2 backwards: the rotation, then the norm. */
static mha_status prepare_back(const backward_call *w, const input *in, mha_execution *execution) {
    const int64_t item = (int64_t)mha_dtype_size(w->layer->dtype);
    const int64_t row_bytes = in->weight->out * item, head_bytes = in->prepare.head_dim * item;
    if (!mha_prepares(&in->prepare) || !is_wanted(in)) {
        return MHA_OK;
    }
    const mha_prepare_heads_gradients gradients = {
        .prepare = &in->prepare,
        .grad_to = {in->grad_prepared, row_bytes, head_bytes},
        .grad_from = {in->grad_projected, row_bytes, head_bytes},
        .grad_weight = in->grad_norm,
    };
    return mha_prepare_heads_backward(&gradients, execution);
}

/* Where gradients between the steps will lie. */
static mha_status take_gradients(backward_call *w, mha_workspace *workspace) {
    const mha_multi_head_attention *l = w->layer;
    input *const inputs[] = {&w->query, &w->key, &w->value, &w->gate};
    size_t bytes;
    if (!w->needs_attention) {
        return MHA_OK;
    }
    MHA_TRY(size_of(w, l->query_len, l->W_o.in, &bytes));
    MHA_TRY(mha_workspace_take(workspace, bytes, &w->grad_merged));
    w->grad_ungated = w->grad_merged;
    w->ungated = l->saved.attended;
    if (mha_has_output_gate(l)) {
        MHA_TRY(mha_workspace_take(workspace, bytes, &w->grad_ungated));
    }
    w->grad_attended = w->grad_ungated;
    if (l->head_gate != NULL) {
        MHA_TRY(mha_workspace_take(workspace, bytes, &w->grad_attended));
    }
    if (l->head_gate != NULL && mha_has_output_gate(l)) {
        MHA_TRY(mha_workspace_take(workspace, bytes, &w->ungated));
    }
    MHA_TRY(take_same(w, &w->same[0], workspace));
    MHA_TRY(take_same(w, &w->same[1], workspace));
    for (int i = 0; i < 4; i++) {
        if (is_wanted(inputs[i])) {
            MHA_TRY(size_of(w, inputs[i]->length, inputs[i]->weight->out, &bytes));
            MHA_TRY(mha_workspace_take(workspace, bytes, &inputs[i]->grad_projected));
            inputs[i]->grad_prepared = inputs[i]->grad_projected;
            if (mha_prepares(&inputs[i]->prepare)) {
                MHA_TRY(mha_workspace_take(workspace, bytes, &inputs[i]->grad_prepared));
            }
        }
    }
    return MHA_OK;
}

static mha_status run_steps(const mha_multi_head_attention_gradients *g, mha_execution *execution) {
    backward_call w;
    MHA_TRY(plan(g, &w));
    MHA_TRY(take_gradients(&w, &execution->workspace));
    if (g->layer->rotary != NULL && w.needs_attention) {
        MHA_TRY(mha_make_layer_tables(g->layer, true, execution, &w.tables));
    }

    /* 5. Output projection: grad output (batch, query_len, output_dim) -> grad merged (batch,
     *    query_len, heads * value_head_dim), grad W_o, grad b_o. */
    MHA_TRY(project_output_back(&w, execution));
    if (!w.needs_attention) {
        return MHA_OK;
    }

    /* 4. Merge heads: grad merged -> (batch, heads, query_len, value_head_dim), by strides. Gates:
     *    grad logits of the output gate, grad head_gate, and grad attended. */
    MHA_TRY(output_gate_back(&w, execution));
    MHA_TRY(head_gate_back(&w, execution));

    /* 3. Scaled dot-product attention.
     * 2. Split heads: gradients of heads go straight to their columns of the projections'. */
    mha_attention attention;
    mha_attention_gradients of_attention;
    fill_attention(&w, &attention);
    fill_attention_gradients(&w, &attention, &of_attention);
    MHA_TRY(mha_scaled_dot_product_attention_backward(&of_attention, execution));
    MHA_TRY(prepare_back(&w, &w.query, execution));
    MHA_TRY(prepare_back(&w, &w.key, execution));

    /* 1. Linear projections: (batch, len, heads * head_dim) -> (batch, len, dim). */
    MHA_TRY(project_back(&w, &w.query, execution));
    MHA_TRY(project_back(&w, &w.key, execution));
    MHA_TRY(project_back(&w, &w.value, execution));
    MHA_TRY(project_back(&w, &w.gate, execution));
    MHA_TRY(add_same(&w, &w.same[0], execution));
    return add_same(&w, &w.same[1], execution);
}

MHA_DEFINE_BACKWARD(multi_head_attention, mha_multi_head_attention_gradients, run_steps)
