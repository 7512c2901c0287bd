"""Kernels in CUDA C++, compiled where they run: by NVRTC, which comes with torch, for this card.

The driver loads and launches them. Both are called by their C interfaces: there is no compiler to
install and nothing to build. Where NVRTC is not found, callers have another way.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from flashdraft.errors import FlashdraftError
from flashdraft.kernels.cuda.card import capability_of

FOLDER = Path(__file__).parent
log = logging.getLogger(__name__)

_MAX_SHARED_BYTES, _SHARED_PERCENT = 8, 9  # CU_FUNC_ATTRIBUTE_…
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_…
_BFLOAT16, _EXCHANGED_128, _PROMOTED_256 = 9, 3, 3  # CU_TENSOR_MAP_…


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_uint), ("filler", c_uint), ("value", c_int * 16)]


class _Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    ]


class Map(ctypes.Structure):
    """Where an array lies, for copies that a kernel leaves to the card (warpgroups.h)."""

    _fields_ = [("words", c_uint64 * 16)]


@functools.lru_cache(maxsize=4096)
def _encode_map(
    place: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """Sizes, bytes from one to the next and what is copied at a time; the innermost comes first."""
    rank, aligned = len(sizes), ctypes.create_string_buffer(128 + 64)
    target = ctypes.addressof(aligned) + -ctypes.addressof(aligned) % 64
    _check(
        _driver().cuTensorMapEncodeTiled(
            c_void_p(target),
            _BFLOAT16,
            c_uint(rank),
            c_void_p(place),
            (c_uint64 * rank)(*sizes),
            (c_uint64 * rank)(*strides),
            (c_uint * rank)(*box),
            (c_uint * rank)(*[1] * rank),
            0,  # numbers lie one after the other
            _EXCHANGED_128,
            _PROMOTED_256,
            0,  # beyond the array there are zeros
        )
    )
    return ctypes.string_at(target, 128)


def make_map(array: Tensor, box: tuple[int, ...]) -> Map:
    """For copies of boxes of an array of bfloat16 with three to five dimensions, rows of 128 bytes.

    Its last dimension's numbers lie side by side. An array without values lies nowhere.
    """
    if array.device.type == "meta":
        return Map()
    _bind(array.device)
    strides = [array.itemsize * stride for stride in array.stride()[:-1]]
    sizes = tuple(array.shape[::-1]), tuple(strides[::-1]), tuple(box[::-1])
    return Map.from_buffer_copy(_encode_map(array.data_ptr(), *sizes))


class Kernel:
    """A kernel with one argument, a struct."""

    def __init__(self, binary: bytes, name: str, device: torch.device) -> None:
        _bind(device)
        self._device, self._module, self._function = device, c_void_p(), c_void_p()
        _check(_driver().cuModuleLoadData(byref(self._module), binary))
        _check(_driver().cuModuleGetFunction(byref(self._function), self._module, name.encode()))
        # A processor cannot change how much of its memory is shared while a kernel runs on it: the
        # next one would wait for its end.
        _check(_driver().cuFuncSetAttribute(self._function, _SHARED_PERCENT, 100))
        self._max_shared_bytes = 48 << 10  # unless it is raised

    @staticmethod
    @functools.cache
    def load(file: str, name: str, device: torch.device, *flags: tuple[str, int]) -> Kernel:
        """A kernel of a file in FOLDER for a device, compiled at its first use ever."""
        return Kernel(compile_once(file, dict(flags), device), name, device)

    def launch(
        self,
        num_blocks: int,
        num_threads: int,
        shared_bytes: int,
        argument: ctypes.Structure,
        overlaps: bool,
    ) -> None:
        """Launch on torch's current stream; `overlaps` as in overlap.py."""
        settings = self._configure(num_blocks, num_threads, shared_bytes, overlaps)
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        _check(_driver().cuLaunchKernelEx(byref(settings), self._function, arguments, None))

    def _configure(
        self, num_blocks: int, num_threads: int, shared_bytes: int, overlaps: bool
    ) -> _Configuration:
        _bind(self._device)
        if shared_bytes > self._max_shared_bytes:
            _check(_driver().cuFuncSetAttribute(self._function, _MAX_SHARED_BYTES, shared_bytes))
            self._max_shared_bytes = shared_bytes
        attributes = [_Attribute(_OVERLAPS, 0, (1,))] if overlaps else []
        return _Configuration(
            (num_blocks, 1, 1),
            (num_threads, 1, 1),
            shared_bytes,
            torch.cuda.current_stream(self._device).cuda_stream,
            (_Attribute * 1)(*attributes),
            len(attributes),
        )


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether kernels of this kind run on a device: CUDA's, from Ampere on, that NVRTC knows.

    One is compiled and loaded to find out: parts of NVRTC may be missing, or newer than the driver.
    """
    nvrtc, capability = _find_nvrtc(), capability_of(device)
    if capability is None:
        return False
    if nvrtc is None:
        log.warning("NVRTC, which comes with torch for CUDA, is not found: Triton takes its place.")
        return False
    count = c_int()
    nvrtc.nvrtcGetNumSupportedArchs(byref(count))
    known = (c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    if capability.major < 8 or 10 * capability.major + capability.minor not in known:
        return False
    try:
        Kernel.load("probe.cu", "probe", device)
    except (FlashdraftError, RuntimeError, OSError) as error:
        log.warning("NVRTC is there but of no use, so Triton takes its place: %s", error)
        return False
    return True


def name_architecture(major: int, minor: int) -> str:
    """As NVRTC knows it; Hopper's with what no later card has (warpgroups.h)."""
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def compile_source(name: str, flags: Mapping[str, int], architecture: str) -> bytes:
    """The machine code of a file in FOLDER, with these definitions."""
    nvrtc = _find_nvrtc()
    if nvrtc is None:
        raise FlashdraftError("NVRTC, which comes with torch for CUDA, is not found.")
    headers = sorted(FOLDER.rglob("*.h"))
    names = (c_char_p * len(headers))(*(path.name.encode() for path in headers))
    texts = (c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    source, program = (FOLDER / name).read_bytes(), c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        byref(program), source, name.encode(), len(headers), texts, names
    )
    if made:
        raise FlashdraftError(f"NVRTC refuses {name} with status {made}.")
    try:
        options = [f"-D{key}={value}".encode() for key, value in flags.items()]
        options += [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        failed = nvrtc.nvrtcCompileProgram(
            program, len(options), (c_char_p * len(options))(*options)
        )
        said = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        words = said.rstrip(b"\0\n ").decode(errors="replace")
        if failed:
            raise FlashdraftError(f"{name} does not compile: {words}")
        if words:
            log.info("%s: %s", name, words)
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def compile_once(name: str, flags: Mapping[str, int], device: torch.device) -> bytes:
    """`compile_source` for a device, remembered in Triton's cache on disk."""
    nvrtc, capability, version = _find_nvrtc(), capability_of(device), (c_int(), c_int())
    assert nvrtc is not None and capability is not None
    architecture = name_architecture(*capability)
    nvrtc.nvrtcVersion(*map(byref, version))
    texts = [path.read_bytes() for kind in ("*.cu", "*.h") for path in sorted(FOLDER.rglob(kind))]
    key = repr((name, sorted(flags.items()), architecture, [part.value for part in version], texts))
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    file = f"{Path(name).stem}.cubin"
    if (path := cache.get_file(file)) is None:
        path = cache.put(compile_source(name, flags, architecture), file)
    return Path(path).read_bytes()


def _read(size_of: Callable[..., int], read: Callable[..., int], program: c_void_p) -> bytes:
    size = c_size_t()
    size_of(program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


def _bind(device: torch.device) -> None:
    """Make sure that this thread has a context, as torch gives it one at first use.

    Where there are several devices, the caller has made this one the current one.
    """
    driver, context = _driver(), c_void_p()
    _check(driver.cuCtxGetCurrent(byref(context)))
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(byref(context), device.index or 0))
        _check(driver.cuCtxSetCurrent(context))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def _find_nvrtc() -> ctypes.CDLL | None:
    """The library that torch came with, or one that was installed beside it; else the system's."""
    major = (torch.version.cuda or "*").partition(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parents[1]
    found = [*packages.glob(f"nvidia/*/lib/{name}"), *packages.glob(f"torch/lib/{name}")]
    for candidate in (*sorted(map(str, found)), name):
        with suppress(OSError):
            return ctypes.CDLL(candidate)
    return None


def _check(status: int) -> None:
    if status:
        text = c_char_p()
        _driver().cuGetErrorString(status, byref(text))
        words = (text.value or b"unknown").decode()
        raise RuntimeError(f"CUDA error {status}: {words}")
