/* The whole figure, top-down:
 *
 *   query, key, value --linear projections--> split heads --scaled dot-product attention-->
 *   merge heads --output projection--> output
 *
 * The projected arrays live in the workspace. Splitting and merging heads are strides. */
#include "core/layer/multi_head_attention.h"

#include "core/base/run.h"
#include "core/heads/prepare_heads.h"
#include "core/layer/by_sequences.h"
#include "core/projection/matmul.h"

/* What the steps hand on: (batch..., length, num_heads * d), its rows row_bytes apart, its heads
 * head_bytes. */
typedef struct matrix {
    int64_t length, width, num_heads, row_bytes, head_bytes;
    void *data;
    size_t bytes; /* of the workspace; 0 where the caller keeps the matrix */
} matrix;

/* Queries or keys on their way from the projection to attention, where something is done to them
 * there. */
typedef struct preparation {
    mha_prepare_heads heads;
    bool with_projection; /* by the task that projects; else a pass of its own from `before` */
    matrix before;
} preparation;

typedef struct matrices {
    int64_t batch; /* sequences */
    matrix query, key, value, merged;
    matrix gate, ungated; /* of the output gate: its logits, and what it multiplies */
    preparation of_query, of_key;
    mha_layer_tables tables;
} matrices;

/* Rows of all heads side by side, as the figure has them and a caller keeps them. */
static mha_status plan_matrix(const mha_multi_head_attention *layer, int64_t batch, int64_t length,
                              int64_t width, int64_t num_heads, void *saved, matrix *m) {
    const size_t item = mha_dtype_size(layer->dtype);
    size_t rows, row_bytes;
    *m = (matrix){.length = length, .width = width, .num_heads = num_heads, .data = saved};
    MHA_TRY(mha_multiply_sizes((size_t)batch, (size_t)length, &rows));
    MHA_TRY(mha_multiply_sizes((size_t)width, item, &row_bytes));
    MHA_TRY(mha_multiply_sizes(rows, row_bytes, &m->bytes));
    /* Strides are int64_t. */
    if (rows > INT64_MAX || row_bytes > INT64_MAX || m->bytes > INT64_MAX) {
        return MHA_SIZE_OVERFLOW;
    }
    m->row_bytes = (int64_t)row_bytes;
    m->head_bytes = width / num_heads * (int64_t)item;
    m->bytes = saved == NULL ? m->bytes : 0;
    return MHA_OK;
}

/* The same, but in the workspace each head's rows on their own, (num_heads, batch..., length, d),
 * where the projection can write them so: rows of all heads are pages apart, and attention, which
 * reads those of one head again and again, took 1.1 to 1.2 times as long (docs/journal.md). */
static mha_status plan_projected(const mha_multi_head_attention *layer, int64_t batch,
                                 int64_t length, int64_t width, int64_t num_heads, void *saved,
                                 matrix *m) {
    const int64_t head_columns = width / num_heads;
    MHA_TRY(plan_matrix(layer, batch, length, width, num_heads, saved, m));
    if (saved == NULL && head_columns % mha_panels_of(layer->dtype)->columns == 0) {
        m->row_bytes = m->head_bytes;
        m->head_bytes = batch * length * m->row_bytes;
    }
    return MHA_OK;
}

static mha_status plan_matrices(const mha_multi_head_attention *l, matrices *m) {
    const mha_saved_steps *saved = &l->saved;
    MHA_TRY(mha_count_elements(l->batch_shape, l->batch_axes, &m->batch));
    MHA_TRY(plan_projected(l, m->batch, l->query_len, l->W_q.out, l->num_heads,
                           saved->projected_query, &m->query));
    MHA_TRY(plan_projected(l, m->batch, l->key_len, l->W_k.out, l->num_kv_heads,
                           saved->projected_key, &m->key));
    MHA_TRY(plan_projected(l, m->batch, l->key_len, l->W_v.out, l->num_kv_heads,
                           saved->projected_value, &m->value));
    MHA_TRY(
        plan_matrix(l, m->batch, l->query_len, l->W_o.in, l->num_heads, saved->merged, &m->merged));
    if (!mha_has_output_gate(l)) {
        return MHA_OK;
    }
    MHA_TRY(
        plan_matrix(l, m->batch, l->query_len, l->W_g.out, l->num_heads, saved->gate, &m->gate));
    return plan_matrix(l, m->batch, l->query_len, l->W_o.in, l->num_heads,
                       l->head_gate == NULL ? saved->attended : NULL, &m->ungated);
}

void mha_see_heads(const mha_multi_head_attention *layer, void *rows, int64_t length, int64_t width,
                   int64_t num_heads, int64_t row_bytes, mha_tensor *heads) {
    const int batch_axes = layer->batch_axes;
    heads->data = rows;
    heads->axes = batch_axes + 2;
    if (rows == NULL) {
        return;
    }
    for (int axis = 0; axis < batch_axes; axis++) {
        heads->shape[axis] = layer->batch_shape[axis];
    }
    heads->shape[batch_axes] = length;
    heads->shape[batch_axes + 1] = width;
    mha_set_row_strides(heads, layer->dtype, row_bytes);
    mha_split_heads(heads, num_heads, heads);
}

/* Step 2. */
static void see_heads(const mha_multi_head_attention *l, const matrix *m, mha_tensor *heads) {
    mha_see_heads(l, m->data, m->length, m->width, m->num_heads, m->row_bytes, heads);
    heads->strides[l->batch_axes] = m->head_bytes;
}

/* Where heads are merged, before the output gate. */
static const matrix *merged_of(const mha_multi_head_attention *l, const matrices *m) {
    return mha_has_output_gate(l) ? &m->ungated : &m->merged;
}

/* Step 3, with its four tensors seen by head, and step 4, whose head_gate it applies. */
static void fill_attention(const mha_multi_head_attention *l, const matrices *m,
                           mha_attention *attention) {
    *attention = (mha_attention){
        .dtype = l->dtype,
        .batch_axes = l->batch_axes,
        .weights = l->weights,
        .lse = l->lse,
        .maximum = l->maximum,
        .denominator = l->denominator,
        .head_gate = l->head_gate,
        .options = l->options,
    };
    see_heads(l, &m->query, &attention->query);
    see_heads(l, merged_of(l, m), &attention->output);
    if (l->cache.key.axes > 0) {
        attention->key = l->cache.key;
        attention->value = l->cache.value;
    } else {
        see_heads(l, &m->key, &attention->key);
        see_heads(l, &m->value, &attention->value);
    }
}

mha_head_gate mha_head_gate_of_layer(const mha_multi_head_attention *layer, int64_t batch) {
    return (mha_head_gate){
        .dtype = layer->dtype,
        .gates = layer->head_gate,
        .rows = batch * layer->query_len,
        .num_heads = layer->num_heads,
        .columns = layer->W_o.in / layer->num_heads,
    };
}

mha_output_gate mha_output_gate_of_layer(const mha_multi_head_attention *layer, int64_t batch,
                                         const void *merged, const void *logits, void *gated) {
    return (mha_output_gate){
        .dtype = layer->dtype,
        .rows = batch * layer->query_len,
        .num_heads = layer->num_heads,
        .columns = layer->W_o.in / layer->num_heads,
        .by_head = layer->W_g.out != layer->W_o.in,
        .merged = merged,
        .logits = logits,
        .gated = gated,
    };
}

static mha_head_rows rows_of(const matrix *m) {
    return (mha_head_rows){m->data, m->row_bytes, m->head_bytes};
}

/* Where `before` lies, apart from its address, and who does the work. */
static mha_status plan_preparation(const mha_multi_head_attention *l, int64_t batch,
                                   const matrix *to, const mha_head_norm *norm,
                                   const mha_rotary_table *table, void *saved, preparation *p) {
    p->heads = (mha_prepare_heads){.dtype = l->dtype,
                                   .batch = batch,
                                   .length = to->length,
                                   .num_heads = to->num_heads,
                                   .head_dim = to->width / to->num_heads,
                                   .norm = *norm,
                                   .table = l->rotary == NULL ? NULL : table};
    const bool is_whole_panels =
        p->heads.head_dim > 0 && p->heads.head_dim % mha_panels_of(l->dtype)->columns == 0;
    if (!mha_prepares(&p->heads)) {
        return MHA_OK;
    }
    p->with_projection = saved == NULL && is_whole_panels && !mha_prepares_whole_rows(&p->heads);
    return plan_matrix(l, batch, to->length, to->width, to->num_heads, saved, &p->before);
}

/* A piece of the workspace, unless the caller keeps the matrix. */
static mha_status take_matrix(matrix *m, mha_workspace *workspace) {
    return m->data == NULL ? mha_workspace_take(workspace, m->bytes, &m->data) : MHA_OK;
}

/* Tables, and the pieces of the workspace. */
static mha_status begin_preparation(const mha_multi_head_attention *l, matrices *m,
                                    mha_execution *execution) {
    preparation *const both[] = {&m->of_query, &m->of_key};
    if (l->rotary == NULL && l->q_norm.weight == NULL && l->k_norm.weight == NULL) {
        return MHA_OK;
    }
    if (l->rotary != NULL) {
        MHA_TRY(mha_make_layer_tables(l, false, execution, &m->tables));
    }
    MHA_TRY(plan_preparation(l, m->batch, &m->query, &l->q_norm, &m->tables.query,
                             l->saved.unprepared_query, &m->of_query));
    MHA_TRY(plan_preparation(l, m->batch, &m->key, &l->k_norm, &m->tables.key,
                             l->saved.unprepared_key, &m->of_key));
    for (int i = 0; i < 2; i++) {
        if (mha_prepares(&both[i]->heads) && !both[i]->with_projection) {
            MHA_TRY(take_matrix(&both[i]->before, &execution->workspace));
        }
        both[i]->heads.to = rows_of(i == 0 ? &m->query : &m->key);
        both[i]->heads.from =
            both[i]->with_projection ? both[i]->heads.to : rows_of(&both[i]->before);
    }
    return MHA_OK;
}

/* The projection of queries or keys, as far as it prepares them or leaves that to a pass. */
static void prepare_projection(const preparation *p, mha_linear_projection *projection) {
    if (p->with_projection) {
        projection->prepare = &p->heads;
        projection->head_columns = p->heads.head_dim;
        projection->head_stride = p->heads.to.head_bytes;
    } else if (mha_prepares(&p->heads)) {
        projection->output = p->before.data;
        projection->output_stride = p->before.row_bytes;
        projection->head_columns = 0;
    }
}

static mha_status prepare(const preparation *p, mha_execution *execution) {
    return mha_prepares(&p->heads) && !p->with_projection
               ? mha_prepare_heads_forward(&p->heads, execution)
               : MHA_OK;
}

static mha_linear_projection input_projection(const mha_multi_head_attention *l, int64_t batch,
                                              const void *x, mha_storage storage,
                                              const mha_weight *weight, const void *bias,
                                              const matrix *to) {
    mha_linear_projection projection = mha_with_stored_rows(
        mha_contiguous_projection(l->dtype, x, batch * to->length, weight, bias, to->data),
        storage);
    projection.output_stride = to->row_bytes;
    if (to->head_bytes > to->row_bytes) { /* heads lie apart */
        projection.head_columns = to->width / to->num_heads;
        projection.head_stride = to->head_bytes;
    }
    return projection;
}

/* Step 1: query, key and value projected, side by side, and the output gate's logits. How many. */
static int input_projections(const mha_multi_head_attention *l, const matrices *m,
                             mha_linear_projection projections[4]) {
    projections[0] =
        input_projection(l, m->batch, l->query, l->query_storage, &l->W_q, l->b_q, &m->query);
    projections[1] =
        input_projection(l, m->batch, l->key, l->key_storage, &l->W_k, l->b_k, &m->key);
    projections[2] =
        input_projection(l, m->batch, l->value, l->value_storage, &l->W_v, l->b_v, &m->value);
    prepare_projection(&m->of_query, &projections[0]);
    prepare_projection(&m->of_key, &projections[1]);
    if (!mha_has_output_gate(l)) {
        return 3;
    }
    projections[3] =
        input_projection(l, m->batch, l->query, l->query_storage, &l->W_g, l->b_g, &m->gate);
    return 4;
}

/* Step 5. */
static mha_linear_projection output_projection(const mha_multi_head_attention *l,
                                               const matrices *m) {
    mha_linear_projection projection = mha_contiguous_projection(
        l->dtype, m->merged.data, m->batch * l->query_len, &l->W_o, l->b_o, l->output);
    projection.output_storage = l->output_storage;
    projection.output_stride = l->W_o.out * (int64_t)mha_storage_size(l->dtype, l->output_storage);
    return projection;
}

/* Keys and values of these positions join those of the positions before. */
static mha_status append_to_cache(const mha_layer_cache *cache, mha_execution *execution) {
    if (cache->append == NULL || execution->workspace.measures) {
        return MHA_OK;
    }
    return cache->append(cache->context, execution) == 0 ? MHA_OK : MHA_CANCELLED;
}

/* Step 4: the gates, but for a head_gate that attention has applied: `attended` is NULL then. */
static mha_status apply_gates(const mha_multi_head_attention *l, const matrices *m,
                              const void *attended, mha_execution *execution) {
    const mha_head_gate heads = mha_head_gate_of_layer(l, m->batch);
    const mha_output_gate output =
        mha_output_gate_of_layer(l, m->batch, m->ungated.data, m->gate.data, m->merged.data);
    if (attended != NULL) {
        MHA_TRY(mha_head_gate_forward(&heads, attended, merged_of(l, m)->data, execution));
    }
    return mha_has_output_gate(l) ? mha_output_gate_forward(&output, execution) : MHA_OK;
}

static mha_status run_all_steps(const mha_multi_head_attention *layer, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    matrices m = {.batch = 0};
    MHA_TRY(plan_matrices(layer, &m));
    MHA_TRY(take_matrix(&m.query, workspace));
    MHA_TRY(take_matrix(&m.key, workspace));
    MHA_TRY(take_matrix(&m.value, workspace));
    MHA_TRY(take_matrix(&m.merged, workspace));
    if (mha_has_output_gate(layer)) {
        MHA_TRY(take_matrix(&m.gate, workspace));
        MHA_TRY(take_matrix(&m.ungated, workspace));
    }
    MHA_TRY(begin_preparation(layer, &m, execution));

    /* 1. Linear projections: (batch, len, dim) -> (batch, len, heads * head_dim). Norms and rotary
     *    embeddings of queries and keys, inside their tasks where a head is whole panels. */
    mha_linear_projection inputs[4];
    const int num_inputs = input_projections(layer, &m, inputs);
    MHA_TRY(mha_linear_projection_forward(inputs, num_inputs, execution));
    MHA_TRY(prepare(&m.of_query, execution));
    MHA_TRY(prepare(&m.of_key, execution));
    MHA_TRY(append_to_cache(&layer->cache, execution));

    /* 2. Split heads: (batch, len, heads * head_dim) -> (batch, heads, len, head_dim), by strides.
     * 3. Scaled dot-product attention.
     * 4. Merge heads: each head's output goes straight to its columns of merged (batch, query_len,
     *    heads * value_head_dim). Then the gates. */
    mha_attention attention;
    fill_attention(layer, &m, &attention);
    const bool gates_apart = layer->head_gate != NULL && layer->saved.attended != NULL;
    if (gates_apart) {
        attention.output.data = layer->saved.attended;
        attention.head_gate = NULL;
    }
    MHA_TRY(mha_scaled_dot_product_attention_forward(&attention, execution));
    MHA_TRY(apply_gates(layer, &m, gates_apart ? layer->saved.attended : NULL, execution));

    /* 5. Output projection: (batch, query_len, output_dim). */
    const mha_linear_projection output = output_projection(layer, &m);
    return mha_linear_projection_forward(&output, 1, execution);
}

static mha_status run_steps(const mha_multi_head_attention *layer, mha_execution *execution) {
    const mha_sequence_groups groups = mha_plan_sequence_groups(layer, execution->num_threads);
    return groups.count == 0 ? run_all_steps(layer, execution)
                             : mha_run_sequence_groups(layer, &groups, run_all_steps, execution);
}

MHA_DEFINE_FORWARD(multi_head_attention, mha_multi_head_attention, run_steps)
