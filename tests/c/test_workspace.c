/* Pieces of the arena: apart, aligned, and under the address sanitizer as long as was asked. */
#include "check.h"

#include "mha/execution.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
/* Whether exactly `bytes` from `piece` on may be used. */
static bool is_exactly(const char *piece, size_t bytes) {
    return __asan_region_is_poisoned((void *)piece, bytes) == NULL &&
           __asan_address_is_poisoned(piece + bytes) && __asan_address_is_poisoned(piece - 1);
}
static bool is_closed(const char *piece) { return __asan_address_is_poisoned(piece); }
#else
static bool is_exactly(const char *piece, size_t bytes) { return piece != NULL && bytes > 0; }
static bool is_closed(const char *piece) { return piece != NULL; }
#endif

enum { FEWEST = 1, MOST = 200, COUNT = 3 };

static void test_pieces(void) {
    for (size_t bytes = FEWEST; bytes <= MOST; bytes++) {
        void *first;
        mha_pieces pieces;
        mha_execution measuring = mha_measuring_execution(1);
        CHECK_OK(mha_workspace_take(&measuring.workspace, bytes, &first));
        CHECK_OK(mha_workspace_take_pieces(&measuring.workspace, bytes, COUNT, &pieces));
        mha_workspace_give_back(&measuring.workspace, 0);
        CHECK(measuring.workspace.used == 0);
        const size_t size = measuring.workspace.most;
        mha_execution execution = execution_of(size, 1);
        mha_workspace *workspace = &execution.workspace;
        char *base = workspace->base;
        mha_workspace_begin(workspace, base, size);
        CHECK(is_closed(base));
        CHECK_OK(mha_workspace_take(workspace, bytes, &first));
        const size_t used = workspace->used;
        CHECK_OK(mha_workspace_take_pieces(workspace, bytes, COUNT, &pieces));
        CHECK(workspace->used == size && first == base);
        CHECK(is_exactly(first, bytes));
        for (int i = 0; i < COUNT; i++) {
            char *piece = mha_piece(&pieces, i);
            CHECK((uintptr_t)piece % MHA_WORKSPACE_ALIGNMENT == 0);
            CHECK(piece >= (i == 0 ? (char *)first : (char *)mha_piece(&pieces, i - 1)) + bytes);
            CHECK(is_exactly(piece, bytes));
        }
        CHECK(mha_workspace_take(workspace, bytes, &first) == MHA_OUT_OF_MEMORY);
        mha_workspace_give_back(workspace, used);
        CHECK(is_closed(pieces.first) && is_exactly(base, bytes));
        mha_workspace_end(workspace);
        for (size_t at = 0; at < size; at++) {
            base[at] = 1; /* the owner's again */
        }
        free_workspace(base);
    }
}

static void test_sizes(void) {
    mha_workspace workspace = {.size = 1 << 20};
    mha_pieces pieces;
    void *piece;
    CHECK(mha_workspace_take(&workspace, SIZE_MAX, &piece) == MHA_SIZE_OVERFLOW);
    CHECK(mha_workspace_take_pieces(&workspace, 64, SIZE_MAX, &pieces) == MHA_SIZE_OVERFLOW);
    CHECK(mha_workspace_take_pieces(&workspace, 64, 1 << 20, &pieces) == MHA_OUT_OF_MEMORY);
}

int main(void) {
    test_pieces();
    test_sizes();
    printf("test_workspace: passed\n");
    return 0;
}
