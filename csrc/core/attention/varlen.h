/* Ragged batches: one of their sequences as a problem of its own, and which one a task is of. */
#ifndef MHA_VARLEN_H
#define MHA_VARLEN_H

#include "mha/attention.h"

/* A sequence as scaled dot-product attention reads it. It refers to itself: not to be copied. */
typedef struct mha_sequence {
    mha_attention_options options;
    mha_attention attention;
} mha_sequence;

/* Once: what all sequences have in common. Then one sequence after the other. */
void mha_begin_sequences(const mha_varlen_attention *varlen, mha_sequence *sequence);
void mha_move_to_sequence(const mha_varlen_attention *varlen, int64_t number,
                          mha_sequence *sequence);

/* The rows starts[number]..starts[number + 1] of a tensor (heads, rows, columns), of which only
 * data and the number of rows are set; absent stays absent. */
void mha_move_to_rows(const mha_tensor *all, const int64_t *starts, int64_t number,
                      mha_tensor *rows);

/* The sequence of a task: first_task[s] <= task < first_task[s + 1]. */
int64_t mha_sequence_of_task(const int64_t *first_task, int64_t sequences, int64_t task);

/* `bytes` for each sequence, and for the end of the last one. */
mha_status mha_take_for_sequences(const mha_varlen_attention *varlen, size_t bytes,
                                  mha_workspace *workspace, void **piece) MHA_MUST_CHECK;

#endif
