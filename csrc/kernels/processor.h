/* What the processor can run. */
#ifndef MHA_PROCESSOR_H
#define MHA_PROCESSOR_H

#include <stdbool.h>

bool mha_processor_runs(const char *kernel_set);

#endif
