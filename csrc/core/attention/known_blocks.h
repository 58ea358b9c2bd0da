/* What the tasks of a call tell each other of a mask or bias that heads or batch items share: which
 * blocks of keys it hides from which blocks of queries. The first one that looks leaves a byte. */
#ifndef MHA_KNOWN_BLOCKS_H
#define MHA_KNOWN_BLOCKS_H

#include "kernels/kernels.h"
#include "mha/attention.h"

typedef struct mha_known_visibility {
    _Atomic uint8_t *mask, *bias; /* (groups, query_blocks, key_blocks), or NULL: not shared */
    int64_t query_blocks, key_blocks, keys; /* keys: of a block of them */
} mha_known_visibility;

/* Nothing is known yet. */
mha_status mha_take_known_blocks(const mha_attention *attention, int64_t query_blocks, int64_t keys,
                                 mha_workspace *workspace,
                                 mha_known_visibility *known) MHA_MUST_CHECK;

/* For one block of queries of a head. */
mha_known_blocks mha_known_blocks_of(const mha_known_visibility *known,
                                     const mha_attention *attention, int64_t batch, int64_t head,
                                     int64_t query_block);

#endif
