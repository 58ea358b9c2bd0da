/* The module mha._core. */
#define MHA_IMPORTS_NUMPY
#include "python/base/binding.h"
#include "python/base/results.h"
#include "python/call/call.h"
#include "python/call/options.h"

#define FUNCTION(name, flags) {#name, (PyCFunction)(void (*)(void))mha_py_##name, flags, NULL}
#define FASTCALL(name) FUNCTION(name, METH_FASTCALL | METH_KEYWORDS)

static PyMethodDef methods[] = {
    FASTCALL(linear),
    FASTCALL(linear_backward),
    FASTCALL(split_heads),
    FASTCALL(merge_heads),
    FASTCALL(scaled_dot_product_attention),
    FASTCALL(scaled_dot_product_attention_backward),
    FASTCALL(saved_attention),
    FASTCALL(scaled_dot_product_attention_varlen),
    FASTCALL(scaled_dot_product_attention_varlen_backward),
    FASTCALL(additive_attention),
    FASTCALL(additive_attention_backward),
    FASTCALL(multi_head_attention),
    FASTCALL(multi_head_attention_backward),
    FASTCALL(merge_attention),
    FASTCALL(prepare_heads),
    FASTCALL(prepare_heads_backward),
    FASTCALL(output_gate),
    FASTCALL(output_gate_backward),
    FASTCALL(rotary),
    FASTCALL(rotary_backward),
    FUNCTION(dropout_mask, METH_FASTCALL),
    FUNCTION(as_array, METH_FASTCALL),
    FUNCTION(round_numbers, METH_FASTCALL),
    FUNCTION(arrays_of_tensors, METH_FASTCALL),
    FUNCTION(tensor_of_array, METH_FASTCALL),
    {"check_block_mask", mha_py_check_block_mask, METH_O, NULL},
    {"pack_weight", mha_py_pack_weight, METH_O, NULL},
    {"unpack_weight", mha_py_unpack_weight, METH_O, NULL},
    FUNCTION(pack_blocks, METH_FASTCALL),
    {"unpack_blocks", mha_py_unpack_blocks, METH_O, NULL},
    {"packed_bytes", mha_py_packed_bytes, METH_O, NULL},
    {"get_num_threads", mha_py_get_num_threads, METH_NOARGS, NULL},
    {"set_num_threads", mha_py_set_num_threads, METH_O, NULL},
    {"use_team", mha_py_use_team, METH_O, NULL},
    {"checked_num_threads", mha_py_checked_num_threads, METH_O, NULL},
    {"instruction_set", mha_py_instruction_set, METH_NOARGS, NULL},
    {"instruction_sets", mha_py_instruction_sets, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mha._core",
    .m_doc = "The C core of mha; use the functions of mha instead.",
    .m_size = -1,
    .m_methods = methods,
};

/* OPTIONS, the names of the options of attention in their order; -1 with an exception. */
static int add_option_names(PyObject *module) {
#define NAME(name, form, becomes) #name,
    static const char *const names[] = {MHA_OPTIONS(NAME)};
    PyObject *tuple = PyTuple_New(NUM_OPTIONS);
    for (int i = 0; tuple != NULL && i < NUM_OPTIONS; i++) {
        PyObject *text = PyUnicode_FromString(names[i]);
        if (text == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, i, text);
        }
    }
    const int failed = tuple == NULL ? -1 : PyModule_AddObjectRef(module, "OPTIONS", tuple);
    Py_XDECREF(tuple);
    return failed;
}

PyMODINIT_FUNC PyInit__core(void) {
    import_array();
    PyObject *module = PyModule_Create(&module_definition);
    if (module == NULL) {
        return NULL;
    }
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    if (mha_py_runtime_start(module) < 0 || mha_start_calls() < 0 || mha_start_results() < 0 ||
        add_option_names(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
