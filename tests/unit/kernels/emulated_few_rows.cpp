// flashdraft/kernels/cuda/few_rows.cu for a CPU.
#include "few_rows.cu"

extern "C" void run(const Work *work, int num_blocks, int shared_bytes) {
    int cluster = SLICES == 2 ? work->num_slices : 1;
    run_blocks(num_blocks, cluster, shared_bytes, [work] { multiply_few(*work); });
}
