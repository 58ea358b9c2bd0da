/* Between a row's log-sum-exp and what softmax keeps of it, its maximum and denominator: so a part
 * of the keys is joined with others, and differentiated by the result over all of them. A task is
 * some of the rows. */
#include "core/base/run.h"
#include "kernels/kernels.h"
#include "mha/attention.h"

enum { WORK_OF_ROW = 64 };

typedef struct statistics_job {
    const mha_attention_statistics *statistics;
    const mha_elementwise_kernels *kernels;
    mha_row_tasks rows;
} statistics_job;

/* e^x of a rounding, which is small unless lse itself knows no better. */
static double exp_of_rounding(double x) {
    const double most = 0.5, nearby = x > most ? most : x < -most ? -most : x;
    double sum = 1;
    for (int i = 12; i > 0; i--) {
        sum = 1 + sum * nearby / i;
    }
    return sum;
}

/* lse = maximum * unit + log(denominator): the maximum as near as the element type comes, and the
 * denominator, close to 1, has what that rounds. A row that sees no key has the denominator 0. */
static void state_rows(void *context, int64_t task, mha_worker *worker) {
    const statistics_job *job = context;
    const mha_attention_statistics *s = job->statistics;
    const double unit = mha_score_unit(s->scale, s->softcap);
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, WORK_OF_ROW)) {
            return;
        }
        const double lse = s->lse[row];
        job->kernels->write(s->maximum, row, lse / unit);
        const double maximum = job->kernels->read(s->maximum, row);
        const double rest = exp_of_rounding(lse - maximum * unit);
        const bool is_empty = lse == -__builtin_inf();
        job->kernels->write(s->denominator, row, is_empty ? 0 : maximum - maximum == 0 ? rest : 1);
    }
}

mha_status mha_attention_statistics_forward(const mha_attention_statistics *statistics,
                                            mha_execution *execution) {
    statistics_job job = {
        .statistics = statistics,
        .kernels = mha_kernels_for(statistics->dtype)->elementwise,
    };
    job.rows = mha_divide_rows(statistics->rows, 1, WORK_OF_ROW, execution->num_threads);
    return mha_run_row_tasks(execution, &job.rows, state_rows, &job);
}

/* log of a normal number above 0, within 2 ulp, the same on every machine: x = 2^e m, with m near 1
 * and log m = 2 atanh((m - 1) / (m + 1)). */
static double log_of(double x) {
    const double ln2_high = 0x1.62e42fefa3800p-1, ln2_low = 0x1.ef35793c76730p-45;
    const double root_half = 0x1.6a09e667f3bcdp-1;
    uint64_t pattern;
    memcpy(&pattern, &x, sizeof pattern);
    double e = (double)((int64_t)(pattern >> 52) - 1022), m;
    pattern = (pattern & MHA_MANTISSA_BITS) | (uint64_t)1022 << 52; /* in [1/2, 1) */
    memcpy(&m, &pattern, sizeof m);
    if (m < root_half) {
        m *= 2;
        e -= 1;
    }
    const double s = (m - 1) / (m + 1), square = s * s;
    double sum = 0;
    for (int odd = 23; odd > 1; odd -= 2) {
        sum = square * (sum + 1.0 / odd);
    }
    return e * ln2_high + (2 * s + (2 * s * sum + e * ln2_low));
}

typedef struct exact_lse_job {
    const mha_exact_lse *exact;
    const mha_elementwise_kernels *kernels;
    double unit;
    int64_t heads, query_len;
    mha_row_tasks rows;
} exact_lse_job;

/* As lse_of in kernels/attention.inc. */
static double exact_lse(const exact_lse_job *job, int64_t row) {
    const mha_attention *a = job->exact->attention;
    const double maximum = job->kernels->read(a->maximum, row);
    const double denominator = job->kernels->read(a->denominator, row);
    const mha_head_numbers *sinks = &a->options->sinks;
    if (denominator == 0 || denominator == __builtin_inf()) {
        const int64_t head = row / job->query_len % job->heads;
        return sinks->data == NULL ? (denominator == 0 ? -__builtin_inf() : denominator)
                                   : job->kernels->read(sinks->data, head);
    }
    return denominator == denominator ? maximum * job->unit + log_of(denominator) : denominator;
}

static void write_rows(void *context, int64_t task, mha_worker *worker) {
    const exact_lse_job *job = context;
    const int64_t end = mha_end_row(&job->rows, task);
    for (int64_t row = mha_first_row(&job->rows, task); row < end; row++) {
        if (mha_stop_after(&worker->checkpoint, WORK_OF_ROW)) {
            return;
        }
        job->exact->lse[row] = exact_lse(job, row);
    }
}

mha_status mha_exact_lse_forward(const mha_exact_lse *exact, mha_execution *execution) {
    const mha_attention *a = exact->attention;
    int64_t rows;
    exact_lse_job job = {
        .exact = exact,
        .kernels = mha_kernels_for(a->dtype)->elementwise,
        .unit = mha_score_unit(a->options->scale, a->options->softcap),
        .heads = mha_extent(&a->query, 3),
        .query_len = mha_extent(&a->query, 2),
    };
    MHA_TRY(mha_count_elements(a->query.shape, a->query.axes - 1, &rows));
    job.rows = mha_divide_rows(rows, 1, WORK_OF_ROW, execution->num_threads);
    return mha_run_row_tasks(execution, &job.rows, write_rows, &job);
}
