/* A layer's call with a cache: what attention reads in place of the projected keys and values, and
 * the function that first puts the projected ones there. */
#ifndef MHA_LAYER_CACHE_H
#define MHA_LAYER_CACHE_H

#include "python/call/options.h"

/* Arguments of a function, in this order, by keyword: CACHE_cached_key and so on. */
#define MHA_CACHE(X)                                                                               \
    X(cached_key, AS_CACHED)                                                                       \
    X(cached_value, AS_CACHED)                                                                     \
    X(append, AS_IT_IS)                                                                            \
    X(keep_first, AS_INT)                                                                          \
    X(dropped, AS_INT)
#define MHA_CACHE_PLACE(name, form) CACHE_##name,
enum cache { MHA_CACHE(MHA_CACHE_PLACE) NUM_CACHE };

/* Owned arrays, or NULL. */
typedef struct converted_cache {
    PyArrayObject *key, *value; /* (batch..., kv_heads, cached_len, d), halves as they are */
    PyArrayObject *key_heads, *value_heads; /* the projected ones: (batch..., kv_heads, len, d) */
    PyObject *append;                       /* append(key_heads, value_heads) */
} converted_cache;

/* 0, or -1 with the exception; `converted` must be zeroed before and cleared after, either way. */
int mha_convert_cache(PyObject *arguments[NUM_CACHE], mha_dtype dtype, const score_shape *scores,
                      int64_t kv_heads, int64_t value_head_dim, converted_cache *converted);
/* keep_first and dropped join the options: 0 unless given. */
int mha_convert_kept(PyObject *const arguments[NUM_CACHE], mha_attention_options *options);
void mha_clear_cache(converted_cache *converted);

/* The rows that `append` gets, from the projected ones (batch..., len, kv_heads * d), which stay
 * the caller's. 0, or -1 with the exception. */
int mha_see_appended(PyArrayObject *key_rows, PyArrayObject *value_rows, int64_t kv_heads,
                     converted_cache *converted);

/* Takes the pointers; valid as long as `converted` stays where it is. */
mha_layer_cache mha_fill_cache(converted_cache *converted);

#endif
