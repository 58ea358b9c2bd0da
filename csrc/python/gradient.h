/* What the ways back have in common: their arguments, the gradients of results that come in, and
 * those of arguments that go out by name. */
#ifndef MHA_GRADIENT_H
#define MHA_GRADIENT_H

#include "function.h"

/* Every way back takes what the forward pass kept, the gradients of the output and of lse (or
 * None), and the set of the names that are wanted. */
enum { MHA_KEPT, MHA_GRAD_OUTPUT, MHA_GRAD_LSE, MHA_WANTED, MHA_NUM_BACKWARD_ARGUMENTS };
extern const argument_form MHA_BACKWARD_FORMS[MHA_NUM_BACKWARD_ARGUMENTS];
#define MHA_BACKWARD_ARGUMENTS                                                                     \
    .forms = MHA_BACKWARD_FORMS, .count = MHA_NUM_BACKWARD_ARGUMENTS,                              \
    .by_position = MHA_NUM_BACKWARD_ARGUMENTS, .options = NO_OPTIONS

/* The gradient of a result of this shape, in the element type; its last axis contiguous, or
 * `contiguous` as a whole. NULL with an exception. */
PyArrayObject *mha_convert_gradient(PyObject *object, bool contiguous, mha_dtype dtype,
                                    const npy_intp *shape, int axes, const char *name);

/* The same, where None is none. 0, or -1 with the exception. */
int mha_convert_grad_lse(PyObject *object, mha_dtype dtype, const npy_intp *shape, int axes,
                         PyArrayObject **grad_lse);

/* A new array for the gradient of `like`. */
typedef PyArrayObject *new_gradient(PyArrayObject *like, const char *name);

/* C-contiguous. */
new_gradient mha_new_contiguous_like;

/* In the memory order of `like`, so that heads that are a view of merged columns give such a view;
 * in plain order where another axis would come last. */
new_gradient mha_new_dense_like;

/* gradients[i] becomes a new array where names[i] is wanted and like[i] is there, else NULL. 0, or
 * -1 with the exception. */
int mha_new_gradients(PyObject *wanted, const char *const *names, PyArrayObject *const *like,
                      int count, new_gradient *make, PyArrayObject **gradients);
void mha_clear_gradients(PyArrayObject **gradients, int count);

/* Zeros in the gradient of a bias (or NULL) where there are no scores, and so nothing writes it. */
void mha_clear_unwritten(const score_shape *scores, PyArrayObject *bias);

/* A dict from names to gradients, None for those that are not there. */
PyObject *mha_pack_gradients(const char *const *names, PyArrayObject *const *gradients, int count);

#endif
