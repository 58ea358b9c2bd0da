#include "python/call/gradient.h"

#include <string.h>

#include "python/base/results.h"
#include "python/convert/pieces.h"

const argument_form MHA_BACKWARD_FORMS[MHA_NUM_BACKWARD_ARGUMENTS] = {
    [MHA_SAVED] = {"saved", AS_IT_IS},
    [MHA_GRAD_OUTPUT] = {"grad_output", AS_REAL},
    [MHA_GRAD_LSE] = {"grad_lse", AS_REAL},
    [MHA_WANTED] = {"wanted", AS_IT_IS},
};

/* Of a result of bfloat16 no float16 and no integers, and the other way round. */
static int check_type(PyArrayObject *gradient, int typenum, const char *name) {
    if (mha_is_half_type(typenum) && typenum != NPY_HALF) {
        return mha_check_beside_bfloat16(gradient, name);
    }
    if (typenum == NPY_HALF && mha_storage_of(gradient) == MHA_BFLOAT16) {
        return mha_wrong_dtype(gradient, name, "float16 as the output has");
    }
    return 0;
}

PyArrayObject *mha_convert_gradient(PyObject **argument, bool contiguous, int typenum,
                                    const npy_intp *shape, int axes, const char *name) {
    const mha_dtype dtype = mha_computing_dtype(typenum);
    PyArrayObject *array = mha_array_argument(argument, name);
    if (array == NULL || check_type(array, typenum, name) < 0 ||
        mha_check_shape(array, shape, axes, name) < 0) {
        return NULL;
    }
    return contiguous ? mha_as_contiguous_real(array, dtype, name)
                      : mha_as_real(array, dtype, name);
}

int mha_convert_grad_lse(PyObject **argument, int typenum, const npy_intp *shape, int axes,
                         backward_call *back) {
    if (*argument == Py_None) {
        return 0;
    }
    back->grad_lse = mha_convert_gradient(argument, true, typenum, shape, axes, "grad_lse");
    return back->grad_lse == NULL ? -1 : 0;
}

int mha_convert_grad_results(PyObject **arguments, int typenum, PyArrayObject *output,
                             backward_call *back) {
    const npy_intp *shape = PyArray_DIMS(output);
    const int axes = PyArray_NDIM(output);
    back->grad_output = mha_convert_gradient(arguments + MHA_GRAD_OUTPUT, false, typenum, shape,
                                             axes, "grad_output");
    return back->grad_output == NULL
               ? -1
               : mha_convert_grad_lse(arguments + MHA_GRAD_LSE, typenum, shape, axes - 1, back);
}

/* The type in which the gradient of an array is added up. */
static int sum_typenum(PyArrayObject *like) {
    return mha_storage_of(like) == MHA_AS_COMPUTED ? PyArray_TYPE(like) : NPY_FLOAT32;
}

PyArrayObject *mha_new_contiguous_like(PyArrayObject *like, const char *name) {
    return mha_new_array(PyArray_NDIM(like), PyArray_DIMS(like), sum_typenum(like), name);
}

PyArrayObject *mha_new_dense_like(PyArrayObject *like, const char *name) {
    PyArrayObject *gradient = mha_new_result_like(like, sum_typenum(like));
    if (gradient == NULL) {
        mha_name_missing_memory(PyArray_DIMS(like), PyArray_NDIM(like), name);
    } else if (!mha_last_axis_is_contiguous(gradient)) {
        Py_SETREF(gradient, mha_new_contiguous_like(like, name));
    }
    return gradient;
}

/* The gradient of an array of halves: its sums, rounded once, in the same order of axes. */
static PyObject *rounded(PyArrayObject *sums, int typenum) {
    if (PyArray_TYPE(sums) == typenum) {
        return Py_NewRef((PyObject *)sums);
    }
    const int shown = mha_shown_typenum(typenum, "gradient");
    PyArrayObject *halves = shown == NPY_VOID ? NULL : mha_new_result_like(sums, shown);
    if (halves != NULL && mha_round_in_pieces(PyArray_DATA(sums), PyArray_DATA(halves),
                                              mha_storage_of(halves), PyArray_SIZE(sums)) < 0) {
        Py_CLEAR(halves);
    }
    return (PyObject *)halves;
}

int mha_given_typenum(PyObject *given, PyArrayObject *converted) {
    const bool was_half = PyArray_Check(given) && PyArray_TYPE(converted) == NPY_FLOAT32 &&
                          mha_storage_of((PyArrayObject *)given) != MHA_AS_COMPUTED;
    return was_half ? PyArray_TYPE((PyArrayObject *)given) : PyArray_TYPE(converted);
}

void mha_round_gradient(backward_call *back, int gradient, int typenum) {
    if (back->gradients[gradient] != NULL) {
        back->typenums[gradient] = typenum;
    }
}

/* Whether `wanted`, a set of names, has this one; -1 with an exception. */
static int is_wanted(PyObject *wanted, const char *name) {
    if (!PyAnySet_Check(wanted)) {
        return mha_wrong_type(wanted, "wanted", "a set of names");
    }
    PyObject *text = PyUnicode_FromString(name);
    const int found = text == NULL ? -1 : PySet_Contains(wanted, text);
    Py_XDECREF(text);
    return found;
}

int mha_new_gradients(PyObject *wanted, const char *const *names, PyArrayObject *const *like,
                      int count, new_gradient *make, backward_call *back) {
    back->names = names;
    back->count = count;
    for (int i = 0; i < count; i++) {
        const int makes = like[i] == NULL ? 0 : is_wanted(wanted, names[i]);
        if (makes > 0) {
            char name[32] = "grad_"; /* snprintf would take a twentieth of a small call */
            strncat(name, names[i], sizeof name - sizeof "grad_");
            back->gradients[i] = make(like[i], name);
            back->typenums[i] = PyArray_TYPE(like[i]);
        }
        if (makes < 0 || (makes > 0 && back->gradients[i] == NULL)) {
            return -1;
        }
    }
    return 0;
}

PyObject *mha_pack_gradients(void *call) {
    const backward_call *back = call;
    PyObject *packed = PyDict_New();
    for (int i = 0; packed != NULL && i < back->count; i++) {
        PyObject *gradient = back->gradients[i] == NULL
                                 ? Py_NewRef(Py_None)
                                 : rounded(back->gradients[i], back->typenums[i]);
        if (gradient == NULL || PyDict_SetItemString(packed, back->names[i], gradient) < 0) {
            Py_CLEAR(packed);
        }
        Py_XDECREF(gradient);
    }
    return packed;
}

void mha_clear_backward(void *call) {
    backward_call *back = call;
    Py_CLEAR(back->grad_output);
    Py_CLEAR(back->grad_lse);
    for (int i = 0; i < back->count; i++) {
        Py_CLEAR(back->gradients[i]);
    }
}

void mha_clear_unwritten(const score_shape *scores, PyArrayObject *const *gradients, int count) {
    const bool has_no_scores = scores->heads == 0 || scores->query_len == 0 ||
                               scores->key_len == 0 ||
                               PyArray_MultiplyList(scores->batch, scores->batch_axes) == 0;
    for (int i = 0; has_no_scores && i < count; i++) {
        if (gradients[i] != NULL) {
            memset(PyArray_DATA(gradients[i]), 0, (size_t)PyArray_NBYTES(gradients[i]));
        }
    }
}
