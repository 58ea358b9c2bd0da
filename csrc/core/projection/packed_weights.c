/* Weights that many blocks of rows read are packed as a whole before, unless they are huge. */
#include "core/projection/packed_weights.h"

#include "core/base/run.h"
#include "core/projection/matmul.h"

enum { MOST_PACKED_BYTES = 64 << 20 };

bool mha_takes_unpacked(const mha_linear_projection *projection) {
    return projection->weight.format == NULL && projection->weight.storage == MHA_AS_COMPUTED &&
           mha_panels_of(projection->dtype)->is_plain;
}

bool mha_packs_rows_by_chain(const mha_linear_projection *p) {
    enum { MOST_PANELS = 8 };
    return p->x_transposed && mha_takes_unpacked(p) &&
           p->weight.out <= MOST_PANELS * mha_panels_of(p->dtype)->columns;
}

/* Whether many blocks of rows read a weight. The kernel packs it as it goes where that is as good:
 * the output of a shallow one weighs more than the weight, and rows of a deep one do not stay in
 * the second cache from panel to panel. Rows that lie transposed are packed as it goes, too. */
static bool repays(const mha_linear_projection *p) {
    enum { MOST_BYTES_OF_BLOCK = 2 << 20 };
    const int64_t depth = p->weight.in, row = depth * (int64_t)mha_dtype_size(p->dtype);
    const bool is_shallow = depth <= MHA_DEPTH_CHAIN;
    const bool is_deep = row > MOST_BYTES_OF_BLOCK / MHA_PACKED_ROW_BLOCK;
    return p->weight.format == NULL && p->rows > MHA_UNPACKED_ROW_BLOCK &&
           (!mha_takes_unpacked(p) || (!is_shallow && !is_deep && !mha_packs_rows_by_chain(p)));
}

/* Bytes of the packed weight, 0 where packing it as a whole does not repay. */
static mha_status whole_size(const mha_linear_projection *p, size_t *bytes) {
    size_t packed;
    *bytes = 0;
    if (repays(p)) {
        MHA_TRY(mha_packed_size_of(p->dtype, &p->weight, &packed));
        *bytes = packed <= MOST_PACKED_BYTES ? packed : 0;
    }
    return MHA_OK;
}

mha_status mha_with_packed_weights(const mha_linear_projection *projections, int count,
                                   mha_workspace *workspace, mha_linear_projection *with_packed,
                                   mha_packed_weights *weights) {
    *weights = (mha_packed_weights){.projections = projections};
    for (int i = 0; i < count; i++) {
        size_t size;
        void *piece = NULL;
        with_packed[i] = projections[i];
        MHA_TRY(whole_size(&projections[i], &size));
        if (size == 0) {
            continue;
        }
        MHA_TRY(mha_workspace_take(workspace, size, &piece));
        weights->any = true;
        weights->packed[i] = piece;
        with_packed[i].weight.data = piece;
        with_packed[i].weight.format = mha_panels_of(projections[i].dtype);
    }
    return MHA_OK;
}

/* Task of mha_packed_weights: one panel of one of the weights. */
static void pack_weight_task(void *context, int64_t task, mha_worker *worker) {
    const mha_packed_weights *weights = context;
    const mha_linear_projection *p = weights->projections;
    const mha_panel_format *format = mha_panels_of(p->dtype);
    int i = 0;
    for (; task >= mha_panel_count(format, p[i].weight.out); i++) {
        task -= mha_panel_count(format, p[i].weight.out);
    }
    if (weights->packed[i] != NULL) {
        format->pack(&p[i].weight, task * format->columns,
                     weights->packed[i] + mha_panel_offset(p[i].dtype, &p[i].weight, task),
                     &worker->checkpoint);
    }
}

mha_status mha_pack_weights(mha_packed_weights *weights, int count, int num_threads,
                            mha_execution *execution) {
    int64_t panels = 0;
    if (!weights->any) {
        return MHA_OK;
    }
    for (int i = 0; i < count; i++) {
        const mha_linear_projection *p = &weights->projections[i];
        panels += mha_panel_count(mha_panels_of(p->dtype), p->weight.out);
    }
    return mha_run_tasks(execution, panels, num_threads, pack_weight_task, weights);
}
