/* For instruction sets that have nothing better: one lane after the other, through memory. */

INLINE vector v_load_partial(const real *p, int64_t count) {
    real lanes[LANES] = {0};
    for (int lane = 0; lane < count; lane++) {
        lanes[lane] = p[lane];
    }
    return v_load(lanes);
}
INLINE vector v_from_bytes(const uint8_t *p) {
    real lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = p[lane];
    }
    return v_load(lanes);
}
