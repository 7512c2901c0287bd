"""Which backend a device and a dtype get, and what is said where the best one is missing."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.kernels.cpu import backend as cpu_backend
from flashdraft.kernels.kinds import Scheme, WeightOptions
from flashdraft.kernels.select import select_kernels
from flashdraft.kernels.torch_backend import TorchKernels


class FakeCpuKernels:
    """The native backend's face, for machines without a C compiler."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, quantize: bool) -> None:
        self.name = "cpu-int8" if quantize else "cpu-float32"


class FakeTritonKernels:
    """The Triton backend's face, for machines without Triton."""

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool,
        quantize: Scheme | None,
        quantize_head: Scheme | None,
        activations: Scheme | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.exact = exact
        self.schemes = quantize, quantize_head
        self.activations = activations


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "available", lambda: True)
    monkeypatch.setattr(cpu_backend, "CpuKernels", FakeCpuKernels)


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "available", lambda: False)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("triton_backend")
    module.TritonKernels = FakeTritonKernels
    module.why_no_fp8 = lambda device: None
    monkeypatch.setitem(sys.modules, "flashdraft.kernels.cuda.backend", module)


@pytest.mark.usefixtures("no_cuda", "native")
@pytest.mark.parametrize(
    ("dtype", "name"), [("auto", "cpu-int8"), ("int8", "cpu-int8"), ("float32", "cpu-float32")]
)
def test_native_kernels_on_the_cpu(dtype: str, name: str) -> None:
    assert select_kernels("auto", dtype).name == name
    assert select_kernels(torch.device("cpu"), dtype).name == name


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_the_cpu_is_plain_torch(dtype: str) -> None:
    kernels = select_kernels("cpu", dtype)
    assert isinstance(kernels, TorchKernels)
    assert kernels.dtype == getattr(torch, dtype)


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_without_native_kernels_a_warning_names_the_remedy(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = select_kernels("cpu", dtype)
    assert isinstance(kernels, TorchKernels)
    assert kernels.dtype == torch.float32
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "install a C compiler" in warning.getMessage()


@pytest.mark.usefixtures("no_native")
def test_int8_without_native_kernels_is_an_error() -> None:
    with pytest.raises(FlashdraftError, match="install a C compiler.*dtype='float32'"):
        select_kernels("cpu", "int8")


@pytest.mark.usefixtures("cuda", "triton", "native")
def test_cuda_comes_first_and_defaults_to_bfloat16() -> None:
    kernels = select_kernels("auto", "auto")
    assert (kernels.name, kernels.device, kernels.dtype) == (
        "triton",
        torch.device("cuda", 1),
        torch.bfloat16,
    )
    assert select_kernels("cuda:0", "float16").device == torch.device("cuda", 0)
    assert select_kernels("cuda", "float32").dtype == torch.float32


@pytest.mark.usefixtures("cuda")
def test_without_triton_cuda_falls_back_to_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashdraft.kernels.cuda.backend", None)
    kernels = select_kernels("cuda", "auto")
    assert isinstance(kernels, TorchKernels)
    assert (kernels.device.type, kernels.dtype) == ("cuda", torch.bfloat16)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "flashdraft[gpu]" in warning.getMessage()


@pytest.mark.usefixtures("cuda", "triton")
def test_an_old_gpu_falls_back_to_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert isinstance(select_kernels("cuda", "auto"), TorchKernels)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "capability 7.5" in warning.getMessage() and "8.0" in warning.getMessage()
    with pytest.raises(RequestError, match="exact=True.*7.5.*device='cpu'"):
        select_kernels("cuda", "auto", exact=True)


@pytest.mark.usefixtures("cuda", "triton")
def test_exact_reaches_the_gpu_kernels() -> None:
    kernels: Any = select_kernels("cuda", "auto", exact=True)
    assert kernels.exact
    kernels = select_kernels("cuda", "auto")
    assert not kernels.exact


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_cpu_is_exact_in_any_case(dtype: str) -> None:
    assert type(select_kernels("cpu", dtype, exact=True)) is type(select_kernels("cpu", dtype))


@pytest.mark.usefixtures("cuda")
def test_exact_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashdraft.kernels.cuda.backend", None)
    with pytest.raises(RequestError, match="exact=True.*flashdraft\\[gpu\\].*device='cpu'"):
        select_kernels("cuda", "auto", exact=True)


@pytest.mark.usefixtures("cuda")
def test_int8_on_cuda_is_an_error() -> None:
    with pytest.raises(RequestError, match="int8.*device='cpu'"):
        select_kernels("cuda", "int8")


@pytest.mark.usefixtures("cuda", "triton")
def test_a_missing_second_gpu_is_an_error() -> None:
    with pytest.raises(RequestError, match="there are 2 CUDA devices"):
        select_kernels("cuda:2", "auto")


@pytest.mark.usefixtures("no_cuda")
def test_cuda_without_a_device_is_an_error() -> None:
    with pytest.raises(RequestError, match="no CUDA device.*device='cpu'"):
        select_kernels("cuda", "auto")


@pytest.mark.parametrize("device", ["gpu", "meta", "", "cuda:x"])
def test_unknown_devices_are_errors(device: str) -> None:
    with pytest.raises(RequestError, match="must be auto, cpu or cuda"):
        select_kernels(device, "auto")


@pytest.mark.parametrize("dtype", ["int4", "float64", "torch.float32", ""])
def test_unknown_dtypes_are_errors(dtype: str) -> None:
    with pytest.raises(RequestError, match="float32, bfloat16, float16, int8"):
        select_kernels("cpu", dtype)


@pytest.mark.usefixtures("cuda", "triton")
def test_quantize_reaches_the_gpu_kernels() -> None:
    kernels: Any = select_kernels(
        "cuda", "auto", weights=WeightOptions(quantize="int4", quantize_head="fp8")
    )
    assert kernels.schemes == (Scheme.INT4, Scheme.FP8)
    kernels = select_kernels("cuda", "auto", weights=WeightOptions(quantize_head="int8"))
    assert kernels.schemes == (None, Scheme.INT8)


@pytest.mark.usefixtures("native")
def test_quantize_on_the_cpu_names_the_dtype() -> None:
    with pytest.raises(RequestError, match="quantize is 'int8'.*GPU.*dtype='int8'"):
        select_kernels("cpu", "auto", weights=WeightOptions(quantize="int8"))
    with pytest.raises(RequestError, match="quantize_head is 'fp8'.*dtype"):
        select_kernels("cpu", "auto", weights=WeightOptions(quantize_head="fp8"))


@pytest.mark.parametrize("value", ["int6", "4", "", "INT4", 4, ["int4"]])
def test_unknown_schemes_are_errors_on_any_device(value: Any) -> None:
    with pytest.raises(RequestError, match="quantize is .*; it must be one of int4, int8, fp8"):
        select_kernels("cpu", "auto", weights=WeightOptions(quantize=value))
    with pytest.raises(RequestError, match="quantize_head is .*; it must be one of"):
        select_kernels("cpu", "auto", weights=WeightOptions(quantize_head=value))


@pytest.mark.usefixtures("cuda", "triton")
@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.INT8])
def test_activations_reach_the_gpu_kernels(scheme: Scheme) -> None:
    weights = WeightOptions(quantize=scheme, activations=scheme)
    kernels: Any = select_kernels("cuda", "auto", weights=weights)
    assert kernels.activations is scheme
    kernels = select_kernels("cuda", "auto", exact=True, weights=weights)
    assert kernels.exact and kernels.activations is scheme


@pytest.mark.usefixtures("cuda", "triton")
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (WeightOptions(activations="fp8"), "goes with quantize='fp8'.*quantize is left out"),
        (WeightOptions("int4", None, "fp8"), "goes with quantize='fp8'.*quantize is 'int4'"),
        (WeightOptions("fp8", None, "int8"), "goes with quantize='int8'.*quantize is 'fp8'"),
        (WeightOptions("int4", None, "int4"), "activations is 'int4'; it must be one of fp8, int8"),
    ],
)
def test_activations_that_do_not_go_with_weights_are_errors(
    weights: WeightOptions, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        select_kernels("cuda", "auto", weights=weights)


@pytest.mark.usefixtures("cuda", "triton")
def test_activations_in_fp8_need_a_card_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    backend = sys.modules["flashdraft.kernels.cuda.backend"]
    monkeypatch.setattr(backend, "why_no_fp8", lambda device: "this GPU has none")
    with pytest.raises(RequestError, match="activations is 'fp8', but this GPU has none.*int8"):
        select_kernels("cuda", "auto", weights=WeightOptions("fp8", None, "fp8"))
    select_kernels("cuda", "auto", weights=WeightOptions("int8", None, "int8"))


@pytest.mark.usefixtures("native")
def test_activations_on_the_cpu_name_the_dtype() -> None:
    with pytest.raises(RequestError, match="activations is 'fp8'.*GPU.*dtype='int8'"):
        select_kernels("cpu", "auto", weights=WeightOptions(activations="fp8"))
    with pytest.raises(RequestError, match="quantize is 'fp8'.*GPU.*dtype='int8'"):
        select_kernels("cpu", "auto", weights=WeightOptions("fp8", None, "fp8"))


@pytest.mark.usefixtures("cuda")
def test_quantize_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashdraft.kernels.cuda.backend", None)
    with pytest.raises(RequestError, match=r"quantize needs.*flashdraft\[gpu\].*leave it out"):
        select_kernels("cuda", "auto", weights=WeightOptions(quantize="int4"))


@pytest.mark.usefixtures("native")
def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flashdraft"):
        select_kernels("cpu", "float32")
    assert "cpu-float32 on cpu" in caplog.text
