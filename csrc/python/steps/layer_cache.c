#include "python/steps/layer_cache.h"

#include "python/base/call.h"
#include "python/convert/convert.h"
#include "python/steps/heads.h"

void mha_clear_cache(converted_cache *converted) {
    Py_CLEAR(converted->key);
    Py_CLEAR(converted->value);
    Py_CLEAR(converted->key_heads);
    Py_CLEAR(converted->value_heads);
    Py_CLEAR(converted->append);
}

/* (batch..., kv_heads, cached_len, columns) as attention reads it, in *cached. Rows that are
 * appended must show in it: it may be no copy then. */
static int convert_one(PyObject **argument, const char *name, mha_dtype dtype,
                       const score_shape *scores, int64_t kv_heads, int64_t columns, bool appends,
                       PyArrayObject **cached) {
    PyArrayObject *array = mha_array_argument(argument, name);
    if (array == NULL) {
        return -1;
    }
    const int axes = scores->batch_axes;
    const bool is_in_blocks = dtype == MHA_FLOAT32 && mha_is_in_blocks(array);
    const npy_intp of_block = is_in_blocks ? MHA_QUANTISED_ROWS : 1;
    if (PyArray_NDIM(array) != axes + 3 ||
        !PyArray_CompareLists(PyArray_DIMS(array), scores->batch, axes) ||
        PyArray_DIM(array, axes) != kv_heads || columns % of_block != 0 ||
        PyArray_DIM(array, axes + 2) != columns / of_block ||
        (is_in_blocks && !mha_last_axis_is_contiguous(array))) {
        return mha_wrong_shape(array, name, "(batch, %lld, len, %lld)", (long long)kv_heads,
                               (long long)columns);
    }
    *cached = is_in_blocks ? (PyArrayObject *)Py_NewRef((PyObject *)array)
                           : mha_as_stored(array, dtype, name);
    if (*cached != NULL && appends && PyArray_DATA(*cached) != PyArray_DATA(array)) {
        return mha_raise(PyExc_ValueError,
                         "%s: got an array that is to be converted, wanted one that "
                         "attention reads as it is, since rows are appended to it",
                         name);
    }
    return *cached == NULL ? -1 : 0;
}

int mha_convert_cache(PyObject *arguments[NUM_CACHE], mha_dtype dtype, const score_shape *scores,
                      int64_t kv_heads, int64_t value_head_dim, converted_cache *converted) {
    PyObject *append = arguments[CACHE_append];
    const bool appends = append != Py_None;
    if (arguments[CACHE_cached_key] == Py_None) {
        return 0;
    }
    if (convert_one(arguments + CACHE_cached_key, "cached_key", dtype, scores, kv_heads,
                    scores->head_dim, appends, &converted->key) < 0 ||
        convert_one(arguments + CACHE_cached_value, "cached_value", dtype, scores, kv_heads,
                    value_head_dim, appends, &converted->value) < 0) {
        return -1;
    }
    const int64_t key_len = PyArray_DIM(converted->key, scores->batch_axes + 1);
    const int64_t value_len = PyArray_DIM(converted->value, scores->batch_axes + 1);
    if (mha_check_equal(value_len, key_len,
                        "cached_value: got length %lld, wanted %lld as cached_key has") < 0) {
        return -1;
    }
    converted->append = appends ? Py_NewRef(append) : NULL;
    return 0;
}

int mha_convert_kept(PyObject *const arguments[NUM_CACHE], mha_attention_options *options) {
    PyObject *keep_first = arguments[CACHE_keep_first], *dropped = arguments[CACHE_dropped];
    if (keep_first != Py_None &&
        mha_convert_int(keep_first, "keep_first", 0, &options->keep_first) < 0) {
        return -1;
    }
    return dropped == Py_None ? 0 : mha_convert_int(dropped, "dropped", 0, &options->dropped);
}

int mha_see_appended(PyArrayObject *key_rows, PyArrayObject *value_rows, int64_t kv_heads,
                     converted_cache *converted) {
    converted->key_heads = mha_view_by_head(key_rows, kv_heads, 0);
    converted->value_heads = mha_view_by_head(value_rows, kv_heads, 0);
    return converted->key_heads == NULL || converted->value_heads == NULL ? -1 : 0;
}

static int call_append(void *context) {
    const converted_cache *cache = context;
    PyObject *nothing =
        PyObject_CallFunctionObjArgs(cache->append, cache->key_heads, cache->value_heads, NULL);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* The core calls it between projection and attention, without the GIL. */
static int append(void *context, mha_execution *execution) {
    return mha_call_python(execution, call_append, context);
}

mha_layer_cache mha_fill_cache(converted_cache *converted) {
    return (mha_layer_cache){
        .key = mha_tensor_of_cached(converted->key),
        .value = mha_tensor_of_cached(converted->value),
        .append = converted->append == NULL ? NULL : append,
        .context = converted,
    };
}
