/* The AVX-512 instructions that simd_avx512.h uses, as pairs of AVX2 ones or lane by lane: slow,
 * but it lets any machine with AVX2 run the kernels that are compiled for the wider vectors.
 * Included before everything else (-include). */
#ifndef EMULATED_AVX512_H
#define EMULATED_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define EMULATED static inline __attribute__((always_inline))

typedef union emulated_floats {
    __m512 all;
    __m256 half[2];
    float lane[16];
    uint32_t bits[16];
} emulated_floats;

typedef union emulated_doubles {
    __m512d all;
    __m256d half[2];
    double lane[8];
    uint64_t bits[8];
} emulated_doubles;

typedef union emulated_integers {
    __m512i all;
    uint32_t word[16];
    uint64_t lane[8];
} emulated_integers;

/* Two operands, half by half. */
#define EMULATE_PAIR(name, suffix, vector, lanes)                                                  \
    EMULATED vector emulated_##name##_##suffix(vector a, vector b) {                               \
        lanes x = {.all = a}, y = {.all = b};                                                      \
        x.half[0] = _mm256_##name##_##suffix(x.half[0], y.half[0]);                                \
        x.half[1] = _mm256_##name##_##suffix(x.half[1], y.half[1]);                                \
        return x.all;                                                                              \
    }

/* What both element types have. `count` lanes, numbers of type `real`, masks of type `mask`. */
#define EMULATE_REAL(suffix, vector, lanes, real, count, mask)                                     \
    EMULATE_PAIR(add, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(sub, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(mul, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(div, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(max, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(min, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(and, suffix, vector, lanes)                                                       \
    EMULATE_PAIR(andnot, suffix, vector, lanes)                                                    \
    EMULATE_PAIR(or, suffix, vector, lanes)                                                        \
    EMULATE_PAIR(unpacklo, suffix, vector, lanes)                                                  \
    EMULATE_PAIR(unpackhi, suffix, vector, lanes)                                                  \
    EMULATED vector emulated_fmadd_##suffix(vector a, vector b, vector c) {                        \
        lanes x = {.all = a}, y = {.all = b}, z = {.all = c};                                      \
        x.half[0] = _mm256_fmadd_##suffix(x.half[0], y.half[0], z.half[0]);                        \
        x.half[1] = _mm256_fmadd_##suffix(x.half[1], y.half[1], z.half[1]);                        \
        return x.all;                                                                              \
    }                                                                                              \
    EMULATED vector emulated_set1_##suffix(real a) {                                               \
        lanes x;                                                                                   \
        x.half[0] = x.half[1] = _mm256_set1_##suffix(a);                                           \
        return x.all;                                                                              \
    }                                                                                              \
    EMULATED vector emulated_loadu_##suffix(const real *from) {                                    \
        lanes x;                                                                                   \
        memcpy(&x, from, sizeof x);                                                                \
        return x.all;                                                                              \
    }                                                                                              \
    EMULATED void emulated_storeu_##suffix(real *to, vector a) { memcpy(to, &a, sizeof a); }       \
    EMULATED vector emulated_mask_blend_##suffix(mask chosen, vector no, vector yes) {             \
        lanes x = {.all = no}, y = {.all = yes};                                                   \
        for (int i = 0; i < count; i++) {                                                          \
            x.bits[i] = chosen >> i & 1 ? y.bits[i] : x.bits[i];                                   \
        }                                                                                          \
        return x.all;                                                                              \
    }                                                                                              \
    EMULATED vector emulated_maskz_loadu_##suffix(mask wanted, const real *from) {                 \
        lanes x;                                                                                   \
        for (int i = 0; i < count; i++) {                                                          \
            x.lane[i] = wanted >> i & 1 ? from[i] : 0;                                             \
        }                                                                                          \
        return x.all;                                                                              \
    }

EMULATE_REAL(ps, __m512, emulated_floats, float, 16, __mmask16)
EMULATE_REAL(pd, __m512d, emulated_doubles, double, 8, __mmask8)

/* 16 bytes into a quarter of a vector, 32 into a half; the others of one that is begun so are
 * anything. shuffle: two quarters of a, then two of b, which of them two bits of `which` say. */
#define EMULATE_QUARTERS(suffix, vector, quarter_vector, half_vector)                              \
    EMULATED vector emulated_insert_##suffix(vector a, quarter_vector b, int quarter) {            \
        memcpy((char *)&a + 16 * quarter, &b, sizeof b);                                           \
        return a;                                                                                  \
    }                                                                                              \
    EMULATED vector emulated_begin_##suffix(quarter_vector b) {                                    \
        return emulated_insert_##suffix(emulated_set1_##suffix(0), b, 0);                          \
    }                                                                                              \
    EMULATED vector emulated_insert_half_##suffix(vector a, half_vector b, int half) {             \
        memcpy((char *)&a + 32 * half, &b, sizeof b);                                              \
        return a;                                                                                  \
    }                                                                                              \
    EMULATED vector emulated_begin_half_##suffix(half_vector b) {                                  \
        return emulated_insert_half_##suffix(emulated_set1_##suffix(0), b, 0);                     \
    }                                                                                              \
    EMULATED vector emulated_shuffle_quarters_##suffix(vector a, vector b, int which) {            \
        vector result;                                                                             \
        for (int i = 0; i < 4; i++) {                                                              \
            const vector *from = i < 2 ? &a : &b;                                                  \
            memcpy((char *)&result + 16 * i, (const char *)from + 16 * (which >> 2 * i & 3), 16);  \
        }                                                                                          \
        return result;                                                                             \
    }

EMULATE_QUARTERS(ps, __m512, __m128, __m256)
EMULATE_QUARTERS(pd, __m512d, __m128d, __m256d)

/* `how` is a constant of _mm256_cmp. */
#undef _mm512_cmp_ps_mask
#undef _mm512_cmp_pd_mask
#define _mm512_cmp_ps_mask(a, b, how)                                                              \
    (__extension__({                                                                               \
        const emulated_floats x = {.all = a}, y = {.all = b};                                      \
        (__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps(x.half[0], y.half[0], how)) |                 \
                    _mm256_movemask_ps(_mm256_cmp_ps(x.half[1], y.half[1], how)) << 8);            \
    }))
#define _mm512_cmp_pd_mask(a, b, how)                                                              \
    (__extension__({                                                                               \
        const emulated_doubles x = {.all = a}, y = {.all = b};                                     \
        (__mmask8)(_mm256_movemask_pd(_mm256_cmp_pd(x.half[0], y.half[0], how)) |                  \
                   _mm256_movemask_pd(_mm256_cmp_pd(x.half[1], y.half[1], how)) << 4);             \
    }))

EMULATED __m512 emulated_permutex2var_ps(__m512 a, __m512i which, __m512 b) {
    const emulated_floats x = {.all = a}, y = {.all = b};
    const emulated_integers from = {.all = which};
    emulated_floats result;
    for (int i = 0; i < 16; i++) {
        result.bits[i] = (from.word[i] & 16 ? y.bits : x.bits)[from.word[i] & 15];
    }
    return result.all;
}

EMULATED __m512d emulated_permutex2var_pd(__m512d a, __m512i which, __m512d b) {
    const emulated_doubles x = {.all = a}, y = {.all = b};
    const emulated_integers from = {.all = which};
    emulated_doubles result;
    for (int i = 0; i < 8; i++) {
        result.bits[i] = (from.lane[i] & 8 ? y.bits : x.bits)[from.lane[i] & 7];
    }
    return result.all;
}

/* Integers, as GCC's own vectors. */
typedef uint32_t emulated_words __attribute__((vector_size(64)));
typedef int32_t emulated_ints __attribute__((vector_size(64)));
typedef uint64_t emulated_lanes __attribute__((vector_size(64)));
typedef uint8_t emulated_bytes __attribute__((vector_size(16)));
typedef int8_t emulated_signed_bytes __attribute__((vector_size(16)));
typedef int32_t emulated_half_ints __attribute__((vector_size(32)));
typedef uint16_t emulated_shorts __attribute__((vector_size(32)));

EMULATED __m512 emulated_cvtph_ps(__m256i halves) {
    emulated_floats x;
    x.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    x.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    return x.all;
}

/* To the nearest: the only rounding that is used. */
EMULATED __m256i emulated_cvtps_ph(__m512 numbers) {
    const emulated_floats x = {.all = numbers};
    const __m128i low = _mm256_cvtps_ph(x.half[0], _MM_FROUND_TO_NEAREST_INT);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                   _mm256_cvtps_ph(x.half[1], _MM_FROUND_TO_NEAREST_INT), 1);
}

/* Bits of 16 comparisons, each of them all ones or all zeros. */
EMULATED __mmask16 emulated_bits_of(emulated_ints compared) {
    unsigned bits = 0;
    for (int i = 0; i < 16; i++) {
        bits |= (unsigned)(compared[i] & 1) << i;
    }
    return (__mmask16)bits;
}

EMULATED __m512i emulated_loadu_words(const void *from) {
    __m512i words;
    memcpy(&words, from, sizeof words);
    return words;
}

EMULATED void emulated_mask_storeu_ps(float *to, __mmask16 chosen, __m512 a) {
    const emulated_floats x = {.all = a};
    for (int i = 0; i < 16; i++) {
        if (chosen >> i & 1) {
            to[i] = x.lane[i];
        }
    }
}

/* Of the classes only infinity and NaN, which are asked for together. */
EMULATED __mmask16 emulated_not_finite_mask(__m512 a) {
    const emulated_floats x = {.all = a};
    unsigned bits = 0;
    for (int i = 0; i < 16; i++) {
        bits |= (unsigned)((x.bits[i] & 0x7F800000) == 0x7F800000) << i;
    }
    return (__mmask16)bits;
}

#undef _mm512_setr_epi32
#undef _mm512_setr_epi64
#define _mm512_setr_epi32(...) ((__m512i)(emulated_words){__VA_ARGS__})
#define _mm512_setr_epi64(...) ((__m512i)(emulated_lanes){__VA_ARGS__})
#define _mm512_set1_epi32(a) ((__m512i)((emulated_words){0} + (uint32_t)(a)))
#define _mm512_set1_epi64(a) ((__m512i)((emulated_lanes){0} + (uint64_t)(a)))
#define _mm512_add_epi32(a, b) ((__m512i)((emulated_words)(a) + (emulated_words)(b)))
#define _mm512_add_epi64(a, b) ((__m512i)((emulated_lanes)(a) + (emulated_lanes)(b)))
#define _mm512_and_si512(a, b) ((__m512i)((emulated_words)(a) & (emulated_words)(b)))
#define _mm512_or_si512(a, b) ((__m512i)((emulated_words)(a) | (emulated_words)(b)))
#define _mm512_cmplt_epi32_mask(a, b) emulated_bits_of((emulated_ints)(a) < (emulated_ints)(b))
#define _mm512_cmpgt_epi32_mask(a, b) emulated_bits_of((emulated_ints)(a) > (emulated_ints)(b))
#define _mm512_cmpge_epi32_mask(a, b) emulated_bits_of((emulated_ints)(a) >= (emulated_ints)(b))
#define _mm512_mask_mov_epi32(source, chosen, a) _mm512_mask_blend_epi32(chosen, source, a)
#define _mm512_maskz_mov_epi32(chosen, a) _mm512_mask_blend_epi32(chosen, _mm512_set1_epi32(0), a)
#define _mm512_mask_or_epi32(source, chosen, a, b)                                                 \
    _mm512_mask_blend_epi32(chosen, source, _mm512_or_si512(a, b))
#define _mm512_maskz_loadu_epi32(wanted, from) ((__m512i)emulated_maskz_loadu_ps(wanted, from))
#define _mm512_loadu_si512(from) emulated_loadu_words(from)
#define _mm512_storeu_si512(to, a) memcpy(to, &(a), sizeof(a))
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_abs_ps(a) emulated_andnot_ps(emulated_set1_ps(-0.0f), a)
#undef _mm512_fpclass_ps_mask
#define _mm512_fpclass_ps_mask(a, classes) emulated_not_finite_mask(a)
#define _mm512_mul_epu32(a, b)                                                                     \
    ((__m512i)(((emulated_lanes)(a) & 0xffffffff) * ((emulated_lanes)(b) & 0xffffffff)))
#define _mm512_slli_epi32(a, by) ((__m512i)((emulated_words)(a) << (by)))
#define _mm512_slli_epi64(a, by) ((__m512i)((emulated_lanes)(a) << (by)))
#define _mm512_srli_epi32(a, by) ((__m512i)((emulated_words)(a) >> (by)))
#define _mm512_srli_epi64(a, by) ((__m512i)((emulated_lanes)(a) >> (by)))
#define _mm512_cvtepu8_epi32(a)                                                                    \
    ((__m512i) __builtin_convertvector((emulated_bytes)(a), emulated_words))
#define _mm512_cvtepi8_epi32(a)                                                                    \
    ((__m512i) __builtin_convertvector((emulated_signed_bytes)(a), emulated_words))
#undef _mm512_cvtps_ph
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(a, how) emulated_cvtps_ph(a)
#define _mm512_cvtepu16_epi32(a)                                                                   \
    ((__m512i) __builtin_convertvector((emulated_shorts)(a), emulated_words))
#define _mm512_cvtepi32_ps(a) __builtin_convertvector((emulated_ints)(a), __m512)
#define _mm512_cvtepi32_pd(a) __builtin_convertvector((emulated_half_ints)(a), __m512d)
#define _mm512_cvtps_pd(a) __builtin_convertvector((__m256)(a), __m512d)
#define _mm512_cvtpd_ps(a) __builtin_convertvector((__m512d)(a), __m256)
#define _mm512_mask_blend_epi32(chosen, no, yes)                                                   \
    ((__m512i)emulated_mask_blend_ps(chosen, (__m512)(no), (__m512)(yes)))
#define _mm512_castps_si512(a) ((__m512i)(a))
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_castpd_si512(a) ((__m512i)(a))
#define _mm512_castsi512_pd(a) ((__m512d)(a))
#undef _mm512_insertf32x4
#undef _mm512_insertf64x2
#undef _mm512_insertf32x8
#undef _mm512_insertf64x4
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_f64x2
#define _mm512_insertf32x8 emulated_insert_half_ps
#define _mm512_insertf64x4 emulated_insert_half_pd
#define _mm512_shuffle_f32x4 emulated_shuffle_quarters_ps
#define _mm512_shuffle_f64x2 emulated_shuffle_quarters_pd
#define _mm512_castps256_ps512 emulated_begin_half_ps
#define _mm512_castpd256_pd512 emulated_begin_half_pd
#define _mm512_insertf32x4 emulated_insert_ps
#define _mm512_insertf64x2 emulated_insert_pd
#define _mm512_castps128_ps512 emulated_begin_ps
#define _mm512_castpd128_pd512 emulated_begin_pd
#define _mm512_castps_pd(a) ((__m512d)(a))
#define _mm512_castpd_ps(a) ((__m512)(a))
#define _mm512_unpacklo_ps emulated_unpacklo_ps
#define _mm512_unpackhi_ps emulated_unpackhi_ps
#define _mm512_unpacklo_pd emulated_unpacklo_pd
#define _mm512_unpackhi_pd emulated_unpackhi_pd
#define _mm512_setzero_ps() emulated_set1_ps(0)
#define _mm512_setzero_pd() emulated_set1_pd(0)
#define _mm512_mask_mov_ps(source, chosen, a) emulated_mask_blend_ps(chosen, source, a)
#define _mm512_mask_mov_pd(source, chosen, a) emulated_mask_blend_pd(chosen, source, a)
#define _mm512_maskz_mov_ps(chosen, a) emulated_mask_blend_ps(chosen, emulated_set1_ps(0), a)
#define _mm512_maskz_mov_pd(chosen, a) emulated_mask_blend_pd(chosen, emulated_set1_pd(0), a)
#define _mm512_add_ps emulated_add_ps
#define _mm512_sub_ps emulated_sub_ps
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_div_ps emulated_div_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_min_ps emulated_min_ps
#define _mm512_and_ps emulated_and_ps
#define _mm512_andnot_ps emulated_andnot_ps
#define _mm512_or_ps emulated_or_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_mask_blend_ps emulated_mask_blend_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_permutex2var_ps emulated_permutex2var_ps
#define _mm512_permutexvar_ps(which, a) emulated_permutex2var_ps(a, which, a)
#define _mm512_add_pd emulated_add_pd
#define _mm512_sub_pd emulated_sub_pd
#define _mm512_mul_pd emulated_mul_pd
#define _mm512_div_pd emulated_div_pd
#define _mm512_max_pd emulated_max_pd
#define _mm512_min_pd emulated_min_pd
#define _mm512_and_pd emulated_and_pd
#define _mm512_andnot_pd emulated_andnot_pd
#define _mm512_or_pd emulated_or_pd
#define _mm512_fmadd_pd emulated_fmadd_pd
#define _mm512_set1_pd emulated_set1_pd
#define _mm512_loadu_pd emulated_loadu_pd
#define _mm512_storeu_pd emulated_storeu_pd
#define _mm512_mask_blend_pd emulated_mask_blend_pd
#define _mm512_maskz_loadu_pd emulated_maskz_loadu_pd
#define _mm512_permutex2var_pd emulated_permutex2var_pd

#endif
