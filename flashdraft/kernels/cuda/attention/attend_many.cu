// Attention over pages for Hopper, of any rows of any sequences: blocks that decode and chunks of
// prompts in one launch, and every processor is given as much of it.
//
// A tile holds PAIRS pairs of a row and a head that share a key head; a unit, it and KEYS keys.
// All units are in a line: by key heads, then tiles, then keys. A team of blocks has an equal piece
// of the line: all of some tiles, and a part of the first and of the last one. Parts meet in memory:
// who comes last joins them, in their order, so that the same bits come out every time. Where it
// takes no longer, tiles stay whole: they are dealt out to teams in rounds, forwards and backwards.
//
// A team is one block, or two that lie side by side and have half of a tile's pairs each. What one
// copies, both get: keys and values are read once for all pairs.
//
// A warp copies keys and values to shared memory, slice by slice and STAGES of them ahead, another
// copies queries. Two warpgroups multiply. Each has 64 of a block's pairs, or, of large heads, half
// of the numbers: then they find the weights of units by turns (attend_many_turns.h). Scores of keys
// are on their way while the values of those before are multiplied.
//
// From the compiler's command line:
//   HEAD      numbers of a head: 128, 256 or 512
//   GROUP     heads that share a key head
//   TEAM      blocks that have a tile together: 1 or 2
//   STAGES    of slices of keys or values
//   BOX       keys of a page that are copied at a time, at most those of a slice of values
//   CAUSAL    whether a row sees no row after itself
//   WINDOWED  whether keys that are too far away are hidden
//   AHEAD     where CAUSAL: whether a row may yet see some rows after itself, however far away
//   TREES     where CAUSAL: whether sequences of up to MAX_TREE rows may be trees
//   JOIN_UNITS, MIN_UNITS  where they are to differ: for tests

constexpr int WARPS = 12, BLOCKS = 1;  // a block's; on a processor at a time

#include "device.h"
#include "warpgroups.h"
#if !defined(EMULATED) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "warpgroups multiply on sm_90a alone"
#endif

constexpr int LANES = 32, WARPGROUP = 4 * LANES, THREADS = WARPS * LANES;
constexpr int WARPGROUPS = 2;  // that multiply
constexpr bool SHARES_PAIRS = HEAD <= 256;  // among the warpgroups; else they share columns
constexpr int BLOCK_PAIRS = SHARES_PAIRS ? 128 : 64, PAIRS = TEAM * BLOCK_PAIRS, KEYS = 64;
constexpr int COLUMNS = SHARES_PAIRS ? HEAD : HEAD / 2;  // of a head's result, of a warpgroup
constexpr int DEPTH = 64;         // numbers of a row that lie side by side
constexpr int BLOCKS_OF_ROW = HEAD / DEPTH;
constexpr int SLICES = SHARES_PAIRS ? 1 : 4;  // of a unit's keys, along them; of its values
constexpr int KEY_BLOCKS = BLOCKS_OF_ROW / SLICES, SLICE_VALUES = KEYS / SLICES;
constexpr int ROW_BYTES = 2 * DEPTH, SLICE_BYTES = KEYS * HEAD * 2 / SLICES;
constexpr int QUERY_BLOCK = BLOCK_PAIRS * ROW_BYTES, KEY_BLOCK = KEYS * ROW_BYTES;
constexpr int VALUE_BLOCK = SLICE_VALUES * ROW_BYTES;
constexpr int BOXES = KEYS / BOX;                 // of a unit's rows
constexpr int QUADS = COLUMNS / 8;                // of a thread's sums
constexpr int SCORES = KEYS / 2;                  // of a thread
constexpr int STEPS = KEYS / 16;                  // of products with values
constexpr int TURN_PAIRS = SHARES_PAIRS ? 1 : 64;  // of weights found by turns; else of none
constexpr int MAX_SEQS = 256;
constexpr int MAX_TREE = 64;  // rows of a tree, as in interface.py: those of others are in order
constexpr int MAX_ROUNDS = 5, MAX_DEALT = 160;  // rounds of tiles; tiles of a key head
#ifndef JOIN_UNITS
constexpr int JOIN_UNITS = 640 / KEYS;  // that take as long as joining parts
#endif
#ifndef MIN_UNITS
constexpr int MIN_UNITS = 4;  // of a block
#endif

// Of a thread: a block starts with 64 K / THREADS, down to a multiple of eight.
constexpr int COPYING_REGISTERS = SHARES_PAIRS ? 40 : 24, REGISTERS = SHARES_PAIRS ? 232 : 240;
static_assert(WARPGROUPS * REGISTERS + COPYING_REGISTERS <= 504, "others would wait for ever");

static_assert(HEAD == 128 || HEAD == 256 || HEAD == 512, "");
static_assert(WARPS == 4 * (WARPGROUPS + 1), "one more copies");
static_assert(TEAM == 1 || TEAM == 2, "");
static_assert(BLOCK_PAIRS % GROUP == 0, "a block begins with a row");
static_assert(BOX % 8 == 0 && SLICE_VALUES % BOX == 0, "boxes begin where rows are exchanged anew");
static_assert(BOXES * KEY_BLOCKS <= LANES, "a lane copies a box");
static_assert(KEY_BLOCKS % TEAM == 0, "a team's blocks copy as much");
static_assert(STAGES >= (SHARES_PAIRS ? 4 : 2 * SLICES), "two units' are in use");
static_assert(CAUSAL || !(AHEAD || TREES), "neither stands alone");
static_assert(KEYS <= 64 && MAX_TREE <= 64, "a word has a bit for each of them");

struct Work {
    Map keys, values;  // [slots, key heads, HEAD], copied in boxes [BOX, 1, DEPTH]
    Map query;         // [rows, heads, HEAD], in boxes [BLOCK_PAIRS / GROUP, GROUP, DEPTH]
    u16 *output;
    float *parts;   // [teams, 2, blocks of a team, warpgroups, QUADS + 1, threads, 4]
    int *arrivals;  // [key heads, places, blocks of a team, warpgroups]
    const int *query_start, *context_lens, *pages;
    const int *ahead;  // [rows]: how many after itself a row sees; never less far than one before
    const long long *ancestors;  // [rows]: bits of its sequence's rows that it follows, and its own
    const int *depths;           // [rows]: how many it follows
    int num_kv_heads, num_seqs;
    int num_places;  // for tiles, of a key head
    int table_stride, page_size, window;
    float scale;
};

// Where warpgroups that share columns leave what they found by turns: attend_many_turns.h.
struct Turns {
    char weights[WARPGROUPS][TURN_PAIRS * 2 * KEYS];  // [pairs, KEYS] of bfloat16
    float best[WARPGROUPS][TURN_PAIRS];               // scores of pairs so far
    u64 full[WARPGROUPS], empty[WARPGROUPS];
};

struct Memory {
    char query[BLOCKS_OF_ROW][QUERY_BLOCK];
    char stages[STAGES][SLICE_BYTES];
    Turns turns;
    u64 full[STAGES], empty[STAGES], query_full, query_empty;
    int contexts[MAX_SEQS];
    u16 starts[MAX_SEQS + 1];
    int warp_units[WARPS], warp_tiles[WARPS];
    int place, before;  // where a team begins: its tile's place, and the units before that
    short dealt_places[MAX_DEALT], dealt_units[MAX_DEALT];  // of a key head's tiles
    int is_last[WARPGROUPS];
};

typedef Ring<STAGES> Stage;

// Pairs of one sequence, and the keys low .. high - 1 that some of them see.
struct Tile {
    int sequence, first_row, num_rows;  // of the sequence
    int pair;                           // its first one
    int context, low, high;

    DEVICE int first_key() const { return low / KEYS * KEYS; }
    DEVICE int num_units() const {
        return pair < num_rows * GROUP ? (high - first_key() + KEYS - 1) / KEYS : 0;
    }
    // Rows in order stand where their keys lie, a tree's between its first key and theirs. All rows
    // see the key of the first position, and none one behind the last, but where there is AHEAD.
    DEVICE int first_position() const {
        return TREES && num_rows <= MAX_TREE ? context : context + pair / GROUP;
    }
    DEVICE int last_position() const {
        return context + min_of((pair + PAIRS - 1) / GROUP, num_rows - 1);
    }
};

// Of the places of a sequence's tiles, the first: there is room for a last one that is not full.
DEVICE int first_place(const Memory &memory, int sequence) {
    return memory.starts[sequence] * GROUP / PAIRS + sequence;
}

DEVICE Tile make_tile(const Work &work, const Memory &memory, int sequence, int pair) {
    Tile tile;
    tile.sequence = sequence;
    tile.first_row = memory.starts[sequence];
    tile.num_rows = memory.starts[sequence + 1] - tile.first_row;
    tile.pair = pair;
    tile.context = memory.contexts[sequence];
    int num_keys = tile.context + tile.num_rows;
    tile.low = WINDOWED ? max_of(tile.first_position() - work.window + 1, 0) : 0;
    tile.high = CAUSAL     ? tile.last_position() + 1
                : WINDOWED ? min_of(num_keys, tile.last_position() + work.window)
                           : num_keys;
    if (AHEAD && pair < tile.num_rows * GROUP) {
        int last_row = tile.first_row + tile.last_position() - tile.context;
        tile.high = min_of(num_keys, tile.high + max_of(work.ahead[last_row], 0));
    }
    return tile;
}

DEVICE Tile find_tile(const Work &work, const Memory &memory, int place) {
    place += first_place(memory, 0);
    int sequence = 0;
    for (int end = work.num_seqs; end - sequence > 1;) {
        int middle = (sequence + end) / 2;
        if (first_place(memory, middle) <= place) {
            sequence = middle;
        } else {
            end = middle;
        }
    }
    return make_tile(work, memory, sequence, (place - first_place(memory, sequence)) * PAIRS);
}

// What a team works on, which copying and multiplying warps follow alike: in rounds, one whole tile
// after the other; or, where `round` is -1, a piece of the line.
struct Piece {
    int units;  // of every team
    int unit, end;
    int head;
    int tile_unit;  // the first of the tile
    Tile tile;
    int first, count;   // units of the tile that are of this piece
    int round;          // of whole tiles; or none, -1
    int num_tiles;      // of all key heads

    // The tile that is next, where there is one.
    DEVICE bool find() {
        first = unit - tile_unit;
        count = min_of(tile.num_units() - first, end - unit);
        return unit < end;
    }
    // The tile that is dealt to this team in this round.
    DEVICE void deal(const Work &work, const Memory &memory) {
        int number = (round + round % 2) * num_teams();
        number += round % 2 == 0 ? team_index() : -1 - team_index();
        unit = end = tile_unit = 0;
        if (number >= num_tiles) return;
        head = number % work.num_kv_heads;
        tile = find_tile(work, memory, memory.dealt_places[number / work.num_kv_heads]);
        end = tile.num_units();
    }
    DEVICE void go_on(const Work &work, const Memory &memory) {
        if (round >= 0) {
            round++;
            deal(work, memory);
            return;
        }
        unit += count;
        tile_unit += tile.num_units();
        if (unit >= end) return;
        int sequence = tile.sequence, pair = tile.pair + PAIRS;
        while (pair >= (memory.starts[sequence + 1] - memory.starts[sequence]) * GROUP) {
            pair = 0;
            if (++sequence == work.num_seqs) sequence = 0, head++;
        }
        tile = make_tile(work, memory, sequence, pair);
    }
    DEVICE int key_of(int i) const { return tile.first_key() + (first + i) * KEYS; }
};

// What the places of a key head have.
struct Counts {
    int units, tiles;
};

DEVICE int sum_before(int value) {  // and of this lane
    int lane = thread_index() % LANES;
    UNROLL for (int i = 1; i < LANES; i *= 2) {
        int other = from_lane(value, max_of(lane - i, 0));
        if (lane >= i) value += other;
    }
    return value;
}

// From those of this thread's places to those of all places before them, and of all.
DEVICE Counts sum_up(Memory &memory, Counts &mine) {
    int lane = thread_index() % LANES, warp = thread_index() / LANES;
    Counts sum = {sum_before(mine.units), sum_before(mine.tiles)};
    if (lane == LANES - 1) {
        memory.warp_units[warp] = sum.units;
        memory.warp_tiles[warp] = sum.tiles;
    }
    wait_for_block();
    Counts all = {}, before = {sum.units - mine.units, sum.tiles - mine.tiles};
    UNROLL for (int i = 0; i < WARPS; i++) {
        if (i < warp) {
            before.units += memory.warp_units[i];
            before.tiles += memory.warp_tiles[i];
        }
        all.units += memory.warp_units[i];
        all.tiles += memory.warp_tiles[i];
    }
    mine = before;
    return all;
}

// At most so many units has a team where tiles are dealt out: the most of every round.
DEVICE int most_dealt(const Work &work, const Memory &memory, int num_tiles) {
    int sum = 0;
    for (int first = 0; first < num_tiles; first += num_teams()) {
        int last = min_of(first + num_teams(), num_tiles) - 1, most = 0;
        for (int i = first / work.num_kv_heads; i <= last / work.num_kv_heads; i++) {
            most = max_of(most, memory.dealt_units[i]);
        }
        sum += most;
    }
    return sum;
}

DEVICE Piece find_piece(const Work &work, Memory &memory) {
    for (int i = thread_index(); i <= work.num_seqs; i += THREADS) {
        memory.starts[i] = work.query_start[i];
        if (i < work.num_seqs) memory.contexts[i] = work.context_lens[i];
    }
    wait_for_block();
    int each = (work.num_places + THREADS - 1) / THREADS;
    int begin = thread_index() * each, end = min_of(begin + each, work.num_places);
    Counts before = {};
    for (int place = begin; place < end; place++) {
        int num_units = find_tile(work, memory, place).num_units();
        before.units += num_units;
        before.tiles += num_units > 0;
    }
    Counts all = sum_up(memory, before);
    Piece piece = {};
    int total = all.units * work.num_kv_heads;
    piece.num_tiles = all.tiles * work.num_kv_heads;
    piece.units = max_of((total + num_teams() - 1) / num_teams(), MIN_UNITS);
    piece.unit = team_index() * piece.units;
    piece.end = min_of(piece.unit + piece.units, total);
    piece.head = piece.unit / max_of(all.units, 1);
    int wanted = piece.unit - piece.head * all.units;
    for (int place = begin; place < end; place++) {
        int num_units = find_tile(work, memory, place).num_units();
        if (num_units == 0) continue;
        if (before.tiles < MAX_DEALT) {
            memory.dealt_places[before.tiles] = place;
            memory.dealt_units[before.tiles] = min_of(num_units, 0x7FFF);
        }
        if (before.units <= wanted && wanted < before.units + num_units) {
            memory.place = place;
            memory.before = before.units;
        }
        before.tiles++;
        before.units += num_units;
    }
    wait_for_block();
    bool can_deal = all.tiles <= MAX_DEALT && piece.num_tiles <= MAX_ROUNDS * num_teams();
    if (can_deal && most_dealt(work, memory, piece.num_tiles) <= piece.units + JOIN_UNITS) {
        piece.deal(work, memory);
    } else if (piece.unit < piece.end) {
        piece.round = -1;
        piece.tile = find_tile(work, memory, memory.place);
        piece.tile_unit = piece.head * all.units + memory.before;
    }
    return piece;
}

// -- the warps that copy

// Pairs that a tile has not may be another sequence's: nobody looks at what becomes of them.
DEVICE void copy_queries(const Work &work, Memory &memory, Piece piece) {
    int lane = thread_index() % LANES;
    Shared full = to_shared((char *)&memory.query_full);
    for (u32 turn = 0; piece.find(); turn ^= 1, piece.go_on(work, memory)) {
        wait_for_signal(to_shared((char *)&memory.query_empty), turn ^ 1);
        if (lane == 0) arrive_and_expect(full, sizeof(memory.query));
        wait_for_warp();
        if (lane < BLOCKS_OF_ROW) {
            int pair = piece.tile.pair + rank() * BLOCK_PAIRS;
            int row = piece.tile.first_row + pair / GROUP;
            Shared to = to_shared(memory.query[lane]);
            copy_box(to, &work.query, lane * DEPTH, piece.head * GROUP, row, full);
        }
    }
}

// Where the first key of a lane's box lies among all slots; -1 where it has none to be read, whose
// page may be stale or unused.
DEVICE int look_up(const Work &work, const Tile &tile, int start) {
    int key = start + thread_index() % BOXES * BOX;
    if (key + BOX <= tile.low || key >= tile.high) return -1;
    int page = work.pages[(u64)tile.sequence * work.table_stride + key / work.page_size];
    return page * work.page_size + key % work.page_size;
}

// A slice of a unit's keys has some numbers of all, one of its values all numbers of some: boxes
// lie block by block, one for each lane of some. `slots`: of all boxes of the unit's rows.
template <bool ARE_VALUES>
DEVICE void copy_slice(const Work &work, Memory &memory, Stage &stage, int head, int slice,
                       int slots) {
    constexpr int NUM_BLOCKS = ARE_VALUES ? BLOCKS_OF_ROW : KEY_BLOCKS;
    constexpr int BLOCK_BYTES = ARE_VALUES ? VALUE_BLOCK : KEY_BLOCK;
    int lane = thread_index() % LANES, block = lane % NUM_BLOCKS, box = lane / NUM_BLOCKS;
    Shared full = to_shared((char *)&memory.full[stage.place]);
    int slot = from_lane(slots, ARE_VALUES ? slice * (BOXES / SLICES) + box : box);
    if (lane >= BOXES * KEY_BLOCKS) slot = -1;
    int num_boxes = count_bits(vote(slot >= 0));
    wait_for_signal(to_shared((char *)&memory.empty[stage.place]), stage.turn ^ 1);
    if (lane == 0) arrive_and_expect(full, num_boxes * (BOX * ROW_BYTES));
    wait_for_warp();
    if (slot >= 0 && block % TEAM == rank()) {
        char *to = memory.stages[stage.place] + block * BLOCK_BYTES + box * (BOX * ROW_BYTES);
        int number = (ARE_VALUES ? block : slice * KEY_BLOCKS + block) * DEPTH;
        const Map *map = ARE_VALUES ? &work.values : &work.keys;
        if (TEAM == 1) {
            copy_box(to_shared(to), map, number, head, slot, full);
        } else {
            copy_box_to_all(to_shared(to), map, number, head, slot, full);
        }
    }
    stage.go_on();
}

template <bool ARE_VALUES>
DEVICE void copy_rows(const Work &work, Memory &memory, Stage &stage, int head, int slots) {
    for (int i = 0; i < SLICES; i++) {
        copy_slice<ARE_VALUES>(work, memory, stage, head, i, slots);
    }
}

DEVICE int look_up_unit(const Work &work, const Piece &piece, int i) {
    return i < piece.count ? look_up(work, piece.tile, piece.key_of(i)) : -1;
}

// Keys come one unit ahead of values: that is when they are multiplied. Pages are looked up another
// unit ahead.
DEVICE void copy_keys(const Work &work, Memory &memory, Piece piece) {
    Stage stage = {};
    for (; piece.find(); piece.go_on(work, memory)) {
        int slots = look_up_unit(work, piece, 0), next = look_up_unit(work, piece, 1);
        copy_rows<false>(work, memory, stage, piece.head, slots);
        for (int i = 0; i < piece.count; i++) {
            int later = look_up_unit(work, piece, i + 2);
            if (i + 1 < piece.count) copy_rows<false>(work, memory, stage, piece.head, next);
            copy_rows<true>(work, memory, stage, piece.head, slots);
            slots = next;
            next = later;
        }
    }
}

// -- the warpgroups that multiply

#include "attend_many_tile.h"
#include "attend_many_turns.h"

DEVICE void multiply_tile(const Work &work, Memory &memory, const Piece &piece, Progress &progress,
                          Sums &sums) {
    if constexpr (SHARES_PAIRS) {
        multiply_pairs(work, memory, piece, progress.stage, sums);
    } else {
        multiply_by_turns(work, memory, piece, progress, sums);
    }
}

DEVICE void multiply_piece(const Work &work, Memory &memory, Piece piece) {
    Progress progress = {};
    for (u32 turn = 0; piece.find(); turn ^= 1, piece.go_on(work, memory)) {
        wait_for_signal(to_shared((char *)&memory.query_full), turn);
        Sums sums = {};
        sums.best[0] = sums.best[1] = minus_infinity();
        int num_pairs = piece.tile.num_rows * GROUP - piece.tile.pair - first_pair();
        if (num_pairs <= 0) {
            pass_tile(memory, piece, progress.stage);
            continue;
        }
        multiply_tile(work, memory, piece, progress, sums);
        bool is_whole = piece.count == piece.tile.num_units();
        // warps without a pair leave nothing, and find nothing
        bool is_mine = thread_index() / LANES % 4 * 16 < num_pairs;
        if (is_whole || join_parts(work, memory, piece, is_mine, sums)) {
            write_tile(work, piece, sums);
        }
    }
}

KERNEL IN_TEAMS attend_many(const ARGUMENT Work work) {
    SHARED(shared);
    Memory &memory = *(Memory *)shared;
    if (thread_index() == 0) {
        expect_map(&work.keys);
        expect_map(&work.values);
        expect_map(&work.query);
        for (int i = 0; i < STAGES; i++) {
            make_signal(to_shared((char *)&memory.full[i]), 1);
            make_signal(to_shared((char *)&memory.empty[i]), 4 * WARPGROUPS * TEAM);
        }
        make_signal(to_shared((char *)&memory.query_full), 1);
        make_signal(to_shared((char *)&memory.query_empty), 4 * WARPGROUPS);
        make_turns(memory.turns);
        show_signals();
    }
    Piece piece = find_piece(work, memory);
    if (piece.unit >= piece.end) return;
    if (TEAM > 1) wait_for_team();  // until its signals are made
    if (thread_index() >= WARPGROUPS * WARPGROUP) {
        set_registers<COPYING_REGISTERS, false>();
        int warp = thread_index() / LANES % 4;
        if (warp == 0) copy_keys(work, memory, piece);
        if (warp == 1) copy_queries(work, memory, piece);
    } else {
        set_registers<REGISTERS, true>();
        multiply_piece(work, memory, piece);
    }
    if (TEAM > 1) wait_for_team();  // until nothing more comes from the others
}
