// Many rows of x times a weight that stays in few bits, for Hopper.
//
// One block a processor. Its warpgroups hold tiles of the weight in registers, as bfloat16 that was
// made of codes there; rows of x lie in shared memory as they are. One more warpgroup copies both to
// shared memory: x 64 values of the depth at a time, the weight a step of them, stages ahead.
//
// A group's scale is multiplied into the weight, which is rounded once: it is the weight that
// `dequantize` makes, so that prompts of any length multiply by the same one. There is one set of
// sums, and while tensor cores multiply by a group the next one is made. Where a whole row has one
// scale nothing is rounded, and the scale multiplies the sum.
//
// A tile is 64 * TILES rows of the weight for each warpgroup, by ROWS rows of x; a unit, a step of
// its depth. Units are in a line, by x, then by weights, then by depth: blocks with other rows of x
// read the same weights at about the same time, once from memory. A block has an equal piece of it:
// all of some tiles, and a part of the first and of the last one. Who has the first part of a tile,
// which is what it ends with, adds those of the others to it, in their order, so that the same bits
// come out every time. It waits for blocks of smaller numbers alone. These are started first: even
// where another stream's kernel holds some processors for long, whoever waits does so for blocks that
// run or have ended, and the first block waits for nobody.
//
// From the compiler's command line:
//   what few_bits.h says
//   ROWS    of x, in a tile; those that are not there are zeros
//   TILES   of 64 rows of the weight, of a warpgroup
//   STAGES  of x
//   STEPS   of the weight that are on their way or being read
//   WARPS   four of every warpgroup: those that multiply, and one that copies

#include "device.h"
#include "few_bits.h"
#include "warpgroups.h"

constexpr int WARPGROUPS = WARPS / 4 - 1;  // that multiply
constexpr int WARPGROUP = 4 * LANES;
constexpr int BLOCK_DEPTH = 64;  // of x, in a stage
constexpr int BLOCK_BYTES = ROWS * 2 * BLOCK_DEPTH;
constexpr int STEP_BLOCKS = STEP / BLOCK_DEPTH;
constexpr int TILE_SUMS = ROWS / 2;
constexpr int QUADS = TILES * TILE_SUMS / 4;
constexpr int SCALE_WORDS = 2 * SCALE_BYTES / 4;  // of a thread's two rows in a tile
constexpr int TILE_COLUMNS = 4 * TILE_ROWS;       // of the result, in a tile
constexpr int COPIES = GATED ? 2 : 1;             // that bring a tile: gates, and ups
constexpr int COPY_BYTES = TILE_COLUMNS * ROW_BYTES;
constexpr int COPY_SCALES = TILE_COLUMNS * ROW_SCALE_BYTES;  // in bytes
constexpr int BLOCK_TILES = WARPGROUPS * TILES;
constexpr int TURNED_ROWS = 32;           // of x, that shared memory turns at a time
constexpr int STRIDE = TILE_COLUMNS + 8;  // of a row in shared memory: neighbours in other banks

// Of a thread: a block starts with 64 K / (32 * WARPS), down to a multiple of eight, and has no more.
constexpr int COPYING_REGISTERS = WARPGROUPS == 2 ? 40 : 32;
constexpr int REGISTERS = WARPGROUPS == 2 ? 232 : 160;

static_assert(GROUPS % 2 == 0 && STEP % BLOCK_DEPTH == 0, "a step has whole blocks");
static_assert(WARPGROUPS == 2 || WARPGROUPS == 3, "registers are shared out for these");
static_assert(4 * (COPYING_REGISTERS + WARPGROUPS * REGISTERS) <= WARPS * (2048 / WARPS / 8 * 8),
              "who waits for more registers than there are waits for ever");
static_assert(ROWS % TURNED_ROWS == 0, "results are turned so many rows at a time");

struct Work {
    Map x;      // [rows, 1, depth], copied in boxes [ROWS, 1, 64]
    Map codes;  // [all rows of all steps, 1, 64 int16], copied in boxes of half a tile or a whole one
    const char *scale;
    u16 *output;
    float *parts;   // [blocks, warpgroups, QUADS, threads, 4]
    int *arrivals;  // [tiles, warpgroups]
    int num_rows, num_columns;
    int up_rows;  // from gates to ups
    int packed_rows;
    int num_steps, column_tiles;
    int block_units, spare_units;
    float zero;
};

struct Memory {
    char x[STAGES][BLOCK_BYTES];
    char codes[STEPS][BLOCK_TILES][COPIES][COPY_BYTES];
    char scales[STEPS][BLOCK_TILES][COPIES][COPY_SCALES > 0 ? COPY_SCALES : 16];
    u16 output[WARPGROUPS][TURNED_ROWS * STRIDE];
    u64 full[STAGES], empty[STAGES];
    u64 step_full[STEPS], step_empty[STEPS];
};

// -- the threads that copy

DEVICE void copy_x(const Work &work, Memory &memory, int unit, int end) {
    Ring<STAGES> stage = {};
    wait_for_x();
    show_writes_to_copies();
    for (; unit < end; unit++) {
        int tile = unit / work.num_steps, step = unit - tile * work.num_steps;
        int row = tile / work.column_tiles * ROWS;
        for (int i = 0; i < STEP_BLOCKS; i++) {
            Shared full = to_shared((char *)&memory.full[stage.place]);
            wait_for_signal(to_shared((char *)&memory.empty[stage.place]), stage.turn ^ 1);
            arrive_and_expect(full, BLOCK_BYTES);
            int number = step * STEP + i * BLOCK_DEPTH;
            copy_box(to_shared(memory.x[stage.place]), &work.x, number, 0, row, full);
            stage.go_on();
        }
    }
}

// They do not depend on kernels before.
DEVICE void copy_weights(const Work &work, Memory &memory, int unit, int end) {
    Ring<STEPS> stage = {};
    for (; unit < end; unit++) {
        int tile = unit / work.num_steps, step = unit - tile * work.num_steps;
        int column = tile % work.column_tiles * (BLOCK_TILES * TILE_COLUMNS);
        int left = (GATED ? work.up_rows : work.packed_rows) - column;
        int num_tiles = min_of(BLOCK_TILES, left / TILE_COLUMNS);
        Shared full = to_shared((char *)&memory.step_full[stage.place]);
        wait_for_signal(to_shared((char *)&memory.step_empty[stage.place]), stage.turn ^ 1);
        arrive_and_expect(full, num_tiles * COPIES * (COPY_BYTES + COPY_SCALES));
        for (int i = 0; i < num_tiles * COPIES; i++) {
            int first = column + i / COPIES * TILE_COLUMNS + i % COPIES * work.up_rows;
            u64 row = (u64)step * work.packed_rows + first;
            char *to = memory.codes[stage.place][i / COPIES][i % COPIES];
            copy_box(to_shared(to), &work.codes, 0, 0, (int)(row * ROW_BYTES / 128), full);
            if (COPY_SCALES > 0) {
                char *scales = memory.scales[stage.place][i / COPIES][i % COPIES];
                const char *from = work.scale + row * ROW_SCALE_BYTES;
                copy_many(to_shared(scales), from, COPY_SCALES, full);
            }
        }
        stage.go_on();
    }
}

// -- the warpgroups that multiply

typedef float Sums[TILES][TILE_SUMS];

// What a thread has of a unit: two rows of every tile.
struct Unit {
    Words codes[TILES][2][HALF_LOADS];
    u32 scales[TILES * SCALE_WORDS + 1];
};

// Of a weight's tile, the first column of the result that a warpgroup has in one of its own.
DEVICE int first_column(const Work &work, int tile, int i) {
    int warpgroup = thread_index() / WARPGROUP;
    return ((tile % work.column_tiles * WARPGROUPS + warpgroup) * TILES + i) * TILE_COLUMNS;
}

// Where sixteen bytes of a row of codes lie among those that came in one copy.
DEVICE int place_of(int row, int sixteenth) {
    if (ROW_BYTES == 128) return row * 128 + exchanged(row, sixteenth) * 16;
    return row / 2 * 128 + exchanged(row / 2, row % 2 * 4 + sixteenth) * 16;
}

// What a thread of a warpgroup works with.
struct Worker {
    Ring<STAGES> stage;          // to be read next
    int in_use;                  // the first stage that is not left yet
    Ring<STEPS> step;            // to be read next
    Tile weights[2][TILES];      // of a group, and of the next
    u32 factors[TILES][2][2];    // of two rows: the scale as bfloat16, and what that leaves of it

    // Takes a unit's codes from shared memory.
    DEVICE void load(Memory &memory, Unit &unit) {
        constexpr int BYTES = SCALES > 0 ? SCALE_BYTES : 4;
        int lane = thread_index() % LANES, warp = thread_index() / LANES % 4;
        int first_tile = thread_index() / WARPGROUP * TILES;
        wait_for_signal(to_shared((char *)&memory.step_full[step.place]), step.turn);
        UNROLL for (int i = 0; i < TILES * 2; i++) {
            int half = i % 2, row = warp * TILE_ROWS + (GATED ? 0 : half * 8);
            char *codes = memory.codes[step.place][first_tile + i / 2][GATED ? half : 0];
            UNROLL for (int load = 0; load < HALF_LOADS; load++) {
                int place = place_of(row + lane % 8, load * 4 + lane / 8);
                unit.codes[i / 2][half][load] = load_matrices(to_shared(codes + place));
            }
            if (SCALES == 0) continue;
            const char *scales = memory.scales[step.place][first_tile + i / 2][GATED ? half : 0];
            row += lane / 4;
            row = ROW_SCALE_BYTES == 2 ? row - row % 2 : row;
            const u32 *from = (const u32 *)(scales + row * ROW_SCALE_BYTES);
            UNROLL for (int k = 0; k < BYTES / 4; k++) unit.scales[i * (BYTES / 4) + k] = from[k];
        }
        wait_for_warp();
        if (lane == 0) arrive(to_shared((char *)&memory.step_empty[step.place]));
        step.go_on();
    }
    DEVICE void unpack(const Unit &unit, int group, float zero) {
        int load = group % HALF_LOADS, plane = group / HALF_LOADS, lane = thread_index() % LANES;
        UNROLL for (int i = 0; i < TILES; i++) {
            Tile tile = unpack_tile(unit.codes[i][0][load], unit.codes[i][1][load], plane, zero);
            if (SCALES > 0) {
                UNROLL for (int half = 0; half < (group % PER_SCALE == 0 ? 2 : 0); half++) {
                    float scale = scale_of(unit.scales, 2 * i + half, group / PER_SCALE, lane);
                    split_scale(scale, factors[i][half]);
                }
                tile.first = scaled(tile.first, factors[i][0], factors[i][1]);
                tile.second = scaled(tile.second, factors[i][0], factors[i][1]);
            }
            weights[group % 2][i] = tile;
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
    // The products of a group are on their way from here on.
    DEVICE void multiply(Sums &sums, u64 rows, int group) {
        rows += group % 2 * 4;
        begin_products();
        UNROLL for (int i = 0; i < TILES; i++) {
            multiply_rows<ROWS>(sums[i], weights[group % 2][i].first, rows, true);
            multiply_rows<ROWS>(sums[i], weights[group % 2][i].second, rows + 2, true);
        }
        commit_products();
    }

    // Adds a unit and takes the next one. A group is unpacked while the one before it is
    // multiplied; the last one stays on its way.
    DEVICE void add_unit(const Work &work, Memory &memory, Unit &unit, bool is_first, bool is_end,
                         Sums &sums) {
        u64 rows = wait_for_stage(memory);
        multiply(sums, rows, 0);
        UNROLL for (int group = 0; group < GROUPS; group++) {
            wait_for_products(1);
            if (group % 2 == 0 && (group > 0 || !is_first)) leave_stage(memory);
            unpack(unit, (group + 1) % GROUPS, work.zero);
            if (group + 2 == GROUPS && !is_end) load(memory, unit);
            if (group + 1 == GROUPS) break;
            if (group % 2 == 1) rows = wait_for_stage(memory);
            multiply(sums, rows, group + 1);
        }
    }
};

#include "many_rows_end.h"

// A warpgroup's work.
DEVICE void multiply_units(const Work &work, Memory &memory, const Line &line, int piece) {
    int unit = line.first_unit(piece), end = line.first_unit(piece + 1);
    Worker worker = {};
    Unit codes = {};
    worker.load(memory, codes);
    worker.unpack(codes, 0, work.zero);
    wait_for_x();
    while (unit < end) {
        int tile = unit / work.num_steps, whole_end = (tile + 1) * work.num_steps;
        int tile_end = min_of(end, whole_end);
        bool is_whole = unit == tile * work.num_steps && tile_end == whole_end;
        Sums sums = {};
        for (bool is_first = true; unit < tile_end; unit++, is_first = false) {
            worker.add_unit(work, memory, codes, is_first, unit + 1 == end, sums);
        }
        wait_for_products(0);
        worker.leave_stage(memory);
        if (is_whole || join_parts(work, line, piece, tile, sums)) {
            write_tile(work, memory, tile, sums);
        }
    }
}

KERNEL multiply_many(const ARGUMENT Work work) {
    SHARED(shared);
    Memory &memory = *(Memory *)shared;
    Line line = {work.block_units, work.spare_units};
    int piece = num_blocks() - 1 - block_index();
    int unit = line.first_unit(piece), end = line.first_unit(piece + 1);
    if (thread_index() == 0) {
        expect_map(&work.codes);
        expect_map(&work.x);
        for (int i = 0; i < STAGES; i++) {
            make_signal(to_shared((char *)&memory.full[i]), 1);
            make_signal(to_shared((char *)&memory.empty[i]), 4 * WARPGROUPS);
        }
        for (int i = 0; i < STEPS; i++) {
            make_signal(to_shared((char *)&memory.step_full[i]), 1);
            make_signal(to_shared((char *)&memory.step_empty[i]), 4 * WARPGROUPS);
        }
        show_signals();
    }
    wait_for_block();
    if (thread_index() >= WARPGROUPS * WARPGROUP) {
        set_registers<COPYING_REGISTERS, false>();
        int thread = thread_index() % WARPGROUP;
        if (thread == 0) copy_weights(work, memory, unit, end);
        if (thread == LANES) copy_x(work, memory, unit, end);
    } else {
        set_registers<REGISTERS, true>();
        multiply_units(work, memory, line, piece);
    }
}
