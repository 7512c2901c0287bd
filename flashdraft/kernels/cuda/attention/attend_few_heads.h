// Heads of queries, keys and values: their norm and rotation. Included by attend_few.cu.

// A head as a warp holds it: a thread has the same numbers of both halves.
struct Raw {
    Few<MINE> left, right;
};
DEVICE Raw load_raw(const u16 *from, int lane) {
    from += lane * MINE;
    return {*(const Few<MINE> *)from, *(const Few<MINE> *)(from + HALF)};
}
struct Head {
    float left[MINE], right[MINE];

    DEVICE explicit Head(const Raw &raw) {
        UNROLL for (int i = 0; i < MINE; i++) {
            left[i] = bfloat16(raw.left.of[i]);
            right[i] = bfloat16(raw.right.of[i]);
        }
    }
    DEVICE void store(u16 *to, int lane) const {
        Few<MINE> two[2];
        UNROLL for (int i = 0; i < MINE; i++) {
            two[0].of[i] = to_bfloat16(left[i]);
            two[1].of[i] = to_bfloat16(right[i]);
        }
        *(Few<MINE> *)(to + lane * MINE) = two[0];
        *(Few<MINE> *)(to + HALF + lane * MINE) = two[1];
    }
    DEVICE void norm(const Raw *weight, float eps) {
        float squares = 0.0f;
        UNROLL for (int i = 0; i < MINE; i++) squares += left[i] * left[i] + right[i] * right[i];
        float scale = inverse_root(sum_of_warp(squares) / HEAD + eps);
        UNROLL for (int i = 0; i < MINE; i++) {
            float x = left[i] * scale, y = right[i] * scale;
            left[i] = rounded(weight == nullptr ? x : x * bfloat16(weight->left.of[i]));
            right[i] = rounded(weight == nullptr ? y : y * bfloat16(weight->right.of[i]));
        }
    }
    DEVICE void rotate(const float *cosine, const float *sine, int lane) {
        UNROLL for (int i = 0; i < MINE; i++) {
            float x = left[i], y = right[i], c = cosine[lane * MINE + i], s = sine[lane * MINE + i];
            left[i] = x * c - y * s;
            right[i] = y * c + x * s;
        }
    }
};
