"""The one thing pyproject.toml cannot say: the native CPU kernels, compiled for this machine.

The extension is optional: without a C compiler the install succeeds and flashdraft runs its CPU
models on torch. `python setup.py build_ext --inplace` rebuilds the kernels in a checkout.
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
HEADERS = ("kernels", "vectors", "panels", "dot8", "rotate", "attention_tile", "pool")
FOLDER = "flashdraft/kernels/cpu/native"
CPU = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"

# No -ffast-math: the kernels promise a fixed order of every sum. gcc's first scheduling pass makes
# the inner loops run out of registers on aarch64.
FLAGS = ["-O3", CPU, "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fno-schedule-insns"]

setup(
    ext_modules=[
        Extension(
            "flashdraft.kernels.cpu._native",
            sources=[f"{FOLDER}/{name}.c" for name in SOURCES],
            depends=[f"{FOLDER}/{name}.h" for name in HEADERS],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
