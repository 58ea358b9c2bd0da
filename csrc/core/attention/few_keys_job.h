/* Attention over few keys of many heads as a job: what its tasks take, and where it is faster. */
#ifndef MHA_FEW_KEYS_JOB_H
#define MHA_FEW_KEYS_JOB_H

#include "core/attention/attention_rows.h"

/* A task is some queries of some key heads. Either the lanes of a vector are key heads, and a task
 * takes `shared` vectors of queries of each `lanes` of `head_blocks` * `lanes` key heads. Or a task
 * takes all queries of `heads_of_task` key heads, one after the other. */
typedef struct mha_few_keys_job {
    const mha_attention *attention;
    const mha_kernels *kernels;
    int64_t lanes;
    int64_t heads, kv_heads, query_len, group; /* group: heads on one key head */
    int64_t key_heads;                         /* those of all batch items; a lane is one */
    int64_t queries;                           /* of a key head: those of all heads that share it */
    int64_t shared;      /* vectors of queries that a task takes of the same LANES key heads */
    int64_t head_blocks; /* how many times LANES key heads a task takes */
    bool by_heads;       /* or so many key heads, one after the other, all queries of each: */
    int64_t heads_of_task;
    int64_t query_tasks; /* tasks that take the queries of the same key heads */
    mha_pieces scratch;  /* of each worker */
    int threads;         /* a worker's next task is most likely so many further */
    bool from_memory;
} mha_few_keys_job;

/* What the tasks of a call take; scratch, threads and from_memory are not set. */
mha_status mha_describe_few_keys(const mha_attention *a, mha_few_keys_job *job) MHA_MUST_CHECK;

/* Whether the caches hold less than all keys, values, queries and outputs: they are prefetched. */
bool mha_few_keys_are_from_memory(const mha_few_keys_job *job);

/* The kernels for so many heads in the lanes, or keys of one head. */
void mha_take_few_keys_kernels(mha_few_keys_job *job, int64_t lanes);

#endif
