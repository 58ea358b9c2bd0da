#define MHA_REAL_IS_FLOAT64
#include "kernels/simd/simd_avx512.h"
#include "kernels/kernel_set.inc"
