#include "core/projection/quantised.h"

#include <string.h>

/* A row of bytes of a block: one row of numbers, or of 4 bits two. */
static void pack_row(const mha_weight *weight, const int8_t *numbers, int64_t columns,
                     uint8_t *to) {
    for (int64_t column = 0; weight->storage == MHA_Q8_0 && column < columns; column++) {
        to[column] = (uint8_t)numbers[column];
    }
    for (int64_t column = 0; weight->storage == MHA_Q4_0 && column < columns; column++) {
        const int low = numbers[column], high = numbers[weight->out + column];
        to[column] = (uint8_t)((low & 15) | (high & 15) << 4);
    }
}

static void unpack_row(const mha_weight *weight, const uint8_t *from, int64_t columns,
                       int8_t *numbers) {
    for (int64_t column = 0; weight->storage == MHA_Q8_0 && column < columns; column++) {
        numbers[column] = (int8_t)from[column];
    }
    for (int64_t column = 0; weight->storage == MHA_Q4_0 && column < columns; column++) {
        numbers[column] = (int8_t)(((from[column] & 15) ^ 8) - 8);
        numbers[weight->out + column] = (int8_t)((from[column] >> 4 ^ 8) - 8);
    }
}

void mha_pack_quantised(const mha_weight *weight, int64_t first_column, int64_t columns,
                        void *panel, mha_checkpoint *checkpoint) {
    const int64_t there = mha_smaller(columns, weight->out - first_column);
    const int64_t rows = mha_quantised_byte_rows(weight->storage);
    const int64_t of_row = MHA_QUANTISED_ROWS / rows * weight->out; /* numbers of a row of bytes */
    const size_t scales_bytes = (size_t)columns * sizeof(uint16_t);
    const uint16_t *scales = (const uint16_t *)weight->scales + first_column;
    uint8_t *to = panel;
    for (int64_t first = 0; first < weight->in; first += MHA_QUANTISED_ROWS) {
        if (mha_stop_after(checkpoint, MHA_WORK_OF_MOVING * MHA_QUANTISED_ROWS * columns)) {
            return;
        }
        /* Columns that are not there have any number, times 0. */
        memset(to, 0, scales_bytes + (size_t)(rows * columns));
        memcpy(to, scales + first / MHA_QUANTISED_ROWS * weight->out,
               (size_t)there * sizeof(uint16_t));
        to += scales_bytes;
        const int8_t *numbers = (const int8_t *)weight->data + first * weight->out + first_column;
        for (int64_t row = 0; row < rows; row++, to += columns, numbers += of_row) {
            pack_row(weight, numbers, there, to);
        }
    }
}

void mha_unpack_quantised(const mha_weight_unpacking *unpacking, int64_t first_column,
                          int64_t columns, const void *panel, mha_checkpoint *checkpoint) {
    const mha_weight *weight = &unpacking->packed;
    const int64_t there = mha_smaller(columns, weight->out - first_column);
    const int64_t rows = mha_quantised_byte_rows(weight->storage);
    const int64_t of_row = MHA_QUANTISED_ROWS / rows * weight->out; /* numbers of a row of bytes */
    uint16_t *scales = (uint16_t *)unpacking->scales + first_column;
    const uint8_t *from = panel;
    for (int64_t first = 0; first < weight->in; first += MHA_QUANTISED_ROWS) {
        if (mha_stop_after(checkpoint, MHA_WORK_OF_MOVING * MHA_QUANTISED_ROWS * columns)) {
            return;
        }
        memcpy(scales + first / MHA_QUANTISED_ROWS * weight->out, from,
               (size_t)there * sizeof(uint16_t));
        from += (size_t)columns * sizeof(uint16_t);
        int8_t *numbers = (int8_t *)unpacking->to + first * weight->out + first_column;
        for (int64_t row = 0; row < rows; row++, from += columns, numbers += of_row) {
            unpack_row(weight, from, there, numbers);
        }
    }
}
