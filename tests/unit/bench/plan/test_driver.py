"""The GPU that the driver names: what plan reads of it, over a driver that is none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from flashdraft.bench.plan import driver
from flashdraft.bench.plan.machine import this_machine
from flashdraft.errors import FlashdraftError

TOTAL, FREE = 143771 * 2**20, 100 * 10**9


class Driver:
    """The C functions that are called, by their names there."""

    def __init__(self, num_devices: int = 1, status: int = 0) -> None:
        self.num_devices, self.status = num_devices, status
        self.num_retained = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.num_devices
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        assert index == 0
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.num_retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.num_retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = FREE, TOTAL
        return self.status


def use(monkeypatch: pytest.MonkeyPatch, fake: Driver, has_cuda: bool = True) -> Driver:
    monkeypatch.setattr(driver, "_torch_has_cuda", lambda: has_cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    return fake


def test_the_card_is_that_of_the_table_with_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = use(monkeypatch, Driver())
    card = this_machine()
    assert (card.title, card.memory_bytes, card.free_bytes) == ("NVIDIA H200", TOTAL, FREE)
    assert card.bandwidth_tb_s == 4.8 and not card.is_cpu
    assert fake.num_retained == 0


@pytest.mark.parametrize(("num_devices", "has_cuda"), [(0, True), (1, False)])
def test_without_a_gpu_that_torch_can_use_it_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, has_cuda: bool
) -> None:
    use(monkeypatch, Driver(num_devices), has_cuda)
    assert this_machine().is_cpu


def test_without_a_driver_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(driver, "_LIBRARY", "libno-such-driver.so.1")
    assert this_machine().is_cpu


def test_a_driver_that_refuses_is_an_error_and_gives_the_context_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = use(monkeypatch, Driver(status=2))
    with pytest.raises(FlashdraftError, match=r"CUDA error 2.*--gpu"):
        this_machine()
    assert fake.num_retained == 0


def test_what_torch_was_built_with_is_read_from_its_file() -> None:
    assert driver._torch_has_cuda() == (torch.version.cuda is not None)
