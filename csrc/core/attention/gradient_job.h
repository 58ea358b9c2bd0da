/* The gradients of attention as a job: what all its tasks and passes read. */
#ifndef MHA_GRADIENT_JOB_H
#define MHA_GRADIENT_JOB_H

#include <stdatomic.h>

#include "core/attention/attention_rows.h"
#include "core/attention/known_blocks.h"
#include "threads/pool.h"

typedef struct mha_gradient_job {
    const mha_attention_gradients *gradients;
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t batch, heads, kv_heads, group; /* group: heads on one key head */
    int64_t query_blocks;
    int64_t chunks, chunk_keys;
    /* (batch, heads, query_blocks): bit c is set when chunk c is done with the block. */
    _Atomic uint64_t *done;
    bool bias_has_own_pass; /* tasks share it */
    mha_row_sums *row_sums; /* (batch, heads, query_len), or NULL: per_head_backward.c */
    mha_pieces diagonals;   /* (batch, heads, chunks) of `most_diagonals`, or first NULL */
    int64_t most_diagonals;
    int threads;            /* that take the tasks in turns */
    bool prefetches;        /* prefetches what comes next */
    bool comes_from_memory; /* caches do not hold what the call reads and writes */
    bool copies_keys;       /* and values, side by side */
    bool joins_sums;        /* over so many queries that they are chains of chains */
    mha_known_visibility known;
    mha_pieces scratch; /* scratch_size bytes for each worker: the kernel's */
    mha_pieces keys, values, grad_keys, grad_values; /* one for each worker: copies, own sums */
    size_t scratch_size, keys_size, values_size;
} mha_gradient_job;

/* One job, or one for each sequence of a ragged batch, for a pass over all of them. */
typedef struct mha_gradient_jobs {
    int64_t count;
    const mha_elementwise_kernels *kernels;
    double sums_of_a_head; /* that all jobs leave: per_head_backward.c */
    const mha_gradient_job *(*at)(const void *context, int64_t number, mha_worker *worker);
    const void *context;
} mha_gradient_jobs;

/* It stays until the worker takes the next one. */
static inline const mha_gradient_job *mha_gradient_job_at(const mha_gradient_jobs *jobs,
                                                          int64_t number, mha_worker *worker) {
    return jobs->at(jobs->context, number, worker);
}

/* Blocks of queries whose sums for key and value are added up before they join the others. */
enum { MHA_JOINED_BLOCKS = 32 };

/* Of a block of queries that sees nothing: finding that out. */
enum { MHA_WORK_OF_BLOCK = 1 << 12 };

/* The rows of a head in a gradient, or NULL where it is not wanted; *stride counts elements. */
void *mha_gradient_rows(const mha_gradient_job *job, const mha_tensor *gradient, int64_t batch,
                        int64_t head, int64_t row, int64_t *stride);

/* One block of queries of one head, over all keys, without any gradient; and its kernel. */
void mha_fill_gradient_block(const mha_gradient_job *job, int64_t batch, int64_t head,
                             int64_t query_block, mha_key_ranges *visible,
                             mha_attention_backward_block *block);
void mha_run_gradient_block(const mha_gradient_job *job, int64_t batch, int64_t head,
                            mha_attention_backward_block *block, mha_worker *worker);

/* A multiply-add of the forward pass is two and a half here. */
int mha_gradient_threads(const mha_gradient_job *job, int64_t num_tasks, int num_threads);

/* The steps of a job whose gradients are set (scaled_dot_product_attention_backward.c): its plan;
 * what its tasks leave for each other; each worker's own memory; its tasks. */
mha_status mha_plan_gradients(mha_gradient_job *job) MHA_MUST_CHECK;
mha_status mha_take_gradient_sums(mha_gradient_job *job, mha_workspace *workspace) MHA_MUST_CHECK;
mha_status mha_take_gradient_scratch(mha_gradient_job *job, size_t threads,
                                     mha_workspace *workspace) MHA_MUST_CHECK;
mha_status mha_count_gradient_tasks(const mha_gradient_job *job, int64_t *count) MHA_MUST_CHECK;
bool mha_wants_more_than_bias(const mha_gradient_job *job);

/* Task: one chunk of the keys of a key head of one batch item, with all heads that share it. The
 * last block of queries first: where the attention is causal all chunks have work there. */
void mha_differentiate_chunk(void *job, int64_t task, mha_worker *worker);

/* So many keys that a task that meets `queries` of them takes some tens of milliseconds, by the
 * shapes alone: whole blocks, as equal as can be, cut at most `most` times. Less than a vector of
 * queries costs as much as one. */
int64_t mha_keys_of_a_task(const mha_attention *attention, double queries, int64_t most);

#endif
