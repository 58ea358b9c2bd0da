/* The figure sequence by sequence: what one thread projects is still in its cache when it attends
 * and projects again, the workspace does not grow with the batch, and the threads meet once. The
 * bits are those of all sequences at once, since no row's sums depend on the rows beside it. */
#include "core/layer/by_sequences.h"

#include <stdatomic.h>

#include "core/base/run.h"

/* Rows of query or key that one task takes: enough for the tiles of the products, and as many as
 * repay reading the weights again; few enough to stay in the second cache. */
enum { FEWEST_ROWS = 96, MOST_ROWS = 512 };

typedef struct sequences_job {
    const mha_multi_head_attention *layer;
    mha_sequence_groups groups;
    mha_layer_steps steps;
    size_t workspace_size;
    mha_pieces workspaces; /* of each worker */
    atomic_int failure;    /* the first status that is not MHA_OK */
} sequences_job;

static bool saves_steps(const mha_saved_steps *saved) {
    return saved->projected_query != NULL || saved->projected_key != NULL ||
           saved->projected_value != NULL || saved->merged != NULL ||
           saved->unprepared_query != NULL || saved->unprepared_key != NULL || saved->gate != NULL;
}

static bool is_packed(const mha_multi_head_attention *l) {
    return l->W_q.format != NULL && l->W_k.format != NULL && l->W_v.format != NULL &&
           l->W_o.format != NULL && (l->W_g.out == 0 || l->W_g.format != NULL);
}

static double numbers_of(const mha_weight *weight) {
    return (double)weight->in * (double)weight->out;
}

/* Multiply-adds of the whole layer. */
static double operations_of(const mha_multi_head_attention *l, int64_t items) {
    const double queries = (double)items * (double)l->query_len;
    const double keys = (double)items * (double)l->key_len;
    return queries * (numbers_of(&l->W_q) + numbers_of(&l->W_o) + numbers_of(&l->W_g)) +
           keys * (numbers_of(&l->W_k) + numbers_of(&l->W_v)) +
           queries * (double)l->key_len * (double)(l->W_q.out + l->W_o.in);
}

/* Not where a pullback wants the steps, with a cache, where each group would pack the weights or
 * make the table of rotations again, and where so few groups are left that threads would wait for
 * the last. */
mha_sequence_groups mha_plan_sequence_groups(const mha_multi_head_attention *l, int num_threads) {
    enum { TASKS_A_THREAD = 2, MANY_TASKS = 8 };
    const mha_sequence_groups none = {0};
    if (l->batch_axes == 0 || !is_packed(l) || saves_steps(&l->saved) || l->rotary != NULL ||
        l->cache.key.axes > 0) {
        return none;
    }
    const int64_t outer = l->batch_shape[0];
    int64_t inner, rows, all_rows;
    if (mha_count_elements(l->batch_shape + 1, l->batch_axes - 1, &inner) != MHA_OK ||
        __builtin_mul_overflow(inner, mha_larger(l->query_len, l->key_len), &rows) ||
        __builtin_mul_overflow(rows, outer, &all_rows) || rows == 0 || rows > MOST_ROWS) {
        return none;
    }
    const int64_t sequences = mha_divide_up((int64_t)FEWEST_ROWS, rows);
    const int64_t count = mha_divide_up(outer, sequences);
    const int threads = mha_threads_for(count, operations_of(l, outer * inner), num_threads);
    const bool is_even = outer % sequences == 0 && count % threads == 0;
    const int64_t wanted = (int64_t)threads * (is_even ? TASKS_A_THREAD : MANY_TASKS);
    return count < wanted ? none : (mha_sequence_groups){sequences, inner, count, threads};
}

/* Of what is read, or written: whoever passed it knows which. */
static void *behind(const void *rows, int64_t count, size_t bytes) {
    return rows == NULL ? NULL : (char *)rows + count * (int64_t)bytes;
}

/* The sequences from `first` on of what has the batch axes in front. */
static void move_tensor(mha_tensor *tensor, int64_t first, int64_t count) {
    if (tensor->data != NULL) {
        tensor->data = (char *)tensor->data + first * tensor->strides[0];
        tensor->shape[0] = count;
    }
}

/* The layer over the sequences of one group, and its options. */
static void fill_group(const sequences_job *job, int64_t group, mha_multi_head_attention *part,
                       mha_attention_options *options) {
    const mha_multi_head_attention *l = job->layer;
    const int64_t first = group * job->groups.sequences;
    const int64_t count = mha_smaller(job->groups.sequences, l->batch_shape[0] - first);
    const int64_t queries = first * job->groups.inner * l->query_len;
    const int64_t keys = first * job->groups.inner * l->key_len;
    const size_t item = mha_dtype_size(l->dtype);
    *part = *l;
    *options = *l->options;
    part->options = options;
    part->batch_shape[0] = count;
    part->query =
        behind(l->query, queries * l->W_q.in, mha_storage_size(l->dtype, l->query_storage));
    part->key = behind(l->key, keys * l->W_k.in, mha_storage_size(l->dtype, l->key_storage));
    part->value = behind(l->value, keys * l->W_v.in, mha_storage_size(l->dtype, l->value_storage));
    part->output =
        behind(l->output, queries * l->W_o.out, mha_storage_size(l->dtype, l->output_storage));
    part->weights = behind(l->weights, queries * l->num_heads * l->key_len, item);
    part->lse = behind(l->lse, queries * l->num_heads, item);
    part->maximum = behind(l->maximum, queries * l->num_heads, item);
    part->denominator = behind(l->denominator, queries * l->num_heads, item);
    move_tensor(&options->mask, first, count);
    options->block_mask.first_batch += first * job->groups.inner;
    move_tensor(&options->bias, first, count);
    move_tensor(&options->key_lengths, first, count);
    move_tensor(&options->query_offset, first, count);
    options->dropout_offsets.batch += first * job->groups.inner;
}

/* What a task's own execution polls: the checkpoint of the thread that runs it. */
static int poll_worker(void *context) { return mha_ask_checkpoint(context); }

/* Task: the figure for the sequences of one group. */
static void run_group(void *context, int64_t task, mha_worker *worker) {
    sequences_job *job = context;
    mha_multi_head_attention part;
    mha_attention_options options;
    mha_execution execution = {.num_threads = 1, .cancel = {poll_worker, &worker->checkpoint}};
    fill_group(job, task, &part, &options);
    mha_workspace_begin(&execution.workspace, mha_piece(&job->workspaces, worker->number),
                        job->workspace_size);
    const mha_status status = job->steps(&part, &execution);
    mha_workspace_end(&execution.workspace);
    int none = MHA_OK;
    if (status != MHA_OK) {
        atomic_compare_exchange_strong(&job->failure, &none, (int)status);
    }
}

/* Of the first group, which is no smaller than others. */
static mha_status measure_group(sequences_job *job) {
    mha_execution measuring = mha_measuring_execution(1);
    mha_multi_head_attention part;
    mha_attention_options options;
    fill_group(job, 0, &part, &options);
    MHA_TRY(job->steps(&part, &measuring));
    job->workspace_size = measuring.workspace.most;
    return MHA_OK;
}

mha_status mha_run_sequence_groups(const mha_multi_head_attention *layer,
                                   const mha_sequence_groups *groups, mha_layer_steps steps,
                                   mha_execution *execution) {
    sequences_job job = {.layer = layer, .groups = *groups, .steps = steps};
    MHA_TRY(measure_group(&job));
    MHA_TRY(mha_workspace_take_pieces(&execution->workspace, job.workspace_size,
                                      (size_t)groups->threads, &job.workspaces));
    MHA_TRY(mha_run_tasks(execution, groups->count, groups->threads, run_group, &job));
    return (mha_status)atomic_load(&job.failure);
}
