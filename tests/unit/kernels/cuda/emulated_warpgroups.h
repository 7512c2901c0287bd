// What flashdraft/kernels/cuda/warpgroups.h has, for blocks on a CPU: for emulated_gpu.h. Those that
// run together are a team.
//
// A product takes place as late as it may, when its warpgroup waits for it: shared memory is read
// then (its registers are read at once), and until then its sums are no numbers. Every other copy
// takes place when somebody waits for it, the others at once: too early is as wrong as too late.

struct Signal {
    short missing_chunks;  // of 16 bytes
    short count, missing, is_odd;
};
static_assert(sizeof(Signal) == 8, "as on a GPU");
struct LateCopy {
    char *to;
    const char *from;
    Signal *signal;
    int row;    // of a box, which has 128 bytes
    int bytes;  // where it is none
    int there;  // 16 bytes of a box's row that are in the array
};
struct Product {
    float *sum;
    Words a;
    u64 shared_a;  // 0 where it is in registers
    u64 rows;
    bool turns;  // b's rows are columns in shared memory
    bool is_coded;  // both are e4m3, and 32 deep
    int count;  // rows
    int group;  // that it is committed with
    bool adds;
    float before[128];
};

static Queue<LateCopy> late_copies;
constexpr int MOST_GROUPS = (WARPS + 3) / 4 * MOST_TOGETHER;
static Queue<Product> products[THREADS_HERE * MOST_TOGETHER];  // of a thread, on their way
static int num_product_groups[THREADS_HERE * MOST_TOGETHER];   // that are committed
static Barrier group_barriers[MOST_GROUPS];

[[noreturn]] static void fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    abort();
}

DEVICE void make_signal(Shared place, int count) {
    require_aligned(place, 8);
    Signal fresh = {0, (short)count, (short)count, 0};
    memcpy(place, &fresh, 8);
}
DEVICE void show_signals() {}
DEVICE void show_writes_to_copies() {}
template <int COUNT, bool IS_MORE>
DEVICE void set_registers() {}
static void look_at(Signal *signal) {
    if (signal->missing != 0 || signal->missing_chunks != 0) return;
    signal->missing = signal->count;
    signal->is_odd ^= 1;
}
DEVICE void arrive(Shared place) {
    Signal *signal = (Signal *)place;
    if (--signal->missing < 0) fail("more came than a signal waits for");
    look_at(signal);
}
DEVICE void arrive_and_expect(Shared place, int bytes) {
    ((Signal *)place)->missing_chunks += bytes / 16;
    arrive(place);
}
DEVICE void show_writes_to_products() {}
static const char zeros[16] = {};
static void finish(const LateCopy &copy) {
    int num_chunks = copy.bytes > 0 ? copy.bytes / 16 : 8;
    for (int i = 0; i < num_chunks; i++) {
        int place = copy.bytes > 0 ? i : copy.row * 8 + (i ^ copy.row % 8);
        bool is_there = copy.bytes > 0 || i < copy.there;
        memcpy(copy.to + place * 16, is_there ? copy.from + i * 16 : zeros, 16);
    }
    copy.signal->missing_chunks -= num_chunks;
    look_at(copy.signal);
}
static void begin_copy(const LateCopy &copy) {
    static bool is_late = false;
    is_late = !is_late;
    if (is_late) {
        late_copies.push(copy);
    } else {
        finish(copy);
    }
}
DEVICE void copy_many(Shared to, const char *from, int bytes, Shared signal) {
    require_aligned(to, 16);
    require_aligned(from, 16);
    begin_copy({to, from, (Signal *)signal, 0, bytes, 0});
}
DEVICE void expect_map(const Map *) {}
// Its map has where the array begins, how many rows there are, the bytes from row to row and head to
// head, how many of both a box has, and how many numbers and heads there are. There are zeros behind
// the last row, head and number.
DEVICE void copy_box(Shared to, const Map *map, int number, int head, int row, Shared signal) {
    require_aligned(to, 1024);
    const u64 *words = map->words;
    for (u64 i = 0; i < words[4] * words[5]; i++) {
        u64 row_here = row + i / words[5], head_here = head + i % words[5];
        const char *from = (const char *)words[0] + row_here * words[2] + head_here * words[3];
        bool is_there = row_here < words[1] && head_here < words[7];
        int left = is_there ? ((int)words[6] - number) / 8 : 0;
        begin_copy({to, from + number * 2, (Signal *)signal, (int)i, 0, left});
    }
}
// Its map has where the array begins, how many groups an expert has, the bytes from one to the next
// of experts, groups, halves and rows, how many groups a box has, and how many numbers a row has.
DEVICE void copy_groups(Shared to, const Map *map, int number, int group, int expert,
                        Shared signal) {
    require_aligned(to, 1024);
    const u64 *words = map->words;
    for (u64 i = 0; i < words[6] * 16; i++) {
        u64 here = group + i / 16;
        const char *from = (const char *)words[0] + expert * words[2] + here * words[3];
        from += i / 8 % 2 * words[4] + i % 8 * words[5] + number * 2;
        int left = here < words[1] ? ((int)words[7] - number) / 8 : 0;
        begin_copy({to, from, (Signal *)signal, (int)i, 0, left});
    }
}
static Shared place_in(int rank, Shared mine) {  // in the memory of another block of the team
    return mine - shared_memory[current / THREADS_HERE] + shared_memory[rank];
}
DEVICE void copy_box_to_all(Shared to, const Map *map, int number, int head, int row,
                            Shared signal) {
    for (int i = 0; i < together; i++) {
        copy_box(place_in(i, to), map, number, head, row, place_in(i, signal));
    }
}
DEVICE void arrive_at(Shared signal, int rank) { arrive(place_in(rank, signal)); }
DEVICE void wait_for_team() { meet(team_barrier, THREADS_HERE * together); }
DEVICE void wait_for_signal(Shared place, u32 turn) {
    Signal *signal = (Signal *)place;
    for (int i = 0; (u32)signal->is_odd == turn; i++) {
        if (i > 100000) fail("a signal is never given");
        give_way();
        for (int j = late_copies.first; j < late_copies.end; j++) {
            LateCopy copy = late_copies.items[j];
            if (copy.signal != signal) continue;
            late_copies.items[j] = late_copies.front();
            late_copies.pop();
            finish(copy);
        }
    }
}

DEVICE u32 address_of(Shared place) { return place - shared_memory[current / THREADS_HERE]; }

DEVICE void begin_products() {}
static Product *find_product(int thread, const float *sum) {  // the first one on its way
    Queue<Product> &queue = products[thread];
    for (int i = queue.first; i < queue.end; i++) {
        if (queue.items[i].sum == sum) return &queue.items[i];
    }
    return nullptr;
}
static void begin_product(const Product &given) {
    Product product = given;
    product.group = num_product_groups[current];
    memcpy(product.before, product.sum, product.count / 2 * sizeof(float));
    if (find_product(current, product.sum) == nullptr) {
        for (int i = 0; i < product.count / 2; i++) product.sum[i] = __builtin_nanf("");
    }
    products[current].push(product);
}
template <int COUNT>
DEVICE void multiply_rows(float *sum, Words a, u64 rows, bool adds) {
    static_assert(COUNT <= 256, "so many sums are kept");
    begin_product({sum, a, 0, rows, false, false, COUNT, 0, adds, {}});
}
template <int COUNT>
DEVICE void multiply_shared(float *sum, u64 a, u64 rows, bool adds) {
    begin_product({sum, {}, a, rows, false, false, COUNT, 0, adds, {}});
}
template <int COUNT>
DEVICE void multiply_codes(float *sum, u64 a, u64 rows, bool adds) {
    begin_product({sum, {}, a, rows, false, true, COUNT, 0, adds, {}});
}
template <int COUNT>
DEVICE void multiply_shared_columns(float *sum, u64 a, u64 rows) {
    begin_product({sum, {}, a, rows, true, false, COUNT, 0, true, {}});
}
template <int COUNT>
DEVICE void multiply_columns(float *sum, Words a, u64 rows) {
    begin_product({sum, a, 0, rows, true, false, COUNT, 0, true, {}});
}
DEVICE void commit_products() { num_product_groups[current]++; }

// A byte of rows that lie as rows_at says: `row` of those below each other, `at` along them.
static const char *shared_byte(const char *memory, u64 rows, int row, int at) {
    u64 begin = (rows & 0x3FFF) << 4, next_eight = (rows >> 32 & 0x3FFF) << 4;
    u64 address = begin + row / 8 * next_eight + row % 8 * 128 + at;
    return memory + (address ^ (address >> 7 & 7) << 4);
}
static float shared_number(const char *memory, u64 rows, int row, int at) {
    u16 bits;
    memcpy(&bits, shared_byte(memory, rows, row, at * 2), 2);
    return as_float((u32)bits << 16);
}
static float shared_code(const char *memory, u64 rows, int row, int at) {  // an e4m3
    unsigned char code = *shared_byte(memory, rows, row, at);
    int exponent = code >> 3 & 15, fraction = code & 7;
    float size = exponent == 0 ? __builtin_ldexpf(fraction, -9)
                               : __builtin_ldexpf(8 + fraction, exponent - 10);
    if ((code & 127) == 127) size = __builtin_nanf("");
    return code >> 7 ? -size : size;
}

// What the four warps' first products give together.
static float found_sums[MOST_GROUPS][64][256];
static void multiply_now(int group) {
    const Product &one = products[group * 128].front();
    const char *memory = shared_memory[group * 128 / THREADS_HERE];
    const int depth = one.is_coded ? 32 : 16;
    auto number_of = one.is_coded ? shared_code : shared_number;
    float a[64][32];
    for (int thread = 0; thread < 128; thread++) {
        const Product &mine = products[group * 128 + thread].front();
        if (mine.rows != one.rows || mine.shared_a != one.shared_a || mine.count != one.count ||
            mine.adds != one.adds || mine.is_coded != one.is_coded) {
            fail("threads of a warpgroup do not agree");
        }
        const u32 words[4] = {mine.a.x, mine.a.y, mine.a.z, mine.a.w};
        for (int i = 0; i < 8; i++) {
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            a[row][thread % 4 * 2 + i % 2 + i / 4 * 8] = number_at(words[i / 2], i % 2);
        }
    }
    if (one.rows >> 62 != 1) fail("rows are not exchanged as expected");
    for (int i = 0; one.shared_a != 0 && i < 64 * depth; i++) {
        a[i / depth][i % depth] = number_of(memory, one.shared_a, i / depth, i % depth);
    }
    u64 next = (one.rows >> 16 & 0x3FFF);  // columns, in units of 16 bytes
    static float b[32][256];
    for (int row = 0; row < one.count; row++) {
        for (int k = 0; k < depth; k++) {
            b[k][row] = one.turns ? shared_number(memory, one.rows + row / 64 * next, k, row % 64)
                                  : number_of(memory, one.rows, row, k);
        }
    }
    for (int i = 0; i < 64; i++) {
        float *sums = found_sums[group][i];
        memset(sums, 0, one.count * sizeof(float));
        for (int k = 0; k < depth; k++) {
            for (int j = 0; j < one.count; j++) sums[j] += a[i][k] * b[k][j];
        }
    }
}
DEVICE void wait_for_products(int num_left) {
    int group = current / 128;
    Queue<Product> &mine = products[current];
    int end = num_product_groups[current] - num_left;
    if (!mine.is_empty() && mine.back().group == num_product_groups[current]) {
        fail("products were not committed");
    }
    while (!mine.is_empty() && mine.front().group < end) {
        meet(group_barriers[group], 128);
        if (current % 128 == 0) multiply_now(group);
        meet(group_barriers[group], 128);
        Product product = mine.front();
        mine.pop();
        float sums[128];
        for (int i = 0; i < product.count / 2; i++) {
            int row = current % 128 / 32 * 16 + current % 32 / 4 + i / 2 % 2 * 8;
            sums[i] = found_sums[group][row][i / 4 * 8 + current % 4 * 2 + i % 2];
            if (product.adds) sums[i] += product.before[i];
        }
        Product *later = find_product(current, product.sum);
        float *to = later == nullptr ? product.sum : later->before;
        memcpy(to, sums, product.count / 2 * sizeof(float));
        meet(group_barriers[group], 128);
    }
}
