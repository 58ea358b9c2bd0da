/* For instruction sets with vectors of 16 bytes, and nothing better than one lane after the other,
 * through memory. They have v_zip(a, b, &low, &high): a0 b0 a1 b1 ..., the first half of the pairs
 * and the second. */

NOINLINE vector v_load_partial(const real *p, int64_t count) {
    real lanes[LANES] = {0};
    for (int lane = 0; lane < count; lane++) {
        lanes[lane] = p[lane];
    }
    return v_load(lanes);
}
INLINE void v_turn(vector columns[LANES]) {
    /* Each round of zipping moves one bit of an element's row number into its column number. */
#pragma GCC unroll 16
    for (int round = 1; round < LANES; round *= 2) {
        vector zipped[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            v_zip(columns[i], columns[i + LANES / 2], &zipped[2 * i], &zipped[2 * i + 1]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            columns[i] = zipped[i];
        }
    }
}
INLINE void v_load_apart(const void *rows, int64_t apart, vector columns[PIECE_COLUMNS]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        columns[i] = v_load((const void *)((const char *)rows + i * apart));
    }
    v_turn(columns);
}
INLINE void v_load_pieces(const real *const row[LANES], int64_t at, vector columns[PIECE_COLUMNS]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        columns[i] = v_load(row[i] + at);
    }
    v_turn(columns);
}
INLINE vector v_from_bytes(const uint8_t *p) {
    real lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = p[lane];
    }
    return v_load(lanes);
}
#ifdef MHA_REAL_IS_FLOAT32
typedef double doubles __attribute__((vector_size(2 * sizeof(double))));
INLINE doubles d_set1(double a) { return (doubles){a, a}; }
INLINE doubles d_load(const real *p) { return (doubles){p[0], p[1]}; }
INLINE void d_store(real *p, doubles a) { p[0] = (real)a[0], p[1] = (real)a[1]; }
INLINE doubles d_fma(doubles a, doubles b, doubles c) { return a * b + c; } /* a * b is exact */

enum { LOW_SHIFT = 0, HIGH_SHIFT = 0 };
INLINE vector v_from_int8(const uint8_t *p) {
    real lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = (int8_t)p[lane];
    }
    return v_load(lanes);
}
INLINE void v_from_int4(const uint8_t *p, vector *low, vector *high) {
    real lows[LANES], highs[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        lows[lane] = (real)(((p[lane] & 15) ^ 8) - 8);
        highs[lane] = (real)((p[lane] >> 4 ^ 8) - 8);
    }
    *low = v_load(lows);
    *high = v_load(highs);
}
#endif

enum { WORD_LANES = 4 };
typedef uint32_t words __attribute__((vector_size(4 * WORD_LANES)));
INLINE void words_multiply(words a, uint32_t b, words *low, words *high) {
    for (int lane = 0; lane < WORD_LANES; lane++) {
        const uint64_t product = (uint64_t)a[lane] * b;
        (*low)[lane] = (uint32_t)product;
        (*high)[lane] = (uint32_t)(product >> 32);
    }
}
