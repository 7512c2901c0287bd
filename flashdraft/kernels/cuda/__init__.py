"""The CUDA backend: Triton and CUDA C++, the sources of a kernel beside its launcher."""
