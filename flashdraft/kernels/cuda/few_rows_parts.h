// Parts of a tile of the result: of the warps of a block, and of the blocks. Included by few_rows.cu.
//
// Sums go from hand to hand four at a time, as a thread holds them: a quad of every thread is a piece
// of a tile. With one row of x, only every fourth thread has any, and half of what it has would be
// another row's.

constexpr int PIECES = ONE_ROW ? (TILES + 1) / 2 : TILES * ROW_TILES;  // of a tile
constexpr int PIECE_QUADS = ONE_ROW ? LANES / 4 : LANES;
constexpr int SUMS_BYTES = PIECES * PIECE_QUADS * 16;
constexpr int JOBS = PIECES / JOB_PIECES;     // of a tile
constexpr int AT_A_TIME = 8 / JOB_PIECES;  // parts

DEVICE int quad_of(int lane) { return ONE_ROW ? lane / 4 : lane; }
DEVICE bool has_quad(int lane) { return !ONE_ROW || lane % 4 == 0; }

DEVICE Floats get_quad(const Totals &total, int piece) {
    Floats quad = {};
    if (ONE_ROW) {
        UNROLL for (int k = 0; k < 2 * TILES; k++) quad.of[k] = total[k / 2][0][k % 2 * 2];
    } else {
        UNROLL for (int k = 0; k < 4; k++) quad.of[k] = total[piece / ROW_TILES][piece % ROW_TILES][k];
    }
    return quad;
}

// A piece of the result, which is complete.
DEVICE void write_piece(const Work &work, int tile, int piece, int lane, Floats quad) {
    int column = tile * UNIT_ROWS + lane / 4;
    if (ONE_ROW) {
        if (!has_quad(lane)) return;
        UNROLL for (int i = 0; i < TILES; i++) {
            write_two(work, 0, column + i * TILE_ROWS, quad.of[2 * i], quad.of[2 * i + 1]);
        }
    } else {
        column += piece / ROW_TILES * TILE_ROWS;
        UNROLL for (int k = 0; k < 2; k++) {
            int row = piece % ROW_TILES * 8 + lane % 4 * 2 + k;
            write_two(work, row, column, quad.of[k], quad.of[2 + k]);
        }
    }
}

// Where blocks leave a thread's quad of a part, for who comes last.
DEVICE Floats *left_quad(const Work &work, int tile, int part, int piece, int lane) {
    u64 place = ((u64)tile * work.max_parts + part) * PIECES + piece;
    return (Floats *)work.parts + place * PIECE_QUADS + quad_of(lane);
}

// Keeps a warp's part of a tile in shared memory.
DEVICE void put_sums(char *place, int lane, const Totals &total) {
    UNROLL for (int i = 0; i < PIECES; i++) {
        Floats *target = (Floats *)place + i * PIECE_QUADS + quad_of(lane);
        if (has_quad(lane)) *target = get_quad(total, i);
    }
}

// A warp has all of a tile, of a slice of the depth: end_shared_tiles tells the others.
DEVICE void end_whole_tile(const Work &work, const Share &share, int tile, int lane,
                           const Totals &total) {
    UNROLL for (int i = 0; i < PIECES; i++) {
        Floats quad = get_quad(total, i);
        if (work.num_slices == 1) {
            write_piece(work, tile, i, lane, quad);
        } else if (has_quad(lane)) {
            store_past(left_quad(work, tile, share.slice, i, lane), quad);
        }
    }
}

// Some pieces of a tile, one after the other.
struct Quads {
    Floats of[JOB_PIECES];
};

// Adds up parts in their order, with several loads on their way at once.
template <typename Load>
DEVICE Quads add_parts(int count, Load load) {
    Quads total = {};
    for (int first = 0; first < count; first += AT_A_TIME) {
        Floats found[AT_A_TIME][JOB_PIECES];
        UNROLL for (int j = 0; j < AT_A_TIME; j++) {
            UNROLL for (int i = 0; i < JOB_PIECES; i++) {
                if (first + j < count) found[j][i] = load(first + j, i);
            }
        }
        UNROLL for (int j = 0; j < AT_A_TIME * JOB_PIECES * 4; j++) {
            int part = j / 4 / JOB_PIECES, i = j / 4 % JOB_PIECES;
            if (first + part < count) total.of[i].of[j % 4] += found[part][i].of[j % 4];
        }
    }
    return total;
}

// Pieces of a tile that this block has a part of.
struct Job {
    int tile, piece;
    int first_warp, num_warps;  // of this block; none if one of them has all of the tile
    int goes_on;                // the last one's share, behind the tile
    int mine, num_parts;        // of the blocks

    DEVICE Job of_lane(int lane) const {
        return {from_lane(tile, lane),      from_lane(piece, lane),   from_lane(first_warp, lane),
                from_lane(num_warps, lane), from_lane(goes_on, lane), from_lane(mine, lane),
                from_lane(num_parts, lane)};
    }
};

DEVICE Job find_job(const Work &work, const Share &share, int begin, int end, int number) {
    int steps = work.slice_steps, tile = begin / steps + number / JOBS;
    if (tile * steps >= end) return {};
    int from = max_of(begin, tile * steps), to = min_of(end, (tile + 1) * steps);
    int first = share.warp_of(from), last = share.warp_of(to - 1);
    int first_block = share.block_of(tile * steps);
    int num_blocks = share.block_of((tile + 1) * steps - 1) - first_block + 1;
    bool is_whole = first == last && to - from == steps;
    return {tile,
            number % JOBS * JOB_PIECES,
            first - share.block * WARPS,
            is_whole ? 0 : last - first + 1,
            share.first_unit(last + 1) > to,
            share.slice * num_blocks + share.block - first_block,
            num_blocks * work.num_slices};
}

// Tiles that several warps have a part in. What they have is in shared memory by now: what a warp
// began with in its head, what it ended with in its ring. Every warp adds up some of this block's
// parts; who comes last of the blocks adds up these. Each thread finds out about one job.
DEVICE void end_shared_tiles(const Work &work, const Share &share, const char *rings,
                             const char *heads, int warp_here, int lane) {
    int begin = share.first_unit(share.block * WARPS);
    int end = share.first_unit(share.block * WARPS + WARPS);
    int num_jobs = ((end - 1) / work.slice_steps + 1 - begin / work.slice_steps) * JOBS;
    for (int first = warp_here; first < num_jobs; first += LANES * WARPS) {
        Job own = find_job(work, share, begin, end, first + lane * WARPS);
        for (int i = 0; i < LANES && first + i * WARPS < num_jobs; i++) {
            Job job = own.of_lane(i);
            if (job.num_warps == 0) continue;
            Quads quads = add_parts(job.num_warps, [=](int part, int piece) {
                int warp = job.first_warp + part;
                const char *place = part == job.num_warps - 1 && job.goes_on
                                        ? heads + warp * SUMS_BYTES
                                        : rings + warp * (DEPTH * SLOT_BYTES);
                return ((const Floats *)place)[(job.piece + piece) * PIECE_QUADS + quad_of(lane)];
            });
            UNROLL for (int i = 0; i < JOB_PIECES; i++) {
                if (job.num_parts == 1) {
                    write_piece(work, job.tile, job.piece + i, lane, quads.of[i]);
                } else if (has_quad(lane)) {
                    store_past(left_quad(work, job.tile, job.mine, job.piece + i, lane),
                               quads.of[i]);
                }
            }
        }
        wait_for_warp();
        int *counter = work.arrivals + own.tile * PIECES + own.piece;
        u32 lasts = vote(own.num_parts > 1 && is_last(counter, own.num_parts));
        wait_for_warp();  // what one thread has seen, all others may read
        for (; lasts != 0; lasts &= lasts - 1) {
            Job job = own.of_lane(first_bit(lasts));
            Quads quads = add_parts(job.num_parts, [=](int part, int i) {
                return load_past(left_quad(work, job.tile, part, job.piece + i, lane));
            });
            UNROLL for (int i = 0; i < JOB_PIECES; i++) {
                write_piece(work, job.tile, job.piece + i, lane, quads.of[i]);
            }
        }
    }
}
