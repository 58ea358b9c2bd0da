/* The kernel set in use, and the number of threads of the process. */
#ifndef MHA_RUNTIME_H
#define MHA_RUNTIME_H

#include "mha/status.h"

/* Chooses the best kernel set of this machine, or the one that `name` forces ("baseline", "avx2",
 * "avx512", "neon"; NULL: the best). MHA_INVALID_ARGUMENT if it cannot run here. */
mha_status mha_choose_kernels(const char *name) MHA_MUST_CHECK;
const char *mha_instruction_set(void);

/* The name of the index-th kernel set that can run here, slowest first; NULL past the last. */
const char *mha_available_instruction_set(int index);

/* Larger numbers are lowered to this, smaller ones than 1 raised. */
enum { MHA_MAX_THREADS = 256 };

int mha_get_num_threads(void);
void mha_set_num_threads(int num_threads);

/* The CPUs that the process may use: its affinity, and the quota of the container's cgroup. */
int mha_usable_cpus(void);

#endif
