/* The arena of a call. */
#include "mha/execution.h"
#include "mha/tensor.h"

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define IS_SANITIZED
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define IS_SANITIZED
#endif

/* With the address sanitizer a gap follows every piece, and what is not handed out is poisoned, so
 * that a step which leaves its piece by one byte is found. */
#ifdef IS_SANITIZED
#include <sanitizer/asan_interface.h>
enum { GAP = 4 * MHA_WORKSPACE_ALIGNMENT };
static void poison(const char *base, size_t bytes) { ASAN_POISON_MEMORY_REGION(base, bytes); }
static void unpoison(const char *base, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(base, bytes); }
#else
enum { GAP = 0 };
static void poison(const char *base, size_t bytes) { (void)base, (void)bytes; }
static void unpoison(const char *base, size_t bytes) { (void)base, (void)bytes; }
#endif

void mha_workspace_begin(mha_workspace *workspace, char *base, size_t size) {
    *workspace = (mha_workspace){.base = base, .size = size};
    poison(base, size);
}

void mha_workspace_end(mha_workspace *workspace) {
    unpoison(workspace->base, workspace->size);
    workspace->base = NULL;
    workspace->size = workspace->used = 0;
}

mha_execution mha_measuring_execution(int num_threads) {
    return (mha_execution){.num_threads = num_threads, .workspace = {.measures = true}};
}

mha_status mha_workspace_take(mha_workspace *workspace, size_t bytes, void **piece) {
    mha_pieces pieces;
    MHA_TRY(mha_workspace_take_pieces(workspace, bytes, 1, &pieces));
    *piece = pieces.first;
    return MHA_OK;
}

mha_status mha_workspace_take_pieces(mha_workspace *workspace, size_t bytes, size_t count,
                                     mha_pieces *pieces) {
    size_t all;
    MHA_TRY(mha_add_sizes(bytes, MHA_WORKSPACE_ALIGNMENT - 1 + GAP, &pieces->apart));
    pieces->apart -= pieces->apart % MHA_WORKSPACE_ALIGNMENT;
    MHA_TRY(mha_multiply_sizes(pieces->apart, count, &all));
    if (workspace->measures) {
        pieces->first = (char *)workspace; /* an address, never followed */
        MHA_TRY(mha_add_sizes(workspace->used, all, &workspace->used));
        workspace->most = workspace->used > workspace->most ? workspace->used : workspace->most;
        return MHA_OK;
    }
    if (all > workspace->size - workspace->used) {
        return MHA_OUT_OF_MEMORY;
    }
    pieces->first = workspace->base + workspace->used;
    workspace->used += all;
    poison(pieces->first, all);
    for (size_t i = 0; GAP > 0 && i < count; i++) {
        unpoison(pieces->first + i * pieces->apart, bytes);
    }
    return MHA_OK;
}

void mha_workspace_give_back(mha_workspace *workspace, size_t used_before) {
    if (!workspace->measures) {
        poison(workspace->base + used_before, workspace->used - used_before);
    }
    workspace->used = used_before;
}
