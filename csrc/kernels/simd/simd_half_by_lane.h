/* float16 and bfloat16 in plain integers, for instruction sets without conversions: a lane after
 * the other, to the nearest, ties to even; NaN stays NaN, a quiet one, beyond the largest number is
 * infinity. */
#define HALVES_BY_LANE

#include <stdbool.h>

INLINE float float_of_bits(uint32_t pattern) {
    float number;
    __builtin_memcpy(&number, &pattern, sizeof number);
    return number;
}
INLINE uint32_t bits_of_float(float number) {
    uint32_t pattern;
    __builtin_memcpy(&pattern, &number, sizeof pattern);
    return pattern;
}

INLINE float widened_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) { /* infinity, NaN */
        const uint32_t quiet = magnitude > 0x7C00 ? 0x400000 : 0;
        return float_of_bits(sign | 0x7F800000 | quiet | (magnitude & 0x3FF) << 13);
    }
    if (magnitude >= 0x400) {
        return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
    }
    return float_of_bits(sign | bits_of_float((float)magnitude * 0x1p-24f)); /* subnormal */
}
INLINE uint16_t narrowed_float16(float number) {
    const uint32_t pattern = bits_of_float(number), magnitude = pattern & 0x7FFFFFFF;
    const uint32_t sign = pattern >> 16 & 0x8000, exponent = magnitude >> 23;
    if (magnitude > 0x7F800000) {
        return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    }
    if (magnitude >= 0x477FF000) { /* 65520 and beyond */
        return (uint16_t)(sign | 0x7C00);
    }
    if (exponent >= 113) {
        const uint32_t rounding = 0xFFF + (magnitude >> 13 & 1);
        return (uint16_t)(sign | (magnitude - (112u << 23) + rounding) >> 13);
    }
    if (exponent < 102) { /* less than half of 2^-24 */
        return (uint16_t)sign;
    }
    const uint32_t mantissa = (magnitude & 0x7FFFFF) | 0x800000, shift = 126 - exponent;
    const uint32_t whole = mantissa >> shift, rest = mantissa - (whole << shift);
    const uint32_t tie = (uint32_t)1 << (shift - 1);
    return (uint16_t)(sign | (whole + (rest > tie || (rest == tie && (whole & 1)))));
}

NOINLINE vector v_load_float16(const uint16_t *p) {
    real lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = widened_float16(p[lane]);
    }
    return v_load(lanes);
}
INLINE vector v_set1_float16(const uint8_t *p) {
    uint16_t half;
    __builtin_memcpy(&half, p, sizeof half);
    return v_set1(widened_float16(half));
}
NOINLINE void v_store_float16(uint16_t *p, vector a) {
    real lanes[LANES];
    v_store(lanes, a);
    for (int lane = 0; lane < LANES; lane++) {
        p[lane] = narrowed_float16(lanes[lane]);
    }
}
INLINE vector v_load_bfloat16(const uint16_t *p) {
    real lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = float_of_bits((uint32_t)p[lane] << 16);
    }
    return v_load(lanes);
}
NOINLINE void v_store_bfloat16(uint16_t *p, vector a) {
    real lanes[LANES];
    v_store(lanes, a);
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t pattern = bits_of_float(lanes[lane]);
        const uint32_t rounded = pattern + 0x7FFF + (pattern >> 16 & 1);
        const bool is_nan = (pattern & 0x7FFFFFFF) > 0x7F800000;
        p[lane] = (uint16_t)((is_nan ? pattern | 0x400000 : rounded) >> 16);
    }
}
