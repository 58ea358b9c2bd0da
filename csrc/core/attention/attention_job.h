/* Attention as a job: what all its tasks read. */
#ifndef MHA_ATTENTION_JOB_H
#define MHA_ATTENTION_JOB_H

#include "core/attention/heads_last.h"
#include "core/attention/known_blocks.h"

typedef struct mha_attention_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t query_blocks;                 /* of one head, of whole_vectors each; ... */
    int64_t whole_vectors, with_one_more; /* ... the first so many blocks have one more */
    int joint_blocks;                     /* of them, that go through the keys together */
    int64_t query_tiles_of_a_head, query_tiles_of_a_task;
    int64_t batch_heads;
    int threads;
    bool prefetches;          /* what the next query tile needs */
    int64_t key_heads_before; /* of a ragged batch: those of the sequences before */
    bool copies_heads;        /* each worker copies the key head that it is at, side by side */
    int64_t joint_heads;      /* 0, or of a task: heads whose mask or bias it copies, heads first */
    mha_heads_copy mask, bias;
    mha_known_visibility known;
    mha_pieces scratch, keys, values; /* of each worker: the kernel's, and its copies */
    mha_pieces masks, biases;
    size_t scratch_size, keys_size, values_size;
} mha_attention_job;

/* No queries, or an output without columns and nothing else asked for, however many rows it has. */
bool mha_nothing_to_attend(const mha_attention *attention);

/* The steps of a job: its plan, without memory; each worker's own memory; its tasks. */
mha_status mha_plan_attention(const mha_attention *attention, int num_threads,
                              mha_attention_job *job, int64_t *num_tasks,
                              int *threads) MHA_MUST_CHECK;
mha_status mha_take_attention_memory(mha_attention_job *job, int threads,
                                     mha_workspace *workspace) MHA_MUST_CHECK;

/* Task: one query tile, or all of a head. One head after the other, so that its keys and values
 * stay in the cache. */
void mha_attend_query_blocks(void *job, int64_t task, mha_worker *worker);

#endif
