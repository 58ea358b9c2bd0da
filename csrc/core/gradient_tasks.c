#include "gradient_tasks.h"

#include "../kernels/kernels.h"

/* What a pair of a query and a key costs, 1 up to 128 columns of key and of value; a column of
 * additive attention, a tanh there and back, costs 24 plain ones. */
static double cost_of_a_pair(const mha_attention *attention) {
    const double head_dim = (double)mha_extent(&attention->key, 1);
    const double columns = (attention->score_function == MHA_ADDITIVE ? 24 * head_dim : head_dim) +
                           (double)mha_extent(&attention->value, 1);
    return columns > 256 ? columns / 256 : 1;
}

int64_t mha_keys_of_a_task(const mha_attention *attention, double queries, int64_t most) {
    enum { PAIRS_OF_A_TASK = 4 << 20, LANES = 8, FEWEST_BLOCKS = 2 };
    const int64_t key_len = mha_extent(&attention->key, 2);
    const double keys =
        PAIRS_OF_A_TASK / (cost_of_a_pair(attention) * (queries < LANES ? LANES : queries) + 1);
    const int64_t fewest = mha_divide_up(key_len, most);
    int64_t wanted = FEWEST_BLOCKS * MHA_KEY_BLOCK;
    wanted = keys > (double)wanted ? (int64_t)keys : wanted;
    wanted = wanted > fewest ? wanted : fewest;
    const int64_t tasks = mha_divide_up(key_len, wanted);
    const int64_t equal = tasks == 0 ? 0 : mha_divide_up(key_len, tasks);
    return mha_divide_up(equal, MHA_KEY_BLOCK) * MHA_KEY_BLOCK;
}
