#include "python/call/mask.h"

PyObject *mha_block_mask_record(PyObject *object) {
    if (PyArray_CheckExact(object) || PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        return NULL;
    }
    PyObject *record = PyObject_GetAttrString(object, "_core_record");
    if (record == NULL) {
        if (mha_error_is_ordinary()) {
            PyErr_Clear();
        }
        return NULL;
    }
    if (!PyTuple_CheckExact(record)) {
        Py_CLEAR(record);
    }
    return record;
}

/* The places of a record: mha/_functions/block_mask.py. */
enum { BATCH, HEADS, QUERY_LEN, KEY_LEN, STARTS, COLUMNS, CONTENTS, PATTERNS, RECORD_SIZE };

/* Numbers of `size` bytes each; NULL where they are none. */
static const void *numbers_of(PyObject *record, int place, size_t size, int64_t *count) {
    PyObject *bytes = PyTuple_GET_ITEM(record, place);
    if (!PyBytes_CheckExact(bytes) || (size_t)PyBytes_GET_SIZE(bytes) % size != 0) {
        return NULL;
    }
    const char *data = PyBytes_AS_STRING(bytes);
    *count = PyBytes_GET_SIZE(bytes) / (int64_t)size;
    return (uintptr_t)data % (size < sizeof(int64_t) ? size : sizeof(int64_t)) == 0 ? data : NULL;
}

/* (batch, heads, query_len, key_len), each an int that is not negative. */
static bool read_shape(PyObject *record, int64_t shape[4]) {
    for (int place = BATCH; place <= KEY_LEN; place++) {
        PyObject *size = PyTuple_GET_ITEM(record, place);
        shape[place] = PyLong_CheckExact(size) ? PyLong_AsLongLong(size) : -1;
        if (shape[place] < 0) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

/* Whether the rows have their columns in order, and contents that are there. */
static bool is_in_order(const mha_block_mask *mask, int64_t all_rows, int64_t columns,
                        int64_t entries, int64_t patterns) {
    if (mask->starts[0] != 0 || mask->starts[all_rows] != entries) {
        return false;
    }
    for (int64_t row = 0; row < all_rows; row++) {
        if (mask->starts[row] > mask->starts[row + 1] || mask->starts[row + 1] > entries) {
            return false;
        }
        int64_t before = -1;
        for (int64_t entry = mask->starts[row]; entry < mask->starts[row + 1]; entry++) {
            if (mask->columns[entry] <= before || mask->columns[entry] >= columns ||
                mask->contents[entry] < MHA_FULL_BLOCK || mask->contents[entry] >= patterns) {
                return false;
            }
            before = mask->columns[entry];
        }
    }
    return true;
}

/* The whole record, checked: pickles and strangers may hold anything. */
static bool read_record(PyObject *record, int64_t shape[4], mha_block_mask *mask) {
    int64_t starts, columns, contents, patterns, all_rows;
    if (!PyTuple_CheckExact(record) || PyTuple_GET_SIZE(record) != RECORD_SIZE ||
        !read_shape(record, shape)) {
        return false;
    }
    *mask = (mha_block_mask){
        .batch = shape[BATCH],
        .heads = shape[HEADS],
        .rows = mha_divide_up(shape[QUERY_LEN], MHA_MASK_BLOCK),
        .starts = numbers_of(record, STARTS, sizeof *mask->starts, &starts),
        .columns = numbers_of(record, COLUMNS, sizeof *mask->columns, &columns),
        .contents = numbers_of(record, CONTENTS, sizeof *mask->contents, &contents),
        .patterns = numbers_of(record, PATTERNS, MHA_MASK_BLOCK * MHA_MASK_BLOCK / 8, &patterns),
    };
    const int64_t counted[] = {mask->batch, mask->heads, mask->rows};
    return mask->starts != NULL && mask->columns != NULL && mask->contents != NULL &&
           mask->patterns != NULL && columns == contents &&
           mha_count_elements(counted, 3, &all_rows) == MHA_OK && starts - 1 == all_rows &&
           is_in_order(mask, all_rows, mha_divide_up(shape[KEY_LEN], MHA_MASK_BLOCK), columns,
                       patterns);
}

PyObject *mha_py_check_block_mask(PyObject *Py_UNUSED(module), PyObject *record) {
    int64_t shape[4];
    mha_block_mask mask;
    if (!read_record(record, shape, &mask)) {
        PyErr_SetString(PyExc_ValueError, "BlockMask: got a pickle whose blocks do not fit each "
                                          "other, wanted what pickle wrote of one");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* 0, or -1 with the exception. *mask points into the record. */
static int convert_block_mask(PyObject *record, const score_shape *scores, mha_block_mask *mask) {
    npy_intp wanted[NPY_MAXDIMS];
    char text[MHA_SHAPE_TEXT];
    int64_t shape[4], batch = 1;
    if (!read_record(record, shape, mask)) {
        return mha_raise(PyExc_ValueError, "mask: got a BlockMask whose blocks do not fit each "
                                           "other, wanted one that its constructors made");
    }
    for (int axis = 0; axis < scores->batch_axes; axis++) {
        batch *= scores->batch[axis]; /* of arrays that there are */
    }
    const int64_t heads = scores->has_heads ? scores->heads : 1;
    if ((shape[BATCH] != 1 && shape[BATCH] != batch) ||
        (shape[HEADS] != 1 && shape[HEADS] != heads) || shape[QUERY_LEN] != scores->query_len ||
        shape[KEY_LEN] != scores->key_len) {
        const int axes = mha_user_shape(scores, wanted);
        return mha_raise(
            PyExc_ValueError,
            "mask: got a BlockMask of batch %lld, heads %lld, query_len %lld and key_len "
            "%lld, wanted one that broadcasts to the scores %s, several batch axes as one",
            (long long)shape[BATCH], (long long)shape[HEADS], (long long)shape[QUERY_LEN],
            (long long)shape[KEY_LEN], mha_shape_text(wanted, axes, text));
    }
    return 0;
}

/* Whether a mask is one to be added to scores: it has negative numbers, as -inf or -1e9. Of a large
 * one nobody knows: a view of one number may have any size. 1, 0, or -1 with a MemoryError. */
static int is_additive(PyArrayObject *mask) {
    enum { MOST_LOOKED_AT = 1 << 20 };
    const int type = PyArray_TYPE(mask);
    const bool of_halves = mha_storage_of(mask) != MHA_AS_COMPUTED;
    if ((type != NPY_FLOAT && type != NPY_DOUBLE && !of_halves) || !PyArray_ISBEHAVED_RO(mask) ||
        PyArray_SIZE(mask) > MOST_LOOKED_AT) {
        return 0;
    }
    PyArrayIterObject *at = (PyArrayIterObject *)PyArray_IterNew((PyObject *)mask);
    if (at == NULL) {
        return -1;
    }
    bool found = false;
    while (!found && PyArray_ITER_NOTDONE(at)) {
        const char *number = PyArray_ITER_DATA(at);
        found = of_halves           ? *(const uint16_t *)number > 0x8000 /* the sign, and not -0 */
                : type == NPY_FLOAT ? *(const float *)number < 0
                                    : *(const double *)number < 0;
        PyArray_ITER_NEXT(at);
    }
    Py_DECREF(at);
    return found;
}

int mha_convert_mask(PyObject *object, const score_shape *scores, converted_options *c) {
    if (object == Py_None) {
        return 0;
    }
    if (PyTuple_Check(object)) { /* all else has become an array */
        c->block_mask = Py_NewRef(object);
        return convert_block_mask(object, scores, &c->values.block_mask);
    }
    c->mask = mha_as_array(object, "mask");
    if (c->mask == NULL) {
        return -1;
    }
    if (PyArray_TYPE(c->mask) != NPY_BOOL) {
        const int additive = is_additive(c->mask);
        if (additive < 0) {
            return -1;
        }
        return mha_raise(PyExc_TypeError,
                         "mask: got an array of %S, wanted bool with True = attend; %s",
                         (PyObject *)PyArray_DESCR(c->mask),
                         additive ? "it is added to the scores, it seems: give it as bias="
                                  : "write mask != 0 where 1 means attend, mask == 0 where 1 means "
                                    "blocked, or bias= for an additive mask");
    }
    return mha_check_broadcasts(c->mask, scores, "mask");
}
