/* What every file of the binding includes first. csrc/python alone knows Python and NumPy. */
#ifndef MHA_BINDING_H
#define MHA_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL mha_numpy_api
#ifndef MHA_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* NumPy 2 has functions for what are plain fields of a type in NumPy 1. */
#if NPY_ABI_VERSION < 0x02000000
#define PyDataType_ELSIZE(type) ((npy_intp)(type)->elsize)
#define PyDataType_NAMES(type) ((type)->names)
#endif

#include "mha/mha.h"

/* The most axes of an array that comes in, NumPy 1's limit for all arrays; one less where the call
 * adds an axis of heads. */
enum { MHA_MOST_INPUT_AXES = 32 };

/* The functions of the module, which the file of a step's name defines, and how they take their
 * arguments: most as function.h says, the others as Python's METH_ of that name. The Python
 * functions in mha/ have the defaults and docstrings. */
#define MHA_FUNCTIONS(X)                                                                           \
    X(linear, KEYWORDS)                                                                            \
    X(linear_backward, KEYWORDS)                                                                   \
    X(split_heads, KEYWORDS)                                                                       \
    X(merge_heads, KEYWORDS)                                                                       \
    X(scaled_dot_product_attention, KEYWORDS)                                                      \
    X(scaled_dot_product_attention_backward, KEYWORDS)                                             \
    X(saved_attention, KEYWORDS)                                                                   \
    X(scaled_dot_product_attention_varlen, KEYWORDS)                                               \
    X(scaled_dot_product_attention_varlen_backward, KEYWORDS)                                      \
    X(additive_attention, KEYWORDS)                                                                \
    X(additive_attention_backward, KEYWORDS)                                                       \
    X(multi_head_attention, KEYWORDS)                                                              \
    X(multi_head_attention_backward, KEYWORDS)                                                     \
    X(merge_attention, KEYWORDS)                                                                   \
    X(prepare_heads, KEYWORDS)                                                                     \
    X(prepare_heads_backward, KEYWORDS)                                                            \
    X(output_gate, KEYWORDS)                                                                       \
    X(output_gate_backward, KEYWORDS)                                                              \
    X(rotary, KEYWORDS)                                                                            \
    X(rotary_backward, KEYWORDS)                                                                   \
    X(dropout_mask, FASTCALL)                                                                      \
    X(as_array, FASTCALL)                                                                          \
    X(round_numbers, FASTCALL)                                                                     \
    X(arrays_of_tensors, FASTCALL)                                                                 \
    X(tensor_of_array, FASTCALL)                                                                   \
    X(check_block_mask, O)                                                                         \
    X(pack_weight, O)                                                                              \
    X(unpack_weight, O)                                                                            \
    X(pack_blocks, FASTCALL)                                                                       \
    X(unpack_blocks, O)                                                                            \
    X(packed_bytes, O)                                                                             \
    X(get_num_threads, NOARGS)                                                                     \
    X(set_num_threads, O)                                                                          \
    X(use_team, O)                                                                                 \
    X(checked_num_threads, O)                                                                      \
    X(instruction_set, NOARGS)                                                                     \
    X(instruction_sets, NOARGS)

/* mha_py_<name>: a new reference, or NULL. */
#define MHA_TAKES_KEYWORDS PyObject *const *given, Py_ssize_t count, PyObject *keywords
#define MHA_TAKES_FASTCALL PyObject *const *args, Py_ssize_t nargs
#define MHA_TAKES_O PyObject *object
#define MHA_TAKES_NOARGS PyObject *unused
#define MHA_PY_FUNCTION(name, form) PyObject *mha_py_##name(PyObject *module, MHA_TAKES_##form)
#define MHA_DECLARE(name, form) MHA_PY_FUNCTION(name, form);
MHA_FUNCTIONS(MHA_DECLARE)

/* runtime.c: honours MHA_ISA and creates the variable of `threads`; -1 with an exception. */
int mha_py_runtime_start(PyObject *module);

#endif
