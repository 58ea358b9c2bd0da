/* What the functions of the module have in common: arguments by position and by keyword, and the
 * steps of a call. */
#ifndef MHA_FUNCTION_H
#define MHA_FUNCTION_H

#include <stddef.h>

#include "python/base/call.h"
#include "python/call/options.h"

enum { MHA_MOST_ARGUMENTS = 64, NO_OPTIONS = -1 };

/* A function lists its arguments once, as rows X(name, form), maybe MHA_OPTIONS(X) among them:
 * ARG_name is the place of one, FORMS says how each is normalised. What else rows of MHA_OPTIONS
 * have is of no use here. */
#define MHA_FIRST_OF(first, ...) first
#define MHA_ARGUMENT_PLACE(name, ...) ARG_##name,
#define MHA_ARGUMENT_FORM(name, ...) [ARG_##name] = {#name, MHA_FIRST_OF(__VA_ARGS__, )},
#define MHA_ARGUMENTS(ARGUMENTS)                                                                   \
    enum argument { ARGUMENTS(MHA_ARGUMENT_PLACE) NUM_ARGUMENTS };                                 \
    _Static_assert((int)NUM_ARGUMENTS <= (int)MHA_MOST_ARGUMENTS, "MHA_MOST_ARGUMENTS");           \
    static const argument_form FORMS[NUM_ARGUMENTS] = {ARGUMENTS(MHA_ARGUMENT_FORM)};

/* One function. A call is a struct of its own, zeros at the start, that owns all that it makes.
 * The record of options counts as one argument and becomes NUM_OPTIONS of them. */
typedef struct module_function {
    const char *name;
    size_t size;                /* of a call */
    const argument_form *forms; /* those by position, in order, then those by keyword alone */
    int count;
    int by_position; /* how many a caller gives so; the record of options counts as one */
    int options;     /* where its fields begin, or NO_OPTIONS */
    int save;        /* the flag that asks for (results, saved), the call in a capsule; 0: none */
    /* Of a backward pass, whose first argument is such a capsule: the function that made it, and
     * where in the call a copy of that one is put before step 1. Pointers are taken in the copy,
     * since several threads may have the capsule at once. */
    const char *saved_by;
    size_t saved_at;
    /* 1. Converts and checks every argument, and makes the arrays of the results; no pointer into
     * an array is taken before all of that is done. 0, or -1 with the exception. */
    int (*convert)(void *call, PyObject **arguments);
    /* 2. Takes the pointers; whether there is anything to compute. */
    bool (*fill_pointers)(void *call);
    /* 3. Computes: the core's step, forward or backward. */
    core_workspace *workspace; /* NULL: needs none */
    core_run *run;             /* NULL: nothing is computed */
    size_t problem;            /* where in the call the core's struct lies that both read */
    /* 4. New reference. */
    PyObject *(*results)(void *call);
    void (*clear)(void *call);
} module_function;

PyObject *mha_run_function(const module_function *function, void *call, PyObject *const *given,
                           Py_ssize_t given_count, PyObject *keywords);

/* Defines mha_py_<name>, whose calls are such structs; then the fields of its module_function. */
#define MHA_MODULE_FUNCTION(name_, call_type, ...)                                                 \
    MHA_PY_FUNCTION(name_, KEYWORDS) {                                                             \
        static const module_function function = {                                                  \
            .name = #name_, .size = sizeof(call_type), __VA_ARGS__};                               \
        call_type call; /* mha_run_function zeroes it */                                           \
        (void)module;                                                                              \
        return mha_run_function(&function, &call, given, count, keywords);                         \
    }

/* The fields of a forward function whose file names its parts so: FORMS and NUM_ARGUMENTS (by
 * MHA_ARGUMENTS), convert, results, clear. */
#define MHA_FORWARD_FIELDS                                                                         \
    .forms = FORMS, .count = NUM_ARGUMENTS, .convert = convert, .results = results, .clear = clear

/* Defines mha_py_<name>. MHA_FORWARD_FUNCTION(rotary, rotary, rotary_call, rotation, ...): each
 * call is a rotary_call, and mha_rotary_forward runs over its field `rotation`, in the workspace
 * that mha_rotary_workspace asks for. `step` is the core's name of it where that differs. */
#define MHA_FORWARD_FUNCTION(name, step, call_type, problem_, ...)                                 \
    MHA_CORE_WORKSPACE(step##_workspace)                                                           \
    MHA_CORE_RUN(step##_forward)                                                                   \
    MHA_MODULE_FUNCTION(name, call_type, MHA_FORWARD_FIELDS, .workspace = core_##step##_workspace, \
                        .run = core_##step##_forward, .problem = offsetof(call_type, problem_),    \
                        __VA_ARGS__)

/* A call as its gradients come back to it: moved out of `call`, which is zeros then, into a capsule
 * that clears it in the end. `name` is a string that stays. NULL with an exception. */
PyObject *mha_save_call(const char *name, void *call, size_t size, void (*clear)(void *call));

#endif
