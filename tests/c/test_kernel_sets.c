/* A kernel set owns how weights are packed, and a further set may replace one operation alone. */
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mha/mha.h"

enum { ROWS = 20, IN = 70, OUT = 90 };

static const mha_kernels *usual;
static int times_called;

/* The usual product, counted. */
static void counted_multiply(const mha_matmul_block *block) {
    times_called++;
    usual->matmul->multiply(block);
}

static void run(const mha_linear_projection *projection, mha_status wanted) {
    size_t bytes = 0;
    mha_execution execution = {.num_threads = 1};
    mha_status status = mha_linear_projection_workspace(projection, 1, 1, &bytes);
    if (status == MHA_OK) {
        char *memory = new_workspace(bytes);
        mha_workspace_begin(&execution.workspace, memory, bytes);
        status = mha_linear_projection_forward(projection, 1, &execution);
        mha_workspace_end(&execution.workspace);
        free_workspace(memory);
    }
    CHECK(status == wanted);
}

static mha_weight packed(const mha_weight *weight, void *panels) {
    const mha_weight_packing packing = {MHA_FLOAT32, *weight, panels};
    mha_execution execution = {.num_threads = 1};
    CHECK_OK(mha_pack_weight(&packing, &execution));
    return mha_packed_weight(&packing);
}

int main(void) {
    static float x[ROWS * IN], w[IN * OUT], first[ROWS * OUT], second[ROWS * OUT];
    size_t bytes;
    for (int i = 0; i < ROWS * IN; i++) {
        x[i] = (float)(i % 13) - 6;
    }
    for (int i = 0; i < IN * OUT; i++) {
        w[i] = (float)(i % 7) - 3;
    }
    const mha_weight weight = {
        .data = w, .in = IN, .out = OUT, .in_stride = OUT * 4, .out_stride = 4};
    CHECK_OK(mha_packed_weight_size(MHA_FLOAT32, IN, OUT, &bytes));
    void *old_panels = malloc(bytes), *new_panels = malloc(bytes);
    const mha_weight of_usual = packed(&weight, old_panels);
    mha_linear_projection projection =
        mha_contiguous_projection(MHA_FLOAT32, x, ROWS, &of_usual, NULL, first);
    run(&projection, MHA_OK);

    /* A set with its own products, and the other operations of the usual one. */
    usual = mha_kernels_for(MHA_FLOAT32);
    const mha_matmul_kernels own_matmul = {
        .panels = usual->matmul->panels,
        .unpacked_scratch_size = usual->matmul->unpacked_scratch_size,
        .multiply = counted_multiply,
    };
    mha_kernels own = *usual;
    own.matmul = &own_matmul;
    const mha_kernel_set further = {"further", {[MHA_FLOAT32] = &own}, {NULL}};
    mha_use_kernel_set(&further);
    CHECK(strcmp(mha_instruction_set(), "further") == 0);
    CHECK(mha_kernels_for_lanes(MHA_FLOAT32, 1) == &own);

    /* Rows that fill no more than half of the lanes take the set of half the size, if there is one.
     */
    const mha_kernels half = *usual;
    const mha_kernel_set halved = {"halved", {[MHA_FLOAT32] = &own}, {[MHA_FLOAT32] = &half}};
    const int64_t lanes = half.attention->query_lanes;
    mha_use_kernel_set(&halved);
    CHECK(mha_kernels_for_lanes(MHA_FLOAT32, lanes) == &half);
    CHECK(mha_kernels_for_lanes(MHA_FLOAT32, lanes + 1) == &own);
    mha_use_kernel_set(&further);

    /* What another set has packed is refused; what this one packs, and plain weights, are taken. */
    CHECK(!mha_weight_fits(&of_usual, MHA_FLOAT32));
    run(&projection, MHA_INVALID_ARGUMENT);
    CHECK(times_called == 0);
    const mha_weight of_further = packed(&weight, new_panels);
    CHECK(mha_weight_fits(&of_further, MHA_FLOAT32) && mha_weight_fits(&weight, MHA_FLOAT32));
    projection = mha_contiguous_projection(MHA_FLOAT32, x, ROWS, &of_further, NULL, second);
    run(&projection, MHA_OK);
    CHECK(times_called > 0 && memcmp(first, second, sizeof first) == 0);
    projection = mha_contiguous_projection(MHA_FLOAT32, x, ROWS, &weight, NULL, second);
    run(&projection, MHA_OK);
    CHECK(memcmp(first, second, sizeof first) == 0);
    free(old_panels), free(new_panels);
    printf("test_kernel_sets: passed\n");
    return 0;
}
