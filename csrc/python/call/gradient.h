/* What the backward passes have in common: their arguments, the gradients of results that come in,
 * and those of arguments that go out by name. */
#ifndef MHA_GRADIENT_H
#define MHA_GRADIENT_H

#include "python/call/function.h"

/* Every backward pass takes what the forward pass saved, the gradients of the output and of lse (or
 * None), and the set of the names that are wanted. */
enum { MHA_SAVED, MHA_GRAD_OUTPUT, MHA_GRAD_LSE, MHA_WANTED, MHA_NUM_BACKWARD_ARGUMENTS };
extern const argument_form MHA_BACKWARD_FORMS[MHA_NUM_BACKWARD_ARGUMENTS];

/* The gradient of a result of this shape and NumPy's type, in the element type that computes it;
 * its last axis contiguous, or `contiguous` as a whole. NULL with an exception. */
PyArrayObject *mha_convert_gradient(PyObject **argument, bool contiguous, int typenum,
                                    const npy_intp *shape, int axes, const char *name);

/* A new array for the gradient of `like`. */
typedef PyArrayObject *new_gradient(PyArrayObject *like, const char *name);

/* C-contiguous. */
new_gradient mha_new_contiguous_like;

/* In the memory order of `like`, so that heads that are a view of merged columns give such a view;
 * in plain order where another axis would come last. */
new_gradient mha_new_dense_like;

/* The type that the gradient of an argument has: that of its halves where float32 was made of them.
 */
int mha_given_typenum(PyObject *given, PyArrayObject *converted);

/* A backward pass lists its gradients once, as rows X(name, like, see). MHA_GRADIENT_LISTS makes
 * GRAD_<name>, the place of one, and NAMES. like: the array that it is the gradient of, or NULL; an
 * expression of the local `saved`, which points to the saved call. see: the function by which
 * fill_pointers puts gradients[GRAD_<name>], of the local `gradients`, into the core's struct, as
 * its field grad_<name>. */
#define MHA_GRADIENT_PLACE(name, like, see) GRAD_##name,
#define MHA_GRADIENT_NAME(name, like, see) #name,
#define MHA_GRADIENT_LIKE(name, like, see) like,
#define MHA_GRADIENT_FIELD(name, like, see) .grad_##name = see(gradients[GRAD_##name]),
#define MHA_GRADIENT_LISTS(GRADIENTS)                                                              \
    enum gradient { GRADIENTS(MHA_GRADIENT_PLACE) NUM_GRADIENTS };                                 \
    static const char *const NAMES[NUM_GRADIENTS] = {GRADIENTS(MHA_GRADIENT_NAME)};

enum { MHA_MOST_GRADIENTS = 24 };

/* What the call of every backward pass begins with: the functions below cast to it. */
typedef struct backward_call {
    PyArrayObject *grad_output, *grad_lse;
    const char *const *names; /* of the arguments that have gradients */
    int count;
    PyArrayObject *gradients[MHA_MOST_GRADIENTS]; /* NULL where not wanted or not given */
    int typenums[MHA_MOST_GRADIENTS];             /* in which they go out, rounded if need be */
} backward_call;

/* Lets a gradient go out in this type, where it is wanted. */
void mha_round_gradient(backward_call *back, int gradient, int typenum);

/* grad_lse, where it is not None, of this shape. 0, or -1 with the exception. */
int mha_convert_grad_lse(PyObject **argument, int typenum, const npy_intp *shape, int axes,
                         backward_call *back);

/* grad_output and grad_lse of attention: (..., query_len, value_head_dim), as output is, and (...,
 * query_len). 0, or -1 with the exception. */
int mha_convert_grad_results(PyObject **arguments, int typenum, PyArrayObject *output,
                             backward_call *back);

/* Makes the array of each gradient whose name is wanted and whose like[i] is there. 0, or -1 with
 * the exception. */
int mha_new_gradients(PyObject *wanted, const char *const *names, PyArrayObject *const *like,
                      int count, new_gradient *make, backward_call *back);

/* Such calls' `results`, a dict from names to gradients, None for those that are not there; and
 * their `clear`. */
PyObject *mha_pack_gradients(void *call);
void mha_clear_backward(void *call);

/* What all backward passes have in common: a call begins with a backward_call, and its field
 * `forward` is the call that the function `name` saved. */
#define MHA_BACKWARD_FIELDS(name, call_type, forms_)                                               \
    .forms = forms_, .count = MHA_NUM_BACKWARD_ARGUMENTS,                                          \
    .by_position = MHA_NUM_BACKWARD_ARGUMENTS, .options = NO_OPTIONS, .saved_by = #name,           \
    .saved_at = offsetof(call_type, forward), .clear = mha_clear_backward

/* Defines mha_py_<name>_backward, which mha_<step>_backward computes: as MHA_FORWARD_FUNCTION, with
 * the names of the file given. */
#define MHA_BACKWARD_FUNCTION(name, step, call_type, problem_, ...)                                \
    MHA_CORE_WORKSPACE(step##_backward_workspace)                                                  \
    MHA_CORE_RUN(step##_backward)                                                                  \
    MHA_MODULE_FUNCTION(                                                                           \
        name##_backward, call_type, MHA_BACKWARD_FIELDS(name, call_type, MHA_BACKWARD_FORMS),      \
        .workspace = core_##step##_backward_workspace, .run = core_##step##_backward,              \
        .problem = offsetof(call_type, problem_), __VA_ARGS__)

/* Zeros in the gradients (or NULL) of what is added to scores, where there are none, and so nothing
 * may write them. */
void mha_clear_unwritten(const score_shape *scores, PyArrayObject *const *gradients, int count);

#endif
