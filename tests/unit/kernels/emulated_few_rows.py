"""cuda/few_rows.cu on a CPU: the kernel's own source, with emulated_gpu.h for a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda_driver import FOLDER
from flashdraft.kernels.cuda_few_rows import (
    Experts,
    FewPlan,
    describe_product,
    make_flags,
    prepare,
)
from flashdraft.kernels.interface import Activation
from flashdraft.kernels.triton_quantized_layout import PackedWeight

HERE = Path(__file__).parent
BUILT = tempfile.TemporaryDirectory(prefix="few-rows-")  # gone with this process


@functools.cache
def build(*flags: tuple[str, int]) -> ctypes.CDLL:
    """The kernel as a library; without a C++ compiler the test is skipped."""
    library = Path(BUILT.name, "-".join(str(value) for _, value in flags)).with_suffix(".so")
    definitions = [f"-D{key}={value}" for key, value in flags]
    definitions.append(f'-DEMULATED="{HERE / "emulated_gpu.h"}"')
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{FOLDER}", *definitions]
    try:
        subprocess.run(
            [*command, str(HERE / "emulated_few_rows.cpp"), "-o", str(library)],
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no C++ compiler")
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stderr) from None
    return ctypes.CDLL(str(library))


def multiply(
    x: Tensor,
    weight: PackedWeight,
    plan: FewPlan,
    activation: Activation | None = None,
    experts: Experts | None = None,
) -> Tensor:
    """What `launch` launches."""
    product = describe_product(weight, activation is not None, experts)
    assert product is not None
    arrivals = torch.zeros(1024, dtype=torch.int32)
    work, sizes, output, parts = prepare(x, weight, product, plan, arrivals, experts)
    output.fill_(math.nan)  # until it is written
    guarded = torch.full((parts.numel() + 4096,), 255, dtype=torch.uint8)
    work.parts = guarded.data_ptr()
    flags = make_flags(product, plan, activation)
    build(*flags.items()).run(ctypes.byref(work), plan.num_blocks, sizes.shared_bytes)
    assert not arrivals.any() and bool((guarded[parts.numel() :] == 255).all())
    return output
