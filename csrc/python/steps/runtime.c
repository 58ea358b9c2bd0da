/* Threads and the instruction set. */
#include <stdlib.h>

#include "python/base/call.h"
#include "python/convert/convert.h"

/* The context variable of `mha.threads`; written once, when the module starts. */
static PyObject *num_threads_variable;

static int checked_num_threads(PyObject *object) {
    int64_t number;
    if (mha_convert_int(object, "num_threads", 1, &number) < 0) {
        return -1;
    }
    return number < MHA_MAX_THREADS ? (int)number : MHA_MAX_THREADS;
}

int mha_call_threads(void) {
    PyObject *value;
    if (PyContextVar_Get(num_threads_variable, NULL, &value) < 0) {
        return 0;
    }
    if (value == NULL) {
        return mha_get_num_threads();
    }
    const int number = checked_num_threads(value);
    Py_DECREF(value);
    return number < 0 ? 0 : number;
}

PyObject *mha_py_get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    const int number = mha_call_threads();
    return number == 0 ? NULL : PyLong_FromLong(number);
}

PyObject *mha_py_set_num_threads(PyObject *Py_UNUSED(module), PyObject *num_threads) {
    const int number = checked_num_threads(num_threads);
    if (number < 0) {
        return NULL;
    }
    mha_set_num_threads(number);
    Py_RETURN_NONE;
}

/* The process's threads for whoever finds this extension by its file, as threadpoolctl does
 * (mha/compat/threadpoolctl.py); names of their own, since a libmha may be loaded, too. */
#ifdef _WIN32
#define SEEN_OUTSIDE __declspec(dllexport)
#else
#define SEEN_OUTSIDE __attribute__((visibility("default")))
#endif
SEEN_OUTSIDE int mha_extension_get_num_threads(void);
SEEN_OUTSIDE void mha_extension_set_num_threads(int num_threads);
int mha_extension_get_num_threads(void) { return mha_get_num_threads(); }
void mha_extension_set_num_threads(int num_threads) { mha_set_num_threads(num_threads); }

/* use_team(team): a capsule of this name around an mha_team, or None for no team. */
static const char TEAM[] = "mha.team";

PyObject *mha_py_use_team(PyObject *Py_UNUSED(module), PyObject *team) {
    if (team != Py_None && !PyCapsule_IsValid(team, TEAM)) {
        PyErr_Format(PyExc_TypeError, "team: got %s, wanted a capsule named %s, or None",
                     Py_TYPE(team)->tp_name, TEAM);
        return NULL;
    }
    void *function = team == Py_None ? NULL : PyCapsule_GetPointer(team, TEAM);
    mha_use_team((mha_team)(uintptr_t)function);
    Py_RETURN_NONE;
}

PyObject *mha_py_checked_num_threads(PyObject *Py_UNUSED(module), PyObject *num_threads) {
    const int number = checked_num_threads(num_threads);
    return number < 0 ? NULL : PyLong_FromLong(number);
}

PyObject *mha_py_instruction_set(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyUnicode_FromString(mha_instruction_set());
}

PyObject *mha_py_instruction_sets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL; i++) {
        const char *name = mha_available_instruction_set(i);
        if (name == NULL) {
            break;
        }
        PyObject *text = PyUnicode_FromString(name);
        if (text == NULL || PyList_Append(names, text) < 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(text);
    }
    return names;
}

int mha_py_runtime_start(PyObject *module) {
    const char *forced = getenv("MHA_ISA");
    if (forced != NULL && *forced == '\0') {
        forced = NULL;
    }
    if (mha_choose_kernels(forced) != MHA_OK) {
        PyObject *names = mha_py_instruction_sets(module, NULL);
        if (names != NULL) {
            PyErr_Format(PyExc_ImportError, "MHA_ISA: got %s, wanted one that runs here: %S",
                         forced, names);
            Py_DECREF(names);
        }
        return -1;
    }
    num_threads_variable = PyContextVar_New("mha.num_threads", NULL);
    if (num_threads_variable == NULL) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "num_threads_variable", num_threads_variable);
}
