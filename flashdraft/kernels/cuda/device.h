// What a GPU has instructions for, by names that say what for. Nothing but this and warpgroups.h
// knows that it is a GPU: where EMULATED is defined, that file has the same for a CPU.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __attribute__((aligned(16))) Words {
    u32 x, y, z, w;
};
struct __attribute__((aligned(16))) Floats {
    float of[4];
};

// Four sums on their way to another block, each with a flag: who finds the flags has the sums.
struct __attribute__((aligned(32))) Box {
    u64 of[4];
};

template <int COUNT>
struct __attribute__((aligned(2 * COUNT))) Few {
    u16 of[COUNT];
};
struct __attribute__((aligned(8))) Two {
    float x, y;
};

// Where an array lies in global memory, and what is copied of it at a time (see driver.make_map).
struct __attribute__((aligned(64))) Map {
    u64 words[16];
};

#ifdef EMULATED
#include EMULATED
#else

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
#define UNROLL _Pragma("unroll")
#define ARGUMENT __grid_constant__  // stays where it is
#define SHARED(name) extern __shared__ __align__(1024) char name[]

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int num_blocks() { return gridDim.x; }

// The same, but what follows from it is computed here, not ahead.
DEVICE int found_again(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The same, but computed before what waits next.
DEVICE float found_now(float value) {
    asm volatile("" : "+f"(value));
    return value;
}

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u16 to_bfloat16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE float float16_at(u32 two, int place) {
    float low, high;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; "
        "cvt.f32.f16 %1, high; }"
        : "=f"(low), "=f"(high)
        : "r"(two));
    return place == 0 ? low : high;
}
DEVICE float exponential(float value) { return __expf(value); }
DEVICE float divide(float value, float by) { return __fdividef(value, by); }
DEVICE float inverse_root(float value) { return rsqrtf(value); }
DEVICE float power_of_two(float exponent) { return exp2f(exponent); }
DEVICE float quick_power_of_two(float exponent) {  // what is very small is zero
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
DEVICE u32 two_bfloat16(float low, float high) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }  // before it is added
DEVICE u32 fused(u32 two, u32 factors, u32 terms) {  // two * factors + terms, of bfloat16
    u32 sums;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(two), "r"(factors), "r"(terms));
    return sums;
}

// sum [16, 8] = a [16, 16] @ b [16, 8] + c, of bfloat16, as a warp holds them
DEVICE void multiply(float *sum, Words a, u32 b0, u32 b1, const float *c) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

DEVICE void wait_for_warp() { __syncwarp(); }
DEVICE void wait_for_block() { __syncthreads(); }
template <int THREADS>
DEVICE void wait_for_some(int barrier) {  // of the block's warps; barrier 0 is for all of them
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Copies into shared memory that go on by themselves, in groups.
typedef u32 Shared;
DEVICE Shared to_shared(const char *place) { return (u32)__cvta_generic_to_shared(place); }
DEVICE void copy_16(Shared to, const char *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
template <int BYTES>
DEVICE void copy_few(Shared to, const char *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}
DEVICE void copy_or_zeros(Shared to, const u16 *from, bool is_there) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(is_there ? 16 : 0));
}
// Four squares of eight rows of eight int16, from shared memory: a lane says where row `lane % 8` of
// square `lane / 8` lies, and gets numbers 2 * (lane % 4) and the next of row lane / 4 of each.
DEVICE Words load_matrices(Shared row) {
    Words found;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(row)
                 : "memory");
    return found;
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void wait_for_copies() {  // for all groups but the last ones
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Until all earlier kernels are complete; then the next one may start (see overlap.py).
DEVICE void wait_for_x() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Weights, which pass through once.
DEVICE Words load_once(const char *from) {
    Words value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}
template <int BYTES>
DEVICE void load_few(u32 *to, const char *from) {  // 4 or 8
    if (BYTES == 4) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    } else {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    }
}

// What another kernel may have written, past the processor's own cache.
DEVICE u64 load_number(const long long *from) {
    u64 number;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(number) : "l"(from) : "memory");
    return number;
}
DEVICE float load_float(const float *from) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

// To and from other blocks, past the processor's own cache.
DEVICE void store_past(Floats *to, Floats value) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.of[0]),
                 "f"(value.of[1]), "f"(value.of[2]), "f"(value.of[3])
                 : "memory");
}
DEVICE Floats load_past(const Floats *from) {
    Floats value;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.of[0]), "=f"(value.of[1]), "=f"(value.of[2]), "=f"(value.of[3])
                 : "l"(from)
                 : "memory");
    return value;
}
// Whether this thread comes last of so many; what they stored before can be seen then. The counter
// is ready for the next kernel.
DEVICE bool is_last(int *counter, int count) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    if (before == count - 1) *counter = 0;
    return before == count - 1;
}

// One more has come, and what its warps stored before they met can be seen by who waits for it.
DEVICE void count_one(int *counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// Waits until so many have come. The counter is ready for the next kernel.
DEVICE void wait_for_count(int *counter, int count) {
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now != count);
    *counter = 0;
}

DEVICE void put(Box *box, u64 a, u64 b, u64 c, u64 d) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(box), "l"(a), "l"(b));
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0 + 16], {%1, %2};" ::"l"(box), "l"(c), "l"(d));
}
DEVICE u64 flagged(float value) { return (u64)1 << 32 | __float_as_uint(value); }
DEVICE void send(Box *box, Floats quad) {
    put(box, flagged(quad.of[0]), flagged(quad.of[1]), flagged(quad.of[2]), flagged(quad.of[3]));
}
// Waits until the box is full, and leaves it empty.
DEVICE Floats receive(Box *box) {
    u64 a, b, c, d;
    do {
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(box));
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2 + 16];"
                     : "=l"(c), "=l"(d)
                     : "l"(box));
    } while ((a & b & c & d) >> 32 == 0);
    put(box, 0, 0, 0, 0);
    return {as_float(a), as_float(b), as_float(c), as_float(d)};
}
// Likewise one number.
DEVICE void send_one(u64 *box, float value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(box), "l"(flagged(value)));
}
DEVICE float receive_one(u64 *box) {
    u64 found;
    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(box));
    } while (found >> 32 == 0);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(box), "l"(0ull));
    return as_float(found);
}

DEVICE void store_two(float *to, Two value) {
    asm volatile("st.global.cg.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x), "f"(value.y)
                 : "memory");
}
DEVICE Two load_two(const float *from) {
    Two value;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "l"(from)
                 : "memory");
    return value;
}
// Waits until so many blocks, a power of two, have come here; what they stored before can be seen
// then. Nobody takes the number of those that ever came back.
DEVICE void meet_blocks(u32 *came, u32 count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before, now;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(came)
                     : "memory");
        u32 wanted = (before / count + 1) * count;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(came) : "memory");
        } while ((int)(now - wanted) < 0);
    }
    __syncthreads();
}

// Between the threads of a warp.
DEVICE float sum_of_warp(float value) {
    UNROLL for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    return value;
}
DEVICE float most_of_warp(float value) {
    UNROLL for (int i = 16; i > 0; i /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, i));
    return value;
}
DEVICE float sum_of_four(float value) {  // lanes, from a multiple of four on
    UNROLL for (int i = 2; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    return value;
}
DEVICE float most_of_four(float value) {
    UNROLL for (int i = 2; i > 0; i /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, i));
    return value;
}
DEVICE int from_lane(int value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE u32 vote(bool is_so) { return __ballot_sync(~0u, is_so); }
DEVICE int first_bit(u32 bits) { return __ffs(bits) - 1; }
DEVICE int count_bits(u32 bits) { return __popc(bits); }

#endif

DEVICE int min_of(int a, int b) { return a < b ? a : b; }
DEVICE int max_of(int a, int b) { return a < b ? b : a; }
DEVICE u32 two_powers(int exponent) { return (127 + exponent) * 0x00800080u; }  // bfloat16
DEVICE float bfloat16(u32 bits) { return as_float(bits << 16); }
DEVICE float rounded(float value) { return bfloat16(to_bfloat16(value)); }
DEVICE u32 two_halves(float value) { return to_bfloat16(value) * 0x00010001u; }
DEVICE float minus_infinity() { return as_float(0xFF800000); }
