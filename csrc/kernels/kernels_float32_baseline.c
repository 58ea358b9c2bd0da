#define MHA_REAL_IS_FLOAT32
#include "kernels/simd/simd_baseline.h"
#include "kernels/kernel_set.inc"
