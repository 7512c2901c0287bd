// Which experts a row has, by the logits of all of them: those with the largest, of equals the
// first, and their shares: what triton_routing.py says of a row. Included by few_rows.cu.

struct Choice {
    int chosen[CHOSEN > 0 ? CHOSEN : 1];
    float shares[CHOSEN > 0 ? CHOSEN : 1];
};

// Every block chooses for itself. An expert's place is the number of those before it, so that
// nobody waits for another; `scratch` has room for all logits.
DEVICE void choose(const Work &work, float *scratch, Choice &choice) {
    int count = work.num_experts;
    for (int i = thread_index(); i < count; i += WARPS * LANES) {
        scratch[i] = load_float(work.logits + i);
    }
    wait_for_block();
    for (int i = thread_index(); i < count; i += WARPS * LANES) {
        float mine = scratch[i], best = minus_infinity();
        int place = 0;
        bool are_numbers = true;
        for (int j = 0; j < count; j++) {
            float other = scratch[j];
            place += other > mine || (other == mine && j < i);
            best = larger(best, other);
            are_numbers &= other < -minus_infinity();
        }
        are_numbers &= best > minus_infinity();
        if (!are_numbers) place = i;  // the first ones, and no shares
        if (place >= CHOSEN) continue;
        choice.chosen[place] = i;
        choice.shares[place] = are_numbers ? exponential(mine - best) : minus_infinity() * 0.0f;
    }
    wait_for_block();
    float total = 0.0f;
    UNROLL for (int i = 0; i < CHOSEN; i++) total += choice.shares[i];
    wait_for_block();
    int i = thread_index();
    if (i < CHOSEN && work.expert_scale != nullptr) {
        choice.shares[i] = choice.shares[i] / total * work.expert_scale[choice.chosen[i]];
    }
    wait_for_block();
}
