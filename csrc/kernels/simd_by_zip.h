/* For instruction sets whose v_zip is one instruction for each result. */

/* The transposed of a LANES x LANES tile: log2(LANES) rounds of zipping row i with row i + half,
 * each of which moves one bit of an element's row number into its column number. */
INLINE void v_transpose(vector rows[LANES]) {
#pragma GCC unroll 16
    for (int round = 1; round < LANES; round *= 2) {
        vector zipped[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            v_zip(rows[i], rows[i + LANES / 2], &zipped[2 * i], &zipped[2 * i + 1]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            rows[i] = zipped[i];
        }
    }
}
