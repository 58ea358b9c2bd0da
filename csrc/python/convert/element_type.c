/* Which types of NumPy the core reads, and which ones go together. */
#include "python/convert/convert.h"

/* NumPy's numbers of the element types. */
static const int typenums[MHA_NUM_DTYPES] = {[MHA_FLOAT32] = NPY_FLOAT32,
                                             [MHA_FLOAT64] = NPY_FLOAT64};

int mha_typenum(mha_dtype dtype) { return typenums[dtype]; }

bool mha_is_half_type(int typenum) {
    return typenum == NPY_HALF || typenum == NPY_VOID || PyTypeNum_ISUSERDEF(typenum);
}

int mha_bfloat16_typenum(void) {
    PyObject *name = PyUnicode_FromString("bfloat16"); /* NumPy knows it once ml_dtypes is there */
    PyArray_Descr *type = NULL;
    const bool is_known = name != NULL && PyArray_DescrConverter(name, &type) == NPY_SUCCEED;
    const int typenum = is_known ? type->type_num : NPY_VOID;
    PyErr_Clear();
    Py_XDECREF(name);
    Py_XDECREF(type);
    return typenum;
}

int mha_shown_typenum(int typenum, const char *name) {
    const int shown = typenum == NPY_VOID ? mha_bfloat16_typenum() : typenum;
    if (shown == NPY_VOID) {
        PyErr_Format(PyExc_ImportError,
                     "%s: got bfloat16 but no type for arrays of it, wanted ml_dtypes: pip install "
                     "ml_dtypes, and import it",
                     name);
    }
    return shown;
}

mha_dtype mha_dtype_of_typenum(int typenum) {
    for (int dtype = 0; dtype < MHA_NUM_DTYPES; dtype++) {
        if (typenums[dtype] == typenum) {
            return (mha_dtype)dtype;
        }
    }
    return MHA_FLOAT64;
}

/* Whether an attribute of a type, a string, is `wanted`. */
static bool is_named(PyTypeObject *type, const char *attribute, const char *wanted) {
    PyObject *name = PyObject_GetAttrString((PyObject *)type, attribute);
    const bool same = name != NULL && PyUnicode_Check(name) &&
                      PyUnicode_CompareWithASCIIString(name, wanted) == 0;
    PyErr_Clear();
    Py_XDECREF(name);
    return same;
}

static bool is_bfloat16(PyArrayObject *array) {
    PyTypeObject *type = PyArray_DESCR(array)->typeobj;
    return PyTypeNum_ISUSERDEF(PyArray_TYPE(array)) && PyArray_ITEMSIZE(array) == 2 &&
           is_named(type, "__name__", "bfloat16") && is_named(type, "__module__", "ml_dtypes");
}

/* A record of one field, of which only mha/_base/dtypes.py and dlpack.c make arrays. */
static bool is_record(PyArrayObject *array, npy_intp size, const char *field) {
    PyArray_Descr *type = PyArray_DESCR(array);
    if (type->type_num != NPY_VOID || PyArray_ITEMSIZE(array) != size ||
        !PyDataType_HASFIELDS(type)) {
        return false;
    }
    PyObject *names = PyDataType_NAMES(type);
    return names != NULL && PyTuple_GET_SIZE(names) == 1 &&
           PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), field) == 0;
}

static bool is_raw_bfloat16(PyArrayObject *array) { return is_record(array, 2, "mha_bfloat16"); }

bool mha_is_in_blocks(PyArrayObject *array) { return is_record(array, MHA_Q8_0_BYTES, "mha_q8_0"); }

mha_storage mha_storage_of(PyArrayObject *array) {
    return PyArray_TYPE(array) == NPY_HALF                ? MHA_FLOAT16
           : is_bfloat16(array) || is_raw_bfloat16(array) ? MHA_BFLOAT16
                                                          : MHA_AS_COMPUTED;
}

int mha_wrong_dtype(PyArrayObject *array, const char *name, const char *wanted) {
    return mha_raise(PyExc_TypeError, "%s: got an array of %S, wanted %s", name,
                     (PyObject *)PyArray_DESCR(array), wanted);
}

static const char REAL_TYPES[] = "float32, float64 or integers";
static const char HALF_TYPES[] = "float16, bfloat16, float32, float64 or integers";

static bool is_real(int typenum) {
    return typenum == NPY_FLOAT32 || typenum == NPY_FLOAT64 || PyTypeNum_ISINTEGER(typenum);
}

int mha_check_real(PyArrayObject *array, const char *name) {
    const int typenum = PyArray_TYPE(array);
    return is_real(typenum) || typenum == NPY_BOOL || mha_storage_of(array) != MHA_AS_COMPUTED
               ? 0
               : mha_wrong_dtype(array, name, HALF_TYPES);
}

int mha_check_beside_bfloat16(PyArrayObject *array, const char *name) {
    const int typenum = PyArray_TYPE(array);
    return typenum == NPY_FLOAT32 || typenum == NPY_FLOAT64 || mha_storage_of(array) == MHA_BFLOAT16
               ? 0
               : mha_wrong_dtype(array, name, "bfloat16 as another array has, float32 or float64");
}

/* The type of NumPy that all arrays have in common; bfloat16 gives way to float32 and float64. */
static int common_typenum(PyArrayObject **arrays, const char *const *names, int count,
                          int *typenum) {
    int of_bfloat16 = NPY_NOTYPE, widest = NPY_NOTYPE;
    for (int i = 0; i < count; i++) {
        if (mha_check_real(arrays[i], names[i]) < 0) {
            return -1;
        }
        of_bfloat16 =
            mha_storage_of(arrays[i]) == MHA_BFLOAT16 ? PyArray_TYPE(arrays[i]) : of_bfloat16;
    }
    for (int i = 0; of_bfloat16 != NPY_NOTYPE && i < count; i++) {
        if (mha_check_beside_bfloat16(arrays[i], names[i]) < 0) {
            return -1;
        }
        if (mha_storage_of(arrays[i]) != MHA_BFLOAT16 && widest != NPY_FLOAT64) {
            widest = PyArray_TYPE(arrays[i]);
        }
    }
    if (of_bfloat16 != NPY_NOTYPE) {
        of_bfloat16 = of_bfloat16 == NPY_VOID ? mha_bfloat16_typenum() : of_bfloat16;
        *typenum = widest == NPY_NOTYPE ? of_bfloat16 : widest;
        return 0;
    }
    PyArray_Descr *common = PyArray_ResultType(count, arrays, 0, NULL);
    if (common == NULL) {
        return -1;
    }
    *typenum = common->type_num;
    Py_DECREF(common);
    return 0;
}

int mha_result_dtype(PyArrayObject **arrays, const char *const *names, int count,
                     mha_dtype *dtype) {
    int typenum;
    if (common_typenum(arrays, names, count, &typenum) < 0) {
        return -1;
    }
    if (!is_real(typenum)) { /* bool or halves throughout */
        return mha_wrong_dtype(arrays[0], names[0], REAL_TYPES);
    }
    *dtype = mha_dtype_of_typenum(typenum);
    return 0;
}

int mha_result_types(PyArrayObject **arrays, const char *const *names, int count, mha_dtype *dtype,
                     int *result_typenum) {
    if (common_typenum(arrays, names, count, result_typenum) < 0) {
        return -1;
    }
    if (mha_is_half_type(*result_typenum)) {
        *dtype = MHA_FLOAT32;
        return 0;
    }
    if (!is_real(*result_typenum)) {
        return mha_wrong_dtype(arrays[0], names[0], HALF_TYPES);
    }
    *dtype = mha_dtype_of_typenum(*result_typenum);
    *result_typenum = mha_typenum(*dtype);
    return 0;
}

mha_dtype mha_computing_dtype(int typenum) {
    return mha_is_half_type(typenum) ? MHA_FLOAT32 : mha_dtype_of_typenum(typenum);
}
