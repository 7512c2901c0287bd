"""Kernels in CUDA C++ on a CPU: their own source, with emulated_gpu.h for a GPU."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.driver import FOLDER, Map
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import Quantized
from flashdraft.kernels.torch_backend import TorchKernels

HERE = Path(__file__).parent
REFERENCE = TorchKernels(torch.device("cpu"), torch.float32)
BUILT = tempfile.TemporaryDirectory(prefix="emulated-")  # gone with this process


@functools.cache
def build(name: str, *flags: tuple[str, int]) -> ctypes.CDLL:
    """A kernel as a library; without a C++ compiler the test is skipped."""
    file = "-".join([name, *(str(value) for _, value in flags)]) + ".so"
    library = Path(BUILT.name, file)
    definitions = [f"-D{key}={value}" for key, value in flags]
    definitions.append(f'-DEMULATED="{HERE / "emulated_gpu.h"}"')
    places = [f"-I{place}" for place in (FOLDER, FOLDER / "quantized")]
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", *places, *definitions]
    try:
        subprocess.run(
            [*command, str(HERE / f"emulated_{name}.cpp"), "-o", str(library)],
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no C++ compiler")
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stderr) from None
    return ctypes.CDLL(str(library))


def emulated_map(array: Tensor, box: tuple[int, int, int]) -> Map:
    """What emulated_warpgroups.h reads in the place of a card's map."""
    strides = 2 * array.stride(0), 2 * array.stride(1)
    sizes = array.shape[2], array.shape[1]
    return Map((array.data_ptr(), len(array), *strides, *box[:2], *sizes))


def check_product(
    found: Tensor,
    x: Tensor,
    weight: Quantized,
    activation: Activation | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Against the weight dequantised to such numbers."""
    expected = x.float() @ weight.dequantize(dtype).float().T
    if activation is not None:
        expected = REFERENCE.gated(expected.bfloat16().float(), activation)
    spread = float(expected.std())
    torch.testing.assert_close(found.float(), expected, atol=0.01 * spread, rtol=0.01)
