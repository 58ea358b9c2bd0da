/* NEON on AArch64, FMA included: 4 floats or 2 doubles. simd_baseline.h documents the names. */
#include <arm_neon.h>
#include <stdint.h>

#include "kernels/simd/inline.h"

#define ISA neon
#define KEY_TILE 8
#define ROW_TILE 12
#define PAIR_VECTORS 1
enum { UNROLL = 1, PAIR_UNROLL = 1 };

#ifdef MHA_REAL_IS_FLOAT32
typedef float real;
typedef float32x4_t vector;
#define DTYPE float32
#define LANES 4
#define NEON(name) name##_f32
#define NEON_BITS(name) name##_u32
#define AS_BITS vreinterpretq_u32_f32
#define AS_REAL vreinterpretq_f32_u32
#define SIGN_BIT 0x80000000u
#define MANTISSA_BITS 23
#define LANE_BITS ((uint32x4_t){1, 2, 4, 8})
INLINE real r_fma(real a, real b, real c) { return __builtin_fmaf(a, b, c); }
#else
typedef double real;
typedef float64x2_t vector;
#define DTYPE float64
#define LANES 2
#define NEON(name) name##_f64
#define NEON_BITS(name) name##_u64
#define AS_BITS vreinterpretq_u64_f64
#define AS_REAL vreinterpretq_f64_u64
#define SIGN_BIT 0x8000000000000000u
#define MANTISSA_BITS 52
#define LANE_BITS ((uint64x2_t){1, 2})
INLINE real r_fma(real a, real b, real c) { return __builtin_fma(a, b, c); }
#endif

#define PIECE_COLUMNS LANES

INLINE vector v_set1(real a) { return NEON(vdupq_n)(a); }
INLINE vector v_load(const real *p) { return NEON(vld1q)(p); }
INLINE vector v_load_once(const real *p) { return v_load(p); }
INLINE void v_store(real *p, vector a) { NEON(vst1q)(p, a); }
INLINE vector v_add(vector a, vector b) { return NEON(vaddq)(a, b); }
INLINE vector v_sub(vector a, vector b) { return NEON(vsubq)(a, b); }
INLINE vector v_mul(vector a, vector b) { return NEON(vmulq)(a, b); }
INLINE vector v_div(vector a, vector b) { return NEON(vdivq)(a, b); }
INLINE vector v_fma(vector a, vector b, vector c) { return NEON(vfmaq)(c, a, b); }
INLINE vector v_select_less(vector a, vector b, vector yes, vector no) {
    return NEON(vbslq)(NEON(vcltq)(a, b), yes, no);
}
INLINE vector v_zero_if_less(vector a, vector b, vector value) {
    return v_select_less(a, b, v_set1(0), value);
}
INLINE vector v_select_equal(vector a, vector b, vector yes, vector no) {
    return NEON(vbslq)(NEON(vceqq)(a, b), yes, no);
}
INLINE vector v_keep_lanes(uint32_t lanes, vector yes, vector no) {
    return NEON(vbslq)(NEON_BITS(vtstq)(NEON_BITS(vdupq_n)(lanes), LANE_BITS), yes, no);
}
INLINE vector v_max(vector a, vector b) { return v_select_less(b, a, a, b); }
INLINE vector v_min(vector a, vector b) { return v_select_less(a, b, a, b); }
INLINE vector v_abs(vector a) { return NEON(vabsq)(a); }
INLINE vector v_copy_sign(vector magnitude, vector sign) {
    return NEON(vbslq)(NEON_BITS(vdupq_n)(SIGN_BIT), sign, magnitude);
}
INLINE vector v_exponent_from_low_bits(vector a) {
    return AS_REAL(NEON_BITS(vshlq_n)(AS_BITS(a), MANTISSA_BITS));
}
INLINE void v_zip(vector a, vector b, vector *low, vector *high) {
    *low = NEON(vzip1q)(a, b);
    *high = NEON(vzip2q)(a, b);
}

#include "kernels/simd/simd_by_lane.h"

#ifdef MHA_REAL_IS_FLOAT32
INLINE vector v_load_float16(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
INLINE vector v_set1_float16(const uint8_t *p) {
    uint16_t half;
    __builtin_memcpy(&half, p, sizeof half);
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
}
INLINE void v_store_float16(uint16_t *p, vector a) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
INLINE vector v_load_bfloat16(const uint16_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
INLINE void v_store_bfloat16(uint16_t *p, vector a) {
    const uint32x4_t pattern = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(pattern, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(pattern, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(pattern, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16));
}
#endif
