/* Converting arguments to arrays and numbers may run Python code (__array__, __index__, __float__),
 * or let other threads run, that reshape or retype other arguments. So it comes first, for all of
 * them, and arrays become views that nobody else holds; what is checked afterwards stays as it was
 * checked. */
#ifndef MHA_NORMALISE_H
#define MHA_NORMALISE_H

#include "python/base/binding.h"

typedef struct argument_form {
    const char *name;
    enum {
        AS_IT_IS,     /* names, the seed, what a call saved: reading them runs no code */
        AS_FLAG,      /* likewise; False where it is not given */
        AS_ARRAY,     /* of any type of bools or numbers; an int stays */
        AS_MASK,      /* the same, or the record of a BlockMask */
        AS_ANY_ARRAY, /* of any type, objects too; an int stays */
        AS_REAL, /* an array of numbers, float16 and integers not beside bfloat16; an int or packed
                    weight stays */
        AS_CACHED, /* the same, or the blocks of a cache */
        AS_INT,
        AS_NUMBER,
        AS_INTS, /* a tuple of ints or None */
    } kind;
} argument_form;

/* normalised[i] becomes given[i] as an exact array, int, float or tuple; None and what has the
 * wrong type stay, for the checks to name. New references; 0, or -1 with the exception. To be
 * cleared either way. */
int mha_normalise(const argument_form *forms, int count, PyObject *const *given,
                  PyObject **normalised);
void mha_clear_normalised(int count, PyObject **normalised);

#endif
