#define MHA_REAL_IS_FLOAT64
#include "inline.h"
#include "simd_baseline.h"
#include "kernel_set.inc"
