#define WIN32_LEAN_AND_MEAN
#include "python/base/system.h"

#include <malloc.h>
#include <string.h>
#include <windows.h>

static DWORD key = FLS_OUT_OF_INDEXES;
static DWORD main_thread;

/* Its number, as Python knows it: Windows sets none of a process's threads apart. */
static int find_main_thread(void) {
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread =
        threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    PyObject *number = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    main_thread = number == NULL ? 0 : (DWORD)PyLong_AsUnsignedLong(number);
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

int mha_system_start(void (*free_kept)(void *kept)) {
    if (key == FLS_OUT_OF_INDEXES) {
        key = FlsAlloc(free_kept); /* without a key nothing is kept */
    }
    return find_main_thread();
}

void *mha_system_kept(void) { return key == FLS_OUT_OF_INDEXES ? NULL : FlsGetValue(key); }

bool mha_system_keep(void *kept) { return key != FLS_OUT_OF_INDEXES && FlsSetValue(key, kept); }

bool mha_system_is_main_thread(void) { return GetCurrentThreadId() == main_thread; }

int64_t mha_system_coarse_nanoseconds(void) { return (int64_t)GetTickCount64() * 1000000; }

void *mha_system_allocate(size_t bytes) { return _aligned_malloc(bytes, MHA_WORKSPACE_ALIGNMENT); }

void mha_system_free(void *memory) { _aligned_free(memory); }

void *mha_system_allocate_zeros(size_t count, size_t bytes) {
    size_t all;
    void *memory = __builtin_mul_overflow(count, bytes, &all) ? NULL : mha_system_allocate(all);
    return memory == NULL ? NULL : memset(memory, 0, all);
}

void *mha_system_reallocate(void *memory, size_t bytes) {
    return _aligned_realloc(memory, bytes, MHA_WORKSPACE_ALIGNMENT);
}
