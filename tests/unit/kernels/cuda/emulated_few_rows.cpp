// flashdraft/kernels/cuda/quantized/few_rows.cu for a CPU.
#include "quantized/few_rows.cu"

extern "C" void run(const Work *work, int num_blocks, int shared_bytes) {
    run_blocks(num_blocks, 1, shared_bytes, [work] { multiply_few(*work); });
}
