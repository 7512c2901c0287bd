// flashdraft/kernels/cuda/quantized/many_rows.cu for a CPU.
#include "quantized/many_rows.cu"

extern "C" int shared_bytes() { return sizeof(Memory); }
extern "C" void run(const Work *work, int num_blocks) {
    run_blocks(num_blocks, 1, sizeof(Memory), [work] { multiply_many(*work); });
}
