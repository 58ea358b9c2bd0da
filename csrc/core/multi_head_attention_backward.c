/* The whole figure backwards, step by step as multi_head_attention.c goes forward:
 *
 *   output --output projection--> merge heads, gates --scaled dot-product attention--> split heads
 *   --linear projections--> query, key, value
 *
 * Gradients between the steps live in the workspace, C-contiguous (batch..., length, heads * d). */
#include "../threads/partition.h"
#include <string.h>

#include "run.h"
#include "attention_rows.h"
#include "mha/attention.h"

/* One of query, key and value: its projection and what is wanted of it. */
typedef struct input {
    const void *x;
    const mha_weight *weight;
    void *projected; /* kept by the forward pass: (batch..., length, heads * d) */
    void *grad_x, *grad_weight, *grad_bias;
    int64_t length, num_heads;
    void *grad_projected; /* of the workspace, or NULL where nothing is wanted */
} input;

/* Inputs that were one and the same: the gradient of that is the sum of theirs, in this order. */
typedef struct same_inputs {
    input *members[3];
    int count;
    void *grad_x; /* the sum, or NULL where it is not wanted */
} same_inputs;

typedef struct way_back {
    const mha_multi_head_attention_gradients *gradients;
    const mha_multi_head_attention *layer;
    int64_t batch;
    input query, key, value;
    same_inputs same;
    bool goes_on;                      /* something before step 5 is wanted */
    void *grad_merged, *grad_attended; /* of the workspace; the same without gates */
} way_back;

static mha_status size_of(const way_back *w, int64_t length, int64_t width, size_t *bytes) {
    MHA_TRY(mha_multiply_sizes((size_t)w->batch, (size_t)length, bytes));
    MHA_TRY(mha_multiply_sizes(*bytes, (size_t)width, bytes));
    return mha_multiply_sizes(*bytes, mha_dtype_size(w->layer->attention.dtype), bytes);
}

static bool is_wanted(const input *in) {
    return in->grad_x != NULL || in->grad_weight != NULL || in->grad_bias != NULL;
}

/* Which inputs were one: query, value and key, or value and key, or none. */
static same_inputs same_of(const mha_multi_head_attention_gradients *g, way_back *w) {
    same_inputs same = {.grad_x = NULL};
    if (g->key_is_query) {
        same.members[same.count++] = &w->query;
        same.grad_x = g->grad_query;
    } else if (g->value_is_key) {
        same.members[same.count++] = &w->key;
        same.grad_x = g->grad_key;
    }
    if (g->value_is_key) {
        same.members[same.count++] = &w->value;
    }
    if (g->key_is_query) {
        same.members[same.count++] = &w->key;
    }
    if (same.grad_x == NULL) {
        same.count = 0;
    }
    return same;
}

/* Each of them gets a piece of the workspace for its own gradient: tasks that add into what they
 * read could not run twice, as they may in the child of a signal handler that forks. */
static mha_status take_same(way_back *w, mha_workspace *workspace) {
    for (int i = 0; i < w->same.count; i++) {
        input *in = w->same.members[i];
        size_t bytes;
        MHA_TRY(size_of(w, in->length, in->weight->in, &bytes));
        MHA_TRY(mha_workspace_take(workspace, bytes, &in->grad_x));
    }
    return MHA_OK;
}

static mha_status plan(const mha_multi_head_attention_gradients *g, way_back *w) {
    const mha_multi_head_attention *l = g->layer;
    const way_back planned = {
        .gradients = g,
        .layer = l,
        .query = {.x = l->query,
                  .weight = &l->W_q,
                  .projected = l->kept.projected_query,
                  .grad_x = g->grad_query,
                  .grad_weight = g->grad_W_q,
                  .grad_bias = g->grad_b_q,
                  .length = l->query_len,
                  .num_heads = l->num_heads},
        .key = {.x = l->key,
                .weight = &l->W_k,
                .projected = l->kept.projected_key,
                .grad_x = g->grad_key,
                .grad_weight = g->grad_W_k,
                .grad_bias = g->grad_b_k,
                .length = l->key_len,
                .num_heads = l->num_kv_heads},
        .value = {.x = l->value,
                  .weight = &l->W_v,
                  .projected = l->kept.projected_value,
                  .grad_x = g->grad_value,
                  .grad_weight = g->grad_W_v,
                  .grad_bias = g->grad_b_v,
                  .length = l->key_len,
                  .num_heads = l->num_kv_heads},
    };
    *w = planned;
    MHA_TRY(mha_count_elements(l->batch_shape, l->attention.batch_axes, &w->batch));
    w->same = same_of(g, w);
    w->goes_on = w->same.count > 0 || is_wanted(&w->query) || is_wanted(&w->key) ||
                 is_wanted(&w->value) || g->grad_head_gate != NULL || g->grad_bias.data != NULL;
    return MHA_OK;
}

/* Step 5 backwards. */
static mha_linear_projection output_projection(const way_back *w) {
    const mha_multi_head_attention *l = w->layer;
    return mha_contiguous_projection(l->attention.dtype, l->kept.merged, w->batch * l->query_len,
                                     &l->W_o, NULL, NULL);
}

static mha_linear_projection_gradients output_gradients(const way_back *w,
                                                        const mha_linear_projection *projection) {
    const mha_multi_head_attention_gradients *g = w->gradients;
    const mha_linear_projection_gradients gradients = {
        .projection = projection,
        .grad_output = g->grad_output,
        .grad_output_stride =
            w->layer->W_o.out * (int64_t)mha_dtype_size(w->layer->attention.dtype),
        .grad_x = w->grad_merged,
        .grad_weight = g->grad_W_o,
        .grad_bias = g->grad_b_o,
    };
    return gradients;
}

/* Step 1 backwards. */
static mha_linear_projection input_projection(const way_back *w, const input *in) {
    return mha_contiguous_projection(w->layer->attention.dtype, in->x, w->batch * in->length,
                                     in->weight, NULL, NULL);
}

static mha_linear_projection_gradients input_gradients(const way_back *w, const input *in,
                                                       const mha_linear_projection *projection) {
    const mha_linear_projection_gradients gradients = {
        .projection = projection,
        .grad_output = in->grad_projected,
        .grad_output_stride = in->weight->out * (int64_t)mha_dtype_size(w->layer->attention.dtype),
        .grad_x = in->grad_x,
        .grad_weight = in->grad_weight,
        .grad_bias = in->grad_bias,
        .leaves_out_unseen = true,
    };
    return gradients;
}

/* Step 2: rows of all heads seen by head, (batch..., heads, length, d), or absent. */
static mha_tensor heads_of(const way_back *w, void *rows, int64_t length, int64_t width,
                           int64_t num_heads) {
    const mha_attention *a = &w->layer->attention;
    mha_tensor sequence = {.data = rows, .axes = a->batch_axes + 2}, heads = {.data = NULL};
    if (rows == NULL) {
        return heads;
    }
    for (int axis = 0; axis < a->batch_axes; axis++) {
        sequence.shape[axis] = w->layer->batch_shape[axis];
    }
    sequence.shape[a->batch_axes] = length;
    sequence.shape[a->batch_axes + 1] = width;
    mha_set_contiguous_strides(&sequence, a->dtype);
    mha_split_heads(&sequence, num_heads, &heads);
    return heads;
}

static mha_tensor input_heads(const way_back *w, const input *in, void *rows) {
    return heads_of(w, rows, in->length, in->weight->out, in->num_heads);
}

/* Step 3 backwards, on the steps that the forward pass kept. */
static mha_attention attention_of(const way_back *w) {
    const mha_multi_head_attention *l = w->layer;
    mha_attention attention = l->attention;
    attention.query = input_heads(w, &w->query, w->query.projected);
    attention.key = input_heads(w, &w->key, w->key.projected);
    attention.value = input_heads(w, &w->value, w->value.projected);
    attention.output = heads_of(w, l->kept.attended, l->query_len, l->W_o.in, l->num_heads);
    attention.weights = attention.lse = NULL;
    attention.head_gate = NULL;
    return attention;
}

static mha_attention_gradients attention_gradients(const way_back *w,
                                                   const mha_attention *attention) {
    const mha_multi_head_attention *l = w->layer;
    const mha_attention_gradients gradients = {
        .attention = attention,
        .grad_output = heads_of(w, w->grad_attended, l->query_len, l->W_o.in, l->num_heads),
        .grad_lse = w->gradients->grad_lse,
        .grad_query = input_heads(w, &w->query, w->query.grad_projected),
        .grad_key = input_heads(w, &w->key, w->key.grad_projected),
        .grad_value = input_heads(w, &w->value, w->value.grad_projected),
        .grad_bias = w->gradients->grad_bias,
    };
    return gradients;
}

/* Tasks over rows or heads. */
typedef struct rows_job {
    const way_back *w;
    int64_t rows, width, rows_of_a_task;
    void *to;
    const void *from[3];
} rows_job;

static mha_status for_rows(rows_job *job, mha_task_function function, mha_execution *execution) {
    job->rows_of_a_task = mha_rows_of_a_task(job->width);
    const int64_t tasks = mha_divide_up(job->rows, job->rows_of_a_task);
    const double numbers = (double)job->rows * (double)job->width;
    return mha_run_tasks(execution, tasks, mha_threads_for(tasks, numbers, execution->num_threads),
                         function, job);
}

/* Step 4 backwards, gates: grad head_gate = sum over tokens and columns of grad merged * attended.
 * Task: a head. */
static void differentiate_gate(void *context, int64_t head, mha_worker *worker) {
    const rows_job *job = context;
    const mha_multi_head_attention *l = job->w->layer;
    const mha_elementwise_kernels *kernels = mha_kernels_for(l->attention.dtype)->elementwise;
    const int64_t item = (int64_t)mha_dtype_size(l->attention.dtype);
    const int64_t columns = job->width / l->num_heads;
    mha_compensated_sum sum = {0, 0};
    for (int64_t row = 0; row < job->rows; row++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (columns + 1))) {
            return;
        }
        const int64_t at = (row * job->width + head * columns) * item;
        kernels->add_products((const char *)job->from[0] + at, (const char *)l->kept.attended + at,
                              columns, &sum);
    }
    /* What is lost is NaN where the sum is no longer finite. */
    kernels->write(job->to, head, sum.lost == sum.lost ? sum.sum + sum.lost : sum.sum);
}

/* grad attended = grad merged * each head's gate. */
static void gate_rows(void *context, int64_t task, mha_worker *worker) {
    const rows_job *job = context;
    const mha_multi_head_attention *l = job->w->layer;
    const mha_elementwise_kernels *kernels = mha_kernels_for(l->attention.dtype)->elementwise;
    const int64_t item = (int64_t)mha_dtype_size(l->attention.dtype);
    const int64_t columns = job->width / l->num_heads;
    const int64_t first = task * job->rows_of_a_task;
    const int64_t end = mha_smaller(first + job->rows_of_a_task, job->rows);
    for (int64_t row = first; row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (job->width + 1))) {
            return;
        }
        for (int64_t head = 0; head < l->num_heads; head++) {
            const int64_t at = (row * job->width + head * columns) * item;
            kernels->multiply((char *)job->to + at, (const char *)job->from[0] + at,
                              mha_gate_of(&l->attention, head), columns);
        }
    }
}

static mha_status differentiate_gates(const way_back *w, mha_execution *execution) {
    const mha_multi_head_attention *l = w->layer;
    rows_job job = {
        .w = w, .rows = w->batch * l->query_len, .width = l->W_o.in, .from = {w->grad_merged}};
    if (w->gradients->grad_head_gate != NULL) {
        const double numbers = (double)job.rows * (double)job.width;
        job.to = w->gradients->grad_head_gate;
        MHA_TRY(mha_run_tasks(execution, l->num_heads,
                              mha_threads_for(l->num_heads, numbers, execution->num_threads),
                              differentiate_gate, &job));
    }
    job.to = w->grad_attended;
    return l->attention.head_gate == NULL ? MHA_OK : for_rows(&job, gate_rows, execution);
}

/* grad x = the members' gradients, added up. */
static void add_rows(void *context, int64_t task, mha_worker *worker) {
    const rows_job *job = context;
    const mha_dtype dtype = job->w->layer->attention.dtype;
    const mha_elementwise_kernels *kernels = mha_kernels_for(dtype)->elementwise;
    const int64_t row_bytes = job->width * (int64_t)mha_dtype_size(dtype);
    const int64_t first = task * job->rows_of_a_task;
    const int64_t end = mha_smaller(first + job->rows_of_a_task, job->rows);
    for (int64_t row = first; row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (job->width + 1))) {
            return;
        }
        char *to = (char *)job->to + row * row_bytes;
        memcpy(to, (const char *)job->from[0] + row * row_bytes, (size_t)row_bytes);
        for (int i = 1; i < job->w->same.count; i++) {
            kernels->add(to, (const char *)job->from[i] + row * row_bytes, job->width);
        }
    }
}

static mha_status add_same(const way_back *w, mha_execution *execution) {
    const input *first = w->same.members[0];
    rows_job job = {
        .w = w, .rows = w->batch * first->length, .width = first->weight->in, .to = w->same.grad_x};
    for (int i = 0; i < w->same.count; i++) {
        job.from[i] = w->same.members[i]->grad_x;
    }
    return for_rows(&job, add_rows, execution);
}

static mha_status project_back(const way_back *w, const input *in, mha_execution *execution) {
    if (!is_wanted(in)) {
        return MHA_OK;
    }
    const mha_linear_projection projection = input_projection(w, in);
    const mha_linear_projection_gradients gradients = input_gradients(w, in, &projection);
    return mha_linear_projection_backward(&gradients, execution);
}

/* Where gradients between the steps will lie. */
static mha_status take_gradients(way_back *w, mha_workspace *workspace) {
    const mha_multi_head_attention *l = w->layer;
    input *const inputs[] = {&w->query, &w->key, &w->value};
    size_t bytes;
    if (!w->goes_on) {
        return MHA_OK;
    }
    MHA_TRY(size_of(w, l->query_len, l->W_o.in, &bytes));
    MHA_TRY(mha_workspace_take(workspace, bytes, &w->grad_merged));
    w->grad_attended = w->grad_merged;
    if (l->attention.head_gate != NULL) {
        MHA_TRY(mha_workspace_take(workspace, bytes, &w->grad_attended));
    }
    MHA_TRY(take_same(w, workspace));
    for (int i = 0; i < 3; i++) {
        if (is_wanted(inputs[i])) {
            MHA_TRY(size_of(w, inputs[i]->length, inputs[i]->weight->out, &bytes));
            MHA_TRY(mha_workspace_take(workspace, bytes, &inputs[i]->grad_projected));
        }
    }
    return MHA_OK;
}

static mha_status run_steps(const mha_multi_head_attention_gradients *g, mha_execution *execution) {
    way_back w;
    MHA_TRY(plan(g, &w));
    MHA_TRY(take_gradients(&w, &execution->workspace));

    /* 5. Output projection: grad output (batch, query_len, output_dim) -> grad merged (batch,
     *    query_len, heads * value_head_dim), grad W_o, grad b_o. */
    const mha_linear_projection projection = output_projection(&w);
    const mha_linear_projection_gradients of_output = output_gradients(&w, &projection);
    MHA_TRY(mha_linear_projection_backward(&of_output, execution));
    if (!w.goes_on) {
        return MHA_OK;
    }

    /* 4. Merge heads: grad merged -> (batch, heads, query_len, value_head_dim), by strides. Gates:
     *    grad head_gate, and grad attended. */
    MHA_TRY(differentiate_gates(&w, execution));

    /* 3. Scaled dot-product attention.
     * 2. Split heads: gradients of heads go straight to their columns of the projections'. */
    const mha_attention attention = attention_of(&w);
    const mha_attention_gradients of_attention = attention_gradients(&w, &attention);
    MHA_TRY(mha_scaled_dot_product_attention_backward(&of_attention, execution));

    /* 1. Linear projections: (batch, len, heads * head_dim) -> (batch, len, dim). */
    MHA_TRY(project_back(&w, &w.query, execution));
    MHA_TRY(project_back(&w, &w.key, execution));
    MHA_TRY(project_back(&w, &w.value, execution));
    return w.same.count > 0 ? add_same(&w, execution) : MHA_OK;
}

mha_status mha_multi_head_attention_backward(const mha_multi_head_attention_gradients *gradients,
                                             mha_execution *execution) {
    const size_t used_before = execution->workspace.used;
    const mha_status status = run_steps(gradients, execution);
    mha_workspace_give_back(&execution->workspace, used_before);
    return status;
}

MHA_DEFINE_WORKSPACE(multi_head_attention_backward, mha_multi_head_attention_gradients,
                     mha_multi_head_attention_backward)
