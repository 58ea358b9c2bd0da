#include "function.h"

#include "system.h"

/* Where the arguments without a position begin. */
static int first_keyword(const module_function *f) {
    return f->by_position + (f->options == NO_OPTIONS ? 0 : NUM_OPTIONS - 1);
}

/* -1 with an exception. */
static int place_of_keyword(const module_function *f, PyObject *keyword) {
    for (int i = first_keyword(f); i < f->count; i++) {
        if (PyUnicode_CompareWithASCIIString(keyword, f->forms[i].name) == 0) {
            return i;
        }
    }
    PyErr_Format(PyExc_TypeError, "%S: got a keyword that %s does not have", keyword, f->name);
    return -1;
}

static int place_options(PyObject *record, PyObject **arguments) {
    if (!PyTuple_Check(record) || PyTuple_GET_SIZE(record) != NUM_OPTIONS) {
        PyErr_Format(PyExc_TypeError, "options: got %s, wanted an AttentionOptions",
                     Py_TYPE(record)->tp_name);
        return -1;
    }
    for (int i = 0; i < NUM_OPTIONS; i++) {
        arguments[i] = PyTuple_GET_ITEM(record, i);
    }
    return 0;
}

/* Each argument in its place, borrowed; None or False where it was not given. */
static int place_arguments(const module_function *f, PyObject *const *given, Py_ssize_t count,
                           PyObject *keywords, PyObject **arguments) {
    if (count != f->by_position) {
        PyErr_Format(PyExc_TypeError, "%s: got %zd arguments by position, wanted %d", f->name,
                     count, f->by_position);
        return -1;
    }
    for (int i = 0, place = 0; i < f->by_position; i++) {
        if (place != f->options) {
            arguments[place++] = given[i];
        } else if (place_options(given[i], arguments + place) < 0) {
            return -1;
        } else {
            place += NUM_OPTIONS;
        }
    }
    for (int i = first_keyword(f); i < f->count; i++) {
        arguments[i] = f->forms[i].kind == AS_FLAG ? Py_False : Py_None;
    }
    for (Py_ssize_t i = 0; keywords != NULL && i < PyTuple_GET_SIZE(keywords); i++) {
        const int place = place_of_keyword(f, PyTuple_GET_ITEM(keywords, i));
        if (place < 0) {
            return -1;
        }
        arguments[place] = given[count + i];
    }
    return 0;
}

PyObject *mha_run_function(const module_function *f, void *call, PyObject *const *given,
                           Py_ssize_t given_count, PyObject *keywords) {
    PyObject *arguments[MHA_MOST_ARGUMENTS], *settled[MHA_MOST_ARGUMENTS] = {NULL};
    PyObject *result = NULL;
    const int num_threads = mha_call_threads();
    memset(call, 0, f->size);
    if (num_threads == 0 ||
        place_arguments(f, given, PyVectorcall_NARGS(given_count), keywords, arguments) < 0) {
        return NULL;
    }
    if (mha_settle(f->forms, f->count, arguments, settled) < 0 || f->convert(call, settled) < 0) {
        goto cleanup;
    }
    if (f->point(call) && f->forward != NULL &&
        mha_call_run(f->workspace, f->forward, (char *)call + f->problem, num_threads) < 0) {
        goto cleanup;
    }
    result = f->results(call);
cleanup:
    if (result == NULL && !PyErr_Occurred()) {
        PyErr_NoMemory(); /* CPython 3.11 forgets it in the middle of writing another error */
    }
    mha_clear_settled(f->count, settled);
    f->clear(call);
    return result;
}

/* What a capsule points to; the call lies behind. */
typedef struct kept_call {
    _Alignas(MHA_WORKSPACE_ALIGNMENT) void (*clear)(void *call);
} kept_call;

static void free_kept(PyObject *capsule) {
    kept_call *kept = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    kept->clear(kept + 1);
    mha_system_free(kept);
}

PyObject *mha_keep_call(const char *name, void *call, size_t size, void (*clear)(void *call)) {
    kept_call *kept = mha_system_allocate(sizeof(kept_call) + size);
    if (kept == NULL) {
        return PyErr_NoMemory();
    }
    kept->clear = clear;
    PyObject *capsule = PyCapsule_New(kept, name, free_kept);
    if (capsule == NULL) {
        mha_system_free(kept);
        return NULL;
    }
    memcpy(kept + 1, call, size);
    memset(call, 0, size);
    return capsule;
}

PyObject *mha_with_kept(PyObject *results, PyObject *kept) {
    if (results == NULL || kept == NULL) {
        Py_XDECREF(results);
        Py_XDECREF(kept);
        return NULL;
    }
    return Py_BuildValue("NN", results, kept);
}

const void *mha_kept_call(PyObject *capsule, const char *name) {
    const kept_call *kept = mha_own_capsule(capsule, name, free_kept);
    if (kept == NULL) {
        PyErr_Format(PyExc_TypeError, "kept: got %s, wanted what the forward pass of %s kept",
                     Py_TYPE(capsule)->tp_name, name);
        return NULL;
    }
    return kept + 1;
}
