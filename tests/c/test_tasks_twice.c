/* All tasks of a job may run once more, in the child of a signal handler that forks: none may
 * change what another or it itself reads. Here every job runs twice. */
#include <string.h>

#include "threads/pool.h"
#include "check.h"

#ifdef SAMPLE_FLOATS
enum { LENGTH = 560 }; /* for an emulator: heads are still copied, those of sequences too */
#else
enum { LENGTH = 900 };
#endif
#ifdef IN_EMULATOR /* of a machine: some minutes for each number */
enum { FEWEST_THREADS = 2 };
#else
enum { FEWEST_THREADS = 1 };
#endif
enum { BATCH = 2, DIM = 48, HEADS = 4, KV_HEADS = 2, KV_DIM = 24 };
enum { DISTANCES = 31 };
enum { NUMBERS = BATCH * LENGTH * DIM, ROWS = BATCH * LENGTH };

static bool twice;

/* The linker gives every call of mha_pool_run to the first, and the pool itself by the second. */
mha_status __wrap_mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                               void *context, const mha_cancel *cancel);
mha_status __real_mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                               void *context, const mha_cancel *cancel);

mha_status __wrap_mha_pool_run(int64_t num_tasks, int num_threads, mha_task_function function,
                               void *context, const mha_cancel *cancel) {
    MHA_TRY(__real_mha_pool_run(num_tasks, num_threads, function, context, cancel));
    return twice ? __real_mha_pool_run(num_tasks, num_threads, function, context, cancel) : MHA_OK;
}

static struct numbers {
    double x[NUMBERS], W[4][DIM * DIM], b[DIM], gate[HEADS], bias[HEADS * LENGTH * LENGTH];
    double alibi[HEADS], relative_bias[HEADS * DISTANCES], sinks[HEADS];
    double grad_output[NUMBERS];
} in;

static struct results {
    double output[NUMBERS], projected[3][NUMBERS], attended[NUMBERS], merged[NUMBERS];
    double maximum[BATCH * HEADS * LENGTH], denominator[BATCH * HEADS * LENGTH];
    double grad_x[3][NUMBERS], grad_W[4][DIM * DIM], grad_b[4][DIM], grad_gate[HEADS];
    double grad_bias[HEADS * LENGTH * LENGTH];
    double grad_alibi[HEADS], grad_relative_bias[HEADS * DISTANCES], grad_sinks[HEADS];
    double unprepared[2][NUMBERS], grad_norm[2][DIM]; /* with norms and rotation */
    double rotated[NUMBERS];                          /* a figure whose heads are whole panels */
} once, again;

static void fill(double *numbers, int count, unsigned seed) {
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        numbers[i] = (double)(int)seed / 4294967296.0;
    }
}

static mha_weight weight_of(const double *data, int64_t rows, int64_t columns) {
    const mha_weight weight = {
        .data = data, .in = rows, .out = columns, .in_stride = columns * 8, .out_stride = 8};
    return weight;
}

/* (batch, heads, query_len, key_len), one for all batch items. */
static mha_tensor bias_of(double *data) {
    const mha_tensor bias = {.data = data,
                             .axes = 4,
                             .shape = {BATCH, HEADS, LENGTH, LENGTH},
                             .strides = {0, LENGTH * LENGTH * 8, LENGTH * 8, 8}};
    return bias;
}

/* (heads,) or (heads, columns). */
static mha_head_numbers by_head(double *data, int64_t columns) {
    return (mha_head_numbers){data, columns, columns * (int64_t)sizeof *data};
}

static mha_attention_options options_by_head(void) {
    return (mha_attention_options){.alibi = by_head(in.alibi, 1),
                                   .relative_bias = by_head(in.relative_bias, DISTANCES),
                                   .sinks = by_head(in.sinks, 1),
                                   .causal = true,
                                   .window_left = MHA_UNLIMITED,
                                   .window_right = MHA_UNLIMITED,
                                   .scale = 0.3,
                                   .dropout_threshold = 9000,
                                   .dropout_seed = 5};
}

static const double FREQUENCIES[DIM / 2] = {1, 0.5, 0.25, 0.01};
static const mha_rotary ROTARY = {.dims = 8, .frequencies = FREQUENCIES, .magnitude = 1};

static void run_figure(struct results *r, bool key_is_query, bool prepares, int num_threads) {
    const int64_t head_dim = DIM / HEADS;
    const mha_head_norm each = {prepares ? in.b : NULL, head_dim, 1e-6, 1};
    const mha_head_norm whole = {prepares ? in.b : NULL, KV_HEADS * head_dim, 1e-6, 1};
    mha_attention_options options = options_by_head();
    options.bias = bias_of(in.bias);
    const mha_multi_head_attention layer = {
        .dtype = MHA_FLOAT64,
        .batch_axes = 1,
        .batch_shape = {BATCH},
        .query_len = LENGTH,
        .key_len = LENGTH,
        .num_heads = HEADS,
        .num_kv_heads = KV_HEADS,
        .query = in.x,
        .key = in.x,
        .value = in.x,
        .W_q = weight_of(in.W[0], DIM, DIM),
        .W_k = weight_of(in.W[1], DIM, KV_DIM),
        .W_v = weight_of(in.W[2], DIM, KV_DIM),
        .W_o = weight_of(in.W[3], DIM, DIM),
        .b_q = in.b,
        .head_gate = in.gate,
        .q_norm = each,
        .k_norm = whole,
        .rotary = prepares ? &ROTARY : NULL,
        .options = &options,
        .output = r->output,
        .maximum = r->maximum,
        .denominator = r->denominator,
        .saved = {r->projected[0], r->projected[1], r->projected[2], r->attended, r->merged,
                  prepares ? r->unprepared[0] : NULL, prepares ? r->unprepared[1] : NULL}};
    const mha_multi_head_attention_gradients gradients = {
        .layer = &layer,
        .grad_output = in.grad_output,
        .grad_query = r->grad_x[0],
        .grad_key = key_is_query ? NULL : r->grad_x[1],
        .grad_value = key_is_query ? NULL : r->grad_x[2],
        .grad_W_q = r->grad_W[0],
        .grad_W_k = r->grad_W[1],
        .grad_W_v = r->grad_W[2],
        .grad_W_o = r->grad_W[3],
        .grad_b_q = r->grad_b[0],
        .grad_b_k = r->grad_b[1],
        .grad_b_o = r->grad_b[3],
        .grad_q_norm = prepares ? r->grad_norm[0] : NULL,
        .grad_k_norm = prepares ? r->grad_norm[1] : NULL,
        .grad_head_gate = r->grad_gate,
        .grad_bias = bias_of(r->grad_bias),
        .grad_alibi = by_head(r->grad_alibi, 1),
        .grad_relative_bias = by_head(r->grad_relative_bias, DISTANCES),
        .grad_sinks = by_head(r->grad_sinks, 1),
        .key_is_query = key_is_query,
        .value_is_key = key_is_query};
    size_t bytes, backward_bytes;
    CHECK_OK(mha_multi_head_attention_workspace(&layer, num_threads, &bytes));
    CHECK_OK(mha_multi_head_attention_backward_workspace(&gradients, num_threads, &backward_bytes));
    mha_execution execution =
        execution_of(bytes > backward_bytes ? bytes : backward_bytes, num_threads);
    CHECK_OK(mha_multi_head_attention_forward(&layer, &execution));
    CHECK_OK(mha_multi_head_attention_backward(&gradients, &execution));
    free_workspace(execution.workspace.base);
}

/* 3 heads of 16 columns: the tasks that project them turn them, too. */
static void run_rotated(struct results *r, int num_threads) {
    const mha_attention_options options = {
        .window_left = MHA_UNLIMITED, .window_right = MHA_UNLIMITED, .scale = 0.3};
    const mha_weight W = weight_of(in.W[0], DIM, DIM);
    const mha_multi_head_attention layer = {.dtype = MHA_FLOAT64,
                                            .batch_axes = 1,
                                            .batch_shape = {BATCH},
                                            .query_len = LENGTH,
                                            .key_len = LENGTH,
                                            .num_heads = 3,
                                            .num_kv_heads = 3,
                                            .query = in.x,
                                            .key = in.x,
                                            .value = in.x,
                                            .W_q = W,
                                            .W_k = W,
                                            .W_v = W,
                                            .W_o = W,
                                            .q_norm = {in.b, DIM / 3, 1e-6, 1},
                                            .rotary = &ROTARY,
                                            .options = &options,
                                            .output = r->rotated};
    size_t bytes;
    CHECK_OK(mha_multi_head_attention_workspace(&layer, num_threads, &bytes));
    mha_execution execution = execution_of(bytes, num_threads);
    CHECK_OK(mha_multi_head_attention_forward(&layer, &execution));
    free_workspace(execution.workspace.base);
}

static void test_figure(void) {
    for (int kind = 0; kind < 4; kind++) {
        memset(&once, 0, sizeof once);
        twice = false;
        run_figure(&once, kind % 2 == 1, kind >= 2, 1);
        run_rotated(&once, 1);
        twice = true;
        for (int num_threads = FEWEST_THREADS; num_threads <= 2; num_threads++) {
            memset(&again, 0, sizeof again);
            run_figure(&again, kind % 2 == 1, kind >= 2, num_threads);
            run_rotated(&again, num_threads);
            CHECK(memcmp(&once, &again, sizeof once) == 0);
        }
    }
}

/* The rows of x as a ragged batch of sequences, one of them long, one empty, one of few queries. */
static mha_tensor rows_by_head(double *data, int64_t heads, int64_t columns) {
    const int64_t row = heads * columns * 8;
    const mha_tensor tensor = {
        .data = data, .axes = 3, .shape = {heads, ROWS, columns}, .strides = {columns * 8, row, 8}};
    return tensor;
}

static void run_ragged(struct results *r, int num_threads) {
    static const int64_t query_starts[] = {0, 40, 40, ROWS - 560, ROWS - 558, ROWS};
    static const int64_t key_starts[] = {0, 100, 130, ROWS - 400, ROWS - 200, ROWS};
    static const int64_t query_offset[] = {60, 30, 70, 198, -358};
    enum { COLUMNS = DIM / HEADS };
    const mha_attention_options options = options_by_head();
    const mha_varlen_attention varlen = {
        .all = {.dtype = MHA_FLOAT64,
                .query = rows_by_head(in.x, HEADS, COLUMNS),
                .key = rows_by_head(in.x, KV_HEADS, COLUMNS),
                .value = rows_by_head(in.grad_output, KV_HEADS, COLUMNS),
                .output = rows_by_head(r->output, HEADS, COLUMNS),
                .lse = r->attended,
                .maximum = r->maximum,
                .denominator = r->denominator,
                .options = &options},
        .sequences = 5,
        .query_starts = query_starts,
        .key_starts = key_starts,
        .query_offset = query_offset};
    const mha_varlen_gradients gradients = {
        .varlen = &varlen,
        .all = {.attention = &varlen.all,
                .grad_output = rows_by_head(in.grad_output, HEADS, COLUMNS),
                .grad_query = rows_by_head(r->grad_x[0], HEADS, COLUMNS),
                .grad_key = rows_by_head(r->grad_x[1], KV_HEADS, COLUMNS),
                .grad_value = rows_by_head(r->grad_x[2], KV_HEADS, COLUMNS),
                .grad_alibi = by_head(r->grad_alibi, 1),
                .grad_relative_bias = by_head(r->grad_relative_bias, DISTANCES),
                .grad_sinks = by_head(r->grad_sinks, 1)}};
    size_t bytes, backward_bytes;
    CHECK_OK(mha_scaled_dot_product_attention_varlen_workspace(&varlen, num_threads, &bytes));
    CHECK_OK(mha_scaled_dot_product_attention_varlen_backward_workspace(&gradients, num_threads,
                                                                        &backward_bytes));
    mha_execution execution =
        execution_of(bytes > backward_bytes ? bytes : backward_bytes, num_threads);
    CHECK_OK(mha_scaled_dot_product_attention_varlen_forward(&varlen, &execution));
    CHECK_OK(mha_scaled_dot_product_attention_varlen_backward(&gradients, &execution));
    free_workspace(execution.workspace.base);
}

static void test_ragged(void) {
    memset(&once, 0, sizeof once);
    twice = false;
    run_ragged(&once, 1);
    CHECK(once.output[NUMBERS - 1] != 0 && once.grad_x[0][0] != 0 && once.grad_sinks[0] != 0);
    twice = true;
    for (int num_threads = FEWEST_THREADS; num_threads <= 3; num_threads++) {
        memset(&again, 0, sizeof again);
        run_ragged(&again, num_threads);
        CHECK(memcmp(&once, &again, sizeof once) == 0);
    }
}

int main(void) {
    fill(in.x, NUMBERS, 1);
    fill(in.W[0], 4 * DIM * DIM, 2);
    fill(in.b, DIM, 3);
    fill(in.gate, HEADS, 4);
    fill(in.bias, HEADS * LENGTH * LENGTH, 5);
    fill(in.grad_output, NUMBERS, 6);
    fill(in.alibi, HEADS, 7);
    fill(in.relative_bias, HEADS * DISTANCES, 8);
    fill(in.sinks, HEADS, 9);
    on_every_instruction_set(test_figure);
    on_every_instruction_set(test_ragged);
    printf("test_tasks_twice: passed\n");
    return 0;
}
