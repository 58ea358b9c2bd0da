/* What AVX-512 does, but for products of matrices of float32. */
#include <immintrin.h>
#include <string.h>

#include "kernels/simd/inline.h"
#include "kernels/kernels.h"
#include "kernels/processor.h"

#ifdef MHA_HAS_AMX
/* Not by flags of instruction_sets.txt, which older compilers would not know. */
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("amx-tile,amx-bf16")
#endif

extern const mha_attention_kernels mha_attention_kernels_float32_avx512;
extern const mha_few_queries_kernels mha_few_queries_kernels_float32_avx512;
extern const mha_elementwise_kernels mha_elementwise_kernels_float32_avx512;
extern const mha_heads_kernels mha_heads_kernels_float32_avx512;
extern const mha_math_kernels mha_math_kernels_float32_avx512;

#include "kernels/products/matmul_amx.inc"

#include "kernels/products/pack_amx.inc"

static const mha_matmul_kernels products = {
    .panels = {.columns = PANEL_COLUMNS,
               .row_bytes = PANEL_BLOCKS * STEP / TILE_DEPTH,
               .row_multiple = TILE_DEPTH,
               .is_plain = false,
               .in_one_go = 1,
               .pack = mha_pack_panel_float32_amx,
               .unpack = mha_unpack_panel_float32_amx},
    .rows = {.multiple = BLOCK, .item = PARTS * 2, .arrange = mha_arrange_rows_float32_amx},
    .multiply = mha_matmul_float32_amx,
};

const mha_kernels mha_kernels_float32_amx = {
    .attention = &mha_attention_kernels_float32_avx512,
    .few_queries = &mha_few_queries_kernels_float32_avx512,
    .matmul = &products,
    .elementwise = &mha_elementwise_kernels_float32_avx512,
    .heads = &mha_heads_kernels_float32_avx512,
    .math = &mha_math_kernels_float32_avx512,
};

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
