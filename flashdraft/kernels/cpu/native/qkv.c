/* Between an attention layer's projection and its attention: split, norms, RoPE, cache write. */
#include "kernels.h"
#include "pool.h"
#include "vectors.h"

/* Rotate-half RoPE of one head, in place. */
static void rotate(float *head, const float *cos, const float *sin, size_t half) {
    float *left = head, *right = head + half;
    size_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vec a = load(left + i), b = load(right + i);
        const vec c = load(cos + i), s = load(sin + i);
        store(left + i, add_product(-(b * s), a, c));
        store(right + i, add_product(a * s, b, c));
    }
    if (i < half) {
        const size_t rest = half - i;
        const vec a = load_part(left + i, rest, 0.0f), b = load_part(right + i, rest, 0.0f);
        const vec c = load_part(cos + i, rest, 0.0f), s = load_part(sin + i, rest, 0.0f);
        store_part(left + i, add_product(-(b * s), a, c), rest);
        store_part(right + i, add_product(a * s, b, c), rest);
    }
}

static void copy_or_norm(const PrepareQKV *call, const float *head, const float *weight, int norm,
                         float *to) {
    if (norm)
        rms_norm_row(head, weight, to, call->head_dim, call->eps);
    else
        memcpy(to, head, call->head_dim * sizeof(float));
}

static void prepare_row(const PrepareQKV *call, size_t row) {
    const size_t dim = call->head_dim, half = dim / 2;
    const size_t kv_parts = call->share_kv ? 1 : 2;
    const float *q = call->qkv + row * (call->heads + kv_parts * call->kv_heads) * dim;
    const float *k = q + call->heads * dim;
    const float *v = call->share_kv ? k : k + call->kv_heads * dim;
    const float *cos = call->cos + (size_t)call->position[row] * half;
    const float *sin = call->sin + (size_t)call->position[row] * half;
    float *query = call->query + row * call->heads * dim;
    float *key = call->key_cache + (size_t)call->slot[row] * call->kv_heads * dim;
    float *value = call->value_cache + (size_t)call->slot[row] * call->kv_heads * dim;
    for (size_t h = 0; h < call->heads; h++) {
        copy_or_norm(call, q + h * dim, call->q_norm, call->q_norm != NULL, query + h * dim);
        rotate(query + h * dim, cos, sin, half);
    }
    for (size_t h = 0; h < call->kv_heads; h++) {
        copy_or_norm(call, v + h * dim, NULL, call->norm_values, value + h * dim);
        copy_or_norm(call, k + h * dim, call->k_norm, call->k_norm != NULL, key + h * dim);
        rotate(key + h * dim, cos, sin, half);
    }
}

static void prepare_rows(const void *call, size_t from, size_t to) {
    for (size_t row = from; row < to; row++) prepare_row(call, row);
}

Status prepare_qkv(const PrepareQKV *call) {
    for (size_t row = 0; row < call->rows; row++) {
        /* as unsigned numbers the negative ones are too large as well */
        if ((uint64_t)call->position[row] >= call->num_positions) return BAD_POSITION;
        if ((uint64_t)call->slot[row] >= call->num_slots) return BAD_SLOT;
    }
    run_parallel(prepare_rows, call, call->rows, call->rows >= 16 ? call->threads : 1);
    return DONE;
}
