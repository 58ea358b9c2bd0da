/* Rows that become columns, outside of a step: copies of arrays that lie the other way around. */
#include <string.h>

#include "kernels/kernels.h"

/* Rows a multiple of 512 bytes apart share few sets of the first cache, which cannot keep their
 * lines until all numbers have been used. So a tile of them is copied first. */
enum { TILE = 64, BYTES_OF_SETS = 512 };

/* Some rows and columns, one number after the other; item, 1 or 2 bytes, is a constant. */
static inline void move_numbers(const char *from, int64_t from_stride, int64_t rows,
                                int64_t columns, const size_t item, char *to, int64_t to_stride) {
    for (int64_t column = 0; column < columns; column++) {
        for (int64_t row = 0; row < rows; row++) {
            memcpy(to + column * to_stride + row * (int64_t)item,
                   from + row * from_stride + column * (int64_t)item, item);
        }
    }
}

/* Numbers of 4 and 8 bytes by the kernel. */
static void move_tile(const char *from, int64_t from_stride, int64_t rows, int64_t columns,
                      size_t item, char *to, int64_t to_stride) {
    const int64_t size = (int64_t)item;
    if (item == 1) {
        move_numbers(from, from_stride, rows, columns, 1, to, to_stride);
    } else if (item == 2) {
        move_numbers(from, from_stride, rows, columns, 2, to, to_stride);
    } else {
        const mha_dtype dtype = item == sizeof(float) ? MHA_FLOAT32 : MHA_FLOAT64;
        mha_kernels_for(dtype)->attention->transpose(from, from_stride / size, rows, columns, to,
                                                     to_stride / size);
    }
}

void mha_transpose_numbers(const void *from, int64_t from_stride, int64_t rows, int64_t columns,
                           size_t item, void *to, int64_t to_stride) {
    const int64_t size = (int64_t)item;
    _Alignas(64) char tile[TILE * TILE * sizeof(double)];
    for (int64_t column = 0; column < columns; column += TILE) {
        const int64_t width = mha_smaller(columns - column, TILE), stride = width * size;
        for (int64_t row = 0; row < rows; row += TILE) {
            const int64_t height = mha_smaller(rows - row, TILE);
            const char *source = (const char *)from + row * from_stride + column * size;
            char *target = (char *)to + column * to_stride + row * size;
            int64_t source_stride = from_stride;
            if (from_stride % BYTES_OF_SETS == 0) {
                for (int64_t i = 0; i < height; i++) {
                    memcpy(tile + i * stride, source + i * from_stride, (size_t)stride);
                }
                source = tile;
                source_stride = stride;
            }
            move_tile(source, source_stride, height, width, item, target, to_stride);
        }
    }
}
