#include "results.h"

#include <pthread.h>
#include <stdlib.h>

enum { SMALLEST_KEPT = 256 << 10, MOST_KEPT = 16, ALIGNMENT = 64 };

/* Oldest first. Only tried locks are taken: a fork may leave one behind. */
static struct {
    pthread_mutex_t lock;
    void *blocks[MOST_KEPT];
    size_t sizes[MOST_KEPT];
    int count;
    size_t bytes;
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

static PyObject *handler; /* the capsule that tells NumPy of the functions below */

static void *remove_kept(int index) {
    void *block = kept.blocks[index];
    kept.bytes -= kept.sizes[index];
    kept.count--;
    memmove(kept.blocks + index, kept.blocks + index + 1,
            (size_t)(kept.count - index) * sizeof *kept.blocks);
    memmove(kept.sizes + index, kept.sizes + index + 1,
            (size_t)(kept.count - index) * sizeof *kept.sizes);
    return block;
}

static void *allocate(void *context, size_t size) {
    void *block = NULL;
    (void)context;
    if (size >= SMALLEST_KEPT && pthread_mutex_trylock(&kept.lock) == 0) {
        for (int i = kept.count - 1; i >= 0 && block == NULL; i--) {
            block = kept.sizes[i] == size ? remove_kept(i) : NULL;
        }
        pthread_mutex_unlock(&kept.lock);
    }
    if (block == NULL && posix_memalign(&block, ALIGNMENT, size) != 0) {
        return NULL;
    }
    return block;
}

static void release(void *context, void *block, size_t size) {
    (void)context;
    (void)size;              /* with the sanitizer */
#ifndef __SANITIZE_ADDRESS__ /* it finds what is used after its release */
    if (block != NULL && size >= SMALLEST_KEPT && size <= MHA_KEPT_RESULT_BYTES &&
        pthread_mutex_trylock(&kept.lock) == 0) {
        while (kept.count == MOST_KEPT || kept.bytes + size > MHA_KEPT_RESULT_BYTES) {
            free(remove_kept(0));
        }
        kept.blocks[kept.count] = block;
        kept.sizes[kept.count++] = size;
        kept.bytes += size;
        block = NULL;
        pthread_mutex_unlock(&kept.lock);
    }
#endif
    free(block);
}

static void *allocate_zeros(void *context, size_t count, size_t size) {
    (void)context;
    return calloc(count, size);
}

static void *reallocate(void *context, void *block, size_t size) {
    (void)context;
    return realloc(block, size);
}

static PyDataMem_Handler functions = {
    "mha_results", 1, {NULL, allocate, allocate_zeros, reallocate, release}};

int mha_start_results(void) {
    handler = PyCapsule_New(&functions, "mem_handler", NULL);
    return handler == NULL ? -1 : 0;
}

/* While it holds, NumPy takes memory by the functions above. NULL, or what stood before. */
static PyObject *begin(npy_intp bytes) {
    return bytes < SMALLEST_KEPT ? Py_NewRef(Py_None) : PyDataMem_SetHandler(handler);
}

static PyArrayObject *end(PyObject *before, PyArrayObject *array) {
    if (before != Py_None) {
        PyObject *ours = PyDataMem_SetHandler(before);
        if (ours == NULL) {
            Py_CLEAR(array);
        }
        Py_XDECREF(ours);
    }
    Py_DECREF(before);
    return array;
}

/* Bytes of such an array, or more than SMALLEST_KEPT where it is larger. */
static npy_intp bytes_up_to_kept(int axes, const npy_intp *shape) {
    npy_intp bytes = (npy_intp)sizeof(double);
    for (int axis = 0; axis < axes && 0 < bytes && bytes < SMALLEST_KEPT; axis++) {
        bytes *= shape[axis] < SMALLEST_KEPT ? shape[axis] : SMALLEST_KEPT;
    }
    for (int axis = 0; axis < axes; axis++) {
        bytes = shape[axis] == 0 ? 0 : bytes;
    }
    return bytes;
}

PyArrayObject *mha_new_result(int axes, const npy_intp *shape, int typenum) {
    PyObject *before = begin(bytes_up_to_kept(axes, shape));
    return before == NULL ? NULL
                          : end(before, (PyArrayObject *)PyArray_SimpleNew(axes, shape, typenum));
}

PyArrayObject *mha_new_result_like(PyArrayObject *like) {
    PyObject *before = begin(PyArray_NBYTES(like));
    return before == NULL
               ? NULL
               : end(before, (PyArrayObject *)PyArray_NewLikeArray(like, NPY_KEEPORDER, NULL, 0));
}
