/* exp2, log, tanh and sigmoid against libm in higher precision, and Philox against published
 * vectors. */
#include <float.h>
#include <string.h>

#include "kernels/elementwise/dropout.h"
#include "kernels/kernels.h"
#include "check.h"

enum { BATCH = 1 << 16 };

static double ulp_of(double value, mha_dtype dtype) {
    const int digits = dtype == MHA_FLOAT32 ? FLT_MANT_DIG : DBL_MANT_DIG;
    int exponent;
    frexp(value, &exponent);
    return ldexp(1, exponent - digits);
}

/* The floats from `first` down to -126 by their bits, in steps of `step`. */
static double worst_exp2_error(float first, uint32_t step) {
    static float x[BATCH], y[BATCH];
    const mha_math_kernels *kernels = mha_kernels_for(MHA_FLOAT32)->math;
    const float least = -126;
    uint32_t bits, last;
    double worst = 0;
    memcpy(&bits, &first, sizeof bits);
    memcpy(&last, &least, sizeof last);
    while (bits <= last) {
        int count = 0;
        for (; count < BATCH && bits <= last; count++, bits += step) {
            memcpy(&x[count], &bits, sizeof bits);
        }
        kernels->exp2(x, y, count);
        for (int i = 0; i < count; i++) {
            const double exact = exp2((double)x[i]);
            worst = fmax(worst, fabs(y[i] - exact) / ulp_of(exact, MHA_FLOAT32));
        }
    }
    return worst;
}

static void test_exp2_float32(void) {
    /* Every float where 2^x is not just 1; of the tiny ones a sample. Baseline and emulators are
     * slow: a sample. */
#ifdef SAMPLE_FLOATS
    const int step = 31;
#else
    const int step = strcmp(mha_instruction_set(), "baseline") == 0 ? 31 : 1;
#endif
    const double worst =
        fmax(worst_exp2_error(-0x1p-26f, step), worst_exp2_error(-0x1p-149f, 10007));
    printf("exp2 float32 %s: at most %.3f ulp\n", mha_instruction_set(), worst);
    CHECK(worst <= 2);

    const float edges[] = {0, -0.0f, -126, -126.0001f, -1000, -INFINITY, NAN};
    float results[7];
    mha_kernels_for(MHA_FLOAT32)->math->exp2(edges, results, 7);
    CHECK(results[0] == 1 && results[1] == 1 && results[2] == FLT_MIN);
    CHECK(results[3] == 0 && results[4] == 0 && results[5] == 0 && isnan(results[6]));
}

typedef void elementwise(const void *x, void *y, int64_t count);

/* The worst error in ulp of 200,000 points between low and high. */
static double worst_error(mha_dtype dtype, elementwise *function, long double (*exact)(long double),
                          double low, double high) {
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        double x = low + (high - low) * (next_random() + 1) / 2, y;
        if (dtype == MHA_FLOAT32) {
            float narrow = (float)x, result;
            function(&narrow, &result, 1);
            x = narrow;
            y = result;
        } else {
            function(&x, &y, 1);
        }
        const long double wanted = exact((long double)x);
        worst = fmax(worst, (double)(fabsl((long double)y - wanted) /
                                     (long double)ulp_of((double)wanted, dtype)));
    }
    return worst;
}

static void test_functions(void) {
    for (mha_dtype dtype = MHA_FLOAT32; dtype <= MHA_FLOAT64; dtype++) {
        const mha_math_kernels *kernels = mha_kernels_for(dtype)->math;
        const double exp2_error = worst_error(dtype, kernels->exp2, exp2l, -125, 0);
        double log_error = worst_error(dtype, kernels->log, logl, 1.5, 1e6);
        log_error = fmax(log_error, worst_error(dtype, kernels->log, logl, 1, 1.5));
        log_error = fmax(log_error, worst_error(dtype, kernels->log, logl, 1.5, 4));
        double tanh_error = worst_error(dtype, kernels->tanh, tanhl, -25, 25);
        tanh_error = fmax(tanh_error, worst_error(dtype, kernels->tanh, tanhl, -1e-3, 1e-3));
        tanh_error = fmax(tanh_error, worst_error(dtype, kernels->tanh, tanhl, -1, 1));
        printf("float%d %s: exp2 %.2f, log %.2f, tanh %.2f ulp\n", dtype == MHA_FLOAT32 ? 32 : 64,
               mha_instruction_set(), exp2_error, log_error, tanh_error);
        CHECK(exp2_error <= 2);
        CHECK(log_error <= 2);
        CHECK(tanh_error <= 4);
    }
    const float edges[] = {0, INFINITY, -INFINITY, NAN, 1e30f};
    float results[5];
    mha_kernels_for(MHA_FLOAT32)->math->tanh(edges, results, 5);
    CHECK(results[0] == 0 && results[1] == 1 && results[2] == -1 && isnan(results[3]));
    CHECK(results[4] == 1);
}

/* sigmoid(x) and its slope at its ends and in the middle. */
static void test_sigmoid(void) {
    const float x[] = {0, INFINITY, -INFINITY, NAN, -1e30f, 1e30f, -80, 80};
    float sigmoids[8], slopes[8];
    mha_kernels_for(MHA_FLOAT32)->elementwise->sigmoid(x, sigmoids, slopes, 8);
    CHECK(sigmoids[0] == 0.5f && sigmoids[1] == 1 && sigmoids[2] == 0 && isnan(sigmoids[3]));
    CHECK(sigmoids[4] == 0 && sigmoids[5] == 1 && sigmoids[7] == 1);
    CHECK(slopes[0] == 0.25f && slopes[1] == 0 && slopes[2] == 0 && isnan(slopes[3]));
    CHECK(fabs(sigmoids[6] / exp(-80) - 1) < 1e-5 && fabs(slopes[7] / exp(-80) - 1) < 1e-5);
}

/* Known answers of Random123's philox4x32. */
static void test_philox(void) {
    static const struct {
        int rounds;
        uint64_t seed;
        uint32_t counter[4], expected[4];
    } vectors[] = {
        {7, 0, {0, 0, 0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        {7,
         0xffffffffffffffff,
         {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        {7,
         0x299f31d0a4093822,
         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
        {10, 0, {0, 0, 0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        philox_words counter;
        memcpy(counter.word, vectors[i].counter, sizeof counter.word);
        const philox_words random = philox4x32(counter, vectors[i].seed, vectors[i].rounds);
        CHECK(memcmp(random.word, vectors[i].expected, sizeof random.word) == 0);
    }
}

int main(void) {
    test_philox();
    on_every_instruction_set(test_exp2_float32);
    on_every_instruction_set(test_functions);
    on_every_instruction_set(test_sigmoid);
    puts("test_math: passed");
    return 0;
}
