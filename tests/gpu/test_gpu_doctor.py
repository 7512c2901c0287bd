"""Doctor's check of the kernels on a GPU that is healthy: it finds nothing."""

from __future__ import annotations

import pytest

from flashdraft.bench.doctor.checks import check_kernels
from flashdraft.bench.doctor.report import OK
from flashdraft.engine.config import CacheOptions
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.select import select_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("exact", [False, True])
def test_every_kernel_agrees_with_torch(exact: bool) -> None:
    schemes = (Scheme.INT4, Scheme.INT8, Scheme.FP8)
    kernels, cache = select_kernels("cuda", "bfloat16", exact), CacheOptions(kv_keys="rebuilt")
    [finding] = check_kernels(kernels, schemes, cache)
    assert finding.status == OK, finding.text
