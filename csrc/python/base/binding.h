/* What every file of the binding includes first. This folder alone knows Python and NumPy. */
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

/* The functions of the module: those of a step stand in the file of its name. New references, or
 * NULL. Most take their arguments as function.h says; the Python functions in mha/ have the
 * defaults and docstrings. */
#define MHA_PY_FUNCTION(name)                                                                      \
    PyObject *mha_py_##name(PyObject *module, PyObject *const *given, Py_ssize_t count,            \
                            PyObject *keywords)
MHA_PY_FUNCTION(linear);
MHA_PY_FUNCTION(linear_backward);
MHA_PY_FUNCTION(split_heads);
MHA_PY_FUNCTION(merge_heads);
MHA_PY_FUNCTION(scaled_dot_product_attention);
MHA_PY_FUNCTION(scaled_dot_product_attention_backward);
MHA_PY_FUNCTION(saved_attention);
MHA_PY_FUNCTION(scaled_dot_product_attention_varlen);
MHA_PY_FUNCTION(scaled_dot_product_attention_varlen_backward);
MHA_PY_FUNCTION(additive_attention);
MHA_PY_FUNCTION(additive_attention_backward);
MHA_PY_FUNCTION(multi_head_attention);
MHA_PY_FUNCTION(multi_head_attention_backward);
MHA_PY_FUNCTION(merge_attention);
MHA_PY_FUNCTION(prepare_heads);
MHA_PY_FUNCTION(prepare_heads_backward);
MHA_PY_FUNCTION(output_gate);
MHA_PY_FUNCTION(output_gate_backward);
MHA_PY_FUNCTION(rotary);
MHA_PY_FUNCTION(rotary_backward);
PyObject *mha_py_dropout_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *mha_py_as_array(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *mha_py_round_numbers(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *mha_py_arrays_of_tensors(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *mha_py_tensor_of_array(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *mha_py_check_block_mask(PyObject *module, PyObject *record);
PyObject *mha_py_pack_weight(PyObject *module, PyObject *weight);
PyObject *mha_py_unpack_weight(PyObject *module, PyObject *packed);
PyObject *mha_py_pack_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *mha_py_unpack_blocks(PyObject *module, PyObject *packed);
PyObject *mha_py_packed_bytes(PyObject *module, PyObject *packed);
PyObject *mha_py_get_num_threads(PyObject *module, PyObject *unused);
PyObject *mha_py_set_num_threads(PyObject *module, PyObject *num_threads);
PyObject *mha_py_use_team(PyObject *module, PyObject *team);
PyObject *mha_py_checked_num_threads(PyObject *module, PyObject *num_threads);
PyObject *mha_py_instruction_set(PyObject *module, PyObject *unused);
PyObject *mha_py_instruction_sets(PyObject *module, PyObject *unused);

/* runtime.c: honours MHA_ISA and creates the variable of `threads`; -1 with an exception. */
int mha_py_runtime_start(PyObject *module);

#endif
