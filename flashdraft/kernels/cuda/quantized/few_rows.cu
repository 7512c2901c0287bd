// A few rows of x times a weight that stays in few bits.
//
// One block a processor, and its warps work alone. A block keeps its slice of x in shared memory;
// a warp walks along its share of the weight, tile of rows by tile of rows, and copies what it will
// need DEPTH units ahead into a ring that is its own. So the memory is busy from the first moment
// on: weights are asked for before the wait for the kernel that computes x.
//
// A unit is 16 * TILES rows of the weight by a step of the depth (layout.py).
//
// From the compiler's command line:
//   what few_bits.h says
//   ROWS    of x, as they are stored: 1, 8 or 16; those that are not there may hold anything
//   EXPERTS 0: one weight. The weight of a mixture, for one row of x: 1: that of every chosen
//           expert below the other; 2: beside the other, where x is what an expert has computed,
//           and its share multiplies its scales
//   SETTLED whether the experts were chosen before the kernel before this one began, or no matter
//   TILES   of 16 rows, in a unit; 1 or 2
//   WARPS   of a block
//   DEPTH   units of a ring
//   EARLY   how many of them are asked for before x: more would keep x waiting
//   NORMED  0: x is as it is; for one row, 1: its norm is what is multiplied; 2, 3: x is a stream
//           that one or two sums are added to first (interface.Residual)
//   CHUNKS  of eight values of x, of a thread, if NORMED
//   CHOSEN  0; or so many experts are chosen for the row, by the products of another norm of it
//           with a router's rows: the blocks make these in turns, and one block more chooses
//   SLICED  the depth is cut into slices: a block has one
//   JOB_PIECES  of a tile of the result, which one warp adds up at a time

#include "device.h"
#include "few_bits.h"

constexpr int HALVES = 2 * TILES;  // of eight rows
constexpr int ROW_TILES = (ROWS + 7) / 8;
constexpr bool ONE_ROW = ROWS == 1;

constexpr int CODES_BYTES = HALVES * HALF_LOADS * LANES * 16;
constexpr int SLOT_BYTES = CODES_BYTES + HALVES * 8 * SCALE_BYTES;
constexpr int UNIT_ROWS = TILES * TILE_ROWS;

typedef float Totals[TILES][ROW_TILES][4];

struct Work {
    const u16 *x;
    const char *codes;
    const char *scale;
    u16 *output;
    float *parts;
    int *arrivals;
    const long long *chosen;  // experts
    const float *shares;
    u64 expert_rows;  // of all steps together
    int num_rows;
    int num_columns;
    int up_rows;  // from gates to ups
    int packed_rows;
    int depth;
    int row_stride;
    int num_slices;
    int slice_steps;
    int warp_units;
    int spare_units;
    int expert_tiles;
    int expert_steps;
    int max_parts;  // of a tile
    float zero;
    float eps;
    const u16 *norm;
    const u16 *deltas[2], *delta_norms[2];
    const u16 *post, *scalar;  // or null
    u16 *stream;
    const u16 *router, *router_norm;
    const float *expert_scale;  // of shares
    u64 *logits;                // each on its way, like sums in a box
    long long *choice;
    float *choice_shares;
    int num_experts;
    int chooser;  // which block: the last one, after those that multiply
};

// Which part of the weight is whose: the warps with the same slice of the depth have a line.
struct Share {
    int slice;
    int block;  // of those with this slice
    Line line;

    DEVICE int first_unit(int warp) const { return line.first_unit(warp); }
    DEVICE int warp_of(int unit) const { return line.owner_of(unit); }
    DEVICE int block_of(int unit) const { return warp_of(unit) / WARPS; }
};

// The unit that a warp loads next, and how many there are before it must look where the others are.
struct Place {
    const char *codes;
    const char *scale;
    int tile, step, left;
};

DEVICE void find_unit(const Work &work, int first_step, Place &place, int lane) {
    int tile = place.tile, step = first_step + place.step;
    u64 first_row = 0;
    place.left = work.slice_steps - place.step;
    if (EXPERTS == 1) {
        first_row = load_number(work.chosen + tile / work.expert_tiles) * work.expert_rows;
        tile %= work.expert_tiles;
    } else if (EXPERTS == 2) {
        first_row = load_number(work.chosen + step / work.expert_steps) * work.expert_rows;
        step %= work.expert_steps;
        place.left = work.expert_steps - step;
    }
    u64 row = first_row + (u64)step * work.packed_rows + tile * UNIT_ROWS + lane / 4;
    int half = lane % 4;  // whose scales this thread fetches
    u64 scale_row = row + half / 2 * TILE_ROWS + half % 2 * (GATED ? (u64)work.up_rows : 8);
    if (ROW_SCALE_BYTES == 2) scale_row -= scale_row % 2;
    place.codes = work.codes + row * ROW_BYTES + lane % 4 * 16;
    place.scale = work.scale + scale_row * ROW_SCALE_BYTES;
}

DEVICE void load_unit(const Work &work, int first_step, Place &place, Shared slot, int lane) {
    if (place.left == 0) {
        if (place.step == work.slice_steps) {
            place.step = 0;
            place.tile++;
        }
        find_unit(work, first_step, place, lane);
    }
    u64 up = GATED ? (u64)work.up_rows : 8;  // rows from one half of a tile to the other
    UNROLL for (int i = 0; i < HALVES * HALF_LOADS; i++) {
        int half = i / HALF_LOADS, load = i % HALF_LOADS;
        copy_16(slot + i * 512 + lane * 16,
                place.codes + half % 2 * (up * ROW_BYTES) + half / 2 * (TILE_ROWS * ROW_BYTES) +
                    load * 64);
    }
    if (SCALES > 0 && lane % 4 < HALVES) {  // of four threads, each fetches for another half
        Shared target = slot + CODES_BYTES + (lane / 4 * HALVES + lane % 4) * SCALE_BYTES;
        copy_few<SCALES == 0 ? 4 : SCALE_BYTES>(target, place.scale);
    }
    place.codes += (u64)work.packed_rows * ROW_BYTES;
    place.scale += (u64)work.packed_rows * ROW_SCALE_BYTES;
    place.step++;
    place.left--;
}

// A slice of x, in the order of the tensor cores: eight values of a row, then of the next. Blocks
// begin at different places, or all would ask the same part of the memory at the same time.
DEVICE void load_x(const Work &work, const Share &share, int first_step, Shared stored) {
    constexpr int THREADS = WARPS * LANES;
    int count = work.slice_steps * (STEP / 8) * ROWS;
    int turn = share.block * THREADS % count;
    for (int unturned = thread_index(); unturned < count; unturned += THREADS) {
        int i = unturned + turn < count ? unturned + turn : unturned + turn - count;
        int row = i / 4 % ROWS, k = first_step * STEP + i / 4 / ROWS * 32 + i % 4 * 8;
        bool is_there = row < work.num_rows;
        if (EXPERTS == 2) {
            row = k / STEP / work.expert_steps;
            k -= row * work.expert_steps * STEP;
            is_there = true;
        }
        is_there &= k < work.depth;  // a row is filled up
        copy_or_zeros(stored + i * 16, work.x + (is_there ? (u64)row * work.row_stride + k : 0),
                      is_there);
    }
    commit();
}

// Adds a unit of the weight, which lies in a slot of the ring.
DEVICE void add_unit(const char *slot, const char *x, const float *share, int lane, float zero,
                     Totals &total) {
    Words codes[HALVES * HALF_LOADS];
    UNROLL for (int i = 0; i < HALVES * HALF_LOADS; i++) {
        codes[i] = *(const Words *)(slot + i * 512 + lane * 16);
    }
    u32 scales[HALVES * SCALE_BYTES / 4 + 1];
    UNROLL for (int i = 0; i < HALVES * SCALE_BYTES / 8; i++) {
        u64 two = ((const u64 *)(slot + CODES_BYTES + lane / 4 * (HALVES * SCALE_BYTES)))[i];
        scales[2 * i] = two;
        scales[2 * i + 1] = two >> 32;
    }
    float factor = EXPERTS == 2 ? load_float(share) : 1.0f;
    Totals part;
    const float zeros[4] = {};
    UNROLL for (int group = 0; group < GROUPS; group++) {
        Words xs[ROW_TILES];
        UNROLL for (int j = 0; j < ROW_TILES; j++) {
            int row = ONE_ROW ? 0 : j * 8 + lane / 4;
            xs[j] = *(const Words *)(x + (group * ROWS + row) * 64 + lane % 4 * 16);
        }
        UNROLL for (int tile = 0; tile < TILES; tile++) {
            int load = group % HALF_LOADS, plane = group / HALF_LOADS;
            Words low = codes[2 * tile * HALF_LOADS + load];
            Words high = codes[(2 * tile + 1) * HALF_LOADS + load];
            Tile weights = unpack_tile(low, high, plane, zero);
            UNROLL for (int j = 0; j < ROW_TILES; j++) {
                float *sum = SCALES > 0 ? part[tile][j] : total[tile][j];
                bool is_new = SCALES > 0 && group % PER_SCALE == 0;
                multiply(sum, weights.first, xs[j].x, xs[j].y, is_new ? zeros : sum);
                multiply(sum, weights.second, xs[j].z, xs[j].w, sum);
                if (SCALES > 0 && group % PER_SCALE == PER_SCALE - 1) {
                    UNROLL for (int i = 0; i < 4; i++) {
                        float scale = scale_of(scales, 2 * tile + i / 2, group / PER_SCALE, lane);
                        if (EXPERTS == 2) scale *= factor;
                        if (!ONE_ROW || i % 2 == 0) total[tile][j][i] += sum[i] * scale;
                    }
                }
            }
        }
    }
}

// What two rows of the weight give: two values of the result, or a gated one.
DEVICE void write_two(const Work &work, int row, int column, float low, float high) {
    if (row >= work.num_rows) return;
    int other = GATED ? work.up_rows + column : column + 8;
    Two found = end_two(low, high, scales_of(work.scale, column, other));
    u16 *target = work.output + (u64)row * work.num_columns;
    if (column < work.num_columns) target[column] = to_bfloat16(found.x);
    if (!GATED && other < work.num_columns) target[other] = to_bfloat16(found.y);
}

#include "few_rows_parts.h"
#include "few_rows_norm.h"
#include "few_rows_choice.h"

KERNEL multiply_few(Work work) {
    SHARED(shared);
    if (CHOSEN > 0 && block_index() == work.chooser) return choose(work, shared);
    int lane = thread_index() % LANES, warp_here = thread_index() / LANES;
    Share share = {block_index() % work.num_slices, block_index() / work.num_slices,
                   {work.warp_units, work.spare_units}};
    int warp = share.block * WARPS + warp_here;
    int unit = share.first_unit(warp), end = share.first_unit(warp + 1), ahead = unit;
    int tile = unit / work.slice_steps, step = unit % work.slice_steps;
    int first_step = share.slice * work.slice_steps;

    char *ring = shared + warp_here * (DEPTH * SLOT_BYTES);
    char *stored = shared + WARPS * (DEPTH * SLOT_BYTES);
    char *sums = stored + work.slice_steps * (STEP * 2 * ROWS);
    Shared copies = to_shared(ring);

    Place place = {nullptr, nullptr, tile, step, 0};
    Row row;
    if (NORMED) row.load_weights(work);
    if (!SETTLED) wait_for_x();  // which also chose the experts
    UNROLL for (int i = 0; i < DEPTH; i++) {
        if (i == EARLY) {
            if (SETTLED) wait_for_x();
            NORMED ? row.load(work) : load_x(work, share, first_step, to_shared(stored));
        }
        if (ahead < end) load_unit(work, first_step, place, copies + i * SLOT_BYTES, lane);
        ahead++;
        commit();
    }
    if (NORMED) row.norm(work, first_step, stored, (float *)sums);
    wait_for_copies<DEPTH - EARLY>();
    wait_for_block();

    int slot = 0;
    while (unit < end) {
        int whole_end = unit + work.slice_steps - step, tile_end = min_of(end, whole_end);
        bool is_whole = step == 0 && tile_end == whole_end;
        const char *x = stored + step * (STEP * 2 * ROWS);
        Totals total = {};
        for (; unit < tile_end; unit++) {
            wait_for_copies<DEPTH - 1>();
            wait_for_warp();
            const float *factor = EXPERTS == 2 ? work.shares + step / work.expert_steps : nullptr;
            add_unit(ring + slot * SLOT_BYTES, x, factor, lane, work.zero, total);
            wait_for_warp();  // all of it has read the unit
            if (ahead < end) load_unit(work, first_step, place, copies + slot * SLOT_BYTES, lane);
            ahead++;
            commit();
            step++;
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
            x += STEP * 2 * ROWS;
        }
        if (is_whole) {
            end_whole_tile(work, share, tile, lane, total);
        } else {
            int kind = unit == end ? RING : HEAD;
            put_sums(sums_of(kind, warp_here, shared, sums), lane, total);
        }
        step = 0;
        tile++;
    }
    wait_for_block();
    end_shared_tiles(work, share, shared, sums, warp_here, lane);
}
