/* Which attention weights dropout keeps: integers only, the same on every instruction set. */
#include "dropout.h"

#include "kernels.h"
#include "mha/attention.h"

uint32_t mha_dropout_threshold(double p) { return (uint32_t)(65536.0 * p + 0.5); }

/* The eight kept bits of keys 8*group .. 8*group+7 of one query: bit i set = kept. */
static uint32_t kept_of_group(const mha_dropout *dropout, int64_t query, int64_t group) {
    const philox_words counter = {
        {(uint32_t)group, (uint32_t)query, (uint32_t)dropout->head, (uint32_t)dropout->batch}};
    const philox_words random = philox4x32(counter, dropout->seed, PHILOX_ROUNDS);
    uint32_t kept = 0;
    for (int key = 0; key < 8; key++) {
        const uint32_t sixteen = random.word[key / 2] >> (16 * (key % 2)) & 0xFFFF;
        kept |= (uint32_t)(sixteen >= dropout->threshold) << key;
    }
    return kept;
}

void mha_dropout_mask(uint32_t threshold, uint64_t seed, int64_t batch, int64_t heads,
                      int64_t query_len, int64_t key_len, uint8_t *kept) {
    for (int64_t row = 0; row < batch * heads * query_len; row++) {
        const mha_dropout dropout = {.threshold = threshold,
                                     .seed = seed,
                                     .head = row / query_len % heads,
                                     .batch = row / query_len / heads};
        for (int64_t key = 0; key < key_len; key += 8) {
            const uint32_t eight = kept_of_group(&dropout, row % query_len, key / 8);
            for (int64_t bit = 0; bit < 8 && key + bit < key_len; bit++) {
                *kept++ = eight >> bit & 1;
            }
        }
    }
}
