// Attention of a few rows of one sequence, from the linear's result to the next linear's input:
// norms and rotation of queries, keys and values, the new ones into their pages, and attention.
//
// A block has some pairs of a row and a head that share a key head, and a part of their keys. Keys
// and values of earlier steps are on their way into shared memory before the wait for the linear.
// The SPLITS blocks with the same pairs leave what they have in memory, wait for each other, and
// add up some pairs each. Blocks start in their order, so those with the same pairs come together:
// fewer than SPLITS ever wait for one that has not started, and all others end and make room.
//
// From the compiler's command line:
//   HEAD     numbers of a head: 128, 256 or 512
//   ROWS     at most
//   GROUP    heads that share a key head
//   TILES    of 16 pairs, in a block: 1 or 2
//   KEYS     that shared memory holds at a time
//   WARPS    of a block
//   CAUSAL   rows see no later rows; or else the whole block
//   WINDOWED a row sees keys up to `window` away
//   AHEAD    where CAUSAL: a row may yet see some rows after itself, however far away
//   TREES    where CAUSAL: a row sees its ancestors alone, and windows go by its depth
//   Q_NORM, K_NORM, V_NORM, SHARE_KV: as in interface.QKVSpec

#include "device.h"

constexpr int LANES = 32;
constexpr int THREADS = WARPS * LANES;
constexpr int SPLITS = 8;
constexpr int PAIRS = 16 * TILES;
constexpr int MY_PAIRS = PAIRS / WARPS;  // of a warp
constexpr int HALF = HEAD / 2;
constexpr int MINE = HALF / LANES;  // numbers of half a head that a thread prepares
constexpr int STRIDE = HEAD + 8;    // of a row in shared memory: neighbours lie in other banks
constexpr int WEIGHT_STRIDE = KEYS + 8;
constexpr int SCORE_STRIDE = KEYS + 1;
constexpr int COLUMNS = HEAD / WARPS / 8;  // tiles of eight numbers of a head, of a warp
constexpr int NEW_KEYS = (ROWS + WARPS - 1) / WARPS;  // of a warp

static_assert(CAUSAL || !(AHEAD || TREES), "neither stands alone");
static_assert(ROWS <= 64, "a row's ancestors are bits of a word");

struct Work {
    const u16 *qkv;
    const u16 *q_norm, *k_norm;
    const float *cos, *sin;
    const long long *positions, *slots;
    u16 *keys, *values;
    u16 *output;
    float *parts;   // [tiles, key heads, SPLITS, PAIRS, HEAD]
    float *states;  // [tiles, key heads, SPLITS, PAIRS, 2]
    u32 *meetings;  // [tiles, key heads]: how many have ever come
    const int *query_start, *context_lens, *pages;
    const int *ahead;  // [rows]: how many after itself a row sees; never less far than one before
    const long long *ancestors;  // [rows]: bits of the rows that it follows, and its own
    const int *depths;           // [rows]: how many it follows
    u64 page_stride, slot_stride, head_stride;
    int num_kv_heads, row_stride, rope_stride, page_size, window;
    int num_rows, num_pages;  // there is room for
    float eps, scale;
};

struct Memory {
    u16 keys[KEYS * STRIDE];
    u16 values[KEYS * STRIDE];
    u16 queries[PAIRS * STRIDE];
    u16 weights[PAIRS * WEIGHT_STRIDE];
    float angles[2][ROWS][HALF];
    u64 places[KEYS];  // of keys, in the cache
    u64 positions[ROWS], slots[ROWS];
    int pages[THREADS];
    float scores[PAIRS * SCORE_STRIDE];
    float best[PAIRS], total[PAIRS], decay[PAIRS];
};

// Which keys a block reads, and for whom.
struct Part {
    int kv_head, tile, split;
    int num_rows, context;
    int low, begin, end;

    DEVICE int row_of(int pair) const { return (tile * PAIRS + pair) / GROUP; }
    DEVICE int head_of(int pair) const { return kv_head * GROUP + (tile * PAIRS + pair) % GROUP; }
    DEVICE bool has(int pair) const { return row_of(pair) < num_rows; }
    DEVICE bool is_empty() const { return begin >= end; }
};

// Tables come from far, and one is needed to find the next: what may be needed of them is asked for
// at once. A longer table of pages is read where it is.
struct Tables {
    int page;
    u64 position, slot;

    DEVICE explicit Tables(const Work &work) : page(0), position(0), slot(0) {
        int i = thread_index();
        if (i < work.num_pages) page = work.pages[i];
        if (i < work.num_rows) {
            position = work.positions[i];
            slot = work.slots[i];
        }
    }
    DEVICE void store(Memory &memory) const {
        int i = thread_index();
        memory.pages[i] = page;
        if (i < ROWS) {
            memory.positions[i] = position;
            memory.slots[i] = slot;
        }
    }
};

DEVICE Part find_part(const Work &work) {
    Part part = {block_index() / SPLITS % work.num_kv_heads,
                 block_index() / SPLITS / work.num_kv_heads, block_index() % SPLITS};
    part.num_rows = work.query_start[1] - work.query_start[0];
    part.context = work.context_lens[0];
    if (!part.has(0)) return part;
    int first = part.context + (TREES ? 0 : part.row_of(0));  // no row of a tree stands before
    int last = part.context + min_of(part.row_of(PAIRS - 1), part.num_rows - 1);
    int high = CAUSAL ? last + 1 : part.context + part.num_rows;
    if (WINDOWED) {
        part.low = max_of(0, first - work.window + 1);
        if (!CAUSAL) high = min_of(high, last + work.window);
    }
    if (AHEAD) {
        int further = max_of(work.ahead[last - part.context], 0);
        high = min_of(part.context + part.num_rows, high + further);
    }
    int share = (max_of(high - part.low, 1) + SPLITS - 1) / SPLITS;
    share = (share + 15) / 16 * 16;
    part.begin = part.low + part.split * share;
    part.end = min_of(high, part.begin + share);
    return part;
}

// Where keys are that are in their pages already.
DEVICE void find_keys(const Work &work, const Part &part, int first, Memory &memory) {
    for (int i = thread_index(); i < KEYS; i += THREADS) {
        int key = first + i, page = key / work.page_size;
        if (key >= min_of(part.end, part.context)) continue;
        u64 number = page < THREADS ? memory.pages[page] : work.pages[page];
        memory.places[i] = number * work.page_stride + part.kv_head * work.head_stride +
                           (key - page * work.page_size) * work.slot_stride;
    }
}

// Asks for them and their values; those past the end are zeros.
DEVICE void load_keys(const Work &work, const Part &part, int first, Memory &memory) {
    constexpr int CHUNKS = HEAD / 8;
    UNROLL for (int i = thread_index(); i < KEYS * CHUNKS; i += THREADS) {
        int place = i / CHUNKS, key = first + place, chunk = i % CHUNKS * 8;
        bool is_there = key < part.end;
        if (is_there && key >= part.context) continue;  // a new one
        u64 from = is_there ? memory.places[place] + chunk : 0;
        copy_or_zeros(to_shared((char *)(memory.keys + place * STRIDE + chunk)), work.keys + from,
                      is_there);
        copy_or_zeros(to_shared((char *)(memory.values + place * STRIDE + chunk)),
                      work.values + from, is_there);
    }
}

DEVICE void load_angles(const Work &work, const Part &part, Memory &memory) {
    constexpr int CHUNKS = HALF / 4;
    for (int i = thread_index(); i < part.num_rows * 2 * CHUNKS; i += THREADS) {
        int row = i / (2 * CHUNKS), is_sine = i / CHUNKS % 2, chunk = i % CHUNKS * 4;
        u64 from = memory.positions[row] * work.rope_stride + chunk;
        copy_16(to_shared((char *)&memory.angles[is_sine][row][chunk]),
                (const char *)((is_sine ? work.sin : work.cos) + from));
    }
}

#include "attend_few_heads.h"

// What the linear has computed, as soon as it has.
struct Queries {
    Raw of[MY_PAIRS];
};
DEVICE Queries load_queries(const Work &work, const Part &part, int warp, int lane) {
    Queries queries = {};
    UNROLL for (int i = 0; i < MY_PAIRS; i++) {
        int pair = warp + i * WARPS;
        const u16 *row = work.qkv + (u64)part.row_of(pair) * work.row_stride;
        if (part.has(pair)) queries.of[i] = load_raw(row + part.head_of(pair) * HEAD, lane);
    }
    return queries;
}
struct NewKeys {
    Raw keys[NEW_KEYS], values[NEW_KEYS];
};
DEVICE NewKeys load_new_keys(const Work &work, const Part &part, int first, int warp, int lane) {
    NewKeys found = {};
    UNROLL for (int i = 0; i < NEW_KEYS; i++) {
        int key = max_of(first, part.context) + warp + i * WARPS;
        if (key >= min_of(part.end, first + KEYS)) continue;
        const u16 *row = work.qkv + (u64)(key - part.context) * work.row_stride;
        row += (work.num_kv_heads * GROUP + part.kv_head) * HEAD;
        found.keys[i] = load_raw(row, lane);
        found.values[i] = load_raw(SHARE_KV ? row : row + work.num_kv_heads * HEAD, lane);
    }
    return found;
}

DEVICE void prepare_queries(const Work &work, const Part &part, const Queries &queries,
                            const Raw &weight, int warp, int lane, Memory &memory) {
    UNROLL for (int i = 0; i < MY_PAIRS; i++) {
        int pair = warp + i * WARPS, row = part.has(pair) ? part.row_of(pair) : 0;
        Head head(queries.of[i]);  // zeros where there is no such pair
        if (Q_NORM) head.norm(&weight, work.eps);
        head.rotate(memory.angles[0][row], memory.angles[1][row], lane);
        head.store(memory.queries + pair * STRIDE, lane);
    }
}

// The keys and values of new rows: into shared memory and, by the block that has the row, into
// their pages.
DEVICE void prepare_keys(const Work &work, const Part &part, const NewKeys &found,
                         const Raw &weight, int first, int warp, int lane, Memory &memory) {
    UNROLL for (int i = 0; i < NEW_KEYS; i++) {
        int key = max_of(first, part.context) + warp + i * WARPS, row = key - part.context;
        if (key >= min_of(part.end, first + KEYS)) continue;
        Head head(found.keys[i]), value(found.values[i]);
        if (V_NORM) value.norm(nullptr, work.eps);
        if (K_NORM) head.norm(&weight, work.eps);
        head.rotate(memory.angles[0][row], memory.angles[1][row], lane);
        head.store(memory.keys + (key - first) * STRIDE, lane);
        value.store(memory.values + (key - first) * STRIDE, lane);
        if (row * GROUP / PAIRS != part.tile) continue;
        u64 slot = memory.slots[row], to = slot / work.page_size * work.page_stride;
        to += slot % work.page_size * work.slot_stride + part.kv_head * work.head_stride;
        head.store(work.keys + to, lane);
        value.store(work.values + to, lane);
    }
}

// What a tensor core wants of sixteen rows.
DEVICE Words load_rows(const u16 *rows, int stride, int column, int lane) {
    const u16 *place = rows + lane / 4 * stride + column + lane % 4 * 2;
    return {*(const u32 *)place, *(const u32 *)(place + 8 * stride), *(const u32 *)(place + 8),
            *(const u32 *)(place + 8 * stride + 8)};
}

// Of a pair's row, in a tree: which rows it follows, and by how much it stands before its own key.
struct Branch {
    u64 ancestors;
    int shift;
};
DEVICE Branch find_branch(const Work &work, const Part &part, int pair) {
    int row = part.row_of(pair);
    if (!TREES || !part.has(pair)) return {};
    return {(u64)work.ancestors[row], row - work.depths[row]};
}

DEVICE bool sees(const Work &work, const Part &part, const Branch &branch, int pair, int key) {
    int distance = part.context + part.row_of(pair) - key, own = key - part.context;
    bool is_near = !WINDOWED || (distance - branch.shift < work.window &&
                                 (AHEAD || distance > -work.window));
    if (!part.has(pair) || key >= part.end || !is_near) return false;
    if (TREES && own >= 0 && !(branch.ancestors >> own & 1)) return false;
    return !CAUSAL || distance >= (AHEAD && distance < 0 ? -work.ahead[part.row_of(pair)] : 0);
}

DEVICE void score(const Work &work, const Part &part, int first, int warp, int lane,
                  Memory &memory) {
    constexpr int TEAMS = WARPS / TILES, TOGETHER = (KEYS / 8 + TEAMS - 1) / TEAMS;
    int row = warp % TILES * 16, place = warp / TILES * TOGETHER * 8;  // of pairs, and of keys
    if (place >= KEYS || first + place >= part.end) {
        if (place < KEYS) {
            UNROLL for (int i = 0; i < TOGETHER * 4; i++) {
                int pair = row + i % 4 / 2 * 8 + lane / 4;
                int at = place + i / 4 * 8 + lane % 4 * 2 + i % 2;
                memory.scores[pair * SCORE_STRIDE + at] = minus_infinity();
            }
        }
        return;
    }
    // asked for before the products, which take as long
    Branch branches[2] = {find_branch(work, part, row + lane / 4),
                          find_branch(work, part, row + lane / 4 + 8)};
    float sums[TOGETHER][4] = {};
    const u16 *keys = memory.keys + (place + lane / 4) * STRIDE + lane % 4 * 2;
    UNROLL for (int k = 0; k < HEAD; k += 16) {
        Words rows = load_rows(memory.queries + row * STRIDE, STRIDE, k, lane);
        UNROLL for (int i = 0; i < TOGETHER; i++) {
            const u16 *some = keys + i * 8 * STRIDE + k;
            multiply(sums[i], rows, *(const u32 *)some, *(const u32 *)(some + 8), sums[i]);
        }
    }
    UNROLL for (int i = 0; i < TOGETHER * 4; i++) {
        int pair = row + i % 4 / 2 * 8 + lane / 4, at = place + i / 4 * 8 + lane % 4 * 2 + i % 2;
        float found = sums[i / 4][i % 4] * work.scale;
        memory.scores[pair * SCORE_STRIDE + at] =
            sees(work, part, branches[i % 4 / 2], pair, first + at) ? found : minus_infinity();
    }
}

// Scores become weights against the best so far. The pairs of a warp go side by side: each of these
// steps is a wait.
DEVICE void weigh(int warp, int lane, Memory &memory) {
    constexpr int TURNS = (KEYS + LANES - 1) / LANES;
    float found[MY_PAIRS][TURNS], before[MY_PAIRS], best[MY_PAIRS], sum[MY_PAIRS];
    UNROLL for (int j = 0; j < MY_PAIRS; j++) {
        int pair = warp + j * WARPS;
        best[j] = before[j] = memory.best[pair];
        UNROLL for (int i = 0; i < TURNS; i++) {
            int at = i * LANES + lane;
            found[j][i] = at < KEYS ? memory.scores[pair * SCORE_STRIDE + at] : minus_infinity();
            best[j] = larger(best[j], found[j][i]);
        }
    }
    UNROLL for (int j = 0; j < MY_PAIRS; j++) best[j] = most_of_warp(best[j]);
    UNROLL for (int j = 0; j < MY_PAIRS; j++) {
        // Nothing seen so far: weights are zeros against any number.
        float reference = best[j] == minus_infinity() ? 0.0f : best[j];
        int pair = warp + j * WARPS;
        sum[j] = 0.0f;
        UNROLL for (int i = 0; i < TURNS; i++) {
            float weight = power_of_two(found[j][i] - reference);
            int at = i * LANES + lane;
            sum[j] += weight;
            if (at < KEYS) memory.weights[pair * WEIGHT_STRIDE + at] = to_bfloat16(weight);
        }
        before[j] = power_of_two(before[j] - reference);
    }
    UNROLL for (int j = 0; j < MY_PAIRS; j++) sum[j] = sum_of_warp(sum[j]);
    wait_for_warp();  // all have read what was best
    UNROLL for (int j = 0; j < MY_PAIRS; j++) {
        int pair = warp + j * WARPS;
        if (lane > 0) continue;
        memory.best[pair] = best[j];
        memory.decay[pair] = before[j];
        memory.total[pair] = memory.total[pair] * before[j] + sum[j];
    }
}

typedef float Mixed[TILES][COLUMNS][4];

DEVICE void mix(const Part &part, int first, int warp, int lane, const Memory &memory,
                Mixed &mixed) {
    UNROLL for (int i = 0; i < TILES * COLUMNS * 4; i++) {
        int tile = i / 4 / COLUMNS;
        mixed[tile][i / 4 % COLUMNS][i % 4] *= memory.decay[tile * 16 + i % 4 / 2 * 8 + lane / 4];
    }
    int count = min_of(KEYS, part.end - first);
    for (int k = 0; k < count; k += 16) {
        Words weights[TILES];
        UNROLL for (int i = 0; i < TILES; i++) {
            weights[i] = load_rows(memory.weights + i * 16 * WEIGHT_STRIDE, WEIGHT_STRIDE, k, lane);
        }
        UNROLL for (int j = 0; j < COLUMNS; j++) {
            const u16 *values = memory.values + (k + lane % 4 * 2) * STRIDE;
            values += (warp * COLUMNS + j) * 8 + lane / 4;
            u32 low = values[0] | (u32)values[STRIDE] << 16;
            u32 high = values[8 * STRIDE] | (u32)values[9 * STRIDE] << 16;
            UNROLL for (int i = 0; i < TILES; i++) {
                multiply(mixed[i][j], weights[i], low, high, mixed[i][j]);
            }
        }
    }
}

DEVICE void leave(const Work &work, const Part &part, int warp, int lane, const Memory &memory,
                  const Mixed &mixed) {
    u64 place = (u64)block_index() * PAIRS;
    if (thread_index() < PAIRS) {
        Two state = {memory.best[thread_index()], memory.total[thread_index()]};
        store_two(work.states + (place + thread_index()) * 2, state);
    }
    if (part.is_empty()) return;
    UNROLL for (int i = 0; i < TILES * COLUMNS * 2; i++) {
        int tile = i / 2 / COLUMNS, column = i / 2 % COLUMNS;
        int pair = tile * 16 + i % 2 * 8 + lane / 4;
        if (!part.has(pair)) continue;
        Two two = {mixed[tile][column][i % 2 * 2], mixed[tile][column][i % 2 * 2 + 1]};
        int number = (warp * COLUMNS + column) * 8 + lane % 4 * 2;
        store_two(work.parts + (place + pair) * HEAD + number, two);
    }
}

// Every block adds up what all of them have of some pairs.
DEVICE void merge(const Work &work, const Part &part) {
    u64 place = (u64)(block_index() - part.split) * PAIRS;
    for (int i = thread_index(); i < PAIRS / SPLITS * (HEAD / 4); i += THREADS) {
        int pair = i / (HEAD / 4) * SPLITS + part.split, number = i % (HEAD / 4) * 4;
        if (!part.has(pair)) continue;
        Two states[SPLITS];
        Floats parts[SPLITS];
        UNROLL for (int j = 0; j < SPLITS; j++) {
            u64 theirs = place + j * PAIRS + pair;
            states[j] = load_two(work.states + theirs * 2);
            parts[j] = load_past((Floats *)(work.parts + theirs * HEAD + number));
        }
        float best = minus_infinity(), total = 0.0f;
        UNROLL for (int j = 0; j < SPLITS; j++) best = larger(best, states[j].x);
        float reference = best == minus_infinity() ? 0.0f : best;
        Floats sums = {};
        UNROLL for (int j = 0; j < SPLITS; j++) {
            float weight = power_of_two(states[j].x - reference);
            total += weight * states[j].y;
            // Who has seen nothing has left nothing: what lies there is anything.
            UNROLL for (int k = 0; k < 4; k++) {
                sums.of[k] += weight > 0.0f ? weight * parts[j].of[k] : 0.0f;
            }
        }
        if (total == 0.0f) total = 1.0f;
        Few<4> four;
        UNROLL for (int k = 0; k < 4; k++) four.of[k] = to_bfloat16(sums.of[k] / total);
        u64 to = ((u64)part.row_of(pair) * work.num_kv_heads * GROUP + part.head_of(pair)) * HEAD;
        *(Few<4> *)(work.output + to + number) = four;
    }
}

KERNEL attend_few(Work work) {
    SHARED(shared);
    Memory &memory = *(Memory *)shared;
    int lane = thread_index() % LANES, warp = thread_index() / LANES;
    Tables tables(work);
    Raw q_weight = {}, k_weight = {};
    if (Q_NORM) q_weight = load_raw(work.q_norm, lane);
    if (K_NORM) k_weight = load_raw(work.k_norm, lane);
    Part part = find_part(work);
    if (!part.has(0)) {  // as all with these pairs
        wait_for_x();
        return;
    }
    tables.store(memory);
    wait_for_block();
    find_keys(work, part, part.begin, memory);
    load_angles(work, part, memory);
    wait_for_block();
    load_keys(work, part, part.begin, memory);
    commit();
    for (int pair = thread_index(); pair < PAIRS; pair += THREADS) {
        memory.best[pair] = minus_infinity();
        memory.total[pair] = 0.0f;
    }
    wait_for_x();
    Queries queries = load_queries(work, part, warp, lane);
    NewKeys found = load_new_keys(work, part, part.begin, warp, lane);
    wait_for_copies<0>();
    wait_for_block();
    prepare_queries(work, part, queries, q_weight, warp, lane, memory);
    Mixed mixed = {};
    for (int first = part.begin; first < part.end; first += KEYS) {
        if (first > part.begin) {
            wait_for_block();
            find_keys(work, part, first, memory);
            wait_for_block();
            load_keys(work, part, first, memory);
            commit();
            found = load_new_keys(work, part, first, warp, lane);
            wait_for_copies<0>();
        }
        prepare_keys(work, part, found, k_weight, first, warp, lane, memory);
        wait_for_block();
        score(work, part, first, warp, lane, memory);
        wait_for_block();
        weigh(warp, lane, memory);
        wait_for_block();
        mix(part, first, warp, lane, memory, mixed);
    }
    leave(work, part, warp, lane, memory, mixed);
    meet_blocks(work.meetings + block_index() / SPLITS, SPLITS);
    merge(work, part);
}
