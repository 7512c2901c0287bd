// The end of a tile: parts of several blocks become one, and the result is written. Included by
// fp8_rows.cu.

// Where a block leaves its part of a tile: of the one that it began with, or of its last one. A
// thread's sums lie four by four beside those of the others.
DEVICE Floats *part_of(const Work &work, int team, bool is_second) {
    int warpgroup = thread_index() / WARPGROUP, block = team * TEAM + rank();
    u64 place = ((u64)block * 2 + is_second) * WARPGROUPS + warpgroup;
    return (Floats *)work.parts + place * (QUADS * WARPGROUP) + thread_index() % WARPGROUP;
}

// Leaves a part for who comes last. Whether this warpgroup does, or where it is gated both: then
// they have all sums.
DEVICE bool join_parts(const Work &work, Memory &memory, const Line &line, int tile, Sums &total) {
    constexpr int TOGETHER = GATED ? WARPGROUPS * WARPGROUP : WARPGROUP;
    int begin = tile * work.num_steps, warpgroup = thread_index() / WARPGROUP;
    int group = GATED ? 0 : warpgroup;
    int first = line.owner_of(begin), last = line.owner_of(begin + work.num_steps - 1);
    bool is_first_shared = line.first_unit(first) < begin;  // with a tile before
    int team = team_index();
    float *sums = &total[0][0];
    Floats *mine = part_of(work, team, team == first && is_first_shared);
    UNROLL for (int i = 0; i < QUADS; i++) {
        const float *quad = sums + 4 * i;
        store_past(mine + i * WARPGROUP, {quad[0], quad[1], quad[2], quad[3]});
    }
    wait_for_some<TOGETHER>(1 + group);
    if (thread_index() % TOGETHER == 0) {
        int *counter = work.arrivals + (tile * TEAM + rank()) * WARPGROUPS + group;
        memory.is_last[group] = is_last(counter, last - first + 1);
    }
    wait_for_some<TOGETHER>(1 + group);
    if (!memory.is_last[group]) return false;
    UNROLL for (int i = 0; i < 4 * QUADS; i++) sums[i] = 0;
    for (int other = first; other <= last; other++) {
        const Floats *part = part_of(work, other, other == first && is_first_shared);
        UNROLL for (int i = 0; i < QUADS; i += AT_A_TIME) {
            Floats found[AT_A_TIME];
            UNROLL for (int j = 0; j < AT_A_TIME && i + j < QUADS; j++) {
                found[j] = load_past(part + (i + j) * WARPGROUP);
            }
            UNROLL for (int j = 0; j < 4 * AT_A_TIME && i + j / 4 < QUADS; j++) {
                sums[4 * i + j] += found[j / 4].of[j % 4];
            }
        }
    }
    return true;
}

// Eight neighbours of the result: some of a warpgroup's, or what gates and ups give.
DEVICE Words read_eight(const Memory &memory, int warpgroup, int place) {
    Words found = *(const Words *)(memory.output[warpgroup] + place);
    if (!GATED) return found;
    Words ups = *(const Words *)(memory.output[1] + place);
    const u32 gates[4] = {found.x, found.y, found.z, found.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
    u32 both[4];
    UNROLL for (int i = 0; i < 4; i++) {
        float low = rounded(activate(bfloat16(gates[i]))) * bfloat16(up[i]);
        float high = rounded(activate(as_float(gates[i] & 0xFFFF0000)));
        both[i] = two_bfloat16(low, high * as_float(up[i] & 0xFFFF0000));
    }
    return {both[0], both[1], both[2], both[3]};
}

// Writes some rows from shared memory, sixteen bytes at a time where rows allow it.
DEVICE void write_rows(const Work &work, const Memory &memory, int first_row, int column) {
    constexpr int CHUNKS = WIDE / 8, TOGETHER = GATED ? WARPGROUPS * WARPGROUP : WARPGROUP;
    int num_rows = min_of(CHUNK, work.num_rows - first_row);
    int warpgroup = GATED ? 0 : thread_index() / WARPGROUP;
    for (int i = thread_index() % TOGETHER; i < num_rows * CHUNKS; i += TOGETHER) {
        int row = i / CHUNKS, k = i % CHUNKS * 8;
        if (column + k >= work.num_columns) continue;
        Words eight = read_eight(memory, warpgroup, row * STRIDE + k);
        u16 *target = work.output + (u64)(first_row + row) * work.num_columns + column + k;
        if (work.num_columns % 8 == 0) {
            *(Words *)target = eight;
        } else {
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
            UNROLL for (int j = 0; j < 8; j++) {
                if (column + k + j < work.num_columns) target[j] = words[j / 2] >> j % 2 * 16;
            }
        }
    }
}

// A thread has two columns of the result for some rows: shared memory turns them.
DEVICE void write_tile(const Work &work, Memory &memory, int tile, Sums &total) {
    constexpr int TOGETHER = GATED ? WARPGROUPS * WARPGROUP : WARPGROUP;
    int thread = found_again(thread_index());  // addresses would fill registers all the time
    int warpgroup = thread / WARPGROUP, lane = thread % LANES, group = GATED ? 0 : warpgroup;
    int first_row = num_row_of(work, tile);
    int column = first_column(work, tile) + (GATED ? 0 : warpgroup * WIDE);
    if (column >= work.num_columns) return;
    int here = thread / LANES % 4 * 16 + lane / 4, most = work.packed_rows - 1;
    int row = first_weight(work, tile, warpgroup) + here;
    Two scales = scales_of(work.scale, min_of(row, most), min_of(row + 8, most));
    const float *sums = &total[0][0];
    u16 *turned = memory.output[warpgroup];
    UNROLL for (int chunk = 0; chunk < ROWS; chunk += CHUNK) {
        if (first_row + chunk >= work.num_rows) return;
        Two of_x[CHUNK / 8];
        UNROLL for (int i = 0; i < CHUNK / 8; i++) {
            of_x[i] = load_two(work.scales + first_row + chunk + i * 8 + lane % 4 * 2);
        }
        wait_for_some<TOGETHER>(1 + group);  // all have read what was there
        UNROLL for (int i = 0; i < CHUNK / 8; i++) {
            const float *four = sums + (chunk / 8 + i) * 4;
            u16 *to = turned + (i * 8 + lane % 4 * 2) * STRIDE + here;
            to[0] = to_bfloat16(four[0] * scales.x * of_x[i].x);
            to[STRIDE] = to_bfloat16(four[1] * scales.x * of_x[i].y);
            to[8] = to_bfloat16(four[2] * scales.y * of_x[i].x);
            to[STRIDE + 8] = to_bfloat16(four[3] * scales.y * of_x[i].y);
        }
        wait_for_some<TOGETHER>(1 + group);
        write_rows(work, memory, first_row + chunk, column);
    }
}
