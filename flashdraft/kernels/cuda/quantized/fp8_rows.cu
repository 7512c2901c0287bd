// Rows of x in e4m3 times a weight in e4m3, for Hopper.
//
// One block a processor. Two warpgroups multiply tiles of the weight with tiles of x, both from
// shared memory; a thread of a third one has them copied there, STAGES steps ahead. A step is 128
// values of the depth, in the order of the weight's codes (layout.py): of both a row is 128 bytes.
// The tensor cores' sums keep few bits, so those of every step are added to others in float32. The
// weight has a scale for every row, and so has x: they multiply what has been added up.
//
// A tile is 64 rows of the weight for each warpgroup, by ROWS rows of x; where the result is gated
// one warpgroup has the gates, the other their ups. Blocks of a team have neighbouring tiles of
// the weight by the same rows of x: each fetches a part of these for all. A unit is a step of the
// tiles of a team. Units are in a line, by weights, then by x, then by depth, and a team has
// an equal piece of it: all of some tiles, and a part of the first and of the last one. Parts meet
// in memory: who comes last adds them up, in their order, so that the same bits come out every time.
//
// From the compiler's command line:
//   what few_bits.h says
//   ROWS     of x, in a tile: 32, 64, 128, 192 or 256; those that are not there are zeros
//   PIECES   of these, that are multiplied one after the other
//   PARTS    sums of steps that there is room for: with two, one is added while the other forms
//   STAGES   of both
//   TEAM     blocks that share tiles of x, which lie side by side: 1 or 2

#include "device.h"
#include "few_bits.h"
#include "warpgroups.h"

constexpr int WARPGROUPS = WARPS / 4 - 1;  // that multiply
constexpr int WARPGROUP = 4 * LANES;
constexpr int WIDE = 64;  // rows of the weight, of a warpgroup
constexpr int BYTES = 128;  // of a row, in a step
constexpr int PIECE_ROWS = ROWS / PIECES;
constexpr int PIECE_SUMS = PIECE_ROWS / 2;
constexpr int QUADS = ROWS / 2 / 4;
constexpr int TILE_COLUMNS = GATED ? WIDE : WARPGROUPS * WIDE;  // of the result, of a block
constexpr int STRIDE = WIDE + 8;  // of a row of the result in shared memory
constexpr int CHUNK = ROWS < 64 ? ROWS : 64;  // rows of the result that are turned at a time
constexpr int AT_A_TIME = 8;  // quads of a part that are on their way
constexpr int COPYING_REGISTERS = 24, REGISTERS = 240;

static_assert(STEP == BYTES && CODE == 3 && SCALES == 0, "codes of eight bits, scales of rows");
static_assert(TEAM == 1 || TEAM == 2, "");
static_assert(WARPGROUPS == 2, "registers are shared out for these");
static_assert(PARTS == 1 || PARTS == 2 && PIECES == 1, "two steps at a time, of one piece");
static_assert(QUADS % 4 == 0 && PIECE_ROWS % 32 == 0 && ROWS % (8 * TEAM) == 0, "whole pieces");

struct Work {
    Map weight;           // [steps, rows, 128 bytes], copied in boxes [1, 64, 128 bytes]
    Map x;                // [rows, steps, 128 bytes], copied in boxes [ROWS / TEAM, 1, 128 bytes]
    const char *scale;    // of the weight's rows
    const float *scales;  // of x, with those that fill up the last tile
    u16 *output;
    float *parts;   // [blocks, 2, warpgroups, QUADS, threads, 4]
    int *arrivals;  // [tiles, blocks of a team, warpgroups]
    int num_rows, num_columns;
    int up_rows;      // from gates to ups
    int packed_rows;  // of the weight
    int num_steps, row_tiles;
    int team_units, spare_units;
};

struct Memory {
    char weight[STAGES][WARPGROUPS * WIDE * BYTES];
    char x[STAGES][ROWS * BYTES];
    u16 output[WARPGROUPS][CHUNK * STRIDE];
    u64 full[STAGES], empty[STAGES];
    int is_last[WARPGROUPS];
};

typedef Ring<STAGES> Stage;
typedef float Sums[PIECES][PIECE_SUMS];

DEVICE int num_row_of(const Work &work, int tile) { return tile % work.row_tiles * ROWS; }
// Of the result, of a block.
DEVICE int first_column(const Work &work, int tile) {
    return (tile / work.row_tiles * TEAM + rank()) * TILE_COLUMNS;
}
// Of the weight, of a warpgroup.
DEVICE int first_weight(const Work &work, int tile, int warpgroup) {
    int column = first_column(work, tile);
    return column + warpgroup * (GATED ? work.up_rows : WIDE);
}

// The copying thread's work.
DEVICE void copy_units(const Work &work, Memory &memory, int unit, int end) {
    constexpr int SHARE = ROWS / TEAM;
    Stage stage = {};
    show_writes_to_copies();
    int tile = unit / work.num_steps, step = unit - tile * work.num_steps;
    for (; unit < end; unit++) {
        Shared full = to_shared((char *)&memory.full[stage.place]);
        wait_for_signal(to_shared((char *)&memory.empty[stage.place]), stage.turn ^ 1);
        arrive_and_expect(full, (WARPGROUPS * WIDE + ROWS) * BYTES);
        UNROLL for (int i = 0; i < WARPGROUPS; i++) {
            Shared to = to_shared(memory.weight[stage.place] + i * WIDE * BYTES);
            copy_box(to, &work.weight, 0, first_weight(work, tile, i), step, full);
        }
        Shared to = to_shared(memory.x[stage.place] + rank() * SHARE * BYTES);
        int row = num_row_of(work, tile) + rank() * SHARE;
        if (TEAM == 1) {
            copy_box(to, &work.x, 0, step, row, full);
        } else {
            copy_box_to_all(to, &work.x, 0, step, row, full);
        }
        stage.go_on();
        if (++step == work.num_steps) {
            step = 0;
            tile++;
        }
    }
}

// What a thread of a warpgroup works with.
struct Worker {
    Stage stage;  // to be read next
    int in_use;   // the first stage that is not left yet
    float part[PARTS][PIECE_SUMS];

    DEVICE void leave_stage(Memory &memory) {
        Shared empty = to_shared((char *)&memory.empty[in_use]);
        int lane = thread_index() % LANES;
        if (TEAM == 1) {
            if (lane == 0) arrive(empty);
        } else if (lane < TEAM) {
            arrive_at(empty, lane);
        }
        in_use = in_use + 1 == STAGES ? 0 : in_use + 1;
    }
    DEVICE void add(float *total, float *sums) {
        UNROLL for (int i = 0; i < PIECE_SUMS; i++) total[i] += found_now(sums[i]);
    }
    // Of the stage whose turn it is, as products take them.
    DEVICE void wait_for_stage(Memory &memory, u64 &weight, u64 &rows) {
        int warpgroup = thread_index() / WARPGROUP;
        wait_for_signal(to_shared((char *)&memory.full[stage.place]), stage.turn);
        weight = rows_at(to_shared(memory.weight[stage.place] + warpgroup * WIDE * BYTES));
        rows = rows_at(to_shared(memory.x[stage.place]));
        stage.go_on();
    }
    DEVICE void multiply(float *sums, u64 weight, u64 rows, int piece) {
        rows += piece * PIECE_ROWS * (BYTES / 16);
        begin_products();
        UNROLL for (int k = 0; k < BYTES / 32; k++) {
            multiply_codes<PIECE_ROWS>(sums, weight + 2 * k, rows + 2 * k, k > 0);
        }
        commit_products();
    }
    DEVICE void add_step(Memory &memory, Sums &total) {
        u64 weight, rows;
        wait_for_stage(memory, weight, rows);
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            multiply(part[0], weight, rows, piece);
            wait_for_products(0);
            if (piece == PIECES - 1) leave_stage(memory);
            add(total[piece], part[0]);
        }
    }
    DEVICE void add_two_steps(Memory &memory, Sums &total) {
        UNROLL for (int i = 0; i < 2; i++) {
            u64 weight, rows;
            wait_for_stage(memory, weight, rows);
            multiply(part[i % PARTS], weight, rows, 0);
        }
        UNROLL for (int i = 0; i < 2; i++) {
            wait_for_products(1 - i);
            leave_stage(memory);
            add(total[0], part[i % PARTS]);
        }
    }
    DEVICE void add_steps(Memory &memory, Sums &total, int count) {
        if (PARTS == 2) {
            for (; count > 1; count -= 2) add_two_steps(memory, total);
        }
        for (; count > 0; count--) add_step(memory, total);
    }
};

#include "fp8_rows_end.h"

// A warpgroup's work.
DEVICE void multiply_units(const Work &work, Memory &memory, const Line &line, int unit, int end) {
    Worker worker = {};
    while (unit < end) {
        int tile = unit / work.num_steps, whole_end = (tile + 1) * work.num_steps;
        int tile_end = min_of(end, whole_end);
        bool is_whole = unit == tile * work.num_steps && tile_end == whole_end;
        Sums total = {};
        worker.add_steps(memory, total, tile_end - unit);
        unit = tile_end;
        if (is_whole || join_parts(work, memory, line, tile, total)) {
            write_tile(work, memory, tile, total);
        }
    }
}

KERNEL IN_TEAMS multiply_coded(const ARGUMENT Work work) {
    SHARED(shared);
    Memory &memory = *(Memory *)shared;
    Line line = {work.team_units, work.spare_units};
    int unit = line.first_unit(team_index()), end = line.first_unit(team_index() + 1);
    if (thread_index() == 0) {
        expect_map(&work.weight);
        expect_map(&work.x);
        for (int i = 0; i < STAGES; i++) {
            make_signal(to_shared((char *)&memory.full[i]), 1);
            make_signal(to_shared((char *)&memory.empty[i]), 4 * WARPGROUPS * TEAM);
        }
        show_signals();
    }
    wait_for_block();
    if (TEAM > 1) wait_for_team();  // until its signals are made
    wait_for_x();
    if (thread_index() >= WARPGROUPS * WARPGROUP) {
        set_registers<COPYING_REGISTERS, false>();
        if (thread_index() == WARPGROUPS * WARPGROUP) copy_units(work, memory, unit, end);
    } else {
        set_registers<REGISTERS, true>();
        multiply_units(work, memory, line, unit, end);
    }
    if (TEAM > 1) wait_for_team();  // until nothing more comes from the others
}
