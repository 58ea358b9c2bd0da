#include "results.h"

#include <pthread.h>
#include <stdlib.h>

enum { SMALLEST_SPARE = 256 << 10, MOST_SPARE = 16, ALIGNMENT = 64 };

/* Oldest first. Only tried locks are taken: a fork may leave one behind. */
static struct {
    pthread_mutex_t lock;
    void *blocks[MOST_SPARE];
    size_t sizes[MOST_SPARE];
    int count;
    size_t bytes;
} spare = {.lock = PTHREAD_MUTEX_INITIALIZER};

static PyObject *handler; /* the capsule that tells NumPy of the functions below */

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
    if (size >= SMALLEST_SPARE && pthread_mutex_trylock(&spare.lock) == 0) {
        for (int i = spare.count - 1; i >= 0 && block == NULL; i--) {
            block = spare.sizes[i] == size ? take_spare(i) : NULL;
        }
        pthread_mutex_unlock(&spare.lock);
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
    if (block != NULL && size >= SMALLEST_SPARE && size <= MHA_SPARE_BLOCK_BYTES &&
        pthread_mutex_trylock(&spare.lock) == 0) {
        while (spare.count == MOST_SPARE || spare.bytes + size > MHA_SPARE_BLOCK_BYTES) {
            free(take_spare(0));
        }
        spare.blocks[spare.count] = block;
        spare.sizes[spare.count++] = size;
        spare.bytes += size;
        block = NULL;
        pthread_mutex_unlock(&spare.lock);
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
    return bytes < SMALLEST_SPARE ? Py_NewRef(Py_None) : PyDataMem_SetHandler(handler);
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

/* Bytes of such an array, or more than SMALLEST_SPARE where it is larger. */
static npy_intp bytes_up_to_spare(int axes, const npy_intp *shape) {
    npy_intp bytes = (npy_intp)sizeof(double);
    for (int axis = 0; axis < axes && 0 < bytes && bytes < SMALLEST_SPARE; axis++) {
        bytes *= shape[axis] < SMALLEST_SPARE ? shape[axis] : SMALLEST_SPARE;
    }
    for (int axis = 0; axis < axes; axis++) {
        bytes = shape[axis] == 0 ? 0 : bytes;
    }
    return bytes;
}

PyArrayObject *mha_new_result(int axes, const npy_intp *shape, int typenum) {
    PyObject *before = begin(bytes_up_to_spare(axes, shape));
    return before == NULL ? NULL
                          : end(before, (PyArrayObject *)PyArray_SimpleNew(axes, shape, typenum));
}

PyArrayObject *mha_new_result_like(PyArrayObject *like) {
    PyObject *before = begin(PyArray_NBYTES(like));
    return before == NULL
               ? NULL
               : end(before, (PyArrayObject *)PyArray_NewLikeArray(like, NPY_KEEPORDER, NULL, 0));
}
