// Where two warpgroups share the columns of a tile's sums, and find weights by turns. Included by
// attend_many.cu.
//
// The scores of a unit's pairs are one warpgroup's, those of the next unit the other's: while one
// weighs, the other's products are on their way. It leaves weights and the best scores so far in
// shared memory, and both multiply them with their columns of the values. So, of either warpgroup:
//
//   its own unit       weights, then its columns of the values
//   the other's unit   scores of the next one begin, then, by the weights found there, the values

DEVICE void make_turns(Turns &turns) {
    for (int i = 0; i < WARPGROUPS; i++) {
        make_signal(to_shared((char *)&turns.full[i]), 4);
        make_signal(to_shared((char *)&turns.empty[i]), 4);  // by the other one
    }
}

// Weights lie in rows of 128 bytes, as products expect them.
DEVICE void write_weights(const float *scores, const float *best, char *weights, float *bests) {
    int lane = thread_index() % LANES;
    UNROLL for (int half = 0; half < 2; half++) {
        int row = thread_index() / LANES % 4 * 16 + lane / 4 + half * 8;
        char *to = weights + row * ROW_BYTES + lane % 4 * 4;
        UNROLL for (int i = 0; i < KEYS / 8; i++) {
            const float *two = scores + 4 * i + 2 * half;
            *(u32 *)(to + exchanged(row, i) * 16) = two_bfloat16(two[0], two[1]);
        }
        if (lane % 4 == 0) bests[row] = best[half];
    }
    show_writes_to_products();
}
DEVICE void read_best(const float *bests, float *best) {
    int row = thread_index() / LANES % 4 * 16 + thread_index() % LANES / 4;
    best[0] = bests[row];
    best[1] = bests[row + 8];
}

// Leaves COUNT stages, one after the other, as their products are found. So many slices' are on
// their way, the first of them theirs.
template <int COUNT, int ON_THEIR_WAY>
DEVICE void leave_found(Memory &memory, Stage &stage) {
    UNROLL for (int i = 0; i < COUNT; i++) {
        wait_for_products(ON_THEIR_WAY - 1 - i);
        leave_stage(memory, stage);
    }
}

DEVICE void begin_values_by(const char *weights, Memory &memory, Stage &stage, const Tile &tile,
                            int start, Sums &sums) {
    u64 rows = rows_at(to_shared((char *)weights));
    UNROLL for (int slice = 0; slice < SLICES; slice++) {
        u64 values = find_values(memory, stage, tile, start + slice * SLICE_VALUES);
        begin_products();
        UNROLL for (int i = 0; i < SLICE_VALUES / 16; i++) {
            int step = slice * (SLICE_VALUES / 16) + i;
            multiply_shared_columns<COLUMNS>(sums.of, rows + step * 2,
                                             values + i * (16 * ROW_BYTES / 16));
        }
        commit_products();
        stage.go_on();
    }
}

// The sums of weights of both, whose keys are not the same. They stand where weights did that nobody
// needs any longer; the next ones there come after the other's first ones of the next tile.
DEVICE void add_totals(Turns &turns, Sums &sums) {
    Two *totals = (Two *)turns.weights[1];
    int thread = thread_index() % WARPGROUP;
    wait_for_some<WARPGROUPS * WARPGROUP>(1 + WARPGROUPS);
    totals[warpgroup_index() * WARPGROUP + thread] = {sums.total[0], sums.total[1]};
    wait_for_some<WARPGROUPS * WARPGROUP>(1 + WARPGROUPS);
    Two one = totals[thread], other = totals[WARPGROUP + thread];
    sums.total[0] = one.x + other.x;
    sums.total[1] = one.y + other.y;
}

// A warpgroup's way through the units of a tile.
struct Way {
    int i;         // the unit
    Stage values;  // of the last one: they are on their way, or this warpgroup has left them
    float scores[SCORES];  // of its own next unit
};

DEVICE void begin_unit_values(const Work &work, Memory &memory, const Piece &piece, int owner,
                              Progress &progress, Way &way, Sums &sums) {
    way.values = progress.stage;
    begin_values_by(memory.turns.weights[owner], memory, progress.stage, piece.tile,
                    piece.key_of(way.i), sums);
    progress.turns ^= 1 << owner;
    way.i++;
}

// The other's unit, once its weights are there. Nothing is on its way; then its values are.
DEVICE void follow_turn(const Work &work, Memory &memory, const Piece &piece, Progress &progress,
                        Way &way, Sums &sums) {
    auto &turns = memory.turns;
    int other = warpgroup_index() ^ 1;
    float best[2], decay[2];
    wait_for_signal(to_shared((char *)&turns.full[other]), progress.turns >> other & 1);
    read_best(turns.best[other], best);
    raise_best(best, work.scale, sums, decay);
    shrink(decay, sums);
    begin_unit_values(work, memory, piece, other, progress, way, sums);
}

// Its own unit: weights from its scores, while values of the other's are on their way, where there
// is one before. Then its values are.
template <bool IS_FIRST>
DEVICE void take_turn(const Work &work, Memory &memory, const Piece &piece, Progress &progress,
                      Way &way, Sums &sums) {
    auto &turns = memory.turns;
    int mine = warpgroup_index();
    u32 turn = progress.turns >> mine & 1;
    float best[2] = {sums.best[0], sums.best[1]}, decay[2];
    hide(work, piece.tile, piece.key_of(way.i), way.scores);
    find_best(way.scores, best);
    raise_best(best, work.scale, sums, decay);
    weigh(way.scores, work.scale, sums);
    UNROLL for (int i = 0; i < SCORES; i++) way.scores[i] = found_now(way.scores[i]);
    if (!IS_FIRST) {
        leave_found<SLICES, SLICES>(memory, way.values);
        leave(to_shared((char *)&turns.empty[mine ^ 1]));
    }
    wait_for_signal(to_shared((char *)&turns.empty[mine]), turn ^ 1);
    write_weights(way.scores, best, turns.weights[mine], turns.best[mine]);
    wait_for_warp();
    leave(to_shared((char *)&turns.full[mine]));
    if (!IS_FIRST) shrink(decay, sums);
    if (way.i + 1 < piece.count) pass_stages(memory, progress.stage);
    wait_for_signal(to_shared((char *)&turns.full[mine]), turn);
    begin_unit_values(work, memory, piece, mine, progress, way, sums);
}

// The scores of its own next unit, behind values that are on their way; then nothing is.
DEVICE void find_scores(Memory &memory, const Piece &piece, Progress &progress, Way &way) {
    if (way.i + 1 < piece.count) {
        Stage keys = progress.stage;
        begin_scores(memory, progress.stage, way.scores);
        leave_found<SLICES, 2 * SLICES>(memory, way.values);
        leave_found<SLICES, SLICES>(memory, keys);
    } else {
        leave_found<SLICES, SLICES>(memory, way.values);
        leave(to_shared((char *)&memory.query_empty));
    }
}

DEVICE void multiply_by_turns(const Work &work, Memory &memory, const Piece &piece,
                              Progress &progress, Sums &sums) {
    int mine = warpgroup_index();
    Way way;
    way.i = 0;
    Stage keys = progress.stage;
    if (mine == 0) {
        begin_scores(memory, progress.stage, way.scores);
        leave_found<SLICES, SLICES>(memory, keys);
        take_turn<true>(work, memory, piece, progress, way, sums);
        find_scores(memory, piece, progress, way);
    } else {
        pass_stages(memory, progress.stage);
        if (piece.count > 1) {
            keys = progress.stage;
            begin_scores(memory, progress.stage, way.scores);
            leave_found<SLICES, SLICES>(memory, keys);
        } else {
            leave(to_shared((char *)&memory.query_empty));
        }
    }
    while (way.i + 1 < piece.count) {
        follow_turn(work, memory, piece, progress, way, sums);
        take_turn<false>(work, memory, piece, progress, way, sums);
        find_scores(memory, piece, progress, way);
    }
    if (way.i < piece.count) {
        follow_turn(work, memory, piece, progress, way, sums);
        leave_found<SLICES, SLICES>(memory, way.values);
        leave(to_shared((char *)&memory.turns.empty[mine ^ 1]));
    }
    add_totals(memory.turns, sums);
}
