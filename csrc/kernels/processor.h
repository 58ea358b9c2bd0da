/* What the processor can run. */
#ifndef MHA_PROCESSOR_H
#define MHA_PROCESSOR_H

#include <stdbool.h>

/* Tiles: where the compiler knows them, and on Linux, which lends them to processes that ask. */
#if defined(__x86_64__) && defined(__linux__)
#if __clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11)
#define MHA_HAS_AMX
#endif
#endif

bool mha_processor_runs(const char *kernel_set);

/* Asks the system for what a kernel set needs beyond its instructions: whether it has it now. */
bool mha_processor_lends(const char *kernel_set);

#endif
