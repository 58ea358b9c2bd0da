/* Between float32 arrays and those of halves, outside of a step. */
#include "kernels/kernels.h"
#include "mha/float_mode.h"

void mha_round_numbers(const float *from, void *to, mha_storage storage, int64_t count) {
    const uint64_t mode = mha_enter_float_mode();
    mha_kernels_for(MHA_FLOAT32)->elementwise->write_row(from, to, storage, count);
    mha_leave_float_mode(mode);
}

void mha_widen_numbers(const void *from, mha_storage storage, float *to, int64_t count) {
    const uint64_t mode = mha_enter_float_mode();
    mha_kernels_for(MHA_FLOAT32)->elementwise->read_row(from, storage, to, count);
    mha_leave_float_mode(mode);
}
