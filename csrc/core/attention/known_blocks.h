/* What has been found out of a dense mask or bias: which blocks of keys it hides from which blocks
 * of queries, a byte each. Where heads or batch items share it, the first task that looks tells the
 * others; else a worker keeps it while it is at a block of queries. */
#ifndef MHA_KNOWN_BLOCKS_H
#define MHA_KNOWN_BLOCKS_H

#include "kernels/kernels.h"
#include "mha/attention.h"

/* Of a mask or of a bias with a number for each pair. */
typedef struct mha_known_option {
    /* Workers read copies that lack what their batch item hides, and tell nobody what they see. */
    bool is_copied;
    bool is_there;
    _Atomic uint8_t *shared; /* (groups, query_blocks, key_blocks), or NULL */
    mha_pieces own;          /* of each worker, where it is not shared: (slots, key_blocks) */
} mha_known_option;

typedef struct mha_known_visibility {
    mha_known_option mask, bias;
    int64_t query_blocks, key_blocks, keys; /* keys: of a block of them */
    int slots; /* blocks of queries that a worker is at; MHA_NO_SLOTS: it keeps nothing of its own
                */
} mha_known_visibility;

/* Nothing is known yet. The caller has set query_blocks, keys, slots and is_copied. */
enum { MHA_NO_SLOTS = 0 };
mha_status mha_take_known_blocks(const mha_attention *attention, int threads,
                                 mha_workspace *workspace,
                                 mha_known_visibility *known) MHA_MUST_CHECK;

/* Whether there is anything to know. */
static inline bool mha_knows_blocks(const mha_known_visibility *known) {
    return known->mask.is_there || known->bias.is_there;
}

/* For one block of queries of a head, that the worker has in this slot. */
mha_known_blocks mha_known_blocks_of(const mha_known_visibility *known,
                                     const mha_attention *attention, int64_t batch, int64_t head,
                                     int64_t query_block, int worker, int slot);

#endif
