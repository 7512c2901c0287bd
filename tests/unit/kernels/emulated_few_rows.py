"""cuda/few_rows.cu on a CPU: the kernel's own source, with emulated_gpu.h for a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


@functools.cache
def build(*flags: tuple[str, int]) -> ctypes.CDLL:
    """The kernel as a library; without a C++ compiler the test is skipped."""
    folder = tempfile.mkdtemp(prefix="few-rows-")
    library = Path(folder, "few_rows.so")
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


@contextmanager
def nothing_written() -> Iterator[None]:
    """New tensors are not numbers until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what is empty
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


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
    arrivals = torch.zeros(256, dtype=torch.int32)
    with nothing_written():
        work, sizes, output, parts = prepare(x, weight, product, plan, arrivals, experts)
    assert math.isnan(float(output.flatten()[0])) and int(parts[0]) == 255
    flags = make_flags(product, plan, activation)
    build(*flags.items()).run(ctypes.byref(work), plan.num_blocks, sizes.shared_bytes)
    assert not arrivals.any()
    return output
