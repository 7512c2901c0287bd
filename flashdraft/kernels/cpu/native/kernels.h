/* The kernels that module.c offers to Python, once for each level. None of them knows about Python.
 *
 * All matrices are row-major and dense. Every function keeps the law of the exactness contract: a
 * row's result depends on that row's inputs alone, never on the number of rows, on their order, on
 * the number of threads or on pages.
 */
#ifndef FLASHDRAFT_KERNELS_H
#define FLASHDRAFT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Outputs of a linear layer whose weights lie side by side. */
#if defined(__AVX512F__)
#define PANEL 16
#else
#define PANEL 8
#endif

typedef enum {
    DONE = 0,
    NO_MEMORY,
    BAD_POSITION, /* a position outside the RoPE table */
    BAD_SLOT,     /* a slot outside the cache */
    BAD_VIEW,     /* query_start, context_lens, block_table and ahead contradict each other */
    BAD_PAGE,     /* a block table entry outside the cache */
} Status;

typedef struct {
    const float *x;      /* [rows, in] */
    const float *panels; /* [panels, in, PANEL]; see panels.h */
    float *y;            /* [rows, out] */
    size_t rows, in, out;
    int threads;
} LinearFloat;

typedef struct {
    const float *x;       /* [rows, in] */
    const int8_t *panels; /* [panels, padded_in / GROUP, PANEL, GROUP]; padded_in: 64 times n */
    const float *scale;   /* [panels * PANEL] */
    const int32_t *start; /* [panels * PANEL]: see dot8.h */
    float *y;             /* [rows, out] */
    size_t rows, in, out;
    int threads;
} LinearInt8;

typedef enum { SILU = 0, GELU_TANH = 1 } GateKind;

/* A row-wise operation; the fields it does not need are 0. */
typedef struct {
    const float *x;      /* [rows, columns]; [rows, 2 * columns] for gated */
    const float *delta;  /* [rows, columns]: add_rms_norm */
    const float *weight; /* [columns], or NULL for none: the norms */
    float *total;        /* [rows, columns]: add_rms_norm's sum */
    float *out;          /* [rows, columns]; [rows, columns padded to 64 times n] for rotate_rows */
    int64_t *index;      /* [rows]: argmax */
    size_t rows, columns;
    float eps, cap;
    GateKind kind;
    int threads;
} Rows;

typedef struct {
    const float *qkv;                    /* [rows, (heads + kv_parts * kv_heads) * head_dim] */
    const float *q_norm, *k_norm;        /* [head_dim], or NULL for no norm */
    const float *cos, *sin;              /* [positions, head_dim / 2] */
    const int64_t *position, *slot;      /* [rows] */
    float *key_cache, *value_cache;      /* [slots, kv_heads, head_dim] */
    float *query;                        /* [rows, heads, head_dim] */
    size_t rows, heads, kv_heads, head_dim;
    size_t num_positions, num_slots;
    int norm_values, share_kv;
    float eps;
    int threads;
} PrepareQKV;

typedef struct {
    const float *query;           /* [rows, heads, head_dim] */
    const float *keys, *values;   /* [pages, page_size, kv_heads, head_dim] */
    const int32_t *query_start;   /* [sequences + 1] */
    const int32_t *context_lens;  /* [sequences] */
    const int32_t *block_table;   /* [sequences, table_width] */
    const int64_t *ancestors;     /* [rows]: bit j = row j of its sequence; or NULL: no trees */
    const int32_t *depths;        /* [rows]: of its sequence's rows it follows; with ancestors */
    const int32_t *ahead;         /* [rows]: of those after it, how many a row sees; or NULL */
    float *out;                   /* [rows, heads, head_dim] */
    size_t rows, sequences, table_width;
    size_t pages, page_size, heads, kv_heads, head_dim;
    float scale;
    size_t window; /* 0 = none */
    int causal;    /* ahead and ancestors are given only where it is 1 */
    int threads;
} Attention;

void linear_float(const LinearFloat *call);
Status linear_int8(const LinearInt8 *call);
extern const int int8_group;        /* GROUP of products8.h */
void rotate_rows(const Rows *call); /* as linear_int8 turns its rows: for its weights */

void rms_norm_row(const float *x, const float *weight, float *out, size_t columns, float eps);
void rms_norm(const Rows *call);
void add_rms_norm(const Rows *call);
void gated(const Rows *call);
void softmax(const Rows *call);
void softcap(const Rows *call);
void argmax(const Rows *call);

Status prepare_qkv(const PrepareQKV *call);
Status attention(const Attention *call);

#endif
