/* AVX-512F and DQ: 16 floats or 8 doubles a vector. simd_baseline.h documents the names. */
#include <immintrin.h>
#include <stdint.h>

#include "kernels/simd/inline.h"

#define ISA avx512
#define KEY_TILE 8
#define ROW_TILE 12
#define PAIR_VECTORS 1
enum { UNROLL = 1, PAIR_UNROLL = 1 };

#ifdef MHA_REAL_IS_FLOAT32
typedef float real;
typedef __m512 vector;
#define DTYPE float32
#define LANES 16
#define PIECE_COLUMNS 4
#define LINE_COLUMNS 16
#define LOADS_CHAINS
typedef __m512d doubles;
INLINE doubles d_set1(double a) { return _mm512_set1_pd(a); }
INLINE doubles d_load(const real *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
INLINE void d_store(real *p, doubles a) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(a)); }
INLINE doubles d_fma(doubles a, doubles b, doubles c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vector v_set1(real a) { return _mm512_set1_ps(a); }
INLINE vector v_load(const real *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(real *p, vector a) { _mm512_storeu_ps(p, a); }
INLINE vector v_add(vector a, vector b) { return _mm512_add_ps(a, b); }
INLINE vector v_sub(vector a, vector b) { return _mm512_sub_ps(a, b); }
INLINE vector v_mul(vector a, vector b) { return _mm512_mul_ps(a, b); }
INLINE vector v_div(vector a, vector b) { return _mm512_div_ps(a, b); }
INLINE vector v_fma(vector a, vector b, vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vector v_max(vector a, vector b) { return _mm512_max_ps(a, b); }
INLINE vector v_min(vector a, vector b) { return _mm512_min_ps(a, b); }
INLINE vector v_zero_if_less(vector a, vector b, vector value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), value);
}
INLINE vector v_select_equal(vector a, vector b, vector yes, vector no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
}
INLINE vector v_keep_lanes(uint32_t lanes, vector yes, vector no) {
    return _mm512_mask_blend_ps((__mmask16)lanes, no, yes);
}
INLINE vector v_abs(vector a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
INLINE vector v_copy_sign(vector magnitude, vector sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
}
INLINE vector v_exponent_from_low_bits(vector a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
}
/* Pieces of 16 bytes of rows, side by side. */
INLINE vector v_join_rows(const void *a, const void *b, const void *c, const void *d) {
    vector joined = _mm512_castps128_ps512(_mm_loadu_ps(a));
    joined = _mm512_insertf32x4(joined, _mm_loadu_ps(b), 1);
    joined = _mm512_insertf32x4(joined, _mm_loadu_ps(c), 2);
    return _mm512_insertf32x4(joined, _mm_loadu_ps(d), 3);
}
/* The columns of LANES rows, where `joined` has rows i, i + 4, i + 8, i + 12 side by side. */
INLINE void v_turn_rows(const vector joined[4], vector columns[PIECE_COLUMNS]) {
    vector pairs[4];
#pragma GCC unroll 16
    for (int i = 0; i < 4; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(joined[i], joined[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(joined[i], joined[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2; i++) {
        const __m512d a = _mm512_castps_pd(pairs[i]), b = _mm512_castps_pd(pairs[i + 2]);
        columns[2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        columns[2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
}
/* Half a line of two rows; the first pieces of two such pairs, and the second ones. */
INLINE vector v_load_halves(const real *first, const real *second) {
    const vector half = _mm512_castps256_ps512(_mm256_loadu_ps(first));
    return _mm512_insertf32x8(half, _mm256_loadu_ps(second), 1);
}
INLINE vector v_first_pieces(vector a, vector b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
INLINE vector v_second_pieces(vector a, vector b) { return _mm512_shuffle_f32x4(a, b, 0xdd); }
INLINE vector v_load_partial(const real *p, int64_t count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}
INLINE vector v_from_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)));
}
enum { LOW_SHIFT = 4, HIGH_SHIFT = 4 }; /* where the bits lie in the 32 of a lane */
INLINE vector v_from_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE void v_from_int4(const uint8_t *p, vector *low, vector *high) {
    const __m512i both = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
    /* The lower one's bits choose from a table: one instruction in place of two. The upper one
     * keeps the ports busy that do not permute. */
    const __m512i by_bits =
        _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16);
    *low = _mm512_permutexvar_ps(both, _mm512_cvtepi32_ps(by_bits));
    *high = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(-16)));
}
INLINE vector v_load_float16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}
#include "kernels/simd/simd_float16_columns.h"
INLINE vector v_widen_float16(__m256i column, const int part) {
    return (void)part, _mm512_cvtph_ps(column);
}
INLINE vector v_set1_float16(const uint8_t *p) {
    int16_t half;
    __builtin_memcpy(&half, p, sizeof half);
    return _mm512_cvtph_ps(_mm256_set1_epi16(half));
}
INLINE void v_store_float16(uint16_t *p, vector a) {
    const __m256i halves = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256((void *)p, halves);
}
INLINE vector v_load_bfloat16(const uint16_t *p) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(low, 16));
}
INLINE void v_store_bfloat16(uint16_t *p, vector a) {
    typedef uint32_t patterns __attribute__((vector_size(64)));
    typedef uint16_t halves __attribute__((vector_size(32)));
    const patterns pattern = (patterns)_mm512_castps_si512(a);
    const patterns rounded = pattern + 0x7FFF + (pattern >> 16 & 1);
    const vector quiet = _mm512_castsi512_ps((__m512i)(pattern | 0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const vector chosen =
        _mm512_mask_blend_ps(is_nan, _mm512_castsi512_ps((__m512i)rounded), quiet);
    const patterns high = (patterns)_mm512_castps_si512(chosen) >> 16;
    _mm256_storeu_si256((void *)p, (__m256i) __builtin_convertvector(high, halves));
}
INLINE real r_fma(real a, real b, real c) { return __builtin_fmaf(a, b, c); }
#else
typedef double real;
typedef __m512d vector;
#define DTYPE float64
#define LANES 8
#define PIECE_COLUMNS 2
#define LINE_COLUMNS 8
INLINE vector v_set1(real a) { return _mm512_set1_pd(a); }
INLINE vector v_load(const real *p) { return _mm512_loadu_pd(p); }
INLINE void v_store(real *p, vector a) { _mm512_storeu_pd(p, a); }
INLINE vector v_add(vector a, vector b) { return _mm512_add_pd(a, b); }
INLINE vector v_sub(vector a, vector b) { return _mm512_sub_pd(a, b); }
INLINE vector v_mul(vector a, vector b) { return _mm512_mul_pd(a, b); }
INLINE vector v_div(vector a, vector b) { return _mm512_div_pd(a, b); }
INLINE vector v_fma(vector a, vector b, vector c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vector v_max(vector a, vector b) { return _mm512_max_pd(a, b); }
INLINE vector v_min(vector a, vector b) { return _mm512_min_pd(a, b); }
INLINE vector v_zero_if_less(vector a, vector b, vector value) {
    return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(a, b, _CMP_NLT_UQ), value);
}
INLINE vector v_select_equal(vector a, vector b, vector yes, vector no) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ), no, yes);
}
INLINE vector v_keep_lanes(uint32_t lanes, vector yes, vector no) {
    return _mm512_mask_blend_pd((__mmask8)lanes, no, yes);
}
INLINE vector v_abs(vector a) { return _mm512_andnot_pd(_mm512_set1_pd(-0.0), a); }
INLINE vector v_copy_sign(vector magnitude, vector sign) {
    return _mm512_or_pd(magnitude, _mm512_and_pd(_mm512_set1_pd(-0.0), sign));
}
INLINE vector v_exponent_from_low_bits(vector a) {
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(a), 52));
}
INLINE vector v_join_rows(const void *a, const void *b, const void *c, const void *d) {
    vector joined = _mm512_castpd128_pd512(_mm_loadu_pd(a));
    joined = _mm512_insertf64x2(joined, _mm_loadu_pd(b), 1);
    joined = _mm512_insertf64x2(joined, _mm_loadu_pd(c), 2);
    return _mm512_insertf64x2(joined, _mm_loadu_pd(d), 3);
}
INLINE void v_turn_rows(const vector joined[2], vector columns[PIECE_COLUMNS]) {
    columns[0] = _mm512_unpacklo_pd(joined[0], joined[1]);
    columns[1] = _mm512_unpackhi_pd(joined[0], joined[1]);
}
INLINE vector v_load_halves(const real *first, const real *second) {
    const vector half = _mm512_castpd256_pd512(_mm256_loadu_pd(first));
    return _mm512_insertf64x4(half, _mm256_loadu_pd(second), 1);
}
INLINE vector v_first_pieces(vector a, vector b) { return _mm512_shuffle_f64x2(a, b, 0x88); }
INLINE vector v_second_pieces(vector a, vector b) { return _mm512_shuffle_f64x2(a, b, 0xdd); }
INLINE vector v_load_partial(const real *p, int64_t count) {
    return _mm512_maskz_loadu_pd((__mmask8)((1u << count) - 1), p);
}
INLINE vector v_from_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_pd(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)));
}
INLINE real r_fma(real a, real b, real c) { return __builtin_fma(a, b, c); }
#endif

/* Vectors that hold a piece of each of LANES rows: four rows each, these so many rows apart. */
enum { JOINED = LANES / 4 };
/* Each address is made from the one before: there are no registers to keep them all. */
INLINE void v_load_apart(const void *rows, int64_t apart, vector columns[PIECE_COLUMNS]) {
    const char *row = rows;
    vector joined[JOINED];
#pragma GCC unroll 16
    for (int i = 0; i < JOINED; i++, row += apart) {
        KEEP_ADDRESS(row);
        joined[i] = v_join_rows(row, row + JOINED * apart, row + 2 * JOINED * apart,
                                row + 3 * JOINED * apart);
    }
    v_turn_rows(joined, columns);
}
INLINE void v_load_pieces(const real *const row[LANES], int64_t at, vector columns[PIECE_COLUMNS]) {
    vector joined[JOINED];
#pragma GCC unroll 16
    for (int i = 0; i < JOINED; i++) {
        joined[i] = v_join_rows(row[i] + at, row[i + JOINED] + at, row[i + 2 * JOINED] + at,
                                row[i + 3 * JOINED] + at);
    }
    v_turn_rows(joined, columns);
}
/* Half a line of four rows, in joined[piece][i] of its two pieces. */
INLINE void v_join_halves(const real *a, const real *b, const real *c, const real *d,
                          vector joined[2][JOINED], const int i) {
    const vector low = v_load_halves(a, b), high = v_load_halves(c, d);
    joined[0][i] = v_first_pieces(low, high);
    joined[1][i] = v_second_pieces(low, high);
}
INLINE void v_turn_lines(vector joined[4][JOINED], vector columns[LINE_COLUMNS]) {
#pragma GCC unroll 16
    for (int piece = 0; piece < 4; piece++) {
        v_turn_rows(joined[piece], columns + piece * PIECE_COLUMNS);
    }
}
INLINE void v_load_line(const real *rows, int64_t stride, vector columns[LINE_COLUMNS]) {
    vector joined[4][JOINED];
#pragma GCC unroll 16
    for (int i = 0; i < JOINED; i++) {
        const real *row = rows + i * stride;
        KEEP_ADDRESS(row);
#pragma GCC unroll 16
        for (int piece = 0; piece < 4; piece += 2) {
            const real *half = row + piece * PIECE_COLUMNS;
            v_join_halves(half, half + JOINED * stride, half + 2 * JOINED * stride,
                          half + 3 * JOINED * stride, joined + piece, i);
        }
    }
    v_turn_lines(joined, columns);
}
INLINE void v_load_lines(const real *const row[LANES], int64_t at, vector columns[LINE_COLUMNS]) {
    vector joined[4][JOINED];
#pragma GCC unroll 16
    for (int i = 0; i < JOINED; i++) {
#pragma GCC unroll 16
        for (int piece = 0; piece < 4; piece += 2) {
            const int64_t half = at + piece * PIECE_COLUMNS;
            v_join_halves(row[i] + half, row[i + JOINED] + half, row[i + 2 * JOINED] + half,
                          row[i + 3 * JOINED] + half, joined + piece, i);
        }
    }
    v_turn_lines(joined, columns);
}

INLINE vector v_load_once(const real *p) { return v_load(p); }

enum { WORD_LANES = 16 };
typedef uint32_t words __attribute__((vector_size(4 * WORD_LANES)));
INLINE void words_multiply(words a, uint32_t b, words *low, words *high) {
    const __m512i factor = _mm512_set1_epi64((int64_t)b);
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    *low = (words)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = (words)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}
