/* What the binding asks of the operating system: system_posix.c, or on Windows system_windows.c. */
#ifndef MHA_PYTHON_SYSTEM_H
#define MHA_PYTHON_SYSTEM_H

#include "python/base/binding.h"

/* To be called once, when the module is imported; -1 with an exception. free_kept clears away what
 * a thread kept, when it ends. */
int mha_system_start(void (*free_kept)(void *kept));

/* What the calling thread keeps, NULL at first; and puts there, false where that cannot be. */
void *mha_system_kept(void);
bool mha_system_keep(void *kept);

/* Whether this is the thread that runs Python's signal handlers. */
bool mha_system_is_main_thread(void);

/* Nanoseconds of a clock that never goes back: some milliseconds coarse where that is read faster;
 * 0 where there is none. */
int64_t mha_system_coarse_nanoseconds(void);

/* Memory aligned to MHA_WORKSPACE_ALIGNMENT, or NULL; mha_system_free gives it back. */
void *mha_system_allocate(size_t bytes);
void mha_system_free(void *memory);

/* The same of zeros, and in another size, but aligned as malloc does it. */
void *mha_system_allocate_zeros(size_t count, size_t bytes);
void *mha_system_reallocate(void *memory, size_t bytes);

#endif
