/* The structs of DLPack's specification (dmlc/dlpack, include/dlpack/dlpack.h), by which libraries
 * hand over arrays. */
#ifndef MHA_PYTHON_DLPACK_H
#define MHA_PYTHON_DLPACK_H
#include "python/convert/convert.h"

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t axes;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    const int64_t *shape, *strides; /* in elements; no strides: C-contiguous */
    uint64_t byte_offset;
} dl_tensor;

/* Since version 1. What stands before the flags stays in all versions. */
typedef struct managed_versioned {
    struct {
        uint32_t major, minor;
    } version;
    void *context;
    void (*deleter)(struct managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} managed_versioned;

enum { DEVICE_CPU = 1, KNOWN_VERSION = 1 };
enum { CODE_INT = 0, CODE_UINT = 1, CODE_FLOAT = 2, CODE_BFLOAT16 = 4, CODE_BOOL = 6 };

/* The type of arrays of bfloat16, a new reference: that of ml_dtypes, else what mha/_base/dtypes.py
 * calls RAW_BFLOAT16. */
PyArray_Descr *mha_type_of_bfloat16(void);

bool mha_is_bfloat16_tensor(const dl_tensor *tensor);

/* The type of arrays over a tensor, a new reference; NULL, without an exception, where NumPy has
 * none. */
PyArray_Descr *mha_type_of_tensor(const dl_tensor *tensor);

/* A read-only array of a type, which it takes over, over the tensor's memory; NULL with an
 * exception where what the tensor says of its elements cannot be true. */
PyArrayObject *mha_array_over_tensor(const dl_tensor *tensor, PyArray_Descr *type,
                                     const char *name);

/* The array, or NULL, with the owner of its memory; takes over both. */
PyArrayObject *mha_with_owner(PyArrayObject *array, PyObject *owner);

#endif
