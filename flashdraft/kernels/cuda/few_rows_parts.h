// Parts of a tile of the result: of the warps of a block, and of the blocks. Included by few_rows.cu.
//
// Sums go from hand to hand as a thread holds them. With one row of x, only every fourth thread has
// any, and half of what it has would be another row's.

constexpr int SUM_LOADS = ONE_ROW ? (TILES + 1) / 2 : TILES * ROW_TILES;  // four sums at a time
constexpr int SUM_LANES = ONE_ROW ? LANES / 4 : LANES;
constexpr int SUMS_BYTES = SUM_LOADS * SUM_LANES * 16;
constexpr int AT_A_TIME = 4;  // parts

DEVICE int sums_lane(int lane) { return ONE_ROW ? lane / 4 : lane; }
DEVICE bool has_sums(int lane) { return !ONE_ROW || lane % 4 == 0; }

DEVICE Floats get_sums(const Totals &total, int i) {
    Floats four = {};
    if (ONE_ROW) {
        UNROLL for (int k = 0; k < 2 * TILES; k++) four.of[k] = total[k / 2][0][k % 2 * 2];
    } else {
        UNROLL for (int k = 0; k < 4; k++) four.of[k] = total[i / ROW_TILES][i % ROW_TILES][k];
    }
    return four;
}

DEVICE void add_sums(Totals &total, int i, Floats four) {
    if (ONE_ROW) {
        UNROLL for (int k = 0; k < 2 * TILES; k++) total[k / 2][0][k % 2 * 2] += four.of[k];
    } else {
        UNROLL for (int k = 0; k < 4; k++) total[i / ROW_TILES][i % ROW_TILES][k] += four.of[k];
    }
}

// Keeps a warp's part of a tile in shared memory.
DEVICE void put_sums(char *place, int lane, const Totals &total) {
    UNROLL for (int i = 0; i < SUM_LOADS; i++) {
        Floats *target = (Floats *)place + i * SUM_LANES + sums_lane(lane);
        if (has_sums(lane)) *target = get_sums(total, i);
    }
}

// Adds up parts in their order, with several loads on their way at once.
template <typename Load>
DEVICE void add_parts(Totals &total, int count, Load load) {
    for (int first = 0; first < count; first += AT_A_TIME) {
        Floats found[AT_A_TIME][SUM_LOADS];
        UNROLL for (int j = 0; j < AT_A_TIME; j++) {
            UNROLL for (int i = 0; i < SUM_LOADS; i++) {
                found[j][i] = load(min_of(first + j, count - 1), i);
            }
        }
        UNROLL for (int j = 0; j < AT_A_TIME; j++) {
            bool is_there = first + j < count;
            UNROLL for (int i = 0; i < SUM_LOADS; i++) {
                UNROLL for (int k = 0; k < 4; k++) {
                    found[j][i].of[k] = is_there ? found[j][i].of[k] : 0.0f;
                }
                add_sums(total, i, found[j][i]);
            }
        }
    }
}

// A block has its part of a tile. Who comes last adds all parts up, in their order.
DEVICE void end_tile(const Work &work, const Share &share, int tile, int lane, Totals &total) {
    int first = share.block_of(tile * work.slice_steps);
    int last = share.block_of((tile + 1) * work.slice_steps - 1);
    int per_slice = last - first + 1, num_parts = per_slice * work.num_slices;
    if (num_parts > 1) {
        Floats *parts = (Floats *)work.parts + sums_lane(lane);
        parts += (u64)tile * work.max_parts * (SUM_LOADS * SUM_LANES);
        int mine = share.slice * per_slice + share.block - first;
        UNROLL for (int i = 0; i < SUM_LOADS; i++) {
            Floats *target = parts + (mine * SUM_LOADS + i) * SUM_LANES;
            if (has_sums(lane)) store_past(target, get_sums(total, i));
        }
        if (!is_last(work.arrivals + tile, num_parts, lane)) return;
        UNROLL for (int i = 0; i < TILES * ROW_TILES * 4; i++) {
            total[i / 4 / ROW_TILES][i / 4 % ROW_TILES][i % 4] = 0.0f;
        }
        add_parts(total, num_parts, [=](int part, int i) {
            return load_past(parts + (part * SUM_LOADS + i) * SUM_LANES);
        });
    }
    write_tile(work, tile, lane, total);
}

// Tiles that several warps of a block have a part in, or that are another block's too. All parts
// are in shared memory by now: what a warp began with in its head, what it ended with in its ring.
DEVICE void end_shared_tiles(const Work &work, const Share &share, const char *rings,
                             const char *heads, int warp_here, int lane) {
    u32 first_warp = share.block * WARPS;
    u32 begin = share.first_unit(first_warp), end = share.first_unit(first_warp + WARPS);
    for (u32 tile = begin / work.slice_steps + warp_here; tile * work.slice_steps < end;
         tile += WARPS) {
        u32 from = max_of(begin, tile * work.slice_steps);
        u32 to = min_of(end, (tile + 1) * work.slice_steps);
        u32 first = share.warp_of(from), last = share.warp_of(to - 1);
        if (first == last && to - from == (u32)work.slice_steps) continue;  // it is written
        bool goes_on = share.first_unit(last + 1) > to;  // only the last one's share may
        Totals total = {};
        add_parts(total, last - first + 1, [=](int part, int i) {
            u32 warp = first + part, here = warp - first_warp;
            const char *place = warp == last && goes_on ? heads + here * SUMS_BYTES
                                                        : rings + here * (DEPTH * SLOT_BYTES);
            return ((const Floats *)place)[i * SUM_LANES + sums_lane(lane)];
        });
        end_tile(work, share, tile, lane, total);
    }
}
