/* Row-wise operations: norms, gates, softmax, softcap, argmax. Threads share out whole rows. */
#include "kernels.h"

#include <math.h>

#include "vectors.h"

/* Below this many elements a second thread costs more than it saves. */
static const size_t WORTH_A_THREAD = 32 * 1024;

#define FOR_EACH_ROW(row, rows, columns, threads)                                              \
    _Pragma("omp parallel for num_threads(threads) if ((rows) > 1 && (rows) * (columns) >= WORTH_A_THREAD)") \
    for (size_t row = 0; row < (rows); row++)

/* 1 / sqrt(mean(x^2) + eps), with the squares summed in an order fixed by `columns`. */
static float inverse_rms(const float *x, size_t columns, float eps) {
    vec sum[4] = {{0}};
    size_t i = 0;
    for (; i + 4 * LANES <= columns; i += 4 * LANES)
        for (int v = 0; v < 4; v++) {
            const vec part = load(x + i + v * LANES);
            sum[v] += part * part;
        }
    for (; i + LANES <= columns; i += LANES) {
        const vec part = load(x + i);
        sum[0] += part * part;
    }
    if (i < columns) {
        const vec part = load_part(x + i, columns - i, 0.0f);
        sum[0] += part * part;
    }
    const float total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    return 1.0f / sqrtf(total / (float)columns + eps);
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

void rms_norm(const float *x, const float *weight, float *out, size_t rows, size_t columns,
              float eps, int threads) {
    FOR_EACH_ROW(row, rows, columns, threads)
    rms_norm_row(x + row * columns, weight, out + row * columns, columns, eps);
}

static void add_row(const float *x, const float *delta, float *total, size_t columns) {
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) store(total + i, load(x + i) + load(delta + i));
    for (; i < columns; i++) total[i] = x[i] + delta[i];
}

void add_rms_norm(const float *x, const float *delta, const float *weight, float *total,
                  float *out, size_t rows, size_t columns, float eps, int threads) {
    FOR_EACH_ROW(row, rows, columns, threads) {
        const size_t at = row * columns;
        add_row(x + at, delta + at, total + at, columns);
        rms_norm_row(total + at, weight, out + at, columns, eps);
    }
}

ALWAYS_INLINE vec gate_vec(vec x, vec up, const GateKind kind) {
    if (kind == SILU) return x / (exp_vec(-x) + 1.0f) * up;
    /* 0.5 (1 + tanh u) = 1 / (1 + e^-2u), which does not cancel for negative u */
    const vec twice = (x * x * 0.044715f + 1.0f) * x * 1.5957691216f; /* 2 sqrt(2 / pi) */
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

void gated(const float *gate_up, float *out, size_t rows, size_t columns, GateKind kind,
           int threads) {
    FOR_EACH_ROW(row, rows, columns, threads) {
        const float *gate = gate_up + row * 2 * columns;
        if (kind == SILU)
            gate_row(gate, gate + columns, out + row * columns, columns, SILU);
        else
            gate_row(gate, gate + columns, out + row * columns, columns, GELU_TANH);
    }
}

static float row_max(const float *x, size_t columns) {
    vec best = splat(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) best = larger(best, load(x + i));
    if (i < columns) best = larger(best, load_part(x + i, columns - i, -INFINITY));
    return largest_lane(best);
}

static void softmax_row(const float *x, float *out, size_t columns) {
    const float peak = row_max(x, columns);
    vec sum = {0};
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) {
        const vec power = exp_vec(load(x + i) - peak);
        sum += power;
        store(out + i, power);
    }
    if (i < columns) {
        const vec power = exp_vec(load_part(x + i, columns - i, -INFINITY) - peak);
        sum += power;
        store_part(out + i, power, columns - i);
    }
    const float inverse = 1.0f / sum_lanes(sum);
    for (i = 0; i + LANES <= columns; i += LANES) store(out + i, load(out + i) * inverse);
    for (; i < columns; i++) out[i] *= inverse;
}

void softmax(const float *x, float *out, size_t rows, size_t columns, int threads) {
    FOR_EACH_ROW(row, rows, columns, threads)
    softmax_row(x + row * columns, out + row * columns, columns);
}

static void softcap_row(const float *x, float *out, size_t columns, float cap) {
    size_t i = 0;
    for (; i + LANES <= columns; i += LANES) store(out + i, tanh_vec(load(x + i) / cap) * cap);
    if (i < columns) {
        const vec part = load_part(x + i, columns - i, 0.0f);
        store_part(out + i, tanh_vec(part / cap) * cap, columns - i);
    }
}

void softcap(const float *x, float *out, size_t rows, size_t columns, float cap, int threads) {
    FOR_EACH_ROW(row, rows, columns, threads)
    softcap_row(x + row * columns, out + row * columns, columns, cap);
}

void argmax(const float *x, int64_t *out, size_t rows, size_t columns, int threads) {
    FOR_EACH_ROW(row, rows, columns, threads) {
        const float *values = x + row * columns;
        const float best = row_max(values, columns);
        size_t i = 0;
        while (i < columns && values[i] != best) i++;
        out[row] = i < columns ? (int64_t)i : 0; /* nothing but NaN */
    }
}
