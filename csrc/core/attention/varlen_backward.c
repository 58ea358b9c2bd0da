/* The gradients of a ragged batch: those of its sequences, each planned as if it were alone, in one
 * job. So every sum has the order that it has alone; what one number of alibi, relative_bias or
 * sinks gets from several sequences is added up in their order. */
#include "core/attention/gradient_job.h"
#include "core/attention/per_head_backward.h"
#include "core/attention/varlen.h"
#include "core/base/run.h"

/* A sequence of a ragged batch as a job of its own; not to be copied. */
typedef struct sequence_job {
    mha_sequence sequence;
    mha_attention_gradients gradients;
    mha_gradient_job job;
} sequence_job;

/* A ragged batch: the tasks of all sequences, one sequence after the other. */
typedef struct ragged_job {
    const mha_varlen_gradients *gradients;
    mha_gradient_job *sequences; /* (sequences,), without gradients, attention and scratch */
    int64_t *first_task;         /* (sequences + 1,) */
    mha_gradient_job all;        /* the largest sizes of scratch, and the pieces of that size */
    mha_pieces places;           /* of each worker: the sequence that it is at */
    int64_t num_tasks;
    double operations, sums_of_a_head;
} ragged_job;

static void begin_sequences(const mha_varlen_gradients *gradients, sequence_job *place) {
    mha_begin_sequences(gradients->varlen, &place->sequence);
    place->gradients = gradients->all;
    place->gradients.attention = &place->sequence.attention;
    place->job = (mha_gradient_job){.gradients = &place->gradients};
}

static void move_to_sequence(const mha_varlen_gradients *gradients, int64_t number,
                             sequence_job *place) {
    const mha_varlen_attention *varlen = gradients->varlen;
    const mha_attention_gradients *all = &gradients->all;
    mha_attention_gradients *one = &place->gradients;
    const int64_t *queries = varlen->query_starts, *keys = varlen->key_starts;
    const int64_t item = (int64_t)mha_dtype_size(varlen->all.dtype);
    mha_move_to_sequence(varlen, number, &place->sequence);
    mha_move_to_rows(&all->grad_output, queries, number, &one->grad_output);
    mha_move_to_rows(&all->grad_query, queries, number, &one->grad_query);
    mha_move_to_rows(&all->grad_key, keys, number, &one->grad_key);
    mha_move_to_rows(&all->grad_value, keys, number, &one->grad_value);
    one->grad_lse =
        all->grad_lse == NULL ? NULL : (const char *)all->grad_lse + queries[number] * item;
}

/* The worker's place, with the job of a sequence. */
static const mha_gradient_job *job_of_sequence(const void *context, int64_t number,
                                               mha_worker *worker) {
    const ragged_job *ragged = context;
    sequence_job *place = mha_piece(&ragged->places, worker->number);
    mha_gradient_job *job = &place->job;
    move_to_sequence(ragged->gradients, number, place);
    *job = ragged->sequences[number];
    job->gradients = &place->gradients;
    job->attention = &place->sequence.attention;
    job->scratch = ragged->all.scratch;
    job->keys = ragged->all.keys;
    job->values = ragged->all.values;
    job->grad_keys = ragged->all.grad_keys;
    job->grad_values = ragged->all.grad_values;
    job->threads = ragged->all.threads;
    return job;
}

/* Task: one chunk of the keys of a key head of one sequence. */
static void differentiate_sequence(void *context, int64_t task, mha_worker *worker) {
    const ragged_job *ragged = context;
    const int64_t sequences = ragged->gradients->varlen->sequences;
    const int64_t number = mha_sequence_of_task(ragged->first_task, sequences, task);
    mha_differentiate_chunk((void *)job_of_sequence(ragged, number, worker),
                            task - ragged->first_task[number], worker);
}

static void keep_larger(size_t *largest, size_t size) {
    *largest = size > *largest ? size : *largest;
}

/* Plans each sequence as if it were alone, takes what its tasks leave for each other, and sums up.
 * Nothing is written where the call only measures. */
static mha_status plan_sequences(ragged_job *ragged, mha_workspace *workspace) {
    const int64_t sequences = ragged->gradients->varlen->sequences;
    sequence_job place;
    int64_t tasks;
    begin_sequences(ragged->gradients, &place);
    for (int64_t number = 0; number <= sequences; number++) {
        if (!workspace->measures) {
            ragged->first_task[number] = ragged->num_tasks;
        }
        if (number == sequences) {
            break;
        }
        mha_gradient_job *job = &place.job;
        move_to_sequence(ragged->gradients, number, &place);
        *job = (mha_gradient_job){.gradients = &place.gradients};
        MHA_TRY(mha_plan_gradients(job));
        MHA_TRY(mha_take_gradient_sums(job, workspace));
        MHA_TRY(mha_count_gradient_tasks(job, &tasks));
        ragged->operations +=
            2.5 * mha_attention_operations(job->attention, job->batch * job->heads);
        ragged->sums_of_a_head += mha_sums_of_a_head(job);
        keep_larger(&ragged->all.scratch_size, job->scratch_size);
        keep_larger(&ragged->all.keys_size, job->keys_size);
        keep_larger(&ragged->all.values_size, job->values_size);
        ragged->all.copies_keys |= job->copies_keys;
        ragged->all.joins_sums |= job->joins_sums;
        if (!workspace->measures) {
            ragged->sequences[number] = *job;
        }
        if (__builtin_add_overflow(ragged->num_tasks, tasks, &ragged->num_tasks)) {
            return MHA_SIZE_OVERFLOW;
        }
    }
    return MHA_OK;
}

static mha_status run_steps(const mha_varlen_gradients *gradients, mha_execution *execution) {
    const mha_varlen_attention *varlen = gradients->varlen;
    mha_workspace *workspace = &execution->workspace;
    ragged_job ragged = {.gradients = gradients, .all = {.gradients = &gradients->all}};
    void *sequences, *first_task;
    MHA_TRY(mha_take_for_sequences(varlen, sizeof *ragged.sequences, workspace, &sequences));
    MHA_TRY(mha_take_for_sequences(varlen, sizeof *ragged.first_task, workspace, &first_task));
    ragged.sequences = sequences;
    ragged.first_task = first_task;
    MHA_TRY(plan_sequences(&ragged, workspace));
    const int threads = mha_threads_for(INT64_MAX, ragged.operations, execution->num_threads);
    ragged.all.threads = threads;
    MHA_TRY(mha_take_gradient_scratch(&ragged.all, (size_t)threads, workspace));
    MHA_TRY(mha_workspace_take_pieces(workspace, sizeof(sequence_job),
                                      (size_t)execution->num_threads, &ragged.places));
    for (int worker = 0; worker < execution->num_threads && !workspace->measures; worker++) {
        begin_sequences(gradients, mha_piece(&ragged.places, worker));
    }
    if (mha_wants_more_than_bias(&ragged.all)) {
        MHA_TRY(
            mha_run_tasks(execution, ragged.num_tasks, threads, differentiate_sequence, &ragged));
    }
    const mha_gradient_jobs jobs = {varlen->sequences,
                                    mha_kernels_for(varlen->all.dtype)->elementwise,
                                    ragged.sums_of_a_head, job_of_sequence, &ragged};
    return mha_per_head_backward(&jobs, &gradients->all, execution);
}

MHA_DEFINE_BACKWARD(scaled_dot_product_attention_varlen, mha_varlen_gradients, run_steps)
