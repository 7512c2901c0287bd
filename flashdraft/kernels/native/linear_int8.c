/* Skinny matrix product with 8-bit weights and 8-bit activations: exact integer sums.
 *
 * The inputs are cut into groups; a group of a weight row and a group of an activation row have one
 * float scale each. Within a group the sum of products is an exact integer, and the groups of a row
 * are added in order, so no tile or width can change a bit. Activations are rounded to 8 bits here,
 * by row; weights come rounded.
 */
#include <stdlib.h>

#include "dot8.h"
#include "kernels.h"
#include "panels.h"

#define BLOCK 16             /* inputs per step of the inner loop */
#define WORTH_A_THREAD 16384 /* inputs to round below which one thread is faster than two */

typedef struct {
    const LinearInt8 *call;
    size_t padded_in, groups;
    int8_t *x;    /* [rows, padded_in] */
    float *scale; /* [rows, groups] */
} Quantized;

ALWAYS_INLINE ivec larger_size(ivec best, vec x) {
    const ivec size = (ivec)x & INT32_MAX;
    return (ivec)choose(size > best, (vec)size, (vec)best);
}

/* The largest absolute value. As integers, floats without sign keep their order, NaN comes last. */
static float largest_size(const float *x, size_t count) {
    ivec best[4] = {{0}};
    size_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int v = 0; v < 4; v++) best[v] = larger_size(best[v], load(x + i + v * LANES));
    for (; i + LANES <= count; i += LANES) best[0] = larger_size(best[0], load(x + i));
    if (i < count) best[0] = larger_size(best[0], load_part(x + i, count - i, 0.0f));
    for (int v = 1; v < 4; v++) best[0] = larger_size(best[0], (vec)best[v]);
    int32_t bits = best[0][0];
    for (int lane = 1; lane < LANES; lane++) bits = best[0][lane] > bits ? best[0][lane] : bits;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds one group to integers, ties to even; its scale is NaN if x holds one. */
static float quantize_group(const float *x, int8_t *restrict to, size_t count) {
    const float largest = largest_size(x, count);
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    for (size_t i = 0; i < count; i++) {
        union {
            float value;
            uint32_t bits; /* the low ones are the integer itself */
        } shifted = {x[i] * inverse + rounder};
        to[i] = (int8_t)(uint8_t)(shifted.bits ^ X_BIAS);
    }
    return largest / 127.0f;
}

static void quantize_rows(const void *quantized, size_t from, size_t to) {
    const Quantized *state = quantized;
    const size_t in = state->call->in, group = state->call->group;
    for (size_t row = from; row < to; row++) {
        int8_t *integers = state->x + row * state->padded_in;
        for (size_t g = 0; g < state->groups; g++) {
            const size_t first = g * group, count = in - first < group ? in - first : group;
            state->scale[row * state->groups + g] =
                quantize_group(state->call->x + row * in + first, integers + first, count);
        }
        memset(integers + in, 0, state->padded_in - in); /* meets weights of 0 */
    }
}

/* The exact sums of one group, from input `k` to input `end`. */
ALWAYS_INLINE void add_products(const Quantized *state, size_t row, size_t panel, size_t k,
                                size_t end, const int rows, const int panels,
                                ivec sum[][2 * VECTORS]) {
    const size_t stride = state->padded_in;
    const int8_t *weights = state->call->panels + panel * stride * PANEL;
    const int8_t *x = state->x + row * stride;
    for (; k < end; k += BLOCK) {
        Block block[MOST_ROWS];
        for (int r = 0; r < rows; r++) block[r] = load_block(x + r * stride + k);
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; quad++)
            for (int v = 0; v < panels * VECTORS; v++) {
                const int8_t *four = weights + (v / VECTORS * stride + k + 4 * quad) * PANEL +
                                     v % VECTORS * LANES * 4;
                for (int r = 0; r < rows; r++) sum[r][v] = dot8(sum[r][v], four, block[r], quad);
            }
    }
}

/* `rows` and `panels` are constants wherever this is inlined. */
ALWAYS_INLINE void tile(const void *quantized, size_t row, size_t panel, const int rows,
                        const int panels) {
    const Quantized *state = quantized;
    const LinearInt8 *call = state->call;
    const size_t groups = state->groups;
    vec totals[MOST_ROWS][2 * VECTORS], (*total)[2 * VECTORS] = totals;
    __asm__("" : "+r"(total)); /* leaves the registers to the sums: the totals stay in memory */
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels * VECTORS; v++) total[r][v] = (vec){0};
    for (size_t g = 0; g < groups; g++) {
        const size_t begin = g * call->group, left = state->padded_in - begin;
        ivec sum[MOST_ROWS][2 * VECTORS];
        for (int v = 0; v < panels * VECTORS; v++) {
            const size_t at = ((panel + v / VECTORS) * groups + g) * PANEL + v % VECTORS * LANES;
            const ivec start = X_BIAS ? (ivec)load((const float *)call->start + at) : (ivec){0};
            for (int r = 0; r < rows; r++) sum[r][v] = start;
        }
        add_products(state, row, panel, begin, begin + (left < call->group ? left : call->group),
                     rows, panels, sum);
        for (int r = 0; r < rows; r++) {
            const float scale = state->scale[(row + r) * groups + g];
            for (int v = 0; v < panels * VECTORS; v++)
                total[r][v] += __builtin_convertvector(sum[r][v], vec) * scale;
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < panels * VECTORS; v++)
            total[r][v] *= load(call->scale + panel * PANEL + v * LANES);
        store_outputs(call->y + (row + r) * call->out, call->out, panel, panels, total[r]);
    }
}

DEFINE_TILES

Status linear_int8(const LinearInt8 *call) {
    const size_t rows = call->rows;
    Quantized state = {.call = call};
    state.padded_in = (call->in + BLOCK - 1) / BLOCK * BLOCK;
    state.groups = (call->in + call->group - 1) / call->group;
    state.x = malloc(rows * state.padded_in + 1);
    state.scale = malloc(rows * state.groups * sizeof(float) + 1);
    const Status status = state.x && state.scale ? DONE : NO_MEMORY;
    if (status == DONE) {
        const int threads = rows * call->in >= WORTH_A_THREAD ? call->threads : 1;
        run_parallel(quantize_rows, &state, rows, threads);
        multiply_rows(&state, rows, rows_in_cache(state.padded_in), call->out, call->threads);
    }
    free(state.x);
    free(state.scale);
    return status;
}
