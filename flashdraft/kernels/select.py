"""The one place where a backend is chosen, from a device and a dtype. Nobody else asks which."""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager

import torch

from flashdraft.errors import RequestError, did_you_mean
from flashdraft.kernels.cpu import backend as cpu_backend
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.kinds import AS_STORED, DTYPES, Scheme, WeightOptions
from flashdraft.kernels.torch_backend import TorchKernels

_HOW_TO_BUILD = "install a C compiler (gcc or clang) and reinstall flashdraft"
_TRITON_BACKEND = "flashdraft.kernels.cuda.backend"
_AHEAD = "flashdraft.kernels.cuda.ahead"
_LEAST_CAPABILITY = (8, 0)  # bfloat16 tensor cores and asynchronous copies
_log = logging.getLogger(__name__)


def weights_of(kernels: Kernels) -> WeightOptions:
    """What these kernels make of a target's float weights."""
    schemes = (kernels.quantize, kernels.quantize_head, kernels.activations)
    return WeightOptions(*(None if scheme is None else scheme.value for scheme in schemes))


def select_kernels(
    device: str | torch.device,
    dtype: str,
    exact: bool = False,
    weights: WeightOptions = AS_STORED,
) -> Kernels:
    """The fastest backend for a device and a dtype; "auto" takes the best there is.

    `exact`: a row's bits depend on nothing but its own past, at some cost on a GPU. On the CPU they
    never do. `weights`: what float weights become on a GPU.
    """
    if dtype not in DTYPES:
        meant = did_you_mean(dtype, DTYPES) if isinstance(dtype, str) else ""
        raise RequestError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.{meant}")
    resolved = check_weights(device, weights)
    if resolved.type == "cuda":
        kernels = _select_cuda(resolved, dtype, exact, weights)
    else:
        kernels = _select_cpu(resolved, dtype)
    _log.info("kernels: %s on %s, %s", kernels.name, kernels.device, kernels.dtype)
    return kernels


def check_weights(device: str | torch.device, weights: WeightOptions) -> torch.device:
    """The device, if weights can become there what the options say. Costs no memory of a GPU."""
    resolved = _resolve_device(device)
    if resolved.type == "cpu" and weights.schemes() == (None, None) and weights.activations:
        raise RequestError(
            f"activations is {weights.activations!r}, which is for a GPU's tensor cores. On the "
            "CPU dtype='int8' rounds weights and activations to 8 bits; leave activations out."
        )
    weights.rounded()
    if resolved.type == "cpu" and weights.schemes() != (None, None):
        name, value = next(one for one in weights._asdict().items() if one[1] is not None)
        found = "no GPU was found here" if device == "auto" else "the device is the CPU"
        raise RequestError(
            f"{name} is {value!r}, which is for weights on a GPU; {found}. On the CPU dtype alone "
            "decides: dtype='int8' for weights in 8 bits, or 'float32'. flashdraft plan names the "
            "models that this machine can run."
        )
    return resolved


def _resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"device is {device!r}; it must be auto, cpu or cuda.") from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise RequestError(f"device is {str(device)!r}; it must be auto, cpu or cuda.")
    if not torch.cuda.is_available():
        raise RequestError(
            f"device is {str(device)!r}, but torch finds no CUDA device; use device='cpu', or "
            "install an NVIDIA driver and a CUDA build of torch."
        )
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise RequestError(
            f"device is {str(device)!r}, but there are {torch.cuda.device_count()} CUDA devices, "
            "counted from cuda:0."
        )
    return torch.device("cuda", index)


def _select_cuda(
    device: torch.device,
    dtype: str,
    exact: bool,
    weights: WeightOptions,
) -> Kernels:
    quantize, quantize_head = weights.schemes()
    if dtype == "int8":
        raise RequestError(
            "dtype is 'int8', which runs on the CPU only; with this device use quantize='int8', "
            "or device='cpu'."
        )
    float_dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    if (quantize or quantize_head) and float_dtype is not torch.bfloat16:
        raise RequestError(
            f"quantize is given with dtype {dtype!r}, but weights in few bits are multiplied in "
            "bfloat16; use dtype='bfloat16', or leave quantize out."
        )
    missing = _why_no_triton(device)
    if missing is not None:
        if exact:
            raise RequestError(
                f"exact=True needs flashdraft's own GPU kernels, but {missing}; use exact=False, "
                "or device='cpu', which is always exact."
            )
        if quantize or quantize_head:
            raise RequestError(
                f"quantize needs flashdraft's own GPU kernels, but {missing}; leave it out, or use "
                "device='cpu'."
            )
        _log.warning("Falling back to plain torch, which is slow: %s.", missing)
        return TorchKernels(device, float_dtype)
    backend = importlib.import_module(_TRITON_BACKEND)
    activations = weights.rounded()
    if activations is Scheme.FP8 and (why := backend.why_no_fp8(device)):
        raise RequestError(
            f"activations is 'fp8', but {why}, or quantize='int8' with activations='int8'."
        )
    kernels: Kernels = backend.TritonKernels(
        device, float_dtype, exact, quantize, quantize_head, activations
    )
    return kernels


def compiling_only(capability: tuple[int, int], num_threads: int) -> AbstractContextManager[None]:
    """Launch nothing from now on: kernels are compiled for a card, by so many threads.

    Tensors have no values then (torch's device "meta"), and there is no way back.
    """
    ahead = importlib.import_module(_AHEAD)
    compiling: AbstractContextManager[None] = ahead.compiling_only(capability, num_threads)
    return compiling


def _why_no_triton(device: torch.device) -> str | None:
    """What keeps the Triton kernels from running on this device, with the remedy."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, c)) for c in (capability, _LEAST_CAPABILITY))
        return (
            f"this GPU has compute capability {found} and flashdraft's kernels need {least} "
            "(Ampere) or newer; use a newer GPU"
        )
    try:  # Triton is an optional dependency, and slow to import where it is not needed
        importlib.import_module(_TRITON_BACKEND)
    except ImportError as error:
        remedy = "install it with `pip install 'flashdraft[gpu]'`"
        return f"Triton cannot be imported ({error}); {remedy}"
    return None


def _select_cpu(device: torch.device, dtype: str) -> Kernels:
    if dtype in ("bfloat16", "float16"):
        return TorchKernels(device, getattr(torch, dtype))
    if cpu_backend.available():
        return cpu_backend.CpuKernels(quantize=dtype != "float32")
    if dtype == "int8":
        raise RequestError(
            "dtype is 'int8', but flashdraft's native CPU kernels were not built; "
            f"{_HOW_TO_BUILD}, or use dtype='float32'."
        )
    _log.warning(
        "flashdraft's native CPU kernels were not built: running plain torch in float32, several "
        "times slower; %s.",
        _HOW_TO_BUILD,
    )
    return TorchKernels(device, torch.float32)
