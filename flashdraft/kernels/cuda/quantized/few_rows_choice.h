// Which experts a row has: those with the largest logits, of equals the first, and their shares.
// experts/routing.py goes by their chances instead, where logits too far apart, or too close, may
// be equals. Included by few_rows.cu.

struct Choice {
    int chosen[CHOSEN > 0 ? CHOSEN : 1];
    float powers[CHOSEN > 0 ? CHOSEN : 1], scales[CHOSEN > 0 ? CHOSEN : 1];
};

// What a block does that has no part in the product. The others make their logits before they
// multiply, so that nobody waits for this one. An expert's place is the number of those before it.
DEVICE void choose(const Work &work, char *shared) {
    constexpr int THREADS = WARPS * LANES;
    Choice &choice = *(Choice *)shared;
    float *logits = (float *)(shared + sizeof(Choice));
    int count = work.num_experts;
    wait_for_x();
    for (int i = thread_index(); i < count; i += THREADS) {
        logits[i] = receive_one(work.logits + i);
    }
    wait_for_block();
    for (int i = thread_index(); i < count; i += THREADS) {
        float mine = logits[i], best = minus_infinity();
        int place = 0;
        bool are_numbers = true;
        for (int j = 0; j < count; j++) {
            float other = logits[j];
            place += other > mine || (other == mine && j < i);
            best = larger(best, other);
            are_numbers &= other < -minus_infinity();
        }
        are_numbers &= best > minus_infinity();
        if (!are_numbers) place = i;  // the first ones, and no shares
        if (place >= CHOSEN) continue;
        choice.chosen[place] = i;
        choice.powers[place] = are_numbers ? exponential(mine - best) : minus_infinity() * 0.0f;
        choice.scales[place] = work.expert_scale[i];
    }
    wait_for_block();
    int i = thread_index();
    if (i >= CHOSEN) return;
    float total = 0.0f;
    UNROLL for (int j = 0; j < CHOSEN; j++) total += choice.powers[j];
    work.choice[i] = choice.chosen[i];
    work.choice_shares[i] = choice.powers[i] / total * choice.scales[i];
}
