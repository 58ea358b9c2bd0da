/* The module mha._core. */
#define MHA_IMPORTS_NUMPY
#include "python/base/binding.h"
#include "python/base/results.h"
#include "python/base/call.h"
#include "python/call/options.h"

#define FLAGS_KEYWORDS METH_FASTCALL | METH_KEYWORDS
#define FLAGS_FASTCALL METH_FASTCALL
#define FLAGS_O METH_O
#define FLAGS_NOARGS METH_NOARGS
#define METHOD(name, form) {#name, (PyCFunction)(void (*)(void))mha_py_##name, FLAGS_##form, NULL},

static PyMethodDef methods[] = {MHA_FUNCTIONS(METHOD){NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mha._core",
    .m_doc = "The C core of mha; use the functions of mha instead.",
    .m_size = -1,
    .m_methods = methods,
};

/* OPTIONS, the names of the options of attention in their order; -1 with an exception. */
static int add_option_names(PyObject *module) {
#define LETTER(name, form, becomes) "s"
#define NAME(name, form, becomes) , #name
    PyObject *names = Py_BuildValue("(" MHA_OPTIONS(LETTER) ")" MHA_OPTIONS(NAME));
    const int failed = names == NULL ? -1 : PyModule_AddObjectRef(module, "OPTIONS", names);
    Py_XDECREF(names);
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
