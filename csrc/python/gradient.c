#include "gradient.h"

#include <stdio.h>

#include "results.h"

const argument_form MHA_BACKWARD_FORMS[MHA_NUM_BACKWARD_ARGUMENTS] = {
    [MHA_KEPT] = {"kept", AS_IT_IS},
    [MHA_GRAD_OUTPUT] = {"grad_output", AS_REAL},
    [MHA_GRAD_LSE] = {"grad_lse", AS_REAL},
    [MHA_WANTED] = {"wanted", AS_IT_IS},
};

PyArrayObject *mha_convert_gradient(PyObject *object, bool contiguous, mha_dtype dtype,
                                    const npy_intp *shape, int axes, const char *name) {
    char got[MHA_SHAPE_TEXT], wanted[MHA_SHAPE_TEXT];
    PyArrayObject *array = mha_as_array(object, name), *converted = NULL;
    if (array == NULL) {
        return NULL;
    }
    if (PyArray_NDIM(array) != axes || !PyArray_CompareLists(PyArray_DIMS(array), shape, axes)) {
        PyErr_Format(PyExc_ValueError, "%s: got shape %s, wanted %s", name,
                     mha_array_shape_text(array, got), mha_shape_text(shape, axes, wanted));
    } else {
        converted = contiguous ? mha_as_contiguous_real(array, dtype, name)
                               : mha_as_real(array, dtype, name);
    }
    Py_DECREF(array);
    return converted;
}

int mha_convert_grad_lse(PyObject *object, mha_dtype dtype, const npy_intp *shape, int axes,
                         PyArrayObject **grad_lse) {
    if (object == Py_None) {
        return 0;
    }
    *grad_lse = mha_convert_gradient(object, true, dtype, shape, axes, "grad_lse");
    return *grad_lse == NULL ? -1 : 0;
}

PyArrayObject *mha_new_contiguous_like(PyArrayObject *like, const char *name) {
    return mha_new_array(PyArray_NDIM(like), PyArray_DIMS(like), PyArray_TYPE(like), name);
}

PyArrayObject *mha_new_dense_like(PyArrayObject *like, const char *name) {
    PyArrayObject *gradient = mha_new_result_like(like);
    if (gradient == NULL) {
        mha_name_missing_memory(PyArray_DIMS(like), PyArray_NDIM(like), name);
    } else if (!mha_last_axis_is_contiguous(gradient)) {
        Py_SETREF(gradient, mha_new_contiguous_like(like, name));
    }
    return gradient;
}

int mha_new_gradients(PyObject *wanted, const char *const *names, PyArrayObject *const *like,
                      int count, new_gradient *make, PyArrayObject **gradients) {
    for (int i = 0; i < count; i++) {
        const int is_wanted = like[i] == NULL ? 0 : mha_is_wanted(wanted, names[i]);
        if (is_wanted > 0) {
            char name[32];
            snprintf(name, sizeof name, "grad_%s", names[i]);
            gradients[i] = make(like[i], name);
        }
        if (is_wanted < 0 || (is_wanted > 0 && gradients[i] == NULL)) {
            return -1;
        }
    }
    return 0;
}

void mha_clear_gradients(PyArrayObject **gradients, int count) {
    for (int i = 0; i < count; i++) {
        Py_CLEAR(gradients[i]);
    }
}

void mha_clear_unwritten(const score_shape *scores, PyArrayObject *bias) {
    const bool has_no_scores = scores->heads == 0 || scores->query_len == 0 ||
                               scores->key_len == 0 ||
                               PyArray_MultiplyList(scores->batch, scores->batch_axes) == 0;
    if (bias != NULL && has_no_scores) {
        memset(PyArray_DATA(bias), 0, (size_t)PyArray_NBYTES(bias));
    }
}

PyObject *mha_pack_gradients(const char *const *names, PyArrayObject *const *gradients, int count) {
    PyObject *packed = PyDict_New();
    for (int i = 0; packed != NULL && i < count; i++) {
        PyObject *gradient = gradients[i] == NULL ? Py_None : (PyObject *)gradients[i];
        if (PyDict_SetItemString(packed, names[i], gradient) < 0) {
            Py_CLEAR(packed);
        }
    }
    return packed;
}
