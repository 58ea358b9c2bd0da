/* What the functions of the module have in common: arguments by position and by keyword, and the
 * steps of a call. */
#ifndef MHA_FUNCTION_H
#define MHA_FUNCTION_H

#include "python/call/call.h"
#include "python/call/options.h"

enum { MHA_MOST_ARGUMENTS = 64, NO_OPTIONS = -1 };

/* A function lists its arguments once, as rows X(name, form): ARG_name is the place of one. */
#define MHA_ARGUMENT_PLACE(name, form) ARG_##name,
#define MHA_ARGUMENT_FORM(name, form) [ARG_##name] = {#name, form},

/* One function. A call is a struct of its own, zeros at the start, that owns all that it makes.
 * The record of options counts as one argument and becomes NUM_OPTIONS of them. */
typedef struct module_function {
    const char *name;
    size_t size;                /* of a call */
    const argument_form *forms; /* those by position, in order, then those by keyword alone */
    int count;
    int by_position; /* how many a caller gives so; the record of options counts as one */
    int options;     /* where its fields begin, or NO_OPTIONS */
    /* 1. Converts and checks every argument, and makes the arrays of the results; no pointer into
     * an array is taken before all of that is done. 0, or -1 with the exception. */
    int (*convert)(void *call, PyObject **arguments);
    /* 2. Takes the pointers; whether there is anything to compute. */
    bool (*fill_pointers)(void *call);
    /* 3. Computes: steps of the core over the problem, so many bytes into the call. */
    core_workspace *workspace; /* NULL: needs none */
    core_forward *forward;     /* NULL: nothing is computed */
    size_t problem;
    /* 4. New reference. */
    PyObject *(*results)(void *call);
    void (*clear)(void *call);
} module_function;

PyObject *mha_run_function(const module_function *function, void *call, PyObject *const *given,
                           Py_ssize_t given_count, PyObject *keywords);

/* Defines mha_py_<name>, whose calls are such structs; then the fields of its module_function. */
#define MHA_MODULE_FUNCTION(name_, call_type, ...)                                                 \
    MHA_PY_FUNCTION(name_) {                                                                       \
        static const module_function function = {                                                  \
            .name = #name_, .size = sizeof(call_type), __VA_ARGS__};                               \
        call_type call; /* cleared by the shell */                                                 \
        (void)module;                                                                              \
        return mha_run_function(&function, &call, given, count, keywords);                         \
    }

/* A function of the core over a call's problem: core_<name>. */
#define MHA_CORE_WORKSPACE(name, type)                                                             \
    static mha_status core_##name(const void *problem, int num_threads, size_t *bytes) {           \
        return mha_##name((const type *)problem, num_threads, bytes);                              \
    }
#define MHA_CORE_RUN(name, type)                                                                   \
    static mha_status core_##name(const void *problem, mha_execution *execution) {                 \
        return mha_##name((const type *)problem, execution);                                       \
    }

/* A call as its gradients come back to it: moved out of `call`, which is zeros then, into a capsule
 * that clears it in the end. `name` is a string that stays. NULL with an exception. */
PyObject *mha_keep_call(const char *name, void *call, size_t size, void (*clear)(void *call));

/* (results, saved): takes over both; NULL with the exception where either is NULL. */
PyObject *mha_with_saved(PyObject *results, PyObject *saved);

/* The call of a capsule of this name, borrowed; NULL with a TypeError. Several threads may have it
 * at once: pointers are taken in a copy. */
const void *mha_saved_call(PyObject *capsule, const char *name);

#endif
