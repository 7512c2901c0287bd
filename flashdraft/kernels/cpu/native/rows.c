/* Row-wise operations: norms, gates, softmax, softcap, argmax. Threads share out whole rows. */
#include "kernels.h"

#include <math.h>

#include "pool.h"
#include "vectors.h"

/* Below this many elements a second thread costs more than it saves. */
static const size_t WORTH_A_THREAD = 32 * 1024;

static void share_rows(Work work, const Rows *call) {
    const size_t size = call->rows * call->columns;
    run_parallel(work, call, call->rows, size >= WORTH_A_THREAD ? call->threads : 1);
}

ALWAYS_INLINE void add_squares(vec *sum, const float *x) {
    for (int p = 0; p < PARTS; p++) {
        const vec part = load(x + p * LANES);
        sum[p] = add_product(sum[p], part, part);
    }
}

/* 1 / sqrt(mean(x^2) + eps), with the squares summed in an order fixed by `columns`. */
static float inverse_rms(const float *x, size_t columns, float eps) {
    vec sum[4][PARTS] = {{{0}}};
    size_t i = 0;
    for (; i + 4 * WIDE <= columns; i += 4 * WIDE)
        for (int v = 0; v < 4; v++) add_squares(sum[v], x + i + v * WIDE);
    for (; i + WIDE <= columns; i += WIDE) add_squares(sum[0], x + i);
    if (i < columns) {
        float rest[WIDE] = {0};
        memcpy(rest, x + i, (columns - i) * sizeof(float));
        add_squares(sum[0], rest);
    }
    for (int p = 0; p < PARTS; p++) sum[0][p] = (sum[0][p] + sum[1][p]) + (sum[2][p] + sum[3][p]);
    return 1.0f / sqrtf(sum_lanes(sum[0]) / (float)columns + eps);
}

void rms_norm_row(const float *x, const float *weight, float *out, size_t columns, float eps) {
    const float inverse = inverse_rms(x, columns, eps);
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) {
        const vec normed = load(x + i) * inverse;
        store(out + i, weight ? normed * load(weight + i) : normed);
    }
    if (i < columns) {
        const size_t left = columns - i;
        const vec normed = load_part(x + i, left, 0.0f) * inverse;
        const vec scale = weight ? load_part(weight + i, left, 1.0f) : splat(1.0f);
        store_part(out + i, normed * scale, left);
    }
}

static void norm_rows(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    for (size_t at = from * call->columns; at < to * call->columns; at += call->columns)
        rms_norm_row(call->x + at, call->weight, call->out + at, call->columns, call->eps);
}

void rms_norm(const Rows *call) { share_rows(norm_rows, call); }

static void add_row(const float *x, const float *delta, float *total, size_t columns) {
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) store(total + i, load(x + i) + load(delta + i));
    for (; i < columns; i++) total[i] = x[i] + delta[i];
}

static void add_norm_rows(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    for (size_t at = from * call->columns; at < to * call->columns; at += call->columns) {
        add_row(call->x + at, call->delta + at, call->total + at, call->columns);
        rms_norm_row(call->total + at, call->weight, call->out + at, call->columns, call->eps);
    }
}

void add_rms_norm(const Rows *call) { share_rows(add_norm_rows, call); }

ALWAYS_INLINE vec gate_vec(vec x, vec up, const GateKind kind) {
    if (kind == SILU) return x / (exp_vec(-x) + 1.0f) * up;
    /* 0.5 (1 + tanh u) = 1 / (1 + e^-2u), which does not cancel for negative u */
    const vec cubic = add_product(splat(1.0f), x * x, splat(0.044715f)) * x;
    const vec twice = cubic * 1.5957691216f; /* 2 sqrt(2 / pi) */
    return x / (exp_vec(-twice) + 1.0f) * up;
}

ALWAYS_INLINE void gate_row(const float *gate, const float *up, float *out, size_t columns,
                            const GateKind kind) {
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES)
        store(out + i, gate_vec(load(gate + i), load(up + i), kind));
    if (i < columns) {
        const size_t left = columns - i;
        const vec x = load_part(gate + i, left, 0.0f), y = load_part(up + i, left, 0.0f);
        store_part(out + i, gate_vec(x, y, kind), left);
    }
}

static void gate_rows(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    const size_t columns = call->columns;
    for (size_t row = from; row < to; row++) {
        const float *gate = call->x + row * 2 * columns;
        if (call->kind == SILU)
            gate_row(gate, gate + columns, call->out + row * columns, columns, SILU);
        else
            gate_row(gate, gate + columns, call->out + row * columns, columns, GELU_TANH);
    }
}

void gated(const Rows *call) { share_rows(gate_rows, call); }

static float row_max(const float *x, size_t columns) {
    vec best[4];
    for (int v = 0; v < 4; v++) best[v] = splat(-INFINITY);
    size_t i = 0;
    for (; i + 4 * LANES <= columns; i += 4 * LANES)
        for (int v = 0; v < 4; v++) best[v] = larger(best[v], load(x + i + v * LANES));
    for (; i + LANES <= columns; i += LANES) best[0] = larger(best[0], load(x + i));
    if (i < columns) best[0] = larger(best[0], load_part(x + i, columns - i, -INFINITY));
    return largest_lane(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

ALWAYS_INLINE void add_powers(vec *sum, const float *x, float *out, float peak) {
    for (int p = 0; p < PARTS; p++) {
        const vec power = exp_vec(load(x + p * LANES) - peak);
        sum[p] += power;
        store(out + p * LANES, power);
    }
}

static void softmax_row(const float *x, float *out, size_t columns) {
    const float peak = row_max(x, columns);
    vec sum[PARTS] = {{0}};
    size_t i = 0;
    for (; i + WIDE <= columns; i += WIDE) add_powers(sum, x + i, out + i, peak);
    if (i < columns) {
        float rest[WIDE];
        for (int lane = 0; lane < WIDE; lane++) rest[lane] = -INFINITY;
        memcpy(rest, x + i, (columns - i) * sizeof(float));
        add_powers(sum, rest, rest, peak);
        memcpy(out + i, rest, (columns - i) * sizeof(float));
    }
    const float inverse = 1.0f / sum_lanes(sum);
    for (i = 0; i + LANES <= columns; i += LANES) store(out + i, load(out + i) * inverse);
    for (; i < columns; i++) out[i] *= inverse;
}

static void softmax_rows(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    for (size_t at = from * call->columns; at < to * call->columns; at += call->columns)
        softmax_row(call->x + at, call->out + at, call->columns);
}

void softmax(const Rows *call) { share_rows(softmax_rows, call); }

static void softcap_row(const float *x, float *out, size_t columns, float cap) {
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) store(out + i, tanh_vec(load(x + i) / cap) * cap);
    if (i < columns) {
        const vec part = load_part(x + i, columns - i, 0.0f);
        store_part(out + i, tanh_vec(part / cap) * cap, columns - i);
    }
}

static void softcap_rows(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    for (size_t at = from * call->columns; at < to * call->columns; at += call->columns)
        softcap_row(call->x + at, call->out + at, call->columns, call->cap);
}

void softcap(const Rows *call) { share_rows(softcap_rows, call); }

static int64_t first_nan(const float *x, size_t columns) {
    for (size_t i = 0; i < columns; i++)
        if (x[i] != x[i]) return (int64_t)i;
    return -1;
}

/* Whether some of count <= 1024 numbers is NaN. */
static int holds_nan(const float *x, size_t count) {
    ivec found = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) found |= load(x + i) != load(x + i);
    int any = 0;
    for (size_t lane = 0; lane < LANES; lane++) any |= found[lane];
    return any || first_nan(x + i, count - i) >= 0;
}

/* The first of the largest; NaN is larger than anything, so that it does not go unseen. */
static int64_t row_argmax(const float *x, size_t columns) {
    const size_t block = 1024; /* only the block that holds the answer is searched */
    size_t first = 0;
    float best = -INFINITY;
    for (size_t i = 0; i < columns; i += block) {
        const size_t count = columns - i < block ? columns - i : block;
        if (holds_nan(x + i, count)) return (int64_t)i + first_nan(x + i, count);
        const float peak = row_max(x + i, count);
        if (peak > best) {
            best = peak;
            first = i;
        }
    }
    for (size_t i = first; i < columns; i++)
        if (x[i] == best) return (int64_t)i;
    return 0;
}

static void argmax_rows(const void *job, size_t from, size_t to) {
    const Rows *call = job;
    for (size_t row = from; row < to; row++)
        call->index[row] = row_argmax(call->x + row * call->columns, call->columns);
}

void argmax(const Rows *call) { share_rows(argmax_rows, call); }
