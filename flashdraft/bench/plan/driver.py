"""The GPU of this machine, asked of its driver by the C interface: loading torch takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from ctypes import byref, c_int, c_size_t, c_void_p, create_string_buffer
from pathlib import Path
from typing import NamedTuple

from flashdraft.errors import FlashdraftError

_LIBRARY = "libcuda.so.1"
_MAX_NAME = 256


class Device(NamedTuple):
    """A GPU, with what the driver says of its memory now."""

    name: str
    total_bytes: int
    free_bytes: int


def current_device() -> Device | None:
    """The GPU that torch takes first; None where there is none, or torch was built without CUDA."""
    if not _torch_has_cuda():
        return None
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:  # no driver
        return None
    count = c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(byref(count)) or not count.value:
        return None
    return _describe(driver)


def _describe(driver: ctypes.CDLL) -> Device:
    device, name = c_int(), create_string_buffer(_MAX_NAME)
    _check(driver.cuDeviceGet(byref(device), 0))
    _check(driver.cuDeviceGetName(name, _MAX_NAME, device))
    # as torch has it: what is free beside the context that any process on the GPU needs
    context, free, total = c_void_p(), c_size_t(), c_size_t()
    _check(driver.cuDevicePrimaryCtxRetain(byref(context), device))
    try:
        _check(driver.cuCtxPushCurrent_v2(context))
        try:
            _check(driver.cuMemGetInfo_v2(byref(free), byref(total)))
        finally:
            _check(driver.cuCtxPopCurrent_v2(byref(context)))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
    return Device(name.value.decode("utf-8", "replace"), total.value, free.value)


def _check(status: int) -> None:
    if status:
        raise FlashdraftError(
            f"The GPU's driver does not say what memory is free (CUDA error {status}). Name the "
            "card with --gpu, or end other programs on it."
        )


def _torch_has_cuda() -> bool:
    """What torch.version.cuda says, read from its file."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return False
    version = Path(found.submodule_search_locations[0], "version.py")
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None
