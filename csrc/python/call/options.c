#include "python/call/options.h"

#include "python/call/mask.h"

#include <math.h>

/* What an option is checked against, apart from those before it. */
typedef struct option_context {
    mha_dtype dtype;
    const score_shape *scores;
} option_context;

/* An array of any numbers but bools. New reference, or NULL with the exception. */
static PyArrayObject *as_floats(PyObject *object, const char *name, const char *instead) {
    PyArrayObject *array = mha_as_array(object, name);
    if (array != NULL && PyArray_TYPE(array) == NPY_BOOL) {
        PyErr_Format(PyExc_TypeError, "%s: got an array of bool, wanted floats%s", name, instead);
        Py_CLEAR(array);
    }
    return array;
}

static bool has_shape(PyArrayObject *array, const npy_intp *shape, int axes) {
    return PyArray_NDIM(array) == axes && PyArray_CompareLists(PyArray_DIMS(array), shape, axes);
}

static int convert_mask(PyObject *object, const option_context *context, converted_options *c) {
    return mha_convert_mask(object, context->scores, c);
}

static int convert_bias(PyObject *object, const option_context *context, converted_options *c) {
    if (object == Py_None) {
        return 0;
    }
    PyArrayObject *array = as_floats(object, "bias", "; a bool mask goes to mask=");
    if (array == NULL) {
        return -1;
    }
    if (mha_check_broadcasts(array, context->scores, "bias") == 0) {
        c->bias = mha_as_strided_real(array, context->dtype, "bias");
    }
    Py_DECREF(array);
    return c->bias == NULL ? -1 : 0;
}

/* One number a head. */
static int convert_by_head(PyObject *object, const char *name, const option_context *context,
                           PyArrayObject **converted) {
    const npy_intp wanted = (npy_intp)context->scores->heads;
    char text[MHA_SHAPE_TEXT];
    if (object == Py_None) {
        return 0;
    }
    PyArrayObject *array = as_floats(object, name, "");
    if (array == NULL) {
        return -1;
    }
    if (has_shape(array, &wanted, 1)) {
        *converted = mha_as_contiguous_real(array, context->dtype, name);
    } else {
        mha_wrong_shape(array, name, "%s, a number for each head",
                        mha_shape_text(&wanted, 1, text));
    }
    Py_DECREF(array);
    return *converted == NULL ? -1 : 0;
}

static int convert_alibi(PyObject *object, const option_context *context, converted_options *c) {
    return convert_by_head(object, "alibi", context, &c->alibi);
}

static int convert_relative_bias(PyObject *object, const option_context *context,
                                 converted_options *c) {
    const int64_t heads = context->scores->heads;
    if (object == Py_None) {
        return 0;
    }
    PyArrayObject *array = as_floats(object, "relative_bias", "");
    if (array == NULL) {
        return -1;
    }
    if (PyArray_NDIM(array) == 2 && PyArray_DIM(array, 1) % 2 == 1 &&
        (PyArray_DIM(array, 0) == 1 || PyArray_DIM(array, 0) == heads)) {
        c->relative_bias = mha_as_contiguous_real(array, context->dtype, "relative_bias");
    } else {
        mha_wrong_shape(array, "relative_bias",
                        "(%lld, 2r + 1), or (1, 2r + 1) for one row that all heads share",
                        (long long)heads);
    }
    Py_DECREF(array);
    return c->relative_bias == NULL ? -1 : 0;
}

static int convert_sinks(PyObject *object, const option_context *context, converted_options *c) {
    return convert_by_head(object, "sinks", context, &c->sinks);
}

/* Names the number that was given, which as int64 may be another one. */
static int raise_wrong_length(PyObject *lengths, npy_intp index, int64_t key_len) {
    PyObject *given = (PyObject *)mha_as_array(lengths, "key_lengths");
    PyObject *length =
        given == NULL ? NULL : PyObject_CallMethod(given, "item", "n", (Py_ssize_t)index);
    if (length != NULL) {
        PyErr_Format(PyExc_ValueError, "key_lengths: got %S, wanted lengths in [0, %lld]", length,
                     (long long)key_len);
    }
    Py_XDECREF(length);
    Py_XDECREF(given);
    return -1;
}

static int convert_key_lengths(PyObject *object, const option_context *context,
                               converted_options *c) {
    const score_shape *scores = context->scores;
    PyArrayObject **lengths = &c->key_lengths;
    npy_intp shape[NPY_MAXDIMS];
    char batch[MHA_SHAPE_TEXT], per_query[MHA_SHAPE_TEXT];
    const int axes = scores->batch_axes;
    if (object == Py_None) {
        return 0;
    }
    *lengths = mha_as_integers(object, "key_lengths");
    if (*lengths == NULL) {
        return -1;
    }
    memcpy(shape, scores->batch, (size_t)axes * sizeof *shape);
    shape[axes] = (npy_intp)scores->query_len;
    if (!has_shape(*lengths, shape, axes) && !has_shape(*lengths, shape, axes + 1)) {
        return mha_wrong_shape(
            *lengths, "key_lengths", "%s (the batch axes) or %s (a length a query)",
            mha_shape_text(shape, axes, batch), mha_shape_text(shape, axes + 1, per_query));
    }
    const int64_t *values = PyArray_DATA(*lengths);
    for (npy_intp i = 0; i < PyArray_SIZE(*lengths); i++) {
        if (values[i] < 0 || values[i] > scores->key_len) {
            return raise_wrong_length(object, i, scores->key_len);
        }
    }
    return 0;
}

static int convert_query_offset(PyObject *object, const option_context *context,
                                converted_options *c) {
    const score_shape *scores = context->scores;
    PyArrayObject **offset = &c->query_offset;
    char wanted[MHA_SHAPE_TEXT];
    if (object == Py_None) {
        return 0;
    }
    if (PyLong_Check(object) || PyBool_Check(object)) {
        int64_t number;
        if (mha_convert_int(object, "query_offset", -MHA_FARTHEST, &number) < 0) {
            return -1;
        }
        *offset = (PyArrayObject *)PyArray_SimpleNew(0, NULL, NPY_INT64);
        if (*offset == NULL) {
            return -1;
        }
        *(int64_t *)PyArray_DATA(*offset) = number;
        return 0;
    }
    *offset = mha_as_integers(object, "query_offset");
    if (*offset == NULL) {
        return -1;
    }
    if (PyArray_NDIM(*offset) != 0 && !has_shape(*offset, scores->batch, scores->batch_axes)) {
        return mha_wrong_shape(*offset, "query_offset", "an int or %s (the batch axes)",
                               mha_shape_text(scores->batch, scores->batch_axes, wanted));
    }
    int64_t *values = PyArray_DATA(*offset);
    for (npy_intp i = 0; i < PyArray_SIZE(*offset); i++) {
        values[i] = mha_larger(mha_smaller(values[i], MHA_FARTHEST), -MHA_FARTHEST);
    }
    return 0;
}

static int convert_window(PyObject *object, const option_context *context, converted_options *c) {
    int64_t *const sides[] = {&c->values.window_left, &c->values.window_right};
    (void)context;
    *sides[0] = *sides[1] = MHA_UNLIMITED;
    if (object == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        return mha_wrong_type(object, "window", "a pair (left, right)");
    }
    if (PySequence_Size(object) != 2) {
        return mha_raise(PyExc_ValueError, "window: got %zd entries, wanted two (left, right)",
                         PySequence_Size(object));
    }
    for (int side = 0; side < 2; side++) {
        PyObject *item = PySequence_GetItem(object, side);
        const int failed = item == NULL      ? -1
                           : item == Py_None ? 0
                                             : mha_convert_int(item, "window", 0, sides[side]);
        Py_XDECREF(item);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* Finite, also in the element type and times log2 e. */
static int convert_scale(PyObject *object, const option_context *context, converted_options *c) {
    static const char *const limits[MHA_NUM_DTYPES] = {[MHA_FLOAT32] = " of at most 1.7e38 in ",
                                                       [MHA_FLOAT64] = " of at most 8.9e307 in "};
    const mha_element_type *type = mha_element_type_of(context->dtype);
    const int64_t head_dim = context->scores->head_dim;
    double *scale = &c->values.scale;
    if (object == Py_None) {
        const uint64_t mode = mha_enter_float_mode();
        *scale = head_dim > 0 ? 1 / sqrt((double)head_dim) : 1;
        mha_leave_float_mode(mode);
        return 0;
    }
    if (mha_convert_number(object, "scale", scale) < 0) {
        return -1;
    }
    if (!(fabs(*scale) <= type->largest / 2)) {
        const bool is_finite = isfinite(*scale);
        return mha_raise(PyExc_ValueError, "scale: got %S, wanted a finite number%s%s", object,
                         is_finite ? limits[context->dtype] : "", is_finite ? type->name : "");
    }
    return 0;
}

/* Above 0; finite ones also in the element type, and so are scale / softcap and 1 / softcap. */
static int convert_softcap(PyObject *object, const option_context *context, converted_options *c) {
    const double largest = mha_element_type_of(context->dtype)->largest;
    double *softcap = &c->values.softcap;
    *softcap = 0;
    if (object == Py_None) {
        return 0;
    }
    if (mha_convert_number(object, "softcap", softcap) < 0) {
        return -1;
    }
    if (!(*softcap > 0)) {
        return mha_raise(PyExc_ValueError, "softcap: got %S, wanted a number above 0", object);
    }
    if (isinf(*softcap)) { /* caps nothing */
        *softcap = 0;
        return 0;
    }
    if (*softcap > largest || fmax(1, fabs(c->values.scale)) / *softcap > largest) {
        return mha_raise(PyExc_ValueError, "softcap: got %S, wanted a %s", object,
                         *softcap > largest ? "finite number in float32"
                                            : "larger number: scale / softcap overflows");
    }
    return 0;
}

static int convert_empty_rows(PyObject *object, const option_context *context,
                              converted_options *c) {
    bool *uniform = &c->values.uniform_empty_rows;
    (void)context;
    if (!PyUnicode_Check(object)) {
        return mha_wrong_type(object, "empty_rows", "\"zeros\" or \"uniform\"");
    }
    *uniform = PyUnicode_CompareWithASCIIString(object, "uniform") == 0;
    if (!*uniform && PyUnicode_CompareWithASCIIString(object, "zeros") != 0) {
        return mha_raise(PyExc_ValueError, "empty_rows: got %R, wanted \"zeros\" or \"uniform\"",
                         object);
    }
    return 0;
}

int mha_convert_dropout(PyObject *object, const char *name, double *dropout) {
    if (mha_convert_number(object, name, dropout) < 0) {
        return -1;
    }
    if (!(*dropout >= 0 && *dropout < 1)) {
        return mha_raise(PyExc_ValueError, "%s: got %S, wanted a probability in [0, 1)", name,
                         object);
    }
    return 0;
}

static int convert_causal(PyObject *object, const option_context *context, converted_options *c) {
    (void)context;
    return mha_convert_bool(object, "causal", &c->values.causal);
}

static int convert_dropout(PyObject *object, const option_context *context, converted_options *c) {
    double dropout;
    (void)context;
    if (mha_convert_dropout(object, "dropout", &dropout) < 0) {
        return -1;
    }
    c->values.dropout_threshold = mha_dropout_threshold(dropout);
    return 0;
}

int mha_convert_dropout_offsets(PyObject *object, const char *name, mha_dropout_offsets *offsets) {
    int64_t *const sides[] = {&offsets->batch, &offsets->head, &offsets->query, &offsets->key};
    enum { SIDES = sizeof sides / sizeof *sides };
    if (object == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(object)) {
        return mha_wrong_type(object, name, "four ints (batch, head, query, key)");
    }
    if (PyTuple_GET_SIZE(object) != SIDES) {
        return mha_raise(PyExc_ValueError,
                         "%s: got %zd entries, wanted four (batch, head, query, key)", name,
                         PyTuple_GET_SIZE(object));
    }
    for (int side = 0; side < SIDES; side++) {
        PyObject *item = PyTuple_GET_ITEM(object, side);
        if (mha_convert_int(item, name, 0, sides[side]) < 0) {
            return -1;
        }
        if (*sides[side] > MHA_MOST_DROPOUT_OFFSET) {
            return mha_raise(PyExc_ValueError, "%s: got %S, wanted at most %lld", name, item,
                             (long long)MHA_MOST_DROPOUT_OFFSET);
        }
    }
    return 0;
}

static int convert_dropout_offsets(PyObject *object, const option_context *context,
                                   converted_options *c) {
    (void)context;
    return mha_convert_dropout_offsets(object, "dropout_offsets", &c->values.dropout_offsets);
}

/* The seed; None where there is no dropout. */
static int convert_rng(PyObject *object, const option_context *context, converted_options *c) {
    (void)context;
    if (object == Py_None && c->values.dropout_threshold > 0) {
        return mha_raise(PyExc_TypeError, "rng: got None for dropout, wanted a seed");
    }
    return object == Py_None ? 0 : mha_convert_seed(object, &c->values.dropout_seed);
}

static int check_offset_given(const converted_options *converted, const score_shape *scores) {
    const mha_attention_options *values = &converted->values;
    const bool positioned = values->causal || values->window_left < MHA_UNLIMITED ||
                            values->window_right < MHA_UNLIMITED || converted->alibi != NULL ||
                            converted->relative_bias != NULL;
    if (converted->key_lengths == NULL || !positioned || converted->query_offset != NULL ||
        scores->query_len == scores->key_len) {
        return 0;
    }
    return mha_raise(
        PyExc_ValueError,
        "query_offset: got None, wanted the position of query 0 among the keys, since key_lengths "
        "is given with causal, window, alibi or relative_bias and query_len (%lld) is not key_len "
        "(%lld)",
        (long long)scores->query_len, (long long)scores->key_len);
}

/* A row without a visible key has the sink's weight, and none is left for a mean. */
static int check_sinks_alone(const converted_options *converted) {
    if (converted->sinks != NULL && converted->values.uniform_empty_rows) {
        return mha_raise(PyExc_ValueError,
                         "empty_rows: got \"uniform\" with sinks, wanted \"zeros\", since the sink "
                         "has the weight of a row that sees no key");
    }
    return 0;
}

/* clang-format off */
int mha_convert_options(PyObject *const options[NUM_OPTIONS], mha_dtype dtype,
                        const score_shape *scores, converted_options *c) {
    const option_context context = {dtype, scores};
#define CONVERT(name, form, becomes)                                                               \
    if (convert_##name(options[OPTION_##name], &context, c) < 0) {                                 \
        return -1;                                                                                 \
    }
    MHA_OPTIONS(CONVERT)
    c->default_offset = scores->key_len - scores->query_len;
    return check_offset_given(c, scores) < 0 || check_sinks_alone(c) < 0 ? -1 : 0;
}

void mha_clear_options(converted_options *converted) {
#define CLEAR_ARRAY(name) Py_CLEAR(converted->name);
#define CLEAR_SCORES(name) CLEAR_ARRAY(name)
#define CLEAR_HEADS(name) CLEAR_ARRAY(name)
#define CLEAR_VALUE(name)
#define CLEAR(name, form, becomes) CLEAR_##becomes(name)
    MHA_OPTIONS(CLEAR)
    Py_CLEAR(converted->block_mask);
}
/* clang-format on */

/* Absent arrays leave the tensor absent, as it is from the start. */
static void fill_key_lengths(const converted_options *c, const score_shape *scores,
                             mha_tensor *key_lengths) {
    if (c->key_lengths == NULL) {
        return;
    }
    *key_lengths = mha_tensor_of(c->key_lengths);
    if (key_lengths->axes == scores->batch_axes) { /* the same length for every query */
        key_lengths->shape[key_lengths->axes] = scores->query_len;
        key_lengths->strides[key_lengths->axes++] = 0;
    }
}

static void fill_query_offset(const converted_options *c, const score_shape *scores,
                              mha_tensor *query_offset) {
    const bool is_default = c->query_offset == NULL;
    const bool repeated = is_default || PyArray_NDIM(c->query_offset) == 0;
    query_offset->data = is_default ? (void *)&c->default_offset : PyArray_DATA(c->query_offset);
    query_offset->axes = scores->batch_axes;
    for (int axis = 0; axis < scores->batch_axes; axis++) {
        query_offset->shape[axis] = scores->batch[axis];
        query_offset->strides[axis] = repeated ? 0 : PyArray_STRIDE(c->query_offset, axis);
    }
}

/* clang-format off */
const mha_attention_options *mha_fill_options(converted_options *converted,
                                               const score_shape *scores) {
#define POINT_ARRAY(name) fill_##name(converted, scores, &converted->values.name);
#define POINT_SCORES(name)                                                                         \
    if (converted->name != NULL) {                                                                 \
        converted->values.name = mha_broadcast_to_scores(converted->name, scores);                 \
    }
#define POINT_HEADS(name) converted->values.name = mha_by_head(converted->name);
#define POINT_VALUE(name)
#define POINT(name, form, becomes) POINT_##becomes(name)
    MHA_OPTIONS(POINT)
    return &converted->values;
}
/* clang-format on */
