/* Philox4x32-7 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). */
#ifndef MHA_DROPOUT_H
#define MHA_DROPOUT_H

#include <stdint.h>

enum { PHILOX_ROUNDS = 7 };
#define PHILOX_MULTIPLIER_0 0xD2511F53u
#define PHILOX_MULTIPLIER_1 0xCD9E8D57u
#define PHILOX_KEY_STEP_0 0x9E3779B9u
#define PHILOX_KEY_STEP_1 0xBB67AE85u

typedef struct philox_words {
    uint32_t word[4];
} philox_words;

static inline philox_words philox4x32(philox_words counter, uint64_t seed, int rounds) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t *c = counter.word;
    for (int round = 0; round < rounds; round++) {
        const uint64_t product0 = (uint64_t)c[0] * PHILOX_MULTIPLIER_0;
        const uint64_t product1 = (uint64_t)c[2] * PHILOX_MULTIPLIER_1;
        const uint32_t next0 = (uint32_t)(product1 >> 32) ^ c[1] ^ key0;
        const uint32_t next2 = (uint32_t)(product0 >> 32) ^ c[3] ^ key1;
        c[0] = next0;
        c[1] = (uint32_t)product1;
        c[2] = next2;
        c[3] = (uint32_t)product0;
        key0 += PHILOX_KEY_STEP_0;
        key1 += PHILOX_KEY_STEP_1;
    }
    return counter;
}

#endif
