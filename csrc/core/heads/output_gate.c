/* The gate before the output projection (Qiu et al. 2025, "Gated Attention for Large Language
 * Models", section 2), forward and backward. With s = sigmoid(logit):
 *
 *   gated = merged * s
 *   grad merged = grad gated * s,   grad logit = grad gated * merged * s (1 - s),
 *
 * the latter summed over the columns that share the logit. */
#include "core/base/run.h"
#include "kernels/kernels.h"
#include "mha/attention.h"

/* Logits whose sigmoids are made in one go. */
enum { MOST_LOGITS = 64 };

typedef struct gate_job {
    const mha_output_gate *gate;
    const mha_output_gate_gradients *gradients; /* NULL: forward */
    mha_row_tasks rows;
} gate_job;

/* The sigmoids of some logits, and their slopes s (1 - s); float32 takes half of the room. */
typedef struct sigmoids {
    double gates[MOST_LOGITS], slopes[MOST_LOGITS];
} sigmoids;

/* Some logits, each of so many columns, and where they begin. */
typedef struct part {
    int64_t count, columns, first_logit, first_column;
} part;

/* Number `at` of an array that a caller passed as what it is read or written as. */
static void *number_at(const gate_job *job, const void *numbers, int64_t at) {
    return (char *)numbers + at * (int64_t)mha_dtype_size(job->gate->dtype);
}

static void find_sigmoids(const gate_job *job, const part *p, sigmoids *s) {
    mha_kernels_for(job->gate->dtype)
        ->elementwise->sigmoid(number_at(job, job->gate->logits, p->first_logit), s->gates,
                               s->slopes, p->count);
}

/* to = from * s. */
static void multiply(const gate_job *job, const part *p, const sigmoids *s, const void *from,
                     void *to) {
    const mha_elementwise_kernels *kernels = mha_kernels_for(job->gate->dtype)->elementwise;
    from = number_at(job, from, p->first_column);
    to = number_at(job, to, p->first_column);
    if (!job->gate->by_head) {
        kernels->multiply_each(to, from, s->gates, p->count);
        return;
    }
    for (int64_t i = 0; i < p->count; i++) {
        kernels->multiply(number_at(job, to, i * p->columns), number_at(job, from, i * p->columns),
                          kernels->read(s->gates, i), p->columns);
    }
}

static void find_grad_logits(const gate_job *job, const part *p, const sigmoids *s) {
    const mha_elementwise_kernels *kernels = mha_kernels_for(job->gate->dtype)->elementwise;
    const void *grad_gated = number_at(job, job->gradients->grad_gated, p->first_column);
    const void *merged = number_at(job, job->gate->merged, p->first_column);
    void *grad_logits = number_at(job, job->gradients->grad_logits, p->first_logit);
    if (!job->gate->by_head) {
        kernels->multiply_each(grad_logits, grad_gated, merged, p->count);
        kernels->multiply_each(grad_logits, grad_logits, s->slopes, p->count);
        return;
    }
    for (int64_t i = 0; i < p->count; i++) {
        mha_compensated_sum sum = {0, 0};
        kernels->add_products(number_at(job, grad_gated, i * p->columns),
                              number_at(job, merged, i * p->columns), p->columns, &sum);
        kernels->write(grad_logits, i, mha_value_of(sum) * kernels->read(s->slopes, i));
    }
}

static void gate_part(const gate_job *job, const part *p) {
    const mha_output_gate_gradients *gradients = job->gradients;
    sigmoids s;
    find_sigmoids(job, p, &s);
    if (gradients == NULL) {
        multiply(job, p, &s, job->gate->merged, job->gate->gated);
        return;
    }
    if (gradients->grad_merged != NULL) {
        multiply(job, p, &s, gradients->grad_gated, gradients->grad_merged);
    }
    if (gradients->grad_logits != NULL) {
        find_grad_logits(job, p, &s);
    }
}

/* Task: some rows. */
static void gate_rows(void *context, int64_t task, mha_worker *worker) {
    const gate_job *job = context;
    const mha_output_gate *gate = job->gate;
    const int64_t width = gate->num_heads * gate->columns;
    const int64_t logits = gate->by_head ? gate->num_heads : width;
    const int64_t columns = gate->by_head ? gate->columns : 1;
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        for (int64_t at = 0; at < logits; at += MOST_LOGITS) {
            const part p = {mha_smaller(MOST_LOGITS, logits - at), columns, row * logits + at,
                            row * width + at * columns};
            if (mha_stop_after(&worker->checkpoint,
                               MHA_WORK_OF_MOVING * (p.count * (columns + 1)))) {
                return;
            }
            gate_part(job, &p);
        }
    }
}

static mha_status run(gate_job *job, mha_execution *execution) {
    const int64_t width = job->gate->num_heads * job->gate->columns;
    job->rows = mha_divide_rows(job->gate->rows, width, 1, execution->num_threads);
    return mha_run_row_tasks(execution, &job->rows, gate_rows, job);
}

mha_status mha_output_gate_forward(const mha_output_gate *gate, mha_execution *execution) {
    gate_job job = {.gate = gate};
    return run(&job, execution);
}

mha_status mha_output_gate_backward(const mha_output_gate_gradients *gradients,
                                    mha_execution *execution) {
    gate_job job = {.gate = &gradients->forward, .gradients = gradients};
    return run(&job, execution);
}
