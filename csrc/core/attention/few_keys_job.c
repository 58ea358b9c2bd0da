/* What the tasks of few_keys.c take, and where that is faster than other kernels: measured. */
#include "core/attention/few_keys_job.h"

#include "core/attention/few_keys.h"
#include "core/attention/few_queries.h"

/* Of the keys and values of a head, and of keys so few that they fill few vectors. */
enum { MOST_BYTES = 64 << 10, MOST_BYTES_OF_FEW_VECTORS = 512 << 10 };

/* Keys and values of a head, as the arithmetic has them. */
static double bytes_of_head(const mha_attention *a) {
    const double columns = (double)mha_extent(&a->key, 1) + (double)mha_extent(&a->value, 1);
    return (double)mha_extent(&a->key, 2) * columns * (double)mha_dtype_size(a->dtype);
}

/* Keys and values of all heads, as they are stored. */
static double all_bytes(const mha_few_keys_job *job) {
    return mha_bytes_of_key_head(job->attention) * (double)job->key_heads;
}

/* Whether the kernel for few queries would take the call, if not for this one. */
static bool is_beside_few_queries(const mha_attention *a) {
    const int64_t query_len = mha_extent(&a->query, 2);
    const int64_t fewest_keys = query_len == 1 ? 12 : query_len == 2 ? 16 : 32;
    return mha_extent(&a->key, 2) >= fewest_keys && mha_has_few_queries(a);
}

/* Whether the caches hold less than those beside queries and outputs, so that they are prefetched.
 */
bool mha_few_keys_are_from_memory(const mha_few_keys_job *job) {
    enum { BYTES_IN_CACHES = 16 << 20 };
    const mha_attention *a = job->attention;
    const double columns = (double)mha_extent(&a->query, 1) + (double)mha_extent(&a->value, 1);
    const double of_queries =
        (double)job->key_heads * (double)job->queries * columns * (double)mha_dtype_size(a->dtype);
    return all_bytes(job) + of_queries > BYTES_IN_CACHES;
}

/* Whether the keys of more heads than a set of the first cache has lines are read from one. */
static bool lanes_share_a_set(const mha_few_keys_job *job) {
    const mha_attention *a = job->attention;
    const int from_last = job->kv_heads > 1 ? 3 : 4; /* the axis of the next lane */
    return job->lanes > MHA_WAYS_OF_CACHE && job->key_heads > 1 &&
           mha_rows_share_a_set(mha_stride(&a->key, from_last));
}

/* How many bytes of keys and values a head may have for this kernel to be the faster one, where
 * measured (docs/journal.md). */
static double most_bytes_of(const mha_few_keys_job *job) {
    const int64_t vectors = job->query_len <= 2 ? 3 : 1;
    const bool fill_few_vectors = mha_extent(&job->attention->key, 2) <= vectors * job->lanes;
    return fill_few_vectors && !mha_few_keys_are_from_memory(job) ? MOST_BYTES_OF_FEW_VECTORS
                                                                  : MOST_BYTES;
}

/* Beside the kernel for few queries, which copies keys that fill no vector. Empty lanes cost as
 * much as others. */
static double most_bytes_beside_few_queries(const mha_few_keys_job *job) {
    enum { FEWEST_COLUMNS = 64, MANY_BYTES = 20 << 20 };
    const mha_attention *a = job->attention;
    const bool are_halves =
        a->key.storage != MHA_AS_COMPUTED || a->value.storage != MHA_AS_COMPUTED;
    const bool takes_half_the_lanes = job->kernels != mha_kernels_for(a->dtype);
    const bool from_memory = mha_few_keys_are_from_memory(job),
               has_gaps = mha_has_gaps(&a->key, a->dtype);
    if (2 * job->key_heads <= job->lanes) {
        return 4 << 10;
    }
    if (mha_some_lie_by_columns(a)) {
        return lanes_share_a_set(job)                ? 8 << 10
               : takes_half_the_lanes || from_memory ? 20 << 10
                                                     : 40 << 10;
    }
    if (are_halves) {
        return job->query_len == 1 ? 12 << 10 : 16 << 10;
    }
    if (lanes_share_a_set(job)) {
        return job->query_len == 1                        ? 16 << 10
               : mha_extent(&a->key, 1) >= FEWEST_COLUMNS ? 32 << 10
                                                          : 8 << 10;
    }
    if (takes_half_the_lanes && !from_memory && mha_extent(&a->key, 2) < 2 * job->lanes) {
        return MOST_BYTES_OF_FEW_VECTORS;
    }
    if (takes_half_the_lanes && (has_gaps || job->key_heads < job->lanes)) {
        return 20 << 10;
    }
    if (from_memory && has_gaps) {
        return all_bytes(job) > MANY_BYTES ? 24 << 10 : 36 << 10;
    }
    if (takes_half_the_lanes && !from_memory && job->key_heads > job->lanes) {
        return 32 << 10;
    }
    return most_bytes_of(job);
}

/* Into how many tasks the queries of a key head may be divided, each of which transposes the keys:
 * where measured (docs/journal.md). */
static int64_t query_tasks_worth(const mha_few_keys_job *job, bool beside_few_queries,
                                 double bytes) {
    enum { FEW_BYTES = 5 << 10, FEWEST_COLUMNS = 128, FEW_KEYS = 8 };
    const mha_attention *a = job->attention;
    const bool are_wide =
        mha_extent(&a->key, 1) >= FEWEST_COLUMNS && mha_extent(&a->key, 2) <= FEW_KEYS;
    if (job->key_heads < job->lanes || (beside_few_queries && lanes_share_a_set(job))) {
        return 1;
    }
    if (job->query_len == 1 && bytes <= FEW_BYTES) {
        return job->query_tasks;
    }
    if (job->lanes < 16 && job->queries > 4 && !are_wide) {
        return 1;
    }
    const double most_of_two = beside_few_queries       ? 8 << 10
                               : mha_has_few_queries(a) ? 24 << 10
                                                        : most_bytes_of(job);
    return bytes <= most_of_two ? 2 : 1;
}

static bool few_keys_are_faster(const mha_few_keys_job *job) {
    if (job->by_heads) {
        return true;
    }
    const mha_attention *a = job->attention;
    const bool beside_few_queries = is_beside_few_queries(a);
    const double bytes = bytes_of_head(a);
    const double most_bytes =
        beside_few_queries ? most_bytes_beside_few_queries(job) : most_bytes_of(job);
    const int64_t of_heads = beside_few_queries ? 1 : job->group;
    return bytes <= most_bytes && 3 * job->key_heads >= job->lanes &&
           (job->query_tasks <= of_heads ||
            job->query_tasks <= query_tasks_worth(job, beside_few_queries, bytes));
}

void mha_take_few_keys_kernels(mha_few_keys_job *job, int64_t heads) {
    job->kernels = mha_kernels_for_lanes(job->attention->dtype, heads);
    job->lanes = job->kernels->attention->query_lanes;
}

/* Whether more heads than a set of the first cache holds share it, where that costs more than what
 * vectors of half the size do (docs/journal.md). */
static bool half_the_lanes_miss_less(const mha_few_keys_job *job) {
    enum { MOST_QUERIES_FROM_MEMORY = 2, FEW_BYTES = 8 << 10, MANY_BYTES = 16 << 10 };
    enum { FEW_COLUMNS = 63 };
    const mha_attention *a = job->attention;
    const double bytes = bytes_of_head(a);
    if (!lanes_share_a_set(job)) {
        return false;
    }
    if (mha_some_lie_by_columns(a)) {
        return true;
    }
    if (mha_few_keys_are_from_memory(job)) {
        return job->query_len <= MOST_QUERIES_FROM_MEMORY && bytes > FEW_BYTES;
    }
    if (job->query_len > 1) {
        return job->key_heads > 2 * job->lanes && !is_beside_few_queries(a);
    }
    return bytes > MANY_BYTES || mha_extent(&a->key, 1) <= FEW_COLUMNS;
}

/* Whether a head after the other is faster than heads in the lanes, where measured
 * (docs/journal.md). Lanes without a key compute as much as others. */
static bool heads_are_faster(const mha_few_keys_job *job) {
    enum { FEW_COLUMNS = 128, SOME_COLUMNS = 256, MANY_KEYS = 32 };
    enum { BYTES_WITH_ONE_QUERY = 12 << 10, BYTES_WITH_MORE = 8 << 10 }; /* of a row of each lane */
    const mha_attention *a = job->attention;
    const int64_t keys = mha_extent(&a->key, 2), columns = mha_extent(&a->key, 1);
    const int64_t lanes = mha_kernels_for_lanes(a->dtype, keys)->attention->query_lanes;
    const int64_t computed = mha_divide_up(keys, lanes) * lanes, queries = job->queries;
    const int64_t bytes = lanes * columns * (int64_t)mha_dtype_size(a->dtype);
    const bool fill_most_lanes = 4 * keys >= 3 * computed;
    if (mha_few_keys_are_from_memory(job)) {
        return fill_most_lanes && keys <= lanes && queries >= 4 && queries <= 6;
    }
    if (queries == 4) {
        return 2 * keys >= computed;
    }
    if (queries > 4) {
        return fill_most_lanes && keys <= MANY_KEYS &&
               (queries <= 6 || columns >= (lanes < 16 ? SOME_COLUMNS : FEW_COLUMNS));
    }
    if (3 * job->key_heads < job->lanes) { /* too few for lanes */
        return fill_most_lanes;
    }
    if (lanes_share_a_set(job)) {
        return fill_most_lanes && columns >= FEW_COLUMNS;
    }
    return keys == computed && bytes >= (queries == 1 ? BYTES_WITH_ONE_QUERY : BYTES_WITH_MORE);
}

/* Whether a task takes all queries of a head after those of another. */
static bool takes_heads(const mha_few_keys_job *job) {
    enum { FEWEST_COLUMNS = 64, MOST_BYTES_OF_HEAD = 512 << 10, BYTES_OF_A_VECTOR = 32 };
    const mha_attention *a = job->attention;
    return job->lanes * (int64_t)mha_dtype_size(a->dtype) >= BYTES_OF_A_VECTOR &&
           job->queries <= MHA_MAX_ROWS_OF_HEAD && mha_extent(&a->key, 1) >= FEWEST_COLUMNS &&
           mha_extent(&a->value, 1) >= FEWEST_COLUMNS && !mha_some_lie_by_columns(a) &&
           bytes_of_head(a) <= MOST_BYTES_OF_HEAD && heads_are_faster(job);
}

/* For scores the keys of one head fill the lanes. */
static void take_heads(mha_few_keys_job *job) {
    mha_take_few_keys_kernels(job, mha_extent(&job->attention->key, 2));
    job->by_heads = true;
    job->query_tasks = 1;
    job->heads_of_task = MHA_QUERY_VECTORS * job->lanes / job->queries;
}

mha_status mha_describe_few_keys(const mha_attention *a, mha_few_keys_job *job) {
    const int64_t vectors = MHA_QUERY_VECTORS;
    int64_t batch;
    job->attention = a;
    job->by_heads = false;
    job->heads = mha_extent(&a->query, 3);
    job->kv_heads = mha_extent(&a->key, 3);
    job->query_len = mha_extent(&a->query, 2);
    job->group = job->kv_heads == 0 ? 0 : job->heads / job->kv_heads;
    job->queries = job->group * job->query_len;
    MHA_TRY(mha_count_elements(a->query.shape, a->batch_axes, &batch));
    if (__builtin_mul_overflow(batch, job->kv_heads, &job->key_heads)) {
        return MHA_SIZE_OVERFLOW;
    }
    mha_take_few_keys_kernels(job, job->key_heads);
    if (half_the_lanes_miss_less(job)) {
        mha_take_few_keys_kernels(job, 1);
    }
    job->query_tasks = mha_divide_up(job->queries, vectors);
    job->shared = job->queries == 0 ? 1 : mha_divide_up(job->queries, job->query_tasks);
    job->head_blocks = vectors / job->shared;
    if (job->queries > 0 && takes_heads(job)) {
        take_heads(job);
    }
    return MHA_OK;
}

bool mha_has_few_keys(const mha_attention *a) {
    const int64_t key_len = mha_extent(&a->key, 2);
    mha_few_keys_job job;
    return key_len > 0 && key_len <= MHA_KEY_CHAIN && mha_has_plain_scores(a) &&
           a->weights == NULL && a->options->softcap == 0 && mha_has_plain_rows(a) &&
           mha_extent(&a->query, 1) > 0 && mha_extent(&a->value, 1) > 0 &&
           mha_describe_few_keys(a, &job) == MHA_OK && job.queries > 0 && few_keys_are_faster(&job);
}
