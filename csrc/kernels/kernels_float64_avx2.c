#define MHA_REAL_IS_FLOAT64
#include "inline.h"
#include "simd_avx2.h"
#include "kernel_set.inc"
