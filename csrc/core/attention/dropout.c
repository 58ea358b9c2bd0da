/* Which attention weights dropout keeps, as an array: integers only, the same on every instruction
 * set. A task is some of the rows. */
#include "kernels/elementwise/dropout.h"

#include "core/base/run.h"
#include "kernels/kernels.h"
#include "mha/attention.h"

uint32_t mha_dropout_threshold(double p) { return (uint32_t)(65536.0 * p + 0.5); }

/* The eight kept bits of keys 8*group .. 8*group+7 of one query: bit i set = kept. */
static uint32_t kept_of_group(const mha_dropout *dropout, int64_t query, int64_t group) {
    const philox_words counter = {
        {(uint32_t)group, (uint32_t)query, (uint32_t)dropout->head, (uint32_t)dropout->batch}};
    const philox_words random = philox4x32(counter, dropout->seed, PHILOX_ROUNDS);
    uint32_t kept = 0;
    for (int key = 0; key < 8; key++) {
        const uint32_t sixteen = random.word[key / 2] >> (16 * (key % 2)) & 0xFFFF;
        kept |= (uint32_t)(sixteen >= dropout->threshold) << key;
    }
    return kept;
}

static void draw_row(const mha_dropout *dropout, int64_t query, int64_t key_len, uint8_t *kept,
                     mha_checkpoint *checkpoint) {
    enum { WORK_OF_EIGHT = 64 };
    uint32_t eight = 0;
    for (int64_t key = 0; key < key_len; key++) {
        const int64_t position = dropout->first_key + key;
        if (key == 0 || position % 8 == 0) {
            if (mha_stop_after(checkpoint, WORK_OF_EIGHT)) {
                return;
            }
            eight = kept_of_group(dropout, dropout->first_query + query, position / 8);
        }
        kept[key] = eight >> position % 8 & 1;
    }
}

typedef struct mask_job {
    const mha_dropout_mask *mask;
    mha_row_tasks rows;
} mask_job;

static void draw_rows(void *context, int64_t task, mha_worker *worker) {
    const mask_job *job = context;
    const mha_dropout_mask *mask = job->mask;
    const mha_dropout_offsets *offsets = &mask->offsets;
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        const mha_dropout dropout = {.threshold = mask->threshold,
                                     .seed = mask->seed,
                                     .head = offsets->head + row / mask->query_len % mask->heads,
                                     .batch = offsets->batch + row / mask->query_len / mask->heads,
                                     .first_query = offsets->query,
                                     .first_key = offsets->key};
        draw_row(&dropout, row % mask->query_len, mask->key_len, mask->kept + row * mask->key_len,
                 &worker->checkpoint);
    }
}

mha_status mha_dropout_mask_forward(const mha_dropout_mask *mask, mha_execution *execution) {
    const int64_t shape[] = {mask->batch, mask->heads, mask->query_len};
    mask_job job = {.mask = mask};
    int64_t rows;
    MHA_TRY(mha_count_elements(shape, 3, &rows));
    job.rows = mha_divide_rows(rows, mask->key_len, 4, execution->num_threads);
    return mha_run_row_tasks(execution, &job.rows, draw_rows, &job);
}
