/* Attention over paged keys and values, read in place: how the work is checked and shared out.
 *
 * Many tiles: each thread takes whole tiles, one at a time. Few tiles (a plain decode step has one
 * per key head): all threads work on all tiles together, stage by stage.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "attention_tile.h"
#include "pool.h"

#define TILE_LANES 32         /* (row, head) pairs of a tile, if it has the rows */
#define WORTH_A_THREAD 100000 /* multiply-adds below which one thread is faster than two */

typedef struct {
    const Attention *call;
    size_t rows;         /* of a tile */
    size_t *first_tile;  /* [sequences + 1]: tiles before each sequence, all key heads counted */
    size_t tiles;
    size_t work;         /* multiply-adds of all scores */
} Plan;

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
        size_t page = first_seen(call, (size_t)call->context_lens[s]) / call->page_size;
        for (; page * call->page_size < num_keys; page++)
            if ((size_t)call->block_table[s * call->table_width + page] >= call->pages)
                return BAD_PAGE; /* negative entries are too large as well */
    }
    return DONE;
}

/* Rows see rows of their own sequence, and no fewer of them than the rows before do: the first and
 * the last row of a tile bound what all of them see. The view has been checked. */
static Status check_ahead(const Attention *call) {
    for (size_t s = 0; call->ahead && s < call->sequences; s++) {
        const int32_t *ahead = call->ahead + call->query_start[s];
        const size_t length = query_length(call, s);
        for (size_t row = 0, end = 0; row < length; row++) {
            if (ahead[row] < 0 || row + 1 + (size_t)ahead[row] > length) return BAD_VIEW;
            if (row + 1 + (size_t)ahead[row] < end) return BAD_VIEW;
            end = row + 1 + (size_t)ahead[row];
        }
    }
    return DONE;
}

/* A row lies no deeper than there are rows before it, and sees itself. */
static Status check_trees(const Attention *call) {
    for (size_t s = 0; call->ancestors && s < call->sequences; s++) {
        const size_t first = (size_t)call->query_start[s], length = query_length(call, s);
        for (size_t row = 0; row < length; row++) {
            const int32_t depth = call->depths[first + row];
            if (depth < 0 || (size_t)depth > row) return BAD_VIEW;
            if (row < TREE_ROWS && !(call->ancestors[first + row] >> row & 1)) return BAD_VIEW;
        }
    }
    return DONE;
}

static void count_tiles(Plan *plan) {
    const Attention *call = plan->call;
    plan->first_tile[0] = plan->work = 0;
    for (size_t s = 0; s < call->sequences; s++) {
        const size_t length = query_length(call, s);
        const size_t tiles = (length + plan->rows - 1) / plan->rows;
        plan->first_tile[s + 1] = plan->first_tile[s] + tiles * call->kv_heads;
        const size_t num_keys = (size_t)call->context_lens[s] + length;
        plan->work += length * num_keys * call->heads * call->head_dim;
    }
    plan->tiles = plan->first_tile[call->sequences];
}

/* Large tiles read each key least often; smaller ones if there were too few for the threads. */
static void choose_tiles(Plan *plan) {
    const size_t group = plan->call->heads / plan->call->kv_heads;
    const size_t wanted = 2 * (size_t)plan->call->threads;
    plan->rows = TILE_LANES / group > 1 ? TILE_LANES / group : 1;
    count_tiles(plan);
    while (plan->tiles < wanted && plan->rows > 4) {
        plan->rows = (plan->rows + 1) / 2;
        count_tiles(plan);
    }
}

static Tile find_tile(const Plan *plan, size_t index, size_t parts) {
    size_t low = 0, high = plan->call->sequences - 1;
    while (low < high) {
        const size_t middle = (low + high + 1) / 2;
        if (plan->first_tile[middle] <= index)
            low = middle;
        else
            high = middle - 1;
    }
    const size_t within = index - plan->first_tile[low], kv_heads = plan->call->kv_heads;
    const size_t length = query_length(plan->call, low);
    Tile tile = {.call = plan->call, .sequence = low, .kv_head = within % kv_heads, .parts = parts};
    tile.first = within / kv_heads * plan->rows;
    tile.last = tile.first + plan->rows < length ? tile.first + plan->rows : length;
    return tile;
}

typedef struct {
    const Plan *plan;
    atomic_int *out_of_memory;
} ApartJob;

static void attend_tiles(const void *apart_job, size_t from, size_t to) {
    const ApartJob *job = apart_job;
    Scratch scratch = {NULL, 0};
    for (size_t index = from; index < to; index++) {
        Tile tile = find_tile(job->plan, index, 1);
        if (tile_open(&tile, &scratch)) {
            tile_score(&tile, 0);
            tile_exponentiate(&tile, 0);
            tile_finish(&tile, 0);
        } else {
            atomic_store(job->out_of_memory, 1);
        }
    }
    free(scratch.memory);
}

static Status attend_apart(const Plan *plan) {
    atomic_int out_of_memory = 0;
    const ApartJob job = {plan, &out_of_memory};
    const int threads = plan->work >= WORTH_A_THREAD ? plan->call->threads : 1;
    run_parallel(attend_tiles, &job, plan->tiles, threads);
    return out_of_memory ? NO_MEMORY : DONE;
}

/* The units are the parts of all tiles. */
typedef struct {
    Tile *tiles;
    size_t parts; /* of each tile */
    void (*stage)(Tile *, size_t);
} StageJob;

static void run_stage(const void *stage_job, size_t from, size_t to) {
    const StageJob *job = stage_job;
    for (size_t unit = from; unit < to; unit++)
        job->stage(&job->tiles[unit / job->parts], unit % job->parts);
}

static Status attend_together(const Plan *plan) {
    static void (*const stages[])(Tile *, size_t) = {tile_score, tile_exponentiate, tile_finish};
    StageJob job = {.tiles = calloc(plan->tiles, sizeof(Tile)),
                    .parts = 2 * (size_t)plan->call->threads};
    Scratch *scratch = calloc(plan->tiles, sizeof(Scratch));
    Status status = job.tiles && scratch ? DONE : NO_MEMORY;
    for (size_t index = 0; index < plan->tiles && status == DONE; index++) {
        job.tiles[index] = find_tile(plan, index, job.parts);
        if (!tile_open(&job.tiles[index], &scratch[index])) status = NO_MEMORY;
    }
    for (int i = 0; i < 3 && status == DONE; i++) {
        job.stage = stages[i];
        run_parallel(run_stage, &job, plan->tiles * job.parts, plan->call->threads);
    }
    for (size_t index = 0; scratch && index < plan->tiles; index++) free(scratch[index].memory);
    free(scratch);
    free(job.tiles);
    return status;
}

Status attention(const Attention *call) {
    Status status = check_view(call);
    if (status == DONE) status = check_ahead(call);
    if (status == DONE) status = check_trees(call);
    if (status != DONE || call->rows == 0) return status;
    Plan plan = {.call = call, .first_tile = malloc((call->sequences + 1) * sizeof(size_t))};
    if (!plan.first_tile) return NO_MEMORY;
    choose_tiles(&plan);
    const int together = call->threads > 1 && plan.tiles < 2 * (size_t)call->threads &&
                         plan.work >= WORTH_A_THREAD;
    status = together ? attend_together(&plan) : attend_apart(&plan);
    free(plan.first_tile);
    return status;
}
