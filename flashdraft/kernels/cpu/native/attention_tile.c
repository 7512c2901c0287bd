/* The arithmetic of one tile of attention; see attention_tile.h. */
#include "attention_tile.h"

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#define KEYS 8            /* keys scored at once: independent chains that hide the latency */
#define AHEAD 8           /* keys between a value's prefetch and its use */
#define TOTALS 4          /* vectors of lanes whose weights are summed at once */
#define VALUE_BYTES 32768 /* a block of values that stays in the first cache */
#define NOINLINE __attribute__((noinline)) /* so that all sums of a loop find registers */

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static size_t greater(size_t a, size_t b) { return a > b ? a : b; }
static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

typedef struct {
    size_t from, to;
} Range;

/* Part number `part` of `parts` of 0 .. count - 1, cut at multiples of `unit`. */
static Range cut(size_t count, size_t parts, size_t unit, size_t part) {
    const size_t size = round_up((count + parts - 1) / parts, unit);
    return (Range){smaller(part * size, count), smaller((part + 1) * size, count)};
}

/* --- what a row sees ------------------------------------------------------------------------- */

size_t query_length(const Attention *call, size_t sequence) {
    return (size_t)(call->query_start[sequence + 1] - call->query_start[sequence]);
}

size_t first_seen(const Attention *call, size_t own) {
    return call->window && own + 1 > call->window ? own + 1 - call->window : 0;
}

/* The index of a row's key, or of the place in a tree from which its window counts. */
static size_t stands_at(const Tile *tile, size_t row) {
    return tile->context + (tile->ancestors ? (size_t)tile->depths[row] : row);
}

/* One past the last key that a row sees. */
static size_t end_seen(const Tile *tile, size_t row) {
    const Attention *call = tile->call;
    const size_t own = tile->context + row;
    if (call->causal) return own + 1 + (tile->ahead ? (size_t)tile->ahead[row] : 0);
    return call->window ? smaller(tile->num_keys, own + call->window) : tile->num_keys;
}

static int sees(const Tile *tile, size_t lane, size_t index) {
    const size_t row = tile->first + lane / tile->group, key = tile->low + index;
    if (key < first_seen(tile->call, stands_at(tile, row)) || key >= end_seen(tile, row)) return 0;
    if (!tile->ancestors || key < tile->context || key >= tile->context + TREE_ROWS) return 1;
    return tile->ancestors[row] >> (key - tile->context) & 1;
}

/* --- opening --------------------------------------------------------------------------------- */

/* Rows that follow one another need no bits. */
static void set_trees(Tile *tile) {
    const Attention *call = tile->call;
    tile->ancestors = NULL;
    if (!call->ancestors) return;
    const size_t start = (size_t)call->query_start[tile->sequence];
    for (size_t row = tile->first; row < tile->last; row++)
        if (call->ancestors[start + row] != -1) {
            tile->ancestors = call->ancestors + start;
            tile->depths = call->depths + start;
        }
}

static void set_ranges(Tile *tile) {
    const Attention *call = tile->call;
    tile->group = call->heads / call->kv_heads;
    tile->context = (size_t)call->context_lens[tile->sequence];
    tile->num_keys = tile->context + query_length(call, tile->sequence);
    tile->ahead = call->ahead ? call->ahead + call->query_start[tile->sequence] : NULL;
    set_trees(tile);
    tile->lanes = (tile->last - tile->first) * tile->group;
    tile->padded_lanes = round_up(tile->lanes, LANES);
    size_t shallow = stands_at(tile, tile->first), deep = shallow;
    for (size_t row = tile->first + 1; row < tile->last; row++) {
        shallow = smaller(shallow, stands_at(tile, row));
        deep = greater(deep, stands_at(tile, row));
    }
    tile->low = first_seen(call, shallow);
    tile->count = end_seen(tile, tile->last - 1) - tile->low;
    size_t common_end = end_seen(tile, tile->first);
    if (tile->ancestors) common_end = smaller(common_end, tile->context);
    tile->common_low = first_seen(call, deep) - tile->low;
    tile->common_high = greater(common_end, tile->low + tile->common_low) - tile->low;
}

static void locate_keys(Tile *tile, size_t padded_count) {
    const Attention *call = tile->call;
    const int32_t *table = call->block_table + tile->sequence * call->table_width;
    const size_t stride = call->kv_heads * call->head_dim, size = call->page_size;
    size_t page = tile->low / size, within = tile->low % size;
    for (size_t i = 0; i < tile->count; i++) {
        const size_t slot = (size_t)table[page] * size + within;
        tile->offset[i] = slot * stride + tile->kv_head * call->head_dim;
        if (++within == size) {
            within = 0;
            page++;
        }
    }
    for (size_t i = tile->count; i < padded_count; i++)
        tile->offset[i] = tile->offset[tile->count - 1];
}

static void transpose_queries(Tile *tile) {
    const Attention *call = tile->call;
    const size_t dim = call->head_dim;
    const size_t start = (size_t)call->query_start[tile->sequence] + tile->first;
    memset(tile->query, 0, dim * tile->padded_lanes * sizeof(float));
    for (size_t lane = 0; lane < tile->lanes; lane++) {
        const size_t row = start + lane / tile->group;
        const size_t head = tile->kv_head * tile->group + lane % tile->group;
        const float *from = call->query + (row * call->heads + head) * dim;
        for (size_t d = 0; d < dim; d++) tile->query[d * tile->padded_lanes + lane] = from[d];
    }
}

int tile_open(Tile *tile, Scratch *scratch) {
    set_ranges(tile);
    const size_t dim = tile->call->head_dim, keys = round_up(tile->count, KEYS);
    const size_t offset_bytes = round_up((keys + AHEAD) * sizeof(size_t), 64);
    const size_t query_bytes = round_up(dim * tile->padded_lanes * sizeof(float), 64);
    const size_t weight_bytes = round_up(keys * tile->padded_lanes * sizeof(float), 64);
    const size_t peak_bytes = round_up(tile->parts * tile->padded_lanes * sizeof(float), 64);
    const size_t sum_bytes = round_up(tile->lanes * dim * sizeof(float), 64);
    const size_t bytes = offset_bytes + query_bytes + weight_bytes + peak_bytes + sum_bytes;
    if (bytes > scratch->bytes) {
        free(scratch->memory);
        scratch->memory = aligned_alloc(64, bytes);
        scratch->bytes = scratch->memory ? bytes : 0;
        if (!scratch->memory) return 0;
    }
    tile->offset = (size_t *)scratch->memory;
    tile->query = (float *)(scratch->memory + offset_bytes);
    tile->weight = (float *)((char *)tile->query + query_bytes);
    tile->peak = (float *)((char *)tile->weight + weight_bytes);
    tile->sum = (float *)((char *)tile->peak + peak_bytes);
    memset(tile->sum, 0, sum_bytes);
    locate_keys(tile, keys + AHEAD);
    transpose_queries(tile);
    return 1;
}

/* --- scores ---------------------------------------------------------------------------------- */

/* Heads lie far apart in the cache, in pieces too short for the hardware to foresee the next. */
ALWAYS_INLINE void prefetch(const Tile *tile, const float *cache, size_t index) {
    for (size_t d = 0; d < tile->call->head_dim; d += 64 / sizeof(float))
        __builtin_prefetch(cache + tile->offset[index] + d);
}

/* KEYS keys by one or two vectors of lanes; `vectors` is a constant wherever this is inlined. */
ALWAYS_INLINE void score_keys(const Tile *tile, size_t index, size_t lane, const int vectors) {
    const size_t dim = tile->call->head_dim, stride = tile->padded_lanes;
    const float *key[KEYS];
    vec sum[KEYS][2];
    for (int j = 0; j < KEYS; j++) {
        key[j] = tile->call->keys + tile->offset[index + j];
        for (int v = 0; v < vectors; v++) sum[j][v] = (vec){0};
    }
    const float *query = tile->query + lane;
    size_t d = 0;
    for (; d + 4 <= dim; d += 4) {
        Four part[KEYS];
        for (int j = 0; j < KEYS; j++) part[j] = load_four(key[j] + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, query += stride)
            for (int v = 0; v < vectors; v++) {
                const vec lanes = load(query + v * LANES);
                for (int j = 0; j < KEYS; j++)
                    sum[j][v] = add_multiple(sum[j][v], lanes, part[j], i);
            }
    }
    for (; d < dim; d++, query += stride)
        for (int v = 0; v < vectors; v++) {
            const vec lanes = load(query + v * LANES);
            for (int j = 0; j < KEYS; j++)
                sum[j][v] = add_product(sum[j][v], lanes, splat(key[j][d]));
        }
    float *score = tile->weight + index * stride + lane;
    for (int j = 0; j < KEYS; j++)
        for (int v = 0; v < vectors; v++)
            store(score + j * stride + v * LANES, sum[j][v] * tile->call->scale);
}

NOINLINE static void score_one(const Tile *tile, size_t index, size_t lane) {
    score_keys(tile, index, lane, 1);
}

NOINLINE static void score_two(const Tile *tile, size_t index, size_t lane) {
    score_keys(tile, index, lane, 2);
}

static void hide_keys(Tile *tile, size_t from, size_t to) {
    for (size_t index = from; index < to; index++)
        for (size_t lane = 0; lane < tile->lanes; lane++)
            if (!sees(tile, lane, index))
                tile->weight[index * tile->padded_lanes + lane] = -INFINITY;
}

/* The largest score of one vector of lanes among some keys. */
static vec find_peak(const Tile *tile, size_t lane, Range keys) {
    const size_t stride = tile->padded_lanes;
    const float *score = tile->weight + lane;
    vec peak[4];
    for (int i = 0; i < 4; i++) peak[i] = splat(-INFINITY);
    size_t index = keys.from;
    for (; index + 4 <= keys.to; index += 4)
        for (int i = 0; i < 4; i++) peak[i] = larger(peak[i], load(score + (index + i) * stride));
    for (; index < keys.to; index++) peak[0] = larger(peak[0], load(score + index * stride));
    return larger(larger(peak[0], peak[1]), larger(peak[2], peak[3]));
}

void tile_score(Tile *tile, size_t part) {
    const Range keys = cut(tile->count, tile->parts, KEYS, part);
    for (size_t index = keys.from; index < keys.to; index += KEYS) {
        for (size_t j = index + KEYS; j < smaller(index + 2 * KEYS, keys.to); j++)
            prefetch(tile, tile->call->keys, j);
        size_t lane = 0;
        for (; lane + 2 * LANES <= tile->padded_lanes; lane += 2 * LANES)
            score_two(tile, index, lane);
        if (lane < tile->padded_lanes) score_one(tile, index, lane);
    }
    hide_keys(tile, keys.from, smaller(keys.to, tile->common_low));
    hide_keys(tile, greater(keys.from, tile->common_high), keys.to);
    for (size_t lane = 0; lane < tile->padded_lanes; lane += LANES)
        store(tile->peak + part * tile->padded_lanes + lane, find_peak(tile, lane, keys));
}

/* --- weights --------------------------------------------------------------------------------- */

NOINLINE void tile_exponentiate(Tile *tile, size_t part) {
    const Range keys = cut(tile->count, tile->parts, KEYS, part);
    const size_t stride = tile->padded_lanes;
    for (size_t lane = 0; lane < stride; lane += LANES) {
        vec peak = load(tile->peak + lane);
        for (size_t i = 1; i < tile->parts; i++)
            peak = larger(peak, load(tile->peak + i * stride + lane));
        peak = choose(peak == splat(-INFINITY), (vec){0}, peak); /* a row that sees nothing */
        float *weight = tile->weight + lane;
        for (size_t index = keys.from; index < keys.to; index++)
            store(weight + index * stride, exp_vec(load(weight + index * stride) - peak));
    }
}

/* --- values ---------------------------------------------------------------------------------- */

/* Adds the weighted values of some keys to `lanes` sums of `vectors` vectors each, all held in
 * registers. Both are constants wherever this is inlined. */
ALWAYS_INLINE void add_values(const Tile *tile, Range keys, size_t lane, size_t d, const int fetch,
                              const int lanes, const int vectors) {
    const size_t dim = tile->call->head_dim, stride = tile->padded_lanes;
    const float *weight = tile->weight + keys.from * stride + lane;
    float *sums = tile->sum + lane * dim + d;
    vec sum[4][4];
    for (int i = 0; i < lanes; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] = load(sums + i * dim + v * LANES);
    for (size_t index = keys.from; index < keys.to; index++, weight += stride) {
        const float *value = tile->call->values + tile->offset[index] + d;
        if (fetch) prefetch(tile, tile->call->values, index + AHEAD);
        const Four four = load_four(weight);
        for (int v = 0; v < vectors; v++) {
            const vec part = load(value + v * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < lanes; i++) sum[i][v] = add_multiple(sum[i][v], part, four, i);
        }
    }
    for (int i = 0; i < lanes; i++)
        for (int v = 0; v < vectors; v++) store(sums + i * dim + v * LANES, sum[i][v]);
}

typedef void (*AddValues)(const Tile *, Range, size_t, size_t, int);

#define ADD_VALUES(lanes, vectors)                                                             \
    NOINLINE static void add_##lanes##_##vectors(const Tile *tile, Range keys, size_t lane,    \
                                                 size_t d, int fetch) {                        \
        add_values(tile, keys, lane, d, fetch, lanes, vectors);                                \
    }

ADD_VALUES(1, 1)
ADD_VALUES(2, 1)
ADD_VALUES(3, 1)
ADD_VALUES(4, 1)
ADD_VALUES(1, 4)
ADD_VALUES(2, 4)
ADD_VALUES(3, 4)
ADD_VALUES(4, 4)

/* The last dimensions of a head, which do not fill a vector. */
static void add_rest(const Tile *tile, Range keys, size_t lane, Range dims) {
    float *sum = tile->sum + lane * tile->call->head_dim;
    for (size_t d = dims.from; d < dims.to; d++)
        for (size_t index = keys.from; index < keys.to; index++)
            sum[d] = add_product_of(sum[d], tile->call->values[tile->offset[index] + d],
                                    tile->weight[index * tile->padded_lanes + lane]);
}

/* Keys that all of `lanes` lanes see. */
static void add_block(const Tile *tile, Range keys, Range dims, Range lanes) {
    static const AddValues add[2][4] = {{add_1_1, add_2_1, add_3_1, add_4_1},
                                        {add_1_4, add_2_4, add_3_4, add_4_4}};
    for (size_t d = dims.from, step; d < dims.to; d += step) {
        const size_t left = dims.to - d;
        step = left >= 4 * LANES ? 4 * LANES : left >= LANES ? LANES : left;
        for (size_t lane = lanes.from; lane < lanes.to; lane += 4) {
            const size_t count = smaller(4, lanes.to - lane);
            const int fetch = d == dims.from && lane == lanes.from;
            if (step < LANES)
                for (size_t i = 0; i < count; i++)
                    add_rest(tile, keys, lane + i, (Range){d, dims.to});
            else
                add[step > LANES][count - 1](tile, keys, lane, d, fetch);
        }
    }
}

/* Keys that some lane may not see: a hidden value is not even read. */
static void add_edge(const Tile *tile, Range keys, Range dims) {
    for (size_t index = keys.from; index < keys.to; index++)
        for (size_t lane = 0; lane < tile->lanes; lane++)
            if (sees(tile, lane, index))
                add_block(tile, (Range){index, index + 1}, dims, (Range){lane, lane + 1});
}

/* A block of values stays in the first cache while all lanes add it. */
static void add_common(const Tile *tile, Range dims) {
    const size_t block = greater(KEYS, VALUE_BYTES / (tile->call->head_dim * sizeof(float)));
    for (size_t from = tile->common_low; from < tile->common_high; from += block)
        add_block(tile, (Range){from, smaller(from + block, tile->common_high)}, dims,
                  (Range){0, tile->lanes});
}

/* --- output ---------------------------------------------------------------------------------- */

/* The sums of some vectors of lanes' weights over all keys in order. */
static void sum_weights(const Tile *tile, size_t lane, size_t vectors, float *total) {
    const size_t stride = tile->padded_lanes;
    vec sum[TOTALS];
    for (int v = 0; v < TOTALS; v++) sum[v] = (vec){0};
    for (size_t index = 0; index < tile->count; index++)
        for (size_t v = 0; v < vectors; v++)
            sum[v] += load(tile->weight + index * stride + lane + v * LANES);
    for (size_t v = 0; v < vectors; v++) store(total + v * LANES, sum[v]);
}

static void write_lane(const Tile *tile, size_t lane, float total, Range dims) {
    const Attention *call = tile->call;
    const size_t start = (size_t)call->query_start[tile->sequence] + tile->first;
    const size_t row = start + lane / tile->group;
    const size_t head = tile->kv_head * tile->group + lane % tile->group;
    float *out = call->out + (row * call->heads + head) * call->head_dim;
    const float *sum = tile->sum + lane * call->head_dim;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (size_t d = dims.from; d < dims.to; d++) out[d] = sum[d] * inverse;
}

void tile_finish(Tile *tile, size_t part) {
    const size_t dim = tile->call->head_dim;
    const size_t unit = dim >= 4 * LANES * tile->parts ? 4 * LANES : LANES;
    const Range dims = cut(dim, tile->parts, unit, part);
    add_edge(tile, (Range){0, tile->common_low}, dims);
    add_common(tile, dims);
    add_edge(tile, (Range){tile->common_high, tile->count}, dims);
    for (size_t first = 0; first < tile->padded_lanes; first += TOTALS * LANES) {
        const size_t last = smaller(first + TOTALS * LANES, tile->padded_lanes);
        float total[TOTALS * LANES];
        sum_weights(tile, first, (last - first) / LANES, total);
        for (size_t lane = first; lane < smaller(last, tile->lanes); lane++)
            write_lane(tile, lane, total[lane - first], dims);
    }
}
