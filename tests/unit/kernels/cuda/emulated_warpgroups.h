// What flashdraft/kernels/cuda/quantized/warpgroups.h has, for one block on a CPU: for emulated_gpu.h.
//
// A product takes place as late as it may, when its warpgroup waits for it: shared memory is read
// then (its registers are read at once), and until then its sums are no numbers. Every other copy
// takes place when somebody waits for it, the others at once: too early is as wrong as too late.

struct Signal {
    int missing_bytes;
    signed char count, missing, is_odd, filler;
};
static_assert(sizeof(Signal) == 8, "as on a GPU");
struct LateCopy {
    char *to;
    const char *from;
    int bytes;
    Signal *signal;
};
struct Product {
    float *sum;
    Words a;
    u64 rows;
    int count;  // rows
    int group;  // that it is committed with
    bool adds;
    float before[128];
};

static Queue<LateCopy> late_copies;
static Queue<Product> products[THREADS_HERE];  // of a thread, on their way
static int num_product_groups[THREADS_HERE];   // that are committed
static Barrier group_barriers[WARPS / 4 + 1];

[[noreturn]] static void fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    abort();
}

DEVICE void make_signal(Shared place, int count) {
    require_aligned(place, 8);
    Signal fresh = {0, (signed char)count, (signed char)count, 0, 0};
    memcpy(place, &fresh, 8);
}
DEVICE void show_signals() {}
DEVICE void show_writes_to_copies() {}
template <int COUNT, bool IS_MORE>
DEVICE void set_registers() {}
static void look_at(Signal *signal) {
    if (signal->missing != 0 || signal->missing_bytes != 0) return;
    signal->missing = signal->count;
    signal->is_odd ^= 1;
}
DEVICE void arrive(Shared place) {
    Signal *signal = (Signal *)place;
    if (--signal->missing < 0) fail("more came than a signal waits for");
    look_at(signal);
}
DEVICE void arrive_and_expect(Shared place, int bytes) {
    ((Signal *)place)->missing_bytes += bytes;
    arrive(place);
}
static void finish(const LateCopy &copy) {
    memcpy(copy.to, copy.from, copy.bytes);
    copy.signal->missing_bytes -= copy.bytes;
    look_at(copy.signal);
}
DEVICE void copy_many(Shared to, const char *from, int bytes, Shared signal) {
    require_aligned(to, 16);
    require_aligned(from, 16);
    static bool is_late = false;
    is_late = !is_late;
    LateCopy copy = {to, from, bytes, (Signal *)signal};
    if (is_late) {
        late_copies.push(copy);
    } else {
        finish(copy);
    }
}
DEVICE void wait_for_signal(Shared place, u32 turn) {
    Signal *signal = (Signal *)place;
    for (int i = 0; (u32)signal->is_odd == turn; i++) {
        if (i > 100000) fail("a signal is never given");
        give_way();
        if (late_copies.is_empty() || late_copies.front().signal != signal) continue;
        LateCopy copy = late_copies.front();
        late_copies.pop();
        finish(copy);
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
template <int COUNT>
DEVICE void multiply_rows(float *sum, Words a, u64 rows, bool adds) {
    static_assert(COUNT <= 256, "so many sums are kept");
    Product product = {sum, a, rows, COUNT, num_product_groups[current], adds, {}};
    memcpy(product.before, sum, COUNT / 2 * sizeof(float));
    if (find_product(current, sum) == nullptr) {
        for (int i = 0; i < COUNT / 2; i++) sum[i] = __builtin_nanf("");
    }
    products[current].push(product);
}
DEVICE void commit_products() { num_product_groups[current]++; }

// What the four warps' first products give together.
static float found_sums[WARPS / 4 + 1][64][256];
static void multiply_now(int group) {
    const Product &one = products[group * 128].front();
    float a[64][16];
    for (int thread = 0; thread < 128; thread++) {
        const Product &mine = products[group * 128 + thread].front();
        if (mine.rows != one.rows || mine.count != one.count || mine.adds != one.adds) {
            fail("threads of a warpgroup do not agree");
        }
        const u32 words[4] = {mine.a.x, mine.a.y, mine.a.z, mine.a.w};
        for (int i = 0; i < 8; i++) {
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            a[row][thread % 4 * 2 + i % 2 + i / 4 * 8] = number_at(words[i / 2], i % 2);
        }
    }
    if (one.rows >> 62 != 1) fail("rows are not exchanged as expected");
    u64 begin = (one.rows & 0x3FFF) << 4, next_eight = (one.rows >> 32 & 0x3FFF) << 4;
    static float b[16][256];
    for (int row = 0; row < one.count; row++) {
        for (int k = 0; k < 16; k++) {
            u64 address = begin + row / 8 * next_eight + row % 8 * 128 + k * 2;
            address ^= (address >> 7 & 7) << 4;
            u16 bits;
            memcpy(&bits, shared_memory[0] + address, 2);
            b[k][row] = as_float((u32)bits << 16);
        }
    }
    for (int i = 0; i < 64; i++) {
        float *sums = found_sums[group][i];
        memset(sums, 0, one.count * sizeof(float));
        for (int k = 0; k < 16; k++) {
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
