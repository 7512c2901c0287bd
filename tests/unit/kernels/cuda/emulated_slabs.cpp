// flashdraft/kernels/cuda/experts/slabs.cu for a CPU.
#include "experts/slabs.cu"

extern "C" int shared_bytes() { return sizeof(Memory); }
extern "C" int argument_bytes() { return sizeof(Work); }
extern "C" void run(const Work *work, int num_blocks, int backwards) {
    is_backwards = backwards;
    run_blocks(num_blocks, 1, sizeof(Memory), [work] { multiply_slabs(*work); });
}
