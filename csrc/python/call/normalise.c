#include "python/call/normalise.h"

#include "python/call/mask.h"
#include "python/call/weight.h"

static PyObject *normalise_array(PyObject *object, const char *name) {
    return PyLong_CheckExact(object) || PyBool_Check(object)
               ? Py_NewRef(object)
               : (PyObject *)mha_as_array(object, name);
}

static PyObject *normalise_mask(PyObject *object, const char *name) {
    PyObject *record = mha_block_mask_record(object);
    return record != NULL || PyErr_Occurred() ? record : normalise_array(object, name);
}

static PyObject *normalise_real(PyObject *object, const char *name) {
    PyObject *capsule = mha_packed_capsule(object);
    if (capsule != NULL || PyErr_Occurred()) {
        return capsule;
    }
    PyObject *normalised = normalise_array(object, name);
    if (normalised != NULL && PyArray_Check(normalised) &&
        mha_check_real((PyArrayObject *)normalised, name) < 0) {
        Py_CLEAR(normalised);
    }
    return normalised;
}

static PyObject *normalise_cached(PyObject *object, const char *name) {
    PyObject *array = (PyObject *)mha_as_array(object, name);
    if (array != NULL && !mha_is_in_blocks((PyArrayObject *)array) &&
        mha_check_real((PyArrayObject *)array, name) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *normalise_int(PyObject *object, const char *name) {
    return mha_has_index(object) ? mha_as_int(object, name) : Py_NewRef(object);
}

static PyObject *normalise_number(PyObject *object, const char *name) {
    double number;
    if (PyFloat_CheckExact(object) || PyLong_CheckExact(object)) {
        return Py_NewRef(object);
    }
    return mha_convert_number(object, name, &number) < 0 ? NULL : PyFloat_FromDouble(number);
}

static PyObject *normalise_ints(PyObject *object, const char *name) {
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        return Py_NewRef(object);
    }
    PyObject *tuple = PySequence_Tuple(object);
    const Py_ssize_t count = tuple == NULL ? 0 : PyTuple_GET_SIZE(tuple);
    PyObject *normalised = tuple == NULL ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; normalised != NULL && i < count; i++) {
        PyObject *side = normalise_int(PyTuple_GET_ITEM(tuple, i), name);
        if (side == NULL) {
            Py_CLEAR(normalised);
        } else {
            PyTuple_SET_ITEM(normalised, i, side);
        }
    }
    Py_XDECREF(tuple);
    return normalised;
}

static PyObject *normalise_one(argument_form form, PyObject *object) {
    if (object == Py_None) {
        return Py_NewRef(object);
    }
    switch (form.kind) {
    case AS_IT_IS:
    case AS_FLAG:
        return Py_NewRef(object);
    case AS_ARRAY:
        return normalise_array(object, form.name);
    case AS_MASK:
        return normalise_mask(object, form.name);
    case AS_ANY_ARRAY:
        return PyLong_CheckExact(object) || PyBool_Check(object)
                   ? Py_NewRef(object)
                   : (PyObject *)mha_as_any_array(object, form.name);
    case AS_REAL:
        return normalise_real(object, form.name);
    case AS_CACHED:
        return normalise_cached(object, form.name);
    case AS_INT:
        return normalise_int(object, form.name);
    case AS_NUMBER:
        return normalise_number(object, form.name);
    case AS_INTS:
        return normalise_ints(object, form.name);
    }
    Py_UNREACHABLE();
}

/* Whether bfloat16 asks what type it has; blocks go with every type. */
static bool is_real(argument_form form, PyObject *normalised) {
    return form.kind == AS_REAL || (form.kind == AS_CACHED && PyArray_Check(normalised) &&
                                    !mha_is_in_blocks((PyArrayObject *)normalised));
}

/* No type has the numbers of bfloat16 and of float16, or of integers: 0, or -1 with a TypeError
 * where they meet. */
static int check_halves(const argument_form *forms, int count, PyObject *const *normalised) {
    bool is_there = false;
    for (int i = 0; i < count && !is_there; i++) {
        is_there = is_real(forms[i], normalised[i]) && normalised[i] != Py_None &&
                   mha_storage_of_given(normalised[i]) == MHA_BFLOAT16;
    }
    for (int i = 0; i < count && is_there; i++) {
        if (!is_real(forms[i], normalised[i])) {
            continue;
        }
        if (PyArray_Check(normalised[i])) {
            if (mha_check_beside_bfloat16((PyArrayObject *)normalised[i], forms[i].name) < 0) {
                return -1;
            }
        } else if (mha_storage_of_given(normalised[i]) == MHA_FLOAT16) {
            return mha_raise(
                PyExc_TypeError,
                "%s: got a packed weight of float16, wanted bfloat16 as another array has",
                forms[i].name);
        }
    }
    return 0;
}

int mha_normalise(const argument_form *forms, int count, PyObject *const *given,
                  PyObject **normalised) {
    for (int i = 0; i < count; i++) {
        /* An object that stands twice, as in self-attention, becomes one array. */
        const bool is_same = i > 0 && given[i] == given[i - 1] && forms[i].kind == AS_REAL &&
                             forms[i - 1].kind == AS_REAL;
        normalised[i] = is_same ? Py_NewRef(normalised[i - 1]) : normalise_one(forms[i], given[i]);
        if (normalised[i] == NULL) {
            return -1;
        }
    }
    /* Not before all are normalised: a view of an array that is resized keeps the old address. */
    for (int i = 0; i < count; i++) {
        const bool is_input = forms[i].kind == AS_ARRAY || forms[i].kind == AS_MASK ||
                              forms[i].kind == AS_ANY_ARRAY || forms[i].kind == AS_REAL ||
                              forms[i].kind == AS_CACHED;
        if (is_input && PyArray_CheckExact(normalised[i]) && mha_make_private(&normalised[i]) < 0) {
            return -1;
        }
    }
    return check_halves(forms, count, normalised);
}

void mha_clear_normalised(int count, PyObject **normalised) {
    for (int i = 0; i < count; i++) {
        Py_CLEAR(normalised[i]);
    }
}
