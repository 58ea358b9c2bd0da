/* Scaled dot-product attention of few queries: decoding, classification tokens. */
#ifndef MHA_FEW_QUERIES_H
#define MHA_FEW_QUERIES_H

#include "mha/attention.h"
#include "threads/pool.h"

/* About as many as the last cache keeps for one program. */
enum { MHA_BYTES_IN_CACHES = 16 << 20 };

/* Whether the queries are so few that the kernel for them is the faster one. Both give the same
 * bits. */
bool mha_has_few_queries(const mha_attention *attention);

/* The caller gives back what it takes of the workspace. */
mha_status mha_few_queries_forward(const mha_attention *attention,
                                   mha_execution *execution) MHA_MUST_CHECK;

/* The same as some tasks of a larger job, each over all keys, with scratch of so many bytes for
 * each worker, some of it for the kernel of blocks. */
typedef struct mha_few_tasks {
    int64_t count;
    double operations;
    size_t scratch_size, block_scratch_size;
} mha_few_tasks;

mha_status mha_plan_few_tasks(const mha_attention *attention, mha_few_tasks *tasks) MHA_MUST_CHECK;
void mha_run_few_task(const mha_attention *attention, int64_t task, const mha_pieces *scratch,
                      const mha_pieces *block_scratch, mha_worker *worker);

#endif
