// The end of a tile: parts of several blocks become one, and the result is written. Included by
// many_rows.cu.

// Quads of a part that are on their way, if registers have room.
constexpr int AT_A_TIME = QUADS <= 16 && WARPGROUPS == 2 ? QUADS : QUADS % 8 == 0 ? 8 : 4;
static_assert(QUADS % AT_A_TIME == 0, "no quad is left over");

// Where somebody leaves its part of the tile that it began with. A thread's sums lie four by four
// beside those of the others.
DEVICE Floats *part_of(const Work &work, int piece) {
    u64 place = (u64)piece * WARPGROUPS + thread_index() / WARPGROUP;
    return (Floats *)work.parts + place * (QUADS * WARPGROUP) + thread_index() % WARPGROUP;
}

// Who has the first part of a tile waits for the others and has all sums then; the others leave
// theirs. Whether this warpgroup has all.
DEVICE bool join_parts(const Work &work, const Line &line, int piece, int tile, Sums &total) {
    int begin = tile * work.num_steps, warpgroup = thread_index() / WARPGROUP;
    int first = line.owner_of(begin), last = line.owner_of(begin + work.num_steps - 1);
    int *counter = work.arrivals + tile * WARPGROUPS + warpgroup;
    float *sums = &total[0][0];
    if (piece != first) {
        Floats *left = part_of(work, piece);
        UNROLL for (int i = 0; i < QUADS; i++) {
            const float *quad = sums + 4 * i;
            store_past(left + i * WARPGROUP, {quad[0], quad[1], quad[2], quad[3]});
        }
        wait_for_some<WARPGROUP>(1 + warpgroup);
        if (thread_index() % WARPGROUP == 0) count_one(counter);
        return false;
    }
    if (thread_index() % WARPGROUP == 0) wait_for_count(counter, last - first);
    wait_for_some<WARPGROUP>(1 + warpgroup);
    for (int other = first + 1; other <= last; other++) {
        const Floats *part = part_of(work, other);
        UNROLL for (int i = 0; i < QUADS; i += AT_A_TIME) {
            Floats found[AT_A_TIME];
            UNROLL for (int j = 0; j < AT_A_TIME; j++) {
                found[j] = load_past(part + (i + j) * WARPGROUP);
            }
            UNROLL for (int j = 0; j < 4 * AT_A_TIME; j++) {
                sums[4 * i + j] += found[j / 4].of[j % 4];
            }
        }
    }
    return true;
}

// Copies a part of the result from shared memory, sixteen bytes at a time where rows allow it.
DEVICE void write_columns(const Work &work, const u16 *from, int first_row, int first_column) {
    constexpr int CHUNKS = TILE_COLUMNS / 8;
    int num_rows = min_of(TURNED_ROWS, work.num_rows - first_row);
    for (int i = thread_index() % WARPGROUP; i < num_rows * CHUNKS; i += WARPGROUP) {
        int row = i / CHUNKS, column = first_column + i % CHUNKS * 8;
        const u16 *chunk = from + row * STRIDE + i % CHUNKS * 8;
        u16 *target = work.output + (u64)(first_row + row) * work.num_columns + column;
        if (work.num_columns % 8 == 0) {
            if (column < work.num_columns) *(Words *)target = *(const Words *)chunk;
        } else {
            for (int k = 0; k < 8; k++) {
                if (column + k < work.num_columns) target[k] = chunk[k];
            }
        }
    }
}

// A thread has two columns of the result, or a gated one, for some rows: shared memory turns them.
DEVICE void write_tile(const Work &work, Memory &memory, int tile, Sums &total) {
    int warpgroup = thread_index() / WARPGROUP, warp = thread_index() / LANES % 4;
    int lane = found_again(thread_index() % LANES);  // addresses would fill registers all the time
    int first_row = tile / work.column_tiles * ROWS;
    u16 *turned = memory.output[warpgroup];
    UNROLL for (int i = 0; i < TILES; i++) {
        int column = first_column(work, tile, i), here = warp * TILE_ROWS + lane / 4;
        if (column >= work.num_columns) return;
        int row = column + here;
        Two scales = scales_of(work.scale, row, GATED ? work.up_rows + row : row + 8);
        UNROLL for (int first = 0; first < ROWS; first += TURNED_ROWS) {
            if (first_row + first >= work.num_rows) break;
            wait_for_some<WARPGROUP>(1 + warpgroup);  // all have read what was there
            UNROLL for (int j = 0; j < TURNED_ROWS / 2; j++) {
                if (j / 2 % 2 == 1) continue;  // the other row's
                const float *sums = total[i] + first / 2;
                Two found = end_two(sums[j], sums[j + 2], scales);
                u16 *to = turned + (j / 4 * 8 + lane % 4 * 2 + j % 2) * STRIDE;
                to[here] = to_bfloat16(found.x);
                if (!GATED) to[here + 8] = to_bfloat16(found.y);
            }
            wait_for_some<WARPGROUP>(1 + warpgroup);
            write_columns(work, turned, first_row + first, column);
        }
    }
}
