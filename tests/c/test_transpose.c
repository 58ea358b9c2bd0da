/* Copies of arrays that lie the other way around, on every kernel set: each number is where it
 * belongs, and nothing else is written. */
#include "check.h"

enum { AXES = 4, MOST_BYTES = 3 << 20, GUARD = 0xA5 };

static uint8_t from[MOST_BYTES], to[MOST_BYTES];

static int64_t draw(int64_t least, int64_t most) {
    return least + (int64_t)(fabs(next_random()) * 0.999 * (double)(most - least + 1));
}

/* Strides of `shape` where the axes lie in this order, the last one numbers side by side, and some
 * numbers lie between the others; the bytes in all. */
static int64_t lay_out(mha_tensor *tensor, const int order[AXES], int64_t item) {
    int64_t bytes = item;
    for (int i = AXES - 1; i >= 0; i--) {
        tensor->strides[order[i]] = bytes;
        bytes *= tensor->shape[order[i]];
        bytes += i < AXES - 1 ? draw(0, 3) * item : draw(0, 1) * item;
    }
    return bytes;
}

static int64_t offset_of(const mha_tensor *tensor, int64_t index) {
    int64_t offset = 0;
    for (int axis = AXES - 1; axis >= 0; axis--) {
        offset += index % tensor->shape[axis] * tensor->strides[axis];
        index /= tensor->shape[axis];
    }
    return offset;
}

/* to = from, whose numbers lie side by side along column_axis. */
static void test_copy(const int64_t shape[AXES], int column_axis, int64_t item, int num_threads) {
    mha_execution execution = {.num_threads = num_threads};
    mha_transposing_copy copy = {.column_axis = column_axis, .item = (size_t)item};
    int of_from[AXES], of_to[AXES] = {0, 1, 2, 3}, count = 0;
    int64_t numbers = 1;
    for (int axis = 0; axis < AXES; axis++) {
        numbers *= shape[axis];
        if (axis != column_axis) {
            of_from[count++] = axis;
        }
    }
    of_from[AXES - 1] = column_axis;
    copy.from = (mha_tensor){.data = from, .axes = AXES};
    copy.to = (mha_tensor){.data = to, .axes = AXES};
    memcpy(copy.from.shape, shape, AXES * sizeof *shape);
    memcpy(copy.to.shape, shape, AXES * sizeof *shape);
    CHECK(lay_out(&copy.from, of_from, item) <= MOST_BYTES);
    const int64_t bytes = lay_out(&copy.to, of_to, item);
    CHECK(bytes <= MOST_BYTES);
    memset(to, GUARD, MOST_BYTES);
    CHECK_OK(mha_copy_transposing(&copy, &execution));
    for (int64_t i = 0; i < numbers; i++) {
        uint8_t *number = to + offset_of(&copy.to, i);
        CHECK(memcmp(number, from + offset_of(&copy.from, i), (size_t)item) == 0);
        memset(number, GUARD, (size_t)item);
    }
    for (int64_t i = 0; i < MOST_BYTES; i++) {
        CHECK(to[i] == GUARD);
    }
}

static void test_copies(void) {
    static const int64_t large[][AXES] = {
        {1, 2, 500, 130}, {3, 1, 64, 512}, {40, 8, 9, 16}, {1, 70, 1, 2500}};
    for (int64_t item = 1; item <= 8; item *= 2) {
        for (int i = 0; i < 12; i++) {
            const int64_t shape[AXES] = {draw(1, 4), draw(1, 4), draw(1, 70), draw(1, 70)};
            test_copy(shape, (int)draw(0, 2), item, (int)draw(1, 3));
        }
        for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
            test_copy(large[i], i % 2 == 0 ? 2 : 1, item, 3);
        }
    }
}

int main(void) {
    const int64_t empty[AXES] = {2, 0, 5, 5};
    for (size_t i = 0; i < MOST_BYTES; i++) {
        from[i] = (uint8_t)draw(0, 160); /* never GUARD */
    }
    on_every_instruction_set(test_copies);
    test_copy(empty, 2, 4, 2);
    printf("transposing copies: passed\n");
    return 0;
}
