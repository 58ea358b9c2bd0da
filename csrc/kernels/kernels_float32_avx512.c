#define MHA_REAL_IS_FLOAT32
#include "inline.h"
#include "simd_avx512.h"
#include "kernel_set.inc"
