/* Gates of heads (the mask variables of Michel et al. 2019): their gradients tell which heads
 * matter. Alone they run where the backward pass needs what they multiply; else the attention step
 * does it. */
#include "core/heads/head_gate.h"

#include "core/base/run.h"
#include "kernels/kernels.h"

typedef struct gate_job {
    const mha_head_gate *gate;
    const void *attended, *from;
    void *to, *grad_gates;
    mha_row_tasks rows;
} gate_job;

double mha_gate_of(mha_dtype dtype, const void *gates, int64_t head) {
    return gates == NULL ? 1 : mha_kernels_for(dtype)->elementwise->read(gates, head);
}

/* Byte offset of a head's columns in a row. */
static int64_t offset_of(const mha_head_gate *gate, int64_t row, int64_t head) {
    return (row * gate->num_heads + head) * gate->columns * (int64_t)mha_dtype_size(gate->dtype);
}

/* to = from * gate, some rows. */
static void multiply_rows(void *context, int64_t task, mha_worker *worker) {
    const gate_job *job = context;
    const mha_head_gate *gate = job->gate;
    const mha_elementwise_kernels *kernels = mha_kernels_for(gate->dtype)->elementwise;
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        const int64_t work = MHA_WORK_OF_MOVING * (gate->num_heads * gate->columns + 1);
        if (mha_stop_after(&worker->checkpoint, work)) {
            return;
        }
        for (int64_t head = 0; head < gate->num_heads; head++) {
            const int64_t at = offset_of(gate, row, head);
            kernels->multiply((char *)job->to + at, (const char *)job->from + at,
                              mha_gate_of(gate->dtype, gate->gates, head), gate->columns);
        }
    }
}

static mha_status multiply(gate_job *job, mha_execution *execution) {
    const int64_t width = job->gate->num_heads * job->gate->columns;
    job->rows = mha_divide_rows(job->gate->rows, width, 1, execution->num_threads);
    return mha_run_row_tasks(execution, &job->rows, multiply_rows, job);
}

mha_status mha_head_gate_forward(const mha_head_gate *gate, const void *attended, void *gated,
                                 mha_execution *execution) {
    gate_job job = {.gate = gate, .from = attended, .to = gated};
    return multiply(&job, execution);
}

/* grad gate = sum over rows and columns of grad gated * attended. Task: a head. */
static void sum_head(void *context, int64_t head, mha_worker *worker) {
    const gate_job *job = context;
    const mha_head_gate *gate = job->gate;
    const mha_elementwise_kernels *kernels = mha_kernels_for(gate->dtype)->elementwise;
    mha_compensated_sum sum = {0, 0};
    for (int64_t row = 0; row < gate->rows; row++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (gate->columns + 1))) {
            return;
        }
        const int64_t at = offset_of(gate, row, head);
        kernels->add_products((const char *)job->from + at, (const char *)job->attended + at,
                              gate->columns, &sum);
    }
    kernels->write(job->grad_gates, head, mha_value_of(sum));
}

mha_status mha_head_gate_backward(const mha_head_gate *gate, const mha_head_gate_gradients *to,
                                  mha_execution *execution) {
    gate_job job = {.gate = gate,
                    .attended = to->attended,
                    .from = to->grad_gated,
                    .to = to->grad_attended,
                    .grad_gates = to->grad_gates};
    if (to->grad_gates != NULL) {
        const double numbers = (double)gate->rows * (double)gate->num_heads * (double)gate->columns;
        const int threads = mha_threads_for(gate->num_heads, numbers, execution->num_threads);
        MHA_TRY(mha_run_tasks(execution, gate->num_heads, threads, sum_head, &job));
    }
    return to->grad_attended == NULL ? MHA_OK : multiply(&job, execution);
}
