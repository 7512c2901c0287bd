// Parts of a tile of the result: of a block's warps, and of the blocks. Included by few_rows.cu.
//
// Sums go from hand to hand four at a time, as a thread holds them: a quad of every thread is a
// piece of a tile. With one row of x, only every fourth thread has any, and half of what it has
// would be another row's.

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
        const float *sums = total[piece / ROW_TILES][piece % ROW_TILES];
        UNROLL for (int k = 0; k < 4; k++) quad.of[k] = sums[k];
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

// Where a block leaves its part of the tile that goes on in the next: at most one.
DEVICE Box *box_of(const Work &work, int block, int piece, int lane) {
    return (Box *)work.arrivals + (block * PIECES + piece) * PIECE_QUADS + quad_of(lane);
}

// Where a warp keeps its part of a tile: of the one it began with, of the one it ended with. The
// latter lies where its ring was.
enum { HEAD, RING };
DEVICE char *sums_of(int kind, int warp, char *rings, char *sums) {
    return kind == RING ? rings + warp * (DEPTH * SLOT_BYTES) : sums + warp * SUMS_BYTES;
}

// Keeps a warp's part of a tile in shared memory.
DEVICE void put_sums(char *place, int lane, const Totals &total) {
    UNROLL for (int i = 0; i < PIECES; i++) {
        Floats *target = (Floats *)place + i * PIECE_QUADS + quad_of(lane);
        if (has_quad(lane)) *target = get_quad(total, i);
    }
}

// A warp has all of a tile, or of a slice of it: end_shared_tiles tells the others.
DEVICE void end_whole_tile(const Work &work, const Share &share, int tile, int lane,
                           const Totals &total) {
    UNROLL for (int i = 0; i < PIECES; i++) {
        Floats quad = get_quad(total, i);
        if (!SLICED) {
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
    int first_warp, num_warps;  // of this block; none if one of them has ended the tile
    int last_place;             // where the last one has its sums
    int mine, num_parts;        // of the blocks

    DEVICE Job of_lane(int lane) const {
        return {from_lane(tile, lane),       from_lane(piece, lane),
                from_lane(first_warp, lane), from_lane(num_warps, lane),
                from_lane(last_place, lane), from_lane(mine, lane),
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
            share.first_unit(last + 1) > to ? HEAD : RING,
            (SLICED ? share.slice * num_blocks : 0) + share.block - first_block,
            (SLICED ? work.num_slices : 1) * num_blocks};
}

// Adds up what the warps of this block have of a job.
DEVICE Quads add_here(const Work &work, const Job &job, char *rings, char *sums, int lane) {
    return add_parts(job.num_warps, [=](int rank, int piece) {
        int kind = rank == job.num_warps - 1 ? job.last_place : RING;
        const char *place = sums_of(kind, job.first_warp + rank, rings, sums);
        const Floats *quad = (const Floats *)place + (job.piece + piece) * PIECE_QUADS;
        quad += quad_of(lane);
        return *quad;
    });
}

// Adds up what all have of a job, this block among them.
DEVICE Quads add_all(const Work &work, const Share &share, const Job &job, Quads here, int lane) {
    if (SLICED) {
        return add_parts(job.num_parts, [=](int part, int i) {
            return load_past(left_quad(work, job.tile, part, job.piece + i, lane));
        });
    }
    Quads total = {};
    for (int part = 0; part < job.mine; part++) {
        UNROLL for (int i = 0; i < JOB_PIECES; i++) {
            Box *box = box_of(work, share.block - job.mine + part, job.piece + i, lane);
            Floats quad = has_quad(lane) ? receive(box) : Floats{};
            UNROLL for (int k = 0; k < 4; k++) total.of[i].of[k] += quad.of[k];
        }
    }
    UNROLL for (int i = 0; i < JOB_PIECES * 4; i++) {
        total.of[i / 4].of[i % 4] += here.of[i / 4].of[i % 4];
    }
    return total;
}

// Tiles that several warps have a part in. What they have is in shared memory by now. Every warp
// adds up some of what this block has; then one of them adds up theirs: who comes last, or, where
// a block has all of the depth, who has the tile's end. Each thread finds out about one job. Nobody
// waits before all parts of these jobs are on their way, and only for blocks that started before.
DEVICE void end_shared_tiles(const Work &work, const Share &share, char *rings, char *sums,
                             int warp_here, int lane) {
    int begin = share.first_unit(share.block * WARPS);
    int end = share.first_unit(share.block * WARPS + WARPS);
    int num_jobs = ((end - 1) / work.slice_steps + 1 - begin / work.slice_steps) * JOBS;
    for (int first = warp_here; first < num_jobs; first += LANES * WARPS) {
        Job own = find_job(work, share, begin, end, first + lane * WARPS);
        bool ends_here = !SLICED && own.num_parts > 1 && own.mine == own.num_parts - 1;
        u32 left = vote(own.num_warps > 0 && !ends_here);
        for (; left != 0; left &= left - 1) {
            Job job = own.of_lane(first_bit(left));
            Quads quads = add_here(work, job, rings, sums, lane);
            UNROLL for (int i = 0; i < JOB_PIECES; i++) {
                if (job.num_parts == 1) {
                    write_piece(work, job.tile, job.piece + i, lane, quads.of[i]);
                } else if (has_quad(lane)) {
                    if (SLICED) {
                        Floats *to = left_quad(work, job.tile, job.mine, job.piece + i, lane);
                        store_past(to, quads.of[i]);
                    } else {
                        send(box_of(work, share.block, job.piece + i, lane), quads.of[i]);
                    }
                }
            }
        }
        if (SLICED) {
            wait_for_warp();
            int *counter = work.arrivals + own.tile * PIECES + own.piece;
            ends_here = own.num_parts > 1 && is_last(counter, own.num_parts);
        }
        u32 lasts = vote(ends_here);
        wait_for_warp();  // what one thread has seen, all others may read
        for (; lasts != 0; lasts &= lasts - 1) {
            Job job = own.of_lane(first_bit(lasts));
            Quads here = SLICED ? Quads{} : add_here(work, job, rings, sums, lane);
            Quads quads = add_all(work, share, job, here, lane);
            UNROLL for (int i = 0; i < JOB_PIECES; i++) {
                write_piece(work, job.tile, job.piece + i, lane, quads.of[i]);
            }
        }
    }
}
