/* Attention in a C program, without Python: make lib, then
 *     gcc examples/embedding.c -Icsrc/include build/lib/libmha.a -lm -pthread
 * or, since it is C++20 too,
 *     g++ -std=c++20 -x c++ examples/embedding.c -x none -Icsrc/include build/lib/libmha.a
 */
#include <stdio.h>
#include <stdlib.h>

#include "mha/mha.h"

enum { BATCH = 2, HEADS = 3, LENGTH = 4, HEAD_DIM = 8 };

/* (BATCH, HEADS, LENGTH, HEAD_DIM), of somebody else's numbers. */
static mha_tensor tensor_of(float *numbers) {
    mha_tensor tensor = {.data = numbers, .axes = 4, .shape = {BATCH, HEADS, LENGTH, HEAD_DIM}};
    mha_set_contiguous_strides(&tensor, MHA_FLOAT32);
    return tensor;
}

int main(void) {
    static float x[BATCH * HEADS * LENGTH * HEAD_DIM], output[BATCH * HEADS * LENGTH * HEAD_DIM];
    for (int i = 0; i < BATCH * HEADS * LENGTH * HEAD_DIM; i++) {
        x[i] = (float)(i / HEAD_DIM % LENGTH); /* the row's number */
    }
    const mha_attention_options options = {.causal = true,
                                           .window_left = MHA_UNLIMITED,
                                           .window_right = MHA_UNLIMITED,
                                           .scale = 0.125};
    const mha_attention attention = {.dtype = MHA_FLOAT32,
                                     .batch_axes = 1,
                                     .query = tensor_of(x),
                                     .key = tensor_of(x),
                                     .value = tensor_of(x),
                                     .output = tensor_of(output),
                                     .options = &options};
    mha_execution execution = {.num_threads = mha_get_num_threads()};
    size_t bytes;
    mha_status status =
        mha_scaled_dot_product_attention_workspace(&attention, execution.num_threads, &bytes);
    /* Aligned by hand, since Windows has no aligned_alloc. */
    char *memory = NULL;
    if (status == MHA_OK) {
        memory = (char *)malloc(bytes + MHA_WORKSPACE_ALIGNMENT); /* the cast is for C++ */
    }
    if (memory != NULL) {
        const size_t beyond = (uintptr_t)memory % MHA_WORKSPACE_ALIGNMENT;
        char *base = memory + (MHA_WORKSPACE_ALIGNMENT - beyond);
        mha_workspace_begin(&execution.workspace, base, bytes);
        status = mha_scaled_dot_product_attention_forward(&attention, &execution);
        mha_workspace_end(&execution.workspace);
    }
    free(memory);
    for (int row = 0; row < LENGTH; row++) {
        printf("row %d sees rows 0 to %d: %.6f\n", row, row, (double)output[row * HEAD_DIM]);
    }
    return memory == NULL || status != MHA_OK;
}
