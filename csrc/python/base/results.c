#include "python/base/results.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "python/base/system.h"

/* numpy.lib.tracemalloc_domain */
enum { TRACED_AS_NUMPYS = 389047 };

enum { SMALLEST_SPARE = 256 << 10, MOST_SPARE = 16 };

/* Oldest first. Only tried locks are taken: a fork may leave one behind. */
static struct {
    atomic_flag is_locked;
    void *blocks[MOST_SPARE];
    size_t sizes[MOST_SPARE];
    int count;
    size_t bytes;
} spare = {.is_locked = ATOMIC_FLAG_INIT};

static bool try_lock(void) {
    return !atomic_flag_test_and_set_explicit(&spare.is_locked, memory_order_acquire);
}

static void unlock(void) { atomic_flag_clear_explicit(&spare.is_locked, memory_order_release); }

static PyObject *handler; /* the capsule that tells arrays of the functions below */

static void *take_spare(int index) {
    void *block = spare.blocks[index];
    spare.bytes -= spare.sizes[index];
    spare.count--;
    memmove(spare.blocks + index, spare.blocks + index + 1,
            (size_t)(spare.count - index) * sizeof *spare.blocks);
    memmove(spare.sizes + index, spare.sizes + index + 1,
            (size_t)(spare.count - index) * sizeof *spare.sizes);
    return block;
}

static void *allocate(void *context, size_t size) {
    void *block = NULL;
    (void)context;
    if (size >= SMALLEST_SPARE && try_lock()) {
        for (int i = spare.count - 1; i >= 0 && block == NULL; i--) {
            block = spare.sizes[i] == size ? take_spare(i) : NULL;
        }
        unlock();
    }
    return block == NULL ? mha_system_allocate(size) : block;
}

static void release(void *context, void *block, size_t size) {
    (void)context;
    (void)size;              /* with the sanitizer */
#ifndef __SANITIZE_ADDRESS__ /* it finds what is used after its release */
    if (block != NULL && size >= SMALLEST_SPARE && size <= MHA_SPARE_BLOCK_BYTES && try_lock()) {
        while (spare.count == MOST_SPARE || spare.bytes + size > MHA_SPARE_BLOCK_BYTES) {
            mha_system_free(take_spare(0));
        }
        spare.blocks[spare.count] = block;
        spare.sizes[spare.count++] = size;
        spare.bytes += size;
        block = NULL;
        unlock();
    }
#endif
    mha_system_free(block);
}

static void *allocate_zeros(void *context, size_t count, size_t size) {
    (void)context;
    return mha_system_allocate_zeros(count, size);
}

static void *reallocate(void *context, void *block, size_t size) {
    (void)context;
    return mha_system_reallocate(block, size);
}

static PyDataMem_Handler functions = {
    "mha_results", 1, {NULL, allocate, allocate_zeros, reallocate, release}};

int mha_start_results(void) {
    handler = PyCapsule_New(&functions, "mem_handler", NULL);
    return handler == NULL ? -1 : 0;
}

/* Whether such an array is worth a block of ours; its size. */
static bool is_large(int axes, const npy_intp *shape, npy_intp item, size_t *bytes) {
    *bytes = (size_t)item;
    for (int axis = 0; axis < axes; axis++) {
        if (shape[axis] < 0 || __builtin_mul_overflow(*bytes, (size_t)shape[axis], bytes)) {
            return false; /* NumPy has the words for it */
        }
    }
    return *bytes >= SMALLEST_SPARE && *bytes <= NPY_MAX_INTP;
}

/* An array that owns a block of ours. Asking NumPy for it, by PyDataMem_SetHandler, would put a
 * context variable there and back, and where memory runs out meanwhile it stays, or CPython 3.11
 * ends. */
static PyArrayObject *new_large(int axes, const npy_intp *shape, const npy_intp *strides,
                                int typenum, size_t bytes) {
    void *block = allocate(NULL, bytes);
    if (block == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    PyObject *array = PyArray_New(&PyArray_Type, axes, shape, typenum, strides, block, 0,
                                  NPY_ARRAY_WRITEABLE | NPY_ARRAY_ALIGNED, NULL);
    if (array == NULL) {
        release(NULL, block, bytes);
        return NULL;
    }
    ((PyArrayObject_fields *)array)->mem_handler = Py_NewRef(handler);
    PyArray_ENABLEFLAGS((PyArrayObject *)array, NPY_ARRAY_OWNDATA);
    (void)PyTraceMalloc_Track(TRACED_AS_NUMPYS, (uintptr_t)block, bytes); /* or not traced */
    return (PyArrayObject *)array;
}

PyArrayObject *mha_new_result(int axes, const npy_intp *shape, int typenum) {
    PyArray_Descr *type = PyArray_DescrFromType(typenum); /* of a type that there is: never NULL */
    const npy_intp item = PyDataType_ELSIZE(type);
    Py_DECREF(type);
    size_t bytes;
    return is_large(axes, shape, item, &bytes)
               ? new_large(axes, shape, NULL, typenum, bytes)
               : (PyArrayObject *)PyArray_SimpleNew(axes, shape, typenum);
}

/* The strides of a dense array whose axes lie in the order of those of `like`. */
static void dense_strides(PyArrayObject *like, npy_intp item, npy_intp *strides) {
    int order[NPY_MAXDIMS]; /* of the axes, that with the smallest stride first */
    const int axes = PyArray_NDIM(like);
    for (int axis = axes - 1, count = 0; axis >= 0; axis--, count++) {
        int at = count;
        for (; at > 0 && llabs((long long)PyArray_STRIDE(like, order[at - 1])) >
                             llabs((long long)PyArray_STRIDE(like, axis));
             at--) {
            order[at] = order[at - 1];
        }
        order[at] = axis;
    }
    npy_intp stride = item;
    for (int i = 0; i < axes; i++) {
        strides[order[i]] = stride;
        stride *= PyArray_DIM(like, order[i]);
    }
}

PyArrayObject *mha_new_result_like(PyArrayObject *like, int typenum) {
    npy_intp strides[NPY_MAXDIMS];
    PyArray_Descr *type = PyArray_DescrFromType(typenum);
    const npy_intp item = PyDataType_ELSIZE(type);
    size_t bytes;
    if (!is_large(PyArray_NDIM(like), PyArray_DIMS(like), item, &bytes)) {
        return (PyArrayObject *)PyArray_NewLikeArray(like, NPY_KEEPORDER, type, 0);
    }
    Py_DECREF(type);
    dense_strides(like, item, strides);
    return new_large(PyArray_NDIM(like), PyArray_DIMS(like), strides, typenum, bytes);
}
