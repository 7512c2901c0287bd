// Rows of x, sorted by expert, times their experts' weights, for Hopper.
//
// A slab is 64 rows of an expert's weight: where it is GATED 32 gates and their ups, eight by eight
// by turns. A tile is some rows of x that chose one expert. All slabs of all tiles are in a line, by
// tiles; how many there are only the device knows. A block has an equal piece of the line, and takes
// as a job as many slabs of one tile at a time as it has warpgroups: each multiplies one slab, the
// tensor core's left operand, by the tile's rows, in the smallest of a few sizes that holds them.
//
// One more warp copies slabs and rows to shared memory, a step of the depth after the other, STAGES
// ahead, also beyond the end of a job. Codes of few bits become bfloat16 in registers, each times
// its group's scale, with one rounding; rows that they are multiplied by lie in their order
// (few_bits.h). Nothing is cut along the depth: a row's sums do not depend on other rows.
//
// From the compiler's command line:
//   FLOATS    whether the weight is bfloat16; if not, it is what few_bits.h says
//   ZERO      the code that is zero; e4m3 has none
//   ARRANGED  whether the result's rows are to lie in the order of codes
//   ROWS      of x, in a tile at most: 16, 32, 64 or 128
//   STAGES    of slabs and rows
//   WARPS     four for every slab of a job, and four of which one copies
//   BLOCKS    on a processor at a time

#include "device.h"
#include "few_bits.h"
#include "warpgroups.h"

constexpr int WARPGROUP = 4 * LANES;
constexpr int SLABS = WARPS / 4 - 1;  // of a job
constexpr int SLAB_COLUMNS = GATED ? 32 : 64;  // of the result
constexpr int HALVES = GATED ? 2 : 1;          // places that a slab's codes come from
constexpr int BLOCK_DEPTH = 64;                // numbers of a row that lie side by side
constexpr int STEP_BLOCKS = FLOATS ? 1 : STEP / BLOCK_DEPTH;
constexpr int BOX_ROWS = 8, BOX_BYTES = BOX_ROWS * 2 * BLOCK_DEPTH;
constexpr int WEIGHT_ROW = FLOATS ? 2 * BLOCK_DEPTH : ROW_BYTES;  // bytes in a step
constexpr int SCALE_ROW = FLOATS ? 0 : ROW_SCALE_BYTES;
constexpr int SLAB_BYTES = 64 * (WEIGHT_ROW + SCALE_ROW);
constexpr int SCALE_WORDS = SCALE_BYTES / 4;  // of a thread's row
constexpr int AT_A_TIME = ROWS < 32 ? ROWS : 32;  // rows of the result that are turned
constexpr int STRIDE = SLAB_COLUMNS + 8;  // of a row in shared memory: neighbours in other banks

// With scales codes stay smaller by so much more: every scale in float16 is in range then.
constexpr int SHIFT = !FLOATS && SCALES > 0 ? 14 : 0;

// Of a thread. Those that copy give theirs up to the others.
constexpr int COPYING_REGISTERS = 32;
constexpr int REGISTERS = BLOCKS == 2 ? 104 : SLABS == 2 ? 232 : SLABS == 3 ? 160 : 112;

static_assert(WARPS % 4 == 0 && (BLOCKS == 1 ? SLABS >= 2 && SLABS <= 4 : SLABS == 2),
              "registers are shared out for these");
static_assert(FLOATS || (GROUPS % 2 == 0 && STEP % BLOCK_DEPTH == 0), "a step has whole blocks");

struct Work {
    Map weight;  // [experts, groups, 2, 8, depth], copied in boxes [1, 4, 2, 8, 64]; if FLOATS
    Map x;       // [rows, 1, depth], copied in boxes [8, 1, 64]
    const char *codes, *scale;
    u64 expert_codes, expert_scales;  // bytes from expert to expert
    u16 *output;
    const int *places;  // in the result, of every row of x; none: they stay in order
    const int *experts, *firsts, *lasts;  // of every tile
    const int *num_tiles;
    int num_columns, num_slabs;  // of an expert
    int num_steps, up_rows, packed_rows;
};

struct Memory {
    char weights[STAGES][SLABS][64 * WEIGHT_ROW];
    char x[STAGES][STEP_BLOCKS][ROWS * 2 * BLOCK_DEPTH];
    char scales[STAGES][SLABS * 64 * SCALE_ROW + 16];
    u16 output[SLABS][AT_A_TIME * STRIDE];
    u64 full[STAGES], empty[STAGES];
};

typedef Ring<STAGES> Stage;

// Slabs of one tile, of a block's piece of the line.
struct Job {
    int unit, end;
    int expert, slab, num_slabs;
    int first, num_rows;  // of x

    DEVICE bool find(const Work &work) {
        if (unit >= end) return false;
        int tile = unit / work.num_slabs;
        slab = unit - tile * work.num_slabs;
        num_slabs = min_of(min_of(SLABS, work.num_slabs - slab), end - unit);
        expert = work.experts[tile];
        first = work.firsts[tile];
        num_rows = work.lasts[tile] - first;
        return true;
    }
    DEVICE void go_on() { unit += num_slabs; }
};

// -- the warp that copies

DEVICE void copy_codes(const Work &work, Memory &memory, const Job &job, int step, int place) {
    Shared full = to_shared((char *)&memory.full[place]);
    int half = thread_index() % LANES, num_rows = job.num_slabs * (64 / HALVES);
    if (half >= HALVES) return;
    u64 row = (u64)step * work.packed_rows + half * work.up_rows + job.slab * SLAB_COLUMNS;
    char *to = memory.weights[place][0] + half * (SLABS * 32 * WEIGHT_ROW);
    const char *codes = work.codes + job.expert * work.expert_codes;
    copy_many(to_shared(to), codes + row * WEIGHT_ROW, num_rows * WEIGHT_ROW, full);
    if (SCALE_ROW == 0) return;
    to = memory.scales[place] + half * (SLABS * 32 * SCALE_ROW);
    const char *scales = work.scale + job.expert * work.expert_scales;
    copy_many(to_shared(to), scales + row * SCALE_ROW, num_rows * SCALE_ROW, full);
}

DEVICE void copy_job(const Work &work, Memory &memory, const Job &job, Stage &stage) {
    int lane = thread_index() % LANES;
    int num_boxes = (job.num_rows + BOX_ROWS - 1) / BOX_ROWS;
    int num_bytes = job.num_slabs * SLAB_BYTES + num_boxes * STEP_BLOCKS * BOX_BYTES;
    for (int step = 0; step < work.num_steps; step++) {
        int place = stage.place;
        Shared full = to_shared((char *)&memory.full[place]);
        wait_for_signal(to_shared((char *)&memory.empty[place]), stage.turn ^ 1);
        if (lane == 0) arrive_and_expect(full, num_bytes);
        wait_for_warp();
        if (!FLOATS) copy_codes(work, memory, job, step, place);
        if (FLOATS && lane < job.num_slabs) {
            Shared to = to_shared(memory.weights[place][lane]);
            copy_groups(to, &work.weight, step * BLOCK_DEPTH, (job.slab + lane) * 4, job.expert,
                        full);
        }
        for (int i = lane; i < num_boxes * STEP_BLOCKS; i += LANES) {
            int block = i % STEP_BLOCKS, box = i / STEP_BLOCKS;
            Shared to = to_shared(memory.x[place][block] + box * BOX_BYTES);
            int number = (step * STEP_BLOCKS + block) * BLOCK_DEPTH;
            copy_box(to, &work.x, number, 0, job.first + box * BOX_ROWS, full);
        }
        stage.go_on();
    }
}

// -- the warpgroups that multiply

// Rows as rows_at says, so many times 16 bytes further; addresses fill no more than half of it.
DEVICE u64 moved(u64 rows, int by) { return rows >> 32 << 32 | ((u32)rows + by); }

// A thread's two rows of its slab in a step, of sixteen of its warp: a gate and its up, or rows that
// are eight apart.
struct Codes {
    Words codes[2][HALF_LOADS];
    u32 scales[2 * SCALE_WORDS + 1];

    DEVICE void load(const Memory &memory, int place) {
        int warp = thread_index() / LANES, lane = thread_index() % LANES;
        UNROLL for (int half = 0; half < 2; half++) {
            int row = GATED ? half * (SLABS * 32) + warp * 8 + lane / 4
                            : warp * 16 + half * 8 + lane / 4;
            const char *from = memory.weights[place][0] + row * WEIGHT_ROW + lane % 4 * 16;
            UNROLL for (int i = 0; i < HALF_LOADS; i++) {
                codes[half][i] = *(const Words *)(from + i * 64);
            }
            if (SCALES == 0) continue;
            from = memory.scales[place] + (SCALE_ROW == 2 ? row - row % 2 : row) * SCALE_ROW;
            UNROLL for (int i = 0; i < SCALE_WORDS; i++) {
                scales[half * SCALE_WORDS + i] = *(const u32 *)(from + 4 * i);
            }
        }
    }

    // A group as bfloat16: code minus zero, times its scale.
    DEVICE Tile unpack_group(int group) const {
        int load = group % HALF_LOADS, plane = group / HALF_LOADS, lane = thread_index() % LANES;
        u32 factors[2], terms[2], zero = CODE == 0 && plane % 2 == 1 ? ZERO << 4 : ZERO;
        UNROLL for (int half = 0; half < 2; half++) {
            factors[half] = two_powers(exponent_of(plane) - SHIFT);
            if (SCALES > 0) {
                float scale = scale_of(scales, half, group / PER_SCALE, lane);
                scale *= bfloat16(two_powers(exponent_of(plane) - SHIFT) & 0xFFFF);
                factors[half] = two_bfloat16(scale, scale);
            }
            terms[half] = 0x80008000;
            if (CODE != 3) {
                terms[half] = fused(zero * 0x00010001u | 0x80008000, factors[half], terms[half]);
            }
        }
        u32 found[2][4];
        UNROLL for (int half = 0; half < 2; half++) {
            const Words &words = codes[half][load];
            const u32 four[4] = {words.x, words.y, words.z, words.w};
            UNROLL for (int i = 0; i < 4; i++) {
                found[half][i] = fused(bits_of(four[i], plane), factors[half], terms[half]);
            }
        }
        return {{found[0][0], found[1][0], found[0][1], found[1][1]},
                {found[0][2], found[1][2], found[0][3], found[1][3]}};
    }
};

// What a warpgroup works with.
struct Worker {
    Stage stage;  // to be read next
    int in_use;   // the first stage that is not left yet

    DEVICE void wait_for_stage(Memory &memory) {
        wait_for_signal(to_shared((char *)&memory.full[stage.place]), stage.turn);
    }
    DEVICE void leave_stage(Memory &memory) {
        if (thread_index() % LANES == 0) arrive(to_shared((char *)&memory.empty[in_use]));
        in_use = in_use + 1 == STAGES ? 0 : in_use + 1;
    }
    // A job with fewer slabs than there are warpgroups leaves some of them nothing.
    DEVICE void skip(const Work &work, Memory &memory) {
        for (int step = 0; step < work.num_steps; step++) {
            wait_for_stage(memory);
            leave_stage(memory);
            stage.go_on();
        }
    }

    template <int COUNT>
    DEVICE void multiply_floats(const Work &work, Memory &memory, float *sum) {
        for (int step = 0; step < work.num_steps; step++) {
            wait_for_stage(memory);
            int slab = thread_index() / WARPGROUP;
            u64 weights = rows_at(to_shared(memory.weights[stage.place][slab]));
            u64 rows = rows_at(to_shared(memory.x[stage.place][0]));
            begin_products();
            UNROLL for (int i = 0; i < BLOCK_DEPTH / 16; i++) {
                multiply_shared<COUNT>(sum, moved(weights, 2 * i), moved(rows, 2 * i), true);
            }
            commit_products();
            wait_for_products(1);
            if (step > 0) leave_stage(memory);
            stage.go_on();
        }
        wait_for_products(0);
        leave_stage(memory);
    }

    // A group is unpacked while the one before it is multiplied, also the first one of a step.
    template <int COUNT>
    DEVICE void multiply_codes(const Work &work, Memory &memory, float *sum) {
        Codes codes;
        wait_for_stage(memory);
        codes.load(memory, stage.place);
        Tile tiles[2] = {codes.unpack_group(0)};
        for (int step = 0; step < work.num_steps; step++) {
            u64 rows = rows_at(to_shared(memory.x[stage.place][0]));
            UNROLL for (int group = 0; group < GROUPS; group++) {
                const Tile &tile = tiles[group % 2];
                int here = group / 2 * (ROWS * 2 * BLOCK_DEPTH / 16) + group % 2 * 4;
                begin_products();
                multiply_rows<COUNT>(sum, tile.first, moved(rows, here), true);
                multiply_rows<COUNT>(sum, tile.second, moved(rows, here + 2), true);
                commit_products();
                wait_for_products(1);
                if (group == 0 && step > 0) leave_stage(memory);
                if (group + 1 == GROUPS) {
                    stage.go_on();
                    if (step + 1 < work.num_steps) {
                        wait_for_stage(memory);
                        codes.load(memory, stage.place);
                    }
                }
                tiles[(group + 1) % 2] = codes.unpack_group((group + 1) % GROUPS);
            }
        }
        wait_for_products(0);
        leave_stage(memory);
    }
};

// What the sums of two rows of a slab give: two values of the result, or a gated one.
DEVICE Two end_sums(float low, float high, Two scales) {
    if (!FLOATS) {
        low *= (float)(GAIN << SHIFT) * scales.x;
        high *= (float)(GAIN << SHIFT) * scales.y;
    }
    if (GATED) low = rounded(activate(rounded(low))) * rounded(high);
    return {low, high};
}

// Copies rows of a slab of the result from shared memory.
DEVICE void write_rows(const Work &work, const Job &job, const u16 *from, int first, int column) {
    constexpr int CHUNKS = SLAB_COLUMNS / 8;
    int num_rows = min_of(AT_A_TIME, job.num_rows - first);
    for (int i = thread_index() % WARPGROUP; i < num_rows * CHUNKS; i += WARPGROUP) {
        int row = i / CHUNKS, chunk = i % CHUNKS, place = job.first + first + row;
        if (work.places != nullptr) place = work.places[place];
        u16 *to = work.output + (u64)place * work.num_columns + column + chunk * 8;
        *(Words *)to = *(const Words *)(from + row * STRIDE + chunk * 8);
    }
}

// A thread has two columns of the result, or a gated one, for some rows: shared memory turns them.
template <int COUNT>
DEVICE void end_job(const Work &work, Memory &memory, const Job &job, const float *sum) {
    constexpr int PIECE = COUNT < AT_A_TIME ? COUNT : AT_A_TIME;  // rows
    int slab = thread_index() / WARPGROUP, warp = thread_index() / LANES % 4;
    int lane = found_again(thread_index() % LANES);  // addresses would fill registers all the time
    int first_column = (job.slab + slab) * SLAB_COLUMNS;
    int here = warp * (GATED ? 8 : 16) + lane / 4;
    Two scales = {1.0f, 1.0f};
    if (!FLOATS) {
        const char *scale = work.scale + job.expert * work.expert_scales;
        int row = first_column + here;
        scales = scales_of(scale, row, GATED ? work.up_rows + row : row + 8);
    }
    // Codes take 32 values as four by four pairs, by columns.
    if (ARRANGED) here = here / 32 * 32 + here % 8 / 2 * 8 + here % 32 / 8 * 2 + here % 2;
    constexpr int OTHER = ARRANGED ? 2 : 8;  // where the second column of a thread is
    u16 *turned = memory.output[slab];
    UNROLL for (int piece = 0; piece < COUNT / PIECE; piece++) {
        if (piece * PIECE >= job.num_rows) return;
        wait_for_some<WARPGROUP>(1 + slab);  // all have read what was there
        UNROLL for (int i = 0; i < PIECE / 2; i++) {
            if (i / 2 % 2 == 1) continue;  // the other row's
            const float *sums = sum + piece * (PIECE / 2) + i;
            Two found = end_sums(sums[0], sums[2], scales);
            u16 *to = turned + (i / 4 * 8 + lane % 4 * 2 + i % 2) * STRIDE + here;
            to[0] = to_bfloat16(found.x);
            if (!GATED) to[OTHER] = to_bfloat16(found.y);
        }
        wait_for_some<WARPGROUP>(1 + slab);
        write_rows(work, job, turned, piece * PIECE, first_column);
    }
}

template <int COUNT>
DEVICE void multiply_job(const Work &work, Memory &memory, const Job &job, Worker &worker) {
    float sum[COUNT / 2] = {};  // else these registers would be kept from job to job
    if (FLOATS) {
        worker.multiply_floats<COUNT>(work, memory, sum);
    } else {
        worker.multiply_codes<COUNT>(work, memory, sum);
    }
    end_job<COUNT>(work, memory, job, sum);
}

DEVICE void multiply_jobs(const Work &work, Memory &memory, Job job) {
    Worker worker = {};
    for (; job.find(work); job.go_on()) {
        if (thread_index() / WARPGROUP >= job.num_slabs) {
            worker.skip(work, memory);
        } else if (ROWS == 16 || job.num_rows <= 16) {
            multiply_job<16>(work, memory, job, worker);
        } else if (ROWS == 32 || job.num_rows <= 32) {
            multiply_job<ROWS < 32 ? ROWS : 32>(work, memory, job, worker);
        } else if (ROWS == 64 || job.num_rows <= 64) {
            multiply_job<ROWS < 64 ? ROWS : 64>(work, memory, job, worker);
        } else {
            multiply_job<ROWS>(work, memory, job, worker);
        }
    }
}

KERNEL multiply_slabs(const ARGUMENT Work work) {
    SHARED(shared);
    Memory &memory = *(Memory *)shared;
    if (thread_index() == 0) {
        if (FLOATS) expect_map(&work.weight);
        expect_map(&work.x);
        for (int i = 0; i < STAGES; i++) {
            make_signal(to_shared((char *)&memory.full[i]), 1);
            make_signal(to_shared((char *)&memory.empty[i]), 4 * SLABS);
        }
        show_signals();
    }
    wait_for_block();
    int total = *work.num_tiles * work.num_slabs;
    Line line = {total / num_blocks(), total % num_blocks()};
    Job job = {line.first_unit(block_index()), line.first_unit(block_index() + 1)};
    if (thread_index() < SLABS * WARPGROUP) {
        set_registers<REGISTERS, true>();
        multiply_jobs(work, memory, job);
    } else {
        set_registers<COPYING_REGISTERS, false>();
        if (thread_index() >= SLABS * WARPGROUP + LANES) return;
        Stage stage = {};
        for (; job.find(work); job.go_on()) copy_job(work, memory, job, stage);
    }
}
