/* What the machine can do at best, measured: multiply-adds and reading. */
#ifndef MHA_BENCH_MACHINE_H
#define MHA_BENCH_MACHINE_H

#include <stddef.h>

/* Floating-point operations a second of one core, by FMAs on registers in the widest vectors of
 * the instruction set ("avx512", "avx2", else four floats and no FMA). */
double machine_fma_rate(const char *isa, int is_float64, double seconds);

/* Bytes a second that one core reads, summing the buffer front to back again and again. */
double machine_read_rate(const void *buffer, size_t bytes, double seconds);

double machine_now(void); /* seconds */

#endif
