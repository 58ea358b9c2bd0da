#include "python/steps/preparation.h"

#include <math.h>

void mha_clear_preparation(converted_preparation *converted) {
    PyArrayObject **const arrays[] = {&converted->q_norm, &converted->k_norm, &converted->positions,
                                      &converted->key_positions};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        Py_CLEAR(*arrays[i]);
    }
    mha_clear_rotary(&converted->rotary);
}

int mha_convert_norm(PyObject **argument, const char *name, int64_t heads, int64_t head_dim,
                     mha_dtype dtype, PyArrayObject **norm) {
    if (*argument == Py_None) {
        return 0;
    }
    PyArrayObject *array = mha_array_argument(argument, name);
    if (array == NULL) {
        return -1;
    }
    const int64_t length = PyArray_NDIM(array) == 1 ? PyArray_DIM(array, 0) : -1;
    if (length != head_dim && length != heads * head_dim) {
        return mha_wrong_shape(array, name, "(%lld,), that is head_dim, or (%lld,), all heads",
                               (long long)head_dim, (long long)(heads * head_dim));
    }
    *norm = mha_as_contiguous_real(array, dtype, name);
    return *norm == NULL ? -1 : 0;
}

int mha_convert_norm_numbers(PyObject *eps, PyObject *offset, double *norm_eps,
                             double *norm_offset) {
    if (eps != Py_None && mha_convert_number(eps, "norm_eps", norm_eps) < 0) {
        return -1;
    }
    if (offset != Py_None && mha_convert_number(offset, "norm_offset", norm_offset) < 0) {
        return -1;
    }
    if (!(*norm_eps >= 0) || !isfinite(*norm_eps)) {
        return mha_raise(PyExc_ValueError, "norm_eps: got %S, wanted a finite number of at least 0",
                         eps);
    }
    if (!isfinite(*norm_offset)) {
        return mha_raise(PyExc_ValueError, "norm_offset: got %S, wanted a finite number", offset);
    }
    return 0;
}

static int convert_norms(PyObject **arguments, mha_dtype dtype, const score_shape *scores,
                         int64_t kv_heads, converted_preparation *converted) {
    return mha_convert_norm(arguments + PREPARE_q_norm, "q_norm", scores->heads, scores->head_dim,
                            dtype, &converted->q_norm) < 0 ||
                   mha_convert_norm(arguments + PREPARE_k_norm, "k_norm", kv_heads,
                                    scores->head_dim, dtype, &converted->k_norm) < 0
               ? -1
               : mha_convert_norm_numbers(arguments[PREPARE_norm_eps],
                                          arguments[PREPARE_norm_offset], &converted->norm_eps,
                                          &converted->norm_offset);
}

int mha_convert_preparation(PyObject *arguments[NUM_PREPARATION], mha_dtype dtype,
                            const score_shape *scores, int64_t kv_heads,
                            converted_preparation *converted) {
    return convert_norms(arguments, dtype, scores, kv_heads, converted) < 0 ||
                   mha_convert_rotary(arguments[PREPARE_rotary], scores->head_dim,
                                      &converted->rotary) < 0 ||
                   mha_convert_positions(arguments + PREPARE_positions, &converted->rotary,
                                         scores->batch, scores->batch_axes, scores->query_len,
                                         "positions", &converted->positions) < 0 ||
                   mha_convert_positions(arguments + PREPARE_key_positions, &converted->rotary,
                                         scores->batch, scores->batch_axes, scores->key_len,
                                         "key_positions", &converted->key_positions) < 0
               ? -1
               : 0;
}

mha_head_norm mha_fill_norm(PyArrayObject *weight, double norm_eps, double norm_offset) {
    const mha_head_norm norm = {.weight = mha_data_or_null(weight),
                                .columns = weight == NULL ? 0 : PyArray_DIM(weight, 0),
                                .eps = norm_eps,
                                .offset = norm_offset};
    return norm;
}

void mha_fill_preparation(converted_preparation *converted, const score_shape *scores,
                          mha_multi_head_attention *layer) {
    layer->q_norm = mha_fill_norm(converted->q_norm, converted->norm_eps, converted->norm_offset);
    layer->k_norm = mha_fill_norm(converted->k_norm, converted->norm_eps, converted->norm_offset);
    layer->rotary = mha_fill_rotary(&converted->rotary);
    if (converted->positions != NULL) {
        converted->rows = mha_fill_positions(converted->positions, &converted->rotary,
                                             scores->batch, scores->batch_axes);
        layer->positions = &converted->rows;
    }
    if (converted->key_positions != NULL) {
        converted->key_rows = mha_fill_positions(converted->key_positions, &converted->rotary,
                                                 scores->batch, scores->batch_axes);
        layer->key_positions = &converted->key_rows;
    }
}
