// One block of a GPU at a time on a CPU, or some together: every thread is a fiber, and collectives
// wait for the others. flashdraft/kernels/cuda/device.h has it in place of a GPU's instructions.
#pragma once

// Nothing of the standard library of C++: its containers alone took most of a compilation.
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define DEVICE inline
#define KERNEL static void
#define UNROLL
#define ARGUMENT
#define SHARED(name) char *name = shared_memory[current / THREADS_HERE]

constexpr int THREADS_HERE = WARPS * 32, MOST_TOGETHER = 8;

constexpr int STACK_BYTES = 1 << 16;

template <typename Item>
struct Queue {
    Item *items;  // none until the first one
    int first, end, room;

    bool is_empty() const { return first == end; }
    Item &front() { return items[first]; }
    Item &back() { return items[end - 1]; }
    void pop() { first++; }
    void push(const Item &item) {
        if (end == room && first > room / 2) {
            memmove(items, items + first, (end - first) * sizeof(Item));
            end -= first, first = 0;
        } else if (end == room) {
            room = room == 0 ? 8 : 2 * room;
            items = (Item *)realloc(items, room * sizeof(Item));
        }
        items[end++] = item;
    }
};

struct Copy {
    char *to;
    const char *from;
    int bytes;
    int group;
};
struct Barrier {
    int arrived, generation;
};
struct Fiber {
    jmp_buf place;
    bool is_begun, is_done;
    const Barrier *awaited;  // and when it came there
    int generation;
    Queue<Copy> copies;
    int num_groups;  // that are committed
};

static Fiber *fibers;
static Barrier barriers[MOST_TOGETHER * (1 + WARPS)];  // of every block, and of every warp
static Barrier named_barriers[MOST_TOGETHER][16];      // of some warps of a block
static Barrier team_barrier;                           // of all that run together
static jmp_buf scheduler;
static int current, first_block, together;
static bool is_backwards = false;  // which block runs first
static char *shared_memory[MOST_TOGETHER];
static u32 exchange[WARPS * MOST_TOGETHER][32][6];

// Unlike swapcontext, this leaves the kernel of the system alone.
static void give_way() {
    if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}
static void meet(Barrier &barrier, int count) {
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.generation++;
    } else {
        fibers[current].awaited = &barrier;
        fibers[current].generation = barrier.generation;
        give_way();
    }
}
static void require_aligned(const void *place, int bytes) {
    if ((uintptr_t)place % bytes == 0) return;
    fprintf(stderr, "misaligned\n");
    abort();
}

DEVICE int thread_index() { return current % THREADS_HERE; }
DEVICE int found_again(int value) { return value; }
DEVICE float found_now(float value) { return value; }
DEVICE int block_index() { return first_block + current / THREADS_HERE; }
static int grid;
DEVICE int num_blocks() { return grid; }
DEVICE void wait_for_warp() { meet(barriers[MOST_TOGETHER + current / 32], 32); }
DEVICE void wait_for_block() { meet(barriers[current / THREADS_HERE], THREADS_HERE); }
template <int THREADS>
DEVICE void wait_for_some(int barrier) {
    meet(named_barriers[current / THREADS_HERE][barrier], THREADS);
}
DEVICE void wait_for_x() {}

// Copies take place as late as they may.
typedef char *Shared;
DEVICE Shared to_shared(char *place) { return place; }
template <int BYTES>
DEVICE void copy_few(Shared to, const char *from) {
    require_aligned(from, BYTES);
    require_aligned(to, BYTES);
    fibers[current].copies.push({to, from, BYTES, fibers[current].num_groups});
}
DEVICE void copy_16(Shared to, const char *from) { copy_few<16>(to, from); }
DEVICE void copy_or_zeros(Shared to, const u16 *from, bool is_there) {
    static const Words zeros = {};
    copy_16(to, is_there ? (const char *)from : (const char *)&zeros);
}
DEVICE Words load_matrices(Shared row) {
    require_aligned(row, 16);
    auto &lanes = exchange[current / 32];
    memcpy(lanes[current % 32], &row, sizeof(row));
    wait_for_warp();
    u32 found[4];
    for (int i = 0; i < 4; i++) {
        const char *from;
        memcpy(&from, lanes[i * 8 + current % 32 / 4], sizeof(from));
        memcpy(&found[i], from + current % 4 * 4, 4);
    }
    wait_for_warp();
    return {found[0], found[1], found[2], found[3]};
}
DEVICE void commit() { fibers[current].num_groups++; }
static void finish_copies(int num_left) {
    Queue<Copy> &copies = fibers[current].copies;
    int end = fibers[current].num_groups - num_left;
    for (; !copies.is_empty() && copies.front().group < end; copies.pop()) {
        memcpy(copies.front().to, copies.front().from, copies.front().bytes);
    }
}
template <int LEFT>
DEVICE void wait_for_copies() {
    finish_copies(LEFT);
}

DEVICE float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE u32 as_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
DEVICE u16 to_bfloat16(float value) {
    u32 bits = as_bits(value);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
DEVICE float float16_at(u32 two, int place) {
    u32 bits = place == 0 ? two & 0xFFFF : two >> 16;
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 0 ? __builtin_ldexpf(fraction, -24)
                               : __builtin_ldexpf(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}
DEVICE float exponential(float value) { return __builtin_expf(value); }
DEVICE float divide(float value, float by) { return value / by; }
DEVICE float number_at(u32 two, int place) {
    return as_float(place ? two & 0xFFFF0000 : two << 16);
}
DEVICE u32 fused(u32 two, u32 factors, u32 terms) {
    u16 sums[2];
    for (int i = 0; i < 2; i++) {
        sums[i] = to_bfloat16(number_at(two, i) * number_at(factors, i) + number_at(terms, i));
    }
    return sums[0] | (u32)sums[1] << 16;
}
DEVICE void multiply(float *sum, Words a, u32 b0, u32 b1, const float *c) {
    auto &lanes = exchange[current / 32];
    u32 mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
    memcpy(lanes[current % 32], mine, sizeof(mine));
    wait_for_warp();
    float sums[4];
    for (int i = 0; i < 4; i++) {
        int row = current % 32 / 4 + i / 2 * 8, column = current % 4 * 2 + i % 2;
        double exact = c[i];
        for (int k = 0; k < 16; k++) {
            u32 left = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            u32 right = lanes[column * 4 + k % 8 / 2][4 + k / 8];
            exact += (double)number_at(left, k % 2) * number_at(right, k % 2);
        }
        sums[i] = exact;
    }
    wait_for_warp();
    memcpy(sum, sums, sizeof(sums));
}

DEVICE Words load_once(const char *from) {
    require_aligned(from, 16);
    return *(const Words *)from;
}
template <int BYTES>
DEVICE void load_few(u32 *to, const char *from) {
    require_aligned(from, BYTES);
    memcpy(to, from, BYTES);
}
DEVICE u64 load_number(const long long *from) { return *from; }
DEVICE float load_float(const float *from) { return *from; }
DEVICE void store_past(Floats *to, Floats value) { *to = value; }
DEVICE Floats load_past(const Floats *from) { return *from; }
DEVICE void send_one(u64 *box, float value) {
    if (*box != 0) abort();
    *box = 1ull << 32 | as_bits(value);
}
DEVICE float receive_one(u64 *box) {  // its sender has run before
    if (*box >> 32 != 1) abort();
    float value = as_float(*box);
    *box = 0;
    return value;
}
DEVICE void send(Box *box, Floats quad) {
    for (int i = 0; i < 4; i++) send_one(&box->of[i], quad.of[i]);
}
DEVICE Floats receive(Box *box) {
    Floats quad;
    for (int i = 0; i < 4; i++) quad.of[i] = receive_one(&box->of[i]);
    return quad;
}
DEVICE bool is_last(int *counter, int count) {
    bool is_last = ++*counter == count;
    if (is_last) *counter = 0;
    return is_last;
}
DEVICE void count_one(int *counter) { ++*counter; }
DEVICE void wait_for_count(int *counter, int count) {  // those who come have run before
    if (*counter != count) abort();
    *counter = 0;
}
DEVICE int from_lane(int value, int lane) {
    auto &lanes = exchange[current / 32];
    lanes[current % 32][0] = value;
    wait_for_warp();
    int found = lanes[lane][0];
    wait_for_warp();
    return found;
}
DEVICE u32 vote(bool is_so) {
    u32 bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= (u32)from_lane(is_so, lane) << lane;
    return bits;
}
template <int COUNT = 32, typename Join>
static float join_warp(float value, Join join) {
    auto &lanes = exchange[current / 32];
    lanes[current % 32][0] = as_bits(value);
    wait_for_warp();
    int first = current % 32 / COUNT * COUNT;
    float found = as_float(lanes[first][0]);
    for (int i = 1; i < COUNT; i++) found = join(found, as_float(lanes[first + i][0]));
    wait_for_warp();
    return found;
}
DEVICE float inverse_root(float value) { return 1 / __builtin_sqrtf(value); }
DEVICE float power_of_two(float exponent) { return __builtin_exp2f(exponent); }
DEVICE float quick_power_of_two(float exponent) { return __builtin_exp2f(exponent); }
DEVICE u32 two_bfloat16(float low, float high) {
    return to_bfloat16(low) | (u32)to_bfloat16(high) << 16;
}
DEVICE float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}
DEVICE float larger(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float sum_of_warp(float value) {
    return join_warp(value, [](float a, float b) { return a + b; });
}
DEVICE float most_of_warp(float value) { return join_warp(value, larger); }
DEVICE float sum_of_four(float value) {
    return join_warp<4>(value, [](float a, float b) { return a + b; });
}
DEVICE float most_of_four(float value) { return join_warp<4>(value, larger); }
DEVICE void store_two(float *to, Two value) { *(Two *)to = value; }
DEVICE Two load_two(const float *from) { return *(const Two *)from; }
DEVICE void meet_blocks(u32 *came, u32 count) {
    wait_for_block();
    if (thread_index() == 0) {
        u32 wanted = ((*came)++ / count + 1) * count;
        while ((int)(*came - wanted) < 0) give_way();
    }
    wait_for_block();
}
DEVICE int first_bit(u32 bits) { return __builtin_ctz(bits); }
DEVICE int count_bits(u32 bits) { return __builtin_popcount(bits); }

#include "emulated_warpgroups.h"

static void begin(int fiber, char *stack, void (*body)()) {
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stack;
    start.uc_stack.ss_size = STACK_BYTES;
    fibers[fiber].is_begun = true;
    makecontext(&start, body, 0);
    setcontext(&start);
}

// Every fiber in turn until it waits, again and again.
static void run_fibers(int count, char *stacks, void (*body)()) {
    for (bool is_left = true; is_left;) {
        is_left = false;
        for (current = 0; current < count; current++) {
            Fiber &fiber = fibers[current];
            if (fiber.is_done) continue;
            is_left = true;
            if (fiber.awaited != nullptr && fiber.awaited->generation == fiber.generation) continue;
            fiber.awaited = nullptr;
            if (_setjmp(scheduler) != 0) continue;
            if (fiber.is_begun) _longjmp(fiber.place, 1);
            begin(current, stacks + (size_t)current * STACK_BYTES, body);
        }
    }
}

// Runs a kernel's blocks, so many together, one after the other; what is not written is no number.
template <typename Body>
void run_blocks(int count, int at_a_time, int shared_bytes, Body body) {
    static Body *the_body;
    the_body = &body;
    together = at_a_time;
    grid = count;
    int num_fibers = together * THREADS_HERE, block_bytes = shared_bytes + 1024;
    char *stacks = (char *)malloc((size_t)num_fibers * STACK_BYTES);
    char *memory = (char *)malloc((size_t)block_bytes * together + 1024);
    fibers = (Fiber *)malloc(num_fibers * sizeof(Fiber));
    for (int i = 0; i < count; i += together) {
        first_block = is_backwards ? count - together - i : i;
        memset(memory, 0xFF, (size_t)block_bytes * together + 1024);
        for (int j = 0; j < together; j++) {
            uintptr_t place = (uintptr_t)memory + (size_t)j * block_bytes;
            shared_memory[j] = (char *)((place + 1023) / 1024 * 1024);
        }
        memset(fibers, 0, num_fibers * sizeof(Fiber));
        memset(barriers, 0, sizeof(barriers));
        run_fibers(num_fibers, stacks, [] {
            (*the_body)();
            fibers[current].is_done = true;
            _longjmp(scheduler, 1);
        });
        for (int j = 0; j < num_fibers; j++) free(fibers[j].copies.items);
    }
    free(fibers), free(memory), free(stacks);
}
