// A tile's scores and sums in a warpgroup's registers, and their end. Included by attend_many.cu.
//
// A thread has two pairs: those of the rows lane / 4 and lane / 4 + 8 of its warp's sixteen.

struct Sums {
    float of[4 * QUADS];
    float best[2];   // scores so far
    float total[2];  // of the weights of this thread's keys
};

DEVICE int warpgroup_index() { return thread_index() / WARPGROUP; }
DEVICE int pair_in_block() { return SHARES_PAIRS ? warpgroup_index() * 64 : 0; }  // its first
DEVICE int first_pair() { return rank() * BLOCK_PAIRS + pair_in_block(); }       // in the tile
DEVICE int pair_in_tile(int half) {
    int warp = thread_index() / LANES % 4, lane = thread_index() % LANES;
    return first_pair() + warp * 16 + lane / 4 + half * 8;
}
DEVICE int first_column() { return SHARES_PAIRS ? 0 : warpgroup_index() * COLUMNS; }

DEVICE void leave(Shared signal) {
    if (thread_index() % LANES == 0) arrive(signal);
}
DEVICE char *wait_for_stage(Memory &memory, const Stage &stage) {
    wait_for_signal(to_shared((char *)&memory.full[stage.place]), stage.turn);
    return memory.stages[stage.place];
}
// The whole team's blocks may fill it anew.
DEVICE void leave_stage(Memory &memory, Stage &stage) {
    Shared empty = to_shared((char *)&memory.empty[stage.place]);
    if (TEAM == 1) {
        leave(empty);
    } else if (thread_index() % LANES < TEAM) {
        arrive_at(empty, thread_index() % LANES);
    }
    stage.go_on();
}
// Of a unit's keys or values.
DEVICE void pass_stages(Memory &memory, Stage &stage) {
    for (int i = 0; i < SLICES; i++) {
        wait_for_stage(memory, stage);
        leave_stage(memory, stage);
    }
}

// Scores of KEYS keys are on their way, slice by slice.
DEVICE void begin_scores(Memory &memory, Stage &stage, float *scores) {
    u64 query = rows_at(to_shared(memory.query[0] + pair_in_block() * ROW_BYTES));
    UNROLL for (int slice = 0; slice < SLICES; slice++) {
        u64 keys = rows_at(to_shared(wait_for_stage(memory, stage)));
        begin_products();
        UNROLL for (int i = 0; i < KEY_BLOCKS * 4; i++) {
            int block = slice * KEY_BLOCKS + i / 4, step = i % 4 * 2;  // in units of 16 bytes
            multiply_shared<KEYS>(scores, query + block * (QUERY_BLOCK / 16) + step,
                                  keys + i / 4 * (KEY_BLOCK / 16) + step, slice + i > 0);
        }
        commit_products();
        stage.go_on();
    }
}

// What lies in the place of values that the tile has not may be no number: zeros take its place.
DEVICE void clear_values(char *blocks, const Tile &tile, int start) {
    constexpr int COLUMN_CHUNKS = COLUMNS / 8;
    for (int i = thread_index() % WARPGROUP; i < SLICE_VALUES * COLUMN_CHUNKS; i += WARPGROUP) {
        int row = i / COLUMN_CHUNKS, chunk = i % COLUMN_CHUNKS;
        char *place = blocks + chunk / 8 * VALUE_BLOCK + row * ROW_BYTES + chunk % 8 * 16;
        if (start + row < tile.low || start + row >= tile.high) *(Words *)place = {};
    }
    show_writes_to_products();
    wait_for_some<WARPGROUP>(1 + warpgroup_index());
}

// Of a unit's values, a slice that has come; `start`: its first key.
DEVICE u64 find_values(Memory &memory, const Stage &stage, const Tile &tile, int start) {
    char *blocks = wait_for_stage(memory, stage) + first_column() / DEPTH * VALUE_BLOCK;
    if (start < tile.low || start + SLICE_VALUES > tile.high) clear_values(blocks, tile, start);
    return columns_at(to_shared(blocks), VALUE_BLOCK);
}

DEVICE u64 first_bits(int count) {
    return count >= 64 ? ~0ull : (1ull << max_of(count, 0)) - 1;
}

// Where there are trees: which of the keys from `start` on a row sees, a bit each.
DEVICE u64 find_seen(const Work &work, const Tile &tile, int row, int start) {
    int place = tile.first_row + row, context = tile.context - start;  // keys before its own block
    int reach = AHEAD ? min_of(row + work.ahead[place], tile.num_rows - 1) : row;
    u64 seen = first_bits(context + reach + 1);
    if (WINDOWED) seen &= ~first_bits(context + work.depths[place] - work.window + 1);
    if (tile.num_rows > MAX_TREE || context >= KEYS) return seen;
    u64 ancestors = work.ancestors[place];
    return seen & (context > 0 ? ancestors << context | first_bits(context) : ancestors >> -context);
}

// Scores that a row must not see become minus infinity.
DEVICE void hide(const Work &work, const Tile &tile, int start, float *scores) {
    int first = tile.first_position(), last = tile.last_position(), end = start + KEYS;
    int num_keys = tile.context + tile.num_rows;
    bool has_hidden = end > num_keys || (CAUSAL && end - 1 > first) ||
                      (WINDOWED && start <= last - work.window) ||
                      (WINDOWED && !CAUSAL && end > first + work.window);
    if (!has_hidden) return;
    UNROLL for (int half = 0; half < 2; half++) {
        int row = (tile.pair + pair_in_tile(half)) / GROUP, position = tile.context + row;
        int reach = position;  // the last key in order
        if (AHEAD && row < tile.num_rows) reach += work.ahead[tile.first_row + row];
        u64 seen = TREES && row < tile.num_rows ? find_seen(work, tile, row, start) : 0;
        seen >>= thread_index() % 4 * 2;
        UNROLL for (int i = 0; i < SCORES / 2; i++) {
            int key = start + i / 2 * 8 + thread_index() % 4 * 2 + i % 2;
            bool is_seen = key < num_keys && (!CAUSAL || key <= reach) &&
                           (!WINDOWED || (key > position - work.window &&
                                          (CAUSAL || key < position + work.window)));
            if (TREES) is_seen = seen >> (i / 2 * 8 + i % 2) & 1;
            if (!is_seen) scores[i / 2 * 4 + half * 2 + i % 2] = minus_infinity();
        }
    }
}

// The best of a thread's pairs so far, from those before.
DEVICE void find_best(const float *scores, float *best) {
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int i = 0; i < SCORES; i++) {
            if (i / 2 % 2 == half) best[half] = larger(best[half], scores[i]);
        }
        best[half] = most_of_four(best[half]);
    }
}
// Nothing seen so far: any finite reference keeps the weights at exact zeros.
DEVICE float find_reference(float best, float scale) {
    return best == minus_infinity() ? 0 : best * scale;
}
// By what all sums so far are to shrink; those of weights do.
DEVICE void raise_best(const float *best, float scale, Sums &sums, float *decay) {
    UNROLL for (int half = 0; half < 2; half++) {
        float reference = find_reference(best[half], scale);
        decay[half] = quick_power_of_two(sums.best[half] * scale - reference);
        sums.total[half] *= decay[half];
        sums.best[half] = best[half];
    }
}
// Scores become their weights, against the best score so far.
DEVICE void weigh(float *scores, float scale, Sums &sums) {
    UNROLL for (int half = 0; half < 2; half++) {
        float reference = find_reference(sums.best[half], scale), total = 0;
        UNROLL for (int i = 0; i < SCORES; i++) {
            if (i / 2 % 2 != half) continue;
            scores[i] = quick_power_of_two(scores[i] * scale - reference);
            total += scores[i];
        }
        sums.total[half] += total;
    }
}
// Behind many keys the best score is rarely raised.
DEVICE void shrink(const float *decay, Sums &sums) {
    if (vote(decay[0] != 1 || decay[1] != 1) == 0) return;
    UNROLL for (int i = 0; i < 4 * QUADS; i++) sums.of[i] *= decay[i / 2 % 2];
}

// -- the end of a tile

// Where a team leaves its part of a tile: of the one that it began with, or of its last one. A
// thread's sums lie four by four beside those of the others; the last four are its best and totals.
DEVICE Floats *part_of(const Work &work, int team, bool is_second) {
    u64 place = ((u64)team * 2 + is_second) * TEAM + rank();
    place = place * WARPGROUPS + warpgroup_index();
    return (Floats *)work.parts + place * ((QUADS + 1) * WARPGROUP) + thread_index() % WARPGROUP;
}

DEVICE void add_part(const Floats *part, const float *factors, Sums &sums) {
    constexpr int AT_A_TIME = 8;
    UNROLL for (int i = 0; i < QUADS; i += AT_A_TIME) {
        Floats found[AT_A_TIME];
        UNROLL for (int j = 0; j < AT_A_TIME; j++) found[j] = load_past(part + (i + j) * WARPGROUP);
        UNROLL for (int j = 0; j < 4 * AT_A_TIME; j++) {
            float number = found[j / 4].of[j % 4];
            sums.of[4 * i + j] += rounded_product(number, factors[j / 2 % 2]);
        }
    }
}

// By what a part's sums shrink, whose best scores these are.
DEVICE void find_factors(const float *best, float first, float second, float scale,
                         float *factors) {
    UNROLL for (int half = 0; half < 2; half++) {
        float reference = best[half] == minus_infinity() ? 0 : best[half];
        factors[half] = quick_power_of_two(((half == 0 ? first : second) - reference) * scale);
    }
}

// This part's sums, which need not be read again, and another's. Products are rounded before they
// are added: the same bits come out whichever of both is this one.
DEVICE void join_two(const Floats *part, float scale, Sums &sums) {
    Floats state = load_past(part + QUADS * WARPGROUP);
    float best[2] = {larger(sums.best[0], state.of[0]), larger(sums.best[1], state.of[2])};
    float mine[2], other[2];
    find_factors(best, sums.best[0], sums.best[1], scale, mine);
    find_factors(best, state.of[0], state.of[2], scale, other);
    UNROLL for (int half = 0; half < 2; half++) {
        float total = rounded_product(state.of[2 * half + 1], other[half]);
        sums.total[half] = rounded_product(sums.total[half], mine[half]) + total;
    }
    UNROLL for (int i = 0; i < 4 * QUADS; i++) {
        sums.of[i] = rounded_product(sums.of[i], mine[i / 2 % 2]);
    }
    add_part(part, other, sums);
}

// Leaves a part for who comes last. Whether this warpgroup does: then it has all sums.
DEVICE bool join_parts(const Work &work, Memory &memory, const Piece &piece, bool is_mine,
                       Sums &sums) {
    int warpgroup = warpgroup_index(), team = team_index();
    int last_unit = piece.tile_unit + piece.tile.num_units() - 1;
    int first = piece.tile_unit / piece.units, last = last_unit / piece.units;
    bool is_first_shared = piece.tile_unit > first * piece.units;  // with a tile before
    Floats *mine = part_of(work, team, team == first && is_first_shared);
    if (is_mine) {
        UNROLL for (int i = 0; i < QUADS; i++) {
            const float *quad = sums.of + 4 * i;
            store_past(mine + i * WARPGROUP, {quad[0], quad[1], quad[2], quad[3]});
        }
        Floats state = {sums.best[0], sums.total[0], sums.best[1], sums.total[1]};
        store_past(mine + QUADS * WARPGROUP, state);
    }
    wait_for_some<WARPGROUP>(1 + warpgroup);
    if (thread_index() % WARPGROUP == 0) {
        int place = first_place(memory, piece.tile.sequence) - first_place(memory, 0);
        place += piece.tile.pair / PAIRS + piece.head * work.num_places;
        int *counter = work.arrivals + (place * TEAM + rank()) * WARPGROUPS + warpgroup;
        memory.is_last[warpgroup] = is_last(counter, last - first + 1);
    }
    wait_for_some<WARPGROUP>(1 + warpgroup);
    if (!memory.is_last[warpgroup] || !is_mine) return false;
    if (last == first + 1) {
        int other = team == first ? last : first;
        join_two(part_of(work, other, other == first && is_first_shared), work.scale, sums);
        return true;
    }
    float best[2] = {minus_infinity(), minus_infinity()}, factors[2];
    for (int other = first; other <= last; other++) {
        const Floats *part = part_of(work, other, other == first && is_first_shared);
        Floats state = load_past(part + QUADS * WARPGROUP);
        best[0] = larger(best[0], state.of[0]);
        best[1] = larger(best[1], state.of[2]);
    }
    UNROLL for (int i = 0; i < 4 * QUADS; i++) sums.of[i] = 0;
    sums.total[0] = sums.total[1] = 0;
    for (int other = first; other <= last; other++) {
        const Floats *part = part_of(work, other, other == first && is_first_shared);
        Floats state = load_past(part + QUADS * WARPGROUP);
        find_factors(best, state.of[0], state.of[2], work.scale, factors);
        UNROLL for (int half = 0; half < 2; half++) {
            sums.total[half] += rounded_product(state.of[2 * half + 1], factors[half]);
        }
        add_part(part, factors, sums);
    }
    return true;
}

DEVICE void write_tile(const Work &work, const Piece &piece, const Sums &sums) {
    UNROLL for (int half = 0; half < 2; half++) {
        int pair = piece.tile.pair + pair_in_tile(half), row = pair / GROUP;
        float total = sum_of_four(sums.total[half]);
        if (row >= piece.tile.num_rows) continue;
        float factor = total == 0 ? 0 : 1 / total;
        u64 head = (u64)(piece.tile.first_row + row) * work.num_kv_heads + piece.head;
        u16 *to = work.output + (head * GROUP + pair % GROUP) * HEAD + first_column();
        UNROLL for (int i = 0; i < QUADS; i++) {
            const float *two = sums.of + 4 * i + 2 * half;
            u32 *place = (u32 *)(to + i * 8 + thread_index() % 4 * 2);
            *place = two_bfloat16(two[0] * factor, two[1] * factor);
        }
    }
}

// Where a warpgroup is among the stages, and whose turn it is.
struct Progress {
    Stage stage;
    u32 turns;  // of weights, a bit each
};

// A warpgroup that has no pair in a tile only follows.
DEVICE void pass_tile(Memory &memory, const Piece &piece, Stage &stage) {
    for (int i = 0; i < 2 * piece.count; i++) pass_stages(memory, stage);
    leave(to_shared((char *)&memory.query_empty));
}

// -- where each warpgroup has its own pairs

// Weights as products take them. Not while any are on their way: the compiler would let every
// product wait for the one before.
DEVICE void pack(const float *scores, Words *weights) {
    UNROLL for (int i = 0; i < STEPS; i++) {
        const float *these = scores + 8 * i;
        weights[i] = {two_bfloat16(these[0], these[1]), two_bfloat16(these[2], these[3]),
                      two_bfloat16(these[4], these[5]), two_bfloat16(these[6], these[7])};
    }
}

// Values by their weights, of as many keys, are on their way.
DEVICE void begin_values(Memory &memory, Stage &stage, const Tile &tile, int start,
                         const Words *weights, Sums &sums) {
    u64 values = find_values(memory, stage, tile, start);
    begin_products();
    UNROLL for (int i = 0; i < STEPS; i++) {
        multiply_columns<COLUMNS>(sums.of, weights[i], values + i * (16 * ROW_BYTES / 16));
    }
    commit_products();
    stage.go_on();
}

DEVICE void find_weights(const Work &work, const Piece &piece, int i, float *scores, Sums &sums,
                         float *decay) {
    hide(work, piece.tile, piece.key_of(i), scores);
    float best[2] = {sums.best[0], sums.best[1]};
    find_best(scores, best);
    raise_best(best, work.scale, sums, decay);
    weigh(scores, work.scale, sums);
}

// A warpgroup's work on the units of one tile.
DEVICE void multiply_pairs(const Work &work, Memory &memory, const Piece &piece, Stage &stage,
                           Sums &sums) {
    float scores[SCORES], decay[2];
    Words weights[STEPS];
    Stage keys = stage, values;
    begin_scores(memory, stage, scores);
    wait_for_products(0);
    leave_stage(memory, keys);
    find_weights(work, piece, 0, scores, sums, decay);
    pack(scores, weights);
    for (int i = 1; i < piece.count; i++) {
        keys = stage;
        begin_scores(memory, stage, scores);
        values = stage;
        begin_values(memory, stage, piece.tile, piece.key_of(i - 1), weights, sums);
        wait_for_products(1);
        leave_stage(memory, keys);
        find_weights(work, piece, i, scores, sums, decay);
        wait_for_products(0);
        leave_stage(memory, values);
        pack(scores, weights);
        shrink(decay, sums);
    }
    leave(to_shared((char *)&memory.query_empty));
    values = stage;
    begin_values(memory, stage, piece.tile, piece.key_of(piece.count - 1), weights, sums);
    wait_for_products(0);
    leave_stage(memory, values);
}
