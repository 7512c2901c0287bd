"""What pyproject.toml cannot say: how pictures are resized, and the native CPU kernels, the latter
once for each level of processors.

A level is a set of instructions beyond those that every machine of the architecture has. Each is an
extension module of its own, compiled from the same sources with its own flags; which one runs is
decided at import time (flashdraft/kernels/cpu/levels.py), so a wheel serves any machine. All are
optional: without a C compiler the install succeeds and flashdraft runs its CPU models on torch, and
a compiler that does not know a level leaves that one out.

`python setup.py build_ext --inplace` rebuilds the kernels in a checkout.
"""

import platform

from setuptools import Extension, setup

SOURCES = (
    "module",
    "linear_float",
    "linear_int8",
    "rows",
    "qkv",
    "attention",
    "attention_tile",
    "pool",
)
HEADERS = (
    "kernels",
    "vectors",
    "panels",
    "dot8",
    "products8",
    "rotate",
    "attention_tile",
    "pool",
)
PACKAGE = "flashdraft.kernels.cpu"
FOLDER = "flashdraft/kernels/cpu/native"

# The flags of each level, the slowest first; native/processor.c says which of them a machine runs.
AVX512 = ["-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mtune=cascadelake"]
X86_64 = {
    "sse2": ["-march=x86-64"],
    "avx2": ["-mavx2", "-mfma", "-mtune=haswell"],
    "avxvnni": ["-mavx2", "-mfma", "-mavxvnni", "-mtune=haswell"],
    "avx512": AVX512,
    "avx512vnni": [*AVX512, "-mavx512vnni"],
}
AARCH64 = {
    "neon": ["-march=armv8-a"],
    "dotprod": ["-march=armv8.2-a+dotprod"],
    "i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
}
ARCHITECTURES = {"x86_64": X86_64, "AMD64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}
LEVELS = ARCHITECTURES.get(platform.machine(), {"generic": []})

# No -ffast-math, and no product fused but where the source says so: the kernels promise a fixed
# order of every sum, and the same bits at every level. gcc's first scheduling pass makes the inner
# loops run out of registers on aarch64.
FLAGS = [
    "-O3",
    "-pthread",
    "-fvisibility=hidden",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-schedule-insns",
]
STABLE = ("Py_LIMITED_API", "0x030B0000")  # one build for Python 3.11 and newer


def level_extension(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"{PACKAGE}._native_{name}",
        sources=[f"{FOLDER}/{source}.c" for source in SOURCES],
        depends=[f"{FOLDER}/{header}.h" for header in HEADERS],
        define_macros=[STABLE, ("MODULE", f"_native_{name}")],
        extra_compile_args=[*FLAGS, *flags],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=True,
    )


resampling = Extension(
    "flashdraft.media._resampling",
    sources=["flashdraft/media/native/resample.c"],
    define_macros=[STABLE],
    extra_compile_args=FLAGS,
    py_limited_api=True,
    optional=True,
)

processor = Extension(
    f"{PACKAGE}._processor",
    sources=[f"{FOLDER}/processor.c"],
    depends=[f"{FOLDER}/detect.h"],
    define_macros=[STABLE],
    py_limited_api=True,
    optional=True,
)

if __name__ == "__main__":  # benchmarks/native_levels.py and the tests read the tables above
    levels = [level_extension(name, flags) for name, flags in LEVELS.items()]
    setup(
        ext_modules=[processor, resampling, *levels],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
