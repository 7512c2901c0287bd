// The norm of a row of x that every block makes for itself, and the sum before it: what
// dense/residual.py says of a row, rounded in the same places. Included by few_rows.cu.

constexpr int DELTAS = NORMED > 1 ? NORMED - 1 : 0;

// Eight values, as they are stored or as numbers.
struct Eight {
    float of[8];
};
DEVICE Eight widen(Words words) {
    return {bfloat16(words.x), as_float(words.x & 0xFFFF0000), bfloat16(words.y),
            as_float(words.y & 0xFFFF0000), bfloat16(words.z), as_float(words.z & 0xFFFF0000),
            bfloat16(words.w), as_float(words.w & 0xFFFF0000)};
}
DEVICE u32 pack(float low, float high) { return to_bfloat16(low) | (u32)to_bfloat16(high) << 16; }
DEVICE Words narrow(const Eight &x) {
    return {pack(x.of[0], x.of[1]), pack(x.of[2], x.of[3]), pack(x.of[4], x.of[5]),
            pack(x.of[6], x.of[7])};
}

// What a thread has of a row.
struct Row {
    Words x[CHUNKS], norm_weight[CHUNKS], post_weight[CHUNKS];
    Words deltas[DELTAS + 1][CHUNKS], delta_weights[DELTAS + 1][CHUNKS];
    Words router[CHUNKS], router_norm[CHUNKS];  // the row of the block's first expert; its norm

    DEVICE static int first_of(int chunk) { return (chunk * WARPS * LANES + thread_index()) * 8; }
    DEVICE static Words read(const u16 *from, const Work &work, int chunk) {
        int first = first_of(chunk);
        return from != nullptr && first < work.depth ? *(const Words *)(from + first) : Words{};
    }

    DEVICE void load_weights(const Work &work) {
        UNROLL for (int i = 0; i < CHUNKS; i++) {
            norm_weight[i] = read(work.norm, work, i);
            if (DELTAS == 2) post_weight[i] = read(work.post, work, i);
            if (CHOSEN > 0) router_norm[i] = read(work.router_norm, work, i);
            UNROLL for (int j = 0; j < DELTAS; j++) {
                delta_weights[j][i] = read(work.delta_norms[j], work, i);
            }
        }
        if (CHOSEN > 0) load_router(work, block_index());
    }
    DEVICE void load_router(const Work &work, int expert) {
        if (expert >= work.num_experts) return;
        UNROLL for (int i = 0; i < CHUNKS; i++) {
            router[i] = read(work.router + (u64)expert * work.depth, work, i);
        }
    }
    DEVICE void load(const Work &work) {
        UNROLL for (int i = 0; i < CHUNKS; i++) {
            x[i] = read(work.x, work, i);
            UNROLL for (int j = 0; j < DELTAS; j++) deltas[j][i] = read(work.deltas[j], work, i);
        }
    }

    // What a row is multiplied by, from every thread's sum of squares; `scratch` is used once.
    DEVICE static float scale_of(const Work &work, float squares, float *scratch) {
        float sum = sum_of_warp(squares), total = 0.0f;
        if (thread_index() % LANES == 0) scratch[thread_index() / LANES] = sum;
        wait_for_block();
        UNROLL for (int i = 0; i < WARPS; i++) total += scratch[i];
        return inverse_root(total / work.depth + work.eps);
    }
    DEVICE static float scale_of(const Work &work, const Eight *values, float *scratch) {
        float squares = 0.0f;
        UNROLL for (int i = 0; i < CHUNKS * 8; i++) {
            float value = values[i / 8].of[i % 8];
            squares += value * value;
        }
        return scale_of(work, squares, scratch);
    }
    DEVICE static void scale(Eight *values, float factor, const Words *weights) {
        UNROLL for (int i = 0; i < CHUNKS; i++) {
            Eight weight = widen(weights[i]);
            UNROLL for (int k = 0; k < 8; k++) {
                values[i].of[k] = rounded(values[i].of[k] * factor * weight.of[k]);
            }
        }
    }

    // Logits of this block's experts, from the row and what norms it.
    DEVICE void make_logits(const Work &work, const Eight *values, float factor, float *scratch) {
        Eight normed[CHUNKS];
        UNROLL for (int i = 0; i < CHUNKS; i++) normed[i] = values[i];
        scale(normed, factor, router_norm);
        for (int expert = block_index(); expert < work.num_experts; expert += work.chooser) {
            float sum = 0.0f, total = 0.0f;
            UNROLL for (int i = 0; i < CHUNKS; i++) {
                Eight weight = widen(router[i]);
                UNROLL for (int k = 0; k < 8; k++) sum += normed[i].of[k] * weight.of[k];
            }
            int next = expert + work.chooser;
            load_router(work, next);
            sum = sum_of_warp(sum);
            if (thread_index() % LANES == 0) scratch[thread_index() / LANES] = sum;
            wait_for_block();
            UNROLL for (int i = 0; i < WARPS; i++) total += scratch[i];
            if (thread_index() == 0) send_one(work.logits + expert, rounded(total));
            if (next < work.num_experts) wait_for_block();  // all have read
        }
    }

    // The whole row is needed for it; a block keeps its slice.
    DEVICE void norm(const Work &work, int first_step, char *stored, float *scratch) {
        Eight total[CHUNKS], delta[CHUNKS], other[CHUNKS];
        UNROLL for (int i = 0; i < CHUNKS; i++) total[i] = widen(x[i]);
        if (DELTAS > 0) {
            UNROLL for (int i = 0; i < CHUNKS; i++) delta[i] = widen(deltas[0][i]);
            scale(delta, scale_of(work, delta, scratch), delta_weights[0]);
            if (DELTAS == 2) {
                UNROLL for (int i = 0; i < CHUNKS; i++) other[i] = widen(deltas[DELTAS - 1][i]);
                float factor = scale_of(work, other, scratch + WARPS);
                scale(other, factor, delta_weights[DELTAS - 1]);
                UNROLL for (int i = 0; i < CHUNKS * 8; i++) {
                    float &sum = delta[i / 8].of[i % 8];
                    sum = rounded(sum + other[i / 8].of[i % 8]);
                }
                if (work.post != nullptr) {
                    scale(delta, scale_of(work, delta, scratch + 2 * WARPS), post_weight);
                }
            }
            float scalar = work.scalar == nullptr ? 1.0f : bfloat16(*work.scalar);
            UNROLL for (int i = 0; i < CHUNKS * 8; i++) {
                float &sum = total[i / 8].of[i % 8];
                sum = rounded(rounded(sum + delta[i / 8].of[i % 8]) * scalar);
            }
            UNROLL for (int i = 0; i < CHUNKS; i++) {
                bool is_mine = block_index() == 0 && first_of(i) < work.depth;
                if (is_mine) *(Words *)(work.stream + first_of(i)) = narrow(total[i]);
            }
        }
        float factor = scale_of(work, total, scratch + 3 * WARPS);
        if (CHOSEN > 0) make_logits(work, total, factor, scratch + 4 * WARPS);
        scale(total, factor, norm_weight);
        UNROLL for (int i = 0; i < CHUNKS; i++) {  // a row is filled up with zeros
            int place = first_of(i) - first_step * STEP;
            bool is_mine = place >= 0 && place < work.slice_steps * STEP;
            if (is_mine) *(Words *)(stored + place * 2) = narrow(total[i]);
        }
    }
};
