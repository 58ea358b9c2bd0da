/* AVX2 and FMA: 8 floats or 4 doubles a vector. simd_baseline.h documents the names. */
#include <immintrin.h>
#include <stdint.h>

#include "kernels/simd/inline.h"

#define ISA avx2
#define KEY_TILE 4
#define ROW_TILE 6
#define PAIR_VECTORS 3
#define KEEP_VECTOR(numbers) __asm__ volatile("" : "+x"(numbers))

#ifdef MHA_REAL_IS_FLOAT32
typedef float real;
typedef __m256 vector;
#define DTYPE float32
#define LANES 8
#define PIECE_COLUMNS 4
#define LOADS_CHAINS
typedef __m256d doubles;
INLINE doubles d_set1(double a) { return _mm256_set1_pd(a); }
INLINE doubles d_load(const real *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
INLINE void d_store(real *p, doubles a) { _mm_storeu_ps(p, _mm256_cvtpd_ps(a)); }
INLINE doubles d_fma(doubles a, doubles b, doubles c) { return _mm256_fmadd_pd(a, b, c); }
enum { UNROLL = 2, PAIR_UNROLL = 4 };
INLINE vector v_set1(real a) { return _mm256_set1_ps(a); }
INLINE vector v_load(const real *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(real *p, vector a) { _mm256_storeu_ps(p, a); }
INLINE vector v_add(vector a, vector b) { return _mm256_add_ps(a, b); }
INLINE vector v_sub(vector a, vector b) { return _mm256_sub_ps(a, b); }
INLINE vector v_mul(vector a, vector b) { return _mm256_mul_ps(a, b); }
INLINE vector v_div(vector a, vector b) { return _mm256_div_ps(a, b); }
INLINE vector v_fma(vector a, vector b, vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vector v_max(vector a, vector b) { return _mm256_max_ps(a, b); }
INLINE vector v_min(vector a, vector b) { return _mm256_min_ps(a, b); }
INLINE vector v_zero_if_less(vector a, vector b, vector value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), value);
}
INLINE vector v_select_equal(vector a, vector b, vector yes, vector no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
INLINE vector v_keep_lanes(uint32_t lanes, vector yes, vector no) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32((int)lanes), bit);
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, bit)));
}
INLINE vector v_abs(vector a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vector v_copy_sign(vector magnitude, vector sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}
INLINE vector v_exponent_from_low_bits(vector a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}
/* Pieces of 16 bytes of two rows, side by side. */
INLINE vector v_join_rows(const void *a, const void *b) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}
/* The columns of LANES rows, where `joined` has rows i and i + 4 side by side. */
INLINE void v_turn_rows(const vector joined[4], vector columns[PIECE_COLUMNS]) {
    vector pairs[4];
#pragma GCC unroll 16
    for (int i = 0; i < 4; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(joined[i], joined[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(joined[i], joined[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2; i++) {
        const __m256d a = _mm256_castps_pd(pairs[i]), b = _mm256_castps_pd(pairs[i + 2]);
        columns[2 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        columns[2 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
}
INLINE vector v_load_partial(const real *p, int64_t count) {
    static const int32_t ones_then_zeros[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const __m256i wanted = _mm256_loadu_si256((const void *)(ones_then_zeros + LANES - count));
    return _mm256_maskload_ps(p, wanted);
}
INLINE vector v_from_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)));
}
enum { LOW_SHIFT = 28, HIGH_SHIFT = 4 }; /* where the bits lie in the 32 of a lane */
INLINE vector v_from_int8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
INLINE void v_from_int4(const uint8_t *p, vector *low, vector *high) {
    const __m256i both = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
    *low = _mm256_cvtepi32_ps(_mm256_slli_epi32(both, LOW_SHIFT));
    *high = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(-16)));
}
INLINE vector v_load_float16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
}
#include "kernels/simd/simd_float16_columns.h"
INLINE vector v_widen_float16(__m256i column, const int part) {
    return _mm256_cvtph_ps(part == 0 ? _mm256_castsi256_si128(column)
                                     : _mm256_extracti128_si256(column, 1));
}
INLINE vector v_set1_float16(const uint8_t *p) {
    int16_t half;
    __builtin_memcpy(&half, p, sizeof half);
    return _mm256_cvtph_ps(_mm_set1_epi16(half));
}
INLINE void v_store_float16(uint16_t *p, vector a) {
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
INLINE vector v_load_bfloat16(const uint16_t *p) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(low, 16));
}
INLINE void v_store_bfloat16(uint16_t *p, vector a) {
    const __m256i pattern = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(pattern, 16), _mm256_set1_epi32(1));
    const __m256i rounding = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i quiet = _mm256_or_si256(pattern, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_add_epi32(pattern, rounding);
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(halves));
}
INLINE real r_fma(real a, real b, real c) { return __builtin_fmaf(a, b, c); }
#else
typedef double real;
typedef __m256d vector;
#define DTYPE float64
#define LANES 4
#define PIECE_COLUMNS 2
enum { UNROLL = 1, PAIR_UNROLL = 2 }; /* for the smaller extension */
INLINE vector v_set1(real a) { return _mm256_set1_pd(a); }
INLINE vector v_load(const real *p) { return _mm256_loadu_pd(p); }
INLINE void v_store(real *p, vector a) { _mm256_storeu_pd(p, a); }
INLINE vector v_add(vector a, vector b) { return _mm256_add_pd(a, b); }
INLINE vector v_sub(vector a, vector b) { return _mm256_sub_pd(a, b); }
INLINE vector v_mul(vector a, vector b) { return _mm256_mul_pd(a, b); }
INLINE vector v_div(vector a, vector b) { return _mm256_div_pd(a, b); }
INLINE vector v_fma(vector a, vector b, vector c) { return _mm256_fmadd_pd(a, b, c); }
INLINE vector v_max(vector a, vector b) { return _mm256_max_pd(a, b); }
INLINE vector v_min(vector a, vector b) { return _mm256_min_pd(a, b); }
INLINE vector v_zero_if_less(vector a, vector b, vector value) {
    return _mm256_andnot_pd(_mm256_cmp_pd(a, b, _CMP_LT_OQ), value);
}
INLINE vector v_select_equal(vector a, vector b, vector yes, vector no) {
    return _mm256_blendv_pd(no, yes, _mm256_cmp_pd(a, b, _CMP_EQ_OQ));
}
INLINE vector v_keep_lanes(uint32_t lanes, vector yes, vector no) {
    const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
    const __m256i chosen = _mm256_and_si256(_mm256_set1_epi64x(lanes), bit);
    return _mm256_blendv_pd(no, yes, _mm256_castsi256_pd(_mm256_cmpeq_epi64(chosen, bit)));
}
INLINE vector v_abs(vector a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
INLINE vector v_copy_sign(vector magnitude, vector sign) {
    return _mm256_or_pd(magnitude, _mm256_and_pd(_mm256_set1_pd(-0.0), sign));
}
INLINE vector v_exponent_from_low_bits(vector a) {
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(a), 52));
}
INLINE vector v_join_rows(const void *a, const void *b) {
    return _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(a)), _mm_loadu_pd(b), 1);
}
INLINE void v_turn_rows(const vector joined[2], vector columns[PIECE_COLUMNS]) {
    columns[0] = _mm256_unpacklo_pd(joined[0], joined[1]);
    columns[1] = _mm256_unpackhi_pd(joined[0], joined[1]);
}
INLINE vector v_load_partial(const real *p, int64_t count) {
    static const int64_t ones_then_zeros[2 * LANES] = {-1, -1, -1, -1};
    const __m256i wanted = _mm256_loadu_si256((const void *)(ones_then_zeros + LANES - count));
    return _mm256_maskload_pd(p, wanted);
}
INLINE vector v_from_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_loadu_si32(p)));
}
INLINE real r_fma(real a, real b, real c) { return __builtin_fma(a, b, c); }
#endif

/* Vectors that hold a piece of each of LANES rows: two rows each, these so many rows apart. */
enum { JOINED = LANES / 2 };
/* Each address is made from the one before: there are no registers to keep them all. */
INLINE void v_load_apart(const void *rows, int64_t apart, vector columns[PIECE_COLUMNS]) {
    const char *row = rows;
    vector joined[JOINED];
#pragma GCC unroll 16
    for (int i = 0; i < JOINED; i++, row += apart) {
        KEEP_ADDRESS(row);
        joined[i] = v_join_rows(row, row + JOINED * apart);
    }
    v_turn_rows(joined, columns);
}
INLINE void v_load_pieces(const real *const row[LANES], int64_t at, vector columns[PIECE_COLUMNS]) {
    vector joined[JOINED];
#pragma GCC unroll 16
    for (int i = 0; i < JOINED; i++) {
        joined[i] = v_join_rows(row[i] + at, row[i + JOINED] + at);
    }
    v_turn_rows(joined, columns);
}

INLINE vector v_load_once(const real *p) {
    vector a = v_load(p);
    __asm__("" : "+x"(a));
    return a;
}

enum { WORD_LANES = 8 };
typedef uint32_t words __attribute__((vector_size(4 * WORD_LANES)));
INLINE void words_multiply(words a, uint32_t b, words *low, words *high) {
    const __m256i factor = _mm256_set1_epi64x((int64_t)b);
    const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    *low = (words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = (words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
