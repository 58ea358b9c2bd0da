/* The tile instructions that matmul_amx.inc uses, as loops: slow, but they let a machine without
 * tiles run its kernels. Included before everything else (-include). */
#ifndef EMULATED_TILES_H
#define EMULATED_TILES_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct emulated_tile {
    uint32_t number[16][16]; /* (row, pair of bfloat16 or float32) */
} emulated_tile;

typedef struct emulated_configuration {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes_of_a_row[16];
    uint8_t rows[16];
} emulated_configuration;

static _Thread_local emulated_tile emulated_tiles[8];
static _Thread_local emulated_configuration emulated_config;

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    memset(&emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
    for (int row = 0; row < emulated_config.rows[tile]; row++) {
        memcpy(emulated_tiles[tile].number[row], (const char *)from + row * stride,
               emulated_config.bytes_of_a_row[tile]);
    }
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < emulated_config.rows[tile]; row++) {
        memcpy((char *)to + row * stride, emulated_tiles[tile].number[row],
               emulated_config.bytes_of_a_row[tile]);
    }
}

/* What is smaller than a normal number is taken for 0, and given as 0. */
static inline float emulated_normal(float number) {
    return fabsf(number) < 0x1p-126f ? copysignf(0, number) : number;
}

static inline float emulated_number(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return emulated_normal(number);
}

/* sums (row, column) += a (row, pair) times b (pair, column): one chain of the first numbers of the
 * pairs and one of the second, each rounded once a step. */
static inline void emulated_multiply(int sums, int a, int b) {
    for (int row = 0; row < emulated_config.rows[sums]; row++) {
        for (int column = 0; column < emulated_config.bytes_of_a_row[sums] / 4; column++) {
            float even = 0, odd = 0;
            for (int pair = 0; pair < emulated_config.rows[b]; pair++) {
                const uint32_t x = emulated_tiles[a].number[row][pair];
                const uint32_t y = emulated_tiles[b].number[pair][column];
                even =
                    emulated_normal(fmaf(emulated_number(x << 16), emulated_number(y << 16), even));
                odd = emulated_normal(
                    fmaf(emulated_number(x & 0xFFFF0000), emulated_number(y & 0xFFFF0000), odd));
            }
            uint32_t *to = &emulated_tiles[sums].number[row][column];
            const float sum = emulated_normal(emulated_number(*to) + emulated_normal(even + odd));
            memcpy(to, &sum, sizeof sum);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) memcpy(&emulated_config, from, sizeof emulated_config)
#define _tile_release() memset(&emulated_config, 0, sizeof emulated_config)
#define _tile_zero(tile) memset(&emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_multiply

#endif
