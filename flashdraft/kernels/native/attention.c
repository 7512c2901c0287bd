/* Attention over paged keys and values, read in place.
 *
 * Work is cut into tiles: some query rows of one sequence with all the query heads that share one
 * key head. The (row, head) pairs of a tile are its lanes; lanes lie side by side in vectors, so
 * one key serves them all. Nothing a lane computes depends on its tile: a score is one chain of
 * multiply-adds over the head's dimensions, the softmax's sum and the weighted sum of the values
 * are chains over the visible keys in order of their index.
 */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"
#include "vectors.h"

#define TILE_LANES 32
#define KEYS 8       /* keys scored at once: independent chains that hide the latency */
#define VALUES 4     /* values added per pass over the accumulators, in order */
#define MOST_LANES 4 /* lanes that share one loaded value vector */

typedef struct {
    char *memory;
    size_t bytes;
} Scratch;

typedef struct {
    const Attention *call;
    size_t sequence, kv_head;
    size_t first, last;               /* rows, counted within the sequence */
    size_t context, num_keys;         /* of the sequence */
    size_t lanes, padded_lanes;       /* lane = (row - first) * group + head within the group */
    size_t low, high;                 /* keys that any row sees lie in low .. high - 1 */
    size_t common_low, common_high;   /* keys that every row sees */
    size_t *offset;                   /* [high - low, rounded up]: of each key in the cache */
    float *query;                     /* [head_dim][padded_lanes] */
    float *weight;                    /* [high - low, rounded up][padded_lanes]: scores, then e^ */
    float *total;                     /* [padded_lanes]: the sum of a lane's weights */
    float *sum;                       /* [lanes][head_dim]: of the weighted values */
} Tile;

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static size_t greater(size_t a, size_t b) { return a > b ? a : b; }
static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static size_t query_length(const Attention *call, size_t sequence) {
    return (size_t)(call->query_start[sequence + 1] - call->query_start[sequence]);
}

/* The first key that the row with key index `own` sees, and the end of its range. */
static size_t first_seen(const Attention *call, size_t own) {
    return call->window && own + 1 > call->window ? own + 1 - call->window : 0;
}

static size_t end_seen(const Attention *call, size_t own, size_t num_keys) {
    if (!call->mask && call->causal) return own + 1;
    return call->window ? smaller(num_keys, own + call->window) : num_keys;
}

static int sees(const Tile *tile, size_t row, size_t key) {
    const Attention *call = tile->call;
    const size_t own = tile->context + row;
    if (key < first_seen(call, own) || key >= end_seen(call, own, tile->num_keys)) return 0;
    if (!call->mask || key < tile->context) return 1;
    const size_t width = call->mask_width;
    return call->mask[(tile->sequence * width + row) * width + (key - tile->context)];
}

static size_t rows_per_tile(const Attention *call) {
    return greater(1, TILE_LANES / (call->heads / call->kv_heads));
}

/* Where the tile begins, what it sees, and scratch for it; false if there is no memory. */
static int open_tile(Tile *tile, Scratch *scratch) {
    const Attention *call = tile->call;
    const size_t dim = call->head_dim, sequence = tile->sequence;
    tile->context = (size_t)call->context_lens[sequence];
    tile->num_keys = tile->context + query_length(call, sequence);
    const size_t own_first = tile->context + tile->first, own_last = tile->context + tile->last - 1;
    tile->low = first_seen(call, own_first);
    tile->high = end_seen(call, own_last, tile->num_keys);
    tile->common_low = first_seen(call, own_last);
    tile->common_high = end_seen(call, own_first, tile->num_keys);
    if (call->mask) tile->common_high = smaller(tile->common_high, tile->context);
    tile->common_high = greater(tile->common_high, tile->common_low);
    tile->lanes = (tile->last - tile->first) * (call->heads / call->kv_heads);
    tile->padded_lanes = round_up(tile->lanes, LANES);

    const size_t keys = round_up(tile->high - tile->low, KEYS);
    const size_t offset_bytes = round_up(keys * sizeof(size_t), 64);
    const size_t query_bytes = round_up(dim * tile->padded_lanes * sizeof(float), 64);
    const size_t weight_bytes = round_up(keys * tile->padded_lanes * sizeof(float), 64);
    const size_t total_bytes = round_up(tile->padded_lanes * sizeof(float), 64);
    const size_t sum_bytes = round_up(tile->lanes * dim * sizeof(float), 64);
    const size_t bytes = offset_bytes + query_bytes + weight_bytes + total_bytes + sum_bytes;
    if (bytes > scratch->bytes) {
        free(scratch->memory);
        scratch->memory = aligned_alloc(64, bytes);
        scratch->bytes = scratch->memory ? bytes : 0;
        if (!scratch->memory) return 0;
    }
    tile->offset = (size_t *)scratch->memory;
    tile->query = (float *)(scratch->memory + offset_bytes);
    tile->weight = (float *)((char *)tile->query + query_bytes);
    tile->total = (float *)((char *)tile->weight + weight_bytes);
    tile->sum = (float *)((char *)tile->total + total_bytes);
    memset(tile->sum, 0, sum_bytes);
    return 1;
}

__attribute__((noinline)) static void locate_keys(Tile *tile) {
    const Attention *call = tile->call;
    const int32_t *table = call->block_table + tile->sequence * call->table_width;
    const size_t stride = call->kv_heads * call->head_dim, size = call->page_size;
    const size_t count = tile->high - tile->low;
    size_t page = tile->low / size, within = tile->low % size;
    for (size_t i = 0; i < count; i++) {
        const size_t slot = (size_t)table[page] * size + within;
        tile->offset[i] = slot * stride + tile->kv_head * call->head_dim;
        if (++within == size) {
            within = 0;
            page++;
        }
    }
    for (size_t i = count; i < round_up(count, KEYS); i++) tile->offset[i] = tile->offset[count - 1];
}

__attribute__((noinline)) static void transpose_queries(Tile *tile) {
    const Attention *call = tile->call;
    const size_t dim = call->head_dim, group = call->heads / call->kv_heads;
    const size_t start = (size_t)call->query_start[tile->sequence] + tile->first;
    memset(tile->query, 0, dim * tile->padded_lanes * sizeof(float));
    for (size_t lane = 0; lane < tile->lanes; lane++) {
        const size_t row = start + lane / group, head = tile->kv_head * group + lane % group;
        const float *from = call->query + (row * call->heads + head) * dim;
        for (size_t d = 0; d < dim; d++) tile->query[d * tile->padded_lanes + lane] = from[d];
    }
}

/* `vectors` is a constant wherever this is inlined. */
ALWAYS_INLINE void score_keys(const Tile *tile, size_t first_key, size_t lane, const int vectors) {
    const size_t dim = tile->call->head_dim, stride = tile->padded_lanes;
    const float *key[KEYS];
    vec sum[KEYS][2];
    for (int j = 0; j < KEYS; j++) {
        key[j] = tile->call->keys + tile->offset[first_key + j];
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
                for (int j = 0; j < KEYS; j++) sum[j][v] += lanes * pick(part[j], i);
            }
    }
    for (; d < dim; d++, query += stride)
        for (int v = 0; v < vectors; v++) {
            const vec lanes = load(query + v * LANES);
            for (int j = 0; j < KEYS; j++) sum[j][v] += lanes * key[j][d];
        }
    float *score = tile->weight + first_key * stride + lane;
    for (int j = 0; j < KEYS; j++)
        for (int v = 0; v < vectors; v++)
            store(score + j * stride + v * LANES, sum[j][v] * tile->call->scale);
}

/* Functions of their own, so that all their pointers and sums find registers. */
__attribute__((noinline)) static void score_one(const Tile *tile, size_t first_key, size_t lane) {
    score_keys(tile, first_key, lane, 1);
}

__attribute__((noinline)) static void score_two(const Tile *tile, size_t first_key, size_t lane) {
    score_keys(tile, first_key, lane, 2);
}

/* Heads lie far apart in the cache, in pieces too short for the hardware to foresee the next. */
ALWAYS_INLINE void prefetch(const Tile *tile, const float *cache, size_t first_key, int count) {
    if (first_key + count > tile->high - tile->low) return;
    for (int j = 0; j < count; j++)
        for (size_t d = 0; d < tile->call->head_dim; d += 64 / sizeof(float))
            __builtin_prefetch(cache + tile->offset[first_key + j] + d);
}

static void score(Tile *tile) {
    for (size_t key = 0; key < tile->high - tile->low; key += KEYS) {
        prefetch(tile, tile->call->keys, key + KEYS, KEYS);
        size_t lane = 0;
        for (; lane + 2 * LANES <= tile->padded_lanes; lane += 2 * LANES)
            score_two(tile, key, lane);
        if (lane < tile->padded_lanes) score_one(tile, key, lane);
    }
}

__attribute__((noinline)) static void hide_keys(Tile *tile, size_t from, size_t to) {
    const size_t group = tile->call->heads / tile->call->kv_heads;
    for (size_t key = from; key < to; key++)
        for (size_t lane = 0; lane < tile->lanes; lane++)
            if (!sees(tile, tile->first + lane / group, key))
                tile->weight[(key - tile->low) * tile->padded_lanes + lane] = -INFINITY;
}

/* One vector of lanes: scores become e^(score - largest), and their sum is kept for the end. */
__attribute__((noinline)) static void exponentiate(Tile *tile, size_t lane) {
    const size_t stride = tile->padded_lanes, count = tile->high - tile->low;
    float *weight = tile->weight + lane;
    vec peak = splat(-INFINITY);
    for (size_t key = 0; key < count; key++) peak = larger(peak, load(weight + key * stride));
    peak = choose(peak == splat(-INFINITY), (vec){0}, peak); /* a row that sees nothing */
    vec sum = {0};
    for (size_t key = 0; key < count; key++) {
        const vec power = exp_vec(load(weight + key * stride) - peak);
        sum += power;
        store(weight + key * stride, power);
    }
    store(tile->total + lane, sum);
}

/* Adds VALUES consecutive values to `lanes` accumulators; `lanes` is a constant when inlined. */
ALWAYS_INLINE void add_values(const Tile *tile, size_t first_key, size_t lane, const int lanes) {
    const size_t dim = tile->call->head_dim;
    const float *value[VALUES];
    float weight[MOST_LANES][VALUES];
    for (int j = 0; j < VALUES; j++) {
        value[j] = tile->call->values + tile->offset[first_key + j];
        for (int i = 0; i < lanes; i++)
            weight[i][j] = tile->weight[(first_key + j) * tile->padded_lanes + lane + i];
    }
    float *sum = tile->sum + lane * dim;
    size_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vec part[VALUES];
        for (int j = 0; j < VALUES; j++) part[j] = load(value[j] + d);
        for (int i = 0; i < lanes; i++) {
            vec total = load(sum + i * dim + d);
            for (int j = 0; j < VALUES; j++) total += part[j] * weight[i][j];
            store(sum + i * dim + d, total);
        }
    }
    for (; d < dim; d++)
        for (int i = 0; i < lanes; i++)
            for (int j = 0; j < VALUES; j++) sum[i * dim + d] += value[j][d] * weight[i][j];
}

/* Keys that every row sees, VALUES at a time; returns the first key that is left over. */
__attribute__((noinline)) static size_t add_common_values(Tile *tile) {
    size_t key = tile->common_low;
    for (; key + VALUES <= tile->common_high; key += VALUES) {
        const size_t index = key - tile->low;
        prefetch(tile, tile->call->values, index + 2 * VALUES, VALUES);
        size_t lane = 0;
        for (; lane + 4 <= tile->lanes; lane += 4) add_values(tile, index, lane, 4);
        if (tile->lanes - lane == 3) add_values(tile, index, lane, 3);
        if (tile->lanes - lane == 2) add_values(tile, index, lane, 2);
        if (tile->lanes - lane == 1) add_values(tile, index, lane, 1);
    }
    return key;
}

/* The same sums for keys that only some rows see; a hidden value is not even read. */
__attribute__((noinline)) static void add_single_values(Tile *tile, size_t from, size_t to) {
    const size_t dim = tile->call->head_dim;
    const size_t group = tile->call->heads / tile->call->kv_heads;
    for (size_t key = from; key < to; key++) {
        const float *value = tile->call->values + tile->offset[key - tile->low];
        for (size_t lane = 0; lane < tile->lanes; lane++) {
            if (!sees(tile, tile->first + lane / group, key)) continue;
            const float weight = tile->weight[(key - tile->low) * tile->padded_lanes + lane];
            float *sum = tile->sum + lane * dim;
            size_t d = 0;
            for (; d + LANES <= dim; d += LANES)
                store(sum + d, load(sum + d) + load(value + d) * weight);
            for (; d < dim; d++) sum[d] += value[d] * weight;
        }
    }
}

__attribute__((noinline)) static void write_lane(const Tile *tile, size_t lane) {
    const Attention *call = tile->call;
    const size_t dim = call->head_dim, group = call->heads / call->kv_heads;
    const size_t row = (size_t)call->query_start[tile->sequence] + tile->first + lane / group;
    const size_t head = tile->kv_head * group + lane % group;
    float *out = call->out + (row * call->heads + head) * dim;
    const float inverse = tile->total[lane] == 0.0f ? 0.0f : 1.0f / tile->total[lane];
    for (size_t d = 0; d < dim; d++) out[d] = tile->sum[lane * dim + d] * inverse;
}

static void attend(Tile *tile) {
    locate_keys(tile);
    transpose_queries(tile);
    score(tile);
    hide_keys(tile, tile->low, tile->common_low);
    hide_keys(tile, tile->common_high, tile->high);
    for (size_t lane = 0; lane < tile->padded_lanes; lane += LANES) exponentiate(tile, lane);
    add_single_values(tile, tile->low, tile->common_low);
    const size_t next = add_common_values(tile);
    add_single_values(tile, next, tile->high);
    for (size_t lane = 0; lane < tile->lanes; lane++) write_lane(tile, lane);
}

/* Everything the tiles will read, checked before any of them starts. */
static Status check_view(const Attention *call) {
    const int32_t *start = call->query_start;
    if (start[0] != 0 || (size_t)start[call->sequences] != call->rows) return BAD_VIEW;
    for (size_t s = 0; s < call->sequences; s++) {
        if (start[s + 1] < start[s] || call->context_lens[s] < 0) return BAD_VIEW;
        const size_t length = query_length(call, s);
        const size_t num_keys = (size_t)call->context_lens[s] + length;
        if (length == 0) continue;
        if (num_keys > call->table_width * call->page_size) return BAD_VIEW;
        if (call->mask && length > call->mask_width) return BAD_VIEW;
        size_t page = first_seen(call, (size_t)call->context_lens[s]) / call->page_size;
        for (; page * call->page_size < num_keys; page++)
            if ((size_t)call->block_table[s * call->table_width + page] >= call->pages)
                return BAD_PAGE; /* negative entries are too large as well */
    }
    return DONE;
}

/* first_tile[s] = tiles before sequence s, all key heads counted. */
static void count_tiles(const Attention *call, size_t *first_tile) {
    const size_t rows = rows_per_tile(call);
    first_tile[0] = 0;
    for (size_t s = 0; s < call->sequences; s++) {
        const size_t tiles = (query_length(call, s) + rows - 1) / rows;
        first_tile[s + 1] = first_tile[s] + tiles * call->kv_heads;
    }
}

static Tile find_tile(const Attention *call, const size_t *first_tile, size_t index) {
    size_t low = 0, high = call->sequences - 1;
    while (low < high) {
        const size_t middle = (low + high + 1) / 2;
        if (first_tile[middle] <= index)
            low = middle;
        else
            high = middle - 1;
    }
    const size_t rows = rows_per_tile(call), within = index - first_tile[low];
    Tile tile = {.call = call, .sequence = low, .kv_head = within % call->kv_heads};
    tile.first = within / call->kv_heads * rows;
    tile.last = smaller(tile.first + rows, query_length(call, low));
    return tile;
}

Status attention(const Attention *call) {
    const Status status = check_view(call);
    if (status != DONE) return status;
    size_t *first_tile = malloc((call->sequences + 1) * sizeof(size_t));
    if (!first_tile) return NO_MEMORY;
    count_tiles(call, first_tile);
    const size_t tiles = first_tile[call->sequences];
    int out_of_memory = 0;
#pragma omp parallel num_threads(call->threads) if (tiles > 1)
    {
        Scratch scratch = {NULL, 0};
#pragma omp for schedule(dynamic)
        for (size_t index = 0; index < tiles; index++) {
            Tile tile = find_tile(call, first_tile, index);
            if (open_tile(&tile, &scratch)) {
                attend(&tile);
            } else {
#pragma omp atomic write
                out_of_memory = 1;
            }
        }
        free(scratch.memory);
    }
    free(first_tile);
    return out_of_memory ? NO_MEMORY : DONE;
}
