// Nothing: it shows that kernels can be compiled and loaded here.

extern "C" __global__ void probe() {}
