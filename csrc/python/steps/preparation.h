/* What happens to queries and keys between projection and attention: norms and rotary embeddings.
 */
#ifndef MHA_PREPARATION_H
#define MHA_PREPARATION_H

#include "python/call/options.h"
#include "python/steps/rotary.h"

/* Arguments of a function, in this order, by keyword: PREPARE_rotary and so on. */
#define MHA_PREPARATION(X)                                                                         \
    X(rotary, AS_IT_IS)                                                                            \
    X(q_norm, AS_REAL)                                                                             \
    X(k_norm, AS_REAL)                                                                             \
    X(norm_eps, AS_NUMBER)                                                                         \
    X(norm_offset, AS_NUMBER)                                                                      \
    X(positions, AS_ARRAY)                                                                         \
    X(key_positions, AS_ARRAY)
#define MHA_PREPARATION_PLACE(name, form) PREPARE_##name,
enum preparation { MHA_PREPARATION(MHA_PREPARATION_PLACE) NUM_PREPARATION };

/* Owned arrays, or NULL, and plain values. */
typedef struct converted_preparation {
    PyArrayObject *q_norm, *k_norm, *positions, *key_positions;
    double norm_eps, norm_offset;
    converted_rotary rotary;
    mha_tensor rows, key_rows; /* of the positions, once pointers are taken */
} converted_preparation;

/* A norm's weight, (head_dim,), of each head, or (heads * head_dim,), of all together, into *norm;
 * and its two numbers, where None leaves them as they are. 0, or -1 with the exception. */
int mha_convert_norm(PyObject **argument, const char *name, int64_t heads, int64_t head_dim,
                     mha_dtype dtype, PyArrayObject **norm);
int mha_convert_norm_numbers(PyObject *eps, PyObject *offset, double *norm_eps,
                             double *norm_offset);
mha_head_norm mha_fill_norm(PyArrayObject *weight, double norm_eps, double norm_offset);

/* 0, or -1 with the exception; `converted` must be zeroed before and cleared after, either way. */
int mha_convert_preparation(PyObject *arguments[NUM_PREPARATION], mha_dtype dtype,
                            const score_shape *scores, int64_t kv_heads,
                            converted_preparation *converted);
void mha_clear_preparation(converted_preparation *converted);

/* Takes the pointers; valid as long as `converted` stays where it is. */
void mha_fill_preparation(converted_preparation *converted, const score_shape *scores,
                          mha_multi_head_attention *layer);

#endif
