/* Every kernel on fixed inputs: a checksum of the output's bits for each, to compare levels by.
 *
 * Knows no Python, so that it also runs where only an emulator is at hand; native_levels.py
 * compiles and runs it. Ends with 1 if a row's bits depend on its neighbours or on the threads.
 * With the argument `detect` it prints the levels that the processor runs instead.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "detect.h"
#include "kernels.h"

#define ROWS 19
#define PADDED(in) (((in) + 63) / 64 * 64)

static uint64_t state = 88172645463325252u;
static int failures = 0;

static uint32_t next_bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static int32_t below(int32_t limit) { return (int32_t)(next_bits() % (uint32_t)limit); }

/* Tame numbers lie around 0 like a model's; wild ones are any bits, infinities and NaN included. */
static float *make_floats(size_t count, int wild) {
    float *made = malloc((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = next_bits();
        if (wild)
            memcpy(&made[i], &bits, sizeof bits);
        else
            made[i] = (float)(below(4001) + below(4001) + below(4001) - 6000) * 0x1.4p-10f;
    }
    return made;
}

/* The sign and the payload of a NaN are the processor's own affair. */
static uint64_t checksum(const float *values, size_t count) {
    uint64_t sum = 1469598103934665603u;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        if (values[i] != values[i]) bits = 0x7fc00000u;
        sum = (sum ^ bits) * 1099511628211u;
    }
    return sum;
}

static void report(const char *name, size_t a, size_t b, int wild, uint64_t sum) {
    printf("%s-%zux%zu%s %016llx\n", name, a, b, wild ? "-wild" : "", (unsigned long long)sum);
}

static void expect_same(const char *name, uint64_t one, uint64_t other) {
    if (one == other) return;
    fprintf(stderr, "%s: rows do not stand alone\n", name);
    failures++;
}

static size_t count_panels(size_t out) { return (out + 2 * PANEL - 1) / (2 * PANEL) * 2; }

static void check_linear_float(size_t out, size_t in, int wild) {
    const size_t padded_out = count_panels(out) * PANEL;
    float *x = make_floats(ROWS * in, wild), *weight = make_floats(out * in, wild);
    float *panels = calloc(padded_out * in, sizeof(float)), *y = malloc(ROWS * out * sizeof(float));
    for (size_t o = 0; o < out; o++)
        for (size_t k = 0; k < in; k++)
            panels[(o / PANEL * in + k) * PANEL + o % PANEL] = weight[o * in + k];
    LinearFloat call = {x, panels, y, ROWS, in, out, 1};
    linear_float(&call);
    const uint64_t sum = checksum(y, ROWS * out);
    memset(y, 0, ROWS * out * sizeof(float));
    for (size_t row = 0; row < ROWS; row++) {
        LinearFloat alone = {x + row * in, panels, y + row * out, 1, in, out, 2};
        linear_float(&alone);
    }
    expect_same("linear_float", sum, checksum(y, ROWS * out));
    report("linear_float", out, in, wild, sum);
    free(x), free(weight), free(panels), free(y);
}

static void check_linear_int8(size_t out, size_t in, int wild) {
    const size_t padded = PADDED(in), padded_out = count_panels(out) * PANEL;
    const size_t group = (size_t)int8_group;
    float *x = make_floats(ROWS * in, wild), *scale = calloc(padded_out, sizeof(float));
    float *y = malloc(ROWS * out * sizeof(float));
    int8_t *panels = calloc(padded_out * padded, 1);
    int32_t *start = calloc(padded_out, sizeof(int32_t));
    for (size_t o = 0; o < out; o++) {
        scale[o] = (float)(1 + below(1000)) * 0x1p-16f;
        for (size_t k = 0; k < padded; k++) {
            const int8_t weight = (int8_t)(below(255) - 127);
            const size_t at = (o / PANEL * padded + k / group * group) * PANEL;
            panels[at + o % PANEL * group + k % group] = weight;
            start[o] -= 128 * weight;
        }
    }
    LinearInt8 call = {x, panels, scale, start, y, ROWS, in, out, 3};
    linear_int8(&call);
    const uint64_t sum = checksum(y, ROWS * out);
    memset(y, 0, ROWS * out * sizeof(float));
    for (size_t row = 0; row < ROWS; row++) {
        LinearInt8 alone = {x + row * in, panels, scale, start, y + row * out, 1, in, out, 1};
        linear_int8(&alone);
    }
    expect_same("linear_int8", sum, checksum(y, ROWS * out));
    report("linear_int8", out, in, wild, sum);
    free(x), free(scale), free(y), free(panels), free(start);
}

static void run_rows(const char *name, void (*operation)(const Rows *), Rows call, size_t width) {
    call.threads = 3;
    operation(&call);
    const uint64_t sum = checksum(call.out, call.rows * width);
    const uint64_t total = call.total ? checksum(call.total, call.rows * width) : 0;
    memset(call.out, 0, call.rows * width * sizeof(float));
    const size_t stride = operation == gated ? 2 * call.columns : call.columns;
    for (size_t row = 0; row < call.rows; row++) {
        Rows alone = call;
        alone.x += row * stride;
        alone.out += row * width;
        if (call.delta) alone.delta += row * stride, alone.total += row * width;
        alone.rows = 1;
        operation(&alone);
    }
    expect_same(name, sum, checksum(call.out, call.rows * width));
    report(name, call.rows, call.columns, 0, sum + total);
}

static void check_rows(size_t columns) {
    float *x = make_floats(ROWS * 2 * columns, 0), *delta = make_floats(ROWS * columns, 0);
    float *weight = make_floats(columns, 0), *total = malloc(ROWS * columns * sizeof(float));
    float *out = malloc(ROWS * PADDED(columns) * sizeof(float));
    int64_t index[ROWS];
    Rows call = {.x = x, .out = out, .rows = ROWS, .columns = columns, .eps = 1e-5f, .cap = 3.0f};
    run_rows("softmax", softmax, call, columns);
    run_rows("softcap", softcap, call, columns);
    run_rows("rotate_rows", rotate_rows, call, PADDED(columns));
    run_rows("gated_silu", gated, call, columns);
    call.kind = GELU_TANH;
    run_rows("gated_gelu", gated, call, columns);
    run_rows("rms_norm_plain", rms_norm, call, columns);
    call.weight = weight;
    run_rows("rms_norm", rms_norm, call, columns);
    call.index = index;
    argmax(&call);
    float found[ROWS];
    for (int row = 0; row < ROWS; row++) found[row] = (float)index[row];
    report("argmax", ROWS, columns, 0, checksum(found, ROWS));
    call.delta = delta, call.total = total;
    run_rows("add_rms_norm", add_rms_norm, call, columns);
    free(x), free(delta), free(weight), free(total), free(out);
}

/* 11 rows of one sequence after 37 keys and 8 rows of another after none, in shuffled pages. */
static void check_attention(size_t dim, size_t window, int masked, int threads) {
    enum { HEADS = 6, KV_HEADS = 2, PAGE = 8, PAGES = 16, MASK = 11 };
    const size_t cache = PAGES * PAGE * KV_HEADS * dim;
    float *query = make_floats(ROWS * HEADS * dim, 0);
    float *keys = make_floats(cache, 0), *values = make_floats(cache, 0);
    float *out = malloc(ROWS * HEADS * dim * sizeof(float));
    const int32_t starts[] = {0, 11, 19}, contexts[] = {37, 0};
    const int32_t table[] = {3, 9, 1, 15, 4, 12, 7, 0, 2, 0, 0, 0};
    uint8_t mask[2 * MASK * MASK];
    for (size_t i = 0; i < sizeof mask; i++) mask[i] = (uint8_t)(below(3) > 0);
    Attention call = {.query = query, .keys = keys, .values = values, .out = out, .rows = ROWS};
    call.query_start = starts, call.context_lens = contexts, call.block_table = table;
    call.sequences = 2, call.table_width = 6, call.pages = PAGES, call.page_size = PAGE;
    call.heads = HEADS, call.kv_heads = KV_HEADS, call.head_dim = dim, call.scale = 0.17f;
    call.window = window, call.causal = 1, call.threads = threads;
    if (masked) call.mask = mask, call.mask_width = MASK;
    if (attention(&call) != DONE) failures++;
    report(masked ? "attention_masked" : "attention", dim, window, 0,
           checksum(out, ROWS * HEADS * dim));
    free(query), free(keys), free(values), free(out);
}

static void check_qkv(size_t dim) {
    enum { HEADS = 3, KV_HEADS = 1, SLOTS = 32, POSITIONS = 40 };
    float *qkv = make_floats(ROWS * (HEADS + 2 * KV_HEADS) * dim, 0);
    float *norm = make_floats(dim, 0), *cos = make_floats(POSITIONS * dim / 2, 0);
    float *sin = make_floats(POSITIONS * dim / 2, 0), *query = malloc(ROWS * HEADS * dim * 4);
    float *keys = calloc(SLOTS * dim, 4), *values = calloc(SLOTS * dim, 4);
    int64_t position[ROWS], slot[ROWS];
    for (int row = 0; row < ROWS; row++) position[row] = below(POSITIONS), slot[row] = row + 5;
    PrepareQKV call = {.qkv = qkv, .q_norm = norm, .k_norm = norm, .cos = cos, .sin = sin};
    call.position = position, call.slot = slot, call.query = query;
    call.key_cache = keys, call.value_cache = values;
    call.rows = ROWS, call.heads = HEADS, call.kv_heads = KV_HEADS, call.head_dim = dim;
    call.num_positions = POSITIONS, call.num_slots = SLOTS, call.eps = 1e-6f, call.threads = 2;
    if (prepare_qkv(&call) != DONE) failures++;
    report("prepare_qkv", dim, 0, 0,
           checksum(query, ROWS * HEADS * dim) ^ checksum(keys, SLOTS * dim) * 3 ^
               checksum(values, SLOTS * dim) * 5);
    free(qkv), free(norm), free(cos), free(sin), free(query), free(keys), free(values);
}

static void detect(void) {
    Level levels[MOST_LEVELS];
    const size_t count = find_levels(levels);
    for (size_t i = 0; i < count; i++)
        if (levels[i].runs) puts(levels[i].name);
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "detect") == 0) {
        detect();
        return 0;
    }
    static const size_t shapes[][2] = {{1, 1}, {37, 19}, {8, 64}, {130, 77}, {48, 300}, {96, 576}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int wild = 0; wild < 2; wild++) {
            check_linear_float(shapes[i][0], shapes[i][1], wild);
            check_linear_int8(shapes[i][0], shapes[i][1], wild);
        }
    static const size_t columns[] = {1, 3, 8, 16, 17, 63, 64, 65, 100, 576};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) check_rows(columns[i]);
    static const size_t dims[] = {6, 20, 64, 128};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        check_qkv(dims[i]);
        for (int masked = 0; masked < 2; masked++) {
            check_attention(dims[i], 0, masked, 1);
            check_attention(dims[i], 9, masked, 3);
        }
    }
    return failures != 0;
}
