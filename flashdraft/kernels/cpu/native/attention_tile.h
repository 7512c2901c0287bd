/* One tile of attention: some query rows of one sequence, with all the query heads that share one
 * key head. The (row, head) pairs of a tile are its lanes; they lie side by side in vectors, so
 * that one key serves them all.
 *
 * A tile passes through three stages: score, exponentiate, finish. Each stage is cut into parts
 * that different threads may take, the first two by keys, the last by dimensions of the head; all
 * parts of a stage come before any of the next. Nothing a lane computes depends on its tile or on
 * the cuts: a score is one chain of multiply-adds over the dimensions; the sum of the weights and
 * the weighted sum of the values are chains over the visible keys in order of their index.
 */
#ifndef FLASHDRAFT_ATTENTION_TILE_H
#define FLASHDRAFT_ATTENTION_TILE_H

#include "kernels.h"

#define TREE_ROWS 64 /* of a sequence: bits of its rows' ancestors */

typedef struct {
    char *memory;
    size_t bytes;
} Scratch;

typedef struct {
    const Attention *call;
    size_t sequence, kv_head;
    size_t first, last;             /* rows, counted within the sequence */
    size_t parts;                   /* into which each stage is cut */
    size_t group;                   /* query heads per key head */
    size_t context, num_keys;       /* of the sequence */
    const int32_t *ahead;           /* of the sequence's rows, or NULL */
    const int64_t *ancestors;       /* likewise; NULL too where the tile's rows are in order */
    const int32_t *depths;          /* with ancestors */
    size_t lanes, padded_lanes;     /* lane = (row - first) * group + head within the group */
    size_t low;                     /* the first key that any row sees; `index` = key - low */
    size_t count;                   /* of keys from there to the last that any row sees */
    size_t common_low, common_high; /* indices of the keys that every row sees */
    size_t *offset;                 /* [count, padded]: of each key in the cache */
    float *query;                   /* [head_dim][padded_lanes] */
    float *weight;                  /* [count, padded][padded_lanes]: scores, then e^score */
    float *peak;                    /* [parts][padded_lanes]: the largest scores */
    float *sum;                     /* [lanes][head_dim]: of the weighted values */
} Tile;

/* The first key that the row with key index `own` sees. */
size_t first_seen(const Attention *call, size_t own);

size_t query_length(const Attention *call, size_t sequence);

/* Prepares a tile whose call, sequence, kv_head, first, last and parts are set. The scratch grows
 * as needed and belongs to the caller; false if there is no memory for it. */
int tile_open(Tile *tile, Scratch *scratch);

void tile_score(Tile *tile, size_t part);
void tile_exponentiate(Tile *tile, size_t part);
void tile_finish(Tile *tile, size_t part); /* adds the values and writes the output */

#endif
