/* Norms of query and key heads, then rotary embeddings, and their backward pass. Where a head is
 * whole panels of its projection, the task that projected rows does this to them at once; else it
 * is a pass from one array to another. */
#include "core/heads/prepare_heads.h"

#include <string.h>

#include "core/base/run.h"
#include "kernels/kernels.h"

static char *head_at(const mha_head_rows *rows, int64_t row, int64_t head) {
    return (char *)rows->data + row * rows->row_bytes + head * rows->head_bytes;
}

static const void *weight_of(const mha_prepare_heads *p, int64_t head) {
    const int64_t first = mha_prepares_whole_rows(p) ? head * p->head_dim : 0;
    return (const char *)p->norm.weight + first * (int64_t)mha_dtype_size(p->dtype);
}

static double sum_squares(const mha_prepare_heads *p, int64_t row, int64_t first_head,
                          int64_t end_head, double factor) {
    const mha_heads_kernels *kernels = mha_kernels_for(p->dtype)->heads;
    double sum = 0;
    for (int64_t head = first_head; head < end_head; head++) {
        sum += kernels->sum_squares(head_at(&p->from, row, head), factor, p->head_dim);
    }
    return sum;
}

/* 1 / sqrt(size^2 + eps) where a square may pass the largest double, or vanish. */
static double careful_inverse(double size, double eps) {
    const double of_eps = __builtin_sqrt(eps), largest = size > of_eps ? size : of_eps;
    if (!(largest > 0 && largest - largest == 0)) {
        return 1 / largest;
    }
    const double a = size / largest, b = of_eps / largest;
    return 1 / largest / __builtin_sqrt(a * a + b * b);
}

/* 1 / sqrt(mean(x^2) + eps) of these heads of a token together. */
static double inverse_size(const mha_prepare_heads *p, int64_t row, int64_t first_head,
                           int64_t end_head) {
    const double columns = (double)((end_head - first_head) * p->head_dim);
    const double sum = sum_squares(p, row, first_head, end_head, 1);
    if (sum > 0x1p-900 && sum < 0x1p1000) {
        return 1 / __builtin_sqrt(sum / columns + p->norm.eps);
    }
    if (sum != sum) {
        return sum;
    }
    const double factor = sum < 1 ? 0x1p800 : 0x1p-600;
    const double scaled = sum_squares(p, row, first_head, end_head, factor);
    return careful_inverse(__builtin_sqrt(scaled / columns) / factor, p->norm.eps);
}

static void prepare_row(const mha_prepare_heads *p, int64_t row, int64_t first_head,
                        int64_t end_head) {
    const mha_heads_kernels *kernels = mha_kernels_for(p->dtype)->heads;
    const size_t bytes = (size_t)p->head_dim * mha_dtype_size(p->dtype);
    const bool whole = mha_prepares_whole_rows(p);
    double inverse = whole ? inverse_size(p, row, first_head, end_head) : 1;
    for (int64_t head = first_head; head < end_head; head++) {
        const char *from = head_at(&p->from, row, head);
        char *to = head_at(&p->to, row, head);
        /* 1. The norm, or a copy. */
        if (p->norm.weight != NULL) {
            inverse = whole ? inverse : inverse_size(p, row, head, head + 1);
            kernels->normalise(from, inverse, weight_of(p, head), p->norm.offset, to, p->head_dim);
        } else if (to != from) {
            memcpy(to, from, bytes);
        }
        /* 2. The rotation. */
        if (p->table != NULL) {
            mha_rotate_row(p->table, p->dtype, row / p->length, row % p->length, to);
        }
    }
}

/* Work of preparing a number, in multiply-adds. */
enum { WORK_OF_NUMBER = 2 * MHA_WORK_OF_MOVING };

void mha_prepare_block(const mha_prepare_heads *p, int64_t first_row, int64_t end_row,
                       int64_t first_head, int64_t end_head, mha_checkpoint *checkpoint) {
    const int64_t work = WORK_OF_NUMBER * ((end_head - first_head) * p->head_dim + 1);
    for (int64_t row = first_row; row < end_row; row++) {
        if (mha_stop_after(checkpoint, work)) {
            return;
        }
        prepare_row(p, row, first_head, end_head);
    }
}

typedef struct prepare_job {
    const mha_prepare_heads *prepare;
    mha_row_tasks rows;
    const mha_prepare_heads_gradients *gradients; /* of the backward pass, with: */
    double *partial;                              /* (tasks, norm.columns): grad weight of each */
} prepare_job;

static void prepare_rows(void *context, int64_t task, mha_worker *worker) {
    const prepare_job *job = context;
    mha_prepare_block(job->prepare, mha_first_row(&job->rows, task), mha_end_row(&job->rows, task),
                      0, job->prepare->num_heads, &worker->checkpoint);
}

mha_status mha_prepare_heads_forward(const mha_prepare_heads *p, mha_execution *execution) {
    prepare_job job = {.prepare = p};
    job.rows = mha_divide_rows(p->batch * p->length, p->num_heads * p->head_dim, WORK_OF_NUMBER,
                               execution->num_threads);
    return mha_run_row_tasks(execution, &job.rows, prepare_rows, &job);
}

static mha_head_rows rows_of(const mha_head_preparation *p, const void *data) {
    const int64_t head_bytes = p->head_dim * (int64_t)mha_dtype_size(p->dtype);
    return (mha_head_rows){(void *)(uintptr_t)data, p->num_heads * head_bytes, head_bytes};
}

/* The step alone as the layer has it; its table, where it rotates, is made in `table`. */
static mha_status see_step(const mha_head_preparation *p, bool back, mha_execution *execution,
                           mha_rotary_table *table, mha_prepare_heads *prepare) {
    *prepare = (mha_prepare_heads){
        .dtype = p->dtype,
        .batch = p->batch,
        .length = p->length,
        .num_heads = p->num_heads,
        .head_dim = p->head_dim,
        .norm = p->norm,
        .from = rows_of(p, p->x),
        .to = rows_of(p, p->output),
    };
    if (p->rotary == NULL) {
        return MHA_OK;
    }
    prepare->table = table;
    return mha_make_rotary_table(p->rotary, p->dtype, p->positions, p->length, back, execution,
                                 table);
}

static mha_status run_steps(const mha_head_preparation *p, mha_execution *execution) {
    mha_rotary_table table;
    mha_prepare_heads prepare;
    MHA_TRY(see_step(p, false, execution, &table, &prepare));
    return mha_prepare_heads_forward(&prepare, execution);
}

MHA_DEFINE_FORWARD(head_preparation, mha_head_preparation, run_steps)

/* Some heads of a token that are normed together: with n = x / size, w = offset + weight and the
 * gradient g of n w, grad x = (g w - n mean(g w n)) / size and grad weight += g n. The gradient is
 * replaced. Where it is zero, as that of padding, x may hold anything. */
static void norm_back(const prepare_job *job, int64_t row, int64_t first_head, int64_t end_head,
                      double *grad_weight) {
    const mha_prepare_heads *p = job->prepare;
    const mha_head_rows *grads = &job->gradients->grad_from;
    const mha_kernels *kernels = mha_kernels_for(p->dtype);
    const double columns = (double)((end_head - first_head) * p->head_dim);
    double sum = 0;
    bool is_zero = true;
    for (int64_t head = first_head; head < end_head && is_zero; head++) {
        is_zero = kernels->elementwise->all_zero(head_at(grads, row, head), p->head_dim);
    }
    if (is_zero) {
        return;
    }
    const double inverse = inverse_size(p, row, first_head, end_head);
    for (int64_t head = first_head; head < end_head; head++) {
        sum += kernels->heads->sum_products(head_at(grads, row, head), weight_of(p, head),
                                            p->norm.offset, head_at(&p->from, row, head), inverse,
                                            p->head_dim);
    }
    for (int64_t head = first_head; head < end_head; head++) {
        double *of_head = grad_weight;
        if (grad_weight != NULL && mha_prepares_whole_rows(p)) {
            of_head += head * p->head_dim;
        }
        kernels->heads->normalise_back(head_at(grads, row, head), head_at(&p->from, row, head),
                                       inverse, sum / columns, weight_of(p, head), p->norm.offset,
                                       of_head, p->head_dim);
    }
}

static void prepare_row_back(const prepare_job *job, int64_t row, double *grad_weight) {
    const mha_prepare_heads *p = job->prepare;
    const mha_prepare_heads_gradients *g = job->gradients;
    const size_t bytes = (size_t)p->head_dim * mha_dtype_size(p->dtype);
    /* 2. The rotation, the other way. */
    for (int64_t head = 0; head < p->num_heads; head++) {
        char *to = head_at(&g->grad_from, row, head);
        memcpy(to, head_at(&g->grad_to, row, head), bytes);
        if (p->table != NULL) {
            mha_rotate_row(p->table, p->dtype, row / p->length, row % p->length, to);
        }
    }
    /* 1. The norm. */
    if (mha_prepares_whole_rows(p)) {
        norm_back(job, row, 0, p->num_heads, grad_weight);
    } else if (p->norm.weight != NULL) {
        for (int64_t head = 0; head < p->num_heads; head++) {
            norm_back(job, row, head, head + 1, grad_weight);
        }
    }
}

static void prepare_rows_back(void *context, int64_t task, mha_worker *worker) {
    const prepare_job *job = context;
    const mha_prepare_heads *p = job->prepare;
    const int64_t end = mha_end_row(&job->rows, task), columns = p->norm.columns;
    double *grad_weight = job->partial == NULL ? NULL : job->partial + task * columns;
    for (int64_t c = 0; grad_weight != NULL && c < columns; c++) {
        grad_weight[c] = 0;
    }
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        const int64_t work = 2 * WORK_OF_NUMBER * (p->num_heads * p->head_dim + 1);
        if (mha_stop_after(&worker->checkpoint, work)) {
            return;
        }
        prepare_row_back(job, row, grad_weight);
    }
}

/* grad weight = what the tasks have, added up in their order. Task: a few columns. */
enum { COLUMNS_OF_A_TASK = 64 };

static void add_partial(void *context, int64_t task, mha_worker *worker) {
    const prepare_job *job = context;
    const mha_elementwise_kernels *kernels = mha_kernels_for(job->prepare->dtype)->elementwise;
    const int64_t columns = job->prepare->norm.columns, first = task * COLUMNS_OF_A_TASK;
    const int64_t end = mha_smaller(first + COLUMNS_OF_A_TASK, columns);
    for (int64_t c = first; c < end; c++) {
        double sum = 0;
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (job->rows.count + 1))) {
            return;
        }
        for (int64_t i = 0; i < job->rows.count; i++) {
            sum += job->partial[i * columns + c];
        }
        kernels->write(job->gradients->grad_weight, c, sum);
    }
}

/* Tasks of so many rows by the shapes alone, since the order of a sum hangs on them; at most some
 * hundred, since each has a sum of its own. */
static mha_row_tasks rows_of_backward(const mha_prepare_heads *p, int num_threads) {
    enum { MOST_TASKS = 128 };
    mha_row_tasks rows = mha_divide_rows(p->batch * p->length, p->num_heads * p->head_dim,
                                         2 * WORK_OF_NUMBER, num_threads);
    rows.rows_of_a_task =
        mha_larger(rows.rows_of_a_task, mha_divide_up(rows.rows, (int64_t)MOST_TASKS));
    rows.count = mha_divide_up(rows.rows, rows.rows_of_a_task);
    return rows;
}

mha_status mha_prepare_heads_backward(const mha_prepare_heads_gradients *g,
                                      mha_execution *execution) {
    const mha_prepare_heads *p = g->prepare;
    prepare_job job = {.prepare = p, .gradients = g};
    job.rows = rows_of_backward(p, execution->num_threads);
    if (g->grad_weight != NULL) {
        size_t bytes;
        void *piece;
        MHA_TRY(mha_multiply_sizes((size_t)job.rows.count, (size_t)p->norm.columns, &bytes));
        MHA_TRY(mha_multiply_sizes(bytes, sizeof(double), &bytes));
        MHA_TRY(mha_workspace_take(&execution->workspace, bytes, &piece));
        job.partial = piece;
    }
    MHA_TRY(mha_run_row_tasks(execution, &job.rows, prepare_rows_back, &job));
    if (g->grad_weight == NULL) {
        return MHA_OK;
    }
    const int64_t tasks = mha_divide_up(p->norm.columns, (int64_t)COLUMNS_OF_A_TASK);
    const int threads = mha_threads_for(tasks, (double)job.rows.count * (double)p->norm.columns,
                                        execution->num_threads);
    return mha_run_tasks(execution, tasks, threads, add_partial, &job);
}

static mha_status run_back(const mha_head_preparation_gradients *g, mha_execution *execution) {
    const mha_head_preparation *p = &g->forward;
    mha_rotary_table table;
    mha_prepare_heads prepare;
    MHA_TRY(see_step(p, true, execution, &table, &prepare));
    const mha_prepare_heads_gradients gradients = {
        .prepare = &prepare,
        .grad_to = rows_of(p, g->grad_output),
        .grad_from = rows_of(p, g->grad_x),
        .grad_weight = g->grad_norm,
    };
    return mha_prepare_heads_backward(&gradients, execution);
}

MHA_DEFINE_BACKWARD(head_preparation, mha_head_preparation_gradients, run_back)

/* Both absent, or one array seen alike. */
static bool are_same(const mha_tensor *positions, const mha_tensor *others) {
    if (positions == NULL || others == NULL || positions->data != others->data) {
        return positions == others;
    }
    for (int axis = 0; axis < positions->axes; axis++) {
        if (positions->shape[axis] != others->shape[axis] ||
            positions->strides[axis] != others->strides[axis]) {
            return false;
        }
    }
    return true;
}

mha_status mha_make_layer_tables(const mha_multi_head_attention *layer, bool back,
                                 mha_execution *execution, mha_layer_tables *tables) {
    const bool is_one = are_same(layer->positions, layer->key_positions);
    const int64_t length = is_one ? mha_larger(layer->query_len, layer->key_len) : layer->query_len;
    MHA_TRY(mha_make_rotary_table(layer->rotary, layer->dtype, layer->positions, length, back,
                                  execution, &tables->query));
    if (is_one) {
        tables->key = tables->query;
        return MHA_OK;
    }
    return mha_make_rotary_table(layer->rotary, layer->dtype, layer->key_positions, layer->key_len,
                                 back, execution, &tables->key);
}
