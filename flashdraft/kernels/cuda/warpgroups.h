// What Hopper has besides (device.h): four warps that multiply together, and copies that tell when
// they are done. Only for sm_90a.

// One of COUNT places of shared memory that are filled and emptied again and again, and whose turn
// its signals are at.
template <int COUNT>
struct Ring {
    int place;
    u32 turn;

    DEVICE void go_on(int count = 1) {
        place += count;
        if (place >= COUNT) {
            place -= COUNT;
            turn ^= 1;
        }
    }
};

// Of a kernel whose blocks work in teams of TEAM, which lie side by side.
#if TEAM > 1 && !defined(EMULATED)
#define IN_TEAMS __cluster_dims__(TEAM, 1, 1)
#else
#define IN_TEAMS
#endif
#ifdef TEAM
DEVICE int num_teams() { return num_blocks() / TEAM; }
DEVICE int team_index() { return block_index() / TEAM; }
DEVICE int rank() { return TEAM == 1 ? 0 : block_index() % TEAM; }  // of a block in its team
#endif

constexpr int MAX_LEFT = 7;  // groups of products that may be on their way after a wait

#ifndef EMULATED

// A signal, eight bytes of shared memory: it is given when as many have arrived as it was made for,
// and all bytes that it was told to expect. Then it counts anew; `turn` is 0 and 1 by turns.
DEVICE void make_signal(Shared signal, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(signal), "r"(count) : "memory");
}
DEVICE void show_signals() {  // to copies; to threads by wait_for_block
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}
DEVICE void arrive(Shared signal) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(signal) : "memory");
}
DEVICE void arrive_and_expect(Shared signal, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(signal), "r"(bytes)
                 : "memory");
}
DEVICE void wait_for_signal(Shared signal, u32 turn) {
    u32 is_given;
    do {
        asm volatile(
            "{ .reg .pred given; mbarrier.try_wait.parity.shared::cta.b64 given, [%1], %2; "
            "selp.u32 %0, 1, 0, given; }"
            : "=r"(is_given)
            : "r"(signal), "r"(turn)
            : "memory");
    } while (is_given == 0);
}
// A copy of any multiple of 16 bytes, which the signal expects.
DEVICE void copy_many(Shared to, const char *from, int bytes, Shared signal) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(signal)
        : "memory");
}
DEVICE void expect_map(const Map *map) {  // copies will soon need it
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A copy of a box of an array [rows, heads, numbers], which the signal expects: 64 numbers of heads
// of rows, all one below the other as `exchanged` says.
DEVICE void copy_box(Shared to, const Map *map, int number, int head, int row, Shared signal) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(number), "r"(head), "r"(row), "r"(signal)
        : "memory");
}
// The same to all blocks of a team of two, where it lies in each one's memory; each has a signal of
// its own there.
DEVICE void copy_box_to_all(Shared to, const Map *map, int number, int head, int row,
                            Shared signal) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(number), "r"(head), "r"(row), "r"(signal), "h"((u16)3)
        : "memory");
}
// At the signal that lies there in the memory of another block of the team. It is told nothing of
// what this thread wrote to global memory: that would take a thousand cycles.
DEVICE void arrive_at(Shared signal, int rank) {
    asm volatile(
        "{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [place]; }" ::"r"(signal),
        "r"(rank)
        : "memory");
}
DEVICE void wait_for_team() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// Likewise of an array [experts, groups, 2, 8, numbers], of one expert: 64 numbers of both halves'
// eights of rows of groups.
DEVICE void copy_groups(Shared to, const Map *map, int number, int group, int expert,
                        Shared signal) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, 0, 0, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(number), "r"(group), "r"(expert), "r"(signal)
        : "memory");
}
// What this thread wrote to shared memory, products may read once others know of it.
DEVICE void show_writes_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// What others wrote to global memory, such copies may read from here on.
DEVICE void show_writes_to_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A warpgroup gives up registers of its threads, or takes what others gave up.
template <int COUNT, bool IS_MORE>
DEVICE void set_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (IS_MORE) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
    }
#endif
}

DEVICE u32 address_of(Shared place) { return place; }

// Products are on their way between begin and wait: their sums are not to be touched.
DEVICE void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
DEVICE void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
DEVICE void wait_for_products(int num_left) {  // for all that were committed but the last ones
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (num_left == 0) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (num_left == 1) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (num_left == 2) asm volatile("wgmma.wait_group.sync.aligned 2;" ::: "memory");
    if (num_left == 3) asm volatile("wgmma.wait_group.sync.aligned 3;" ::: "memory");
    if (num_left == 4) asm volatile("wgmma.wait_group.sync.aligned 4;" ::: "memory");
    if (num_left == 5) asm volatile("wgmma.wait_group.sync.aligned 5;" ::: "memory");
    if (num_left == 6) asm volatile("wgmma.wait_group.sync.aligned 6;" ::: "memory");
    if (num_left == 7) asm volatile("wgmma.wait_group.sync.aligned 7;" ::: "memory");
#endif
}

#define TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TO_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TO_31 \
    TO_15 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_47 \
    TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TO_63 \
    TO_47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TO_79 \
    TO_63 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TO_95 \
    TO_79 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TO_111 \
    TO_95 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
          "%110, %111"
#define TO_127 \
    TO_111 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, " \
           "%125, %126, %127"
#define SUMS_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define PRODUCT_OF(size, sums, a, rows, adds, turns)                                         \
    "{ .reg .pred adds; setp.ne.b32 adds, " adds ", 0; wgmma.mma_async.sync.aligned." size     \
    ".f32.bf16.bf16 {" sums "}, " a ", " rows ", adds, 1, 1, " turns "; }"
#define CODES_OF(size, sums, a, rows, adds)                                              \
    "{ .reg .pred adds; setp.ne.b32 adds, " adds ", 0; wgmma.mma_async.sync.aligned." size \
    ".f32.e4m3.e4m3 {" sums "}, " a ", " rows ", adds, 1, 1; }"
#define PRODUCT(size, sums, a, rows, adds) PRODUCT_OF(size, sums, "{" a "}", rows, adds, "0")
#define INPUTS "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(rows), "r"((int)adds)

// sum [64, COUNT] = a [64, 16] @ b [COUNT, 16].T, and the sum so far if it adds. Four warps have 16
// rows of a and of the sum each, as in `multiply`; b lies in shared memory (see rows_at).
template <int COUNT>
DEVICE void multiply_rows(float *sum, Words a, u64 rows, bool adds) {
    static_assert(COUNT == 16 || COUNT == 32 || COUNT == 64 || COUNT == 96 || COUNT == 128 ||
                      COUNT == 192 || COUNT == 256,
                  "");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (COUNT == 16) {
        asm volatile(PRODUCT("m64n16k16", TO_7, "%8, %9, %10, %11", "%12", "%13")
                     : SUMS_8(0)
                     : INPUTS);
    } else if constexpr (COUNT == 32) {
        asm volatile(PRODUCT("m64n32k16", TO_15, "%16, %17, %18, %19", "%20", "%21")
                     : SUMS_16(0)
                     : INPUTS);
    } else if constexpr (COUNT == 64) {
        asm volatile(PRODUCT("m64n64k16", TO_31, "%32, %33, %34, %35", "%36", "%37")
                     : SUMS_32(0)
                     : INPUTS);
    } else if constexpr (COUNT == 96) {
        asm volatile(PRODUCT("m64n96k16", TO_47, "%48, %49, %50, %51", "%52", "%53")
                     : SUMS_32(0), SUMS_16(32)
                     : INPUTS);
    } else if constexpr (COUNT == 128) {
        asm volatile(PRODUCT("m64n128k16", TO_63, "%64, %65, %66, %67", "%68", "%69")
                     : SUMS_64(0)
                     : INPUTS);
    } else if constexpr (COUNT == 192) {
        asm volatile(PRODUCT("m64n192k16", TO_95, "%96, %97, %98, %99", "%100", "%101")
                     : SUMS_64(0), SUMS_32(64)
                     : INPUTS);
    } else if constexpr (COUNT == 256) {
        asm volatile(PRODUCT("m64n256k16", TO_127, "%128, %129, %130, %131", "%132", "%133")
                     : SUMS_64(0), SUMS_64(64)
                     : INPUTS);
    }
#endif
}

// The same with a in shared memory too, in rows like those of b.
template <int COUNT>
DEVICE void multiply_shared(float *sum, u64 a, u64 rows, bool adds) {
    static_assert(COUNT == 16 || COUNT == 32 || COUNT == 64 || COUNT == 128, "");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (COUNT == 16) {
        asm volatile(PRODUCT_OF("m64n16k16", TO_7, "%8", "%9", "%10", "0, 0")
                     : SUMS_8(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else if constexpr (COUNT == 32) {
        asm volatile(PRODUCT_OF("m64n32k16", TO_15, "%16", "%17", "%18", "0, 0")
                     : SUMS_16(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else if constexpr (COUNT == 64) {
        asm volatile(PRODUCT_OF("m64n64k16", TO_31, "%32", "%33", "%34", "0, 0")
                     : SUMS_32(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else {
        asm volatile(PRODUCT_OF("m64n128k16", TO_63, "%64", "%65", "%66", "0, 0")
                     : SUMS_64(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    }
#endif
}

// sum [64, COUNT] = a [64, 32] @ b [COUNT, 32].T of e4m3, and the sum so far if it adds; both lie in
// shared memory. Sums keep some 14 bits only: they are to be added up elsewhere now and then.
template <int COUNT>
DEVICE void multiply_codes(float *sum, u64 a, u64 rows, bool adds) {
    static_assert(COUNT == 32 || COUNT == 64 || COUNT == 96 || COUNT == 128 || COUNT == 192, "");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (COUNT == 32) {
        asm volatile(CODES_OF("m64n32k32", TO_15, "%16", "%17", "%18")
                     : SUMS_16(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else if constexpr (COUNT == 64) {
        asm volatile(CODES_OF("m64n64k32", TO_31, "%32", "%33", "%34")
                     : SUMS_32(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else if constexpr (COUNT == 96) {
        asm volatile(CODES_OF("m64n96k32", TO_47, "%48", "%49", "%50")
                     : SUMS_32(0), SUMS_16(32)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else if constexpr (COUNT == 128) {
        asm volatile(CODES_OF("m64n128k32", TO_63, "%64", "%65", "%66")
                     : SUMS_64(0)
                     : "l"(a), "l"(rows), "r"((int)adds));
    } else {
        asm volatile(CODES_OF("m64n192k32", TO_95, "%96", "%97", "%98")
                     : SUMS_64(0), SUMS_32(64)
                     : "l"(a), "l"(rows), "r"((int)adds));
    }
#endif
}

// sum [64, COUNT] += a [64, 16] @ b [16, COUNT], where b lies in shared memory (see columns_at).
template <int COUNT>
DEVICE void multiply_columns(float *sum, Words a, u64 rows) {
    static_assert(COUNT == 128 || COUNT == 256, "");
    constexpr bool adds = true;  // for INPUTS
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (COUNT == 128) {
        asm volatile(PRODUCT_OF("m64n128k16", TO_63, "{%64, %65, %66, %67}", "%68", "%69", "1")
                     : SUMS_64(0)
                     : INPUTS);
    } else {
        asm volatile(PRODUCT_OF("m64n256k16", TO_127, "{%128, %129, %130, %131}", "%132", "%133",
                                "1")
                     : SUMS_64(0), SUMS_64(64)
                     : INPUTS);
    }
#endif
}

// The same with a in shared memory too, in rows as rows_at says.
template <int COUNT>
DEVICE void multiply_shared_columns(float *sum, u64 a, u64 rows) {
    static_assert(COUNT == 128 || COUNT == 256, "");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (COUNT == 128) {
        asm volatile(PRODUCT_OF("m64n128k16", TO_63, "%64", "%65", "%66", "0, 1")
                     : SUMS_64(0)
                     : "l"(a), "l"(rows), "r"(1));
    } else {
        asm volatile(PRODUCT_OF("m64n256k16", TO_127, "%128", "%129", "%130", "0, 1")
                     : SUMS_64(0), SUMS_64(64)
                     : "l"(a), "l"(rows), "r"(1));
    }
#endif
}

#endif

// Rows of 128 bytes one below the other in shared memory, from a multiple of 1024 on. Sixteen bytes
// of them lie where `exchanged` says, so that those of a column are in different banks: bits 4 to 6
// of an address are those of a plain one, exclusive or bits 7 to 9. To go on along the rows, or to
// other eight rows, add to the address, in units of 16 bytes.
DEVICE u64 rows_at(Shared place, int next = 16) {  // `next`: see columns_at
    constexpr u64 EXCHANGED = (u64)1 << 62, NEXT_EIGHT = (u64)(1024 / 16) << 32;
    return EXCHANGED | NEXT_EIGHT | (u64)(next / 16) << 16 | (address_of(place) & 0x3FFFF) >> 4;
}
// Such rows as columns of what is multiplied: b's 16 rows are those from there on, and 64 numbers of
// each lie side by side; the next 64 follow `next` bytes later.
DEVICE u64 columns_at(Shared place, int next) { return rows_at(place, next); }
DEVICE int exchanged(int row, int sixteenth) { return sixteenth ^ row % 8; }
