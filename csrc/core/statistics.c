/* What the gradients need to know of each row's softmax, from its log-sum-exp alone: so a part of
 * the keys is differentiated by the result over all of them. A task is some of the rows. */
#include "../kernels/kernels.h"
#include "mha/attention.h"
#include "run.h"

typedef struct statistics_job {
    const mha_attention_statistics *statistics;
    mha_row_tasks rows;
} statistics_job;

static void store(mha_dtype dtype, void *numbers, int64_t row, double number) {
    if (dtype == MHA_FLOAT32) {
        ((float *)numbers)[row] = (float)number;
    } else {
        ((double *)numbers)[row] = number;
    }
}

static double rounded(mha_dtype dtype, double number) {
    return dtype == MHA_FLOAT32 ? (double)(float)number : number;
}

/* e^x of a rounding, which is small unless lse itself knows no better. */
static double exp_of_rounding(double x) {
    const double most = 0.5, nearby = x > most ? most : x < -most ? -most : x;
    double sum = 1;
    for (int i = 12; i > 0; i--) {
        sum = 1 + sum * nearby / i;
    }
    return sum;
}

/* lse = origin * unit + log(denominator): the origin as near as the element type comes, and the
 * denominator, close to 1, has what that rounds. A row that sees no key has the denominator 0. */
static void state_rows(void *context, int64_t task, mha_worker *worker) {
    enum { WORK_OF_ROW = 64 };
    const statistics_job *job = context;
    const mha_attention_statistics *s = job->statistics;
    const double unit = mha_score_unit(s->scale, s->softcap);
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, WORK_OF_ROW)) {
            return;
        }
        const double lse = s->lse[row], origin = rounded(s->dtype, lse / unit);
        const double rest = exp_of_rounding(lse - origin * unit);
        const bool is_empty = lse == -__builtin_inf();
        store(s->dtype, s->origin, row, origin);
        store(s->dtype, s->denominator, row, is_empty ? 0 : origin - origin == 0 ? rest : 1);
    }
}

mha_status mha_attention_statistics_forward(const mha_attention_statistics *statistics,
                                            mha_execution *execution) {
    statistics_job job = {.statistics = statistics};
    job.rows = mha_divide_rows(statistics->rows, 1, 64, execution->num_threads);
    return mha_run_row_tasks(execution, &job.rows, state_rows, &job);
}
