/* Attention over a ragged batch: its sequences, each planned as if it were alone, in one job. */
#include "core/attention/attention_job.h"
#include "core/attention/attention_rows.h"
#include "core/attention/few_queries.h"
#include "core/attention/varlen.h"
#include "core/base/run.h"

/* A ragged batch: the tasks of all sequences, one sequence after the other. */
typedef struct ragged_job {
    const mha_varlen_attention *varlen;
    mha_attention_job *sequences; /* (sequences,), without attention and pieces */
    int64_t *first_task;          /* (sequences + 1,) */
    mha_attention_job all;        /* the largest sizes, and the pieces of that size */
    size_t few_scratch_size;      /* of the kernel for few queries */
    mha_pieces few_scratch;
    mha_pieces places; /* of each worker: the sequence that it is at */
    int64_t num_tasks;
    double operations;
} ragged_job;

/* Task: some consecutive blocks of one head of one sequence; or of few queries, a key head of it.
 */
static void attend_sequence(void *context, int64_t task, mha_worker *worker) {
    const ragged_job *job = context;
    mha_sequence *sequence = mha_piece(&job->places, worker->number);
    const int64_t number = mha_sequence_of_task(job->first_task, job->varlen->sequences, task);
    const int64_t own_task = task - job->first_task[number];
    mha_move_to_sequence(job->varlen, number, sequence);
    if (mha_has_few_queries(&sequence->attention)) {
        mha_run_few_task(&sequence->attention, own_task, &job->few_scratch, &job->all.scratch,
                         worker);
        return;
    }
    mha_attention_job own = job->sequences[number];
    own.attention = &sequence->attention;
    own.key_heads_before = number * mha_extent(&own.attention->key, 3);
    own.scratch = job->all.scratch;
    own.keys = job->all.keys;
    own.values = job->all.values;
    mha_attend_query_blocks(&own, own_task, worker);
}

static void keep_larger(size_t *largest, size_t size) {
    *largest = size > *largest ? size : *largest;
}

/* Plans a sequence as if it were alone, and adds it to what all take. */
static mha_status plan_sequence(ragged_job *job, const mha_attention *sequence, int num_threads,
                                mha_attention_job *own, int64_t *num_tasks) {
    mha_few_tasks few;
    int threads;
    if (mha_has_few_queries(sequence)) {
        MHA_TRY(mha_plan_few_tasks(sequence, &few));
        *num_tasks = few.count;
        job->operations += few.operations;
        keep_larger(&job->few_scratch_size, few.scratch_size);
        keep_larger(&job->all.scratch_size, few.block_scratch_size);
        *own = (mha_attention_job){.attention = NULL};
        return MHA_OK;
    }
    MHA_TRY(mha_plan_attention(sequence, num_threads, own, num_tasks, &threads));
    job->operations += mha_attention_operations(sequence, own->batch_heads);
    keep_larger(&job->all.scratch_size, own->scratch_size);
    keep_larger(&job->all.keys_size, own->keys_size);
    keep_larger(&job->all.values_size, own->values_size);
    job->all.copies_heads |= own->copies_heads;
    return MHA_OK;
}

/* Nothing is written where the call only measures. */
static mha_status plan_sequences(ragged_job *job, const mha_execution *execution) {
    const bool writes = !execution->workspace.measures;
    mha_sequence sequence;
    mha_attention_job own;
    int64_t tasks;
    mha_begin_sequences(job->varlen, &sequence);
    for (int64_t number = 0; number < job->varlen->sequences; number++) {
        mha_move_to_sequence(job->varlen, number, &sequence);
        MHA_TRY(plan_sequence(job, &sequence.attention, execution->num_threads, &own, &tasks));
        if (writes) {
            job->sequences[number] = own;
            job->first_task[number] = job->num_tasks;
        }
        if (__builtin_add_overflow(job->num_tasks, tasks, &job->num_tasks)) {
            return MHA_SIZE_OVERFLOW;
        }
    }
    if (writes) {
        job->first_task[job->varlen->sequences] = job->num_tasks;
    }
    return MHA_OK;
}

static mha_status run_steps(const mha_varlen_attention *varlen, mha_execution *execution) {
    mha_workspace *workspace = &execution->workspace;
    ragged_job job = {.varlen = varlen};
    void *sequences, *first_task;
    if (mha_nothing_to_attend(&varlen->all)) {
        return MHA_OK;
    }
    MHA_TRY(mha_take_for_sequences(varlen, sizeof *job.sequences, workspace, &sequences));
    MHA_TRY(mha_take_for_sequences(varlen, sizeof *job.first_task, workspace, &first_task));
    job.sequences = sequences;
    job.first_task = first_task;
    MHA_TRY(plan_sequences(&job, execution));
    const int threads = mha_threads_for(job.num_tasks, job.operations, execution->num_threads);
    MHA_TRY(mha_take_attention_memory(&job.all, threads, workspace));
    MHA_TRY(mha_workspace_take_pieces(workspace, job.few_scratch_size, (size_t)threads,
                                      &job.few_scratch));
    MHA_TRY(
        mha_workspace_take_pieces(workspace, sizeof(mha_sequence), (size_t)threads, &job.places));
    for (int worker = 0; worker < threads && !workspace->measures; worker++) {
        mha_begin_sequences(varlen, mha_piece(&job.places, worker));
    }
    return mha_run_tasks(execution, job.num_tasks, threads, attend_sequence, &job);
}

MHA_DEFINE_FORWARD(scaled_dot_product_attention_varlen, mha_varlen_attention, run_steps)
