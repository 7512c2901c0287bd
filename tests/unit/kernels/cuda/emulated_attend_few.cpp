// flashdraft/kernels/cuda/attention/attend_few.cu for a CPU.
#include "attention/attend_few.cu"

extern "C" int shared_bytes() { return sizeof(Memory); }
extern "C" int argument_bytes() { return sizeof(Work); }
extern "C" void run(const Work *work, int num_blocks) {
    run_blocks(num_blocks, SPLITS, sizeof(Memory), [work] { attend_few(*work); });
}
