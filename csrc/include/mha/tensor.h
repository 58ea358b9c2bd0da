/* A strided array that somebody else owns, as the core sees NumPy's arrays. */
#ifndef MHA_TENSOR_H
#define MHA_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mha/status.h"

MHA_API_BEGIN

/* Those that NumPy 1 allows an array, one of heads more, and one of queries for lengths. */
enum { MHA_MAX_AXES = 34 };

typedef enum mha_dtype { MHA_FLOAT32, MHA_FLOAT64, MHA_NUM_DTYPES } mha_dtype;

/* How the numbers of an array lie in memory: as the arithmetic has them, or half as wide as its
 * float32; or in blocks of MHA_QUANTISED_ROWS that share a float16 scale, 8 or 4 bits a number
 * (GGML's types of these names): those of a packed weight along its input axis; and those of the
 * keys and values of a cache, q8_0 alone, along a row: (2 bytes of scale, 32 of numbers) again and
 * again. float64 has none of them. */
typedef enum mha_storage {
    MHA_AS_COMPUTED,
    MHA_FLOAT16,
    MHA_BFLOAT16,
    MHA_Q8_0,
    MHA_Q4_0
} mha_storage;
enum { MHA_QUANTISED_ROWS = 32, MHA_Q8_0_BYTES = 2 + MHA_QUANTISED_ROWS }; /* of a row's block */

static inline bool mha_is_quantised(mha_storage storage) { return storage >= MHA_Q8_0; }

/* What is to be known of an element type, apart from its kernels. */
typedef struct mha_element_type {
    const char *name;
    double largest; /* finite number */
} mha_element_type;

const mha_element_type *mha_element_type_of(mha_dtype dtype);

/* Strides are in bytes, of any sign, and 0 where an axis is broadcast; without elements they mean
 * nothing. The data is borrowed. */
typedef struct mha_tensor {
    void *data;
    mha_storage storage;
    int axes;
    int64_t shape[MHA_MAX_AXES];
    int64_t strides[MHA_MAX_AXES];
} mha_tensor;

/* Here and below: inline what is asked for so often that a call would cost more than it does. */
static inline size_t mha_dtype_size(mha_dtype dtype) {
    return dtype == MHA_FLOAT32 ? sizeof(float) : sizeof(double);
}

/* Bytes of an element that lies so, where the arithmetic is in `dtype`; 1 of blocks, whose rows are
 * counted in bytes. */
static inline size_t mha_storage_size(mha_dtype dtype, mha_storage storage) {
    return storage == MHA_AS_COMPUTED  ? mha_dtype_size(dtype)
           : mha_is_quantised(storage) ? 1
                                       : sizeof(uint16_t);
}

/* Rounds `count` float32 numbers to halves, ties to even, or to whole blocks; and back, exactly. */
void mha_round_numbers(const float *from, void *to, mha_storage storage, int64_t count);
void mha_widen_numbers(const void *from, mha_storage storage, float *to, int64_t count);

/* Checked arithmetic: MHA_SIZE_OVERFLOW instead of a wrapped size. */
MHA_MUST_CHECK static inline mha_status mha_multiply_sizes(size_t a, size_t b, size_t *product) {
    return __builtin_mul_overflow(a, b, product) ? MHA_SIZE_OVERFLOW : MHA_OK;
}
MHA_MUST_CHECK static inline mha_status mha_add_sizes(size_t a, size_t b, size_t *sum) {
    return __builtin_add_overflow(a, b, sum) ? MHA_SIZE_OVERFLOW : MHA_OK;
}

static inline int64_t mha_smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t mha_larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* a / b, rounded up; a >= 0, b > 0. */
static inline int64_t mha_divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* Whether an axis is 0. */
bool mha_is_empty(const int64_t *shape, int axes);

/* The product of shape[0..axes-1]; MHA_SIZE_OVERFLOW if it does not fit int64_t. */
mha_status mha_count_elements(const int64_t *shape, int axes, int64_t *count) MHA_MUST_CHECK;

/* Byte offset of item `index` (in C order) over the first `axes` axes of the tensor. */
static inline int64_t mha_leading_offset(const mha_tensor *tensor, int axes, int64_t index) {
    int64_t offset = 0;
    for (int axis = axes - 1; axis > 0; axis--) {
        offset += index % tensor->shape[axis] * tensor->strides[axis];
        index /= tensor->shape[axis];
    }
    return axes == 0 ? 0 : offset + index * tensor->strides[0];
}

/* The strides of C order, of numbers as they are stored, not in blocks; all 0 where the tensor is
 * empty. Its size in bytes has been checked. Or the same with rows of numbers of the arithmetic
 * that are row_bytes apart. */
void mha_set_contiguous_strides(mha_tensor *tensor, mha_dtype dtype);
void mha_set_row_strides(mha_tensor *tensor, mha_dtype dtype, int64_t row_bytes);

/* Extent of axis `axes - from_last`, and its stride in bytes: mha_extent(t, 1) is the last. */
static inline int64_t mha_extent(const mha_tensor *tensor, int from_last) {
    return tensor->shape[tensor->axes - from_last];
}
static inline int64_t mha_stride(const mha_tensor *tensor, int from_last) {
    return tensor->strides[tensor->axes - from_last];
}

/* Whether one number serves all of axis `axes - from_last`. Strides alone do not say so: those of
 * NumPy's empty arrays are 0 whatever the axis. */
bool mha_is_shared(const mha_tensor *tensor, int from_last);

/* Whether several heads or batch items have the same numbers of a tensor (batch..., heads, ...). */
bool mha_heads_share(const mha_tensor *tensor, int batch_axes);

MHA_API_END

#endif
