/* What AVX-512 does: tiles have no doubles. */
#include "kernels/kernels.h"
#include "kernels/processor.h"

#ifdef MHA_HAS_AMX
extern const mha_attention_kernels mha_attention_kernels_float64_avx512;
extern const mha_few_queries_kernels mha_few_queries_kernels_float64_avx512;
extern const mha_matmul_kernels mha_matmul_kernels_float64_avx512;
extern const mha_elementwise_kernels mha_elementwise_kernels_float64_avx512;
extern const mha_heads_kernels mha_heads_kernels_float64_avx512;
extern const mha_math_kernels mha_math_kernels_float64_avx512;

extern const mha_kernels mha_kernels_float64_amx;
const mha_kernels mha_kernels_float64_amx = {
    .attention = &mha_attention_kernels_float64_avx512,
    .few_queries = &mha_few_queries_kernels_float64_avx512,
    .matmul = &mha_matmul_kernels_float64_avx512,
    .elementwise = &mha_elementwise_kernels_float64_avx512,
    .heads = &mha_heads_kernels_float64_avx512,
    .math = &mha_math_kernels_float64_avx512,
};
#endif
