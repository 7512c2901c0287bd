/* Skinny matrix product with 8-bit weights and 8-bit activations: exact integer sums.
 *
 * A row of activations is rotated (rotate.h), then rounded to 8 bits with one scale; a row of
 * weights comes so prepared. The sum of the products is an exact integer, so no tile and no width
 * can change a bit of it.
 */
#include <stdlib.h>

#include "kernels.h"
#include "panels.h"
#include "products8.h"
#include "rotate.h"

#define WORTH_A_THREAD 2048 /* inputs to round below which one thread is faster than two */

typedef struct {
    const LinearInt8 *call;
    size_t padded_in; /* a multiple of ROTATED */
    float *rotated;   /* [rows, padded_in] */
    int8_t *x;        /* [rows, padded_in] */
    float *scale;     /* [rows] */
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

/* Rounds one row to integers, ties to even; returns its scale, which is NaN if x holds one. */
static float round_row(const float *x, int8_t *restrict to, size_t count) {
    const float largest = largest_size(x, count);
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    for (size_t i = 0; i < count; i++) {
        union {
            float value;
            uint32_t bits; /* the low ones are the integer itself */
        } shifted = {add_product_of(rounder, x[i], inverse)};
        to[i] = (int8_t)(uint8_t)(shifted.bits ^ X_BIAS);
    }
    return largest / 127.0f;
}

static size_t pad(size_t in) { return (in + ROTATED - 1) / ROTATED * ROTATED; }

static void rotate_row(const float *x, size_t in, float *rotated) {
    for (size_t i = 0; i < in; i += ROTATED)
        rotate(x + i, in - i < ROTATED ? in - i : ROTATED, rotated + i);
}

static void rotate_some(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    for (size_t row = from; row < to; row++)
        rotate_row(call->x + row * call->columns, call->columns,
                   call->out + row * pad(call->columns));
}

void rotate_rows(const Rows *call) {
    run_parallel(rotate_some, call, call->rows, call->threads);
}

static void quantize_rows(const void *quantized, size_t from, size_t to) {
    const Quantized *state = quantized;
    const size_t in = state->call->in, padded = state->padded_in;
    for (size_t row = from; row < to; row++) {
        float *rotated = state->rotated + row * padded;
        rotate_row(state->call->x + row * in, in, rotated);
        state->scale[row] = round_row(rotated, state->x + row * padded, padded);
    }
}

/* `rows` and `panels` are constants wherever this is inlined. */
ALWAYS_INLINE void tile(const void *quantized, size_t row, size_t panel, const int rows,
                        const int panels) {
    const Quantized *state = quantized;
    const LinearInt8 *call = state->call;
    const size_t stride = state->padded_in;
    const int8_t *weights = call->panels + panel * stride * PANEL;
    const int8_t *x = state->x + row * stride;
    Sums sum;
    for (int v = 0; v < panels * VECTORS; v++) {
        ivec start = {0};
        if (X_BIAS) memcpy(&start, call->start + panel * PANEL + v * LANES, sizeof start);
        for (int r = 0; r < rows; r++) sum[r][v] = start;
    }
    add_products(sum, x, weights, stride, rows, panels);
    for (int r = 0; r < rows; r++) {
        vec y[2 * VECTORS];
        for (int v = 0; v < panels * VECTORS; v++)
            y[v] = __builtin_convertvector(sum[r][v], vec) * state->scale[row + r] *
                   load(call->scale + panel * PANEL + v * LANES);
        store_outputs(call->y + (row + r) * call->out, call->out, panel, panels, y);
    }
}

DEFINE_TILES

const int int8_group = GROUP;

Status linear_int8(const LinearInt8 *call) {
    const size_t rows = call->rows, padded = pad(call->in);
    Quantized state = {.call = call, .padded_in = padded};
    state.rotated = malloc(rows * padded * sizeof(float) + 1);
    state.x = malloc(rows * padded + 1);
    state.scale = malloc(rows * sizeof(float) + 1);
    const Status status = state.rotated && state.x && state.scale ? DONE : NO_MEMORY;
    if (status == DONE) {
        const int threads = rows * padded >= WORTH_A_THREAD ? call->threads : 1;
        run_parallel(quantize_rows, &state, rows, threads);
        multiply_rows(&state, rows, rows_in_cache(padded), call->out, call->threads);
    }
    free(state.rotated);
    free(state.x);
    free(state.scale);
    return status;
}
