/* How the keys of a head are cut for the gradients: by shapes alone. */
#ifndef MHA_GRADIENT_TASKS_H
#define MHA_GRADIENT_TASKS_H

#include "mha/attention.h"

/* So many keys that a task that meets `queries` of them takes some tens of milliseconds, by the
 * shapes alone: whole blocks, as equal as can be, cut at most `most` times. Less than a vector of
 * queries costs as much as one. */
int64_t mha_keys_of_a_task(const mha_attention *attention, double queries, int64_t most);

#endif
