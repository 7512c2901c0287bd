"""What the tests on a GPU share: a seed, and lines that are shown whatever pytest captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines to show when the module is done, whatever pytest captures."""
    lines: list[str] = []
    yield lines
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\n" + "\n".join([torch.cuda.get_device_name(), *lines]))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
