"""The driver and torch agree on the GPU that plan is made for."""

from __future__ import annotations

import pytest
import torch

from flashdraft.bench.plan.driver import current_device

pytestmark = pytest.mark.gpu


def test_the_driver_says_what_torch_says() -> None:
    found = current_device()
    assert found is not None
    free, total = torch.cuda.mem_get_info()
    assert (found.name, found.total_bytes) == (torch.cuda.get_device_name(), total)
    assert abs(found.free_bytes - free) < 0.05 * total
