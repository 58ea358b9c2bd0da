/* The options that all attention functions share: from Python objects to mha_attention_options.
 * Converting and checking comes first, for every argument; pointers are taken last, since a
 * conversion may run Python code that frees or resizes other arrays. */
#ifndef MHA_OPTIONS_H
#define MHA_OPTIONS_H

#include "python/call/normalise.h"
#include "python/convert/convert.h"

/* The options of attention in the order of mha._functions.options.AttentionOptions: name, how it is
 * normalised, and what becomes of it: an array that the call owns, one that is broadcast to the
 * scores, one of each head's numbers, or a plain value in mha_attention_options. Each has a
 * convert_<name> in options.c, and what is called ARRAY a fill_<name>. They are converted in this
 * order: softcap needs the scale. */
#define MHA_OPTIONS(X)                                                                             \
    X(mask, AS_MASK, SCORES)                                                                       \
    X(bias, AS_REAL, SCORES)                                                                       \
    X(alibi, AS_REAL, HEADS)                                                                       \
    X(relative_bias, AS_REAL, HEADS)                                                               \
    X(sinks, AS_REAL, HEADS)                                                                       \
    X(key_lengths, AS_ARRAY, ARRAY)                                                                \
    X(causal, AS_IT_IS, VALUE)                                                                     \
    X(query_offset, AS_ARRAY, ARRAY)                                                               \
    X(window, AS_INTS, VALUE)                                                                      \
    X(scale, AS_NUMBER, VALUE)                                                                     \
    X(softcap, AS_NUMBER, VALUE)                                                                   \
    X(empty_rows, AS_IT_IS, VALUE)                                                                 \
    X(dropout, AS_NUMBER, VALUE)                                                                   \
    X(rng, AS_IT_IS, VALUE)                                                                        \
    X(dropout_offsets, AS_INTS, VALUE)

/* OPTION_mask and so on: their places in the record. */
#define MHA_OPTION_PLACE(name, form, becomes) OPTION_##name,
enum option { MHA_OPTIONS(MHA_OPTION_PLACE) NUM_OPTIONS };

/* Where they begin among the arguments of a function. */
#define MHA_FIRST_OPTION ARG_mask

/* The sizes that options are checked against. */
typedef struct score_shape {
    int batch_axes;
    npy_intp batch[NPY_MAXDIMS];
    bool has_heads; /* whether the scores as the user sees them have a heads axis */
    int64_t heads, query_len, key_len, head_dim;
} score_shape;

/* Owned arrays and plain values. */
#define MHA_OWNED_ARRAY(name) PyArrayObject *name;
#define MHA_OWNED_SCORES(name) PyArrayObject *name;
#define MHA_OWNED_HEADS(name) PyArrayObject *name;
#define MHA_OWNED_VALUE(name)
#define MHA_OWNED_OPTION(name, form, becomes) MHA_OWNED_##becomes(name)
typedef struct converted_options {
    MHA_OPTIONS(MHA_OWNED_OPTION)
    PyObject *block_mask;         /* the record of a BlockMask, in place of mask; or NULL */
    int64_t default_offset;       /* used where query_offset is NULL */
    mha_attention_options values; /* the arrays only once pointers are taken */
} converted_options;

/* 0, or -1 with the exception; `converted` must be zeroed before and cleared after, either way. */
int mha_convert_options(PyObject *const options[NUM_OPTIONS], mha_dtype dtype,
                        const score_shape *scores, converted_options *converted);
void mha_clear_options(converted_options *converted);

/* Takes the pointers; valid as long as `converted` stays where it is. */
const mha_attention_options *mha_fill_options(converted_options *converted,
                                              const score_shape *scores);

/* The scores as the user sees them: (batch..., heads, query_len, key_len), no heads in 2-D, 3-D;
 * the number of their axes. */
int mha_user_shape(const score_shape *scores, npy_intp *shape);

/* 0 where the array broadcasts to the scores, or -1 with the exception. */
int mha_check_broadcasts(PyArrayObject *array, const score_shape *scores, const char *name);

/* As the options are: shape and strides of the scores, 0 where the array is repeated; absent where
 * it is NULL. */
mha_tensor mha_broadcast_to_scores(PyArrayObject *array, const score_shape *scores);

/* An option that is one row a head, or its gradient; absent where it is NULL. */
mha_head_numbers mha_by_head(PyArrayObject *array);

/* Four ints from 0 on, or None: zeros. */
int mha_convert_dropout_offsets(PyObject *object, const char *name, mha_dropout_offsets *offsets);

/* A probability in [0, 1). */
int mha_convert_dropout(PyObject *object, const char *name, double *dropout);

#endif
