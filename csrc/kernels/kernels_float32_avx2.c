#define MHA_REAL_IS_FLOAT32
#include "kernels/simd/simd_avx2.h"
#include "kernels/kernel_set.inc"
