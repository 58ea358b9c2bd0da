/* Rotary embeddings as a step alone. Inside multi_head_attention the same rows are rotated between
 * the projections and attention (prepare_heads.c). A task is some rows of all heads. */
#include "mha/rotary.h"

#include "core/base/run.h"
#include "core/heads/rotary_table.h"
#include "kernels/kernels.h"

typedef struct rotation_job {
    const mha_rotation *rotation;
    mha_rotary_table table;
    int64_t heads, length, head_dim;
    mha_row_tasks rows; /* of all heads of the batch */
    mha_pieces numbers; /* a row for each worker, where the output is of halves */
} rotation_job;

static void rotate_rows(void *context, int64_t task, mha_worker *worker) {
    const rotation_job *job = context;
    const mha_rotation *r = job->rotation;
    const mha_tensor *x = &r->x;
    const mha_elementwise_kernels *kernels = mha_kernels_for(r->dtype)->elementwise;
    const bool rounds = r->output_storage != MHA_AS_COMPUTED;
    const int64_t row_bytes =
        job->head_dim * (int64_t)mha_storage_size(r->dtype, r->output_storage);
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t i = mha_first_row(&job->rows, task); i < end; i++) {
        if (mha_stop_after(&worker->checkpoint, MHA_WORK_OF_MOVING * (job->head_dim + 1))) {
            return;
        }
        const char *from = (const char *)x->data + mha_leading_offset(x, x->axes - 1, i);
        char *to = (char *)r->output + i * row_bytes;
        void *numbers = rounds ? mha_piece(&job->numbers, worker->number) : to;
        kernels->read_row(from, x->storage, numbers, job->head_dim);
        mha_rotate_row(&job->table, r->dtype, i / job->length / job->heads, i % job->length,
                       numbers);
        if (rounds) {
            kernels->write_row(numbers, to, r->output_storage, job->head_dim);
        }
    }
}

static mha_status rotate(const mha_rotation *rotation, bool back, mha_execution *execution) {
    const mha_tensor *x = &rotation->x;
    rotation_job job = {.rotation = rotation,
                        .heads = mha_extent(x, 3),
                        .length = mha_extent(x, 2),
                        .head_dim = mha_extent(x, 1)};
    int64_t rows;
    if (rotation->rotary->dims > job.head_dim || rotation->rotary->dims % 2 != 0) {
        return MHA_INVALID_ARGUMENT;
    }
    MHA_TRY(mha_count_elements(x->shape, x->axes - 1, &rows));
    if (rows == 0) {
        return MHA_OK;
    }
    /* 1. Cosines and sines. */
    MHA_TRY(mha_make_rotary_table(rotation->rotary, rotation->dtype, &rotation->positions,
                                  job.length, back, execution, &job.table));
    /* 2. Every head is rotated by them. */
    job.rows = mha_divide_rows(rows, job.head_dim, 1, execution->num_threads);
    if (rotation->output_storage != MHA_AS_COMPUTED) {
        MHA_TRY(mha_workspace_take_pieces(&execution->workspace,
                                          (size_t)job.head_dim * mha_dtype_size(rotation->dtype),
                                          (size_t)job.rows.threads, &job.numbers));
    }
    return mha_run_row_tasks(execution, &job.rows, rotate_rows, &job);
}

static mha_status rotate_forth(const mha_rotation *rotation, mha_execution *execution) {
    return rotate(rotation, false, execution);
}

static mha_status rotate_back(const mha_rotation *rotation, mha_execution *execution) {
    return rotate(rotation, true, execution);
}

MHA_DEFINE_FORWARD(rotary, mha_rotation, rotate_forth)
MHA_DEFINE_BACKWARD(rotary, mha_rotation, rotate_back)
