"""The tests of the native kernels run at every level that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashdraft.kernels.cpu import levels


@pytest.fixture(autouse=True, params=levels.runnable() or [None])
def level(request: pytest.FixtureRequest) -> Iterator[str | None]:
    levels.use(request.param)
    yield request.param
    levels.use(None)
