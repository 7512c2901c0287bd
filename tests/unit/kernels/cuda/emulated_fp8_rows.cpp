// flashdraft/kernels/cuda/quantized/fp8_rows.cu for a CPU.
#include "quantized/fp8_rows.cu"

extern "C" int shared_bytes() { return sizeof(Memory); }
extern "C" int argument_bytes() { return sizeof(Work); }
extern "C" void run(const Work *work, int num_blocks, int backwards) {
    is_backwards = backwards;
    run_blocks(num_blocks, TEAM, sizeof(Memory), [work] { multiply_coded(*work); });
}
