/* A fixed rotation that spreads a large value over its 64 neighbours.
 *
 * A few inputs of a language model's layers are ten and more times as large as the rest; with one
 * scale per row, rounding to 8 bits would leave little of the others. Both sides of a product are
 * therefore turned by the same orthogonal matrix first (a Walsh-Hadamard matrix over 8, for each 64
 * inputs), which leaves the product as it was. On SmolLM2-135M the greedy token then agrees with
 * float32's in 97.7 % of 2583 positions instead of 92.8 %, and the divergence falls from 0.036 to
 * 0.004 nats; scales for every 32 inputs on both sides do no better and cost half as much again.
 */
#ifndef FLASHDRAFT_ROTATE_H
#define FLASHDRAFT_ROTATE_H

#include "vectors.h"

#define ROTATED 64

/* Each lane with the one whose number differs in the bit `step`: their sum and difference. */
ALWAYS_INLINE vec mix_lanes(vec value, const int step) {
    ivec other;
    vec sign;
    for (int i = 0; i < LANES; i++) {
        other[i] = i ^ step;
        sign[i] = i & step ? -1.0f : 1.0f;
    }
#if defined(__clang__)
    vec partner;
    for (int i = 0; i < LANES; i++) partner[i] = value[i ^ step];
#else
    const vec partner = __builtin_shuffle(value, other);
#endif
    return value * sign + partner;
}

/* Turns the first `count` <= 64 inputs, followed by zeros, into 64 outputs. */
static void rotate(const float *x, size_t count, float *out) {
    enum { VECTORS_ROTATED = ROTATED / LANES };
    float padded[ROTATED];
    if (count < ROTATED) {
        memset(padded, 0, sizeof padded);
        x = memcpy(padded, x, count * sizeof(float));
    }
    vec value[VECTORS_ROTATED];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS_ROTATED; v++) {
        value[v] = load(x + v * LANES);
#pragma GCC unroll 4
        for (int step = 1; step < LANES; step *= 2) value[v] = mix_lanes(value[v], step);
    }
#pragma GCC unroll 6
    for (int step = 1; step < VECTORS_ROTATED; step *= 2)
        for (int v = 0; v < VECTORS_ROTATED; v++)
            if (!(v & step)) {
                const vec first = value[v], second = value[v | step];
                value[v] = first + second;
                value[v | step] = first - second;
            }
    for (int v = 0; v < VECTORS_ROTATED; v++) store(out + v * LANES, value[v] * 0.125f);
}

#endif
