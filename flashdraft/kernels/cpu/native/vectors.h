/* Vectors of floats as wide as the level's registers, and the functions every kernel shares.
 *
 * Mostly the compiler's generic vector types, so the same source serves every level (levels.py).
 * Every function works on each lane alone: an element's bits never depend on its lane, which is why
 * the end of a row is padded to a whole vector instead of getting scalar code.
 *
 * All levels give the same bits. Hence three rules: a fused product is written out (add_product),
 * for compilers differ in what they fuse, and setup.py forbids them to; a sum along a row goes in
 * WIDE lanes, however many of them a register holds; and nothing here calls the C library's
 * functions, but for those that round correctly.
 */
#ifndef FLASHDRAFT_VECTORS_H
#define FLASHDRAFT_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define WIDE 16              /* lanes of a sum along a row */
#define PARTS (WIDE / LANES) /* vectors that hold them */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef vec loose_vec __attribute__((aligned(4), may_alias)); /* rows may start anywhere */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE vec load(const float *from) { return *(const loose_vec *)from; }

ALWAYS_INLINE void store(float *to, vec value) { *(loose_vec *)to = value; }

ALWAYS_INLINE vec splat(float value) { return value - (vec){0}; }

/* Four consecutive floats that each multiply whole vectors. NEON multiplies by an element of a
 * register; x86 broadcasts from memory for free. `i` must be a constant after unrolling. */
#if LANES == 4
typedef vec Four;
ALWAYS_INLINE Four load_four(const float *from) { return load(from); }
#else
typedef const float *Four;
ALWAYS_INLINE Four load_four(const float *from) { return from; }
#endif
ALWAYS_INLINE float pick(Four four, const int i) { return four[i]; }

#if defined(__AVX512F__) || (defined(__FMA__) && defined(__AVX__)) || defined(__aarch64__)
#define HAS_FUSED_PRODUCT 1
#else
#define HAS_FUSED_PRODUCT 0

typedef double double_vec __attribute__((vector_size(8 * LANES)));
typedef uint64_t bits_vec __attribute__((vector_size(8 * LANES)));

/* A fused product from doubles, which hold a * b exactly. Rounding their sum to a float would be a
 * second rounding; so an inexact sum is first moved to its odd neighbour (rounded to odd), from
 * which the second one goes where the exact sum would. Some twenty times slower, and the same bits:
 * for processors that are older than 2013. */
ALWAYS_INLINE vec fuse(vec sum, vec a, vec b) {
    const double_vec product =
        __builtin_convertvector(a, double_vec) * __builtin_convertvector(b, double_vec);
    const double_vec addend = __builtin_convertvector(sum, double_vec);
    const double_vec total = product + addend;
    const double_vec added = total - product;
    const double_vec error = (product - (total - added)) + (addend - added);
    const bits_vec inexact = (bits_vec)(error > 0.0) | (bits_vec)(error < 0.0); /* not for NaN */
    const bits_vec moved = inexact & ~(bits_vec)total & 1;
    const bits_vec inwards = moved & ((bits_vec)error ^ (bits_vec)total) >> 63;
    return __builtin_convertvector((double_vec)((bits_vec)total + moved - (inwards << 1)), vec);
}
#endif

/* sum + a * b with one rounding. */
ALWAYS_INLINE vec add_product(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#elif HAS_FUSED_PRODUCT
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return fuse(sum, a, b);
#endif
}

/* The same for single numbers. */
ALWAYS_INLINE float add_product_of(float sum, float a, float b) {
#if HAS_FUSED_PRODUCT
    return __builtin_fmaf(a, b, sum);
#else
    return fuse(splat(sum), splat(a), splat(b))[0];
#endif
}

/* The same with b = four[i]; by name on aarch64, where gcc would copy sums around (clang does not,
 * and takes no number that only inlining makes constant). */
ALWAYS_INLINE vec add_multiple(vec sum, vec a, Four four, const int i) {
#if defined(__aarch64__) && !defined(__clang__)
    __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(a), "w"(four), "i"(i));
    return sum;
#else
    return add_product(sum, a, splat(pick(four, i)));
#endif
}

/* The last count < LANES elements of a row; the other lanes are `fill`. */
ALWAYS_INLINE vec load_part(const float *from, size_t count, float fill) {
    vec value = splat(fill);
    memcpy(&value, from, count * sizeof(float));
    return value;
}

ALWAYS_INLINE void store_part(float *to, vec value, size_t count) {
    memcpy(to, &value, count * sizeof(float));
}

/* yes where mask is all ones, no where it is zero. */
ALWAYS_INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
}

/* The larger of each lane; `first` wins where either is NaN. */
ALWAYS_INLINE vec larger(vec first, vec second) { return choose(second > first, second, first); }

/* The sum of WIDE lanes. */
ALWAYS_INLINE float sum_lanes(const vec *parts) {
    float lanes[WIDE];
    memcpy(lanes, parts, sizeof lanes);
    for (int half = WIDE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

ALWAYS_INLINE float largest_lane(vec value) {
    float best = value[0];
    for (int i = 1; i < LANES; i++) best = value[i] > best ? value[i] : best;
    return best;
}

/* x, but no less than `low` and no more than `high`; NaN stays NaN. */
ALWAYS_INLINE vec clamp(vec x, float low, float high) {
#if defined(__ARM_NEON)
    return (vec)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(low)), vdupq_n_f32(high));
#else
    x = choose(x < splat(low), splat(low), x);
    return choose(x > splat(high), splat(high), x);
#endif
}

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial fitted for the least relative error
 * (1e-7), then scaled by 2^n. Below the smallest normal float it is 0, at 88 and above it stays at
 * e^88. NaN stays NaN. */
ALWAYS_INLINE vec exp_vec(vec x) {
    const float lowest = -87.3f;
    const vec bounded = clamp(x, lowest, 88.0f);
    const vec rounder = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const vec shifted = add_product(rounder, bounded, splat(1.44269504f));
    const ivec n = (ivec)shifted - (ivec)rounder;
    const vec whole = shifted - rounder;
    const vec most = add_product(bounded, whole, splat(-0.693359375f)); /* ln 2 in 2 parts */
    const vec r = add_product(most, whole, splat(2.12194440e-4f));
    const vec square = r * r;
    const vec low_terms = add_product(splat(0.499992311f), r, splat(0.166671142f));
    const vec high_terms = add_product(splat(0.0418901555f), r, splat(0.00831252057f));
    const vec terms = add_product(low_terms, high_terms, square);
    const vec power = add_product(r + 1.0f, terms, square);
    const vec scaled = power * (vec)((n + 127) << 23);
    return choose(x < splat(lowest), (vec){0}, scaled);
}

/* tanh x: a Pade approximant near 0, where 1 - 2 / (e^2x + 1) would cancel. */
ALWAYS_INLINE vec tanh_vec(vec x) {
    const vec square = x * x;
    const vec above = x * add_product(splat(945.0f), square + 105.0f, square);
    const vec middle = add_product(splat(420.0f), square, splat(15.0f));
    const vec below = add_product(splat(945.0f), middle, square);
    const vec size = choose(x < (vec){0}, -x, x);
    const vec far = 1.0f - 2.0f / (exp_vec(size + size) + 1.0f);
    return choose(size < splat(0.625f), above / below, choose(x < (vec){0}, -far, far));
}

#endif
