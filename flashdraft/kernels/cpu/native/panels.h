/* How a linear layer is cut into tiles, for both number formats.
 *
 * Weights lie in panels of PANEL outputs, so that one vector load serves LANES different outputs.
 * A tile is up to 8 rows by one panel, or, for few rows, by a pair of panels: there are then enough
 * independent sums to keep the multipliers busy. The number of panels is always even.
 *
 * A file that includes this defines `tile` and then writes DEFINE_TILES.
 */
#ifndef FLASHDRAFT_PANELS_H
#define FLASHDRAFT_PANELS_H

#include "kernels.h"
#include "pool.h"
#include "vectors.h"

#define VECTORS (PANEL / LANES)
#define MOST_ROWS 8

static inline size_t count_pairs(size_t out) { return (out + 2 * PANEL - 1) / (2 * PANEL); }

/* Rows that are walked through together for every panel, so that they stay in the cache. */
static inline size_t rows_in_cache(size_t bytes_per_row) {
    const size_t rows = 256 * 1024 / (bytes_per_row + 1);
    return rows < 2 * MOST_ROWS ? 2 * MOST_ROWS : rows / MOST_ROWS * MOST_ROWS;
}

/* Writes one row's outputs of one or two panels, less those that only pad the last panel. */
ALWAYS_INLINE void store_outputs(float *y, size_t out, size_t panel, const int panels,
                                 const vec *values) {
    const size_t first = panel * PANEL, end = first + panels * PANEL;
    if (first >= out) return;
    if (end <= out)
        for (int v = 0; v < panels * VECTORS; v++) store(y + first + v * LANES, values[v]);
    else
        memcpy(y + first, values, (out - first) * sizeof(float));
}

/* Rows first .. last - 1, for all panels; the units of this job are pairs of panels. */
typedef struct {
    const void *state;
    size_t first, last;
} RowsJob;

#define TILE_OF(rows, panels)                                                                  \
    __attribute__((noinline)) static void tile_##rows(const void *state, size_t row,           \
                                                      size_t panel) {                          \
        tile(state, row, panel, rows, panels);                                                 \
    }

/* One function for each number of rows, and `multiply_rows`, which walks all rows through all
 * panels. */
#define DEFINE_TILES                                                                           \
    TILE_OF(1, 2)                                                                              \
    TILE_OF(2, 2)                                                                              \
    TILE_OF(3, 2)                                                                              \
    TILE_OF(4, 2)                                                                              \
    TILE_OF(5, 1)                                                                              \
    TILE_OF(6, 1)                                                                              \
    TILE_OF(7, 1)                                                                              \
    TILE_OF(8, 1)                                                                              \
    static void multiply_pairs(const void *rows_job, size_t from, size_t to) {                 \
        static void (*const tiles[])(const void *, size_t, size_t) = {                         \
            tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8};                   \
        const RowsJob *job = rows_job;                                                         \
        for (size_t panel = 2 * from; panel < 2 * to; panel += 2)                              \
            for (size_t row = job->first; row < job->last; row += MOST_ROWS) {                 \
                const size_t left = job->last - row, rows = left < MOST_ROWS ? left : MOST_ROWS; \
                tiles[rows - 1](job->state, row, panel);                                       \
                if (rows > 4) tiles[rows - 1](job->state, row, panel + 1);                     \
            }                                                                                  \
    }                                                                                          \
    static void multiply_rows(const void *state, size_t rows, size_t block, size_t out,        \
                              int threads) {                                                   \
        for (size_t first = 0; first < rows; first += block) {                                 \
            const RowsJob job = {state, first, first + block < rows ? first + block : rows};   \
            run_parallel(multiply_pairs, &job, count_pairs(out), threads);                     \
        }                                                                                      \
    }

#endif
