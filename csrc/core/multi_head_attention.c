/* The whole figure, top-down:
 *
 *   query, key, value --linear projections--> split heads --scaled dot-product attention-->
 *   merge heads --output projection--> output
 *
 * The projected arrays live in the workspace. Splitting and merging heads are strides. */
#include "mha/attention.h"

#include "../threads/partition.h"
#include "run.h"
#include "attention_rows.h"
#include "matmul.h"

/* What the steps hand on: (batch..., length, num_heads * d), its rows row_bytes apart, its heads
 * head_bytes. */
typedef struct matrix {
    int64_t length, width, num_heads, row_bytes, head_bytes;
    void *data;
    size_t bytes; /* of the workspace; 0 where the caller keeps the matrix */
} matrix;

typedef struct matrices {
    int64_t batch; /* sequences */
    matrix query, key, value, merged;
} matrices;

/* Rows of all heads side by side, as the figure has them and a caller keeps them. */
static mha_status plan_matrix(const mha_multi_head_attention *layer, int64_t batch, int64_t length,
                              int64_t width, int64_t num_heads, void *kept, matrix *m) {
    const size_t item = mha_dtype_size(layer->attention.dtype);
    const matrix planned = {.length = length, .width = width, .num_heads = num_heads, .data = kept};
    size_t rows, row_bytes;
    *m = planned;
    MHA_TRY(mha_multiply_sizes((size_t)batch, (size_t)length, &rows));
    MHA_TRY(mha_multiply_sizes((size_t)width, item, &row_bytes));
    MHA_TRY(mha_multiply_sizes(rows, row_bytes, &m->bytes));
    /* Strides are int64_t. */
    if (rows > INT64_MAX || row_bytes > INT64_MAX || m->bytes > INT64_MAX) {
        return MHA_SIZE_OVERFLOW;
    }
    m->row_bytes = (int64_t)row_bytes;
    m->head_bytes = width / num_heads * (int64_t)item;
    m->bytes = kept == NULL ? m->bytes : 0;
    return MHA_OK;
}

/* The same, but in the workspace each head's rows on their own, (num_heads, batch..., length, d),
 * where the projection can write them so: rows of all heads are pages apart, and attention, which
 * reads those of one head again and again, took 1.1 to 1.2 times as long (docs/journal.md). */
static mha_status plan_projected(const mha_multi_head_attention *layer, int64_t batch,
                                 int64_t length, int64_t width, int64_t num_heads, void *kept,
                                 matrix *m) {
    const int64_t head_columns = width / num_heads;
    MHA_TRY(plan_matrix(layer, batch, length, width, num_heads, kept, m));
    if (kept == NULL && head_columns % mha_panels_of(layer->attention.dtype)->columns == 0) {
        m->row_bytes = m->head_bytes;
        m->head_bytes = batch * length * m->row_bytes;
    }
    return MHA_OK;
}

static mha_status plan_matrices(const mha_multi_head_attention *l, matrices *m) {
    const mha_kept_steps *kept = &l->kept;
    MHA_TRY(mha_count_elements(l->batch_shape, l->attention.batch_axes, &m->batch));
    MHA_TRY(plan_projected(l, m->batch, l->query_len, l->W_q.out, l->num_heads,
                           kept->projected_query, &m->query));
    MHA_TRY(plan_projected(l, m->batch, l->key_len, l->W_k.out, l->num_kv_heads,
                           kept->projected_key, &m->key));
    MHA_TRY(plan_projected(l, m->batch, l->key_len, l->W_v.out, l->num_kv_heads,
                           kept->projected_value, &m->value));
    return plan_matrix(l, m->batch, l->query_len, l->W_o.in, l->num_heads, kept->merged,
                       &m->merged);
}

/* Step 2, a matrix split into heads: (batch..., num_heads, length, d). */
static void heads_of(const mha_multi_head_attention *layer, const matrix *m, mha_tensor *heads) {
    const int batch_axes = layer->attention.batch_axes;
    mha_tensor sequence = {.data = m->data, .axes = batch_axes + 2};
    for (int axis = 0; axis < batch_axes; axis++) {
        sequence.shape[axis] = layer->batch_shape[axis];
    }
    sequence.shape[batch_axes] = m->length;
    sequence.shape[batch_axes + 1] = m->width;
    mha_set_row_strides(&sequence, layer->attention.dtype, m->row_bytes);
    mha_split_heads(&sequence, m->num_heads, heads);
    heads->strides[batch_axes] = m->head_bytes;
}

/* The attention step with its four tensors seen by head. */
static mha_attention attention_of(const mha_multi_head_attention *l, const matrices *m) {
    mha_attention attention = l->attention;
    heads_of(l, &m->query, &attention.query);
    heads_of(l, &m->key, &attention.key);
    heads_of(l, &m->value, &attention.value);
    heads_of(l, &m->merged, &attention.output);
    return attention;
}

static mha_linear_projection input_projection(const mha_multi_head_attention *l, int64_t batch,
                                              const void *x, const mha_weight *weight,
                                              const void *bias, const matrix *to) {
    mha_linear_projection projection = mha_contiguous_projection(
        l->attention.dtype, x, batch * to->length, weight, bias, to->data);
    projection.output_stride = to->row_bytes;
    if (to->head_bytes > to->row_bytes) { /* heads lie apart */
        projection.head_columns = to->width / to->num_heads;
        projection.head_stride = to->head_bytes;
    }
    return projection;
}

/* Step 1: query, key and value projected, side by side. */
static void input_projections(const mha_multi_head_attention *l, const matrices *m,
                              mha_linear_projection projections[3]) {
    projections[0] = input_projection(l, m->batch, l->query, &l->W_q, l->b_q, &m->query);
    projections[1] = input_projection(l, m->batch, l->key, &l->W_k, l->b_k, &m->key);
    projections[2] = input_projection(l, m->batch, l->value, &l->W_v, l->b_v, &m->value);
}

/* Step 5. */
static mha_linear_projection output_projection(const mha_multi_head_attention *l,
                                               const matrices *m) {
    return mha_contiguous_projection(l->attention.dtype, m->merged.data, m->batch * l->query_len,
                                     &l->W_o, l->b_o, l->output);
}

/* A piece of the workspace, unless the caller keeps the matrix. */
static mha_status take_matrix(matrix *m, mha_workspace *workspace) {
    return m->data == NULL ? mha_workspace_take(workspace, m->bytes, &m->data) : MHA_OK;
}

/* merged (rows, heads * d) = attended * each head's gate. */
typedef struct gate_job {
    const mha_multi_head_attention *layer;
    int64_t rows, rows_of_a_task;
} gate_job;

static void gate_row(const mha_multi_head_attention *layer, int64_t row) {
    const mha_dtype dtype = layer->attention.dtype;
    const int64_t heads = layer->num_heads, columns = layer->W_o.in / heads;
    const int64_t head_bytes = columns * (int64_t)mha_dtype_size(dtype);
    for (int64_t head = 0; head < heads; head++) {
        const int64_t at = (row * heads + head) * head_bytes;
        mha_kernels_for(dtype)->elementwise->multiply(
            (char *)layer->kept.merged + at, (const char *)layer->kept.attended + at,
            mha_gate_of(&layer->attention, head), columns);
    }
}

static void gate_rows(void *context, int64_t task, mha_worker *worker) {
    const gate_job *job = context;
    const int64_t first = task * job->rows_of_a_task;
    const int64_t end = mha_smaller(first + job->rows_of_a_task, job->rows);
    for (int64_t row = first; row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * job->layer->W_o.in)) {
            return;
        }
        gate_row(job->layer, row);
    }
}

static mha_status gate_heads(const mha_multi_head_attention *layer, int64_t rows,
                             mha_execution *execution) {
    const int64_t width = layer->W_o.in;
    gate_job job = {layer, rows, mha_rows_of_a_task(width)};
    const int64_t num_tasks = mha_divide_up(rows, job.rows_of_a_task);
    const int threads =
        mha_threads_for(num_tasks, (double)rows * (double)width, execution->num_threads);
    return mha_run_tasks(execution, num_tasks, threads, gate_rows, &job);
}

static mha_status run_steps(const mha_multi_head_attention *layer, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    matrices m;
    MHA_TRY(plan_matrices(layer, &m));
    MHA_TRY(take_matrix(&m.query, workspace));
    MHA_TRY(take_matrix(&m.key, workspace));
    MHA_TRY(take_matrix(&m.value, workspace));
    MHA_TRY(take_matrix(&m.merged, workspace));

    /* 1. Linear projections: (batch, len, dim) -> (batch, len, heads * head_dim). */
    mha_linear_projection inputs[3];
    input_projections(layer, &m, inputs);
    MHA_TRY(mha_linear_projection_forward(inputs, 3, execution));

    /* 2. Split heads: (batch, len, heads * head_dim) -> (batch, heads, len, head_dim), by strides.
     * 3. Scaled dot-product attention.
     * 4. Merge heads: each head's output goes straight to its columns of merged (batch, query_len,
     *    heads * value_head_dim). */
    mha_attention attention = attention_of(layer, &m);
    const bool gates_apart = layer->kept.attended != layer->kept.merged;
    if (gates_apart) {
        attention.output.data = layer->kept.attended;
        attention.head_gate = NULL;
    }
    MHA_TRY(mha_scaled_dot_product_attention_forward(&attention, execution));
    if (gates_apart) {
        MHA_TRY(gate_heads(layer, m.batch * layer->query_len, execution));
    }

    /* 5. Output projection: (batch, query_len, output_dim). */
    const mha_linear_projection output = output_projection(layer, &m);
    return mha_linear_projection_forward(&output, 1, execution);
}

mha_status mha_multi_head_attention_forward(const mha_multi_head_attention *layer,
                                            mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    const mha_status status = run_steps(layer, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

MHA_DEFINE_WORKSPACE(multi_head_attention, mha_multi_head_attention,
                     mha_multi_head_attention_forward)
