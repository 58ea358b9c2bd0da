/* Vectors of 16 bytes in plain C (GCC and Clang vector types): SSE2 on x86-64, whatever else
 * elsewhere. No FMA: v_fma rounds twice, so these bits differ from those of the other sets.
 *
 * Every simd_<isa>.h defines the same names for the generic bodies in *.inc, besides v_add and the
 * like:
 *   real, vector, LANES        the element, a vector of LANES of them
 *   KEY_TILE, ROW_TILE         register tiles: KEY_TILE x 3 vectors in attention, ROW_TILE x 2 in
 *                              matmul, as many as the registers hold without spills
 *   PIECE_COLUMNS, LINE_COLUMNS   columns that are transposed at a time: of 16 bytes; of a line
 *   HALVES_BY_LANE             optional: halves are widened so slowly that it is done once
 *   PAIR_VECTORS               scores: two chains side by side in tiles at least so wide
 *   UNROLL, PAIR_UNROLL        steps along a chain without a branch between them: values and sums
 *                              over queries; pairs of chains
 *   KEEP_VECTOR(v)             optional: v is computed before what comes behind is loaded; without
 *                              it gcc fills the registers with that, and v goes to the stack
 *   v_load_once(p)             v_load into a register: the compiler does not load it again for each
 *                              use
 *   v_max(a, b), v_min(a, b)   b where either is NaN
 *   v_zero_if_less(a, b, c)    0 where a < b, else (NaN too) c
 *   v_select_equal(a, b, y, n) y where a == b, else (NaN too) n
 *   v_keep_lanes(bits, y, n)   y in the lanes whose bits are 1, lane 0 the lowest, else n
 *   v_exponent_from_low_bits   shifts the lowest bits of each lane into its exponent field
 *   v_load_apart(p, s, c)      of LANES rows, s bytes apart: the first PIECE_COLUMNS columns, a
 *                              vector each
 *   v_load_line(p, s, c)       the same of LINE_COLUMNS, rows s numbers apart, with each line of
 *                              memory read in one go
 *   v_load_pieces(r, at, c)    of the rows r[0] to r[LANES - 1], from number `at` on:
 *                              PIECE_COLUMNS columns, a vector each
 *   v_load_lines(r, at, c)     the same of LINE_COLUMNS
 *   LOADS_CHAINS               optional: few_chains.inc is faster with this set
 *   load_float16_columns       optional, LOADS_FLOAT16_COLUMNS: simd_float16_columns.h
 *   v_load_partial(p, count)   the first count lanes (0 to LANES) from memory, zeros behind
 *   v_from_bytes(p)            LANES bytes as numbers
 *   v_from_int8(p)             the same of int8_t; of float32, as the next one
 *   v_from_int4(p, &l, &h)     LANES bytes of two signed numbers each: the lower times
 *                              2^LOW_SHIFT, and the upper times 2^HIGH_SHIFT
 *   v_load_float16(p), v_load_bfloat16(p)   LANES halves (uint16_t) as float32: exact; of float32
 *   v_set1_float16(p)          the half at p, however it lies, in all lanes
 *   v_store_float16(p, a), v_store_bfloat16(p, a)   and back: to the nearest, ties to even; a NaN
 *                              stays one, and quiet. All four give the same whether
 *                              the thread counts denormal numbers as 0 or not
 *   words, WORD_LANES          a vector of uint32_t, GCC's type: ^ and + work on it
 *   words_multiply(a, b, &l, &h)   the low and the high 32 bits of each a * b
 *   doubles                    half a vector of double precision; of float32, as the next ones
 *   d_load(p), d_store(p, a)   LANES / 2 float32, widened; and back, rounded
 *   d_set1(a), d_fma(a, b, c)  a * b + c; a * b, of two float32, is exact
 *   r_fma(a, b, c)             v_fma for one number, same rounding */
#include <stdint.h>

#include "kernels/simd/inline.h"

#define ISA baseline
#define KEY_TILE 4
#define ROW_TILE 6
#define PAIR_VECTORS 4
enum { UNROLL = 1, PAIR_UNROLL = 1 };

#ifdef MHA_REAL_IS_FLOAT32
typedef float real;
typedef uint32_t bits;
#define DTYPE float32
#define MANTISSA_BITS 23
#define LANE_BITS ((vector_bits){1, 2, 4, 8})
#else
typedef double real;
typedef uint64_t bits;
#define DTYPE float64
#define MANTISSA_BITS 52
#define LANE_BITS ((vector_bits){1, 2})
#endif
#define LANES ((int)(16 / sizeof(real)))
#define PIECE_COLUMNS LANES

typedef real vector __attribute__((vector_size(16)));
typedef bits vector_bits __attribute__((vector_size(16)));
typedef real vector_in_memory __attribute__((vector_size(16), aligned(sizeof(real)), may_alias));

#define SIGN_BIT ((bits)1 << (8 * sizeof(bits) - 1))

INLINE vector v_set1(real a) { return a - (vector){0}; }
INLINE vector v_load(const real *p) { return *(const vector_in_memory *)p; }
INLINE vector v_load_once(const real *p) { return v_load(p); }
INLINE void v_store(real *p, vector a) { *(vector_in_memory *)p = a; }
INLINE vector v_add(vector a, vector b) { return a + b; }
INLINE vector v_sub(vector a, vector b) { return a - b; }
INLINE vector v_mul(vector a, vector b) { return a * b; }
INLINE vector v_div(vector a, vector b) { return a / b; }
INLINE vector v_fma(vector a, vector b, vector c) { return a * b + c; }
INLINE vector v_blend(vector_bits mask, vector yes, vector no) {
    return (vector)((mask & (vector_bits)yes) | (~mask & (vector_bits)no));
}
INLINE vector v_zero_if_less(vector a, vector b, vector value) {
    return (vector)(~(vector_bits)(a < b) & (vector_bits)value);
}
INLINE vector v_select_equal(vector a, vector b, vector yes, vector no) {
    return v_blend((vector_bits)(a == b), yes, no);
}
INLINE vector v_keep_lanes(uint32_t lanes, vector yes, vector no) {
    const vector_bits none = {0};
    return v_blend((vector_bits)(((none + lanes) & LANE_BITS) != none), yes, no);
}
INLINE vector v_max(vector a, vector b) { return v_blend((vector_bits)(a > b), a, b); }
INLINE vector v_min(vector a, vector b) { return v_blend((vector_bits)(a < b), a, b); }
INLINE vector v_abs(vector a) { return (vector)((vector_bits)a & ~SIGN_BIT); }
INLINE vector v_copy_sign(vector magnitude, vector sign) {
    return (vector)((vector_bits)magnitude | ((vector_bits)sign & SIGN_BIT));
}
INLINE vector v_exponent_from_low_bits(vector a) {
    return (vector)((vector_bits)a << MANTISSA_BITS);
}
INLINE void v_zip(vector a, vector b, vector *low, vector *high) {
    real zipped[2 * LANES];
    for (int lane = 0; lane < LANES; lane++) {
        zipped[2 * lane] = a[lane];
        zipped[2 * lane + 1] = b[lane];
    }
    *low = v_load(zipped);
    *high = v_load(zipped + LANES);
}
INLINE real r_fma(real a, real b, real c) { return a * b + c; }

#include "kernels/simd/simd_by_lane.h"

#ifdef MHA_REAL_IS_FLOAT32
#include "kernels/simd/simd_half_by_lane.h"
#endif
