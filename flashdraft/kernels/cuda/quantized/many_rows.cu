// Many rows of x times a weight that stays in few bits, for Hopper.
//
// One block a processor. Its warpgroups hold tiles of the weight in registers, as codes that come
// straight from memory and become bfloat16 there. x lies in shared memory: one more warpgroup
// copies it, 64 values of the depth at a time, STAGES ahead. `arrange` has brought it into the order
// of the codes before (few_bits.h), in blocks as shared memory holds them.
//
// A tile is 64 * TILES rows of the weight for each warpgroup, by ROWS rows of x; a unit, a step of
// its depth. Units are in a line, by weights, then by x, then by depth. A block has an equal piece
// of it: all of some tiles, and a part of the first and of the last one. Parts meet in memory: who
// comes last adds them up, in their order, so that the same bits come out every time.
//
// From the compiler's command line:
//   what few_bits.h says
//   ROWS    of x, in a tile: 32, 64 or 128; those that are not there are zeros
//   TILES   of 64 rows of the weight, of a warpgroup
//   PIECES  of the rows of x in a tile: sums of one are scaled while the next is multiplied
//   STAGES  of x
//   WARPS   four of every warpgroup: those that multiply, and one that copies x

#include "device.h"
#include "few_bits.h"
#include "warpgroups.h"

constexpr int THREADS = WARPS * LANES;
constexpr int WARPGROUPS = WARPS / 4 - 1;  // that multiply
constexpr int WARPGROUP = 4 * LANES;
constexpr int BLOCK_DEPTH = 64;  // of x, in a block
constexpr int BLOCK_BYTES = ROWS * 2 * BLOCK_DEPTH;
constexpr int STEP_BLOCKS = STEP / BLOCK_DEPTH;
constexpr int PIECE_ROWS = ROWS / PIECES;
constexpr int SETS = TILES * PIECES;  // of sums
constexpr int SET_SUMS = PIECE_ROWS / 2;
constexpr int QUADS = SETS * SET_SUMS / 4;
constexpr int SCALE_WORDS = 2 * SCALE_BYTES / 4;  // of a thread's two rows in a tile
constexpr int TILE_COLUMNS = 4 * TILE_ROWS;       // of the result, in a tile
constexpr int STRIDE = TILE_COLUMNS + 8;  // of a row in shared memory: neighbours in other banks

// Of a thread: a block starts with 64 K / THREADS, down to a multiple of eight.
constexpr int COPYING_REGISTERS = 24, REGISTERS = WARPGROUPS == 2 ? 240 : 160;

static_assert(GROUPS % 2 == 0 && STEP % BLOCK_DEPTH == 0, "a step has whole blocks");
static_assert(WARPGROUPS == 2 || WARPGROUPS == 3, "registers are shared out for these");
static_assert(SETS <= MAX_LEFT, "wait_for_products knows no more");

struct Work {
    const u16 *x;
    char *arranged;  // [tiles of x, blocks, ROWS, 64]
    const char *codes;
    const char *scale;
    u16 *output;
    float *parts;   // [blocks, 2, warpgroups, QUADS, threads, 4]
    int *arrivals;  // [tiles, warpgroups]
    int num_rows, num_columns;
    int up_rows;  // from gates to ups
    int packed_rows;
    int depth, row_stride;
    int num_steps, row_tiles;
    int block_units, spare_units;
    float zero;
};

struct Memory {
    char x[STAGES][BLOCK_BYTES];
    u16 output[WARPGROUPS][ROWS * STRIDE];
    u64 full[STAGES], empty[STAGES];
    int is_last[WARPGROUPS];
};

typedef Ring<STAGES> Stage;

// x as `multiply_many` copies it. A thread takes 32 values of a row.
KERNEL arrange(Work work) {
    wait_for_x();
    int num_blocks = work.num_steps * STEP_BLOCKS;
    int i = block_index() * THREADS + thread_index();
    if (i >= work.row_tiles * num_blocks * ROWS * 2) return;
    int half = i % 2, row_here = i / 2 % ROWS, block = i / 2 / ROWS;
    int row = block / num_blocks * ROWS + row_here;
    int first = block % num_blocks * BLOCK_DEPTH + half * 32;
    Words found[4];
    UNROLL for (int j = 0; j < 4; j++) {
        int k = first + j * 8;
        bool is_there = row < work.num_rows && k < work.depth;
        found[j] = is_there ? *(const Words *)(work.x + (u64)row * work.row_stride + k) : Words{};
    }
    const Words chunks[4] = {{found[0].x, found[1].x, found[2].x, found[3].x},
                             {found[0].y, found[1].y, found[2].y, found[3].y},
                             {found[0].z, found[1].z, found[2].z, found[3].z},
                             {found[0].w, found[1].w, found[2].w, found[3].w}};
    Words *target = (Words *)(work.arranged + (u64)block * BLOCK_BYTES) + row_here * 8;
    UNROLL for (int j = 0; j < 4; j++) target[exchanged(row_here, half * 4 + j)] = chunks[j];
}

// The copying thread's work.
DEVICE void copy_x(const Work &work, Memory &memory, int unit, int end) {
    Stage stage = {};
    show_writes_to_copies();
    for (; unit < end; unit++) {
        int tile = unit / work.num_steps, step = unit - tile * work.num_steps;
        u64 block = (u64)(tile % work.row_tiles) * work.num_steps + step;
        const char *from = work.arranged + block * (STEP_BLOCKS * BLOCK_BYTES);
        for (int i = 0; i < STEP_BLOCKS; i++) {
            Shared full = to_shared((char *)&memory.full[stage.place]);
            wait_for_signal(to_shared((char *)&memory.empty[stage.place]), stage.turn ^ 1);
            arrive_and_expect(full, BLOCK_BYTES);
            copy_many(to_shared(memory.x[stage.place]), from + i * BLOCK_BYTES, BLOCK_BYTES, full);
            stage.go_on();
        }
    }
}

// What a thread has of a unit: two rows of every tile.
struct Unit {
    Words codes[TILES][2][HALF_LOADS];
    u32 scales[TILES * SCALE_WORDS + 1];
};

// Of a weight's tile, the first column of the result that a warpgroup has in one of its own.
DEVICE int first_column(const Work &work, int tile, int i) {
    int warpgroup = thread_index() / WARPGROUP;
    return ((tile / work.row_tiles * WARPGROUPS + warpgroup) * TILES + i) * TILE_COLUMNS;
}

// The unit that a thread asks for next.
struct Place {
    const char *codes[TILES], *scale[TILES];
    int tile, step, left;

    DEVICE void find(const Work &work) {
        int lane = thread_index() % LANES, warp = thread_index() / LANES % 4;
        UNROLL for (int i = 0; i < TILES; i++) {
            int column = first_column(work, tile, i);
            if (column >= work.num_columns) column = 0;  // there may be no such rows
            u64 row = (u64)step * work.packed_rows + column + warp * TILE_ROWS + lane / 4;
            codes[i] = work.codes + row * ROW_BYTES + lane % 4 * 16;
            scale[i] = work.scale + (ROW_SCALE_BYTES == 2 ? row - row % 2 : row) * ROW_SCALE_BYTES;
        }
    }
    DEVICE void load_codes(const Work &work, Unit &unit) const {
        u64 other = GATED ? (u64)work.up_rows * ROW_BYTES : 8 * ROW_BYTES;
        if (left <= 0) return;
        UNROLL for (int i = 0; i < TILES * 2 * HALF_LOADS; i++) {
            int tile = i / 2 / HALF_LOADS, half = i / HALF_LOADS % 2, load = i % HALF_LOADS;
            unit.codes[tile][half][load] = load_once(codes[tile] + half * other + load * 64);
        }
    }
    DEVICE void load_scales(const Work &work, Unit &unit) const {
        constexpr int BYTES = SCALES > 0 ? SCALE_BYTES : 4;
        u64 other = (GATED ? (u64)work.up_rows : 8) * ROW_SCALE_BYTES;
        if (left <= 0) return;
        UNROLL for (int i = 0; i < (SCALES > 0 ? TILES * 2 : 0); i++) {
            load_few<BYTES>(unit.scales + i * (BYTES / 4), scale[i / 2] + i % 2 * other);
        }
    }
    DEVICE void go_on(const Work &work) {
        left--;
        if (++step == work.num_steps) {
            step = 0;
            tile++;
            find(work);
        } else {
            UNROLL for (int i = 0; i < TILES; i++) {
                codes[i] += (u64)work.packed_rows * ROW_BYTES;
                scale[i] += (u64)work.packed_rows * ROW_SCALE_BYTES;
            }
        }
    }
};

typedef float Sums[SETS][SET_SUMS];

// What a thread of a warpgroup works with.
struct Worker {
    Place place;
    Stage stage;             // to be read next
    int in_use;              // the first stage that is not left yet
    Tile weights[2][TILES];  // of a group, and of the next

    DEVICE void unpack(const Unit &unit, int group, float zero) {
        int load = group % HALF_LOADS, plane = group / HALF_LOADS;
        UNROLL for (int i = 0; i < TILES; i++) {
            weights[group % 2][i] =
                unpack_tile(unit.codes[i][0][load], unit.codes[i][1][load], plane, zero);
        }
    }
    DEVICE u64 wait_for_stage(Memory &memory) {
        wait_for_signal(to_shared((char *)&memory.full[stage.place]), stage.turn);
        u64 rows = rows_at(to_shared(memory.x[stage.place]));
        stage.go_on();
        return rows;
    }
    DEVICE void leave_stage(Memory &memory) {
        if (thread_index() % LANES == 0) arrive(to_shared((char *)&memory.empty[in_use]));
        in_use = in_use + 1 == STAGES ? 0 : in_use + 1;
    }
    // The products of a group for a set of sums.
    DEVICE void multiply(float *sum, u64 rows, int group, int set) {
        const Tile &tile = weights[group % 2][set / PIECES];
        bool is_new = SCALES > 0 && group % PER_SCALE == 0;
        rows += group % 2 * 4 + set % PIECES * (PIECE_ROWS * 2 * BLOCK_DEPTH / 16);
        begin_products();
        multiply_rows<PIECE_ROWS>(sum, tile.first, rows, !is_new);
        multiply_rows<PIECE_ROWS>(sum, tile.second, rows + 2, true);
        commit_products();
    }

    // Adds a unit, asks for the next one in its place, and unpacks the first group of that. A group
    // is unpacked while the one before it is multiplied. Where a whole row has one scale, the last
    // group stays on its way.
    DEVICE void add_unit(const Work &work, Memory &memory, Unit &unit, bool is_first, Sums &part,
                         Sums &total) {
        Sums &sums = SCALES > 0 ? part : total;
        int lane = thread_index() % LANES;
        u64 rows = wait_for_stage(memory);
        UNROLL for (int set = 0; set < SETS; set++) multiply(sums[set], rows, 0, set);
        UNROLL for (int group = 0; group < GROUPS; group++) {
            bool has_next = group + 1 < GROUPS;
            bool ends = SCALES > 0 && group % PER_SCALE == PER_SCALE - 1;
            bool is_before_left = SCALES == 0 || group % PER_SCALE > 0;
            if (is_before_left) {
                wait_for_products(SETS);
                if (group % 2 == 0 && (group > 0 || !is_first)) leave_stage(memory);
            }
            unpack(unit, (group + 1) % GROUPS, work.zero);
            if (group + 2 == GROUPS) place.load_codes(work, unit);
            if (has_next && group % 2 == 1) rows = wait_for_stage(memory);
            UNROLL for (int set = 0; set < SETS; set++) {
                if (ends) {
                    wait_for_products(has_next ? SETS - 1 : SETS - 1 - set);
                    float scales[2];
                    UNROLL for (int i = 0; i < 2; i++) {
                        int half = set / PIECES * 2 + i;
                        scales[i] = scale_of(unit.scales, half, group / PER_SCALE, lane);
                    }
                    UNROLL for (int i = 0; i < SET_SUMS; i++) {
                        total[set][i] += part[set][i] * scales[i / 2 % 2];
                    }
                }
                if (has_next) multiply(sums[set], rows, group + 1, set);
            }
            if (ends && group % 2 == 1) leave_stage(memory);
        }
        place.load_scales(work, unit);
        place.go_on(work);
    }
};

#include "many_rows_end.h"

// A warpgroup's work.
DEVICE void multiply_units(const Work &work, Memory &memory, const Line &line, int unit, int end,
                           Worker &worker, Unit &codes) {
    worker.unpack(codes, 0, work.zero);
    while (unit < end) {
        int tile = unit / work.num_steps, whole_end = (tile + 1) * work.num_steps;
        int tile_end = min_of(end, whole_end);
        bool is_whole = unit == tile * work.num_steps && tile_end == whole_end;
        Sums total = {}, part;
        for (bool is_first = true; unit < tile_end; unit++, is_first = false) {
            worker.add_unit(work, memory, codes, is_first, part, total);
        }
        if (SCALES == 0) {
            wait_for_products(0);
            worker.leave_stage(memory);
        }
        if (is_whole || join_parts(work, memory, line, tile, total)) {
            write_tile(work, memory, tile, total);
        }
    }
}

KERNEL multiply_many(Work work) {
    SHARED(shared);
    Memory &memory = *(Memory *)shared;
    Line line = {work.block_units, work.spare_units};
    int unit = line.first_unit(block_index()), end = line.first_unit(block_index() + 1);
    if (thread_index() == 0) {
        for (int i = 0; i < STAGES; i++) {
            make_signal(to_shared((char *)&memory.full[i]), 1);
            make_signal(to_shared((char *)&memory.empty[i]), 4 * WARPGROUPS);
        }
        show_signals();
    }
    if (thread_index() >= WARPGROUPS * WARPGROUP) {
        set_registers<COPYING_REGISTERS, false>();  // first of all: the others wait for them
        wait_for_block();
        wait_for_x();
        if (thread_index() == WARPGROUPS * WARPGROUP) copy_x(work, memory, unit, end);
        return;
    }
    set_registers<REGISTERS, true>();
    Worker worker = {};
    Unit codes = {};
    worker.place.tile = unit / work.num_steps;
    worker.place.step = unit - worker.place.tile * work.num_steps;
    worker.place.left = end - unit;
    worker.place.find(work);
    worker.place.load_codes(work, codes);
    worker.place.load_scales(work, codes);
    worker.place.go_on(work);
    wait_for_block();
    wait_for_x();
    multiply_units(work, memory, line, unit, end, worker, codes);
}
