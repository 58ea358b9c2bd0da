/* What is decided for one projection before any task runs: how it is divided into tasks, and in
 * which form the kernel gets its rows. */
#ifndef MHA_PROJECTION_PLAN_H
#define MHA_PROJECTION_PLAN_H

#include "mha/attention.h"

typedef struct mha_projection_plan {
    int64_t row_block;        /* rows of a task */
    int64_t panels_in_one_go; /* of the weight, that the kernel takes in one call */
    int64_t panels, groups;   /* of a task, and how many such groups the weight has */
    /* Of an x that is transposed: read as it lies, packed by the kernel chain by chain beside the
     * weight, or packed before all tasks. */
    enum { X_AS_IT_LIES, X_PACKED_BY_CHAIN, X_PACKED_BEFORE } x_packing;
    /* Bytes of a block of rows as kernels read it best, and of a row of it; 0: as they lie. */
    size_t arranged_bytes, arranged_row;
} mha_projection_plan;

mha_status mha_plan_projection(const mha_linear_projection *p, int num_threads,
                               mha_projection_plan *plan) MHA_MUST_CHECK;

/* Whether few rows read a weight of halves as it lies. */
bool mha_reads_halves_in_place(const mha_linear_projection *p);

#endif
