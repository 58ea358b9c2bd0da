/* Step 4 of the figure. Inside multi_head_attention the attention step writes each head's columns
 * in place (the strides of split_heads), so that merging costs nothing; this is the step alone. A
 * task is some of the tokens. */
#include <string.h>

#include "core/base/run.h"
#include "mha/attention.h"

typedef struct merge_job {
    const mha_merge_heads *merge;
    int64_t width; /* of a token: heads * d */
    mha_row_tasks tokens;
} merge_job;

/* A token's columns of one head after the other, side by side. `item` is a constant. */
static inline void merge_token(const mha_tensor *heads, const char *token, const size_t item,
                               char *to, mha_checkpoint *checkpoint) {
    const int64_t num_heads = mha_extent(heads, 3), columns = mha_extent(heads, 1);
    const int64_t step = mha_stride(heads, 1);
    enum { CHECKED_COLUMNS = 1 << 14 };
    for (int64_t head = 0; head < num_heads; head++) {
        const char *from = token + head * mha_stride(heads, 3);
        for (int64_t first = 0; first < columns; first += CHECKED_COLUMNS) {
            const int64_t end = first + mha_smaller(columns - first, CHECKED_COLUMNS);
            if (mha_stop_after(checkpoint, MHA_WORK_OF_MOVING * (end - first))) {
                return;
            }
            for (int64_t column = first; column < end; column++) {
                memcpy(to, from + column * step, item);
                to += item;
            }
        }
    }
}

static void merge_tokens(void *context, int64_t task, mha_worker *worker) {
    const merge_job *job = context;
    const mha_tensor *heads = &job->merge->heads;
    const int64_t length = mha_extent(heads, 2);
    const int64_t item = (int64_t)mha_dtype_size(job->merge->dtype);
    const int64_t end = mha_end_row(&job->tokens, task);
    for (int64_t i = mha_first_row(&job->tokens, task); i < end; i++) {
        const char *token = (const char *)heads->data +
                            mha_leading_offset(heads, heads->axes - 3, i / length) +
                            i % length * mha_stride(heads, 2);
        char *to = (char *)job->merge->merged + i * job->width * item;
        if (item == sizeof(float)) {
            merge_token(heads, token, sizeof(float), to, &worker->checkpoint);
        } else {
            merge_token(heads, token, sizeof(double), to, &worker->checkpoint);
        }
    }
}

mha_status mha_merge_heads_forward(const mha_merge_heads *merge, mha_execution *execution) {
    const mha_tensor *heads = &merge->heads;
    merge_job job = {.merge = merge};
    int64_t batch, tokens;
    MHA_TRY(mha_count_elements(heads->shape, heads->axes - 3, &batch));
    if (__builtin_mul_overflow(batch, mha_extent(heads, 2), &tokens) ||
        __builtin_mul_overflow(mha_extent(heads, 3), mha_extent(heads, 1), &job.width)) {
        return MHA_SIZE_OVERFLOW;
    }
    job.tokens = mha_divide_rows(tokens, job.width, 1, execution->num_threads);
    return mha_run_row_tasks(execution, &job.tokens, merge_tokens, &job);
}
