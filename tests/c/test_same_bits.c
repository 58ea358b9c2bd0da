/* One answer everywhere: every kernel set with FMA, on any machine, gives the bits whose hash
 * stands here; without FMA every multiply-add rounds twice, and the hash is another. A change of
 * the order of sums (docs/kernels.md) changes both, and has to say so. */
#include <stdbool.h>
#include <string.h>

#include "check.h"

static const uint64_t WITH_FMA = 0xb502213d973b3cd4u, WITHOUT_FMA = 0x9b43eead28df85d9u;

enum { HEADS = 4, KV_HEADS = 2, MOST_NUMBERS = 200000, FARTHEST = 20 };

typedef struct problem {
    int64_t query_len, key_len, head_dim, value_head_dim;
    bool causal, masked, biased, additive, by_head;
    double softcap;
    uint32_t dropout_threshold;
} problem;

static const problem PROBLEMS[] = {
    {1, 700, 64, 37, .causal = false},
    {3, 1100, 40, 64, .masked = true, .biased = true},
    {5, 9, 3, 8, .causal = true},
    {50, 300, 33, 20, .softcap = 2, .causal = true},
    {49, 130, 130, 65, .masked = true, .dropout_threshold = 13107},
    {130, 200, 64, 64, .biased = true, .causal = true, .dropout_threshold = 6554},
    {60, 90, 20, 9, .additive = true},
    {3, 600, 40, 21, .by_head = true, .masked = true},
    {70, 210, 24, 33, .by_head = true, .causal = true, .dropout_threshold = 6554},
};

/* FNV-1a over numbers; + 0.0, since the sign of zero is not promised. */
static uint64_t hash_of(uint64_t hash, const void *data, int64_t count, mha_dtype dtype) {
    for (int64_t i = 0; i < count; i++) {
        const double value = element(data, i, dtype) + 0.0;
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        for (int byte = 0; byte < 8; byte++) {
            hash = (hash ^ (bits >> 8 * byte & 0xff)) * 1099511628211u;
        }
    }
    return hash;
}

static mha_tensor tensor_of(void *data, int64_t heads, int64_t rows, int64_t columns,
                            mha_dtype dtype) {
    mha_tensor tensor = {.data = data, .axes = 3, .shape = {heads, rows, columns}};
    mha_set_contiguous_strides(&tensor, dtype);
    return tensor;
}

/* (HEADS,), or (HEADS, columns). */
static mha_head_numbers by_head(void *data, int64_t columns, mha_dtype dtype) {
    return (mha_head_numbers){data, columns, columns * (int64_t)mha_dtype_size(dtype)};
}

/* What goes in, the same for every kernel set, and room for what comes out. */
static struct numbers {
    void *query, *key, *value, *bias, *gradient, *w;
    uint8_t mask[MOST_NUMBERS];
    double out[6][MOST_NUMBERS];
} numbers;

/* The gradients that are one row a head. */
static double by_heads[3][HEADS * (2 * FARTHEST + 1)];

static uint64_t hash_backward(uint64_t hash, const problem *p, const mha_attention *attention,
                              int num_threads) {
    const mha_dtype dtype = attention->dtype;
    const int64_t keys = p->key_len, queries = p->query_len;
    mha_attention_gradients gradients = {
        .attention = attention,
        .grad_output = tensor_of(numbers.gradient, HEADS, queries, p->value_head_dim, dtype),
        .grad_query = tensor_of(numbers.out[1], HEADS, queries, p->head_dim, dtype),
        .grad_key = tensor_of(numbers.out[2], KV_HEADS, keys, p->head_dim, dtype),
        .grad_value = tensor_of(numbers.out[3], KV_HEADS, keys, p->value_head_dim, dtype)};
    size_t bytes;
    if (p->by_head) {
        gradients.grad_alibi = by_head(by_heads[0], 1, dtype);
        gradients.grad_relative_bias = by_head(by_heads[1], 2 * FARTHEST + 1, dtype);
        gradients.grad_sinks = by_head(by_heads[2], 1, dtype);
    }
    CHECK_OK(mha_scaled_dot_product_attention_backward_workspace(&gradients, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_scaled_dot_product_attention_backward(&gradients, &execution));
    free_workspace(execution.workspace.base);
    for (int i = 0; p->by_head && i < 3; i++) {
        hash = hash_of(hash, by_heads[i], HEADS * (i == 1 ? 2 * FARTHEST + 1 : 1), dtype);
    }
    hash = hash_of(hash, numbers.out[1], HEADS * queries * p->head_dim, dtype);
    hash = hash_of(hash, numbers.out[2], KV_HEADS * keys * p->head_dim, dtype);
    return hash_of(hash, numbers.out[3], KV_HEADS * keys * p->value_head_dim, dtype);
}

static uint64_t hash_attention(uint64_t hash, const problem *p, mha_dtype dtype, int num_threads) {
    int64_t offset = p->key_len - p->query_len;
    mha_attention_options options = {.causal = p->causal,
                                     .window_left = MHA_UNLIMITED,
                                     .window_right = MHA_UNLIMITED,
                                     .scale = 0.3,
                                     .softcap = p->softcap,
                                     .dropout_threshold = p->dropout_threshold,
                                     .dropout_seed = 7,
                                     .query_offset = {.data = &offset}};
    if (p->biased) {
        options.bias = tensor_of(numbers.bias, HEADS, p->query_len, p->key_len, dtype);
    }
    if (p->by_head) {
        options.alibi = by_head(numbers.w, 1, dtype);
        options.relative_bias = by_head(numbers.bias, 2 * FARTHEST + 1, dtype);
        options.sinks = by_head(numbers.gradient, 1, dtype);
    }
    if (p->masked) { /* (query_len, key_len), the same for all heads */
        const mha_tensor mask = {.data = numbers.mask,
                                 .axes = 3,
                                 .shape = {HEADS, p->query_len, p->key_len},
                                 .strides = {0, p->key_len, 1}};
        options.mask = mask;
    }
    const mha_attention attention = {
        .dtype = dtype,
        .query = tensor_of(numbers.query, HEADS, p->query_len, p->head_dim, dtype),
        .key = tensor_of(numbers.key, KV_HEADS, p->key_len, p->head_dim, dtype),
        .value = tensor_of(numbers.value, KV_HEADS, p->key_len, p->value_head_dim, dtype),
        .output = tensor_of(numbers.out[0], HEADS, p->query_len, p->value_head_dim, dtype),
        .maximum = numbers.out[4],
        .denominator = numbers.out[5],
        .score_function = p->additive ? MHA_ADDITIVE : MHA_DOT_PRODUCT,
        .w_v = numbers.w,
        .options = &options};
    size_t bytes;
    CHECK_OK(mha_scaled_dot_product_attention_workspace(&attention, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_scaled_dot_product_attention_forward(&attention, &execution));
    free_workspace(execution.workspace.base);
    hash = hash_of(hash, numbers.out[0], HEADS * p->query_len * p->value_head_dim, dtype);
    return hash_backward(hash, p, &attention, num_threads);
}

static uint64_t hash_projection(uint64_t hash, int64_t rows, int64_t in, int64_t out,
                                mha_dtype dtype, int num_threads) {
    const int64_t item = (int64_t)mha_dtype_size(dtype);
    const mha_weight weight = {
        .data = numbers.bias, .in = in, .out = out, .in_stride = out * item, .out_stride = item};
    const mha_linear_projection projection =
        mha_contiguous_projection(dtype, numbers.key, rows, &weight, numbers.query, numbers.out[0]);
    project(&projection, num_threads);
    return hash_of(hash, numbers.out[0], rows * out, dtype);
}

/* Rows that rotate at far positions, there and back. In turns: each pair by one of three position
 * axes, which are alike. */
static uint64_t hash_rotation(uint64_t hash, bool interleaved, bool in_turns, mha_dtype dtype,
                              int num_threads) {
    enum { LENGTH = 150, WIDTH = 70, PAIRS = 33 };
    double frequencies[PAIRS];
    int64_t positions[LENGTH], axes[PAIRS];
    for (int c = 0; c < PAIRS; c++) {
        axes[c] = c % 3;
        frequencies[c] = 1.0 / (1 + c * c);
    }
    for (int64_t i = 0; i < LENGTH; i++) {
        positions[i] = (i - 70) * 1234567;
    }
    const mha_rotary rotary = {2 * PAIRS, interleaved, frequencies, 1.1, in_turns ? axes : NULL};
    mha_rotation rotation = {.dtype = dtype,
                             .rotary = &rotary,
                             .x = tensor_of(numbers.query, HEADS, LENGTH, WIDTH, dtype),
                             .positions = {.data = positions,
                                           .axes = in_turns ? 2 : 1,
                                           .shape = {LENGTH, 3},
                                           .strides = {sizeof *positions, 0}},
                             .output = numbers.out[0]};
    size_t bytes;
    CHECK_OK(mha_rotary_workspace(&rotation, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_rotary_forward(&rotation, &execution));
    hash = hash_of(hash, numbers.out[0], HEADS * LENGTH * WIDTH, dtype);
    rotation.output = numbers.out[1];
    CHECK_OK(mha_rotary_backward(&rotation, &execution));
    free_workspace(execution.workspace.base);
    return hash_of(hash, numbers.out[1], HEADS * LENGTH * WIDTH, dtype);
}

static uint64_t hash_all(int num_threads) {
    static float floats[6][MOST_NUMBERS];
    static double doubles[6][MOST_NUMBERS];
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < 6 && floats[i][0] == 0; i++) { /* once: the sequence goes on */
        fill_random(doubles[i], MOST_NUMBERS, MHA_FLOAT64);
        for (int64_t k = 0; k < MOST_NUMBERS; k++) {
            floats[i][k] = (float)doubles[i][k];
            numbers.mask[k] = doubles[i][k] < 0.5;
        }
    }
    for (mha_dtype dtype = MHA_FLOAT32; dtype <= MHA_FLOAT64; dtype++) {
        void **const to[] = {&numbers.query, &numbers.key,      &numbers.value,
                             &numbers.bias,  &numbers.gradient, &numbers.w};
        for (int i = 0; i < 6; i++) {
            *to[i] = dtype == MHA_FLOAT32 ? (void *)floats[i] : (void *)doubles[i];
        }
        for (size_t i = 0; i < sizeof PROBLEMS / sizeof *PROBLEMS; i++) {
            hash = hash_attention(hash, &PROBLEMS[i], dtype, num_threads);
        }
        hash = hash_projection(hash, 1, 300, 100, dtype, num_threads);
        hash = hash_projection(hash, 7, 130, 65, dtype, num_threads);
        hash = hash_projection(hash, 500, 150, 70, dtype, num_threads);
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            const uint64_t before = hash;
            hash = hash_rotation(before, interleaved, false, dtype, num_threads);
            CHECK(hash_rotation(before, interleaved, true, dtype, num_threads) == hash);
        }
    }
    return hash;
}

/* AMX adds up otherwise, and has bits of its own. */
static void test_same_bits(void) {
    const char *name = mha_instruction_set();
    uint64_t wanted = strcmp(name, "baseline") == 0 ? WITHOUT_FMA : WITH_FMA;
    for (int num_threads = 1; num_threads <= 3; num_threads++) {
        const uint64_t hash = hash_all(num_threads);
        printf("%s, %d threads: %016llx\n", name, num_threads, (unsigned long long)hash);
        if (strcmp(name, "amx") == 0 && num_threads == 1) {
            wanted = hash;
        }
        CHECK(hash == wanted);
    }
}

int main(void) {
    puts("one hash for all sets with FMA; the baseline and AMX have their own");
    on_every_instruction_set(test_same_bits);
    puts("test_same_bits: passed");
    return 0;
}
