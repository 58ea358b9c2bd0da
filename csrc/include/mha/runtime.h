/* The kernel set in use, and the number of threads of the process. */
#ifndef MHA_RUNTIME_H
#define MHA_RUNTIME_H

#include "mha/status.h"

MHA_API_BEGIN

/* The version of these headers, and of the library that runs: mha_version(). */
#define MHA_VERSION_MAJOR 0
#define MHA_VERSION_MINOR 1
#define MHA_VERSION_PATCH 0
#define MHA_VERSION_TEXT(major, minor, patch) #major "." #minor "." #patch
#define MHA_VERSION_OF(major, minor, patch) MHA_VERSION_TEXT(major, minor, patch)
#define MHA_VERSION MHA_VERSION_OF(MHA_VERSION_MAJOR, MHA_VERSION_MINOR, MHA_VERSION_PATCH)
const char *mha_version(void);

/* Chooses the best kernel set of this machine, or the one that `name` forces ("baseline", "avx2",
 * "avx512", "amx", "neon", in any case; NULL: the best but for amx, whose bits differ).
 * MHA_INVALID_ARGUMENT if it cannot run here. */
mha_status mha_choose_kernels(const char *name) MHA_MUST_CHECK;
const char *mha_instruction_set(void);

/* The name of the index-th kernel set that can run here, slowest first; NULL past the last. */
const char *mha_available_instruction_set(int index);

/* Larger numbers are lowered to this, smaller ones than 1 raised. */
enum { MHA_MAX_THREADS = 256 };

int mha_get_num_threads(void);
void mha_set_num_threads(int num_threads);

/* Threads of another library: runs work(data) on each that it has, the caller's among them, and
 * returns when all of them have. This is OpenMP's GOMP_parallel; num_threads 0 is as many as it
 * likes. */
typedef void (*mha_team)(void (*work)(void *), void *data, unsigned num_threads, unsigned flags);

/* From the next call on the threads of a team help instead of workers of our own; NULL: these
 * again. Waits for nothing: a signal handler may say so in the middle of a call. Threads that spin
 * while they wait, as OpenMP's do for milliseconds, hold the cores that others would need. The
 * child of a fork has no team. */
void mha_use_team(mha_team team);

/* The CPUs that the process may use: its affinity, and the quota of the container's cgroup. */
int mha_usable_cpus(void);

MHA_API_END

#endif
