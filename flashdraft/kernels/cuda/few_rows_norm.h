// The norm of a row of x that every block makes for itself, and the sum before it: what
// triton_residual.py says of a row, rounded in the same places. Included by few_rows.cu.

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

    DEVICE static int first_of(int chunk) { return (chunk * WARPS * LANES + thread_index()) * 8; }
    DEVICE static Words read(const u16 *from, const Work &work, int chunk) {
        int first = first_of(chunk);
        return from != nullptr && first < work.depth ? *(const Words *)(from + first) : Words{};
    }

    DEVICE void load_weights(const Work &work) {
        UNROLL for (int i = 0; i < CHUNKS; i++) {
            norm_weight[i] = read(work.norm, work, i);
            if (DELTAS == 2) post_weight[i] = read(work.post, work, i);
            UNROLL for (int j = 0; j < DELTAS; j++) {
                delta_weights[j][i] = read(work.delta_norms[j], work, i);
            }
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
    DEVICE static void scale(const Work &work, Eight *values, const Words *weights,
                             float *scratch) {
        float squares = 0.0f;
        UNROLL for (int i = 0; i < CHUNKS * 8; i++) {
            float value = values[i / 8].of[i % 8];
            squares += value * value;
        }
        float factor = scale_of(work, squares, scratch);
        UNROLL for (int i = 0; i < CHUNKS; i++) {
            Eight weight = widen(weights[i]);
            UNROLL for (int k = 0; k < 8; k++) {
                values[i].of[k] = rounded(values[i].of[k] * factor * weight.of[k]);
            }
        }
    }

    // The whole row is needed for it; a block keeps its slice.
    DEVICE void norm(const Work &work, int first_step, char *stored, float *scratch) {
        Eight total[CHUNKS], delta[CHUNKS], other[CHUNKS];
        UNROLL for (int i = 0; i < CHUNKS; i++) total[i] = widen(x[i]);
        if (DELTAS > 0) {
            UNROLL for (int i = 0; i < CHUNKS; i++) delta[i] = widen(deltas[0][i]);
            scale(work, delta, delta_weights[0], scratch);
            if (DELTAS == 2) {
                UNROLL for (int i = 0; i < CHUNKS; i++) other[i] = widen(deltas[DELTAS - 1][i]);
                scale(work, other, delta_weights[DELTAS - 1], scratch + WARPS);
                UNROLL for (int i = 0; i < CHUNKS * 8; i++) {
                    float &sum = delta[i / 8].of[i % 8];
                    sum = rounded(sum + other[i / 8].of[i % 8]);
                }
                if (work.post != nullptr) scale(work, delta, post_weight, scratch + 2 * WARPS);
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
        scale(work, total, norm_weight, scratch + 3 * WARPS);
        UNROLL for (int i = 0; i < CHUNKS; i++) {  // a row is filled up with zeros
            int place = first_of(i) - first_step * STEP;
            bool is_mine = place >= 0 && place < work.slice_steps * STEP;
            if (is_mine) *(Words *)(stored + place * 2) = narrow(total[i]);
        }
    }
};
