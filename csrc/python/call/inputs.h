/* query, key and value of an attention call: conversion and the checks of their shapes. */
#ifndef MHA_INPUTS_H
#define MHA_INPUTS_H

#include "python/call/function.h"
#include "python/call/options.h"

typedef struct attention_inputs {
    PyArrayObject *query, *key, *value; /* owned; the element type, last axes contiguous */
    bool may_lie_by_columns;            /* or of key and value the axis before; else copied */
    mha_dtype dtype;                    /* of the arithmetic */
    int result_typenum; /* of the output: halves where all three are, which are read as they are */
    score_shape scores;
    int64_t kv_heads, value_head_dim;
} attention_inputs;

/* Of the three arguments query, key and value, heads apart: (..., heads, query_len, head_dim) with
 * equal batch axes; 2-D and 3-D are one head. key_width_is_free: query and key may differ in their
 * last axis (additive attention). 0, or -1 with the exception; cleared by mha_clear_inputs either
 * way. */
int mha_convert_inputs(PyObject **arguments, bool key_width_is_free, attention_inputs *inputs);
void mha_clear_inputs(attention_inputs *inputs);

/* The shape of the output as the user sees it; the number of its axes. */
int mha_output_shape(const attention_inputs *inputs, npy_intp *shape);

/* The same arguments as arrays, borrowed, before any conversion of their type. */
int mha_three_arrays(PyObject **arguments, PyArrayObject *arrays[3]);

/* 0 if heads is a multiple of kv_heads, and key and value agree on kv_heads; else -1 with the
 * exception. */
int mha_check_heads(int64_t heads, int64_t kv_heads, int64_t value_heads);

/* The three arrays in the call's element type, or halves, as inputs->query and so on. */
int mha_convert_input_types(PyArrayObject *arrays[3], attention_inputs *inputs);

/* The arrays that attention writes; NULL for what is not wanted. */
typedef struct attention_results {
    PyArrayObject *output, *weights, *lse, *statistics;
    PyArrayObject
        *saved_output; /* a copy for the backward pass: the caller may change the output */
} attention_results;

void mha_clear_results(attention_results *results);

/* The output, or a tuple of it, the weights and lse, as far as they are there; takes them over. The
 * output is first rounded or copied from the saved one, where there is one. */
PyObject *mha_pack_results(attention_results *results);

/* New arrays for the weights (..., heads, query_len, key_len) and lse (..., heads, query_len) that
 * were asked for, else NULL; the flags are Python objects. 0, or -1 with the exception. */
int mha_new_extras(PyObject *return_weights, PyObject *return_lse, mha_dtype dtype,
                   const score_shape *scores, PyArrayObject **weights, PyArrayObject **lse);

/* A new array (2, ..., heads, query_len): maximum and denominator of each row's softmax. */
PyArrayObject *mha_new_statistics(mha_dtype dtype, const score_shape *scores);

/* maximum and denominator, that half of the array; NULL for none. */
void *mha_maximum_of(PyArrayObject *statistics);
void *mha_denominator_of(PyArrayObject *statistics);

/* Where the arithmetic writes the output: that which goes out is rounded from it where it is
 * halves.
 */
PyArrayObject *mha_computed_output(const attention_results *results);

/* Every field of the core's struct, of dot products, without head_gate. On the backward pass, when
 * the output is the caller's, the saved one takes its place. */
mha_attention mha_fill_attention(const attention_inputs *inputs, const attention_results *results,
                                 const mha_attention_options *options);

#endif
