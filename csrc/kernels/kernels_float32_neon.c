#define MHA_REAL_IS_FLOAT32
#include "inline.h"
#include "simd_neon.h"
#include "kernel_set.inc"
