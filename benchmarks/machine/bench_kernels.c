/* Each kernel alone, one thread, as a fraction of what the machine can do: of the FMA rate for what
 * computes, of the read rate for what reads. The rate is measured before every run of the kernel.
 *
 *     bench_kernels [rounds [shapes that contain this text]]
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/projection/matmul.h"
#include "kernels/kernels.h"
#include "machine.h"
#include "mha/mha.h"

enum { MAX_ROUNDS = 1000 };

typedef struct bench {
    const char *name;
    const char *shape;
    double operations; /* floating-point, of one run */
    double bytes;      /* read, of one run; 0 where the FMA rate is the measure */
    void (*run)(void *context);
    void *context;
} bench;

static int rounds = 21;
static const char *wanted = "";

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare);
    return values[count / 2];
}

static double seconds_of(const bench *b) {
    int repeats = 1;
    for (;;) {
        const double begin = machine_now();
        for (int i = 0; i < repeats; i++) {
            b->run(b->context);
        }
        const double elapsed = machine_now() - begin;
        if (elapsed > 4e-3) {
            return elapsed / repeats;
        }
        repeats *= 2;
    }
}

static float *random_floats(size_t count) {
    float *values = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    if (values == NULL) {
        fprintf(stderr, "bench_kernels: out of memory\n");
        exit(1);
    }
    unsigned state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / (1 << 23) - 1;
    }
    return values;
}

static void report(const bench *b) {
    if (strstr(b->shape, wanted) == NULL && strstr(b->name, wanted) == NULL) {
        return;
    }
    double fractions[MAX_ROUNDS], rates[MAX_ROUNDS];
    float *buffer = b->bytes > 0 ? random_floats((size_t)b->bytes / sizeof(float)) : NULL;
    for (int round = 0; round < rounds; round++) {
        const double peak = buffer == NULL ? machine_fma_rate(mha_instruction_set(), 0, 3e-3)
                                           : machine_read_rate(buffer, (size_t)b->bytes, 3e-3);
        const double rate = (buffer == NULL ? b->operations : b->bytes) / seconds_of(b);
        rates[round] = rate;
        fractions[round] = rate / peak;
    }
    const double fraction = median(fractions, rounds);
    printf("| %s | %s | %.1f %s | %.0f %% (%.0f to %.0f) |\n", b->name, b->shape,
           median(rates, rounds) * 1e-9, buffer == NULL ? "GFLOP/s" : "GB/s", 100 * fraction,
           100 * fractions[rounds / 10], 100 * fractions[rounds - 1 - rounds / 10]);
    fflush(stdout);
    free(buffer);
}

typedef enum attention_kind { PLAIN, CAUSAL, BIAS, WEIGHTS, GRADIENTS } attention_kind;
static const char *const KIND_NAMES[] = {"attention", "attention, causal", "attention, bias",
                                         "attention, weights returned", "attention and gradients"};

typedef struct attention_context {
    mha_attention attention;
    mha_attention_options options;
    mha_attention_gradients gradients;
    bool goes_back;
    mha_execution execution;
    float *arrays[16]; /* all that it owns */
    int count;
} attention_context;

static void run_attention(void *context) {
    attention_context *c = context;
    if (mha_scaled_dot_product_attention_forward(&c->attention, &c->execution) != MHA_OK ||
        (c->goes_back &&
         mha_scaled_dot_product_attention_backward(&c->gradients, &c->execution) != MHA_OK)) {
        exit(1);
    }
}

static float *own_floats(attention_context *c, int64_t count) {
    return c->arrays[c->count++] = random_floats((size_t)count);
}

static mha_tensor own_tensor(attention_context *c, int64_t heads, int64_t rows, int64_t columns) {
    mha_tensor tensor = {
        .data = own_floats(c, heads * rows * columns), .axes = 3, .shape = {heads, rows, columns}};
    mha_set_contiguous_strides(&tensor, MHA_FLOAT32);
    return tensor;
}

typedef struct attention_shape {
    int64_t heads, query_len, key_len, head_dim;
} attention_shape;

static void fill_attention(attention_context *c, attention_shape n, attention_kind kind) {
    mha_attention *a = &c->attention;
    c->options = (mha_attention_options){.scale = 1 / sqrt((double)n.head_dim),
                                         .window_left = MHA_UNLIMITED,
                                         .window_right = MHA_UNLIMITED,
                                         .causal = kind == CAUSAL};
    *a = (mha_attention){.dtype = MHA_FLOAT32, .options = &c->options};
    a->query = own_tensor(c, n.heads, n.query_len, n.head_dim);
    a->key = own_tensor(c, n.heads, n.key_len, n.head_dim);
    a->value = own_tensor(c, n.heads, n.key_len, n.head_dim);
    a->output = own_tensor(c, n.heads, n.query_len, n.head_dim);
    if (kind == BIAS) {
        c->options.bias = own_tensor(c, n.heads, n.query_len, n.key_len);
    }
    if (kind == WEIGHTS) {
        a->weights = own_floats(c, n.heads * n.query_len * n.key_len);
    }
    if (kind == GRADIENTS) {
        a->maximum = own_floats(c, n.heads * n.query_len);
        a->denominator = own_floats(c, n.heads * n.query_len);
        c->gradients = (mha_attention_gradients){
            .attention = a,
            .grad_output = own_tensor(c, n.heads, n.query_len, n.head_dim),
            .grad_query = own_tensor(c, n.heads, n.query_len, n.head_dim),
            .grad_key = own_tensor(c, n.heads, n.key_len, n.head_dim),
            .grad_value = own_tensor(c, n.heads, n.key_len, n.head_dim)};
        c->goes_back = true;
    }
}

static void take_workspace(attention_context *c) {
    size_t forward, backward = 0;
    if (mha_scaled_dot_product_attention_workspace(&c->attention, 1, &forward) != MHA_OK ||
        (c->goes_back && mha_scaled_dot_product_attention_backward_workspace(
                             &c->gradients, 1, &backward) != MHA_OK)) {
        exit(1);
    }
    const size_t bytes = forward > backward ? forward : backward;
    c->execution = (mha_execution){.num_threads = 1};
    c->execution.workspace.base = (char *)own_floats(c, (int64_t)(bytes / sizeof(float) + 1));
    c->execution.workspace.size = bytes;
}

static void bench_attention(int64_t heads, int64_t query_len, int64_t key_len, int64_t head_dim,
                            attention_kind kind) {
    enum { FORWARD_PRODUCTS = 2, ALL_PRODUCTS = 7 };
    char shape[100];
    attention_context context = {.count = 0};
    fill_attention(&context, (attention_shape){heads, query_len, key_len, head_dim}, kind);
    take_workspace(&context);
    snprintf(shape, sizeof shape, "%lld heads, %lld queries, %lld keys, head_dim %lld",
             (long long)heads, (long long)query_len, (long long)key_len, (long long)head_dim);
    const double pairs = (double)query_len * (double)key_len,
                 visible = kind == CAUSAL ? (pairs + (double)query_len) / 2 : pairs;
    const double one_product = 2.0 * (double)heads * visible * (double)head_dim;
    const bench b = {KIND_NAMES[kind],
                     shape,
                     one_product * (kind == GRADIENTS ? ALL_PRODUCTS : FORWARD_PRODUCTS),
                     query_len <= 8 ? 2.0 * 4 * (double)heads * (double)key_len * (double)head_dim
                                    : 0,
                     run_attention,
                     &context};
    report(&b);
    for (int i = 0; i < context.count; i++) {
        free(context.arrays[i]);
    }
}

typedef struct matmul_context {
    mha_linear_projection projection;
    mha_execution execution;
} matmul_context;

static void run_matmul(void *context) {
    matmul_context *c = context;
    if (mha_linear_projection_forward(&c->projection, 1, &c->execution) != MHA_OK) {
        exit(1);
    }
}

static void bench_matmul(int64_t rows, int64_t in, int64_t out) {
    char shape[100];
    size_t bytes;
    if (mha_packed_weight_size(MHA_FLOAT32, in, out, &bytes) != MHA_OK) {
        exit(1);
    }
    float *x = random_floats((size_t)(rows * in)), *weight = random_floats((size_t)(in * out));
    float *output = random_floats((size_t)(rows * out)), *packed = random_floats(bytes / 4);
    const mha_weight unpacked = {
        .data = weight, .in = in, .out = out, .in_stride = out * 4, .out_stride = 4};
    const mha_weight_packing packing = {MHA_FLOAT32, unpacked, packed};
    mha_execution one_thread = {.num_threads = 1};
    if (mha_pack_weight(&packing, &one_thread) != MHA_OK) {
        exit(1);
    }
    const mha_weight in_panels = mha_packed_weight(&packing);
    matmul_context context = {
        mha_contiguous_projection(MHA_FLOAT32, x, rows, &in_panels, NULL, output),
        {.num_threads = 1}};
    if (mha_linear_projection_workspace(&context.projection, 1, 1, &bytes) != MHA_OK) {
        exit(1);
    }
    context.execution.workspace.base = aligned_alloc(64, bytes / 64 * 64 + 64);
    context.execution.workspace.size = bytes;
    snprintf(shape, sizeof shape, "%lld rows, %lld x %lld, packed", (long long)rows, (long long)in,
             (long long)out);
    const bench b = {"matmul",
                     shape,
                     2.0 * (double)rows * (double)in * (double)out,
                     rows <= 4 ? 4.0 * (double)in * (double)out : 0,
                     run_matmul,
                     &context};
    report(&b);
    free(x), free(weight), free(output), free(packed), free(context.execution.workspace.base);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        rounds = atoi(argv[1]);
        rounds = rounds < 1 ? 1 : rounds > MAX_ROUNDS ? MAX_ROUNDS : rounds;
    }
    wanted = argc > 2 ? argv[2] : wanted;
    printf("| kernel (%s) | shape | rate | of what the machine can do (10th to 90th percentile) |\n"
           "|---|---|---|---|\n",
           mha_instruction_set());
    /* With everything in the second cache: what calls can at best come to. */
    bench_attention(2, 128, 128, 64, PLAIN);
    bench_attention(2, 128, 128, 64, WEIGHTS);
    bench_attention(1, 128, 128, 64, GRADIENTS);
    bench_attention(1, 300, 300, 64, CAUSAL);
    bench_attention(1, 512, 512, 64, PLAIN);
    bench_attention(1, 512, 512, 64, BIAS);
    bench_attention(1, 1024, 1024, 64, CAUSAL);
    bench_attention(12, 128, 128, 64, PLAIN);
    bench_attention(12, 512, 512, 64, PLAIN);
    bench_attention(12, 1024, 1024, 32, PLAIN);
    bench_attention(2, 4096, 4096, 64, PLAIN);
    bench_attention(2, 4096, 4096, 128, PLAIN);
    bench_attention(1, 2048, 8192, 256, PLAIN);
    bench_attention(12, 1, 4096, 64, PLAIN);
    bench_attention(2, 4, 4096, 128, PLAIN);
    bench_matmul(1024, 768, 768);
    bench_matmul(512, 512, 512);
    bench_matmul(96, 768, 768);
    bench_matmul(32, 768, 768);
    bench_matmul(16, 384, 384);
    bench_matmul(4, 768, 768);
    bench_matmul(1, 768, 768);
    return 0;
}
