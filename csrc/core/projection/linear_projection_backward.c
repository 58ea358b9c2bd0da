/* Steps 1 and 5 of the figure backwards: each gradient is a product of matrices too. */
#include <string.h>

#include "core/base/run.h"
#include "core/projection/matmul.h"

/* 1. grad x (rows, in) = grad output (rows, out) @ weight^T (out, in). */
static mha_linear_projection of_x(const mha_linear_projection_gradients *g) {
    const mha_weight *weight = &g->projection->weight;
    const mha_weight transposed = {.data = weight->data,
                                   .in = weight->out,
                                   .out = weight->in,
                                   .in_stride = weight->out_stride,
                                   .out_stride = weight->in_stride,
                                   .storage = weight->storage};
    mha_linear_projection product = mha_contiguous_projection(
        g->projection->dtype, g->grad_output, g->projection->rows, &transposed, NULL, g->grad_x);
    product.x_stride = g->grad_output_stride;
    return product;
}

/* grad output as the right matrix of a product: (rows, out). */
static mha_weight grad_output_of(const mha_linear_projection_gradients *g) {
    return (mha_weight){.data = g->grad_output,
                        .in = g->projection->rows,
                        .out = g->projection->weight.out,
                        .in_stride = g->grad_output_stride,
                        .out_stride = (int64_t)mha_dtype_size(g->projection->dtype)};
}

/* 2. grad weight (in, out) = x^T (in, rows) @ grad output (rows, out). */
static mha_linear_projection of_weight(const mha_linear_projection_gradients *g) {
    const mha_linear_projection *p = g->projection;
    const mha_weight matrix = grad_output_of(g);
    mha_linear_projection product =
        mha_contiguous_projection(p->dtype, p->x, p->weight.in, &matrix, NULL, g->grad_weight);
    product.x_stride = p->x_stride;
    product.x_storage = p->x_storage;
    product.x_transposed = !p->x_transposed;
    return product;
}

/* 3. grad bias (1, out) = ones (1, rows) @ grad output (rows, out). */
static mha_linear_projection of_bias(const mha_linear_projection_gradients *g, const void *ones) {
    const mha_weight matrix = grad_output_of(g);
    return mha_contiguous_projection(g->projection->dtype, ones, 1, &matrix, NULL, g->grad_bias);
}

typedef struct row_job {
    const mha_linear_projection_gradients *gradients;
    mha_row_tasks rows;
    void *to;
    _Atomic bool found;
} row_job;

/* Whether grad weight has a number that is not finite. */
static void look_for_nan(void *context, int64_t task, mha_worker *worker) {
    row_job *job = context;
    const mha_linear_projection *p = job->gradients->projection;
    const int64_t item = (int64_t)mha_dtype_size(p->dtype), width = p->weight.out;
    const int64_t first = mha_first_row(&job->rows, task);
    const int64_t rows = mha_end_row(&job->rows, task) - first;
    const char *numbers = (const char *)job->gradients->grad_weight + first * width * item;
    if (mha_stop_after(&worker->checkpoint, rows * width)) {
        return;
    }
    if (!mha_kernels_for(p->dtype)->elementwise->all_finite(numbers, rows * width)) {
        job->found = true;
    }
}

/* x with zeros in the rows whose grad output is 0 throughout. */
static void copy_seen_rows(void *context, int64_t task, mha_worker *worker) {
    row_job *job = context;
    const mha_linear_projection_gradients *g = job->gradients;
    const mha_linear_projection *p = g->projection;
    const mha_elementwise_kernels *kernels = mha_kernels_for(p->dtype)->elementwise;
    const size_t width = (size_t)p->weight.in * mha_dtype_size(p->dtype);
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        char *to = (char *)job->to + (size_t)row * width;
        if (mha_stop_after(&worker->checkpoint,
                           MHA_WORK_OF_MOVING * (p->weight.in + p->weight.out + 1))) {
            return;
        }
        if (kernels->all_zero((const char *)g->grad_output + row * g->grad_output_stride,
                              p->weight.out)) {
            memset(to, 0, width);
        } else {
            kernels->read_row((const char *)p->x + row * p->x_stride, p->x_storage, to,
                              p->weight.in);
        }
    }
}

/* Pass 2 again where it gave NaN, without the rows of x that no output depends on. */
static mha_status skip_rows_without_gradient(const mha_linear_projection_gradients *g,
                                             mha_execution *execution) {
    const mha_linear_projection *p = g->projection;
    mha_linear_projection seen = *p;
    mha_linear_projection_gradients again = *g;
    row_job job = {
        .gradients = g,
        .rows = mha_divide_rows(p->weight.in, p->weight.out, 1, execution->num_threads),
    };
    size_t bytes;
    MHA_TRY(mha_run_row_tasks(execution, &job.rows, look_for_nan, &job));
    if ((!job.found && !execution->workspace.measures) || p->x_transposed) {
        return MHA_OK;
    }
    MHA_TRY(mha_multiply_sizes((size_t)p->weight.in, mha_dtype_size(p->dtype), &bytes));
    MHA_TRY(mha_multiply_sizes(bytes, (size_t)p->rows, &bytes));
    MHA_TRY(mha_workspace_take(&execution->workspace, bytes, &job.to));
    job.rows = mha_divide_rows(p->rows, p->weight.in, 1, execution->num_threads);
    MHA_TRY(mha_run_row_tasks(execution, &job.rows, copy_seen_rows, &job));
    seen.x = job.to;
    seen = mha_with_stored_rows(seen, MHA_AS_COMPUTED);
    again.projection = &seen;
    const mha_linear_projection product = of_weight(&again);
    return mha_linear_projection_forward(&product, 1, execution);
}

static mha_status run_steps(const mha_linear_projection_gradients *g, mha_execution *execution) {
    const mha_linear_projection *p = g->projection;
    if (g->grad_x != NULL) {
        const mha_linear_projection product = of_x(g);
        MHA_TRY(mha_linear_projection_forward(&product, 1, execution));
    }
    if (g->grad_weight != NULL) {
        const mha_linear_projection product = of_weight(g);
        MHA_TRY(mha_linear_projection_forward(&product, 1, execution));
    }
    if (g->grad_weight != NULL && g->skips_rows_without_gradient) {
        MHA_TRY(skip_rows_without_gradient(g, execution));
    }
    if (g->grad_bias != NULL && p->weight.out > 0) {
        size_t bytes;
        void *ones;
        MHA_TRY(mha_multiply_sizes((size_t)p->rows, mha_dtype_size(p->dtype), &bytes));
        MHA_TRY(mha_workspace_take(&execution->workspace, bytes, &ones));
        if (!execution->workspace.measures) {
            mha_kernels_for(p->dtype)->elementwise->fill(ones, 1, p->rows);
        }
        const mha_linear_projection product = of_bias(g, ones);
        MHA_TRY(mha_linear_projection_forward(&product, 1, execution));
    }
    return MHA_OK;
}

MHA_DEFINE_BACKWARD(linear_projection, mha_linear_projection_gradients, run_steps)
