/* The arrays between the steps of the whole figure that a call keeps for its backward pass. */
#include "python/steps/multi_head_attention.h"

PyArrayObject *mha_new_rows(const layer_call *call, int64_t length, int64_t width, int typenum,
                            const char *name) {
    npy_intp shape[NPY_MAXDIMS];
    const int axes = call->scores.batch_axes;
    memcpy(shape, call->scores.batch, (size_t)axes * sizeof *shape);
    shape[axes] = (npy_intp)length;
    shape[axes + 1] = (npy_intp)width;
    return mha_new_array(axes + 2, shape, typenum, name);
}

int mha_new_step(const layer_call *call, PyArrayObject **step, int64_t length, int64_t width,
                 const char *name) {
    *step = mha_new_rows(call, length, width, mha_typenum(call->dtype), name);
    return *step == NULL ? -1 : 0;
}

/* Without gates the merged heads are what attention wrote: one array for both. */
int mha_new_saved_steps(layer_call *call) {
    const int64_t query_len = call->scores.query_len, key_len = call->scores.key_len;
    const bool has_output_gate = call->W_g.out > 0;
    const bool has_gate = call->head_gate != NULL || has_output_gate;
    const bool norms_query = call->preparation.q_norm != NULL;
    const bool norms_key = call->preparation.k_norm != NULL;
    if (mha_new_step(call, &call->projected_query, query_len, call->W_q.out, "projected query") <
            0 ||
        mha_new_step(call, &call->projected_key, key_len, call->W_k.out, "projected key") < 0 ||
        mha_new_step(call, &call->projected_value, key_len, call->W_v.out, "projected value") < 0 ||
        mha_new_step(call, &call->attended, query_len, call->W_o.in, "attended values") < 0 ||
        (has_gate &&
         mha_new_step(call, &call->merged, query_len, call->W_o.in, "merged heads") < 0) ||
        (has_output_gate &&
         mha_new_step(call, &call->gate, query_len, call->W_g.out, "gate") < 0) ||
        (norms_query && mha_new_step(call, &call->unprepared_query, query_len, call->W_q.out,
                                     "unprepared query") < 0) ||
        (norms_key &&
         mha_new_step(call, &call->unprepared_key, key_len, call->W_k.out, "unprepared key") < 0)) {
        return -1;
    }
    if (!has_gate) {
        call->merged = (PyArrayObject *)Py_NewRef((PyObject *)call->attended);
    }
    call->results.statistics = mha_new_statistics(call->dtype, &call->scores);
    return call->results.statistics == NULL ? -1 : 0;
}
