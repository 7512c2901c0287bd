/* Skinny float32 matrix product: each weight is read from memory once for up to 8 rows.
 *
 * An output is one chain of fused multiply-adds over k = 0 .. in - 1, whatever the tile it is
 * computed in; that is what makes all widths agree bit for bit.
 */
#include "kernels.h"
#include "panels.h"
#include "vectors.h"

/* `rows` and `panels` are constants wherever this is inlined. */
ALWAYS_INLINE void tile(const void *state, size_t row, size_t panel, const int rows,
                        const int panels) {
    const LinearFloat *call = state;
    const size_t in = call->in;
    const float *x = call->x + row * in, *weights = call->panels + panel * in * PANEL;
    vec sum[MOST_ROWS][2 * VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels * VECTORS; v++) sum[r][v] = (vec){0};
    size_t k = 0;
    for (; k + 4 <= in; k += 4) {
        Four part[MOST_ROWS];
        for (int r = 0; r < rows; r++) part[r] = load_four(x + r * in + k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            for (int v = 0; v < panels * VECTORS; v++) {
                const vec weight = load(weights + (v / VECTORS * in + k + i) * PANEL +
                                        v % VECTORS * LANES);
                for (int r = 0; r < rows; r++)
                    sum[r][v] = add_multiple(sum[r][v], weight, part[r], i);
            }
    }
    for (; k < in; k++)
        for (int v = 0; v < panels * VECTORS; v++) {
            const vec weight =
                load(weights + (v / VECTORS * in + k) * PANEL + v % VECTORS * LANES);
            for (int r = 0; r < rows; r++)
                sum[r][v] = add_product(sum[r][v], weight, splat(x[r * in + k]));
        }
    for (int r = 0; r < rows; r++)
        store_outputs(call->y + (row + r) * call->out, call->out, panel, panels, sum[r]);
}

DEFINE_TILES

void linear_float(const LinearFloat *call) {
    const size_t block = rows_in_cache(call->in * sizeof(float));
    multiply_rows(call, call->rows, block, call->out, call->threads);
}
