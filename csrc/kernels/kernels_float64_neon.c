#define MHA_REAL_IS_FLOAT64
#include "kernels/simd/inline.h"
#include "kernels/simd/simd_neon.h"
#include "kernels/kernel_set.inc"
