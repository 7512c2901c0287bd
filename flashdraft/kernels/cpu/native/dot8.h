/* Sums of four products of 8-bit integers per lane, exact, at every level that has no more.
 *
 * dot8 adds to each 32-bit lane i of `sum` the product of the four weights at weights[4 i] with
 * four values of x: those of quad number `quad` (0 .. 3) in a block of 16. Weights and x lie within
 * -127 .. 127. Where the instruction wants unsigned values (X_BIAS), x is stored with 128 added and
 * the caller starts its sums at -128 * (sum of the weights).
 */
#ifndef FLASHDRAFT_DOT8_H
#define FLASHDRAFT_DOT8_H

#include "vectors.h"

#if defined(__ARM_FEATURE_DOTPROD)

#define X_BIAS 0
typedef int8x16_t Block;

ALWAYS_INLINE Block load_block(const int8_t *x) { return vld1q_s8(x); }

/* The instruction by name: with the intrinsic gcc copies sums from register to register. clang does
 * not, and takes no number that only inlining makes constant. */
ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const int8x16_t w = vld1q_s8(weights);
#if defined(__clang__)
    const int32x4_t four = vdupq_n_s32(vreinterpretq_s32_s8(x)[quad]);
    return (ivec)vdotq_s32((int32x4_t)sum, w, vreinterpretq_s8_s32(four));
#else
    __asm__("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(quad));
    return sum;
#endif
}

#else

typedef const int8_t *Block;

ALWAYS_INLINE Block load_block(const int8_t *x) { return x; }

ALWAYS_INLINE int32_t four_bytes(Block x, int quad) {
    int32_t bytes;
    memcpy(&bytes, x + 4 * quad, sizeof bytes);
    return bytes;
}

#if defined(__AVX512VNNI__)

#include <immintrin.h>
#define X_BIAS 128

ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const __m512i w = _mm512_loadu_si512(weights);
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four_bytes(x, quad)), w);
}

#elif defined(__AVXVNNI__)

#include <immintrin.h>
#define X_BIAS 128

ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const __m256i w = _mm256_loadu_si256((const __m256i *)weights);
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(four_bytes(x, quad)), w);
}

#elif defined(__AVX512BW__)

#include <immintrin.h>
#define X_BIAS 0

/* Pairs of products reach at most 2 * 127 * 127, which fits 16 bits. */
ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const __m512i w = _mm512_loadu_si512(weights);
    const __m512i values = _mm512_set1_epi32(four_bytes(x, quad));
    const __mmask64 negative = _mm512_movepi8_mask(values);
    const __m512i signed_w = _mm512_mask_sub_epi8(w, negative, _mm512_setzero_si512(), w);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(values), signed_w);
    return sum + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

#elif defined(__AVX2__)

#include <immintrin.h>
#define X_BIAS 0

/* Pairs of products reach at most 2 * 127 * 127, which fits 16 bits. */
ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const __m256i w = _mm256_loadu_si256((const __m256i *)weights);
    const __m256i values = _mm256_set1_epi32(four_bytes(x, quad));
    const __m256i signed_w = _mm256_sign_epi8(w, values);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values), signed_w);
    return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

#elif defined(__SSE2__)

#include <emmintrin.h>
#define X_BIAS 0

/* 16 bits from bytes: each byte above itself, then shifted down. */
ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const __m128i w = _mm_loadu_si128((const __m128i *)weights);
    const __m128i bytes = _mm_set1_epi32(four_bytes(x, quad));
    const __m128i values = _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
    const __m128i low = _mm_madd_epi16(_mm_srai_epi16(_mm_unpacklo_epi8(w, w), 8), values);
    const __m128i high = _mm_madd_epi16(_mm_srai_epi16(_mm_unpackhi_epi8(w, w), 8), values);
    const __m128 even = _mm_shuffle_ps((__m128)low, (__m128)high, _MM_SHUFFLE(2, 0, 2, 0));
    const __m128 odd = _mm_shuffle_ps((__m128)low, (__m128)high, _MM_SHUFFLE(3, 1, 3, 1));
    return sum + (ivec)even + (ivec)odd;
}

#elif defined(__aarch64__)

#define X_BIAS 0

/* A product of two such bytes fits 16 bits. */
ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const int8x16_t w = vld1q_s8(weights);
    const int8x8_t values = vreinterpret_s8_s32(vdup_n_s32(four_bytes(x, quad)));
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), values));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), values));
    return sum + (ivec)vpaddq_s32(low, high);
}

#else

#define X_BIAS 0

ALWAYS_INLINE ivec dot8(ivec sum, const int8_t *weights, Block x, const int quad) {
    const int8_t *values = x + 4 * quad;
    for (int i = 0; i < LANES; i++) {
        const int8_t *w = weights + 4 * i;
        sum[i] += w[0] * values[0] + w[1] * values[1] + w[2] * values[2] + w[3] * values[3];
    }
    return sum;
}

#endif
#endif
#endif
