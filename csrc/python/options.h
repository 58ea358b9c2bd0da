/* The options that all attention functions share: from Python objects to mha_attention_options.
 * Converting and checking comes first, for every argument; pointers are taken last, since a
 * conversion may run Python code that frees or resizes other arrays. */
#ifndef MHA_OPTIONS_H
#define MHA_OPTIONS_H

#include "convert.h"
#include "settle.h"

/* The options as every attention function takes them: one after the other, in this order. */
enum option {
    MASK,
    BIAS,
    KEY_LENGTHS,
    CAUSAL,
    QUERY_OFFSET,
    WINDOW,
    SCALE,
    SOFTCAP,
    EMPTY_ROWS,
    DROPOUT,
    SEED,
    NUM_OPTIONS
};

/* How the options from argument `first` on are settled; the others are taken as they are. */
/* clang-format off */
#define MHA_OPTION_FORMS(first)                            \
    [(first) + MASK] = {"mask", AS_ARRAY},                 \
    [(first) + BIAS] = {"bias", AS_REAL},                  \
    [(first) + KEY_LENGTHS] = {"key_lengths", AS_ARRAY},   \
    [(first) + QUERY_OFFSET] = {"query_offset", AS_ARRAY}, \
    [(first) + WINDOW] = {"window", AS_PAIR},              \
    [(first) + SCALE] = {"scale", AS_NUMBER},              \
    [(first) + SOFTCAP] = {"softcap", AS_NUMBER},          \
    [(first) + DROPOUT] = {"dropout", AS_NUMBER}
/* clang-format on */

/* The sizes that options are checked against. */
typedef struct score_shape {
    int batch_axes;
    npy_intp batch[NPY_MAXDIMS];
    bool has_heads; /* whether the scores as the user sees them have a heads axis */
    int64_t heads, query_len, key_len, head_dim;
} score_shape;

/* Owned arrays and plain values. */
typedef struct converted_options {
    PyArrayObject *mask;         /* bool */
    PyArrayObject *bias;         /* the element type */
    PyArrayObject *key_lengths;  /* int64 */
    PyArrayObject *query_offset; /* int64, within +-MHA_FARTHEST */
    int64_t default_offset;      /* used where query_offset is NULL */
    bool causal, uniform_empty_rows;
    int64_t window_left, window_right;
    double scale, softcap, dropout;
    uint64_t seed;
} converted_options;

/* 0, or -1 with the exception; `converted` must be zeroed before and cleared after, either way. */
int mha_convert_options(PyObject *const options[NUM_OPTIONS], mha_dtype dtype,
                        const score_shape *scores, converted_options *converted);
void mha_clear_options(converted_options *converted);

/* Takes the pointers; `options` is valid as long as `converted` is. */
void mha_point_options(converted_options *converted, const score_shape *scores,
                       mha_attention_options *options);

/* New arrays for the weights (..., heads, query_len, key_len) and lse (..., heads, query_len) that
 * were asked for, else NULL; the flags are Python objects. 0, or -1 with the exception. */
int mha_new_extras(PyObject *return_weights, PyObject *return_lse, mha_dtype dtype,
                   const score_shape *scores, PyArrayObject **weights, PyArrayObject **lse);

/* A new array (2, ..., heads, query_len): origin and denominator of each row's softmax. */
PyArrayObject *mha_new_statistics(mha_dtype dtype, const score_shape *scores);

/* 0 if the array is what mha_new_statistics makes, else -1 with the exception. */
int mha_check_statistics(PyObject *object, mha_dtype dtype, const score_shape *scores);

/* Takes the two pointers; NULL for none. */
void mha_point_statistics(PyArrayObject *statistics, mha_attention *attention);

/* As the options are: shape and strides of the scores, 0 where the array is repeated. */
void mha_broadcast_to_scores(PyArrayObject *array, const score_shape *scores, mha_tensor *tensor);

/* The output alone, or a tuple with what else was asked for. Takes over all three references. */
PyObject *mha_pack_results(PyArrayObject *output, PyArrayObject *weights, PyArrayObject *lse);

/* A probability in [0, 1). */
int mha_convert_dropout(PyObject *object, const char *name, double *dropout);

#endif
