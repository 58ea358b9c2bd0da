/* float16 by columns, for AVX2 and AVX-512: 16 rows are transposed as they are stored, and widened
 * column by column, by v_widen_float16(column, part): LANES of its rows, from part * LANES on. */
enum { FLOAT16_ROWS = 16, FLOAT16_COLUMNS = 8 };
#define LOADS_FLOAT16_COLUMNS

/* The halves of 16 rows, `stride` apart, not yet whole columns, which float16_column takes out of
 * them. pieces[4 * b + j], b = 0 and 1: columns 2 * j and 2 * j + 1 of rows 4 * b to 4 * b + 3, and
 * in the upper half of the register of the rows 8 further. */
INLINE void load_float16_columns(const uint16_t *rows, int64_t stride,
                                 __m256i pieces[FLOAT16_COLUMNS]) {
    KEEP_ADDRESS(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 8; i += 4) {
        __m256i row[4], pairs[4];
#pragma GCC unroll 16
        for (int j = 0; j < 4; j++) {
            const void *upper = rows + 8 * stride;
            row[j] = _mm256_castsi128_si256(_mm_loadu_si128((const void *)rows));
            row[j] = _mm256_inserti128_si256(row[j], _mm_loadu_si128(upper), 1);
            rows += stride;
            KEEP_ADDRESS(rows);
        }
#pragma GCC unroll 16
        for (int j = 0; j < 4; j += 2) {
            pairs[j] = _mm256_unpacklo_epi16(row[j], row[j + 1]);
            pairs[j + 1] = _mm256_unpackhi_epi16(row[j], row[j + 1]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < 2; j++) {
            pieces[i + 2 * j] = _mm256_unpacklo_epi32(pairs[j], pairs[j + 2]);
            pieces[i + 2 * j + 1] = _mm256_unpackhi_epi32(pairs[j], pairs[j + 2]);
        }
        /* Keeps the compiler from loading the other rows before: registers run out. */
        __asm__ volatile(""
                         : "+r"(rows)
                         : "x"(pieces[i]), "x"(pieces[i + 1]), "x"(pieces[i + 2]),
                           "x"(pieces[i + 3]));
    }
}

INLINE __m256i float16_column(const __m256i pieces[FLOAT16_COLUMNS], const int column) {
    const __m256i low = pieces[column / 2], high = pieces[column / 2 + 4];
    return column % 2 == 0 ? _mm256_unpacklo_epi64(low, high) : _mm256_unpackhi_epi64(low, high);
}
