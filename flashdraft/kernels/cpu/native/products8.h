/* The exact integer sums of one tile of the 8-bit linear.
 *
 * GROUP inputs of one output lie side by side in a panel: 4, as dot8.h takes them, or 8 where the
 * processor multiplies two rows by two outputs at once. X_BIAS is dot8.h's.
 *
 * `x` and `weights` are the tile's first row and first panel, `stride` the inputs of both; sums
 * come in and go out as sum[row][vector of outputs]. `rows` and `panels` are constants wherever
 * this is inlined.
 */
#ifndef FLASHDRAFT_PRODUCTS8_H
#define FLASHDRAFT_PRODUCTS8_H

#include "dot8.h"
#include "panels.h"

typedef ivec Sums[MOST_ROWS][2 * VECTORS];

#if defined(__ARM_FEATURE_MATMUL_INT8)

#define GROUP 8
#define PAIRS (PANEL / 2) /* pairs of outputs in a panel */

/* An odd last row is paired with itself. */
ALWAYS_INLINE void add_products(Sums sum, const int8_t *x, const int8_t *weights, size_t stride,
                                const int rows, const int panels) {
    int32x4_t square[MOST_ROWS / 2][2 * PAIRS]; /* [row, output]: 00 01 10 11 */
    for (int r = 0; r < rows; r += 2)
        for (int pair = 0; pair < panels * PAIRS; pair++) square[r / 2][pair] = vdupq_n_s32(0);
    for (size_t k = 0; k < stride; k += GROUP) {
        int8x16_t two[MOST_ROWS / 2];
        for (int r = 0; r < rows; r += 2) {
            const int8_t *other = r + 1 < rows ? x + (r + 1) * stride : x + r * stride;
            two[r / 2] = vcombine_s8(vld1_s8(x + r * stride + k), vld1_s8(other + k));
        }
        for (int pair = 0; pair < panels * PAIRS; pair++) {
            const int8x16_t w = vld1q_s8(weights + (pair / PAIRS * stride + k) * PANEL +
                                         pair % PAIRS * 2 * GROUP);
            for (int r = 0; r < rows; r += 2)
                square[r / 2][pair] = vmmlaq_s32(square[r / 2][pair], two[r / 2], w);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels * VECTORS; v++) {
            const int32x4_t left = square[r / 2][2 * v], right = square[r / 2][2 * v + 1];
            sum[r][v] += (ivec)(r % 2 ? vcombine_s32(vget_high_s32(left), vget_high_s32(right))
                                      : vcombine_s32(vget_low_s32(left), vget_low_s32(right)));
        }
}

#else

#define GROUP 4
#define BLOCK 16 /* inputs per step of the inner loop */

ALWAYS_INLINE void add_products(Sums sum, const int8_t *x, const int8_t *weights, size_t stride,
                                const int rows, const int panels) {
    const int8_t *ahead = weights + panels * stride * PANEL; /* hard to foresee for the hardware */
    for (size_t k = 0; k < stride; k += BLOCK) {
        Block block[MOST_ROWS];
        for (int r = 0; r < rows; r++) block[r] = load_block(x + r * stride + k);
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; quad++) {
            for (int line = quad; line < panels * PANEL * BLOCK / 64; line += 4)
                __builtin_prefetch(ahead + panels * k * PANEL + 64 * line);
            for (int v = 0; v < panels * VECTORS; v++) {
                const int8_t *four = weights + (v / VECTORS * stride + k + 4 * quad) * PANEL +
                                     v % VECTORS * LANES * 4;
                for (int r = 0; r < rows; r++) sum[r][v] = dot8(sum[r][v], four, block[r], quad);
            }
        }
    }
}

#endif
#endif
