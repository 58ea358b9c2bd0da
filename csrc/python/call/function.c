#include "python/call/function.h"

#include "python/base/system.h"

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
    return mha_raise(PyExc_TypeError, "%S: got a keyword that %s does not have", keyword, f->name);
}

static int place_options(PyObject *record, PyObject **arguments) {
    if (!PyTuple_Check(record) || PyTuple_GET_SIZE(record) != NUM_OPTIONS) {
        return mha_wrong_type(record, "options", "an AttentionOptions");
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
        return mha_raise(PyExc_TypeError, "%s: got %zd arguments by position, wanted %d", f->name,
                         count, f->by_position);
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

/* What a capsule points to; the call lies behind. */
typedef struct saved_call {
    _Alignas(MHA_WORKSPACE_ALIGNMENT) void (*clear)(void *call);
    size_t size;
} saved_call;

static void free_saved(PyObject *capsule) {
    saved_call *saved = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    saved->clear(saved + 1);
    mha_system_free(saved);
}

PyObject *mha_save_call(const char *name, void *call, size_t size, void (*clear)(void *call)) {
    saved_call *saved = mha_system_allocate(sizeof(saved_call) + size);
    if (saved == NULL) {
        return PyErr_NoMemory();
    }
    saved->clear = clear;
    saved->size = size;
    PyObject *capsule = PyCapsule_New(saved, name, free_saved);
    if (capsule == NULL) {
        mha_system_free(saved);
        return NULL;
    }
    memcpy(saved + 1, call, size);
    memset(call, 0, size);
    return capsule;
}

static int copy_saved(const module_function *f, PyObject *capsule, void *call) {
    const saved_call *saved = mha_own_capsule(capsule, f->saved_by, free_saved);
    if (saved == NULL) {
        return mha_raise(PyExc_TypeError, "saved: got %s, wanted what the forward pass of %s saved",
                         Py_TYPE(capsule)->tp_name, f->saved_by);
    }
    memcpy((char *)call + f->saved_at, saved + 1, saved->size);
    return 0;
}

PyObject *mha_run_function(const module_function *f, void *call, PyObject *const *given,
                           Py_ssize_t given_count, PyObject *keywords) {
    PyObject *arguments[MHA_MOST_ARGUMENTS], *normalised[MHA_MOST_ARGUMENTS];
    PyObject *result = NULL;
    const int num_threads = mha_call_threads();
    memset(call, 0, f->size);
    memset(normalised, 0, (size_t)f->count * sizeof *normalised);
    if (num_threads == 0 ||
        place_arguments(f, given, PyVectorcall_NARGS(given_count), keywords, arguments) < 0) {
        return NULL;
    }
    if (mha_normalise(f->forms, f->count, arguments, normalised) < 0 ||
        (f->saved_by != NULL && copy_saved(f, normalised[0], call) < 0) ||
        f->convert(call, normalised) < 0) {
        goto cleanup;
    }
    if (f->fill_pointers(call) && f->run != NULL &&
        mha_call_run(f->workspace, f->run, (char *)call + f->problem, num_threads) < 0) {
        goto cleanup;
    }
    result = f->results(call);
    if (result != NULL && f->save > 0 && normalised[f->save] == Py_True) {
        result = Py_BuildValue("NN", result, mha_save_call(f->name, call, f->size, f->clear));
    }
cleanup:
    if (result == NULL && !PyErr_Occurred()) {
        PyErr_NoMemory(); /* CPython 3.11 forgets it in the middle of writing another error */
    }
    mha_clear_normalised(f->count, normalised);
    f->clear(call);
    return result;
}
