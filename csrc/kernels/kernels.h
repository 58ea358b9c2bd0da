/* The contract between the drivers in core/ and the kernels: one table of functions for each
 * element type and instruction set. docs/kernels.md says how to add one. */
#ifndef MHA_KERNELS_H
#define MHA_KERNELS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "mha/attention.h"
#include "mha/execution.h"
#include "mha/tensor.h"

/* How sums are blocked, from key or column 0 on: over keys, over the columns of a head in a dot
 * product, over the depth of a matrix product. Each chain is one of FMAs from zero; a block of keys
 * joins its chains by plain additions. Part of the definition of a result's bits, and of its
 * accuracy: docs/kernels.md. */
enum { MHA_KEY_BLOCK = 128, MHA_KEY_CHAIN = 64, MHA_HEAD_DIM_CHAIN = 32, MHA_DEPTH_CHAIN = 128 };
/* The most rows that are multiplied with a weight as it lies, before packing it repays: its columns
 * side by side, or transposed. */
enum { MHA_ROWS_IN_PLACE = 16, MHA_ROWS_TRANSPOSED = 8 };

/* The widest block of queries of any kernel set, and its vectors. */
enum { MHA_MAX_QUERY_BLOCK = 48, MHA_QUERY_VECTORS = 3 };

/* Sums over queries, in the gradients of key and value, are chains of so many. */
enum { MHA_QUERY_CHAIN = MHA_MAX_QUERY_BLOCK };

/* The most blocks of queries that go through the keys of a head together. */
enum { MHA_MAX_JOINT_BLOCKS = 4 };

/* The most columns of a head: so no scratch size overflows. */
#define MHA_MOST_COLUMNS ((int64_t)1 << 40)

#define MHA_MANTISSA_BITS (((uint64_t)1 << 52) - 1)

/* What a kernel's scores still have to be multiplied by (scores.inc), between 1 and 2: the mantissa
 * of scale; a cap bends scores of their own size. */
static inline double mha_score_unit(double scale, double softcap) {
    const uint64_t one_bits = (uint64_t)1023 << 52;
    uint64_t pattern;
    double unit = 1;
    if (softcap == 0) {
        memcpy(&pattern, &scale, sizeof pattern);
        pattern = (pattern & MHA_MANTISSA_BITS) | one_bits;
        memcpy(&unit, &pattern, sizeof unit);
    }
    return unit;
}

typedef struct mha_dropout {
    uint32_t threshold; /* 0: no dropout */
    uint64_t seed;
    int64_t head, batch;
    int64_t first_query, first_key; /* what query 0 and key 0 count as */
} mha_dropout;

/* What makes query . key a weight, for all queries of a head: filled in one place
 * (core/attention/scores.c), and read by the forward kernels, the join of chunks and the
 * gradients. Strides of bias count elements. */
typedef struct mha_scores {
    mha_score_function function;
    const void *w_v;       /* of additive scores: (head_dim,) */
    double scale, softcap; /* scale 1 of additive scores; softcap 0: none */
    const uint8_t *mask;   /* of mask_first_query and key 0, or NULL */
    int64_t mask_first_query, mask_query_stride, mask_key_stride;
    const mha_block_mask *block_mask; /* or NULL */
    int64_t first_block_row;          /* of the head, among the rows of block_mask */
    const void *bias;                 /* of bias_first_query and key 0, or NULL */
    int64_t bias_first_query, bias_query_stride, bias_key_stride;
    int64_t query_offset;      /* the position of query 0 among the keys */
    int64_t keep_first;        /* 0, or: keys from it on are hidden from query i in front of ... */
    int64_t window_left;       /* ... i + query_offset - window_left, */
    int64_t dropped;           /* and those before it are so much farther away than they stand */
    const void *alibi;         /* the head's number, or NULL */
    const void *relative_bias; /* (2 * farthest + 1,), the head's row, or NULL */
    int64_t farthest;          /* the distance that its ends serve, and all beyond */
    const void *sink;          /* the head's number, or NULL */
    bool uniform_empty_rows;   /* what a query gets that sees nothing: the mean of all values */
    mha_dropout dropout;
    double gate; /* multiplies the output */
} mha_scores;

/* Whether mask, bias or what the window leaves behind may hide whole blocks of keys. */
static inline bool mha_may_hide_blocks(const mha_scores *scores) {
    return scores->mask != NULL || scores->block_mask != NULL || scores->bias != NULL ||
           scores->keep_first > 0;
}

/* Query i of a block sees keys begin[i] <= j < end[i] that mask and bias leave visible. */
typedef struct mha_key_ranges {
    int64_t begin[MHA_MAX_QUERY_BLOCK], end[MHA_MAX_QUERY_BLOCK];
} mha_key_ranges;

/* What a mask or a bias hides of a block of queries and a block of keys: a mha_block_visibility. */
typedef enum mha_block_visibility {
    MHA_UNKNOWN_VISIBILITY,
    MHA_HIDDEN, /* all of it */
    MHA_MIXED,
    MHA_VISIBLE /* all of it */
} mha_block_visibility;

/* What has been found out of a block of queries so far: a byte for so many keys, from key 0 on;
 * NULL where there is no mask or bias, or it has no number for each pair. */
typedef struct mha_known_blocks {
    _Atomic uint8_t *mask, *bias;
    int64_t keys, end; /* end: nobody asks for what lies behind */
} mha_known_blocks;

/* Between arrays of halves and float32, which alone has them: a row of `count` numbers. */
typedef void mha_read_row(const void *from, mha_storage storage, void *to, int64_t count);
typedef void mha_write_row(const void *from, void *to, mha_storage storage, int64_t count);

/* Rows of an array that the thread needs soon: the kernel prefetches them, into the second cache,
 * while it computes. Stride and width are bytes. */
typedef struct mha_prefetch_rows {
    const char *first;
    int64_t count, stride, width;
} mha_prefetch_rows;

/* One head and a block of consecutive queries. Strides count elements; the last axes of query, key,
 * value and output are contiguous. Keys or values by columns are (columns, key_len) instead, and
 * their stride is that of a column; they have no pages. */
typedef struct mha_attention_block {
    mha_checkpoint *checkpoint; /* of the thread; asked again and again, in every dimension */
    int64_t query_len;          /* of this block, at most query_block of the kernel set */
    int64_t key_len, head_dim, value_head_dim;
    int64_t first_query; /* position of this block among all queries */
    const void *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    mha_storage query_storage, key_storage, value_storage, output_storage;
    bool key_by_columns, value_by_columns;
    mha_pages pages;    /* of key and value; stored_key is 0 then */
    bool brings_values; /* prefetches them before they are needed: no block before has read them */
    int64_t stored_key; /* the one that key and value begin with, and their gradients */
    const int64_t *key_begin, *key_end; /* (query_len,): mha_key_ranges of the caller */
    bool sees_all_keys;                 /* every query, by these */
    mha_known_blocks known;
    mha_scores scores;

    void *output; /* (query_len, value_head_dim) */
    int64_t output_stride;
    void *weights;                     /* (query_len, key_len), contiguous, or NULL */
    void *lse;                         /* (query_len,) or NULL */
    void *maximum, *denominator;       /* (query_len,) both, or NULL: of softmax */
    const mha_prefetch_rows *prefetch; /* (prefetch_count,) */
    int prefetch_count;
} mha_attention_block;

/* A sum in double precision, and what its additions have rounded off (Neumaier 1974). */
typedef struct mha_compensated_sum {
    double sum, lost;
} mha_compensated_sum;

static inline void mha_add_compensated(mha_compensated_sum *to, double added) {
    const double total = to->sum + added, of_added = total - to->sum;
    to->lost += (to->sum - (total - of_added)) + (added - of_added);
    to->sum = total;
}

/* What is lost is NaN where the sum is no longer finite. */
static inline double mha_value_of(mha_compensated_sum sum) {
    return sum.lost == sum.lost ? sum.sum + sum.lost : sum.sum;
}

/* Over the keys of a row, each times a number of its own: the gradients of its scores, and its
 * weights. */
typedef struct mha_moments {
    double gradients, weights;
} mha_moments;

/* What a row adds to the gradients that are one row a head (core/attention/per_head_backward.c). */
typedef struct mha_row_sums {
    double total;               /* of the gradients of its scores */
    double sink;                /* the gradient of its sink */
    mha_moments distances;      /* of query and key */
    mha_moments before, behind; /* 1 where the key is as far before or behind as the table ends */
} mha_row_sums;

/* The gradients of one head and up to MHA_QUERY_CHAIN consecutive queries, a chain from query 0 on.
 * `attention` has the output, maximum and denominator of the forward pass; its gate is 1. Gradients
 * that are NULL are not wanted. Only the keys first_key..end_key take part; first_key is a multiple
 * of MHA_KEY_CHAIN. grad_query and grad_w_v are written, or added to where adds_to_query; grad_key
 * and grad_value are added to, or written where writes_keys; the others are added to. */
typedef struct mha_attention_backward_block {
    mha_attention_block attention;
    int64_t first_key, end_key;
    bool adds_to_query, writes_keys;
    const void *grad_output; /* (query_len, value_head_dim) */
    int64_t grad_output_stride;
    const void *grad_lse; /* (query_len,) or NULL */
    void *grad_query;     /* (query_len, head_dim) */
    int64_t grad_query_stride;
    void *grad_w_v; /* (query_len, head_dim): each query's part of grad w_v */
    int64_t grad_w_v_stride;
    void *grad_key, *grad_value; /* (key_len, head_dim), (key_len, value_head_dim), as key lies */
    int64_t grad_key_stride, grad_value_stride;
    void *grad_bias; /* (query_len, key_len), strides 0 where it was repeated; NULL without keys */
    int64_t grad_bias_query_stride, grad_bias_key_stride;
    mha_row_sums *row_sums;             /* (query_len,): written, or added to as grad_query */
    mha_compensated_sum *diagonal_sums; /* one for each of `diagonals` distances from ... */
    int64_t first_diagonal, diagonals;  /* ... the first on, key - query - query_offset */
} mha_attention_backward_block;

/* The most rows of one call of the few_queries kernel. */
enum { MHA_MAX_FEW_ROWS = 16 };

/* One query of one head. Weights, lse, maximum and denominator as in mha_attention_block; of
 * key_len, 1, 1 and 1 numbers. */
typedef struct mha_few_queries_row {
    const void *query;          /* (head_dim,) */
    int64_t query_index;        /* among all queries */
    int64_t key_begin, key_end; /* it sees key_begin <= j < key_end */
    mha_scores scores;          /* of its head */
    void *output;               /* (value_head_dim,) */
    void *weights, *lse, *maximum, *denominator;
    bool is_finite; /* the output that was written */
} mha_few_queries_row;

/* A few queries that share a key head, and see keys first_key..end_key; first_key is a multiple of
 * MHA_KEY_BLOCK. Where several tasks share the keys of blocks first_block..end_block, counted from
 * key 0, a round of them, `blocks` is what they leave for each other, and `state` what a round
 * leaves for the next one: blocks_size and state_size bytes. */
typedef struct mha_few_queries_block {
    mha_checkpoint *checkpoint;
    int64_t rows, head_dim, value_head_dim, key_len;
    int64_t first_key, end_key;
    const void *key, *value; /* of key 0 */
    int64_t key_stride, value_stride;
    mha_storage query_storage, key_storage, value_storage, output_storage;
    bool key_by_columns, value_by_columns;
    mha_pages pages;
    bool from_memory; /* caches do not hold the keys and values of the call */
    int64_t first_block, end_block;
    void *blocks, *state;
    bool heads_mask_alike;       /* mask and bias are the same for the heads of all rows, and ... */
    mha_attention_block queries; /* ... what they hide from all queries of one head: its scores,
                                    queries and known blocks alone are set */
    mha_few_queries_row row[MHA_MAX_FEW_ROWS];
} mha_few_queries_block;

/* One query of any head, over keys of that head. Lse, maximum and denominator as in
 * mha_attention_block; of one number each. */
typedef struct mha_few_keys_row {
    const void *query, *key, *value; /* (head_dim,), and key 0 */
    const void *next_key; /* key 0 of the lane in the thread's next task, or NULL; if from_memory */
    const uint8_t *mask;  /* of key 0, or NULL */
    const void *bias;     /* the same */
    int64_t key_begin, key_end; /* it sees key_begin <= j < key_end */
    void *output;               /* (value_head_dim,); NULL: of a lane that is not in use */
    void *lse, *maximum, *denominator;
    bool is_finite; /* the output that was written, where not all of the block's are */
} mha_few_keys_row;

enum { MHA_MAX_ROWS_OF_HEAD = 8 }; /* of a block whose rows are all queries of some heads */

/* Queries over few keys, so many vectors of query_lanes of them. Either the lanes of a vector are
 * heads, and `shared` vectors, one behind the other, are of the same ones. Or `shared` rows, one
 * behind the other, are all queries of a head, up to MHA_MAX_ROWS_OF_HEAD, of so many heads. Of
 * the scores scale alone is read. */
typedef struct mha_few_keys_block {
    mha_checkpoint *checkpoint;
    int vectors, shared;
    int heads;                                 /* 0 where lanes are heads */
    int64_t key_len, head_dim, value_head_dim; /* key_len: 1 to MHA_KEY_CHAIN */
    bool key_by_columns, value_by_columns;     /* (columns, key_len), strides between columns */
    int64_t key_stride, value_stride;
    mha_storage query_storage, key_storage, value_storage, output_storage; /* none in blocks */
    mha_scores scores;
    int64_t mask_key_stride, bias_key_stride;
    bool sees_all_keys; /* every row, by key_begin and key_end */
    bool is_finite;     /* all of the output that was written */
    bool from_memory;   /* keys and values; each row has its next_key then */
    mha_few_keys_row row[MHA_MAX_QUERY_BLOCK];
} mha_few_keys_block;

/* c (rows, columns) = a (rows, depth) @ one panel (depth, columns) + bias. The panel is either a
 * packed one, zero-padded to full width, or columns of the weight itself: of any number and
 * strides, or of halves as many as a panel has, side by side. a is transposed where it lies as
 * (depth, rows), with a_stride between these. */
typedef struct mha_matmul_block {
    mha_checkpoint *checkpoint;
    int64_t rows, depth, columns; /* packed columns of several panels, of which no row is empty,
                                     only where the format says in_one_go */
    const void *a;
    int64_t a_stride;
    mha_storage a_storage; /* halves only where it is not transposed, or packed */
    bool transposed;
    bool packs_rows; /* a transposed, of a weight that is not packed: a is packed chain by chain */
    const void *arranged; /* a as mha_matmul_kernels.rows.arrange made it, or NULL */
    const void *panel;
    mha_storage panel_storage;
    bool unpacked;                       /* the panel is the weight as it lies, of any strides */
    int64_t panel_stride, column_stride; /* column_stride: where it is not packed */
    void *scratch;                       /* where it is not packed: unpacked_scratch_size bytes */
    const void *bias;                    /* (columns,) or NULL */
    void *c;
    int64_t c_stride;
} mha_matmul_block;

/* Between two rows of depth of an a that lies transposed and was packed: numbers of `item` bytes,
 * an odd number of cache lines, so that the rows of a chain spread over all sets of the cache. */
static inline int64_t mha_packed_rows_stride(int64_t rows, int64_t item) {
    enum { BYTES_OF_A_LINE = 64 };
    const int64_t of_a_line = BYTES_OF_A_LINE / item;
    return (mha_divide_up(rows, of_a_line) | 1) * of_a_line;
}

enum { MHA_WAYS_OF_CACHE = 8 }; /* lines that a set of the first cache holds */

/* Whether rows so many bytes apart have their lines in one set of the first cache: more than
 * MHA_WAYS_OF_CACHE rows that are read together would drive each other out. */
static inline bool mha_rows_share_a_set(int64_t bytes) {
    enum { BYTES_OF_A_WAY = 4096 };
    return bytes % BYTES_OF_A_WAY == 0;
}

/* A block of a panel that is quantised: a float16 scale a column, then the numbers row by row as
 * int8; or two of 4 bits in a byte, whose upper half is that of the next row. */
static inline int64_t mha_quantised_byte_rows(mha_storage storage) {
    return storage == MHA_Q8_0 ? MHA_QUANTISED_ROWS : MHA_QUANTISED_ROWS / 2;
}
static inline int64_t mha_quantised_block_bytes(mha_storage storage, int64_t columns) {
    return columns * ((int64_t)sizeof(uint16_t) + mha_quantised_byte_rows(storage));
}

/* Some blocks of a panel with so many columns, one below the other: rows in all. */
typedef struct mha_blocks {
    const void *first;
    mha_storage storage;
    int64_t rows, columns;
} mha_blocks;

/* From row `first` of a panel on, which begins a block. */
static inline mha_blocks mha_blocks_of(const mha_matmul_block *block, int64_t columns,
                                       int64_t first, int64_t rows) {
    const int64_t bytes = mha_quantised_block_bytes(block->panel_storage, columns);
    return (mha_blocks){(const char *)block->panel + first / MHA_QUANTISED_ROWS * bytes,
                        block->panel_storage, rows, columns};
}

typedef struct mha_merge_block {
    mha_checkpoint *checkpoint;
    int64_t parts, first_row, end_row, width;
    const void *const *outputs; /* each (rows, width) */
    const void *const *lses;    /* each (rows,) */
    void *output, *lse;
    mha_storage outputs_storage, output_storage;
    void *shares; /* scratch for `parts` elements */
} mha_merge_block;

/* to[column][row] = from[row][column]. Strides count numbers from a row to the next. */
typedef void mha_transpose(const void *from, int64_t from_stride, int64_t rows, int64_t columns,
                           void *to, int64_t to_stride);

typedef struct mha_attention_kernels {
    int64_t query_block;        /* the most queries of one call */
    int64_t query_lanes;        /* queries in a vector; blocks are best a multiple of it */
    int64_t most_few_gradients; /* queries whose gradients have the keys in the lanes */
    size_t (*scratch_size)(int64_t head_dim, int64_t value_head_dim, int blocks);
    /* `count` blocks of one head: a block of keys is read once for all of them. */
    void (*forward)(const mha_attention_block *blocks, int count, void *scratch);
    size_t (*few_keys_scratch_size)(int64_t key_len, int64_t head_dim, int64_t value_head_dim);
    void (*few_keys)(mha_few_keys_block *block, void *scratch); /* also enough for one block */
    /* Whether writes_keys may be set: all that the kernel does not look at is set already. */
    bool (*backward_may_write_keys)(const mha_attention_backward_block *block);
    size_t (*backward_scratch_size)(int64_t head_dim, int64_t value_head_dim);
    void (*backward)(const mha_attention_backward_block *block, void *scratch);
    mha_transpose *transpose;
} mha_attention_kernels;

/* `forward` computes all of it. Else in each round first `score` and then `weigh` take all blocks
 * between them, each of them blocks first..end, and `join` is the round's end. The bits are the
 * same. */
typedef struct mha_few_queries_kernels {
    size_t (*scratch_size)(int64_t head_dim, int64_t value_head_dim);
    void (*forward)(mha_few_queries_block *block, void *scratch);
    size_t (*blocks_size)(int64_t rows, int64_t blocks, int64_t value_head_dim);
    void (*score)(const mha_few_queries_block *block, int64_t first, int64_t end, void *scratch);
    void (*weigh)(const mha_few_queries_block *block, int64_t first, int64_t end, void *scratch);
    size_t (*state_size)(int64_t rows, int64_t value_head_dim);
    void (*join)(mha_few_queries_block *block, bool is_last, void *scratch);
    void (*merge)(const mha_merge_block *block);
} mha_few_queries_kernels;

/* How weights are packed: the format of one kernel set and element type. */
struct mha_panel_format {
    int64_t columns;      /* of a panel */
    int64_t row_bytes;    /* that a panel takes for each row of the weight */
    int64_t row_multiple; /* rows are padded to it; those of halves are not */
    bool is_plain;        /* its rows are numbers side by side, as those of a weight may be */
    int64_t in_one_go;    /* panels of numbers or blocks that one row is multiplied by */
    /* Columns first_column.. of a strided weight as one panel, zeros behind the last; of halves as
     * they are, so that its rows are that much shorter. */
    void (*pack)(const mha_weight *weight, int64_t first_column, void *panel,
                 mha_checkpoint *checkpoint);
    /* The way back: `columns` columns of a panel of a packed weight, to rows row_bytes apart. */
    void (*unpack)(const mha_weight *packed, const void *panel, int64_t columns, void *to,
                   int64_t row_bytes, mha_checkpoint *checkpoint);
};

/* Rows of a in a form of the kernel set's own, made once for all panels that they are multiplied
 * by; a set without one has no `arrange`. Rows and depth are padded to `multiple`. */
typedef struct mha_row_format {
    int64_t multiple, item; /* item: bytes of a number */
    void (*arrange)(const mha_matmul_block *block, void *to);
} mha_row_format;

typedef struct mha_matmul_kernels {
    mha_panel_format panels; /* what multiply reads */
    mha_row_format rows;
    /* Of a block whose weight is not packed: where panels are plain. */
    size_t (*unpacked_scratch_size)(int64_t rows, int64_t depth, bool packs_rows);
    void (*multiply)(const mha_matmul_block *block);
} mha_matmul_kernels;

/* Loops over numbers: elementwise.inc. */
typedef struct mha_elementwise_kernels {
    mha_read_row *read_row; /* storage.inc */
    mha_write_row *write_row;
    /* to (rows, columns), of the columns from `column` on: whole vectors. Of float32 alone. */
    void (*read_blocks)(const mha_blocks *blocks, int64_t column, int64_t columns, void *to);
    double (*read)(const void *numbers, int64_t at);
    void (*write)(void *numbers, int64_t at, double number);
    void (*fill)(void *to, double number, int64_t count);
    void (*add)(void *to, const void *from, int64_t count);
    void (*multiply)(void *to, const void *from, double factor, int64_t count);
    void (*multiply_each)(void *to, const void *from, const void *factors, int64_t count);
    /* s = sigmoid(x), and its slopes s (1 - s); math.inc. */
    void (*sigmoid)(const void *x, void *s, void *slopes, int64_t count);
    void (*add_products)(const void *a, const void *b, int64_t count, mha_compensated_sum *sum);
    bool (*all_finite)(const void *numbers, int64_t count);
    double (*rough_squares)(const void *numbers, int64_t count);
    bool (*all_zero)(const void *numbers, int64_t count);
} mha_elementwise_kernels;

/* What happens to the row of a head between its projection and attention. */
typedef struct mha_heads_kernels {
    /* rms_norm.inc, all in double precision, rounded once. Sums: of (x factor)^2, and of grad
     * (offset
     * + weight) x factor. */
    double (*sum_squares)(const void *x, double factor, int64_t count);
    double (*sum_products)(const void *grad, const void *weight, double offset, const void *x,
                           double factor, int64_t count);
    /* y = x factor (offset + weight); they may be the same. */
    void (*normalise)(const void *x, double factor, const void *weight, double offset, void *y,
                      int64_t count);
    /* grad becomes factor (grad (offset + weight) - x factor shared); before that, grad_weight, if
     * it is wanted, gets grad x factor added. */
    void (*normalise_back)(void *grad, const void *x, double factor, double shared,
                           const void *weight, double offset, double *grad_weight, int64_t count);
    /* rotary.inc: `pairs` pairs of columns are rotated in place. */
    void (*rotate)(void *row, const void *cosines, const void *sines, int64_t pairs,
                   bool interleaved);
} mha_heads_kernels;

/* For the tests: exp2 for x <= 0 (0 where it would be denormal), natural log, tanh. */
typedef struct mha_math_kernels {
    void (*exp2)(const void *x, void *y, int64_t count);
    void (*log)(const void *x, void *y, int64_t count);
    void (*tanh)(const void *x, void *y, int64_t count);
} mha_math_kernels;

/* All of one element type and kernel set. A set that is better at one operation alone has a table
 * of its own for that, and the others' addresses: all of them are constants. */
typedef struct mha_kernels {
    const mha_attention_kernels *attention;
    const mha_few_queries_kernels *few_queries;
    const mha_matmul_kernels *matmul;
    const mha_elementwise_kernels *elementwise;
    const mha_heads_kernels *heads;
    const mha_math_kernels *math;
} mha_kernels;

typedef struct mha_kernel_set {
    const char *name;
    const mha_kernels *of[MHA_NUM_DTYPES];
    /* Those of another set with half the lanes and the same bits, or NULL. */
    const mha_kernels *of_half_the_lanes[MHA_NUM_DTYPES];
} mha_kernel_set;

/* Every call from now on uses this set: mha_choose_kernels has asked whether it can run. */
void mha_use_kernel_set(const mha_kernel_set *set);

/* The kernels in use, chosen at the first call. */
const mha_kernels *mha_kernels_for(mha_dtype dtype);

/* Those for attention with so many rows in the lanes: where they fill no more than half of them,
 * vectors of half the size take less time. */
const mha_kernels *mha_kernels_for_lanes(mha_dtype dtype, int64_t rows);

#endif
